//! Tests of `kernelgate stats` and `diagnose` on traces that the tests write.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use regex::Regex;
use tempfile::TempDir;

use crate::outputs::assert_text_snapshot;
use crate::package::outcome::redact_varying_parts;
use crate::package::{html_elements_with_words, lines_with_word};

/// A Chrome trace of a warm-up and two steps, each with one kernel, and of a copy from pageable
/// memory.
const CHROME_TRACE_OF_TWO_STEPS: &str = r#"{"traceEvents": [
  {"ph": "X", "cat": "user_annotation", "name": "warm-up", "pid": 5, "tid": 5, "ts": 0, "dur": 90},
  {"ph": "X", "cat": "user_annotation", "name": "step#1", "pid": 5, "tid": 5, "ts": 100, "dur": 90},
  {"ph": "X", "cat": "user_annotation", "name": "step#2", "pid": 5, "tid": 5, "ts": 200, "dur": 90},
  {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 5, "tid": 5, "ts": 10,
   "dur": 5, "args": {"correlation": 1}},
  {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 5, "tid": 5, "ts": 110,
   "dur": 5, "args": {"correlation": 2}},
  {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 5, "tid": 5, "ts": 210,
   "dur": 5, "args": {"correlation": 3}},
  {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "pid": 5, "tid": 5, "ts": 230,
   "dur": 5, "args": {"correlation": 4}},
  {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 20, "dur": 50,
   "args": {"device": 0, "stream": 7, "correlation": 1}},
  {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 120, "dur": 30,
   "args": {"device": 0, "stream": 7, "correlation": 2}},
  {"ph": "X", "cat": "kernel", "name": "softmax", "pid": 0, "tid": 7, "ts": 220, "dur": 10,
   "args": {"device": 0, "stream": 7, "correlation": 3}},
  {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": 7,
   "ts": 240, "dur": 10, "args": {"device": 0, "stream": 7, "correlation": 4, "bytes": 1000}}
]}"#;

fn write_trace_file() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.json");
    std::fs::write(&path, CHROME_TRACE_OF_TWO_STEPS).unwrap();
    (folder, path)
}

fn run_kernelgate(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kernelgate")).args(arguments).output().unwrap()
}

/// Standard output of a kernelgate call that must succeed.
fn successful_output(arguments: &[&str]) -> String {
    let output = run_kernelgate(arguments);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Error of the program when the input is wrong.
fn usage_error(arguments: &[&str]) -> String {
    let output = run_kernelgate(arguments);
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn tables_and_a_timeline_as_whole_outputs() {
    let (folder, path) = write_trace_file();
    let out = folder.path().join("timeline.json");
    let stats = successful_output(&["stats", path_as_text(&path)]);
    assert_text_snapshot("why", "stats", &stats.replace(path_as_text(&path), "TRACE"));
    let export = successful_output(&["export", path_as_text(&path), "--out", path_as_text(&out)]);
    assert_text_snapshot("why", "export", &export.replace(path_as_text(folder.path()), "FOLDER"));
}

fn path_as_text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_table_comes_as_csv_as_text_and_as_json() {
    let (_folder, path) = write_trace_file();
    let stats = ["stats", path_as_text(&path), "--report", "cuda_gpu_kern_sum", "--format"];
    let csv = successful_output(&[&stats[..], &["csv"]].concat());
    assert_eq!(
        csv,
        "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n\
         88.9,80000,2,40000.0,40000.0,30000,50000,14142.1,gemm\n\
         11.1,10000,1,10000.0,10000.0,10000,10000,0.0,softmax\n"
    );
    let table = successful_output(&[&stats[..], &["table"]].concat());
    insta::assert_snapshot!(table, @r"
    Time (%)  Total Time (ns)  Instances  Avg (ns)  Med (ns)  Min (ns)  Max (ns)  StdDev (ns)  Name
        88.9           80,000          2  40,000.0  40,000.0    30,000    50,000     14,142.1  gemm
        11.1           10,000          1  10,000.0  10,000.0    10,000    10,000          0.0  softmax
    ");
    let json: serde_json::Value =
        serde_json::from_str(&successful_output(&[&stats[..], &["json"]].concat())).unwrap();
    assert_eq!(json["schema_version"], 1);
    let row = &json["traces"][0]["tables"][0]["rows"][0];
    assert_eq!((&row["Name"], &row["Instances"]), (&"gemm".into(), &2.into()));
    assert_eq!(row["StdDev (ns)"], 14142.1);
}

#[test]
fn a_large_streamed_export_has_the_tables_of_a_small_export() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sqlite");
    rusqlite::Connection::open(&path)
        .unwrap()
        .execute_batch(
            "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
             INSERT INTO StringIds VALUES (1, 'gemm'), (2, 'cudaLaunchKernel'), (3, 'step');
             CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, correlationId, globalPid,
                 demangledName);
             INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (200, 300, 1, 16777216, 1);
             CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, correlationId, globalTid, nameId);
             INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (100, 110, 1, 16777217, 2);
             CREATE TABLE NVTX_EVENTS (start, end, eventType, globalTid, textId);
             INSERT INTO NVTX_EVENTS VALUES (90, 150, 59, 16777217, 3);",
        )
        .unwrap();
    let tables = || successful_output(&["stats", path_as_text(&path), "--format", "csv"]);
    let small = tables();
    assert!(small.contains("step,PushPop,1,1,1,1,100,100.0,"), "{small}");
    // The database file is so long that its rows are aggregated while they are read; the appended
    // zeros change nothing.
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(300 << 20).unwrap();
    assert_eq!(tables(), small);
}

