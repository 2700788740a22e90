//! Tests of the language model's launches and memory, which need no GPU; on a GPU, implementations
//! are compared with the reference at odd sizes.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::rung_choices::{AttentionOfRung, WeightGradientSchedule};
use super::{
    CUDA_LM_FORWARD_LADDER, CUDA_LM_TRAINING_STEP_LADDER, FUSED_ATTENTION_IN_ANY_SUM_ORDER,
    FUSED_ATTENTION_IN_FIXED_SUM_ORDER, network, training,
};
use crate::gpu_tests::{lock_first_gpu, prepare_row_or_skip_unsupported};
use crate::kernel_tests::assert_launches_match_kernel_parameters;
use crate::transformer::definition::{LanguageModelForward, LanguageModelTrainingStep};
use crate::transformer::shape::LanguageModelShape;
use crate::transformer::tests::{
    inputs_of_first_training_step, mean_loss_before_each_training_step,
};
use kernelgate::backend::{Implementation, LaunchableProblem};
use kernelgate::verify::precision::ErrorBoundsOfOutputs;
use kernelgate::verify::{
    launch_again_on_poisoned_outputs, launch_twice_and_compare_with_reference,
};
use kernelgate::workload::{Dtype, Problem, Tensor, TensorData, Tensors};
use kernelgate_cuda::Device;

/// A test model whose context is not a multiple of a tile, and whose vocabulary is not a multiple
/// of a 16-byte packet.
const ODD_CONTEXT_AND_VOCABULARY: LanguageModelShape = LanguageModelShape {
    vocabulary_size: 333,
    model_width: 128,
    swiglu_hidden_width: 200,
    layers: 2,
    heads: 2,
    context_tokens: 77,
    batch: 3,
    dtype: Dtype::Bf16,
};
/// A test model with heads of 80 elements, as in the largest published model size.
const HEADS_OF_80_ELEMENTS: LanguageModelShape = LanguageModelShape {
    model_width: 160,
    context_tokens: 40,
    batch: 1,
    ..ODD_CONTEXT_AND_VOCABULARY
};

#[test]
fn language_model_launches_have_the_arguments_of_their_kernels() {
    for attention in [
        AttentionOfRung::UnfusedAttention,
        FUSED_ATTENTION_IN_ANY_SUM_ORDER,
        FUSED_ATTENTION_IN_FIXED_SUM_ORDER,
    ] {
        let schedules = [
            WeightGradientSchedule::SerialLaunches,
            WeightGradientSchedule::OverlapsActivationGradients { layers_per_gradient_group: 1 },
            WeightGradientSchedule::OverlapsActivationGradients { layers_per_gradient_group: 3 },
        ];
        let steps = schedules.map(|schedule| {
            training::training_step_program(&ODD_CONTEXT_AND_VOCABULARY, attention, schedule)
        });
        for program in steps.into_iter().chain([network::language_model_forward_program(
            &ODD_CONTEXT_AND_VOCABULARY,
            attention,
        )]) {
            assert_eq!(program.check(), Ok(()));
            assert_launches_match_kernel_parameters(&program);
        }
    }
}

#[test]
fn groups_of_layers_have_enough_gradient_tiles_to_fill_a_gpu() {
    for (d, layers, layers_per_group) in
        [(768, 12, 4), (1024, 24, 5), (1600, 48, 2), (2560, 32, 1), (64, 3, 1), (64, 2, 1)]
    {
        let shape = LanguageModelShape { model_width: d, layers, ..ODD_CONTEXT_AND_VOCABULARY };
        assert_eq!(
            WeightGradientSchedule::overlapped_in_groups_of_layers(&shape),
            WeightGradientSchedule::OverlapsActivationGradients {
                layers_per_gradient_group: layers_per_group
            },
            "{d}"
        );
    }
}

/// The test uses the largest model size whose training fits on a GPU with 80 GB.
#[test]
fn device_memory_holds_the_training_state_only_once() {
    let xl = LanguageModelShape {
        vocabulary_size: 10_000,
        model_width: 1600,
        swiglu_hidden_width: 6400,
        layers: 48,
        heads: 25,
        context_tokens: 1024,
        batch: 4,
        dtype: Dtype::Bf16,
    };
    let program = training::training_step_program(
        &xl,
        FUSED_ATTENTION_IN_ANY_SUM_ORDER,
        WeightGradientSchedule::overlapped_in_groups_of_layers(&xl),
    );
    let uses: BTreeMap<&str, u64> = program.device_bytes_by_purpose_label().into_iter().collect();
    let parameters = xl.number_of_parameters() as u64;
    assert_eq!(uses["momentum"], 12 * parameters);
    assert!((2 * parameters..2 * parameters + (1 << 20)).contains(&uses["weights"]));
    assert!(program.device_bytes() < 50_000_000_000, "{}", program.device_bytes());
}

