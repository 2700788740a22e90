//! The diagnosis splits a GPU's time into lines that add up to the span; tests check that planted
//! delays are in the right line.

use std::path::PathBuf;

use crate::fixture::{NsysExport, finding_with_id, lines_with_word};
use kernelgate_trace::analyze::timeline::BusyTimeCategoryOfGpu;
use kernelgate_trace::analyze::timeline::iterations::EvidenceOfIterations;
use kernelgate_trace::diagnose::{
    FindingSeverity, GpuUseOfProcess, IdleCauseKind, TraceDiagnosis, diagnose_trace_in_memory,
};
use kernelgate_trace::read::{self, WantedTraceParts};

const ALL_REDUCE_KERNEL_NAME: &str =
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)";

fn diagnose_and_check_sums(export: &NsysExport) -> TraceDiagnosis {
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    for device in &diagnosis.gpu_use_by_process {
        assert_account_adds_up(device);
    }
    diagnosis
}

fn assert_account_adds_up(device: &GpuUseOfProcess) {
    let account = &device.account;
    assert_eq!(
        account.whole_trace_account.span_length_ns(),
        device.first_start_and_last_end_ns.1 - device.first_start_and_last_end_ns.0
    );
    assert_eq!(account.whole_trace_account.busy_time_ns(), device.gpu_busy_ns);
    assert_eq!(
        account.whole_trace_account.idle_time_of_all_causes_ns(),
        device.idle_gaps.total_length_of_gaps_ns()
    );
    let Some(iterations) = &account.iterations else { return };
    let parts =
        iterations.listed_iterations.iter().map(|of| of.account.span_length_ns()).sum::<i64>()
            + iterations.account_before_first_iteration.span_length_ns()
            + iterations.account_after_last_iteration.span_length_ns();
    assert_eq!(parts, account.whole_trace_account.span_length_ns());
    for of in &iterations.listed_iterations {
        assert_eq!(
            of.account.span_length_ns(),
            of.iteration_start_and_end_ns.1 - of.iteration_start_and_end_ns.0
        );
    }
}

#[test]
fn an_exposed_all_reduce_is_named_with_its_time() {
    let mut export = NsysExport::new();
    for step in 0..5 {
        let start = 1_000_000 + step * 1_000_000;
        export.add_launch(
            (start, start + 5_000),
            (start + 10_000, start + 410_000),
            step * 2 + 1,
            "k",
        );
        let all_reduce = (start + 410_000, start + 910_000);
        export.add_launch(
            (start + 6_000, start + 9_000),
            all_reduce,
            step * 2 + 2,
            ALL_REDUCE_KERNEL_NAME,
        );
    }
    let diagnosis = diagnose_and_check_sums(&export);
    let total = &diagnosis.gpu_use_by_process[0].account.whole_trace_account;
    assert_eq!(total.busy_ns_of_category(BusyTimeCategoryOfGpu::ComputeKernelsAlone), 5 * 400_000);
    assert_eq!(total.busy_ns_of_category(BusyTimeCategoryOfGpu::ExposedCommunication), 5 * 500_000);
    let found = finding_with_id(&diagnosis, "exposed-communication").unwrap();
    assert_eq!(found.severity, FindingSeverity::Severe);
    assert_eq!(found.max_recoverable_ns, Some(5 * 500_000));
    insta::assert_snapshot!(found.finding_title, @"device 0 communicates for 2.500 ms, 2.500 ms of it with no compute beside it: 51.0 % of the time; it is on a stream that computes, so that nothing can overlap there");
    let transfer = &diagnosis.gpu_use_by_process[0].account.transfers[0];
    assert_eq!(
        (transfer.transfer_label.as_str(), transfer.transfer_count),
        ("NCCL/RCCL all-reduce", 5)
    );
    assert_eq!(
        (transfer.exposed_transfer_ns, transfer.transfer_count_on_compute_streams),
        (5 * 500_000, 5)
    );
    let gain = found.replayed_gain.map(|of| of.saved_ns_alone);
    assert_eq!(gain, Some(5 * 500_000), "the host waits between steps, though by no call");
}

