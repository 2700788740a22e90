//! Tests that compare tables of real exports with the output of `nsys stats`, and idle gaps with an
//! independent count.
//!
//! `REAL_TRACES` names the folder of the exports, which are not part of the repository.

use std::path::{Path, PathBuf};

use kernelgate_trace::analyze::launches::LaunchCallOfOperations;
use kernelgate_trace::analyze::operations::AllGpuOperations;
use kernelgate_trace::analyze::timeline::idle_time;
use kernelgate_trace::diagnose::difference::{
    SummedTimesOfTrace, TracePartChangeKind, compare_summed_traces,
};
use kernelgate_trace::diagnose::{TraceDiagnosis, diagnose_trace_in_memory};
use kernelgate_trace::model::Trace;
use kernelgate_trace::read::{self, WantedTraceParts};
use kernelgate_trace::stats::{self, StatsReport};

/// Returns the folder of real traces, or prints that the test is skipped and returns `None`.
fn real_traces_folder_or_skip() -> Option<PathBuf> {
    match std::env::var_os("REAL_TRACES") {
        Some(folder) => Some(folder.into()),
        None => {
            println!("skipped: REAL_TRACES does not name a folder with real traces");
            None
        }
    }
}

/// Returns the folders that contain an export, sorted by name.
fn folders_with_export(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("trace.sqlite").is_file())
        .collect();
    all.sort();
    all
}

fn parse_csv_rows(csv: &str) -> Vec<Vec<String>> {
    let mut reader =
        csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(csv.as_bytes());
    reader.records().map(|row| row.unwrap().iter().map(str::to_owned).collect()).collect()
}

/// Names, counts and sums must be equal; decimal numbers may differ by rounding, percentages by
/// 0.1.
fn are_csv_tables_equal(title: &str, ours: &str, theirs: &str) -> bool {
    if ours == theirs {
        return true;
    }
    let (Ok(a), Ok(b)) = (ours.parse::<f64>(), theirs.parse::<f64>()) else { return false };
    let decimal = ours.contains('.') && theirs.contains('.');
    let allowed = if title.contains("(MB)") { 0.001_001 } else { 0.100_1 };
    decimal && (a - b).abs() <= allowed
}

#[test]
fn every_table_is_that_of_nsys_stats() {
    let Some(folder) = real_traces_folder_or_skip() else { return };
    let mut compared = 0;
    for export in folders_with_export(&folder) {
        let trace =
            read::open_trace_file(&export.join("trace.sqlite"), &WantedTraceParts::ALL).unwrap();
        for report in StatsReport::ALL_REPORTS {
            let truth = export.join(format!("gt/gt_{}.csv", report.nsys_report_name()));
            let Ok(truth) = std::fs::read_to_string(&truth) else { continue };
            let (mut theirs, mut ours) = (
                parse_csv_rows(&truth),
                parse_csv_rows(&stats::make_table(&trace, report).to_csv()),
            );
            let name = format!("{} of {}", report.nsys_report_name(), export.display());
            let streamed =
                stats::table_from_streamed_export(&export.join("trace.sqlite"), report).unwrap();
            let streamed = streamed.map(|streamed| parse_csv_rows(&streamed.table.to_csv()));
            assert!(streamed.is_none_or(|streamed| streamed == ours), "{name}, not kept");
            assert_eq!(ours[0], theirs[0], "{name}");
            assert_eq!(ours.len(), theirs.len(), "{name}");
            // Rows with equal totals may be in any order.
            let titles = theirs.remove(0);
            ours.remove(0);
            let key = |row: &Vec<String>| {
                let exact = row.iter().filter(|cell| !cell.contains('.'));
                (exact.cloned().collect::<Vec<_>>(), row.clone())
            };
            ours.sort_by_key(key);
            theirs.sort_by_key(key);
            for (ours, theirs) in ours.iter().zip(&theirs) {
                for ((title, a), b) in titles.iter().zip(ours).zip(theirs) {
                    assert!(
                        are_csv_tables_equal(title, a, b),
                        "{name}: {title}: {a}, not {b}\n{ours:?}\n{theirs:?}"
                    );
                }
            }
            compared += 1;
        }
    }
    assert!(compared > 40, "{compared} tables compared");
}

