//! Tests of Nsight Systems exports that are old, odd or damaged.

use crate::fixture::{
    NsysExport, column_of_stats_table, finding_titles, global_id_of_process, reason_in_message,
    refusal_message, shorten_paths_to_file_names, write_temporary_file,
};
use kernelgate_trace::analyze::launches::graph_nodes;
use kernelgate_trace::analyze::ranges::restricted_trace;
use kernelgate_trace::diagnose::{
    FindingSeverity, TraceJoinedForAnalyses, diagnose_trace_in_memory,
};
use kernelgate_trace::model::Trace;
use kernelgate_trace::read::{self, WantedTraceParts};
use kernelgate_trace::stats::{self, StatsReport};

#[test]
fn files_of_no_known_format_are_refused_by_name() {
    insta::assert_snapshot!(reason_in_message(&refusal_message("trace.sqlite", b"no database")), @"it is not an SQLite database");
    let notes = refusal_message("notes.txt", b"no trace");
    insta::assert_snapshot!(reason_in_message(&notes), @"it is neither an SQLite export of Nsight Systems, nor CSV of Nsight Compute, nor Chrome's JSON (PyTorch's profiler), nor a recording of `kernelgate profile`, nor a report with the extension .nsys-rep or .ncu-rep");
    let manifest = refusal_message("Cargo.toml", b"[package]\nname = \"a\"\n");
    assert_eq!(reason_in_message(&manifest), reason_in_message(&notes));
    insta::assert_snapshot!(reason_in_message(&refusal_message("empty.json", b"")), @"it is empty");
    let missing = read::open_trace_file("/no/such/trace.sqlite".as_ref(), &WantedTraceParts::ALL)
        .unwrap_err();
    assert!(missing.to_string().contains("/no/such/trace.sqlite"), "{missing}");
    let other = NsysExport::create_with_schema("CREATE TABLE people (name TEXT);");
    let message = other.read_as_trace().unwrap_err().to_string();
    insta::assert_snapshot!(reason_in_message(&message), @"an SQLite database without the tables of an Nsight Systems export");
}

#[test]
fn a_report_without_its_program_names_the_command() {
    let message = refusal_message("a.nsys-rep", b"binary");
    insta::assert_snapshot!(shorten_paths_to_file_names(reason_in_message(&message)), @"`nsys` is not installed here; where it is, run: nsys export --type sqlite --output FOLDER/a.sqlite FOLDER/a.nsys-rep");
    let message = refusal_message("a.qdstrm", b"binary");
    insta::assert_snapshot!(shorten_paths_to_file_names(reason_in_message(&message)), @"`nsys profile` left it because it could not make its report; where Nsight Systems is whole, run: QdstrmImporter -i FOLDER/a.qdstrm");
    let message = refusal_message("a.ncu-rep", b"binary");
    insta::assert_snapshot!(shorten_paths_to_file_names(reason_in_message(&message)), @"it is not a report of Nsight Compute: its first bytes are not NVR; if ncu opens it, run: ncu --csv --page details --import FOLDER/a.ncu-rep > FOLDER/a.csv");
}

#[test]
fn a_database_that_is_being_written_is_refused() {
    let export = NsysExport::new();
    export.execute_sql("BEGIN EXCLUSIVE; INSERT INTO META_DATA_EXPORT VALUES ('a', 'b');");
    let message = export.read_as_trace().unwrap_err().to_string();
    assert!(message.contains("locked") && message.contains("trace.sqlite"), "{message}");
}

/// An SQLite view could compute without end, so it is not read as a table.
#[test]
fn a_view_in_place_of_a_table_is_not_computed() {
    let export = NsysExport::create_with_schema(
        "CREATE TABLE StringIds (id INTEGER, value TEXT);
         CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS
         WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)
         SELECT i * 9 AS start, i * 9 + 5 AS end, i AS correlationId, 7 AS globalPid,
             1 AS demangledName FROM n;",
    );
    let trace = export.read_as_trace().unwrap();
    assert_eq!(trace.kernels.on_gpu.operation_count(), 0);
    assert!(
        trace.quality.missing_tables_or_fields.contains(&"CUPTI_ACTIVITY_KIND_KERNEL".to_owned())
    );
    let quality = diagnose_trace_in_memory(&trace).data_quality_findings;
    insta::assert_debug_snapshot!(finding_titles(&quality), @r#"
    [
        "the trace holds no kernel, copy, set or graph launch: nothing about the GPU can be concluded",
        "not recorded: CUPTI_ACTIVITY_KIND_KERNEL, CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_ACTIVITY_KIND_SYNCHRONIZATION, NVTX_EVENTS",
    ]
    "#);
}

