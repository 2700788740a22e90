//! Tests of files whose programs deviate from the format, and of unsupported files that kernelgate
//! recognises.

use crate::fixture::reason_in_message;
use crate::fixture::{column_of_stats_table, refusal_message, write_temporary_file};
use kernelgate_trace::diagnose::{TraceDiagnosis, diagnose_trace_in_memory};
use kernelgate_trace::model::gpu::CopiedMemoryKind;
use kernelgate_trace::model::{Trace, TraceRecorder};
use kernelgate_trace::read::{self, WantedTraceParts};
use kernelgate_trace::stats::StatsReport;

fn write_and_read_trace(name: &str, content: &[u8]) -> Trace {
    let (_folder, path) = write_temporary_file(name, content);
    read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap()
}

fn titles_of_quality_findings(diagnosis: &TraceDiagnosis) -> Vec<&str> {
    diagnosis.data_quality_findings.iter().map(|finding| finding.finding_title.as_str()).collect()
}

/// A kernel event as PyTorch's profiler writes it, with the given text in front of the event.
fn pytorch_kernel_event(number: u32, before: &str) -> String {
    format!(
        r#"{before}{{"ph": "X", "cat": "kernel", "name": "k{number}", "pid": 0, "tid": 7,
        "ts": {}, "dur": 5, "args": {{"device": 0, "stream": 7, "correlation": {number}}}}}"#,
        number * 10
    )
}

fn chrome_trace_of_events(all: &[String]) -> Vec<u8> {
    format!("{{\"traceEvents\": [{}], \"traceName\": \"t\"}}", all.join(",")).into_bytes()
}

#[test]
fn events_with_bare_quotation_marks_are_skipped_and_counted() {
    let frame = r#"{"ph": "X", "cat": "python_function", "name": "m = Library("_test", "IMPL")",
        "pid": 5, "tid": 5, "ts": 0, "dur": 9, "args": {}},"#;
    let odd = r#"{"ph": "X", "name": "it's 5" long", "pid": 5, "ts": 1, "dur": 2},"#;
    let all: Vec<String> = (1..=300)
        .map(|number| pytorch_kernel_event(number, if number % 3 == 0 { frame } else { odd }))
        .collect();
    let trace = write_and_read_trace("t.json", &chrome_trace_of_events(&all));
    assert_eq!(trace.kernels.on_gpu.operation_count(), 300);
    assert_eq!(trace.quality.invalid_json_events, 300);
    assert!(trace.quality.unreadable_parts.is_empty(), "{:?}", trace.quality.unreadable_parts);
    assert_eq!(trace.metadata["traceName"], "t");
    insta::assert_debug_snapshot!(titles_of_quality_findings(&diagnose_trace_in_memory(&trace)), @r#"
    [
        "300 events are no valid JSON and do not count",
    ]
    "#);
}

/// The 100,000 kernels run one after the other, each on its own stream.
#[test]
fn a_hundred_thousand_streams_are_one_busy_device() {
    let all: Vec<String> = (1..=100_000u32)
        .map(|stream| {
            format!(
                r#"{{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": {stream}, "ts": {},
                "dur": 8, "args": {{"device": 0, "stream": {stream}, "correlation": {stream}}}}}"#,
                stream * 10
            )
        })
        .collect();
    let diagnosis =
        diagnose_trace_in_memory(&write_and_read_trace("t.json", &chrome_trace_of_events(&all)));
    let [device] = &diagnosis.gpu_use_by_process[..] else { panic!("one device") };
    assert_eq!(device.first_start_and_last_end_ns, (10_000, 1_000_008_000));
    assert_eq!(device.gpu_busy_ns, 800_000_000);
    assert!(diagnosis.diagnosis_to_text().len() < 20_000);
}

#[test]
fn operations_at_zero_have_no_times() {
    let zero = r#"{"ph": "X", "cat": "gpu_memset", "name": "Memset", "ts": 0, "dur": 0},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 0.0, "dur": 0},"#;
    let trace = write_and_read_trace(
        "t.json",
        &chrome_trace_of_events(&[pytorch_kernel_event(100, zero), pytorch_kernel_event(200, "")]),
    );
    assert_eq!(
        (trace.kernels.on_gpu.operation_count(), trace.memsets.on_gpu.operation_count()),
        (2, 0)
    );
    assert_eq!(trace.quality.operations_without_times, 2);
    assert_eq!(trace.first_and_last_activity_ns(), Some((1_000_000, 2_005_000)));
}

