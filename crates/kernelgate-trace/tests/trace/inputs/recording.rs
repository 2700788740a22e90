//! Tests of recordings of `kernelgate profile`: reading, the time of ranges inside graphs, what
//! bounds a case, and broken files.

use std::path::Path;

use crate::fixture::{lines_with_word, reason_in_message};
use kernelgate_trace::analyze::ranges::restricted_trace;
use kernelgate_trace::diagnose::{
    RangeTreeRow, TimeBoundOfRange, TraceDiagnosis, TraceJoinedForAnalyses,
    diagnose_trace_in_memory,
};
use kernelgate_trace::model::Trace;
use kernelgate_trace::model::gpu::{CopiedMemoryKind, SynchronisationTarget};
use kernelgate_trace::read::{self, WantedTraceParts};
use kernelgate_trace::stats::{self, StatsReport};
use serde_json::{Value, json};

const DEVICE_CONTEXT_AND_STREAM: [u32; 3] = [0, 1, 7];

fn device_context_and_stream_json() -> Value {
    json!({ "device": DEVICE_CONTEXT_AND_STREAM[0], "context": DEVICE_CONTEXT_AND_STREAM[1], "stream": DEVICE_CONTEXT_AND_STREAM[2] })
}

/// Recording of the case `f/w/c` with empty lists, to which tests add records.
fn empty_recording_json() -> Value {
    json!({
        "schema": "kernelgate-recording",
        "schema_version": 1,
        "case": "f/w/c",
        "steps": 2,
        "limits": [],
        "device": { "id": 0, "name": "Test GPU", "compute": [9, 0], "multiprocessors": 100,
                    "threads_per_sm": 2048, "registers_per_sm": 65536,
                    "shared_per_sm": 233472, "blocks_per_sm": 32 },
        "trace": {
            "pid": 42,
            "names": ["f/w/c", "step", "wait", "layer_0", "layer_1", "kernel_a", "cuLaunchKernel",
                      "cuGraphLaunch", "cuStreamSynchronize"],
            "kernels": [], "copies": [], "sets": [], "calls": [], "waits": [], "ranges": [],
            "graph_nodes": [], "allocations": [], "overhead": [], "dropped": 0,
        },
    })
}

fn append_row_to_list(recording: &mut Value, list: &str, row: Value) {
    recording["trace"][list].as_array_mut().unwrap().push(row);
}

fn append_range(recording: &mut Value, name: u32, span: (u64, u64)) {
    let row = json!({ "name": name, "start": span.0, "end": span.1, "thread": 5 });
    append_row_to_list(recording, "ranges", row);
}

fn append_api_call(recording: &mut Value, name: u32, span: (u64, u64), id: u32) {
    let row =
        json!({ "name": name, "start": span.0, "end": span.1, "thread": 5, "correlation": id });
    append_row_to_list(recording, "calls", row);
}

fn append_kernel(recording: &mut Value, span: (u64, u64), id: u32, node: u64) {
    let row = json!({
        "name": 5, "start": span.0, "end": span.1, "on": device_context_and_stream_json(), "correlation": id,
        "grid": [200, 1, 1], "block": [256, 1, 1], "registers": 32, "static_shared": 0,
        "dynamic_shared": 1024, "local": 0, "graph_node": node,
    });
    append_row_to_list(recording, "kernels", row);
}

fn read_recording_text(text: &str) -> Result<Trace, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recording.json");
    std::fs::write(&path, text).unwrap();
    read::open_trace_file(&path, &WantedTraceParts::ALL).map_err(|error| error.to_string())
}

fn read_recording_json(recording: &Value) -> Trace {
    read_recording_text(&recording.to_string()).unwrap()
}

fn range_tree_row_at_path<'a>(tree: &'a [RangeTreeRow], path: &str) -> &'a RangeTreeRow {
    tree.iter().find(|row| row.range_path == path).unwrap_or_else(|| panic!("{path}: {tree:#?}"))
}

