//! Tests that plant a difference between two traces check that it is found, named and explains its
//! part of the change.

use crate::fixture::{NsysExport, lines_with_word};
use kernelgate_trace::diagnose::difference::{
    DifferenceOfTwoTraces, SummedTimesOfTrace, TracePartChangeKind, TracePartComparison,
    TracePartKind, compare_summed_traces,
};

/// Five synthetic training steps of ten kernels of 30 µs, launched ahead of time by calls of 5 µs,
/// optionally with a wait for the GPU after each step.
struct SyntheticTrainingSteps {
    /// How long kernel 3 takes, in nanoseconds.
    kernel_3_ns: i64,
    /// Number of kernels per step.
    kernels_per_step: i64,
    /// Registers per thread of every kernel.
    registers_per_thread: i64,
    /// Bytes of local memory of a thread of kernel 3; `None`: the export has no such column.
    local_bytes_of_kernel_3: Option<i64>,
    /// Whether the host waits behind each step, which delays the next by 40 µs.
    waits_after_each_step: bool,
    /// The kind of host memory that a step copies from: 0 is pageable, 1 pinned.
    host_memory_kind: i64,
}

const PLAIN_TRAINING_STEPS: SyntheticTrainingSteps = SyntheticTrainingSteps {
    kernel_3_ns: 30_000,
    kernels_per_step: 10,
    registers_per_thread: 96,
    local_bytes_of_kernel_3: None,
    waits_after_each_step: false,
    host_memory_kind: 1,
};

impl SyntheticTrainingSteps {
    fn create_export(&self) -> NsysExport {
        let mut export = NsysExport::new();
        let mut free = 1_000_000;
        for step in 0..5 {
            let start = free;
            let id = step * 100 + 1;
            export.add_api_call(7, (start + 1_000, start + 4_000), id, "cudaMemcpyAsync_v3020");
            let copied = start + 10_000 + if self.host_memory_kind == 0 { 50_000 } else { 20_000 };
            export.add_memory_copy((start + 10_000, copied), id, (1, self.host_memory_kind, 2));
            free = copied;
            for kernel in 0..self.kernels_per_step {
                let call = start + 4_000 + kernel * 6_000;
                let length = if kernel == 3 { self.kernel_3_ns } else { 30_000 };
                let name = format!("k{kernel}");
                export.add_launch(
                    (call, call + 5_000),
                    (free, free + length),
                    id + 1 + kernel,
                    &name,
                );
                free += length;
            }
            if self.waits_after_each_step {
                export.add_api_call(
                    7,
                    (start + 150_000, free + 1_000),
                    0,
                    "cudaStreamSynchronize_v3020",
                );
                free += 40_000;
            }
            export.add_nvtx_range(start, Some(free - 1), 59, &format!("step_{step}"));
        }
        export.execute_sql(&format!(
            "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET registersPerThread = {};",
            self.registers_per_thread
        ));
        if let Some(bytes) = self.local_bytes_of_kernel_3 {
            export.execute_sql(&format!(
                "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN localMemoryPerThread INTEGER;
                 UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET localMemoryPerThread = {bytes}
                 WHERE demangledName IN (SELECT id FROM StringIds WHERE value = 'k3');"
            ));
        }
        export
    }
}

/// Difference between the traces of [`PLAIN_TRAINING_STEPS`] and of the given steps, after checking
/// that its parts add up.
fn difference_from_plain_steps(steps: &SyntheticTrainingSteps) -> DifferenceOfTwoTraces {
    difference_of_exports(&PLAIN_TRAINING_STEPS.create_export(), &steps.create_export())
}

fn difference_of_exports(base: &NsysExport, head: &NsysExport) -> DifferenceOfTwoTraces {
    let [base, head] = [base, head].map(|export| {
        SummedTimesOfTrace::sum_times_of_loaded_trace(&export.read_as_trace().unwrap())
    });
    let difference = compare_summed_traces(base, head);
    assert_changes_add_up(&difference);
    difference
}

fn assert_changes_add_up(difference: &DifferenceOfTwoTraces) {
    let parts: i64 =
        difference.part_changes.iter().map(TracePartComparison::exclusive_time_change_ns).sum();
    let places: i64 =
        difference.range_path_changes.iter().map(|place| place.launched_time_change_ns()).sum();
    assert_eq!(
        (parts, places),
        (difference.whole_time_change_ns(), difference.whole_time_change_ns())
    );
}