#[test]
fn a_table_that_cannot_be_read_is_reported_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sqlite");
    let database = rusqlite::Connection::open(&path).unwrap();
    database
        .execute_batch(
            "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
             INSERT INTO StringIds VALUES (1, 'gemm');
             CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, correlationId, globalPid,
                 demangledName);
             WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)
             INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL SELECT i * 9, i * 9 + 5, i, 16777216, 1 FROM n;",
        )
        .unwrap();
    drop(database);
    // Half of the SQLite table is overwritten with zeros, and the file is so long that it is read
    // once for each table.
    let length = std::fs::metadata(&path).unwrap().len();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(length / 2).unwrap();
    let mut texts = String::new();
    for length in [length, 300 << 20] {
        file.set_len(length).unwrap();
        let output = run_kernelgate(&["stats", path_as_text(&path), "--format", "csv"]);
        let messages = String::from_utf8(output.stderr).unwrap();
        assert_eq!(messages.lines().count(), 1, "{messages}");
        texts.push_str(&messages.replace(path_as_text(&path), "TRACE"));
    }
    insta::assert_snapshot!(texts, @r"
    warning: TRACE: CUPTI_ACTIVITY_KIND_KERNEL after 10067 rows: the database is truncated or damaged; export it again
    warning: TRACE: CUPTI_ACTIVITY_KIND_KERNEL after 10067 rows: the database is truncated or damaged; export it again
    ");
}