#[test]
fn communication_beside_compute_is_hidden() {
    let mut export = NsysExport::new();
    export.add_launch((0, 10), (1_000, 9_000), 1, "k");
    export.add_kernel(7, (2_000, 5_000), 2, ALL_REDUCE_KERNEL_NAME);
    let diagnosis = diagnose_and_check_sums(&export);
    let total = &diagnosis.gpu_use_by_process[0].account.whole_trace_account;
    assert_eq!(total.busy_ns_of_category(BusyTimeCategoryOfGpu::ComputeAndCommunication), 3_000);
    assert_eq!(total.busy_ns_of_category(BusyTimeCategoryOfGpu::ComputeKernelsAlone), 5_000);
    assert!(finding_with_id(&diagnosis, "exposed-communication").is_none());
}

#[test]
fn copies_that_nothing_hides_come_first() {
    let mut export = NsysExport::new();
    for i in 0..10 {
        let start = 1_000_000 + i * 10_000_000;
        export.add_api_call(7, (start, start + 2_000), i * 2 + 1, "cudaMemcpyAsync_v3020");
        export.add_memory_copy((start + 10_000, start + 9_010_000), i * 2 + 1, (1, 1, 2));
        let kernel = (start + 9_010_000, start + 9_510_000);
        export.add_launch((start + 3_000, start + 5_000), kernel, i * 2 + 2, "solve");
    }
    let diagnosis = diagnose_and_check_sums(&export);
    assert_eq!(
        diagnosis.gpu_use_by_process[0]
            .account
            .whole_trace_account
            .busy_ns_of_category(BusyTimeCategoryOfGpu::ExposedCopies),
        10 * 9_000_000
    );
    let found = finding_with_id(&diagnosis, "exposed-copy").unwrap();
    assert_eq!(found.severity, FindingSeverity::Severe);
    assert_eq!(found.evidence[0].covered_count, 10);
}

#[test]
fn page_migrations_are_no_lost_launches() {
    let mut export = NsysExport::new();
    export.add_launch((0, 1_000), (10_000, 1_010_000), 1, "k");
    for page in 0..50 {
        let start = 20_000 + page * 10_000;
        export.add_memory_copy((start, start + 5_000), 0, (11, 4, 4));
    }
    let diagnosis = diagnose_and_check_sums(&export);
    let total = &diagnosis.gpu_use_by_process[0].account.whole_trace_account;
    assert_eq!(total.busy_ns_of_category(BusyTimeCategoryOfGpu::ComputeAndMigration), 50 * 5_000);
    let found = finding_with_id(&diagnosis, "page-migration").unwrap();
    assert!(found.advice.contains("cudaMemPrefetchAsync"));
    // Without migrations the kernel is shorter by the time from its first page migration to the end
    // of its last.
    assert_eq!(found.replayed_gain.unwrap().saved_ns_alone, 49 * 10_000 + 5_000);
    assert_eq!(diagnosis.gpu_use_by_process[0].account.transfers[0].transfer_count, 50);
    assert_eq!(diagnosis.data_quality_findings, [], "migrations have no call");
}

/// Export of six steps of three kernels; the first step takes longer, and start-up work precedes
/// it.
fn export_with_slower_first_step(marked: impl Fn(&mut NsysExport, i64, i64, i64)) -> NsysExport {
    let mut export = NsysExport::new();
    export.add_launch((0, 1_000), (5_000, 500_000), 1, "initialize");
    for step in 0..6 {
        let start = 1_000_000 + step * 1_000_000;
        marked(&mut export, step, start, start + 900_000);
        for (kernel, name) in ["embed", "layer", "loss"].iter().enumerate() {
            let kernel = kernel as i64;
            let at = start + kernel * 200_000;
            let length = if step == 0 { 190_000 } else { 100_000 };
            let id = 10 + step * 3 + kernel;
            export.add_launch((at, at + 5_000), (at + 7_000, at + 7_000 + length), id, name);
        }
    }
    export
}