const XLA_TRACE_JSON: &str = r#"{"displayTimeUnit": "ns", "metadata": {"highres-ticks": true}, "traceEvents": [
    {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
    {"ph": "M", "pid": 1, "tid": 14, "name": "thread_name", "args": {"name": "Stream #14(Compute)"}},
    {"ph": "M", "pid": 1, "tid": 90, "name": "thread_name", "args": {"name": "XLA Ops"}},
    {"ph": "M", "pid": 701, "name": "process_name", "args": {"name": "/host:CPU"}},
    {"ph": "X", "pid": 701, "tid": 5, "ts": 0, "dur": 30, "name": "PjitFunction(step)"},
    {"ph": "X", "pid": 701, "tid": 5, "ts": 10, "dur": 5, "name": "cuLaunchKernel",
     "args": {"correlation_id": "3"}},
    {"ph": "X", "pid": 1, "tid": 14, "ts": 20.5, "dur": 8, "name": "gemm_fusion_dot_1",
     "args": {"correlation_id": "3", "hlo_op": "dot.1", "hlo_module": "jit_step",
     "kernel_details": "regs:32 static_shared:16 dynamic_shared:0 grid:4,1,1 block:128,1,1"}},
    {"ph": "X", "pid": 1, "tid": 14, "ts": 30, "dur": 2, "name": "MemcpyD2H",
     "args": {"memcpy_details": "kind_src:device kind_dst:pinned size:64 dest:0 async:1"}},
    {"ph": "X", "pid": 1, "tid": 90, "ts": 20.5, "dur": 8, "name": "dot.1"},
    {}
]}"#;

#[test]
fn a_trace_of_jax_has_kernels_copies_and_calls() {
    let trace = write_and_read_trace("host.trace.json", XLA_TRACE_JSON.as_bytes());
    assert_eq!(trace.recorder, TraceRecorder::XlaProfiler);
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::KernelsByName, "Name"),
        ["gemm_fusion_dot_1"]
    );
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::KernelsByName, "Total Time (ns)"),
        ["8000"]
    );
    assert_eq!((trace.shapes[0].grid, trace.shapes[0].registers_per_thread), ([4, 1, 1], 32));
    assert_eq!(
        (trace.copies.copied_bytes[0], trace.copies.target_memory[0]),
        (64, CopiedMemoryKind::Pinned)
    );
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::MemoryOperationDurations, "Operation"),
        ["[CUDA memcpy Device-to-Host]"]
    );
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::KernelLaunchesAndExecutions, "API Name"),
        ["cuLaunchKernel"]
    );
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::KernelLaunchesAndExecutions, "PID"),
        ["701"]
    );
    assert_eq!(trace.ranges.range_count(), 1, "what XLA derives from streams is not read again");
}

#[test]
fn the_old_profiler_of_pytorch_has_its_kernels_in_a_process_of_that_name() {
    let text = r#"[{"name": "aten::add", "ph": "X", "ts": 1, "dur": 5, "tid": 1,
         "pid": "CPU functions", "args": {}},
        {"name": "void add<float>(float*)", "ph": "X", "ts": 9.5, "dur": 2, "tid": 0,
         "pid": "CUDA functions", "args": {}}]"#;
    let trace = write_and_read_trace("t.json", text.as_bytes());
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::KernelsByName, "Name"),
        ["void add<float>(float*)"]
    );
    assert_eq!(trace.ranges.range_count(), 1);
}

