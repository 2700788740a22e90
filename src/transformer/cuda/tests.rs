use std::sync::Arc;

use super::COMPONENT;
use crate::gpu_tests::{lock_first_gpu, prepare_row};
use crate::kernel_tests::check_program_launches;
use crate::transformer::components::{ComponentProblem, ModelPart};
use crate::transformer::shape::LmShape;
use kernelgate::backend::{Executable, Prepare};
use kernelgate::verify::{
    ErrorBounds, launch_and_verify, launch_on_poisoned_outputs, repeats_bit_by_bit,
};
use kernelgate::workload::{Dtype, Problem, Tensors};
use kernelgate_cuda::Device;

/// A model shape whose heads begin with no whole packet of pairs, and whose rows are not aligned to
/// groups of keys.
const NARROW: LmShape = LmShape {
    vocabulary: 1003,
    d: 40,
    ff: 104,
    layers: 1,
    heads: 4,
    context: 37,
    batch: 3,
    dtype: Dtype::Bf16,
};

/// A model shape with more tokens than a block holds, each token many times, and two blocks of
/// columns.
const SHAPE_OF_REPEATED_TOKENS: LmShape =
    LmShape { vocabulary: 13, d: 776, ff: 8, heads: 1, context: 701, batch: 3, ..NARROW };

/// A model shape with heads of 80 elements, for which a block sums the gradients of several gains.
const WIDE: LmShape =
    LmShape { vocabulary: 515, d: 2560, ff: 264, heads: 32, context: 130, batch: 9, ..NARROW };

const ONE_TOKEN: LmShape = LmShape { context: 1, batch: 1, ..NARROW };

fn problems_of_all_components(shape: LmShape) -> impl Iterator<Item = ComponentProblem> {
    ModelPart::ALL_COMPONENTS
        .into_iter()
        .map(move |component| ComponentProblem { component, shape })
}

#[test]
fn transformer_launches_have_the_arguments_of_their_kernels() {
    for problem in [NARROW, SHAPE_OF_REPEATED_TOKENS, WIDE, ONE_TOKEN]
        .into_iter()
        .flat_map(problems_of_all_components)
    {
        for row in COMPONENT.iter().filter(|row| (row.supports)(&problem).is_ok()) {
            let Prepare::Program(write, _) = row.prepare else { panic!("{}", row.name) };
            let program = write(&problem);
            assert_eq!(program.check(), Ok(()), "{problem:?}");
            check_program_launches(&program);
        }
    }
}

#[test]
fn transformer_kernels_agree_with_the_reference_at_odd_shapes_on_a_gpu() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let f32 = [NARROW, WIDE].map(|shape| LmShape { dtype: Dtype::F32, ..shape });
    let bf16 = [NARROW, SHAPE_OF_REPEATED_TOKENS, WIDE, ONE_TOKEN];
    let mut wrong = Vec::new();
    for problem in bf16.into_iter().chain(f32).flat_map(problems_of_all_components) {
        let inputs = problem.inputs(3);
        let expected = problem.reference(&inputs);
        for row in COMPONENT.iter().filter(|row| (row.supports)(&problem).is_ok()) {
            let Some(mut task) = prepare_row(row, &problem, &inputs, &device) else { continue };
            if let Err(error) =
                launch_and_verify(&mut task, &expected, ErrorBounds::for_problem(&problem))
            {
                wrong.push(format!("{} {problem:?}: {error}", row.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Outputs of the first row of a problem.
fn outputs_of_first_row(
    problem: &ComponentProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Tensors {
    let mut task = prepare_row(&COMPONENT[0], problem, inputs, device).expect("needs no library");
    launch_on_poisoned_outputs(&mut task).unwrap();
    task.outputs().unwrap().clone()
}

/// Token numbers outside the vocabulary of [`NARROW`], or between two of its tokens.
const INVALID_TOKENS: [f32; 6] = [1003.0, -1.0, 0.5, f32::NAN, f32::INFINITY, 1e20];

#[test]
fn an_invalid_token_gives_nan_only_in_its_own_row_on_a_gpu() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    for component in [ModelPart::Embed, ModelPart::Loss] {
        let problem = ComponentProblem { component, shape: NARROW };
        let (name, output) = match component {
            ModelPart::Embed => ("tokens", "x"),
            _ => ("targets", "grad_logits"),
        };
        let mut inputs = problem.inputs(5);
        inputs.f32_mut(name)[10..16].copy_from_slice(&INVALID_TOKENS);
        let outputs = outputs_of_first_row(&problem, &inputs, &device);
        let output = outputs.tensor(output);
        let columns = output.len() / NARROW.token_count();
        let used = if component == ModelPart::Embed { columns } else { NARROW.vocabulary };
        for token in 0..NARROW.token_count() {
            let row = output.to_f64(token * columns, used);
            let nan = (10..16).contains(&token);
            assert!(row.iter().all(|x| x.is_nan() == nan), "{component:?} {token}");
        }
    }
}

#[test]
fn the_embedding_gradient_ignores_invalid_tokens_and_repeats_its_bits_on_a_gpu() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problem = ComponentProblem { component: ModelPart::EmbeddingGradient, shape: NARROW };
    let mut inputs = problem.inputs(5);
    // Rows of invalid tokens must add nothing, as rows of zeros do.
    let mut without = inputs.clone();
    without.f32_mut("grad_x")[10 * NARROW.d..16 * NARROW.d].fill(0.0);
    let expected = problem.reference(&without);
    inputs.f32_mut("tokens")[10..16].copy_from_slice(&INVALID_TOKENS);
    for row in COMPONENT {
        let mut task = prepare_row(row, &problem, &inputs, &device).unwrap();
        launch_and_verify(&mut task, &expected, ErrorBounds::for_problem(&problem)).unwrap();
        assert!(
            row.name == "cuda/atomic" || repeats_bit_by_bit(&mut task).unwrap(),
            "{}",
            row.name
        );
    }
}