/// Numbers of gaps below 20 µs, of 20 to 50 µs, and above; total idle time in µs; longest gap in
/// tenths of a µs.
type GapCountsTotalAndLongest = ([usize; 3], i64, i64);

#[test]
fn gaps_are_those_of_an_independent_count() {
    let Some(folder) = real_traces_folder_or_skip() else { return };
    // Expected values from the README of the exports: gaps of kernels alone, gaps of all
    // operations, and the busy share in percent.
    let expected: &[(&str, GapCountsTotalAndLongest, GapCountsTotalAndLongest, f64)] = &[
        (
            "zx3xyy_result_2_7B_clean",
            ([18312, 1, 6], 20_243, 3_420),
            ([18312, 1, 6], 20_243, 3_420),
            99.8,
        ),
        (
            "zx3xyy_result_2_7B_nvtx",
            ([7293, 5, 29], 528_440, 1_901_725),
            ([7293, 35, 293], 1_298_044, 1_901_725),
            83.5,
        ),
        (
            "zx3xyy_result_2_7B_compile_ro",
            ([19, 0, 10], 7_030_460, 7_818_327),
            ([37, 0, 2], 387, 2091),
            100.0,
        ),
        (
            "jsun-012_result",
            ([16572, 215, 244], 598_928, 1_074_804),
            ([18354, 95, 364], 681_576, 1_074_804),
            72.5,
        ),
        (
            "Athrun0109_result",
            ([2755, 1038, 691], 647_819, 1_809_892),
            ([2888, 1036, 803], 764_236, 1_809_892),
            10.0,
        ),
        (
            "GindaChen_tests_fixtures_mfu_2gpu_before",
            ([3518, 237, 252], 63_322, 44_928),
            ([4881, 220, 195], 57_417, 44_928),
            90.4,
        ),
    ];
    for (name, kernels, all, busy) in expected {
        let path = folder.join(name).join("trace.sqlite");
        let trace = read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap();
        let count = trace.kernels.on_gpu.operation_count() as u32;
        assert_eq!(
            idle_gaps_of_activities(
                &trace,
                &idle_time::activities_by_process_and_gpu(&trace, |id| id < count)
            ),
            *kernels,
            "{name}: kernels"
        );
        let activities = idle_time::activities_by_process_and_gpu(&trace, |_| true);
        assert_eq!(idle_gaps_of_activities(&trace, &activities), *all, "{name}: all operations");
        let span: i64 = activities.iter().map(|of| of.first_start_to_last_end_ns()).sum();
        let worked: i64 = activities.iter().map(|of| of.gpu_busy_ns).sum();
        let share = (worked as f64 / span as f64 * 1000.0).round() / 10.0;
        assert_eq!(share, *busy, "{name}");
    }
}

/// The results have the digits that the README of the exports prints: idle time in µs, and the
/// longest gap in tenths of a µs.
fn idle_gaps_of_activities(
    trace: &Trace,
    activities: &[idle_time::ProcessActivityOnGpu],
) -> GapCountsTotalAndLongest {
    let all = AllGpuOperations::number_operations_of_trace(trace);
    let mut classes = [0; 3];
    let (mut idle, mut longest) = (0, 0);
    for gap in activities.iter().flat_map(|of| of.gaps.iter(&all)) {
        let length = gap.idle_gap_length_ns();
        classes[usize::from(length >= 20_000) + usize::from(length > 50_000)] += 1;
        idle += length;
        longest = longest.max(length);
    }
    (classes, (idle + 500) / 1000, (longest + 50) / 100)
}