#[test]
fn files_that_are_not_read_are_named_with_a_command() {
    let empty = refusal_message("e.json", br#"{"traceEvents":[]}"#);
    insta::assert_snapshot!(reason_in_message(&empty), @"the trace has no events: `traceEvents` is empty");
    let tensorrt = br#"[{"count":100},{"name":"fc","timeMs":0.8,"averageMs":0.008}]"#;
    assert!(refusal_message("p.json", tensorrt).contains("trtexec"));
    let objects = refusal_message("o.json", br#"[{"name": "a", "value": 5}]"#);
    insta::assert_snapshot!(reason_in_message(&objects), @"JSON without `traceEvents`, or whose elements are not events of a trace");
    let no_permission =
        b"==PROF== Connected to process 4\n\n==ERROR== ERR_NVGPUCTRPERM - The user \
        does not have permission\n==WARNING== No kernels were profiled.\n";
    assert!(
        refusal_message("noperm.log", no_permission)
            .contains("NVreg_RestrictProfilingToAdminUsers=0")
    );
    let text =
        b"==PROF== Connected to process 4\n  k(int) (1, 1, 1)x(1, 1, 1), Device 0, CC 8.6\n    \
        Section: Occupancy\n    Metric Name   Metric Unit Metric Value\n";
    insta::assert_snapshot!(reason_in_message(&refusal_message("text.log", text)), @"it is the text that ncu prints; print CSV with: ncu --csv --page details PROGRAM > ncu.csv, or keep the report with: ncu --set full -o report PROGRAM");
    assert!(refusal_message("host.xplane.pb", b"\x0a\x10/device:GPU:0").contains("trace.json.gz"));
    let export = crate::fixture::NsysExport::create_with_schema(
        "CREATE TABLE rocpd_kernel_dispatch_1 (id INTEGER);",
    );
    let rocm = export.read_as_trace().unwrap_err().to_string();
    insta::assert_snapshot!(reason_in_message(&rocm), @"it is a database of rocprofv3 (rocpd); record with: rocprofv3 --sys-trace --output-format json -- PROGRAM");
}

fn trace_of_ncu_csv(rows: &[(&str, &str, &str)]) -> Trace {
    let mut text = "\"ID\",\"Process ID\",\"Kernel Name\",\"Metric Name\",\"Metric Unit\",\
                    \"Metric Value\"\n"
        .to_owned();
    for (name, unit, value) in rows {
        text += &format!("\"0\",\"1\",\"gemm\",\"{name}\",\"{unit}\",\"{value}\"\n");
    }
    write_and_read_trace("ncu.csv", text.as_bytes())
}

#[test]
fn a_report_of_any_locale_has_the_same_numbers() {
    let english = [
        ("Duration", "us", "1,117.344"),
        ("Elapsed Cycles", "cycle", "33,120"),
        ("Achieved Occupancy", "%", "5.10"),
        ("Theoretical Occupancy", "%", "100"),
        ("Compute (SM) Throughput", "%", "96.71"),
        ("Memory Throughput", "%", "8.01"),
    ];
    let localised = |thousands: &str, decimal: &str| {
        let rows = english.map(|(name, unit, value)| {
            (name, unit, value.replace(',', "T").replace('.', decimal).replace('T', thousands))
        });
        trace_of_ncu_csv(&rows.each_ref().map(|(name, unit, value)| (*name, *unit, value.as_str())))
    };
    let metrics = |trace: &Trace| -> Vec<(String, f64)> {
        let metrics = &trace.profiled_launches[0].metrics;
        metrics
            .iter()
            .map(|(&name, it)| (trace.names.text_of_name(name).to_owned(), it.metric_value))
            .collect()
    };
    let expected = metrics(&trace_of_ncu_csv(&english));
    assert_eq!(expected.len(), 6);
    for (thousands, decimal) in [(",", "."), (".", ","), ("\u{a0}", ","), ("'", "."), (" ", ",")] {
        let trace = localised(thousands, decimal);
        assert_eq!(metrics(&trace), expected, "{thousands:?} {decimal:?}");
        let noted = titles_of_quality_findings(&diagnose_trace_in_memory(&trace))
            .iter()
            .any(|title| title.contains("1.234,5"));
        assert_eq!(noted, decimal == ",", "{thousands:?} {decimal:?}");
    }
}

#[test]
fn a_value_that_fits_no_format_is_counted() {
    let trace = trace_of_ncu_csv(&[
        ("Duration", "ns", "1.2.3"),
        ("Elapsed Cycles", "cycle", "5"),
        ("P", "", "x"),
    ]);
    assert_eq!(
        (trace.profiled_launches[0].metrics.len(), trace.quality.implausible_value_count),
        (1, 1)
    );
}

#[test]
fn a_word_in_place_of_a_number_is_counted() {
    let rows = [
        ("Compute (SM) Throughput", "%", "oops"),
        ("Memory Throughput", "%", "x1"),
        ("Waves Per SM", "", "2"),
        ("Waves Per SM", "", "many"),
        // Texts for modes, and for metrics that `ncu` could not measure, are not counted as odd.
        ("Function Cache Configuration", "", "CachePreferNone"),
        ("DRAM Throughput", "%", "n/a"),
    ];
    let trace = trace_of_ncu_csv(&rows);
    assert_eq!(trace.quality.implausible_value_count, 3);
    let diagnosis = diagnose_trace_in_memory(&trace);
    insta::assert_debug_snapshot!(titles_of_quality_findings(&diagnosis), @r#"
    [
        "3 values do not fit their field and do not count",
    ]
    "#);
}

#[test]
fn a_spreadsheet_may_store_a_report_with_other_separators() {
    let text = "\"ID\",\"Process ID\",\"Kernel Name\",\"Metric Name\",\"Metric Unit\",\
                \"Metric Value\"\n\"0\",\"1\",\"f(int, int)\",\"Memory Throughput\",\"%\",\"40,5\"\n";
    for separator in [";", "\t"] {
        let stored = text.replace("\",\"", &format!("\"{separator}\""));
        let trace = write_and_read_trace("ncu.csv", stored.as_bytes());
        let values: Vec<f64> =
            trace.profiled_launches[0].metrics.values().map(|it| it.metric_value).collect();
        assert_eq!(values, [40.5], "{separator:?}");
        assert_eq!(trace.names.text_of_name(trace.profiled_launches[0].kernel_name), "f(int, int)");
    }
}

/// Files of the folder that this variable names; without it the test says that it is skipped.
fn shared_fault_file_or_skip(name: &str) -> Option<std::path::PathBuf> {
    let Some(folder) = std::env::var_os("SHARED_FAULTS") else {
        eprintln!("skipped: SHARED_FAULTS names no folder of faulty traces");
        return None;
    };
    Some(std::path::Path::new(&folder).join(name))
}

#[test]
fn reports_of_other_locales_agree() {
    let Some(english) = shared_fault_file_or_skip("ncu-locale/ua.csv") else { return };
    let metrics = |path: &std::path::Path| {
        let trace = read::open_trace_file(path, &WantedTraceParts::ALL).unwrap();
        let values = |launch: &kernelgate_trace::model::kernel_metrics::NcuProfiledLaunch| {
            launch.metrics.values().map(|metric| metric.metric_value).collect::<Vec<f64>>()
        };
        trace.profiled_launches.iter().map(values).collect::<Vec<_>>()
    };
    assert_eq!(metrics(&english), metrics(&english.with_file_name("ul.csv")));
}

const ROCPROFV3_JSON: &str = r#"{"rocprofiler-sdk-tool": [{
    "metadata": {"pid": 77, "init_time": 1, "fini_time": 9},
    "agents": [{"id": {"handle": 1}, "type": 1, "name": "AMD EPYC"},
        {"id": {"handle": 5}, "type": 2, "name": "gfx942", "product_name": "AMD Instinct MI300X",
         "cu_count": 304, "wave_front_size": 64, "max_waves_per_cu": 32}],
    "strings": {"buffer_records": [{"kind": "NONE", "operations": []},
        {"kind": "HIP_RUNTIME_API", "operations": ["hipMalloc", "hipLaunchKernel"]}],
        "marker_api": [{"key": 4, "value": "step"}]},
    "kernel_symbols": [{"kernel_id": 3, "kernel_name": "_Z3addPf.kd"},
        {"kernel_id": 4, "formatted_kernel_name": "Cijk_Ailk_MT64"}],
    "buffer_records": {
        "kernel_dispatch": [
            {"start_timestamp": 1000, "end_timestamp": 3000, "correlation_id": {"internal": 9},
             "dispatch_info": {"agent_id": {"handle": 5}, "queue_id": {"handle": 2}, "kernel_id": 3,
             "workgroup_size": {"x": 64, "y": 1, "z": 1}, "grid_size": {"x": 130, "y": 2, "z": 1}}},
            {"start_timestamp": 0, "end_timestamp": 0, "dispatch_info": {"kernel_id": 4}}],
        "hip_api": [{"kind": 1, "operation": 1, "thread_id": 78, "start_timestamp": 500,
            "end_timestamp": 700, "correlation_id": {"internal": 9}}],
        "memory_copy": [{"start_timestamp": 4000, "end_timestamp": 4500, "bytes": 64,
            "src_agent_id": {"handle": 1}, "dst_agent_id": {"handle": 5}}],
        "marker_api": [{"thread_id": 78, "start_timestamp": 400, "end_timestamp": 800,
            "correlation_id": {"internal": 4}}]}}]}"#;