#[test]
fn a_truncated_export_is_read_up_to_its_damage() {
    let mut export = NsysExport::new();
    let name = export.add_text("kernel");
    export.execute_sql(&format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)
         INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL
         SELECT i * 1000, i * 1000 + 500, 0, 1, 7, i, {}, {name}, {name}, 32, 1, 1, 1, 32, 1, 1
         FROM n;",
        global_id_of_process(7)
    ));
    let bytes = std::fs::read(export.sqlite_path()).unwrap();
    let (_folder, path) = write_temporary_file("cut.sqlite", &bytes[..bytes.len() / 2]);
    let trace = read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap();
    let kernels = trace.kernels.on_gpu.operation_count();
    assert!(kernels > 1000 && kernels < 20_000, "{kernels}");
    assert!(trace.quality.unreadable_parts[0].contains("truncated"), "{:?}", trace.quality);
    let quality = diagnose_trace_in_memory(&trace).data_quality_findings;
    insta::assert_debug_snapshot!(finding_titles(&quality), @r#"
    [
        "a part could not be read to its end: CUPTI_ACTIVITY_KIND_KERNEL after 9847 rows: the database is truncated or damaged; export it again",
    ]
    "#);
    let message = refusal_message("head.sqlite", &bytes[..100]);
    insta::assert_snapshot!(reason_in_message(&message), @"the database is truncated or damaged; export it again");
}

#[test]
fn an_export_without_gpu_work_is_reported_as_such() {
    let export = NsysExport::create_with_schema("CREATE TABLE StringIds (id INTEGER, value TEXT);");
    let trace = export.read_as_trace().unwrap();
    let diagnosis = diagnose_trace_in_memory(&trace);
    assert_eq!(diagnosis.data_quality_findings[0].rule_id, "data-quality");
    insta::assert_snapshot!(diagnosis.data_quality_findings[0].finding_title, @"the trace holds no kernel, copy, set or graph launch: nothing about the GPU can be concluded");
    assert!(
        trace.quality.missing_tables_or_fields.contains(&"CUPTI_ACTIVITY_KIND_KERNEL".to_owned())
    );
    for report in StatsReport::ALL_REPORTS {
        assert_eq!(
            stats::make_table(&trace, report).rows,
            Vec::<Vec<_>>::new(),
            "{}",
            report.nsys_report_name()
        );
    }
}

#[test]
fn an_old_schema_with_few_columns_is_read() {
    let export = NsysExport::create_with_schema(
        "CREATE TABLE StringIds (id INTEGER, value TEXT);
         CREATE TABLE EXPORT_META_DATA (name TEXT, value TEXT);
         INSERT INTO EXPORT_META_DATA VALUES ('EXPORT_SCHEMA_VERSION', '2.9');
         INSERT INTO StringIds VALUES (1, 'old_kernel');
         CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, shortName INTEGER);
         INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (100, 300, 1), (400, 500, 1),
            (600, 700, 99);",
    );
    let trace = export.read_as_trace().unwrap();
    assert_eq!(trace.metadata["EXPORT_SCHEMA_VERSION"], "2.9");
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::KernelsByName, "Name"),
        ["old_kernel", "unknown kernel"]
    );
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::KernelsByName, "Total Time (ns)"),
        ["300", "100"]
    );
}

#[test]
fn a_table_of_kernels_alone_is_an_export() {
    let export = NsysExport::create_with_schema(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, shortName INTEGER);
         INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (100, 300, 1), (0, 0, 1), (400, 500, 1);",
    );
    let trace = export.read_as_trace().unwrap();
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::KernelsByName, "Total Time (ns)"),
        ["300"]
    );
    let missing = trace.quality.missing_tables_or_fields.join(" ");
    for absent in ["StringIds", "KERNEL.correlationId", "KERNEL.deviceId", "KERNEL.streamId"] {
        assert!(missing.contains(absent), "{missing}");
    }
    let quality = diagnose_trace_in_memory(&trace).data_quality_findings;
    insta::assert_debug_snapshot!(finding_titles(&quality), @r#"
    [
        "1 operations have no times and do not count: 33.3 % of all",
        "not recorded: StringIds, CUPTI_ACTIVITY_KIND_KERNEL.globalPid, CUPTI_ACTIVITY_KIND_KERNEL.deviceId, CUPTI_ACTIVITY_KIND_KERNEL.streamId, CUPTI_ACTIVITY_KIND_KERNEL.correlationId, CUPTI_ACTIVITY_KIND_KERNEL.demangledName, CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_ACTIVITY_KIND_SYNCHRONIZATION, NVTX_EVENTS",
    ]
    "#);
    assert_eq!(quality[0].severity, FindingSeverity::Severe);
}

