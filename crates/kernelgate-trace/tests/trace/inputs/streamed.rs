//! Tests that exports read as a stream, without keeping ranges and calls, give the tables and
//! diagnoses of exports in memory.

use crate::fixture::reason_in_message;
use crate::fixture::{NsysExport, global_id_of_process};
use kernelgate_trace::analyze::ranges::{restricted_reading, restricted_trace};
use kernelgate_trace::diagnose::difference::SummedTimesOfTrace;
use kernelgate_trace::diagnose::{
    IdleCauseKind, TraceDiagnosis, diagnose_export_while_reading, diagnose_trace_in_memory,
};
use kernelgate_trace::read::WantedTraceParts;
use kernelgate_trace::stats::{self, StatsReport};

/// Reports whose tables can be summed while ranges and calls are read.
const REPORTS_SUMMED_WHILE_READING: [StatsReport; 4] = [
    StatsReport::RangesByName,
    StatsReport::PushPopRangesByName,
    StatsReport::KernelsByRange,
    StatsReport::RangesByProjectedGpuTime,
];

/// Checks that every table of an export is the same when streamed and in memory, and has the given
/// number of rows.
fn assert_streamed_tables_are_equal(export: &NsysExport, rows: [usize; 4]) {
    let trace = export.read_as_trace().unwrap();
    for (report, rows) in REPORTS_SUMMED_WHILE_READING.into_iter().zip(rows) {
        let streamed =
            stats::table_from_streamed_export(&export.sqlite_path(), report).unwrap().unwrap();
        let kept = stats::make_table(&trace, report);
        assert_eq!(streamed.table.to_csv(), kept.to_csv(), "{}", report.nsys_report_name());
        assert_eq!(kept.rows.len(), rows, "{}", report.nsys_report_name());
    }
    assert_streamed_diagnosis_is_equal(export);
}

/// Checks that the diagnosis and the sums of an export are equal if they are read as a stream and
/// if the trace is in memory.
fn assert_streamed_diagnosis_is_equal(export: &NsysExport) -> TraceDiagnosis {
    let trace = export.read_as_trace().unwrap();
    let (kept, streamed) = (
        diagnose_trace_in_memory(&trace),
        diagnose_export_while_reading(&export.sqlite_path()).unwrap().unwrap(),
    );
    assert_eq!(streamed.diagnosis_to_json(), kept.diagnosis_to_json());
    let streamed =
        SummedTimesOfTrace::sum_export_while_reading(&export.sqlite_path()).unwrap().unwrap();
    assert_eq!(
        format!("{streamed:?}"),
        format!("{:?}", SummedTimesOfTrace::sum_times_of_loaded_trace(&trace))
    );
    kept
}

#[test]
fn streamed_and_in_memory_sums_of_odd_ranges_are_equal() {
    let mut export = NsysExport::new();
    export.execute_sql(&format!(
        "INSERT INTO NVTX_EVENTS VALUES (0, NULL, 75, 'library', NULL, {0}, 5);
         INSERT INTO NVTX_EVENTS VALUES (95, 300, 59, 'in a domain', NULL, {0}, 5);",
        global_id_of_process(7) | 7
    ));
    let shared = export.add_text("step");
    export.add_nvtx_range(90, Some(400), 59, "step");
    export.execute_sql(&format!(
        "INSERT INTO NVTX_EVENTS VALUES (500, 900, 59, NULL, {shared}, {}, 0);",
        global_id_of_process(7) | 7
    ));
    // These ranges start together with another range, overlap others, are never closed, or contain
    // no launch.
    export.add_nvtx_range(90, Some(200), 59, "inner");
    export.add_nvtx_range(150, Some(600), 60, "overlapping");
    export.add_nvtx_range(510, None, 59, "never closed");
    export.add_nvtx_range(920, Some(950), 59, "empty");
    for launch in 0..6 {
        let start = 100 + launch * 150;
        let (call, kernel) = ((start, start + 10), (start + 1000, start + 1100));
        export.add_launch(call, kernel, launch + 1, if launch % 2 == 0 { "a" } else { "b" });
    }
    // The export gets a second operation of one call, a call and kernel of another process, a
    // kernel without a call and a call without a kernel.
    export.add_memory_copy((2500, 2600), 3, (1, 1, 2));
    export.add_kernel(8, (3000, 3010), 1, "of another process");
    export.add_api_call(8, (700, 720), 1, "cuLaunchKernel");
    export.add_kernel(7, (4000, 4020), 99, "launched by nothing");
    export.add_api_call(7, (960, 970), 98, "cudaLaunchKernel_v7000");
    // A later second call has a correlation id that another call already has.
    export.add_api_call(7, (975, 980), 2, "cudaLaunchKernel_v7000");
    assert_streamed_tables_are_equal(&export, [6, 5, 11, 5]);
}

