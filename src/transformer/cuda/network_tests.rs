//! Launches and memory without a GPU; rows against the reference at odd shapes on one.

use std::sync::Arc;

use super::rung::{Attention, Schedule};
use super::{DETERMINISTIC, FORWARD, FUSED, TRAIN_STEP, network, training};
use crate::gpu_tests::{gpu, prepare};
use crate::kernel_tests::check_launches;
use crate::transformer::definition::{Forward, TrainStep};
use crate::transformer::shape::Shape;
use kernelgate::backend::{Executable, Implementation};
use kernelgate::verify::precision::Bounds;
use kernelgate::verify::verify;
use kernelgate::workload::{Dtype, Problem, Tensors};
use kernelgate_cuda::Device;

/// No tile divides the context, and no packet the vocabulary.
const ODD: Shape = Shape {
    vocabulary: 333,
    d: 128,
    ff: 200,
    layers: 2,
    heads: 2,
    context: 77,
    batch: 3,
    dtype: Dtype::Bf16,
};
/// Heads of 80 elements, as the largest size has.
const WIDE: Shape = Shape { d: 160, context: 40, batch: 1, ..ODD };

#[test]
fn launches_have_the_arguments_of_their_kernels() {
    for attention in [Attention::Unfused, FUSED, DETERMINISTIC] {
        let schedules = [Schedule::Serial, Schedule::Overlapped];
        let steps = schedules.map(|schedule| training::step(&ODD, attention, schedule));
        for program in steps.into_iter().chain([network::forward(&ODD, attention)]) {
            assert_eq!(program.check(), Ok(()));
            check_launches(&program);
        }
    }
}

#[test]
fn inputs_fill_the_regions_of_their_names() {
    let f32 = Shape { dtype: Dtype::F32, ..ODD };
    for shape in [ODD, f32] {
        let forward = network::forward(&shape, Attention::Unfused);
        let step = training::step(&shape, Attention::Unfused, Schedule::Serial);
        let inputs = [Forward { shape }.inputs(1), TrainStep { shape }.inputs(1)];
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
fn a_forward_pass_alone_keeps_one_layer() {
    let deep = Shape { layers: 9, ..ODD };
    let [one, nine] = [ODD, deep].map(|shape| {
        let program = network::forward(&shape, FUSED);
        let named = |bytes: u64, (name, use_bytes): (&str, u64)| match name {
            "activations" => bytes + use_bytes,
            _ => bytes,
        };
        program.memory_uses().into_iter().fold(0, named)
    });
    // A root a norm and token.
    assert_eq!(nine - one, (4 * 2 * 7 * ODD.tokens()) as u64);
}

fn agree<P: Problem>(rows: &[Implementation<P>], problem: &P, device: &Arc<Device>) {
    let inputs = problem.inputs(3);
    let expected = problem.reference(&inputs);
    for row in rows.iter().filter(|row| (row.supports)(problem).is_ok()) {
        let Some(mut task) = prepare(row, problem, &inputs, device) else { continue };
        let found = verify(&mut task, &expected, Bounds::of(problem));
        match found {
            Ok(found) => eprintln!("{}: {:?}", row.name, found.by_output),
            Err(error) => panic!("{}: {error}", row.name),
        }
    }
}

#[test]
fn rows_agree_with_the_reference_on_a_gpu() {
    let Some((device, _alone)) = gpu() else { return };
    let repeated = Shape { vocabulary: 5, ..ODD };
    let single = Shape { batch: 1, context: 1, ..ODD };
    for shape in [ODD, WIDE, repeated, single, Shape { context: 128, ..ODD }] {
        for dtype in [Dtype::Bf16, Dtype::F32] {
            let shape = Shape { dtype, ..shape };
            eprintln!("{shape:?}");
            agree(FORWARD, &Forward { shape }, &device);
            agree(TRAIN_STEP, &TrainStep { shape }, &device);
        }
    }
}

/// The outputs of a row, after two launches.
fn outputs(inputs: &Tensors, name: &str, device: &Arc<Device>) -> Vec<Tensors> {
    let row = TRAIN_STEP.iter().find(|row| row.name == name).unwrap();
    let Some(mut task) = prepare(row, &TrainStep { shape: ODD }, inputs, device) else {
        return vec![];
    };
    let launch = |_| {
        task.poison_outputs().unwrap();
        task.launch().unwrap();
        task.synchronize().unwrap();
        task.outputs().unwrap().clone()
    };
    (0..2).map(launch).collect()
}

#[test]
fn deterministic_rows_repeat_their_bits() {
    let Some((device, _alone)) = gpu() else { return };
    let inputs = TrainStep { shape: ODD }.inputs(7);
    for pair in outputs(&inputs, "cuda/fused_deterministic", &device).chunks(2) {
        for (name, first) in pair[0].iter() {
            assert_eq!(first.as_bytes(), pair[1].tensor(name).as_bytes(), "{name}");
        }
    }
}

#[test]
fn a_weight_that_is_not_a_number_reaches_the_loss() {
    let Some((device, _alone)) = gpu() else { return };
    let mut inputs = TrainStep { shape: ODD }.inputs(8);
    let gains = ODD.vocabulary * ODD.d;
    inputs.f32_mut("parameters")[gains + 5] = f32::NAN;
    for outputs in outputs(&inputs, "cuda/fused", &device) {
        assert!(outputs.f32("loss").iter().all(|loss| loss.is_nan()));
        assert!(outputs.f32("next_parameters").iter().any(|value| value.is_nan()));
    }
}

#[test]
fn a_token_outside_of_the_vocabulary_is_refused() {
    let Some((device, _alone)) = gpu() else { return };
    let problem = Forward { shape: ODD };
    let mut inputs = problem.inputs(9);
    inputs.f32_mut("tokens")[2] = 333.0;
    for row in FORWARD {
        let refused = row.prepare_cuda(&problem, &inputs, &device).err().unwrap().to_string();
        assert!(refused.contains("`tokens` has 333 at 2"), "{refused}");
    }
}