/// Two steps, each one launch of a graph with two kernels of 40 µs that were captured in layers.
fn recording_of_graph_launches(limits: Value) -> Value {
    let mut recording = empty_recording_json();
    recording["limits"] = limits;
    append_range(&mut recording, 0, (1_000, 300_000));
    for step in 0..2 {
        let start = 2_000 + step * 10_000;
        append_range(&mut recording, 1, (start, start + 6_000));
        append_api_call(&mut recording, 7, (start + 1_000, start + 5_000), 10 + step as u32);
        for layer in 0..2 {
            let begin = 20_000 + step * 100_000 + layer * 41_000;
            append_kernel(&mut recording, (begin, begin + 40_000), 10 + step as u32, 100 + layer);
        }
    }
    for layer in 0..2 {
        append_row_to_list(
            &mut recording,
            "graph_nodes",
            json!({ "id": 100 + layer, "ranges": [3 + layer] }),
        );
    }
    append_range(&mut recording, 2, (22_000, 299_000));
    append_api_call(&mut recording, 8, (23_000, 290_000), 0);
    recording
}

/// The second kernel of each launch begins before the first kernel has ended, as with programmatic
/// dependent launch.
#[test]
fn overlapping_launches_count_once() {
    let mut recording = recording_of_graph_launches(json!([]));
    for kernel in recording["trace"]["kernels"].as_array_mut().unwrap() {
        if kernel["graph_node"] == 101 {
            let start = kernel["start"].as_u64().unwrap() - 31_000;
            kernel["start"] = start.into();
        }
    }
    let trace = read_recording_json(&recording);
    let both = TraceJoinedForAnalyses::join_trace(&trace).gpu_work_by_range_tree(&[]);
    assert_eq!(
        range_tree_row_at_path(&both, "f/w/c/step/layer_#").non_overlapping_gpu_ns,
        2 * 81_000
    );
    let apart =
        TraceJoinedForAnalyses::join_trace(&trace).gpu_work_by_range_tree(&["layer_0", "layer_1"]);
    let own = |layer: &str| {
        range_tree_row_at_path(&apart, &format!("f/w/c/step/{layer}")).non_overlapping_gpu_ns
    };
    assert_eq!([own("layer_0"), own("layer_1")], [2 * 40_000, 2 * 41_000]);
    assert_eq!(
        range_tree_row_at_path(&apart, "f/w/c/step").non_overlapping_gpu_ns,
        range_tree_row_at_path(&apart, "f/w/c/step").gpu_busy_ns
    );
}

#[test]
fn every_recorded_list_fills_its_trace_table() {
    let mut recording = recording_of_graph_launches(json!([{ "by": "memory", "time_ns": 1.5 }]));
    append_row_to_list(
        &mut recording,
        "copies",
        json!({ "start": 5, "end": 9, "on": device_context_and_stream_json(), "correlation": 3, "bytes": 64, "kind": 1,
                "source": 1, "target": 3, "graph_node": 0 }),
    );
    append_row_to_list(
        &mut recording,
        "sets",
        json!({ "start": 10, "end": 12, "on": device_context_and_stream_json(), "bytes": 8 }),
    );
    append_row_to_list(
        &mut recording,
        "waits",
        json!({ "start": 20, "end": 30, "on": { "device": 9, "context": 1, "stream": 7 },
                "kind": 3 }),
    );
    append_row_to_list(
        &mut recording,
        "allocations",
        json!({ "time": 1, "on": device_context_and_stream_json(), "bytes": -64 }),
    );
    append_row_to_list(&mut recording, "overhead", json!([7, 8]));
    recording["trace"]["dropped"] = 3.into();
    let trace = read_recording_json(&recording);
    assert_eq!(
        (trace.kernels.on_gpu.operation_count(), trace.demangled_kernel_name(0)),
        (4, "kernel_a")
    );
    assert_eq!(trace.shapes[0].dynamic_shared_bytes, 1024);
    assert_eq!(
        (trace.copies.source_memory[0], trace.copies.target_memory[0]),
        (CopiedMemoryKind::Pageable, CopiedMemoryKind::DeviceMemory)
    );
    assert_eq!(trace.names.text_of_name(trace.copies.direction_label[0]), "Host-to-Device");
    assert_eq!(
        (trace.memsets.set_bytes[0], trace.allocations.allocated_or_freed_bytes[0]),
        (8, 64)
    );
    assert!(trace.allocations.is_free[0]);
    assert_eq!(trace.synchronisation_waits.kind, [SynchronisationTarget::HostWaitsForStream]);
    assert_eq!(trace.places[trace.synchronisation_waits.on_gpu.place.at(0).0 as usize].device, 0);
    assert_eq!(
        (trace.quality.dropped_records, &trace.quality.profiler_overhead_spans[..]),
        (3, &[(7, 8)][..])
    );
    assert_eq!(trace.devices[0].multiprocessors, Some(100));
    assert_eq!(trace.declared_work[0].range_path, "f/w/c/step");
    assert_eq!(
        (trace.calls.call_count(), trace.ranges.range_count(), trace.processes[0].pid),
        (3, 4, 42)
    );
}