#[test]
fn equal_correlation_ids_of_two_processes_stay_apart() {
    let mut export = NsysExport::new();
    for (pid, kernel) in [(7, "mine"), (8, "yours")] {
        export.add_kernel(pid, (1000 * pid, 1000 * pid + 10), 1, kernel);
        export.add_api_call(pid, (10 * pid, 10 * pid + 5), 1, "cudaLaunchKernel_v7000");
    }
    let trace = export.read_as_trace().unwrap();
    let mut pairs: Vec<(String, String)> =
        column_of_stats_table(&trace, StatsReport::KernelLaunchesAndExecutions, "PID")
            .into_iter()
            .zip(column_of_stats_table(
                &trace,
                StatsReport::KernelLaunchesAndExecutions,
                "Kernel Name",
            ))
            .collect();
    pairs.sort();
    let pair = |pid: &str, kernel: &str| (pid.to_owned(), kernel.to_owned());
    assert_eq!(pairs, [pair("7", "mine"), pair("8", "yours")]);
}

#[test]
fn kernels_without_launch_call_are_listed_and_counted() {
    let mut export = NsysExport::new();
    export.add_launch((10, 20), (100, 200), 1, "known");
    export.add_kernel(7, (300, 400), 2, "orphan");
    export.add_kernel(7, (500, 600), -1, "without id");
    export.add_nvtx_range(0, Some(50), 59, "step");
    let trace = export.read_as_trace().unwrap();
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::KernelsByRange, "Kernel Name"),
        ["orphan", "without id", "known"]
    );
    assert_eq!(column_of_stats_table(&trace, StatsReport::KernelsByRange, "PID"), ["", "", "7"]);
    assert_eq!(trace.quality.implausible_value_count, 0, "-1 stands for none");
    insta::assert_debug_snapshot!(finding_titles(&diagnose_trace_in_memory(&trace).data_quality_findings), @r#"
    [
        "2 of 3 operations were launched by calls that the trace does not hold",
    ]
    "#);
}

#[test]
fn odd_records_are_kept_and_counted() {
    let mut export = NsysExport::new();
    export.add_launch((10, 20), (100, 100), 1, "zero long");
    export.add_launch((30, 40), (200, 150), 2, "backwards");
    export.add_launch((50, 60), (0, 0), 3, "without times");
    export.add_launch((70, 80), (300, 310), 1 << 40, "odd id");
    export.add_nvtx_range(0, None, 59, "unclosed");
    export.execute_sql(
        "INSERT INTO StringIds VALUES (77, CAST(x'6b65c328' AS TEXT));
         UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = 77 WHERE start = 300;",
    );
    let trace = export.read_as_trace().unwrap();
    let quality = &trace.quality;
    assert_eq!(
        (
            quality.spans_with_reversed_times,
            quality.operations_without_times,
            quality.unclosed_ranges
        ),
        (1, 1, 1)
    );
    // Two values are implausible: the correlation ids of a kernel and of its launch call.
    assert_eq!((quality.implausible_value_count, quality.invalid_utf8_texts), (2, 1));
    let names = column_of_stats_table(&trace, StatsReport::KernelsByName, "Name");
    assert_eq!(names, ["ke\u{fffd}(", "backwards", "zero long"]);
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::RangesByName, "Total Time (ns)"),
        ["310"],
        "to the last time"
    );
    diagnose_trace_in_memory(&trace);
}