#[test]
fn input_tensors_fill_the_memory_regions_of_their_names() {
    let f32 = LanguageModelShape { dtype: Dtype::F32, ..ODD_CONTEXT_AND_VOCABULARY };
    for shape in [ODD_CONTEXT_AND_VOCABULARY, f32] {
        let forward =
            network::language_model_forward_program(&shape, AttentionOfRung::UnfusedAttention);
        let step = training::training_step_program(
            &shape,
            AttentionOfRung::UnfusedAttention,
            WeightGradientSchedule::SerialLaunches,
        );
        let inputs = [
            LanguageModelForward { shape }.inputs(1),
            LanguageModelTrainingStep { shape }.inputs(1),
        ];
        for (program, inputs) in [forward, step].into_iter().zip(inputs) {
            let shared: Vec<(&str, usize)> = program
                .names_and_bytes_of_regions()
                .filter(|(name, _)| inputs.get(name).is_some())
                .collect();
            assert_eq!(shared.len(), inputs.iter().count());
            for (name, bytes) in shared {
                assert_eq!(inputs.tensor(name).size_in_bytes(), bytes, "{name}");
            }
        }
    }
}

#[test]
fn a_forward_program_stores_the_activations_of_one_layer() {
    let deep = LanguageModelShape { layers: 9, ..ODD_CONTEXT_AND_VOCABULARY };
    let [one, nine] = [ODD_CONTEXT_AND_VOCABULARY, deep].map(|shape| {
        let program =
            network::language_model_forward_program(&shape, FUSED_ATTENTION_IN_ANY_SUM_ORDER);
        let named = |bytes: u64, (name, use_bytes): (&str, u64)| match name {
            "activations" => bytes + use_bytes,
            _ => bytes,
        };
        program.device_bytes_by_purpose_label().into_iter().fold(0, named)
    });
    // Each RMSNorm stores an inverse root mean square for each token, so deeper models need this
    // much more memory.
    assert_eq!(nine - one, (4 * 2 * 7 * ODD_CONTEXT_AND_VOCABULARY.tokens_in_batch()) as u64);
}

fn assert_rows_agree_with_reference_on_gpu<P: Problem>(
    rows: &[Implementation<P>],
    problem: &P,
    device: &Arc<Device>,
) {
    let inputs = problem.inputs(3);
    let expected = problem.reference(&inputs);
    for row in rows.iter().filter(|row| (row.supports)(problem).is_ok()) {
        let Some(mut task) = prepare_row_or_skip_unsupported(row, problem, &inputs, device) else {
            continue;
        };
        let found = launch_twice_and_compare_with_reference(
            &mut task,
            &expected,
            ErrorBoundsOfOutputs::from_tolerances_of_problem(problem),
        );
        match found {
            Ok(found) => eprintln!("{}: {:?}", row.implementation_name, found.by_output),
            Err(error) => panic!("{}: {error}", row.implementation_name),
        }
    }
}

#[test]
fn language_model_rows_agree_with_the_reference_on_a_gpu() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let repeated = LanguageModelShape { vocabulary_size: 5, ..ODD_CONTEXT_AND_VOCABULARY };
    let single = LanguageModelShape { batch: 1, context_tokens: 1, ..ODD_CONTEXT_AND_VOCABULARY };
    for shape in [
        ODD_CONTEXT_AND_VOCABULARY,
        HEADS_OF_80_ELEMENTS,
        repeated,
        single,
        LanguageModelShape { context_tokens: 128, ..ODD_CONTEXT_AND_VOCABULARY },
    ] {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            let shape = LanguageModelShape { dtype, ..shape };
            eprintln!("{shape:?}");
            assert_rows_agree_with_reference_on_gpu(
                CUDA_LM_FORWARD_LADDER,
                &LanguageModelForward { shape },
                &device,
            );
            assert_rows_agree_with_reference_on_gpu(
                CUDA_LM_TRAINING_STEP_LADDER,
                &LanguageModelTrainingStep { shape },
                &device,
            );
        }
    }
}

/// Launches the named training row twice and returns its outputs after each launch.
fn outputs_of_two_launches(inputs: &Tensors, name: &str, device: &Arc<Device>) -> Vec<Tensors> {
    let row =
        CUDA_LM_TRAINING_STEP_LADDER.iter().find(|row| row.implementation_name == name).unwrap();
    let Some(mut task) = prepare_row_or_skip_unsupported(
        row,
        &LanguageModelTrainingStep { shape: ODD_CONTEXT_AND_VOCABULARY },
        inputs,
        device,
    ) else {
        return vec![];
    };
    let launch = |_| {
        launch_again_on_poisoned_outputs(&mut task).unwrap();
        task.outputs_on_host().unwrap().clone()
    };
    (0..2).map(launch).collect()
}