#[test]
fn ranges_and_filters_narrow_tables() {
    let (_folder, path) = write_trace_file();
    let stats = ["stats", path_as_text(&path), "--report", "cuda_gpu_kern_sum", "--format", "csv"];
    let steps = successful_output(&[&stats[..], &["--range", "step#*"]].concat());
    assert!(steps.contains("75.0,30000,1"), "without the warm-up:\n{steps}");
    let softmax = successful_output(&[&stats[..], &["--filter", "^soft"]].concat());
    assert!(softmax.contains("11.1,10000") && !softmax.contains("gemm"), "{softmax}");
    let none = usage_error(&[&stats[..], &["--range", "nowhere"]].concat());
    insta::assert_snapshot!(none.replace(path_as_text(&path), "TRACE"), @"error: --range nowhere: no range of TRACE has this path");
    let unknown = usage_error(&["stats", path_as_text(&path), "--report", "gpu_sum"]);
    insta::assert_snapshot!(unknown, @r"
    error: invalid value 'gpu_sum' for '--report <NAME>': no such table; there are cuda_gpu_kern_sum, cuda_gpu_kern_gb_sum, cuda_api_sum, nvtx_sum, nvtx_pushpop_sum, nvtx_kern_sum, nvtx_gpu_proj_sum, cuda_kern_exec_sum, cuda_gpu_mem_time_sum, cuda_gpu_mem_size_sum, cuda_gpu_sum

    For more information, try '--help'.
    ");
}

#[test]
fn several_traces_go_into_one_folder_with_a_summary() {
    let (_first, a) = write_trace_file();
    let (_second, b) = write_trace_file();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("tables");
    successful_output(&[
        "stats",
        path_as_text(&a),
        path_as_text(&b),
        "--format",
        "csv",
        "--out",
        path_as_text(&out),
    ]);
    let summary: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(out.join("summary.json")).unwrap()).unwrap();
    let traces = summary["traces"].as_array().unwrap();
    assert_eq!(traces.len(), 2);
    assert_eq!((&traces[0]["kernels"], &traces[0]["top_kernel"]), (&3.into(), &"gemm".into()));
    assert_eq!(traces[0]["gpu_busy_ns"], 100_000);
    let files: Vec<&str> = traces
        .iter()
        .flat_map(|trace| trace["files"].as_array().unwrap())
        .map(|file| file.as_str().unwrap())
        .collect();
    assert_eq!(files.len(), 22);
    files.iter().for_each(|file| assert!(out.join(file).is_file(), "{file}"));
}

#[test]
fn a_diagnosis_comes_as_text_and_as_json() {
    let (_folder, path) = write_trace_file();
    let report = successful_output(&["diagnose", path_as_text(&path)]);
    assert_text_snapshot("why", "diagnose", &report.replace(path_as_text(&path), "TRACE"));
    let json: serde_json::Value = serde_json::from_str(&successful_output(&[
        "diagnose",
        path_as_text(&path),
        "--format",
        "json",
    ]))
    .unwrap();
    let diagnosis = &json["traces"][0]["diagnosis"];
    assert_eq!(diagnosis["records"]["kernels"], 3);
    assert_eq!(diagnosis["top_kernels"][0]["name"], "gemm");
    let inside = successful_output(&["diagnose", path_as_text(&path), "--range", "step#1"]);
    insta::assert_snapshot!(lines_with_word(&inside, "copies"), @r"
    by range                                       all      compute exposed comm     copies       idle
    pageable-copy, synchronous-copy, exposed-copy: the trace holds no copies
    ");
}

#[test]
fn findings_change_the_exit_code_only_where_that_is_asked_for() {
    let (folder, path) = write_trace_file();
    let exit = |arguments: &[&str]| run_kernelgate(arguments).status.code();
    assert_eq!(exit(&["diagnose", path_as_text(&path)]), Some(0));
    // The host launches a kernel every 100 µs, so the GPU is idle for most of the time.
    for (severity, code) in [("severe", 1), ("warning", 1), ("information", 1)] {
        assert_eq!(exit(&["diagnose", path_as_text(&path), "--fail-on", severity]), Some(code));
    }
    let busy = folder.path().join("busy.json");
    let events = CHROME_TRACE_OF_TWO_STEPS
        .split("\n  {\"ph\": \"X\", \"cat\": \"gpu_memcpy\"")
        .next()
        .unwrap();
    let one = events.replace("\"ts\": 120, \"dur\": 30", "\"ts\": 70, \"dur\": 150");
    std::fs::write(&busy, format!("{}]}}", one.trim_end().trim_end_matches(','))).unwrap();
    assert_eq!(exit(&["diagnose", path_as_text(&busy), "--fail-on", "severe"]), Some(0));
    // A trace without GPU data answers no question about a GPU.
    let empty = folder.path().join("empty.json");
    let host = r#"{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 5,
        "tid": 5, "ts": 0, "dur": 90}]}"#;
    std::fs::write(&empty, host).unwrap();
    assert_eq!(exit(&["diagnose", path_as_text(&empty)]), Some(3));
    assert_eq!(exit(&["diagnose", path_as_text(&empty), "--checklist"]), Some(3));
    assert_eq!(exit(&["diagnose", "nowhere.json"]), Some(2));
    let two =
        usage_error(&["diagnose", path_as_text(&path), path_as_text(&busy), "--fail-on", "severe"]);
    insta::assert_snapshot!(two, @"error: --fail-on judges findings of single traces, not a comparison; add --each");
}