#[test]
fn nothing_changed_between_a_trace_and_itself() {
    let same = difference_from_plain_steps(&PLAIN_TRAINING_STEPS);
    assert_eq!((same.whole_time_change_ns(), same.change_of_unexplained_idle_ns()), (0, 0));
    assert!(
        same.part_changes
            .iter()
            .all(|part| part.kind_of_part_change() == TracePartChangeKind::Unchanged),
        "{:?}",
        same.part_changes
    );
    assert!(same.findings.iter().all(Vec::is_empty) && same.comparability_notes.is_empty());
    insta::assert_snapshot!(lines_with_word(&same.difference_to_text(["a", "b"]), "takes"), @"B takes as long as A, from the first operation to the last");
}

#[test]
fn a_slower_kernel_explains_the_whole_change() {
    let slower = difference_from_plain_steps(&SyntheticTrainingSteps {
        kernel_3_ns: 50_000,
        registers_per_thread: 128,
        ..PLAIN_TRAINING_STEPS
    });
    assert_eq!(slower.whole_time_change_ns(), 5 * 20_000);
    let first = &slower.part_changes[0];
    assert_eq!(
        (first.part.part_name.as_str(), first.kind_of_part_change()),
        ("k3", TracePartChangeKind::LongerOperations)
    );
    assert_eq!(
        (first.change_due_to_operation_count_ns(), first.change_due_to_operation_length_ns()),
        (0, 100_000)
    );
    assert_eq!(first.describe_launch_shape_and_metric_changes(), ["registers 96 -> 128"]);
    assert_eq!(slower.part_changes[1].exclusive_time_change_ns(), 0, "nothing else changed");
    assert_eq!(slower.range_path_changes[0].range_path, "step_#");
    assert_eq!(slower.range_path_changes[0].launched_time_change_ns(), 100_000);
}

#[test]
fn local_memory_that_a_kernel_had_not_is_called_a_spill() {
    let with_local = |bytes| SyntheticTrainingSteps {
        kernel_3_ns: 60_000,
        local_bytes_of_kernel_3: Some(bytes),
        ..PLAIN_TRAINING_STEPS
    };
    let words = |base: &SyntheticTrainingSteps, head: &SyntheticTrainingSteps| {
        let difference = difference_of_exports(&base.create_export(), &head.create_export());
        let kernel =
            difference.part_changes.iter().find(|part| part.part.part_name == "k3").unwrap();
        let text = difference.difference_to_text(["a", "b"]);
        (
            kernel.describe_launch_shape_and_metric_changes(),
            text.split_whitespace().collect::<Vec<_>>().join(" "),
        )
    };
    let spills = SyntheticTrainingSteps { registers_per_thread: 128, ..with_local(184) };
    let (evidence, text) = words(&PLAIN_TRAINING_STEPS, &spills);
    let expected = ["registers 96 -> 128", "spill to local memory 0 -> 184 B a thread"];
    assert_eq!(evidence, expected);
    assert_eq!(text.matches(expected[1]).count(), 1, "{text}");
    assert_eq!(
        words(&with_local(0), &with_local(16)).0,
        ["spill to local memory 0 -> 16 B a thread"]
    );
    assert_eq!(words(&with_local(16), &with_local(32)).0, ["local memory 16 -> 32 B a thread"]);
    let less = "no spill to local memory any more: 16 -> 0 B a thread";
    assert_eq!(words(&with_local(16), &PLAIN_TRAINING_STEPS).0, [less]);
    assert_eq!(words(&with_local(16), &with_local(16)).0, Vec::<String>::new());
}

#[test]
fn an_extra_launch_and_longer_launches_are_two_causes() {
    let more = difference_from_plain_steps(&SyntheticTrainingSteps {
        kernels_per_step: 11,
        ..PLAIN_TRAINING_STEPS
    });
    assert_eq!(more.whole_time_change_ns(), 5 * 30_000);
    let first = &more.part_changes[0];
    assert_eq!(
        (first.part.part_name.as_str(), first.kind_of_part_change()),
        ("k10", TracePartChangeKind::OnlyInSecondTrace)
    );
    assert_eq!(first.amounts.each_ref().map(|amount| amount.operation_count), [0, 5]);
    // The second trace has one more launch of the same kernel: the number of launches, not their
    // length, explains the difference.
    let again = PLAIN_TRAINING_STEPS.create_export();
    again.execute_sql(
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName =
            (SELECT min(id) FROM StringIds WHERE value = 'k0')
         WHERE demangledName IN (SELECT id FROM StringIds WHERE value IN ('k0', 'k1'));",
    );
    let more = difference_of_exports(&PLAIN_TRAINING_STEPS.create_export(), &again);
    let part =
        |name: &str| more.part_changes.iter().find(|part| part.part.part_name == name).unwrap();
    assert_eq!(part("k0").kind_of_part_change(), TracePartChangeKind::MoreOperations);
    assert_eq!(
        (
            part("k0").change_due_to_operation_count_ns(),
            part("k0").change_due_to_operation_length_ns()
        ),
        (5 * 30_000, 0)
    );
    assert_eq!(part("k1").kind_of_part_change(), TracePartChangeKind::OnlyInFirstTrace);
}