#[test]
fn deterministic_training_rows_give_equal_bits_in_both_runs() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let inputs = LanguageModelTrainingStep { shape: ODD_CONTEXT_AND_VOCABULARY }.inputs(7);
    for pair in outputs_of_two_launches(&inputs, "cuda/fused_deterministic", &device).chunks(2) {
        for (name, first) in pair[0].iter() {
            assert_eq!(first.as_bytes(), pair[1].tensor(name).as_bytes(), "{name}");
        }
    }
}

/// A test model with heads of 64 elements, and a context that is not a multiple of a tile.
const HEADS_OF_64_ELEMENTS: LanguageModelShape = LanguageModelShape {
    vocabulary_size: 1000,
    model_width: 128,
    swiglu_hidden_width: 384,
    context_tokens: 50,
    batch: 2,
    ..ODD_CONTEXT_AND_VOCABULARY
};

#[test]
fn losses_of_ten_gpu_training_steps_follow_the_reference() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    // Maximum relative difference of the loss of a training step from the reference; an H100 has
    // 2.2e-6 in f32 and 9.5e-4 in bf16.
    for (dtype, band) in [(Dtype::F32, 1e-5), (Dtype::Bf16, 4e-3)] {
        let shape = LanguageModelShape { dtype, ..HEADS_OF_64_ELEMENTS };
        let inputs = inputs_of_first_training_step(&shape, 4);
        let expected = mean_loss_before_each_training_step(&shape, &inputs, 10);
        let problem = LanguageModelTrainingStep { shape };
        for row in
            CUDA_LM_TRAINING_STEP_LADDER.iter().filter(|row| (row.supports)(&problem).is_ok())
        {
            let Some(mut task) = prepare_row_or_skip_unsupported(row, &problem, &inputs, &device)
            else {
                continue;
            };
            task.poison_outputs().unwrap();
            task.reset_state().unwrap();
            let mut worst = 0.0f64;
            for (step, expected) in expected.iter().enumerate() {
                let steps = Tensor::new([1], TensorData::F32(vec![step as f32]));
                task.replace_input("steps", &steps).unwrap();
                task.launch_once().unwrap();
                task.wait_for_launches().unwrap();
                let losses = task.outputs_on_host().unwrap().f32_elements("loss");
                let loss = losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / 2.0;
                worst = worst.max((loss - expected).abs() / expected);
            }
            eprintln!("{} {dtype:?}: {worst:.1e}", row.implementation_name);
            assert!(worst < band, "{} {dtype:?}: {worst:.1e}", row.implementation_name);
        }
    }
}

#[test]
fn a_model_larger_than_device_memory_is_refused_before_inputs_are_drawn() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let shape = LanguageModelShape {
        model_width: 2560,
        swiglu_hidden_width: 10_240,
        layers: 64,
        heads: 20,
        context_tokens: 2048,
        batch: 64,
        ..ODD_CONTEXT_AND_VOCABULARY
    };
    for row in CUDA_LM_TRAINING_STEP_LADDER
        .iter()
        .filter(|row| (row.supports)(&LanguageModelTrainingStep { shape }).is_ok())
    {
        let refused = row
            .prepare_on_one_gpu(&LanguageModelTrainingStep { shape }, &Tensors::new(), &device)
            .err();
        let refused = refused.unwrap().to_string();
        assert!(refused.contains("memory"), "{refused}");
    }
}

#[test]
fn fused_attention_rows_state_the_head_sizes_that_they_support() {
    for row in CUDA_LM_TRAINING_STEP_LADDER
        .iter()
        .filter(|row| row.implementation_name.starts_with("cuda/fused"))
    {
        let refused =
            (row.supports)(&LanguageModelTrainingStep { shape: HEADS_OF_80_ELEMENTS }).unwrap_err();
        assert_eq!(refused, "its attention has heads of 64 or 128, not 80");
    }
}

#[test]
fn a_nan_in_a_language_model_weight_reaches_the_loss() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let mut inputs = LanguageModelTrainingStep { shape: ODD_CONTEXT_AND_VOCABULARY }.inputs(8);
    let gains = ODD_CONTEXT_AND_VOCABULARY.vocabulary_size * ODD_CONTEXT_AND_VOCABULARY.model_width;
    inputs.f32_mut("parameters")[gains + 5] = f32::NAN;
    for outputs in outputs_of_two_launches(&inputs, "cuda/fused", &device) {
        assert!(outputs.f32_elements("loss").iter().all(|loss| loss.is_nan()));
        assert!(outputs.f32_elements("next_parameters").iter().any(|value| value.is_nan()));
    }
}

#[test]
fn a_token_outside_the_vocabulary_is_refused_before_loading() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problem = LanguageModelForward { shape: ODD_CONTEXT_AND_VOCABULARY };
    let mut inputs = problem.inputs(9);
    inputs.f32_mut("tokens")[2] = 333.0;
    for row in CUDA_LM_FORWARD_LADDER {
        let refused = row.prepare_on_one_gpu(&problem, &inputs, &device).err().unwrap().to_string();
        assert!(refused.contains("`tokens` has 333 at 2"), "{refused}");
    }
}