#[test]
fn rules_judge_real_traces_rightly() {
    let Some(folder) = real_traces_folder_or_skip() else { return };
    let diagnosis = |name: &str| {
        let path = folder.join(name).join("trace.sqlite");
        diagnose_trace_in_memory(&read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap())
    };
    let has =
        |diagnosis: &TraceDiagnosis, id: &str| diagnosis.findings.iter().any(|of| of.rule_id == id);
    // The GPU is busy 99.8 % and 100 %: a rule that examines kernels alone would find 10 severe
    // gaps in the second trace, whose graphs were recorded whole.
    let clean = diagnosis("zx3xyy_result_2_7B_clean");
    assert!(!has(&clean, "gaps") && !has(&clean, "launch-bound") && !has(&clean, "sync-in-loop"));
    let graphs = diagnosis("zx3xyy_result_2_7B_compile_ro");
    assert!(!has(&graphs, "gaps") && !has(&graphs, "launch-bound"));
    // The trace has a busy share of 10 %, kernels shorter than their launch calls, and a wait after
    // every copy.
    let laptop = diagnosis("Athrun0109_result");
    for id in ["gaps", "launch-bound", "sync-in-loop", "pageable-copy"] {
        assert!(has(&laptop, id), "{id}");
    }
    // The command `nsys analyze` lists the same pageable copies, but at most 50 of them.
    let annotated = diagnosis("zx3xyy_result_2_7B_nvtx");
    let pageable = annotated.findings.iter().find(|of| of.rule_id == "pageable-copy").unwrap();
    assert_eq!(pageable.measured_value.number_in_unit, 292.0);
    // The longest gap equals the longest idle time of device 0 that Nsight Systems' rule `gpu_gaps`
    // reports.
    assert_eq!(annotated.gpu_use_by_process[0].idle_gaps.longest_gap_ns, 190_172_452);
    for export in folders_with_export(&folder) {
        let name = export.file_name().unwrap().to_str().unwrap();
        let text = diagnosis(name).diagnosis_to_text();
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    }
}

#[test]
fn pytorch_and_ncu_files_are_read() {
    let Some(folder) = real_traces_folder_or_skip() else { return };
    let path = folder.join("kineto/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz");
    let trace = read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap();
    let counts = (
        trace.kernels.on_gpu.operation_count(),
        trace.copies.on_gpu.operation_count(),
        trace.memsets.on_gpu.operation_count(),
    );
    assert_eq!(counts, (4350, 1600, 145));
    assert_eq!((trace.calls.call_count(), trace.quality.implausible_value_count), (15329, 0));
    assert!(trace.quality.unreadable_parts.is_empty());
    let launches = LaunchCallOfOperations::join_operations_with_host_calls(&trace);
    assert!(
        launches.count_operations_without_launch_call() * 100
            < launches.call_index_of_operation.len(),
        "{}",
        launches.count_operations_without_launch_call()
    );
    let path = folder.join("kineto/event_sync_trace.json.gz");
    let trace = read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap();
    assert_eq!(
        (trace.kernels.on_gpu.operation_count(), trace.synchronisation_waits.kind.len()),
        (4, 4)
    );

    let trace = read::open_trace_file(&folder.join("ncu/cublaslt_ncu.log"), &WantedTraceParts::ALL)
        .unwrap();
    let value = |name: &str| {
        trace.profiled_launches[0].metrics[&trace.names.find_interned_text(name).unwrap()]
            .metric_value
    };
    assert_eq!(value("Compute (SM) Throughput"), 23.59);
    assert_eq!(value("Memory Throughput"), 21.68);
    let diagnosis = diagnose_trace_in_memory(&trace);
    let bound = diagnosis.findings.iter().find(|of| of.rule_id == "kernel-bound").unwrap();
    insta::assert_snapshot!(bound.finding_title, @"cutlass3x_sm100_tensorop_s64x256x32gemm…16_relu_aux_scalemax is latency-bound");
    let low = diagnosis.findings.iter().find(|of| of.rule_id == "achieved-occupancy").unwrap();
    insta::assert_snapshot!(low.evidence[0].kernel_call_or_copy_name, @"theoretical 18.8 %, achieved 15.5 %, limited by registers (1 blocks): launch 0, cutlass3x_sm100_tensorop_s64x256x32gemm…16_relu_aux_scalemax");
}

