use std::sync::Arc;

use super::CUDA_SINGLE_KERNEL_ROWS;
use crate::gpu_tests::{lock_first_gpu, prepare_row_or_skip_unsupported};
use crate::kernel_tests::assert_launches_match_kernel_parameters;
use crate::transformer::components::{LanguageModelKernel, SingleKernelProblem};
use crate::transformer::shape::LanguageModelShape;
use kernelgate::backend::{LaunchableProblem, PrepareFunction};
use kernelgate::verify::{
    ErrorBoundsOfOutputs, launch_again_and_compare_bits, launch_again_on_poisoned_outputs,
    launch_twice_and_compare_with_reference,
};
use kernelgate::workload::{Dtype, Problem, Tensors};
use kernelgate_cuda::Device;

/// A test model whose heads do not begin at whole packets of element pairs, and whose score rows
/// are not aligned to groups of keys.
const UNALIGNED_HEADS_AND_ROWS: LanguageModelShape = LanguageModelShape {
    vocabulary_size: 1003,
    model_width: 40,
    swiglu_hidden_width: 104,
    layers: 1,
    heads: 4,
    context_tokens: 37,
    batch: 3,
    dtype: Dtype::Bf16,
};

/// A test model with more tokens than a block holds, many occurrences of each token, and two blocks
/// of columns.
const MANY_OCCURRENCES_OF_EACH_TOKEN: LanguageModelShape = LanguageModelShape {
    vocabulary_size: 13,
    model_width: 776,
    swiglu_hidden_width: 8,
    heads: 1,
    context_tokens: 701,
    batch: 3,
    ..UNALIGNED_HEADS_AND_ROWS
};

/// A test model with heads of 80 elements, for which one block sums the gradients of several gains.
const HEADS_OF_80_ELEMENTS: LanguageModelShape = LanguageModelShape {
    vocabulary_size: 515,
    model_width: 2560,
    swiglu_hidden_width: 264,
    heads: 32,
    context_tokens: 130,
    batch: 9,
    ..UNALIGNED_HEADS_AND_ROWS
};

const ONE_TOKEN_IN_ONE_SEQUENCE: LanguageModelShape =
    LanguageModelShape { context_tokens: 1, batch: 1, ..UNALIGNED_HEADS_AND_ROWS };

fn problems_of_all_language_model_kernels(
    shape: LanguageModelShape,
) -> impl Iterator<Item = SingleKernelProblem> {
    LanguageModelKernel::ALL_KERNELS
        .into_iter()
        .map(move |component| SingleKernelProblem { tested_kernel: component, shape })
}

#[test]
fn single_kernel_launches_have_the_arguments_of_their_kernels() {
    for problem in [
        UNALIGNED_HEADS_AND_ROWS,
        MANY_OCCURRENCES_OF_EACH_TOKEN,
        HEADS_OF_80_ELEMENTS,
        ONE_TOKEN_IN_ONE_SEQUENCE,
    ]
    .into_iter()
    .flat_map(problems_of_all_language_model_kernels)
    {
        for row in CUDA_SINGLE_KERNEL_ROWS.iter().filter(|row| (row.supports)(&problem).is_ok()) {
            let PrepareFunction::Program(write, _) = row.prepare else {
                panic!("{}", row.implementation_name)
            };
            let program = write(&problem);
            assert_eq!(program.check(), Ok(()), "{problem:?}");
            assert_launches_match_kernel_parameters(&program);
        }
    }
}