#[test]
fn two_traces_are_compared_and_three_are_not() {
    let (folder, path) = write_trace_file();
    let slower = folder.path().join("slower.json");
    std::fs::write(
        &slower,
        CHROME_TRACE_OF_TWO_STEPS.replace(r#""ts": 240, "dur": 10"#, r#""ts": 240, "dur": 15"#),
    )
    .unwrap();
    let two = ["diagnose", path_as_text(&path), path_as_text(&slower)];
    let report = successful_output(&two);
    insta::assert_snapshot!(lines_with_word(&report, "memcpy"), @"+5.0 µs   100.0 %  copy longer: [CUDA memcpy Host-to-Device] (pageable to device)");
    assert!(report.contains("100.0 %  step#\n"), "{report}");
    let json: serde_json::Value =
        serde_json::from_str(&successful_output(&[&two[..], &["--format", "json"]].concat()))
            .unwrap();
    assert_eq!(json["compared"][1], path_as_text(&slower));
    let part = &json["difference"]["parts"][0];
    assert_eq!((&part["kind"], &part["change_ns"]), (&"copy".into(), &5000.into()));
    let inside = successful_output(&[&two[..], &["--range", "step#1"]].concat());
    insta::assert_snapshot!(lines_with_word(&inside, "takes"), @"B takes as long as A, from the first operation to the last");
    for each in [&["--each"][..], &[path_as_text(&path)]] {
        let report = successful_output(&[&two[..], each].concat());
        assert!(report.matches("Top kernels").count() >= 2, "{report}");
    }
    let none = usage_error(&["diagnose", path_as_text(&path), "nowhere.json"]);
    insta::assert_snapshot!(none, @"error: failed to read nowhere.json: No such file or directory (os error 2)");
}

#[test]
fn traces_that_declare_different_ranks_are_joined() {
    let folder = tempfile::tempdir().unwrap();
    // Rank 1 of the test traces computes longer, so rank 0 waits for it in every all-reduce.
    let rank = |number: u32, compute: u32| {
        let step = |step: u32| {
            let start = step * 1000;
            let kernel = |name: &str, stream: u32, from: u32, until: u32| {
                format!(
                    r#"{{"ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": {stream},
                        "ts": {from}, "dur": {}, "args": {{"device": 0, "stream": {stream}}}}}"#,
                    until - from
                )
            };
            let compute = start + compute;
            let all_reduce = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)";
            let both =
                [kernel("gemm", 7, start, compute), kernel(all_reduce, 13, compute, start + 900)];
            both.join(", ")
        };
        let events: Vec<String> = (0..20).map(step).collect();
        let path = folder.path().join(format!("rank{number}.json"));
        let trace = format!(
            r#"{{"distributedInfo": {{"rank": {number}, "world_size": 2}}, "traceEvents": [{}]}}"#,
            events.join(", ")
        );
        std::fs::write(&path, trace).unwrap();
        path
    };
    let (a, b) = (rank(0, 300), rank(1, 800));
    let report = successful_output(&["diagnose", path_as_text(&a), path_as_text(&b)]);
    insta::assert_snapshot!(lines_with_word(&report, "rank 1"), @r"
    straggler: rank 1 came last to 20 of 20 collectives and delayed them by 10.000 ms (51.0 % of the
    rank 1                       16.000 ms     2.000 ms   1.900 ms        0 ns   10.000 ms      20
    rank 0 waits 10.000 ms for rank 1
    80.4 %   16.000 ms  rank 1: gemm
    10.1 %    2.000 ms  rank 1: communication
    9.5 %    1.900 ms  rank 1: between dependent operations
    50.3 %   10.000 ms  rank 1 as fast as the median rank
    ");
    let json: serde_json::Value = serde_json::from_str(&successful_output(&[
        "diagnose",
        path_as_text(&a),
        path_as_text(&b),
        "--format",
        "json",
    ]))
    .unwrap();
    assert_eq!(json["job"]["stragglers"][0], "rank 1");
    assert_eq!(json["job"]["joined"], 20);
    let page = folder.path().join("page.html");
    successful_output(&[
        "diagnose",
        path_as_text(&a),
        path_as_text(&b),
        "--html",
        path_as_text(&page),
    ]);
    let page = std::fs::read_to_string(page).unwrap();
    for anchor in ["findings", "account", "skew", "collectives", "path"] {
        assert!(page.contains(&format!("<section id=\"{anchor}\">")), "{anchor}");
    }
    assert_ne!(page.matches("class=\"finding severe\"").count(), 0, "{page}");
    insta::assert_snapshot!(html_elements_with_words(&page, "straggler rank 1"), @"severe: straggler rank 1");
    insta::assert_snapshot!(html_elements_with_words(&page, "10.1"), @r"
    Exposed communication: 10.1 to 60.3 % of the time of a rank.
    10.1%
    10.1%
    ");
    let compared = successful_output(&["diagnose", path_as_text(&a), path_as_text(&b), "--each"]);
    assert!(compared.matches("Critical path").count() == 2, "{compared}");
    let failed =
        run_kernelgate(&["diagnose", path_as_text(&a), path_as_text(&b), "--fail-on", "severe"]);
    assert_eq!(failed.status.code(), Some(1));
    let alone = run_kernelgate(&["diagnose", path_as_text(&a), "--ranks"]);
    assert_eq!(alone.status.code(), Some(3), "one rank alone shows no waiting");
}

#[test]
fn a_timeline_can_be_read_again() {
    let (folder, path) = write_trace_file();
    let out = folder.path().join("timeline.json");
    let output = successful_output(&["export", path_as_text(&path), "--out", path_as_text(&out)]);
    insta::assert_snapshot!(redact_varying_parts(&output), @"FOLDER/timeline.json: open it at https://ui.perfetto.dev");
    let table = |path: &Path| {
        successful_output(&[
            "stats",
            path_as_text(path),
            "--report",
            "nvtx_kern_sum",
            "--format",
            "csv",
        ])
    };
    assert_eq!(table(&out), table(&path));
    let written: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&out).unwrap()).unwrap();
    let arrows = written["traceEvents"].as_array().unwrap().iter();
    assert_eq!(arrows.filter(|event| event["ph"] == "s").count(), 4, "one an operation");
    assert_eq!(table(&path), table(&out));
    let printed = successful_output(&["export", path_as_text(&path), "--range", "step#2"]);
    assert!(printed.contains("softmax") && !printed.contains("gemm"), "{printed}");
}