#[test]
fn ranges_of_a_capture_have_their_own_time_inside_each_launch() {
    let trace = read_recording_json(&recording_of_graph_launches(json!([])));
    let tree = TraceJoinedForAnalyses::join_trace(&trace).gpu_work_by_range_tree(&[]);
    let paths: Vec<&str> = tree.iter().map(|row| row.range_path.as_str()).collect();
    assert_eq!(paths, ["f/w/c", "f/w/c/step", "f/w/c/step/layer_#"]);
    let layers = range_tree_row_at_path(&tree, "f/w/c/step/layer_#");
    // Ranges whose names differ only in a number are one row, which sums their spans in all
    // launches.
    assert_eq!(
        (layers.ranges_with_operations, layers.operations, layers.gpu_busy_ns),
        (4, 4, 160_000)
    );
    assert_eq!(layers.total_gpu_span_ns, 160_000);
    assert_eq!((layers.total_host_ns, layers.depth), (None, 2));
    let step = range_tree_row_at_path(&tree, "f/w/c/step");
    assert_eq!((step.ranges_with_operations, step.total_host_ns), (2, Some(12_000)));
    assert_eq!((step.gpu_busy_ns, step.total_gpu_span_ns), (160_000, 162_000));
    assert!((step.share_of_busy_time - 1.0).abs() < 1e-9);
    // The tables of `nsys stats` can also be made from this recording.
    assert_eq!(stats::make_table(&trace, StatsReport::KernelsByName).rows.len(), 1);
}

#[test]
fn a_range_of_a_capture_restricts_a_trace() {
    let trace = read_recording_json(&recording_of_graph_launches(json!([])));
    let layer = restricted_trace::restrict_trace_to_ranges(&trace, "layer_1").unwrap();
    assert_eq!((layer.kernels.on_gpu.operation_count(), layer.calls.call_count()), (2, 2));
    assert_eq!(
        restricted_trace::restrict_trace_to_ranges(&trace, "layer_*")
            .unwrap()
            .kernels
            .on_gpu
            .operation_count(),
        4
    );
    assert_eq!(
        restricted_trace::restrict_trace_to_ranges(&trace, "step")
            .unwrap()
            .kernels
            .on_gpu
            .operation_count(),
        4
    );
    assert!(restricted_trace::restrict_trace_to_ranges(&trace, "layer_2").is_none());
}

#[test]
fn declared_work_gives_the_bound_of_a_step() {
    let bound = |memory: f64, compute: f64| {
        let limits = json!([{ "by": "memory", "time_ns": memory * 81_000.0 },
                            { "by": "matmul bf16", "time_ns": compute * 81_000.0 }]);
        let trace = read_recording_json(&recording_of_graph_launches(limits));
        let reached = range_tree_row_at_path(
            &TraceJoinedForAnalyses::join_trace(&trace).gpu_work_by_range_tree(&[]),
            "f/w/c/step",
        )
        .bound;
        let diagnosis = diagnose_trace_in_memory(&trace);
        let title = title_of_finding(&diagnosis, "work-bound").unwrap();
        assert!(title.contains(reached.printed_time_bound()), "{title}");
        reached
    };
    assert_eq!(bound(0.95, 0.02), TimeBoundOfRange::MemoryBound);
    assert_eq!(bound(0.02, 0.45), TimeBoundOfRange::ComputeBound);
    assert_eq!(bound(0.35, 0.1), TimeBoundOfRange::LatencyBound);
    assert_eq!(bound(0.55, 0.5), TimeBoundOfRange::MemoryAndComputeBound);
    let without = read_recording_json(&recording_of_graph_launches(json!([])));
    assert_eq!(
        range_tree_row_at_path(
            &TraceJoinedForAnalyses::join_trace(&without).gpu_work_by_range_tree(&[]),
            "f/w/c/step"
        )
        .bound,
        TimeBoundOfRange::BusyWithoutKnownLimit
    );
    let questions = diagnose_trace_in_memory(&without).questions;
    let work = questions.iter().find(|question| question.rule_id == "work-bound").unwrap();
    assert!(work.reason_without_answer().is_some(), "{work:?}");
}