#[test]
fn language_model_kernels_agree_with_the_reference_at_odd_sizes() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let f32 = [UNALIGNED_HEADS_AND_ROWS, HEADS_OF_80_ELEMENTS]
        .map(|shape| LanguageModelShape { dtype: Dtype::F32, ..shape });
    let bf16 = [
        UNALIGNED_HEADS_AND_ROWS,
        MANY_OCCURRENCES_OF_EACH_TOKEN,
        HEADS_OF_80_ELEMENTS,
        ONE_TOKEN_IN_ONE_SEQUENCE,
    ];
    let mut wrong = Vec::new();
    for problem in bf16.into_iter().chain(f32).flat_map(problems_of_all_language_model_kernels) {
        let inputs = problem.inputs(3);
        let expected = problem.reference(&inputs);
        for row in CUDA_SINGLE_KERNEL_ROWS.iter().filter(|row| (row.supports)(&problem).is_ok()) {
            let Some(mut task) = prepare_row_or_skip_unsupported(row, &problem, &inputs, &device)
            else {
                continue;
            };
            if let Err(error) = launch_twice_and_compare_with_reference(
                &mut task,
                &expected,
                ErrorBoundsOfOutputs::from_tolerances_of_problem(&problem),
            ) {
                wrong.push(format!("{} {problem:?}: {error}", row.implementation_name));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Launches the first GPU implementation of a kernel problem and returns its outputs.
fn launch_first_row_and_read_outputs(
    problem: &SingleKernelProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Tensors {
    let mut task =
        prepare_row_or_skip_unsupported(&CUDA_SINGLE_KERNEL_ROWS[0], problem, inputs, device)
            .expect("needs no library");
    launch_again_on_poisoned_outputs(&mut task).unwrap();
    task.outputs_on_host().unwrap().clone()
}

/// Token numbers that are outside the vocabulary of [`UNALIGNED_HEADS_AND_ROWS`] or no integers.
const INVALID_TOKEN_NUMBERS: [f32; 6] = [1003.0, -1.0, 0.5, f32::NAN, f32::INFINITY, 1e20];

#[test]
fn an_invalid_token_gives_nan_only_in_its_own_output_row() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for component in
        [LanguageModelKernel::TokenEmbedding, LanguageModelKernel::CrossEntropyAndLogitGradients]
    {
        let problem =
            SingleKernelProblem { tested_kernel: component, shape: UNALIGNED_HEADS_AND_ROWS };
        let (name, output) = match component {
            LanguageModelKernel::TokenEmbedding => ("tokens", "x"),
            _ => ("targets", "grad_logits"),
        };
        let mut inputs = problem.inputs(5);
        inputs.f32_mut(name)[10..16].copy_from_slice(&INVALID_TOKEN_NUMBERS);
        let outputs = launch_first_row_and_read_outputs(&problem, &inputs, &device);
        let output = outputs.tensor(output);
        let columns = output.len() / UNALIGNED_HEADS_AND_ROWS.tokens_in_batch();
        let used = if component == LanguageModelKernel::TokenEmbedding {
            columns
        } else {
            UNALIGNED_HEADS_AND_ROWS.vocabulary_size
        };
        for token in 0..UNALIGNED_HEADS_AND_ROWS.tokens_in_batch() {
            let row = output.elements_to_f64(token * columns, used);
            let nan = (10..16).contains(&token);
            assert!(row.iter().all(|x| x.is_nan() == nan), "{component:?} {token}");
        }
    }
}

#[test]
fn the_embedding_gradient_ignores_invalid_tokens_and_repeats_bits() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problem = SingleKernelProblem {
        tested_kernel: LanguageModelKernel::EmbeddingGradient,
        shape: UNALIGNED_HEADS_AND_ROWS,
    };
    let mut inputs = problem.inputs(5);
    // Gradient rows of invalid tokens must add nothing to the embedding's gradient, as rows of
    // zeros do.
    let mut without = inputs.clone();
    without.f32_mut("grad_x")
        [10 * UNALIGNED_HEADS_AND_ROWS.model_width..16 * UNALIGNED_HEADS_AND_ROWS.model_width]
        .fill(0.0);
    let expected = problem.reference(&without);
    inputs.f32_mut("tokens")[10..16].copy_from_slice(&INVALID_TOKEN_NUMBERS);
    for row in CUDA_SINGLE_KERNEL_ROWS {
        let mut task = prepare_row_or_skip_unsupported(row, &problem, &inputs, &device).unwrap();
        launch_twice_and_compare_with_reference(
            &mut task,
            &expected,
            ErrorBoundsOfOutputs::from_tolerances_of_problem(&problem),
        )
        .unwrap();
        assert!(
            row.implementation_name == "cuda/atomic"
                || launch_again_and_compare_bits(&mut task).unwrap(),
            "{}",
            row.implementation_name
        );
    }
}