/// Collects files below a folder that may be traces.
fn collect_possible_trace_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => collect_possible_trace_files(&path, found),
            false => found.push(path),
        }
    }
}

#[test]
fn a_finding_saves_at_most_what_its_replay_gains() {
    let folders = ["REAL_TRACES", "SHARED_FAULTS"].map(std::env::var_os);
    let mut traces = Vec::new();
    folders
        .iter()
        .flatten()
        .for_each(|folder| collect_possible_trace_files(Path::new(folder), &mut traces));
    if traces.is_empty() {
        println!("skipped: REAL_TRACES and SHARED_FAULTS name no folders with traces");
        return;
    }
    let mut savings = 0;
    for path in traces {
        let Ok(trace) = read::open_trace_file(&path, &WantedTraceParts::ALL) else { continue };
        for finding in diagnose_trace_in_memory(&trace).findings {
            let gain = finding.replayed_gain.map_or(0, |replayed| replayed.saved_ns_alone.max(0));
            let saved = finding.max_recoverable_ns.unwrap_or(0);
            assert!(
                saved <= gain,
                "{}: {}: {saved} > {gain}",
                path.display(),
                finding.finding_title
            );
            savings += usize::from(saved > 0);
        }
    }
    assert!(savings > 20, "{savings} findings with savings");
}

#[test]
fn a_timeline_that_is_read_again_has_the_same_tables() {
    let Some(folder) = real_traces_folder_or_skip() else { return };
    for export in folders_with_export(&folder) {
        let trace =
            read::open_trace_file(&export.join("trace.sqlite"), &WantedTraceParts::ALL).unwrap();
        let timeline = tempfile::NamedTempFile::with_suffix(".json").unwrap();
        let mut file = std::io::BufWriter::new(timeline.as_file());
        kernelgate_trace::export::write_perfetto_json(&trace, &mut file).unwrap();
        drop(file);
        let again = read::open_trace_file(timeline.path(), &WantedTraceParts::ALL).unwrap();
        assert_eq!(
            (again.quality.implausible_value_count, again.quality.unreadable_parts.len()),
            (0, 0)
        );
        for report in StatsReport::ALL_REPORTS {
            let sorted = |trace| {
                let mut rows = parse_csv_rows(&stats::make_table(trace, report).to_csv());
                rows.sort();
                rows
            };
            let name = format!("{} of {}", report.nsys_report_name(), export.display());
            assert_eq!(sorted(&again), sorted(&trace), "{name}");
        }
        assert_eq!(again.graphs.on_gpu.operation_count(), trace.graphs.on_gpu.operation_count());
    }
}

#[test]
fn the_parts_of_a_difference_add_up() {
    let Some(folder) = real_traces_folder_or_skip() else { return };
    let read = |export: &PathBuf| {
        SummedTimesOfTrace::sum_times_of_loaded_trace(
            &read::open_trace_file(&export.join("trace.sqlite"), &WantedTraceParts::ALL).unwrap(),
        )
    };
    let exports = folders_with_export(&folder);
    let sums: Vec<SummedTimesOfTrace> = exports.iter().map(read).collect();
    for (a, base) in sums.iter().enumerate() {
        for (b, head) in sums.iter().enumerate() {
            let change = compare_summed_traces(base.clone(), head.clone());
            let parts: i64 =
                change.part_changes.iter().map(|part| part.exclusive_time_change_ns()).sum();
            let places: i64 =
                change.range_path_changes.iter().map(|place| place.launched_time_change_ns()).sum();
            let name = format!("{} and {}", exports[a].display(), exports[b].display());
            assert_eq!(
                (parts, places),
                (change.whole_time_change_ns(), change.whole_time_change_ns()),
                "{name}"
            );
            let same = change
                .part_changes
                .iter()
                .all(|part| part.kind_of_part_change() == TracePartChangeKind::Unchanged);
            assert_eq!(same, a == b, "{name}");
            let text = change.difference_to_text([&name, "B"]);
            let long = text.lines().skip(1).find(|line| line.chars().count() > 100);
            assert_eq!(long, None, "{name}");
        }
    }
}
