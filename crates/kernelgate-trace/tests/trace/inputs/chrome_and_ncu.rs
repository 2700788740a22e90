//! Tests of JSON of PyTorch's profiler and of CSV of Nsight Compute, intact and damaged.

use std::io::Write as _;

use crate::fixture::{
    column_of_stats_table, reason_in_message, refusal_message, write_temporary_file,
};
use flate2::Compression;
use flate2::write::GzEncoder;
use kernelgate_trace::diagnose::difference::{SummedTimesOfTrace, compare_summed_traces};
use kernelgate_trace::diagnose::{DiagnosisRuleAnswer, diagnose_trace_in_memory};
use kernelgate_trace::model::Trace;
use kernelgate_trace::model::gpu::CopiedMemoryKind;
use kernelgate_trace::read::{self, WantedTraceParts};
use kernelgate_trace::stats::StatsReport;

const PYTORCH_TRACE_JSON: &str = r#"{
  "schemaVersion": 1,
  "deviceProperties": [{"id": 0, "name": "Test GPU", "numSms": 100}],
  "traceEvents": [
    {"ph": "M", "name": "process_name", "pid": 5, "tid": 0, "args": {"name": "python"}},
    {"ph": "X", "cat": "user_annotation", "name": "step", "pid": 5, "tid": 5,
     "ts": 1712195495505000.0, "dur": 100.0},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 5, "tid": 5,
     "ts": 1712195495505010.25, "dur": 4.5, "args": {"correlation": 9}},
    {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1712195495505020.001,
     "dur": 2.5, "args": {"device": 0, "context": 1, "stream": 7, "correlation": 9,
     "grid": [4, 2, 1], "block": [128, 1, 1], "registers per thread": 40}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "pid": 5, "tid": 5,
     "ts": 1712195495505030.0, "dur": 4.5, "args": {"correlation": 10}},
    {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "pid": 0, "tid": 7,
     "ts": 1712195495505040.0, "dur": 3, "args": {"device": 0, "stream": 7, "correlation": 10,
     "bytes": 4096}},
    {"ph": "i", "name": "Iteration Start", "pid": "Traces", "tid": "Trace", "ts": 1},
    {"ph": "X", "cat": "kernel", "name": 17, "ts": 3},
    {"ph": "B", "name": "open", "pid": 5, "tid": 6, "ts": 1712195495505001}
  ],
  "traceName": "x.json"
}"#;

fn write_and_read_trace(name: &str, content: &[u8]) -> Trace {
    let (_folder, path) = write_temporary_file(name, content);
    read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap()
}

fn compress_with_gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn plain_and_gzip_pytorch_traces_read_equally() {
    for trace in [
        write_and_read_trace("t.json", PYTORCH_TRACE_JSON.as_bytes()),
        write_and_read_trace("t.json.gz", &compress_with_gzip(PYTORCH_TRACE_JSON.as_bytes())),
    ] {
        assert_eq!(column_of_stats_table(&trace, StatsReport::KernelsByName, "Name"), ["gemm"]);
        assert_eq!(
            column_of_stats_table(&trace, StatsReport::KernelsByName, "Total Time (ns)"),
            ["2500"]
        );
        assert_eq!(trace.kernels.on_gpu.start_ns.decoded_row(0), Some(1_712_195_495_505_020_001));
        assert_eq!(
            column_of_stats_table(&trace, StatsReport::KernelsByRange, "NVTX Range"),
            ["step"]
        );
        assert_eq!(
            column_of_stats_table(&trace, StatsReport::KernelLaunchesAndExecutions, "PID"),
            ["5"]
        );
        assert_eq!(trace.shapes[0].grid, [4, 2, 1]);
        assert_eq!(
            (trace.copies.source_memory[0], trace.copies.copied_bytes[0]),
            (CopiedMemoryKind::Pageable, 4096)
        );
        assert_eq!(trace.devices[0].multiprocessors, Some(100));
        // One implausible value is the event whose name is a number; one range was never closed.
        assert_eq!((trace.quality.implausible_value_count, trace.quality.unclosed_ranges), (1, 1));
        assert!(
            diagnose_trace_in_memory(&trace)
                .findings
                .iter()
                .any(|finding| finding.rule_id == "pageable-copy")
        );
    }
}