#[test]
fn iterations_are_found_by_ranges_and_start_up_stands_apart() {
    let export = export_with_slower_first_step(|export, step, start, end| {
        export.add_nvtx_range(start, Some(end), 59, &format!("step_{step}"));
    });
    let diagnosis = diagnose_and_check_sums(&export);
    let iterations = diagnosis.gpu_use_by_process[0].account.iterations.as_ref().unwrap();
    assert_eq!(iterations.evidence, EvidenceOfIterations::RangesNamed("step_#".to_owned()));
    assert_eq!(iterations.listed_iterations.len(), 6);
    assert_eq!(
        iterations
            .account_before_first_iteration
            .busy_ns_of_category(BusyTimeCategoryOfGpu::ComputeKernelsAlone),
        495_000
    );
    assert_eq!(
        iterations.listed_iterations[0]
            .account
            .busy_ns_of_category(BusyTimeCategoryOfGpu::ComputeKernelsAlone),
        3 * 190_000
    );
    let steady = iterations.sorted_iteration_lengths_without_first();
    assert_eq!((steady.len(), steady[2]), (5, 1_000_000));
}

#[test]
fn iterations_are_found_by_kernels_that_repeat() {
    let diagnosis = diagnose_and_check_sums(&export_with_slower_first_step(|_, _, _, _| {}));
    let iterations = diagnosis.gpu_use_by_process[0].account.iterations.as_ref().unwrap();
    assert!(
        matches!(iterations.evidence, EvidenceOfIterations::RepeatedOperationNamed(_)),
        "{:?}",
        iterations.evidence
    );
    assert_eq!(iterations.listed_iterations.len(), 6);
}

#[test]
fn iterations_of_unequal_length_are_named() {
    let mut export = NsysExport::new();
    let mut start = 1_000_000;
    for step in 0..8 {
        let length = if step == 5 { 3_000_000 } else { 1_000_000 };
        export.add_nvtx_range(start, Some(start + length - 1_000), 59, &format!("step_{step}"));
        export.add_launch((start, start + 5_000), (start + 6_000, start + 106_000), step + 1, "k");
        start += length;
    }
    let diagnosis = diagnose_and_check_sums(&export);
    let iterations = diagnosis.gpu_use_by_process[0].account.iterations.as_ref().unwrap();
    assert_eq!(iterations.numbers_of_unusually_long_iterations(), [6]);
    let text = diagnosis.diagnosis_to_text();
    insta::assert_snapshot!(lines_with_word(&text, "median"), @r"
    iterations: 8 by range step_#; first 1.000 ms, then median 1.000 ms (100.0 µs to 3.000 ms); twice
    the median or longer: 6
    ");
}

#[test]
fn the_time_of_real_traces_adds_up_and_is_classified() {
    let Some(folder) = std::env::var_os("REAL_TRACES") else {
        println!("skipped: REAL_TRACES does not name a folder with real traces");
        return;
    };
    let mut devices = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let folder = entry.unwrap().path();
        let Ok(files) = std::fs::read_dir(&folder) else { continue };
        let files = files.map(|file| file.unwrap().path());
        let is_trace =
            |path: &PathBuf| path.extension().is_some_and(|of| of == "sqlite" || of == "gz");
        for path in files.filter(is_trace) {
            let diagnosis = diagnose_trace_in_memory(
                &read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap(),
            );
            for device in &diagnosis.gpu_use_by_process {
                assert_account_adds_up(device);
                let total = &device.account.whole_trace_account;
                let unclassified = total.idle_time_without_known_cause_ns();
                assert!(unclassified * 50 <= total.span_length_ns(), "{}", path.display());
                devices += 1;
            }
        }
    }
    assert!(devices > 8, "{devices} devices");
}

#[test]
fn idle_time_has_a_line_for_each_cause() {
    let mut export = NsysExport::new();
    export.add_launch((0, 10), (1_000, 2_000), 1, "a");
    export.add_launch((50_000, 60_000), (61_000, 70_000), 2, "b");
    let diagnosis = diagnose_and_check_sums(&export);
    let idle = &diagnosis.gpu_use_by_process[0].account.whole_trace_account.idle_ns_by_cause;
    assert_eq!(idle.values().sum::<i64>(), 59_000);
    assert!(
        idle.get(&IdleCauseKind::HostCodeBeforeLaunch).is_some_and(|&ns| ns >= 48_000),
        "{idle:?}"
    );
}

