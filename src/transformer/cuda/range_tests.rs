//! Tests of the NVTX ranges in the language model's programs, by which a profile finds phases and
//! the operations of attention.

use std::collections::BTreeSet;

use super::rung_choices::{AttentionOfRung, WeightGradientSchedule};
use super::{
    CUDA_LM_FORWARD_LADDER, FUSED_ATTENTION_IN_ANY_SUM_ORDER, FUSED_ATTENTION_IN_FIXED_SUM_ORDER,
    network, training,
};
use crate::gpu_tests::{lock_first_gpu, prepare_row_or_skip_unsupported};
use crate::transformer::definition::LanguageModelForward;
use crate::transformer::shape::LanguageModelShape;
use kernelgate::backend::LaunchableProblem;
use kernelgate::backend::program::{LaunchProgram, ProgramStep};
use kernelgate::workload::{Dtype, Problem};
use kernelgate_cuda::observe::cupti::{CuptiActivityRecorder, CuptiRecordingExtent};

const SMALL_MODEL_OF_NVTX_TESTS: LanguageModelShape = LanguageModelShape {
    vocabulary_size: 333,
    model_width: 128,
    swiglu_hidden_width: 200,
    layers: 2,
    heads: 2,
    context_tokens: 64,
    batch: 2,
    dtype: Dtype::Bf16,
};
const NVTX_RANGES_OF_PHASES: [&str; 3] = ["forward", "backward", "optimizer"];

/// Names of the NVTX ranges that are open at each GPU command of a program.
fn open_nvtx_ranges_at_each_command(program: &LaunchProgram) -> Vec<Vec<&str>> {
    let (mut open, mut paths) = (Vec::new(), Vec::new());
    for step in program.steps() {
        match step {
            ProgramStep::BeginNamedRange(name) => open.push(&**name),
            ProgramStep::EndNamedRange => drop(open.pop()),
            step if step.enqueues_gpu_work() => paths.push(open.clone()),
            _ => {}
        }
    }
    paths
}

#[test]
fn every_command_of_a_training_step_is_in_exactly_one_phase_range() {
    for attention in [
        AttentionOfRung::UnfusedAttention,
        FUSED_ATTENTION_IN_ANY_SUM_ORDER,
        FUSED_ATTENTION_IN_FIXED_SUM_ORDER,
    ] {
        for schedule in [
            WeightGradientSchedule::SerialLaunches,
            WeightGradientSchedule::overlapped_in_groups_of_layers(&SMALL_MODEL_OF_NVTX_TESTS),
        ] {
            let program =
                training::training_step_program(&SMALL_MODEL_OF_NVTX_TESTS, attention, schedule);
            let mut found = BTreeSet::new();
            for path in open_nvtx_ranges_at_each_command(&program) {
                let phases: Vec<_> =
                    path.iter().filter(|name| NVTX_RANGES_OF_PHASES.contains(name)).collect();
                assert_eq!(phases.len(), 1, "{path:?}");
                found.extend(phases.into_iter().copied());
            }
            assert_eq!(found, BTreeSet::from(NVTX_RANGES_OF_PHASES));
        }
    }
}

#[test]
fn unfused_attention_opens_the_nvtx_ranges_of_the_guide() {
    let ranges = ["computing_attention_scores", "computing_softmax", "final_matmul"];
    let counts = |attention| {
        let program =
            network::language_model_forward_program(&SMALL_MODEL_OF_NVTX_TESTS, attention);
        let paths = open_nvtx_ranges_at_each_command(&program);
        ranges.map(|range| paths.iter().filter(|path| path.last() == Some(&range)).count())
    };
    // Each layer has one batched GEMM launch for every sequence.
    assert_eq!(counts(AttentionOfRung::UnfusedAttention), [4, 2, 4]);
    assert_eq!(counts(FUSED_ATTENTION_IN_ANY_SUM_ORDER), [0; 3]);
}

#[test]
fn a_recorded_training_step_contains_the_declared_nvtx_ranges() {
    let Some((device, _alone)) = lock_first_gpu() else { return };
    let Some(recorder) =
        CuptiActivityRecorder::start_cupti_recording(CuptiRecordingExtent::AllActivityLists)
            .unwrap()
    else {
        return eprintln!("skipped: CUPTI is missing");
    };
    let problem = LanguageModelForward { shape: SMALL_MODEL_OF_NVTX_TESTS };
    let Some(mut task) = prepare_row_or_skip_unsupported(
        &CUDA_LM_FORWARD_LADDER[0],
        &problem,
        &problem.inputs(1),
        &device,
    ) else {
        return;
    };
    recorder.take_all_new_records().unwrap();
    task.launch_once().unwrap();
    task.wait_for_launches().unwrap();
    let activity = recorder.take_all_new_records().unwrap();
    let opened = |name: &str| {
        let ranges = activity.ranges.iter();
        ranges.filter(|range| activity.interned_names[range.name_index as usize] == name).count()
    };
    assert_eq!(["forward", "computing_softmax"].map(opened), [1, 2]);
    let commands = open_nvtx_ranges_at_each_command(&network::language_model_forward_program(
        &SMALL_MODEL_OF_NVTX_TESTS,
        AttentionOfRung::UnfusedAttention,
    ))
    .len();
    assert!(activity.kernels.len() >= commands, "{} of {commands}", activity.kernels.len());
}
