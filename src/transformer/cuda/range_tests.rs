//! Tests of the programs' named ranges, by which a profile finds phases and the operations of
//! attention.

use std::collections::BTreeSet;

use super::rung_choices::{GradientSchedule, RungAttention};
use super::{DETERMINISTIC, FORWARD, FUSED, network, training};
use crate::gpu_tests::{lock_first_gpu, prepare_row};
use crate::transformer::definition::ModelForward;
use crate::transformer::shape::LmShape;
use kernelgate::backend::Executable;
use kernelgate::backend::program::{Program, ProgramStep};
use kernelgate::workload::{Dtype, Problem};
use kernelgate_cuda::observe::cupti::{ActivityRecorder, RecordingExtent};

const SMALL: LmShape = LmShape {
    vocabulary: 333,
    d: 128,
    ff: 200,
    layers: 2,
    heads: 2,
    context: 64,
    batch: 2,
    dtype: Dtype::Bf16,
};
const RANGES_OF_PHASES: [&str; 3] = ["forward", "backward", "optimizer"];

/// Names of the ranges around each command of a program.
fn range_names_of_commands(program: &Program) -> Vec<Vec<&str>> {
    let (mut open, mut paths) = (Vec::new(), Vec::new());
    for step in program.steps() {
        match step {
            ProgramStep::Begin(name) => open.push(&**name),
            ProgramStep::End => drop(open.pop()),
            step if step.is_gpu_command() => paths.push(open.clone()),
            _ => {}
        }
    }
    paths
}

#[test]
fn every_command_of_a_training_step_belongs_to_one_phase() {
    for attention in [RungAttention::Unfused, FUSED, DETERMINISTIC] {
        for schedule in [GradientSchedule::Serial, GradientSchedule::overlapped_schedule(&SMALL)] {
            let program = training::step_program(&SMALL, attention, schedule);
            let mut found = BTreeSet::new();
            for path in range_names_of_commands(&program) {
                let phases: Vec<_> =
                    path.iter().filter(|name| RANGES_OF_PHASES.contains(name)).collect();
                assert_eq!(phases.len(), 1, "{path:?}");
                found.extend(phases.into_iter().copied());
            }
            assert_eq!(found, BTreeSet::from(RANGES_OF_PHASES));
        }
    }
}

#[test]
fn unfused_attention_opens_the_ranges_that_the_guide_names() {
    let ranges = ["computing_attention_scores", "computing_softmax", "final_matmul"];
    let counts = |attention| {
        let program = network::forward_program(&SMALL, attention);
        let paths = range_names_of_commands(&program);
        ranges.map(|range| paths.iter().filter(|path| path.last() == Some(&range)).count())
    };
    // Each layer has a GEMM for every sequence.
    assert_eq!(counts(RungAttention::Unfused), [4, 2, 4]);
    assert_eq!(counts(FUSED), [0; 3]);
}

#[test]
fn a_recorded_training_step_contains_the_declared_ranges() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let Some(recorder) = ActivityRecorder::start(RecordingExtent::Everything).unwrap() else {
        return eprintln!("skipped: CUPTI is missing");
    };
    let problem = ModelForward { shape: SMALL };
    let Some(mut task) = prepare_row(&FORWARD[0], &problem, &problem.inputs(1), &device) else {
        return;
    };
    recorder.take_records().unwrap();
    task.launch().unwrap();
    task.synchronize().unwrap();
    let activity = recorder.take_records().unwrap();
    let opened = |name: &str| {
        let ranges = activity.ranges.iter();
        ranges.filter(|range| activity.names[range.name as usize] == name).count()
    };
    assert_eq!(["forward", "computing_softmax"].map(opened), [1, 2]);
    let commands =
        range_names_of_commands(&network::forward_program(&SMALL, RungAttention::Unfused)).len();
    assert!(activity.kernels.len() >= commands, "{} of {commands}", activity.kernels.len());
}