#[test]
fn rocm_kernels_join_their_launch_calls_by_external_id() {
    let trace = write_and_read_trace(
        "t.json",
        br#"{"traceEvents": [
            {"ph": "X", "cat": "cuda_runtime", "name": "hipGetDeviceProperties", "pid": 5,
             "tid": 5, "ts": 1, "dur": 1, "args": {"External id": 1}},
            {"ph": "X", "cat": "cuda_runtime", "name": "hipExtModuleLaunchKernel", "pid": 5,
             "tid": 5, "ts": 5, "dur": 3, "args": {"External id": 2}},
            {"ph": "X", "cat": "cuda_runtime", "name": "hipExtModuleLaunchKernel", "pid": 5,
             "tid": 5, "ts": 9, "dur": 3, "args": {"External id": 3}},
            {"ph": "X", "cat": "kernel", "name": "Cijk", "pid": 2, "tid": 0, "ts": 20, "dur": 14,
             "args": {"External id": 2}},
            {"ph": "X", "cat": "kernel", "name": "Cijk", "pid": 2, "tid": 0, "ts": 36, "dur": 14,
             "args": {"External id": 3}}
        ]}"#,
    );
    let diagnosis = diagnose_trace_in_memory(&trace);
    assert_eq!(diagnosis.data_quality_findings, []);
    let total = &diagnosis.gpu_use_by_process[0].account.whole_trace_account;
    assert_eq!(
        (total.idle_time_of_all_causes_ns(), total.idle_time_without_known_cause_ns()),
        (2_000, 0)
    );
}

#[test]
fn a_json_array_of_events_is_read_as_a_trace() {
    let trace = write_and_read_trace(
        "t.json",
        br#"[{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2}"#,
    );
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::KernelsByName, "Total Time (ns)"),
        ["2000"]
    );
    assert!(trace.quality.unreadable_parts[0].contains("after 1 events"), "{:?}", trace.quality);
}