fn title_of_finding<'a>(diagnosis: &'a TraceDiagnosis, id: &str) -> Option<&'a str> {
    diagnosis
        .findings
        .iter()
        .find(|finding| finding.rule_id == id)
        .map(|found| found.finding_title.as_str())
}

#[test]
fn a_device_that_waits_for_launches_is_launch_bound_whatever_its_limits() {
    let mut recording = empty_recording_json();
    recording["limits"] = json!([{ "by": "memory", "time_ns": 900_000.0 }]);
    append_range(&mut recording, 0, (1_000, 2_000_000));
    append_range(&mut recording, 1, (1_000, 1_900_000));
    for launch in 0..150u32 {
        let start = 2_000 + u64::from(launch) * 10_000;
        append_api_call(&mut recording, 6, (start, start + 4_000), launch + 1);
        append_kernel(&mut recording, (start + 5_000, start + 7_000), launch + 1, 0);
    }
    let trace = read_recording_json(&recording);
    assert_eq!(
        range_tree_row_at_path(
            &TraceJoinedForAnalyses::join_trace(&trace).gpu_work_by_range_tree(&[]),
            "f/w/c/step"
        )
        .bound,
        TimeBoundOfRange::LaunchBound
    );
    let diagnosis = diagnose_trace_in_memory(&trace);
    assert!(title_of_finding(&diagnosis, "launch-bound").is_some());
    assert_eq!(diagnosis.recorder_and_version, "CUPTI");
}

#[test]
fn declared_work_gives_shares_of_the_peaks() {
    let mut recording = recording_of_graph_launches(json!([]));
    recording["device"]["name"] = "NVIDIA H100 80GB HBM3".into();
    // The case reaches half of the tensor peak over 40 µs, and a quarter of the memory peak over
    // the other 40 µs.
    let flops = json!({ "matmul bf16": 989.4e3 * 20_000.0, "vector f32": 5.0e6 });
    let (read, written) = (3350.0 * 9_000.0, 3350.0 * 1_000.0);
    recording["work"] = json!({ "flops": flops, "read_bytes": read, "write_bytes": written });
    recording["parts"] = json!([
        { "table": "layer", "label": "projection", "range": "layer_0",
          "work": { "flops": flops, "read_bytes": 0.0, "write_bytes": 0.0 } },
        { "table": "layer", "label": "norm", "range": "step/layer_1",
          "work": { "flops": {}, "read_bytes": read, "write_bytes": written } },
        { "table": "layer", "label": "nowhere", "range": "layer_9",
          "work": { "flops": flops, "read_bytes": 0.0, "write_bytes": 0.0 } },
    ]);
    let found = diagnose_trace_in_memory(&read_recording_json(&recording)).utilization;
    let near = |value: Option<f64>, expected: f64| {
        assert!(value.is_some_and(|value| (value - expected).abs() < 1e-6), "{value:?}");
    };
    let names: Vec<(&str, usize)> = found
        .operators
        .iter()
        .map(|of| (of.operator_name.as_str(), of.work_and_kernel_time.operator_call_count))
        .collect();
    assert_eq!(names, [("norm", 2), ("projection", 2)]);
    near(found.operators[1].work_and_kernel_time.matrix_peak_share_of_kernel_time(), 0.5);
    near(found.operators[0].work_and_kernel_time.memory_peak_share_of_kernel_time(), 0.25);
    near(found.all_operators.matrix_peak_share_of_kernel_time(), 0.25);
    near(found.all_operators.flops_per_byte_moved(), 989.4e3 * 20_000.0 / (3350.0 * 10_000.0));
    near(Some(found.kernel_time_share_with_known_work()), 1.0);
    assert_eq!(found.ranges[0].range_path, "f/w/c");
    // Without declared parts, the utilization section lists the whole case as one operator.
    recording["parts"] = json!([]);
    let found = diagnose_trace_in_memory(&read_recording_json(&recording)).utilization;
    assert_eq!(
        (
            found.operators[0].operator_name.as_str(),
            found.operators[0].work_and_kernel_time.operator_call_count
        ),
        ("f/w/c/step", 2)
    );
}