#[test]
fn a_copy_from_pageable_memory_is_another_than_one_from_pinned_memory() {
    let copies = difference_from_plain_steps(&SyntheticTrainingSteps {
        host_memory_kind: 0,
        ..PLAIN_TRAINING_STEPS
    });
    assert_eq!(copies.whole_time_change_ns(), 5 * 30_000);
    let part = |name: &str| {
        copies.part_changes.iter().find(|part| part.part.part_name.contains(name)).unwrap()
    };
    let pageable = part("(pageable to device)");
    assert_eq!(
        (pageable.part.kind, pageable.kind_of_part_change()),
        (TracePartKind::Copy, TracePartChangeKind::OnlyInSecondTrace)
    );
    assert_eq!(
        part("(pinned to device)").kind_of_part_change(),
        TracePartChangeKind::OnlyInFirstTrace
    );
    assert_eq!(copies.findings[1][0].0, "pageable-copy");
    assert!(copies.findings[0].is_empty());
}

#[test]
fn a_wait_in_a_loop_is_found_with_the_idle_time_behind_it() {
    let waits = difference_from_plain_steps(&SyntheticTrainingSteps {
        waits_after_each_step: true,
        ..PLAIN_TRAINING_STEPS
    });
    let part =
        |name: &str| waits.part_changes.iter().find(|part| part.part.part_name == name).unwrap();
    // Each wait ends 1 µs after the last kernel of a step; 38 µs of host code and a launch call of
    // 3 µs follow.
    let in_waits = part("in a wait for the GPU: cudaStreamSynchronize");
    assert_eq!(
        (in_waits.kind_of_part_change(), in_waits.exclusive_time_change_ns()),
        (TracePartChangeKind::OnlyInSecondTrace, 4 * 1_000)
    );
    assert_eq!(part("host code between launches").amounts[1].operation_count, 4);
    let call = waits
        .host_call_changes
        .iter()
        .find(|call| call.site.function_name == "cudaStreamSynchronize");
    let call = call.unwrap();
    assert_eq!(call.site.innermost_range_path.as_deref(), Some("step_#"));
    assert_eq!(call.calls.map(|calls| calls.calls), [0, 5]);
    let found: Vec<&str> = waits.findings[1].iter().map(|(id, _)| *id).collect();
    assert!(found.contains(&"sync-in-loop"), "{found:?}");
    let text = waits.difference_to_text(["before.sqlite", "after.sqlite"]);
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    insta::assert_snapshot!(text);
}

#[test]
fn idle_time_without_a_launch_is_unexplained() {
    let cut = |export: NsysExport| {
        export.execute_sql("DELETE FROM CUPTI_ACTIVITY_KIND_RUNTIME;");
        export
    };
    let steps = SyntheticTrainingSteps { waits_after_each_step: true, ..PLAIN_TRAINING_STEPS };
    let difference = difference_of_exports(
        &cut(PLAIN_TRAINING_STEPS.create_export()),
        &cut(steps.create_export()),
    );
    assert_eq!(difference.change_of_unexplained_idle_ns(), 4 * 40_000);
    assert_eq!(difference.change_of_unexplained_idle_ns(), difference.whole_time_change_ns());
    let text = difference.difference_to_text(["a", "b"]);
    let line = text.lines().find(|line| line.contains("unexplained:")).unwrap();
    assert!(line.contains("+160.0 µs") && line.contains("100.0 %"), "{line}");
}

#[test]
fn traces_of_unlike_content_are_compared_with_a_note() {
    let mut short = NsysExport::new();
    short.add_nvtx_range(1_000, Some(9_000), 59, "step_0");
    short.add_launch((1_000, 2_000), (3_000, 4_000), 1, "k0");
    let difference = difference_of_exports(&PLAIN_TRAINING_STEPS.create_export(), &short);
    insta::assert_snapshot!(difference.comparability_notes[0], @"the range step_# is there 5 and 1 times: the traces hold different amounts of work");
    let empty = difference_of_exports(&NsysExport::new(), &NsysExport::new());
    assert_eq!((empty.whole_time_change_ns(), empty.part_changes.len()), (0, 0));
    let json = difference.difference_to_json();
    assert_eq!(json["schema_version"], 2);
    assert_eq!(json["change_ns"], difference.whole_time_change_ns());
    assert_eq!(json["kernels"], serde_json::json!([50, 1]));
}