#[test]
fn ranges_that_are_stored_in_any_order_are_sorted() {
    let mut export = NsysExport::new();
    let name = export.add_text("operator");
    export.execute_sql(&format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000)
         INSERT INTO NVTX_EVENTS SELECT i * 100, i * 100 + 50, 59, NULL, {name}, {}, 0 FROM n;",
        global_id_of_process(7) | 7
    ));
    export.add_nvtx_range(50, Some(20_000_000), 59, "step, stored behind all that it holds");
    export.add_launch((110, 120), (500, 900), 1, "early");
    export.add_launch((9_000_010, 9_000_020), (9_000_500, 9_000_900), 2, "late");
    assert_streamed_tables_are_equal(&export, [2, 2, 4, 2]);
}

/// Adds the creation events of a CUDA graph node and of the node's clone.
fn add_graph_node_creations(export: &NsysExport) {
    export.execute_sql(&format!(
        "CREATE TABLE CUDA_GRAPH_NODE_EVENTS (start INTEGER, globalTid INTEGER,
             graphNodeId INTEGER, originalGraphNodeId INTEGER);
         INSERT INTO CUDA_GRAPH_NODE_EVENTS VALUES (50, {0}, 1, 0), (70, {0}, 2, 1);",
        global_id_of_process(7) | 7
    ));
}

#[test]
fn streamed_and_in_memory_host_times_are_equal() {
    let mut export = NsysExport::new();
    add_graph_node_creations(&export);
    export.execute_sql(&format!(
        "CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS (start INTEGER, globalPid INTEGER,
             deviceId INTEGER, contextId INTEGER, bytes INTEGER, memoryOperationType INTEGER,
             address INTEGER, memKind INTEGER);
         INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS VALUES (60, {1}, 0, 1, 4096, 0, 64, 2),
             (700000, {1}, 0, 1, 4096, 1, 64, 2);
         CREATE TABLE OSRT_API (start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER);
         -- Names of ranges that are known when all ranges were read: a domain, named last.
         INSERT INTO NVTX_EVENTS VALUES (40, 80, 59, 'capture', NULL, {0}, 5),
             (900000, NULL, 75, 'library', NULL, {0}, 5);",
        global_id_of_process(7) | 7,
        global_id_of_process(7)
    ));
    let read = export.add_text("read");
    for step in 0..6 {
        let start = 1_000 + step * 100_000;
        export.add_nvtx_range(start, Some(start + 90_000), 59, &format!("step {step}"));
        let (call, kernel) = ((start + 100, start + 200), (start + 1_000, start + 9_000));
        export.add_launch(call, kernel, 10 * step + 1, "of a graph");
        export.add_api_call(7, (start + 300, start + 10_000), 0, "cudaStreamSynchronize_v3020");
        // The many short calls in the gap exceed the number that the diagnosis examines, and none
        // of them explains the gap.
        for short in 0..100 {
            let at = start + 11_000 + short * 10;
            export.add_api_call(7, (at, at + 1), 0, "cudaEventQuery_v3020");
        }
        let (os, copy) = ((start + 15_000, start + 60_000), (start + 70_000, start + 80_000));
        export.execute_sql(&format!(
            "INSERT INTO OSRT_API VALUES ({}, {}, {}, {read});",
            os.0,
            os.1,
            global_id_of_process(7) | 7
        ));
        export.add_api_call(
            7,
            (start + 61_000, start + 62_000),
            10 * step + 2,
            "cudaMemcpyAsync_v3020",
        );
        export.add_memory_copy(copy, 10 * step + 2, (1, 0, 2));
    }
    export.execute_sql(
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN graphNodeId INTEGER;
         UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET graphNodeId = 2;",
    );
    let found = assert_streamed_diagnosis_is_equal(&export);
    let ids: Vec<&str> = found.findings.iter().map(|finding| finding.rule_id).collect();
    assert!(ids.contains(&"sync-in-loop") && ids.contains(&"pageable-copy"), "{ids:?}");
    let causes: Vec<IdleCauseKind> =
        found.gpu_use_by_process[0].idle_gaps.idle_time_by_cause.iter().map(|of| of.kind).collect();
    // The host's wait reaches into the idle gap, however many calls follow the wait; a call of the
    // operating system reaches into it as well.
    for kind in [
        IdleCauseKind::LaunchThreadWaitedForGpu,
        IdleCauseKind::LaunchThreadInOsCall,
        IdleCauseKind::HostCodeBeforeLaunch,
        IdleCauseKind::LaunchThreadInOtherCudaCall,
    ] {
        assert!(causes.contains(&kind), "{causes:?}");
    }
    assert_eq!(
        found.device_memory_over_time[0].phases.len(),
        3,
        "{:?}",
        found.device_memory_over_time[0].phases
    );
    let inside =
        found.answers.components.iter().find(|of| of.range_path.ends_with("library:capture"));
    assert_eq!(inside.map(|of| of.kernel_count), Some(1), "{:?}", found.answers.components);
}

