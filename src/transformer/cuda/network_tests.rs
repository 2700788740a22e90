//! Tests of launches and memory without a GPU; on a GPU, rows are compared with the reference at
//! odd shapes.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::rung_choices::{GradientSchedule, RungAttention};
use super::{DETERMINISTIC, FORWARD, FUSED, TRAIN_STEP, network, training};
use crate::gpu_tests::{lock_first_gpu, prepare_row};
use crate::kernel_tests::check_program_launches;
use crate::transformer::definition::{ModelForward, TrainStep};
use crate::transformer::shape::LmShape;
use crate::transformer::tests::{initial_state, loss_before_each_step};
use kernelgate::backend::{Executable, Implementation};
use kernelgate::verify::precision::ErrorBounds;
use kernelgate::verify::{launch_and_verify, launch_on_poisoned_outputs};
use kernelgate::workload::{Dtype, Problem, Tensor, TensorData, Tensors};
use kernelgate_cuda::Device;

/// A model shape whose context is not a multiple of a tile, and its vocabulary not of a packet.
const ODD: LmShape = LmShape {
    vocabulary: 333,
    d: 128,
    ff: 200,
    layers: 2,
    heads: 2,
    context: 77,
    batch: 3,
    dtype: Dtype::Bf16,
};
/// A model shape with heads of 80 elements, as the largest model size has.
const WIDE: LmShape = LmShape { d: 160, context: 40, batch: 1, ..ODD };

#[test]
fn network_launches_have_the_arguments_of_their_kernels() {
    for attention in [RungAttention::Unfused, FUSED, DETERMINISTIC] {
        let schedules = [
            GradientSchedule::Serial,
            GradientSchedule::Overlapped { group: 1 },
            GradientSchedule::Overlapped { group: 3 },
        ];
        let steps = schedules.map(|schedule| training::step_program(&ODD, attention, schedule));
        for program in steps.into_iter().chain([network::forward_program(&ODD, attention)]) {
            assert_eq!(program.check(), Ok(()));
            check_program_launches(&program);
        }
    }
}

#[test]
fn concurrent_groups_of_layers_fill_a_gpu() {
    for (d, layers, group) in
        [(768, 12, 4), (1024, 24, 5), (1600, 48, 2), (2560, 32, 1), (64, 3, 1), (64, 2, 1)]
    {
        let shape = LmShape { d, layers, ..ODD };
        assert_eq!(
            GradientSchedule::overlapped_schedule(&shape),
            GradientSchedule::Overlapped { group },
            "{d}"
        );
    }
}

/// The largest model size whose training fits on a card of 80 GB.
#[test]
fn the_training_state_is_stored_once() {
    let xl = LmShape {
        vocabulary: 10_000,
        d: 1600,
        ff: 6400,
        layers: 48,
        heads: 25,
        context: 1024,
        batch: 4,
        dtype: Dtype::Bf16,
    };
    let program = training::step_program(&xl, FUSED, GradientSchedule::overlapped_schedule(&xl));
    let uses: BTreeMap<&str, u64> = program.bytes_by_memory_purpose().into_iter().collect();
    let parameters = xl.parameter_count() as u64;
    assert_eq!(uses["momentum"], 12 * parameters);
    assert!((2 * parameters..2 * parameters + (1 << 20)).contains(&uses["weights"]));
    assert!(program.device_bytes() < 50_000_000_000, "{}", program.device_bytes());
}

#[test]
fn inputs_fill_the_memory_regions_of_their_names() {
    let f32 = LmShape { dtype: Dtype::F32, ..ODD };
    for shape in [ODD, f32] {
        let forward = network::forward_program(&shape, RungAttention::Unfused);
        let step = training::step_program(&shape, RungAttention::Unfused, GradientSchedule::Serial);
        let inputs = [ModelForward { shape }.inputs(1), TrainStep { shape }.inputs(1)];
        for (program, inputs) in [forward, step].into_iter().zip(inputs) {
            let shared: Vec<(&str, usize)> =
                program.regions().filter(|(name, _)| inputs.get(name).is_some()).collect();
            assert_eq!(shared.len(), inputs.iter().count());
            for (name, bytes) in shared {
                assert_eq!(inputs.tensor(name).bytes(), bytes, "{name}");
            }
        }
    }
}

#[test]
fn a_forward_pass_without_backward_stores_one_layers_activations() {
    let deep = LmShape { layers: 9, ..ODD };
    let [one, nine] = [ODD, deep].map(|shape| {
        let program = network::forward_program(&shape, FUSED);
        let named = |bytes: u64, (name, use_bytes): (&str, u64)| match name {
            "activations" => bytes + use_bytes,
            _ => bytes,
        };
        program.bytes_by_memory_purpose().into_iter().fold(0, named)
    });
    // Each norm stores an inverse root for each token.
    assert_eq!(nine - one, (4 * 2 * 7 * ODD.token_count()) as u64);
}

fn check_rows_against_reference<P: Problem>(
    rows: &[Implementation<P>],
    problem: &P,
    device: &Arc<Device>,
) {
    let inputs = problem.inputs(3);
    let expected = problem.reference(&inputs);
    for row in rows.iter().filter(|row| (row.supports)(problem).is_ok()) {
        let Some(mut task) = prepare_row(row, problem, &inputs, device) else { continue };
        let found = launch_and_verify(&mut task, &expected, ErrorBounds::for_problem(problem));
        match found {
            Ok(found) => eprintln!("{}: {:?}", row.name, found.by_output),
            Err(error) => panic!("{}: {error}", row.name),
        }
    }
}