#[test]
fn a_trace_of_rocprofv3_has_kernels_calls_and_markers() {
    let trace = write_and_read_trace("results.json", ROCPROFV3_JSON.as_bytes());
    assert_eq!(trace.recorder, TraceRecorder::Rocprof);
    assert_eq!(column_of_stats_table(&trace, StatsReport::KernelsByName, "Name"), ["add(float*)"]);
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::KernelLaunchesAndExecutions, "API Name"),
        ["hipLaunchKernel"]
    );
    assert_eq!(column_of_stats_table(&trace, StatsReport::KernelsByRange, "NVTX Range"), ["step"]);
    assert_eq!((trace.shapes[0].grid, trace.shapes[0].block), ([3, 2, 1], [64, 1, 1]));
    assert_eq!(
        (trace.devices[0].device_name.as_str(), trace.devices[0].device_ordinal),
        ("AMD Instinct MI300X", 0)
    );
    assert_eq!(
        column_of_stats_table(&trace, StatsReport::MemoryOperationDurations, "Operation"),
        ["[CUDA memcpy Host-to-Device]"]
    );
    assert_eq!(trace.quality.operations_without_times, 1);
    let broken = refusal_message("results.json", &ROCPROFV3_JSON.as_bytes()[..200]);
    insta::assert_snapshot!(reason_in_message(&broken), @"JSON of rocprofv3: EOF while parsing a string at line 4 column 42");
}