/// Checks that a trace restricted to ranges while it is read equals the trace that is restricted in
/// memory; returns the number of its GPU operations.
fn assert_restricted_reading_is_equal(export: &NsysExport, pattern: &str) -> Option<usize> {
    let kept =
        restricted_trace::restrict_trace_to_ranges(&export.read_as_trace().unwrap(), pattern);
    let read = restricted_reading::open_trace_inside_ranges(
        &export.sqlite_path(),
        &WantedTraceParts::ALL,
        pattern,
    )
    .unwrap();
    assert_eq!(read.is_some(), kept.is_some(), "{pattern}");
    let (kept, read) = (kept?, read?);
    assert_eq!(
        diagnose_trace_in_memory(&read).diagnosis_to_json(),
        diagnose_trace_in_memory(&kept).diagnosis_to_json(),
        "{pattern}"
    );
    for report in StatsReport::ALL_REPORTS {
        let [read, kept] = [&read, &kept].map(|trace| stats::make_table(trace, report).to_csv());
        assert_eq!(read, kept, "{pattern}, {}", report.nsys_report_name());
    }
    Some(read.gpu_operation_count())
}

#[test]
fn a_restricted_read_equals_a_restriction_in_memory() {
    let mut export = NsysExport::new();
    add_graph_node_creations(&export);
    export.execute_sql(&format!(
        "INSERT INTO NVTX_EVENTS VALUES (900000, NULL, 75, 'library', NULL, {0}, 5),
             (40, 80, 59, 'capture', NULL, {0}, 5);",
        global_id_of_process(7) | 7
    ));
    for step in 0..4 {
        let start = 1_000 + step * 1_000;
        export.add_nvtx_range(start, Some(start + 900), 59, &format!("step {step}"));
        export.add_nvtx_range(start + 100, Some(start + 500), 59, "layer");
        export.add_nvtx_range(start + 150, (step != 3).then_some(start + 400), 59, "attention");
        let name = if step == 0 { "of a graph" } else { "kernel" };
        for launch in 0..4 {
            let call = start + 200 + launch * 170;
            let kernel = (call + 100_000, call + 100_120);
            export.add_launch((call, call + 10), kernel, step * 10 + launch + 1, name);
        }
    }
    export.add_nvtx_range(2_150, Some(3_300), 60, "from one thread to another");
    export.add_api_call(8, (2_200, 2_210), 1, "cuLaunchKernel");
    export.add_kernel(8, (2_300, 2_310), 1, "of another process");
    export.execute_sql(
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN graphNodeId INTEGER;
         UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET graphNodeId = 2
         WHERE demangledName IN (SELECT id FROM StringIds WHERE value = 'of a graph');",
    );
    let inside = |pattern| assert_restricted_reading_is_equal(&export, pattern);
    assert_eq!(inside("step 1"), Some(4));
    assert_eq!(inside("step *"), Some(16));
    // In step 1 the range "from one thread to another" is open between "layer" and "attention", so
    // it interrupts this path.
    assert_eq!(inside("layer/attention"), Some(4));
    assert_eq!(inside("attention"), Some(10), "one was never closed");
    assert_eq!(inside("step 2/layer"), Some(2));
    assert_eq!(inside("from one thread to another"), Some(5));
    assert_eq!(inside("library:capture"), Some(4));
    assert_eq!(inside("nowhere"), None);
}

#[test]
fn other_files_and_other_tables_are_not_streamed() {
    let export = NsysExport::new();
    assert!(
        stats::table_from_streamed_export(&export.sqlite_path(), StatsReport::KernelsByName)
            .unwrap()
            .is_none()
    );
    let (_folder, path) =
        crate::fixture::write_temporary_file("trace.json", br#"{"traceEvents": []}"#);
    assert!(stats::table_from_streamed_export(&path, StatsReport::RangesByName).unwrap().is_none());
    let (_folder, path) = crate::fixture::write_temporary_file("trace.sqlite", b"no database");
    let message = stats::table_from_streamed_export(&path, StatsReport::RangesByName)
        .unwrap_err()
        .to_string();
    insta::assert_snapshot!(reason_in_message(&message), @"it is not an SQLite database");
}