#[test]
fn transformer_rows_agree_with_the_reference_on_a_gpu() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let repeated = LmShape { vocabulary: 5, ..ODD };
    let single = LmShape { batch: 1, context: 1, ..ODD };
    for shape in [ODD, WIDE, repeated, single, LmShape { context: 128, ..ODD }] {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            let shape = LmShape { dtype, ..shape };
            eprintln!("{shape:?}");
            check_rows_against_reference(FORWARD, &ModelForward { shape }, &device);
            check_rows_against_reference(TRAIN_STEP, &TrainStep { shape }, &device);
        }
    }
}

/// Runs two launches of a row and returns its outputs.
fn outputs_after_two_launches(inputs: &Tensors, name: &str, device: &Arc<Device>) -> Vec<Tensors> {
    let row = TRAIN_STEP.iter().find(|row| row.name == name).unwrap();
    let Some(mut task) = prepare_row(row, &TrainStep { shape: ODD }, inputs, device) else {
        return vec![];
    };
    let launch = |_| {
        launch_on_poisoned_outputs(&mut task).unwrap();
        task.outputs().unwrap().clone()
    };
    (0..2).map(launch).collect()
}

#[test]
fn deterministic_training_rows_give_equal_bits_in_every_launch() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let inputs = TrainStep { shape: ODD }.inputs(7);
    for pair in outputs_after_two_launches(&inputs, "cuda/fused_deterministic", &device).chunks(2) {
        for (name, first) in pair[0].iter() {
            assert_eq!(first.as_bytes(), pair[1].tensor(name).as_bytes(), "{name}");
        }
    }
}

/// A model shape with heads of 64 elements, and a context that is not a multiple of a tile.
const REDUCED: LmShape =
    LmShape { vocabulary: 1000, d: 128, ff: 384, context: 50, batch: 2, ..ODD };

#[test]
fn ten_training_steps_follow_the_references_loss_curve_on_a_gpu() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    // Maximum relative difference of the loss of a step; an H100 has 2.2e-6 and 9.5e-4.
    for (dtype, band) in [(Dtype::F32, 1e-5), (Dtype::Bf16, 4e-3)] {
        let shape = LmShape { dtype, ..REDUCED };
        let inputs = initial_state(&shape, 4);
        let expected = loss_before_each_step(&shape, &inputs, 10);
        let problem = TrainStep { shape };
        for row in TRAIN_STEP.iter().filter(|row| (row.supports)(&problem).is_ok()) {
            let Some(mut task) = prepare_row(row, &problem, &inputs, &device) else { continue };
            task.poison_outputs().unwrap();
            task.reset().unwrap();
            let mut worst = 0.0f64;
            for (step, expected) in expected.iter().enumerate() {
                let steps = Tensor::new([1], TensorData::F32(vec![step as f32]));
                task.replace_input("steps", &steps).unwrap();
                task.launch().unwrap();
                task.synchronize().unwrap();
                let losses = task.outputs().unwrap().f32("loss");
                let loss = losses.iter().map(|loss| f64::from(*loss)).sum::<f64>() / 2.0;
                worst = worst.max((loss - expected).abs() / expected);
            }
            eprintln!("{} {dtype:?}: {worst:.1e}", row.name);
            assert!(worst < band, "{} {dtype:?}: {worst:.1e}", row.name);
        }
    }
}

#[test]
fn a_model_larger_than_memory_is_refused_before_its_inputs_are_drawn() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let shape =
        LmShape { d: 2560, ff: 10_240, layers: 64, heads: 20, context: 2048, batch: 64, ..ODD };
    for row in TRAIN_STEP.iter().filter(|row| (row.supports)(&TrainStep { shape }).is_ok()) {
        let refused = row.prepare_cuda(&TrainStep { shape }, &Tensors::new(), &device).err();
        let refused = refused.unwrap().to_string();
        assert!(refused.contains("memory"), "{refused}");
    }
}

#[test]
fn rows_of_fused_attention_name_the_head_sizes_that_they_support() {
    for row in TRAIN_STEP.iter().filter(|row| row.name.starts_with("cuda/fused")) {
        let refused = (row.supports)(&TrainStep { shape: WIDE }).unwrap_err();
        assert_eq!(refused, "its attention has heads of 64 or 128, not 80");
    }
}

#[test]
fn a_nan_in_a_weight_reaches_the_loss() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let mut inputs = TrainStep { shape: ODD }.inputs(8);
    let gains = ODD.vocabulary * ODD.d;
    inputs.f32_mut("parameters")[gains + 5] = f32::NAN;
    for outputs in outputs_after_two_launches(&inputs, "cuda/fused", &device) {
        assert!(outputs.f32("loss").iter().all(|loss| loss.is_nan()));
        assert!(outputs.f32("next_parameters").iter().any(|value| value.is_nan()));
    }
}

#[test]
fn a_token_outside_of_the_vocabulary_is_refused() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let problem = ModelForward { shape: ODD };
    let mut inputs = problem.inputs(9);
    inputs.f32_mut("tokens")[2] = 333.0;
    for row in FORWARD {
        let refused = row.prepare_cuda(&problem, &inputs, &device).err().unwrap().to_string();
        assert!(refused.contains("`tokens` has 333 at 2"), "{refused}");
    }
}