#[test]
fn dropped_records_are_reported_first() {
    let mut recording = recording_of_graph_launches(json!([]));
    recording["trace"]["dropped"] = 7.into();
    append_kernel(&mut recording, (0, 0), 99, 0);
    recording["trace"]["kernels"][0]["name"] = 1000.into();
    let diagnosis = diagnose_trace_in_memory(&read_recording_json(&recording));
    let titles: Vec<&str> =
        diagnosis.data_quality_findings.iter().map(|found| found.finding_title.as_str()).collect();
    insta::assert_debug_snapshot!(titles, @r#"
    [
        "the recorder lost 7 records",
        "1 operations have no times and do not count: 20.0 % of all",
        "1 values do not fit their field and do not count",
    ]
    "#);
}

#[test]
fn broken_and_newer_files_are_refused_by_name() {
    let whole = recording_of_graph_launches(json!([])).to_string();
    let cut = read_recording_text(&whole[..whole.len() / 2]).unwrap_err();
    assert!(cut.contains("recording.json"), "{cut}");
    insta::assert_snapshot!(reason_in_message(&cut), @"broken or cut short (EOF while parsing a string at line 1 column 899)");
    let newer = read_recording_text(&whole.replace("\"schema_version\":1", "\"schema_version\":2"))
        .unwrap_err();
    insta::assert_snapshot!(reason_in_message(&newer), @"written by a newer kernelgate (schema 2, this one reads up to 1)");
    // JSON that only mentions the schema name is taken for a Chrome trace, and is refused.
    assert!(
        read_recording_text("{\"a\":\"kernelgate-recording\"}")
            .unwrap_err()
            .contains("recording.json")
    );
    assert!(
        read::open_trace_file(Path::new("/nowhere/recording.json"), &WantedTraceParts::ALL)
            .is_err()
    );
}

#[test]
fn device_memory_is_listed_by_phase() {
    let mut recording = empty_recording_json();
    let allocation = |time: u64, address: u64, bytes: i64| json!({ "time": time, "on": device_context_and_stream_json(), "address": address, "bytes": bytes });
    // Two allocations precede the case, and one is allocated and freed inside the case.
    for (time, address, bytes) in
        [(100, 1, 5_000_000), (200, 2, 1_000_000), (1_500, 3, 2_500_000), (1_600, 3, -2_500_000)]
    {
        append_row_to_list(&mut recording, "allocations", allocation(time, address, bytes));
    }
    append_row_to_list(&mut recording, "allocations", allocation(1_700, 99, -7));
    append_range(&mut recording, 0, (1_000, 9_000));
    append_kernel(&mut recording, (2_000, 3_000), 1, 0);
    let diagnosis = diagnose_trace_in_memory(&read_recording_json(&recording));
    let memory = &diagnosis.device_memory_over_time[0];
    assert_eq!(
        (memory.peak_time_ns_and_bytes, memory.bytes_held_at_end_of_trace()),
        ((1_500, 8_500_000), 6_000_000)
    );
    assert_eq!(
        (memory.allocation_count, memory.free_count, memory.frees_without_allocation),
        (3, 1, 1)
    );
    let phases: Vec<_> = memory
        .phases
        .iter()
        .map(|phase| (phase.phase_name.as_str(), phase.peak_bytes, phase.held_bytes_change))
        .collect();
    assert_eq!(phases, [("before the first range", 6_000_000, 6_000_000), ("f/w/c", 8_500_000, 0)]);
    let text = diagnosis.diagnosis_to_text();
    insta::assert_snapshot!(lines_with_word(&text, "8.5"), @r"
    process 42, device 0: 8.5 MB at most, first at 0.000000 s; 6.0 MB at the end; 3 allocations, 1
    f/w/c                                                    1      8.5 MB         +0 B
    ");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    let json = &diagnosis.diagnosis_to_json()["device_memory"][0];
    assert_eq!(
        (&json["peak_bytes"], &json["over_time"][0]["bytes"]),
        (&json!(8_500_000), &json!(5_000_000))
    );
    assert_eq!(memory.thinned_bytes_over_time(2), [(1_500, 8_500_000), (1_600, 6_000_000)]);
}