#[test]
fn overlapping_ranges_each_count_enclosed_kernels() {
    let mut export = NsysExport::new();
    export.add_nvtx_range(0, Some(100), 60, "a");
    export.add_nvtx_range(50, Some(200), 60, "b");
    export.add_nvtx_range(60, Some(60), 59, "empty");
    export.add_launch((10, 20), (1000, 1001), 1, "in a");
    export.add_launch((60, 70), (1010, 1012), 2, "in both");
    export.add_launch((90, 120), (1020, 1023), 3, "in b");
    let trace = export.read_as_trace().unwrap();
    let table = stats::make_table(&trace, StatsReport::KernelsByRange);
    let rows: Vec<(String, String)> = table
        .rows
        .iter()
        .map(|row| (row[0].cell_as_csv_text(), row[12].cell_as_csv_text()))
        .collect();
    let row = |range: &str, kernel: &str| (range.to_owned(), kernel.to_owned());
    assert_eq!(
        rows,
        [row("a", "in both"), row("a", "in a"), row("b", "in b"), row("b", "in both")]
    );
    let levels =
        column_of_stats_table(&trace, StatsReport::RangesByProjectedGpuTime, "Avg Range Lvl");
    assert_eq!(levels, ["0.0", "0.0"], "neither encloses the other");
}

#[test]
fn domains_stand_before_the_names_of_their_ranges() {
    let export = NsysExport::new();
    export.execute_sql(&format!(
        "INSERT INTO NVTX_EVENTS VALUES (5, 9, 59, 'create', NULL, {0}, 3);
         INSERT INTO NVTX_EVENTS VALUES (1, NULL, 75, 'cuBLAS', NULL, {0}, 3);
         INSERT INTO NVTX_EVENTS VALUES (6, 8, 59, 'plain', NULL, {0}, 0);
         INSERT INTO NVTX_EVENTS VALUES (7, NULL, 34, 'a mark', NULL, {0}, 0);",
        global_id_of_process(7) | 7
    ));
    let trace = export.read_as_trace().unwrap();
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::RangesByName, "Range"),
        ["cuBLAS:create", "plain"]
    );
}

/// Trace of two steps, of which the first is a warm-up; each has a nested range with kernels and
/// one kernel outside the nested range.
fn trace_of_two_steps() -> Trace {
    let mut export = NsysExport::new();
    for step in 0..2 {
        let start = step * 1000;
        export.add_nvtx_range(start, Some(start + 900), 59, ["warm-up", "step/1"][step as usize]);
        export.add_nvtx_range(start + 100, Some(start + 300), 59, "part");
        export.add_launch(
            (start + 150, start + 160),
            (start + 200, start + 250),
            2 * step + 1,
            "inner",
        );
        export.add_launch(
            (start + 400, start + 410),
            (start + 500, start + 530),
            2 * step + 2,
            "outer",
        );
    }
    export.add_launch((5000, 5010), (5100, 5200), 99, "after");
    export.read_as_trace().unwrap()
}

#[test]
fn a_range_restricts_every_table() {
    let all = trace_of_two_steps();
    let kernels = |pattern: &str| {
        restricted_trace::restrict_trace_to_ranges(&all, pattern).map(|trace| {
            let names = column_of_stats_table(&trace, StatsReport::KernelsByName, "Name");
            let counts = column_of_stats_table(&trace, StatsReport::KernelsByName, "Instances");
            names.into_iter().zip(counts).map(|(n, c)| format!("{n} {c}")).collect::<Vec<_>>()
        })
    };
    assert_eq!(kernels("step/1").unwrap(), ["inner 1", "outer 1"]);
    assert_eq!(kernels("part").unwrap(), ["inner 2"], "the end of a path, in either step");
    assert_eq!(kernels("step/1/part").unwrap(), ["inner 1"]);
    assert_eq!(kernels("warm-up/part").unwrap(), ["inner 1"]);
    assert_eq!(kernels("step*").unwrap(), ["inner 1", "outer 1"]);
    assert_eq!(kernels("art"), None, "whole names only");
    let inside = restricted_trace::restrict_trace_to_ranges(&all, "step/1").unwrap();
    assert_eq!(
        column_of_stats_table(&inside, StatsReport::RangesByName, "Range"),
        ["step/1", "part"]
    );
    assert_eq!(column_of_stats_table(&inside, StatsReport::ApiCallsByFunction, "Num Calls"), ["2"]);
    assert_eq!(
        column_of_stats_table(
            &inside,
            StatsReport::RangesByProjectedGpuTime,
            "Total Proj Time (ns)"
        ),
        ["330", "50"]
    );
}