#[test]
fn a_cut_file_is_read_up_to_its_end() {
    let text = PYTORCH_TRACE_JSON.as_bytes();
    let cut = text.windows(8).position(|word| word == b"\"Memcpy ").unwrap();
    let trace = write_and_read_trace("t.json", &text[..cut]);
    assert_eq!(trace.kernels.on_gpu.operation_count(), 1);
    insta::assert_snapshot!(trace.quality.unreadable_parts[0], @"JSON after 5 events: EOF while parsing a value at line 1 column 41");

    // The document is long enough that its first half contains complete events.
    let event = r#"{"ph": "X", "cat": "kernel", "name": "k", "ts": 1.5, "dur": 2},"#;
    let mut events: String = (0..20_000)
        .map(|i| event.replace("1.5", &format!("{}.{}", i * 10, i * 7919 % 1000)))
        .collect();
    events.insert_str(0, r#"{"traceEvents": ["#);
    let whole = compress_with_gzip(format!("{}]}}", events.trim_end_matches(',')).as_bytes());
    let trace = write_and_read_trace("t.json.gz", &whole[..whole.len() / 2]);
    let kernels = trace.kernels.on_gpu.operation_count();
    assert!(kernels > 1000 && kernels < 20_000, "{kernels}");
    assert_eq!(trace.quality.unreadable_parts.len(), 1);
    insta::assert_snapshot!(diagnose_trace_in_memory(&trace).data_quality_findings[0].finding_title, @"a part could not be read to its end: JSON after 9983 events: incomplete deflate stream");
}

#[test]
fn json_that_is_no_trace_is_refused() {
    insta::assert_snapshot!(reason_in_message(&refusal_message("a.json", b"{\"a\": [1, 2]}")), @"JSON without `traceEvents`, or whose elements are not events of a trace");
    insta::assert_snapshot!(reason_in_message(&refusal_message("a.json", b"[1, 2]")), @"JSON without `traceEvents`, or whose elements are not events of a trace");
    insta::assert_snapshot!(reason_in_message(&refusal_message("a.json", b"{\"traceEvents\": 5}")), @"JSON after 0 events: `traceEvents` is not an array of events");
    assert!(refusal_message("a.json.gz", &[0x1f, 0x8b, 8, 0, 0]).contains("a.json.gz"));
    assert!(refusal_message("a.json.gz", &compress_with_gzip(b"no json")).contains("expected"));
}

#[test]
fn json_bombs_are_refused() {
    let deep = "[".repeat(40 << 20);
    let message = refusal_message("deep.json.gz", &compress_with_gzip(deep.as_bytes()));
    insta::assert_snapshot!(reason_in_message(&message), @"JSON after 0 events: a value or nesting of more than 16 MiB");
    // Less deep nesting is skipped in an unused field, and makes an event fail whose field is used.
    let inner = format!("{{\"traceEvents\": [{}{}]}}", "[".repeat(100_000), "]".repeat(100_000));
    refusal_message("inner.json", inner.as_bytes());
    let args = format!(
        r#"[{{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2, "args": {}1{}}}]"#,
        "[".repeat(100_000),
        "]".repeat(100_000)
    );
    assert_eq!(
        write_and_read_trace("args.json", args.as_bytes()).kernels.on_gpu.operation_count(),
        1
    );
}

const NCU_DETAILS_CSV: &str = "\
program output, with \"quotes\"
==PROF== Connected to process 4
==PROF== Profiling \"gemm\": 0%....100%
\"ID\",\"Process ID\",\"Kernel Name\",\"Block Size\",\"Grid Size\",\"Device\",\"CC\",\
\"Section Name\",\"Metric Name\",\"Metric Unit\",\"Metric Value\"
\"0\",\"4\",\"gemm\",\"(128, 1, 1)\",\"(9, 32, 1)\",\"0\",\"9.0\",\"Speed\",\
\"Duration\",\"us\",\"1,234.5\"
\"0\",\"4\",\"gemm\",\"(128, 1, 1)\",\"(9, 32, 1)\",\"0\",\"9.0\",\"Speed\",\
\"SM [%]\",\"%\",\"91.0\"
more output
\"0\",\"4\",\"gemm\",\"(128, 1, 1)\",\"(9, 32, 1)\",\"0\",\"9.0\",\"Speed\",\
\"SOL Memory\",\"%\",\"40\"
\"0\",\"4\",\"gemm\",\"(128, 1, 1)\",\"(9, 32, 1)\",\"0\",\"9.0\",\"Launch\",\
\"Policy\",\"\",\"Spread\"
\"1\",\"4\",\"short row\"
==PROF== Disconnected from process 4
";

#[test]
fn ncu_csv_is_found_behind_other_output() {
    let trace = write_and_read_trace("ncu.log", NCU_DETAILS_CSV.as_bytes());
    assert_eq!(trace.profiled_launches.len(), 2);
    let gemm = &trace.profiled_launches[0];
    let value =
        |name: &str| gemm.metrics[&trace.names.find_interned_text(name).unwrap()].metric_value;
    assert_eq!(value("Duration"), 1234.5);
    assert_eq!(value("Compute (SM) Throughput"), 91.0, "under the name of today");
    assert_eq!(value("Memory Throughput"), 40.0);
    assert_eq!(
        (gemm.metrics.len(), gemm.shape.grid, gemm.shape.block),
        (3, [9, 32, 1], [128, 1, 1])
    );
    let diagnosis = diagnose_trace_in_memory(&trace);
    let bound: Vec<&str> = diagnosis
        .findings
        .iter()
        .filter(|finding| finding.rule_id == "kernel-bound")
        .map(|finding| finding.finding_title.as_str())
        .collect();
    assert_eq!(bound, ["gemm is compute-bound"]);
}

/// CSV of one launch of the test kernel `faults` on an H200, recorded by the command line that
/// `kernelgate profile` prints; messages of Nsight Compute's own rules are removed.
const RECORDED_NCU_DETAILS_CSV: &str = include_str!("../fixture/ncu_h200_details.csv");

#[test]
fn ncu_csv_of_the_printed_command_is_read() {
    let trace = write_and_read_trace("faults.csv", RECORDED_NCU_DETAILS_CSV.as_bytes());
    let [launch] = &trace.profiled_launches[..] else {
        panic!("{} launches", trace.profiled_launches.len())
    };
    assert_eq!(trace.names.text_of_name(launch.kernel_name), "faults");
    assert_eq!((launch.shape.grid, launch.shape.block), ([3907, 1, 1], [256, 1, 1]));
    let value =
        |name: &str| launch.metrics[&trace.names.find_interned_text(name).unwrap()].metric_value;
    assert_eq!((value("Duration"), value("Registers Per Thread")), (4608.0, 16.0));
    // Two sections of the report have a metric of this name: the first is a percentage, the second
    // bytes per second.
    assert_eq!(value("Memory Throughput"), 23.01);
    let diagnosis = diagnose_trace_in_memory(&trace);
    let finding =
        |id: &str| diagnosis.findings.iter().find(|finding| finding.rule_id == id).unwrap();
    assert_eq!(finding("kernel-bound").finding_title, "faults is latency-bound");
    let occupancy = finding("achieved-occupancy");
    assert!(
        occupancy.evidence[0]
            .kernel_call_or_copy_name
            .contains("theoretical 100.0 %, achieved 64.7 %")
    );
}

#[test]
fn raw_page_of_ncu_has_one_column_per_metric() {
    let raw = "\"ID\",\"Kernel Name\",\"gpu__time_duration.sum\",\"x__unknown\"\n\
               \"\",\"\",\"nsecond\",\"\"\n\"0\",\"k\",\"4,096\",\"n/a\"\n";
    let trace = write_and_read_trace("raw.csv", raw.as_bytes());
    let metric =
        trace.profiled_launches[0].metrics[&trace.names.find_interned_text("Duration").unwrap()];
    assert_eq!((metric.metric_value, trace.names.text_of_name(metric.unit)), (4096.0, "nsecond"));
    assert_eq!(trace.profiled_launches[0].metrics.len(), 1);
}

#[test]
fn raw_page_metrics_decide_access_and_warp_findings() {
    let raw = "\"ID\",\"Kernel Name\",\"gpu__time_duration.sum\",\
               \"smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio\",\
               \"l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio\",\
               \"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum\",\
               \"l1tex__data_pipe_lsu_wavefronts_mem_shared.sum\",\
               \"smsp__thread_inst_executed_per_inst_executed.ratio\"\n\
               \"\",\"\",\"nsecond\",\"\",\"\",\"\",\"\",\"\"\n\
               \"0\",\"good\",\"4,096\",\"32\",\"16\",\"5\",\"100\",\"31.5\"\n\
               \"1\",\"bad\",\"8,192\",\"8\",\"16\",\"300\",\"400\",\"12\"\n";
    let diagnosis = diagnose_trace_in_memory(&write_and_read_trace("raw.csv", raw.as_bytes()));
    for (rule, value) in [("coalescing", 8.0), ("bank-conflicts", 75.0), ("divergence", 12.0)] {
        let found: Vec<_> = diagnosis.findings.iter().filter(|it| it.rule_id == rule).collect();
        assert_eq!(found.len(), 1, "{rule}: of the bad kernel alone");
        assert_eq!(found[0].measured_value.number_in_unit, value, "{rule}");
        assert!(found[0].finding_title.starts_with("bad: "), "{}", found[0].finding_title);
    }
    let short = raw.lines().map(|line| line.rsplitn(6, ',').last().unwrap()).collect::<Vec<_>>();
    let diagnosis =
        diagnose_trace_in_memory(&write_and_read_trace("short.csv", short.join("\n").as_bytes()));
    let why =
        |rule: &str| diagnosis.question_of_rule(rule).unwrap().reason_without_answer().unwrap();
    insta::assert_snapshot!(why("bank-conflicts"), @"the report lacks the metrics; add --page raw, or --section MemoryWorkloadAnalysis_Tables");
}

#[test]
fn equal_findings_of_one_kernel_are_joined() {
    let raw = "\"ID\",\"Kernel Name\",\"gpu__time_duration.sum\",\
               \"smsp__issue_active.avg.per_cycle_active\",\
               \"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio\",\
               \"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio\",\
               \"smsp__average_warps_issue_stalled_wait_per_issue_active.ratio\",\
               \"smsp__pcsamp_warps_issue_stalled_barrier\",\
               \"smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.ratio\",\
               \"smsp__sass_average_data_bytes_per_sector_mem_global_op_st.ratio\",\
               \"l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum\",\
               \"l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum\"\n\
               \"\",\"\",\"nsecond\",\"\",\"\",\"\",\"\",\"\",\"\",\"\",\"\",\"\"\n\
               \"0\",\"read\",\"4,096\",\"0.2\",\"6\",\"1\",\"2\",\"900\",\"32\",\"4\",\"1000\",\"10\"\n\
               \"1\",\"read\",\"8,192\",\"0.2\",\"9\",\"1\",\"1\",\"900\",\"32\",\"4\",\"1000\",\"10\"\n\
               \"2\",\"fill\",\"4,096\",\"0.9\",\"6\",\"1\",\"2\",\"900\",\"0\",\"32\",\"0\",\"10\"\n\
               \"3\",\"gather\",\"1\",\"0.9\",\"6\",\"1\",\"2\",\"9\",\"4\",\"32\",\"800\",\"100\"\n";
    let diagnosis = diagnose_trace_in_memory(&write_and_read_trace("raw.csv", raw.as_bytes()));
    let found = |rule: &str| {
        let found = diagnosis.findings.iter().filter(|it| it.rule_id == rule);
        found
            .map(|it| (it.finding_title.clone(), it.measured_value.number_in_unit))
            .collect::<Vec<_>>()
    };
    let stalls = "read: warps wait mostly for one reason: long scoreboard (2 launches)";
    assert_eq!(found("stalls"), [(stalls.to_owned(), 90.0)], "of the longer launch");
    // The rule ignores a kernel with 1 % of its sectors in loads, and a kernel without loads.
    let gather = "gather: accesses to global memory are not coalesced";
    assert_eq!(found("coalescing"), [(gather.to_owned(), 4.0)]);
    let question = diagnosis.question_of_rule("coalescing").unwrap();
    let DiagnosisRuleAnswer::Yes { inspected, .. } = &question.answer else {
        panic!("{question:?}")
    };
    assert_eq!((inspected.inspected_count_or_ns, inspected.whole_count_or_ns), (4, 4));
}

#[test]
fn two_reports_of_ncu_are_compared_by_the_durations_of_their_launches() {
    let report = |duration: u32, registers: u32| {
        let raw = format!(
            "\"ID\",\"Kernel Name\",\"gpu__time_duration.sum\",\"launch__registers_per_thread\"\n\
             \"\",\"\",\"nsecond\",\"register/thread\"\n\"0\",\"k\",\"{duration}\",\"{registers}\"\n"
        );
        SummedTimesOfTrace::sum_times_of_loaded_trace(&write_and_read_trace(
            "raw.csv",
            raw.as_bytes(),
        ))
    };
    let difference = compare_summed_traces(report(4000, 96), report(5000, 128));
    assert_eq!(
        (difference.whole_time_change_ns(), difference.part_changes[0].exclusive_time_change_ns()),
        (1000, 1000)
    );
    assert_eq!(
        difference.part_changes[0].describe_launch_shape_and_metric_changes(),
        ["Registers Per Thread 96.0 -> 128.0"]
    );
}

#[test]
fn a_header_without_launches_is_refused() {
    let message =
        refusal_message("ncu.csv", b"\"ID\",\"Process ID\",\"Kernel Name\"\n==PROF== nothing\n");
    insta::assert_snapshot!(reason_in_message(&message), @"it holds no profiled launch");
}