#[test]
fn files_that_cannot_be_read_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("broken.sqlite");
    std::fs::write(&path, "SQLite format 3\0 but not really").unwrap();
    let mut texts = String::new();
    for verb in ["stats", "diagnose"] {
        let words = usage_error(&[verb, path_as_text(&path)]);
        texts.push_str(&words.replace(path_as_text(folder.path()), "FOLDER"));
    }
    insta::assert_snapshot!(texts, @r"
    error: failed to read FOLDER/broken.sqlite: it is not an SQLite database
    error: failed to read FOLDER/broken.sqlite: it is not an SQLite database
    ");
}

#[test]
fn a_diagnosis_comes_as_a_page() {
    let (folder, path) = write_trace_file();
    // Names in a trace file are not trusted, so the page must escape them.
    let hostile = CHROME_TRACE_OF_TWO_STEPS.replace("softmax", "softmax<script>alert(1)</script>");
    let memory = r#",{"ph": "i", "name": "[memory]", "pid": 5, "tid": 5, "ts": 105,
        "args": {"Device Type": 1, "Device Id": 0, "Addr": 16, "Bytes": 3000000}},
       {"ph": "i", "name": "[memory]", "pid": 5, "tid": 5, "ts": 106,
        "args": {"Device Type": 0, "Device Id": -1, "Addr": 32, "Bytes": 700}}]}"#;
    std::fs::write(&path, hostile.replace("\n]}", memory)).unwrap();
    let page = folder.path().join("page.html");
    successful_output(&["diagnose", path_as_text(&path), "--html", path_as_text(&page)]);
    let page = std::fs::read_to_string(page).unwrap();
    for anchor in ["findings", "timeline", "kernels", "memory", "table-kernels", "rules"] {
        assert!(page.contains(&format!("<section id=\"{anchor}\">")), "{anchor}");
    }
    let severe = page.matches("class=\"finding severe\"").count();
    assert_ne!(severe, 0, "severity has a colour: {page}");
    assert!(!page.contains("<script>alert"), "{page}");
    // The page shows GPU memory, and not the host's memory events of the trace.
    assert!(page.contains("3.00 MB") && !page.contains("700 B"), "{page}");
    for title in [">When the GPU worked<", "stream 7: kernels"] {
        assert!(page.contains(title), "{title}: {page}");
    }
    let complaint =
        usage_error(&["diagnose", path_as_text(&path), path_as_text(&path), "--html", "x.html"]);
    insta::assert_snapshot!(complaint, @"error: --html takes one trace, or the ranks of one job with --ranks, not 2 traces");
}