#[test]
fn memory_of_the_device_is_read_and_that_of_the_host_is_not() {
    let mut export = NsysExport::new();
    export.add_launch((10, 20), (1_000, 9_000), 1, "k");
    export.add_nvtx_range(0, Some(10_000), 59, "step_1");
    // Memory kind 1 is pinned host memory, 2 device memory; the record of one free has no size.
    export.execute_sql(&format!(
        "CREATE TABLE CUDA_GPU_MEMORY_USAGE_EVENTS (start INTEGER, globalPid INTEGER,
             deviceId INTEGER, contextId INTEGER, address INTEGER, bytes INTEGER, memKind INTEGER,
             memoryOperationType INTEGER);
         INSERT INTO CUDA_GPU_MEMORY_USAGE_EVENTS VALUES
             (5, {0}, 0, 1, 16, 4000, 2, 0), (6, {0}, 0, 1, 32, 9000, 1, 0),
             (7, {0}, 0, 1, 48, 1000, 2, 0), (8, {0}, 0, 1, 16, 0, 2, 1);",
        global_id_of_process(7)
    ));
    let memory =
        &diagnose_trace_in_memory(&export.read_as_trace().unwrap()).device_memory_over_time[0];
    assert_eq!(memory.held_bytes_over_time, [(5, 4000), (7, 5000), (8, 1000)]);
    assert_eq!(
        (memory.pid, memory.peak_time_ns_and_bytes, memory.frees_without_allocation),
        (7, (7, 5000), 0)
    );
}

#[test]
fn kernels_of_a_graph_have_the_ranges_of_its_capture() {
    let mut export = NsysExport::new();
    // Two graph nodes are captured in two ranges, and cloned outside these ranges when the graph is
    // instantiated.
    export.add_nvtx_range(100, Some(200), 59, "encode");
    export.add_nvtx_range(200, Some(300), 59, "decode");
    export.add_nvtx_range(1_000, Some(9_000), 59, "step_0");
    export.add_kernel(7, (2_000, 3_000), 1, "k");
    export.add_kernel(7, (3_000, 6_000), 1, "k");
    export.add_api_call(7, (1_100, 1_200), 1, "cudaGraphLaunch_v10000");
    export.execute_sql(&format!(
        "ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN graphNodeId INTEGER;
         UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET graphNodeId = 20 WHERE start = 2000;
         UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET graphNodeId = 21 WHERE start = 3000;
         CREATE TABLE CUDA_GRAPH_NODE_EVENTS (start INTEGER, globalTid INTEGER,
             graphNodeId INTEGER, originalGraphNodeId INTEGER);
         INSERT INTO CUDA_GRAPH_NODE_EVENTS VALUES (150, {0}, 10, NULL), (250, {0}, 11, NULL),
             (500, {0}, 20, 10), (510, {0}, 21, 11);",
        global_id_of_process(7) | 7
    ));
    let trace = export.read_as_trace().unwrap();
    let tree = TraceJoinedForAnalyses::join_trace(&trace).gpu_work_by_range_tree(&[]);
    let busy = |path: &str| tree.iter().find(|range| range.range_path == path).unwrap().gpu_busy_ns;
    assert_eq!((busy("step_0/encode"), busy("step_0/decode")), (1_000, 3_000));
    let inside = restricted_trace::restrict_trace_to_ranges(&trace, "decode").unwrap();
    assert_eq!(inside.kernels.on_gpu.start_ns.iter_decoded_rows().collect::<Vec<_>>(), [3_000]);
    assert_eq!(
        graph_nodes::graph_nodes_created_inside_ranges(&inside),
        graph_nodes::graph_nodes_created_inside_ranges(&trace)
    );
}

#[test]
fn marks_are_moments_of_a_timeline_and_no_ranges() {
    let mut export = NsysExport::new();
    export.add_launch((10, 20), (1_000, 9_000), 1, "k");
    export.add_nvtx_range(500, None, 34, "epoch 1");
    let trace = export.read_as_trace().unwrap();
    assert_eq!((trace.host_marks.time_ns.as_slice(), trace.ranges.range_count()), (&[500][..], 0));
    assert_eq!(trace.quality.unclosed_ranges, 0);
    let mut timeline = Vec::new();
    kernelgate_trace::export::write_perfetto_json(&trace, &mut timeline).unwrap();
    let timeline = String::from_utf8(timeline).unwrap();
    assert!(timeline.contains("\"ph\":\"i\"") && timeline.contains("epoch 1"), "{timeline}");
}