#[test]
fn a_replay_gains_what_is_on_the_critical_path_only() {
    // Two streams are used: a long kernel hides short kernels, and the host launches far ahead.
    let mut export = NsysExport::new();
    export.add_launch((0, 1_000), (10_000, 1_010_000), 1, "long");
    for i in 0..4 {
        let call = 2_000 + i * 2_000;
        let run = 1_010_000 + i * 100_000;
        export.add_launch((call, call + 1_000), (run, run + 100_000), i + 2, "short");
    }
    let path = &diagnose_and_check_sums(&export).critical_path;
    assert_eq!(path.critical_path_ns, 1_400_000);
    assert_eq!(
        path.critical_path_ns_by_segment_kind.iter().map(|(_, ns)| ns).sum::<i64>(),
        path.critical_path_ns
    );
    let gain = |label: &str| {
        let found = path.gains.iter().find(|of| of.change.printed_speedup_label() == label);
        found.map(|of| of.gain_ns)
    };
    assert_eq!(gain("half the time of long"), Some(500_000));
    assert_eq!(gain("half the time of short"), Some(200_000));
    assert_eq!(gain("launch calls that take no time"), Some(0), "the host is far ahead");
}

#[test]
fn a_copy_from_pageable_memory_holds_its_host_up() {
    // Each call of `cudaMemcpyAsync` returns just before its copy ends; the kernel after it starts
    // only after copy and call.
    let mut export = NsysExport::new();
    for i in 0..3 {
        let start = i * 2_000_000;
        let id = 2 * i + 1;
        export.add_api_call(7, (start, start + 990_000), id, "cudaMemcpyAsync_v3020");
        export.add_memory_copy((start + 10_000, start + 1_000_000), id, (1, 0, 2));
        let call = start + 995_000;
        export.add_launch((call, call + 5_000), (call + 15_000, call + 215_000), id + 1, "k");
    }
    let path = &diagnose_and_check_sums(&export).critical_path;
    // The critical path runs from 10,000 ns to 5,210,000 ns.
    assert_eq!(path.critical_path_ns, 5_200_000);
    let gain = |label: &str| {
        path.gains.iter().find(|of| of.change.printed_speedup_label() == label).map(|of| of.gain_ns)
    };
    // Without the copies each kernel, and everything after it, starts 990 µs earlier.
    assert_eq!(gain("copies that take no time"), Some(3 * 990_000));
    // Launch calls that take no time save 10 µs before a copy and 5 µs before a kernel, except
    // before the first copy and the last kernel.
    assert_eq!(gain("launch calls that take no time"), Some(30_000));
}

#[test]
fn savings_of_two_findings_do_not_count_the_same_time_twice() {
    // The GPU idles between short kernels that are launched 100 µs apart, and two findings refer to
    // the same idle time.
    let mut export = NsysExport::new();
    for i in 0..200 {
        let call = i * 105_000;
        export.add_launch((call, call + 5_000), (call + 6_000, call + 9_000), i + 1, "short");
    }
    let diagnosis = diagnose_and_check_sums(&export);
    let replayed: Vec<_> =
        diagnosis.findings.iter().filter_map(|of| Some((of.rule_id, of.replayed_gain?))).collect();
    let ids: Vec<&str> = replayed.iter().map(|(id, _)| *id).collect();
    assert!(ids.contains(&"launch-bound") && ids.contains(&"gaps"), "{ids:?}");
    let all: i64 = replayed.iter().map(|(_, of)| of.further_saved_ns).sum();
    let (_, first) = replayed[0];
    // The replay leaves 4 µs of each launch interval of 105 µs: a kernel of 3 µs and 1 µs of launch
    // latency.
    assert_eq!(all, 199 * 101_000);
    assert_eq!((first.saved_ns_alone, first.further_saved_ns), (all, all));
}