#[test]
fn a_page_has_a_stacked_bar_for_each_iteration() {
    let folder = tempfile::tempdir().unwrap();
    let step = |number: u32| {
        let at = number * 1_000;
        format!(
            r#"{{"ph": "X", "cat": "user_annotation", "name": "step", "pid": 5, "tid": 5,
                "ts": {at}, "dur": 990, "args": {{}}}},
            {{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 5, "tid": 5,
                "ts": {}, "dur": 5, "args": {{"correlation": {number}}}}},
            {{"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": {},
                "dur": 600, "args": {{"device": 0, "stream": 7, "correlation": {number}}}}},
            {{"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
                "pid": 0, "tid": 9, "ts": {}, "dur": 300, "args": {{"device": 0, "stream": 9,
                "correlation": {}}}}}"#,
            at + 10,
            at + 20,
            at + 620,
            number + 100
        )
    };
    let steps: Vec<String> = (1..=4).map(step).collect();
    let path = folder.path().join("trace.json");
    std::fs::write(&path, format!("{{\"traceEvents\": [{}]}}", steps.join(","))).unwrap();
    let page = folder.path().join("page.html");
    successful_output(&["diagnose", path_as_text(&path), "--html", path_as_text(&page)]);
    let page = std::fs::read_to_string(page).unwrap();
    let section = page.split("<section id=\"account\">").nth(1).unwrap();
    let section = section.split("</section>").next().unwrap();
    let text = Regex::new(r"<[^>]*>\s*").unwrap().replace_all(section, "\n").into_owned();
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert_text_snapshot("why", "page_account", &lines.join("\n"));
    assert!(page.contains("; replayed: "), "{page}");
}

#[cfg(unix)]
#[test]
fn output_files_never_overwrite_the_input_trace() {
    let (folder, path) = write_trace_file();
    let before = std::fs::read(&path).unwrap();
    let (link, hard) = (folder.path().join("link.json"), folder.path().join("hard.json"));
    std::os::unix::fs::symlink(&path, &link).unwrap();
    std::fs::hard_link(&path, &hard).unwrap();
    for out in [&path, &link, &hard] {
        let why = usage_error(&["export", path_as_text(&path), "--out", path_as_text(out)]);
        assert_eq!(
            why,
            format!(
                "error: --out {}: it is {}, which is read: give it another name\n",
                out.display(),
                path.display()
            )
        );
        let why = usage_error(&["diagnose", path_as_text(out), "--html", path_as_text(&path)]);
        assert_eq!(
            why,
            format!(
                "error: --html {}: it is {}, which is read: give it another name\n",
                path.display(),
                out.display()
            )
        );
        assert_eq!(std::fs::read(&path).unwrap(), before);
    }
    assert!(link.is_symlink());
    // An existing output file that is not a link is replaced as usual.
    let other = folder.path().join("other.json");
    std::fs::write(&other, "old").unwrap();
    successful_output(&["export", path_as_text(&path), "--out", path_as_text(&other)]);
    assert_ne!(std::fs::read_to_string(&other).unwrap(), "old");
}
