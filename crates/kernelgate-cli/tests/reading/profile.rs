//! Tests of `profile` and `diagnose CASE` with a prepared recording that a script returns in place
//! of a bench, so that no GPU is needed.

#![cfg(unix)]

use std::process::Command;

use crate::outputs::{assert_text_snapshot, exit_code_and_both_streams};
use crate::package::{ProcessOutcome, TempPackage, lines_with_word};
use kernelgate::measure::limits::ShortestLaunchTime;
use kernelgate::protocol::{
    BenchCaseStatus, BenchResponseFile, CaseProfileResponse, CuptiCaseRecording, KernelStageCycles,
    RecordedNetworkPart, ResponseToBenchAction,
};
use kernelgate::record::{DeclaredWorkRecord, ThroughputItemUnit, file};
use kernelgate::trace::{HostTimeOfPhase, RecordedKernelsSummary};
use kernelgate_cuda::observe::activity::{
    CuptiRecordedActivity, GpuContextStreamIds, GraphNodeRangesRecord, HostCallRecord,
    KernelRecord, MemoryCopyRecord, NamedRangeRecord, RecordedDeviceLimits, SynchronizationRecord,
};

const GRAPH_CASE_ID: &str = "toy/scale/n64/cuda/graph/hot";
const REFUSED_CASE_ID: &str = "toy/scale/n64/cuda/refused/hot";

/// The recording of three launches of a graph, whose two kernels of 400 µs were captured in a range
/// each.
fn recorded_graph_launches() -> CuptiRecordedActivity {
    let names = [GRAPH_CASE_ID, "step", "wait", "Layer_0", "Layer_1", "toy_scale", "cuGraphLaunch"];
    let on = GpuContextStreamIds { device_ordinal: 0, context_id: 1, stream_id: 7 };
    let mut activity = CuptiRecordedActivity {
        pid: 42,
        interned_names: names.map(str::to_owned).to_vec(),
        graph_nodes: (0..2)
            .map(|id| GraphNodeRangesRecord {
                graph_node_id: id + 1,
                range_name_indices: vec![id as u32 + 3],
            })
            .collect(),
        ..CuptiRecordedActivity::default()
    };
    let range = |name, start, end| NamedRangeRecord {
        name_index: name,
        start_ns: start,
        end_ns: end,
        os_thread_id: 5,
    };
    activity.ranges.push(range(0, 1_000_000, 4_000_000));
    for step in 0..3u64 {
        let (launch, run) = (1_000_000 + step * 10_000, 1_050_000 + step * 820_000);
        activity.ranges.push(range(1, launch, launch + 9_000));
        let correlation = step as u32 + 1;
        let (start, end) = (launch + 1_000, launch + 6_000);
        activity.calls.push(HostCallRecord {
            name_index: 6,
            start_ns: start,
            end_ns: end,
            os_thread_id: 5,
            correlation_id: correlation,
        });
        for node in 0..2u64 {
            let start = run + node * 401_000;
            activity.kernels.push(KernelRecord {
                name_index: 5,
                start_ns: start,
                end_ns: start + 400_000,
                device_context_stream: on,
                correlation_id: correlation,
                grid: [400, 1, 1],
                block: [256, 1, 1],
                registers_per_thread: 32,
                graph_node_id: node + 1,
                ..KernelRecord::default()
            });
        }
    }
    activity.ranges.push(range(2, 1_031_000, 3_990_000));
    activity.synchronizations.push(SynchronizationRecord {
        start_ns: 1_032_000,
        end_ns: 3_980_000,
        device_context_stream: on,
        correlation_id: 9,
        synchronization_kind: 3,
    });
    activity
}

/// Two layers for which the bench opens ranges, the second with declared work, and a layer without
/// a range.
fn network_parts_for_profile() -> Vec<RecordedNetworkPart> {
    let part = |label: &str, range: &str, limits| RecordedNetworkPart {
        profile_table: "layer".to_owned(),
        part_label: label.to_owned(),
        range_path_ending: range.to_owned(),
        limits,
        work: DeclaredWorkRecord::default(),
    };
    let limit = |time_ns, by: &str| ShortestLaunchTime {
        shortest_launch_ns: time_ns,
        deciding_ceiling: by.to_owned(),
    };
    let limits = vec![limit(50_000.0, "memory"), limit(100_000.0, "matmul bf16")];
    vec![
        part("first", "Layer_0", Vec::new()),
        part("second", "step/Layer_1", limits),
        part("reset", "Layer_2", Vec::new()),
    ]
}

fn profile_responses() -> Vec<CaseProfileResponse> {
    let trace = recorded_graph_launches();
    let recording = CuptiCaseRecording {
        case_id: GRAPH_CASE_ID.to_owned(),
        warm_up_launches: 2,
        recorded_launches: 3,
        recorded_launches_wall_ns: 3_000_000,
        cupti_overhead_per_launch_ns: Some(600.0),
        limits: vec![
            ShortestLaunchTime {
                shortest_launch_ns: 720_900.0,
                deciding_ceiling: "memory".to_owned(),
            },
            ShortestLaunchTime {
                shortest_launch_ns: 80_100.0,
                deciding_ceiling: "matmul bf16".to_owned(),
            },
        ],
        work: DeclaredWorkRecord::default(),
        items_per_launch: Some(64),
        sample_unit: ThroughputItemUnit::BatchItems,
        parts: network_parts_for_profile(),
        stages: vec![KernelStageCycles {
            kernel_name: "toy_scale".to_owned(),
            stage_names: ["waits", "computes\u{1b}[2J"].map(str::to_owned).to_vec(),
            summed_launches: 3,
            stage_cycles_by_block: vec![vec![100, 500], vec![300, 300], vec![0, 0], vec![7]],
        }],
        memory_bytes_by_purpose: vec![
            ("weights".to_owned(), 2 << 20),
            ("activations".to_owned(), 1 << 20),
        ],
        device: RecordedDeviceLimits {
            gpu_model_name: "Toy GPU".to_owned(),
            compute: [9, 0],
            multiprocessor_count: 100,
            threads_per_sm: 2048,
            registers_per_sm: 65536,
            shared_bytes_per_sm: 233_472,
            blocks_per_sm: 32,
            ..RecordedDeviceLimits::default()
        },
        other_devices: Vec::new(),
        trace,
    };
    let summary = Some(RecordedKernelsSummary::summarize_recorded_activity(&recording.trace));
    let case = |case: &str, status, summary, reason: Option<&str>, recording| CaseProfileResponse {
        items_per_launch: None,
        case_id: case.to_owned(),
        status,
        summary,
        phases: Vec::new(),
        reason_without_full_profile: reason.map(str::to_owned),
        recording,
    };
    vec![
        case(GRAPH_CASE_ID, BenchCaseStatus::Ok, summary, None, Some(Box::new(recording))),
        case(REFUSED_CASE_ID, BenchCaseStatus::Skipped, None, Some("too\u{1b}[2J large"), None),
    ]
}

/// A package whose only bench answers with these cases, and stores the request that it received.
fn package_with_profile_response(cases: Vec<CaseProfileResponse>) -> TempPackage {
    let package = TempPackage::new();
    let answer = BenchResponseFile {
        bench_name: "toy".to_owned(),
        answer: ResponseToBenchAction::Profile(cases),
    };
    file::write_record_atomically(&package.package_path("answer.json"), &answer).unwrap();
    let root = package.folder.path().display();
    let script = format!(
        "[ \"$KERNELGATE_REQUEST\" = protocol ] && echo '{}' && exit 0\ncp \
         \"$KERNELGATE_REQUEST\" '{root}/asked.json'\ncp '{root}/answer.json' \"$(sed -n \
         's/.*\"response\": *\"\\([^\"]*\\)\".*/\\1/p' \"$KERNELGATE_REQUEST\")\"\n",
        kernelgate::protocol::protocol_version_answer_line(),
    );
    std::fs::write(package.package_path("answer.sh"), script).unwrap();
    // A shell script alone does not count as a bench executable, so the test compiles a program
    // that has the bench mark and runs the script.
    let mark = kernelgate::protocol::BENCH_EXECUTABLE_MARK.trim_matches('\0');
    let source = format!(
        "#include <stdlib.h>\nvolatile const char mark[] = \"\\0{mark}\";\nint main(void) {{ \
         return mark[0] + (system(\"sh '{root}/answer.sh'\") != 0); }}\n"
    );
    std::fs::write(package.package_path("toy.c"), source).unwrap();
    std::fs::create_dir(package.package_path("benches")).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let compiled = Command::new(compiler)
        .arg("-o")
        .arg(package.package_path("benches/toy"))
        .arg(package.package_path("toy.c"))
        .status()
        .unwrap();
    assert!(compiled.success());
    package
}

#[track_caller]
fn assert_lines_fit_100_columns(outcome: &ProcessOutcome) {
    for line in outcome.stdout.lines() {
        assert!(line.chars().count() <= 100, "{}: {line}", line.chars().count());
    }
}

#[test]
fn a_recorded_case_is_shown_by_range_diagnosed_and_kept() {
    let package = package_with_profile_response(profile_responses());
    let shown = package.run_kernelgate("profile --dir benches --steps 3 --warm-up 2 --out out");
    assert_text_snapshot("why", "profile", &exit_code_and_both_streams(&shown));
    // The column widths in the written profile depend on the length of the test's temporary paths.
    let written = std::fs::read_to_string(package.package_path("out/profile.txt")).unwrap();
    let squeezed = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let table = written.lines().skip_while(|line| !line.starts_with("range")).skip(1).take(3);
    assert_eq!(
        table.map(squeezed).collect::<Vec<_>>(),
        [
            "all 1 3.000 ms 2.441 ms 2.400 ms 100.0% 6 busy",
            "· step 3 27.00 µs 2.403 ms 2.400 ms 100.0% 6 memory-bound",
            "·· Layer_# 6 - 2.400 ms 2.400 ms 100.0% 6 busy",
        ]
    );
    let table = written.lines().skip_while(|line| !line.starts_with("layer")).skip(1).take(3);
    assert_eq!(
        table.map(squeezed).collect::<Vec<_>>(),
        [
            "first 400.0 µs 50.0% 1 - - -",
            "second 400.0 µs 50.0% 1 100.0 µs 25.0% matmul bf16",
            "reset - - 0 - - -",
        ]
    );
    let table = written.lines().skip_while(|line| !line.starts_with("stages of")).take(4);
    assert_eq!(
        table.map(squeezed).collect::<Vec<_>>(),
        [
            "stages of toy_scale, 800.0 µs in 2 blocks: mean over the blocks, by clocks in another \
             build of it",
            "stage a launch share shortest block longest block",
            "waits 266.7 µs 33.3% 133.3 µs 400.0 µs",
            "computes 533.3 µs 66.7% 400.0 µs 666.7 µs",
        ]
    );
    let drawn = format!("out/{}-toy_scale-stages.svg", GRAPH_CASE_ID.replace('/', "_"));
    let drawn = std::fs::read_to_string(package.package_path(&drawn)).unwrap();
    assert!(drawn.contains("266.7 µs 33.3%") && !drawn.contains('\u{1b}'), "{drawn}");
    assert!(
        written.lines().filter(|line| !line.contains('/')).all(|line| line.chars().count() <= 100)
    );
    let request = std::fs::read_to_string(package.package_path("asked.json")).unwrap();
    let request: serde_json::Value = serde_json::from_str(&request).unwrap();
    assert_eq!(request["action"]["record"], serde_json::json!({ "steps": 3, "warm_up": 2 }));
    let json: serde_json::Value = serde_json::from_str(
        &std::fs::read_to_string(package.package_path("out/profile.json")).unwrap(),
    )
    .unwrap();
    assert_eq!(json[0]["recorded"]["busy_ns"], 2_400_000);
    assert_eq!(json[0]["recorded"]["ranges"][1]["bound"], "memory-bound");
    assert_eq!(json[0]["recorded"]["parts"]["kernels_a_launch"], 2);
    assert_eq!(json[0]["recorded"]["parts"]["parts"][1]["limit_ns"], 100_000.0);
    assert_eq!(json[0]["recorded"]["stages"][0]["stages"][1]["share"], 800.0 / 1200.0);
    assert_eq!(json[0]["summary"]["kernels"][0]["count"], 6);
    assert!(json[0].get("recording").is_none());
    // The recording can be read like any other trace.
    let trace = format!("out/traces/{}.json", GRAPH_CASE_ID.replace('/', "_"));
    let diagnosed = package.run_kernelgate(&format!("diagnose {trace}"));
    assert_text_snapshot("why", "diagnose_recording", &diagnosed.text_for_snapshot());
    assert_lines_fit_100_columns(&diagnosed);
    let stats = package.run_kernelgate(&format!("stats {trace} --report cuda_gpu_kern_sum"));
    insta::assert_snapshot!(stats.assert_exit(0).stdout, @r"
    Time (%)  Total Time (ns)  Instances   Avg (ns)   Med (ns)  Min (ns)  Max (ns)  StdDev (ns)  Name
       100.0        2,400,000          6  400,000.0  400,000.0   400,000   400,000          0.0  toy_scale
    ");
    insta::assert_snapshot!(package.run_kernelgate(&format!("export {trace} --out a.json")).text_for_snapshot(), @r"
    exit 0
    a.json: open it at https://ui.perfetto.dev
    ");
}

#[test]
fn cases_of_several_batches_end_with_their_curve() {
    let recorded = |batch: u64| {
        let mut case = profile_responses().swap_remove(0);
        case.case_id = format!("toy/net/b{batch}_t8/cuda/best/hot");
        case.items_per_launch = Some(batch);
        if let Some(recording) = &mut case.recording {
            recording.case_id.clone_from(&case.case_id);
            recording.items_per_launch = Some(batch);
            // The outermost range of the recording keeps the id of the case as its name.
            recording.trace.interned_names[0].clone_from(&case.case_id);
        }
        case
    };
    let of_host = |batch: u64, launch_ns: f64| CaseProfileResponse {
        case_id: format!("toy/net/b{batch}_t8/cpu/hot"),
        summary: None,
        phases: vec![HostTimeOfPhase::summarize_durations_of_phase(
            "launch",
            &[launch_ns, launch_ns],
            None,
        )],
        recording: None,
        ..recorded(batch)
    };
    let cases = vec![recorded(32), of_host(8, 1e6), recorded(8), of_host(32, 2e6)];
    let package = package_with_profile_response(cases);
    package.run_kernelgate("profile --dir benches --out out").assert_exit(0);
    let squeezed = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let written = std::fs::read_to_string(package.package_path("out/profile.txt")).unwrap();
    let curve = |of: &str| -> Vec<String> {
        let heading = format!("batch efficiency of toy/net/b*_t8/{of}/hot");
        written.lines().skip_while(|line| *line != heading).skip(2).take(2).map(squeezed).collect()
    };
    // The recorded launches of the test cases take the same time, whatever the batch size of the
    // case.
    assert_eq!(
        curve("cuda/best"),
        ["8 801.0 µs 9988 25.0% 1.00x 90.0%", "32 801.0 µs 39950 100.0% 4.00x 90.0%"]
    );
    assert_eq!(curve("cpu"), ["8 1.000 ms 8000 50.0% 1.00x -", "32 2.000 ms 16000 100.0% 2.00x -"]);
    let json = std::fs::read_to_string(package.package_path("out/profile.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json[1]["batch"]["samples_per_s"], 8000.0);
    assert_eq!(json[1]["batch"]["of_best_rate"], 0.5);
    assert_eq!(json[3]["batch"]["of_smallest_rate"], 2.0);
    assert_eq!(json[0]["batch"]["cases"], "toy/net/b*_t8/cuda/best/hot");
}

#[test]
fn a_case_in_the_place_of_a_trace_is_recorded_and_diagnosed() {
    let toy = package_with_profile_response(profile_responses());
    let diagnosed = toy.run_kernelgate("diagnose toy/scale --dir benches");
    diagnosed.assert_exit(0);
    // The printed diagnosis equals that of the recorded trace file.
    let lines = ["not recorded", "work-bound:"]
        .map(|word| lines_with_word(&diagnosed.stdout_and_stderr(), word));
    insta::assert_snapshot!(lines.join("\n"), @r"
    device memory: allocations were not recorded; record with kernelgate profile
    toy/scale/n64/cuda/refused/hot: not recorded: too large
    1. INFORMATION work-bound: toy/scale/n64/cuda/graph/hot/step is memory-bound: 90.0 % of the memory
    ");
    assert_lines_fit_100_columns(&diagnosed);
    let json = toy
        .run_kernelgate("diagnose toy/scale --dir benches --format json")
        .assert_exit(0)
        .stdout_as_json();
    assert_eq!(json["traces"][0]["trace"], GRAPH_CASE_ID);
    // An argument with a file extension is taken as a trace file, not as a case filter.
    let file = toy.run_kernelgate("diagnose no_such.sqlite --dir benches");
    insta::assert_snapshot!(file.refusal_message(2), @"error: failed to read no_such.sqlite: No such file or directory (os error 2)");
    insta::assert_snapshot!(toy.run_kernelgate("diagnose /no/such --dir benches").refusal_message(2), @"error: failed to read /no/such: No such file or directory (os error 2)");
    let mut cases = profile_responses();
    cases.remove(0);
    let skipped = package_with_profile_response(cases).run_kernelgate("diagnose toy --dir benches");
    insta::assert_snapshot!(skipped.refusal_message(2), @r"
    toy/scale/n64/cuda/refused/hot: not recorded: too large
    error: failed to diagnose toy: nothing was recorded; `kernelgate profile` shows what can be seen without a GPU, and a trace is a file with an extension
    ");
}

#[test]
fn a_recording_with_lost_records_warns_first() {
    let mut cases = profile_responses();
    let recording = cases[0].recording.as_mut().unwrap();
    recording.trace.dropped_records = 5;
    recording.trace.kernels[0].start_ns = 0;
    recording.trace.kernels[0].end_ns = 0;
    let shown = package_with_profile_response(cases).run_kernelgate("profile --dir benches");
    insta::assert_snapshot!(lines_with_word(&shown.assert_exit(0).stdout_and_stderr(), "SEVERE"), @r"
    SEVERE: the recorder lost 5 records
    SEVERE: 1 operations have no times and do not count: 16.7 % of all
    ");
}

/// Three launches over two GPUs: 400 µs of compute on the first and 500 µs on the second, beside
/// which 100 µs of a copy from the other GPU run, then an exchange that ends on both at one time.
fn profile_over_two_gpus() -> CaseProfileResponse {
    let mut case = profile_responses().swap_remove(0);
    let recording = case.recording.as_mut().unwrap();
    let names = [GRAPH_CASE_ID, "step", "toy_scale", "collective_all_reduce_two_shot"];
    let mut activity = CuptiRecordedActivity {
        pid: 42,
        interned_names: names.map(str::to_owned).to_vec(),
        ranges: vec![NamedRangeRecord {
            name_index: 0,
            start_ns: 1_000_000,
            end_ns: 4_000_000,
            os_thread_id: 5,
        }],
        ..CuptiRecordedActivity::default()
    };
    for step in 0..3u64 {
        let at = 1_100_000 + step * 600_000;
        for (device, compute) in [(0, 400_000), (3, 500_000)] {
            let on = |stream| GpuContextStreamIds {
                device_ordinal: device,
                context_id: device + 1,
                stream_id: stream,
            };
            let kernel = |name, start, end| {
                let on = on(7);
                KernelRecord {
                    name_index: name,
                    start_ns: start,
                    end_ns: end,
                    device_context_stream: on,
                    ..KernelRecord::default()
                }
            };
            activity.kernels.push(kernel(2, at, at + compute));
            activity.kernels.push(kernel(3, at + compute, at + 550_000));
            activity.copies.push(MemoryCopyRecord {
                start_ns: at + 50_000,
                end_ns: at + 150_000,
                device_context_stream: on(9),
                copied_bytes: 1 << 20,
                copy_direction: 10,
                source_memory_kind: 3,
                target_memory_kind: 3,
                ..MemoryCopyRecord::default()
            });
        }
    }
    recording.parts.clear();
    recording.stages.clear();
    recording.trace = activity;
    let second = RecordedDeviceLimits { device_ordinal: 3, ..recording.device.clone() };
    recording.other_devices.push(second);
    case
}

#[test]
fn a_case_over_two_gpus_has_the_exposed_communication_and_waiting_of_each() {
    let package = package_with_profile_response(vec![profile_over_two_gpus()]);
    let shown = package.run_kernelgate("profile --dir benches --out out");
    assert_text_snapshot("why", "profile_two_gpus", &shown.text_for_snapshot());
    assert_lines_fit_100_columns(&shown);
    let json = std::fs::read_to_string(package.package_path("out/profile.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let gpus = &json[0]["recorded"]["gpus"];
    let field = |rank: usize, key: &str| gpus["ranks"][rank][key].clone();
    assert_eq!([field(0, "name"), field(1, "name")], ["device 0", "device 3"]);
    assert_eq!([field(0, "device"), field(1, "device")], ["Toy GPU", "Toy GPU"]);
    assert_eq!([field(0, "compute_ns"), field(1, "compute_ns")], [1_200_000, 1_500_000]);
    let hidden = [0, 1].map(|rank| field(rank, "hidden_communication_ns"));
    assert_eq!(hidden, [300_000, 300_000], "the copies");
    let exposed = [0, 1].map(|rank| field(rank, "exposed_communication_ns"));
    assert_eq!(exposed, [450_000, 150_000]);
    assert_eq!([field(0, "waits_ns"), field(1, "waits_ns")], [300_000, 0]);
    assert_eq!(gpus["collectives"][0]["collective"], "all-reduce");
    assert_eq!(gpus["collectives"][0]["transfer_ns"], 150_000);
    let trace = format!("out/traces/{}.json", GRAPH_CASE_ID.replace('/', "_"));
    let diagnosed = package.run_kernelgate(&format!("diagnose {trace} --html page.html"));
    assert_text_snapshot("why", "diagnose_two_gpus", &diagnosed.text_for_snapshot());
    assert_lines_fit_100_columns(&diagnosed);
    let page = std::fs::read_to_string(package.package_path("page.html")).unwrap();
    for text in ["Time of each GPU", "Waiting between ranks", "device 3, stream 9: copies"] {
        assert!(page.contains(text), "{text}");
    }
    let json = package.run_kernelgate(&format!("diagnose {trace} --format json"));
    let json: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(json["traces"][0]["gpus"]["stragglers"], serde_json::json!(["device 3"]));
}

/// A kernel of a network's launch: the ranges around it, its name, and its time in microseconds.
type KernelWithRangesAndMicroseconds<'a> = (&'a [&'a str], &'a str, u64);

/// Declared work with these operations, each with its unit and number format.
fn declared_flops(flops: &[(&str, u64)]) -> DeclaredWorkRecord {
    DeclaredWorkRecord {
        flops_by_unit_and_dtype: flops
            .iter()
            .map(|(unit, count)| ((*unit).to_owned(), *count))
            .collect(),
        ..DeclaredWorkRecord::default()
    }
}

/// Part of a network whose range has this name inside the range `attention`.
fn part_of_attention(name: &str, flops: (&str, u64)) -> RecordedNetworkPart {
    RecordedNetworkPart {
        profile_table: "attention".to_owned(),
        part_label: name.to_owned(),
        range_path_ending: format!("attention/{name}"),
        limits: Vec::new(),
        work: declared_flops(&[flops]),
    }
}

/// A recording of three launches of a graph of these kernels, each 1 µs after the other.
fn profile_of_network_kernels(
    operation: &str,
    row: &str,
    nodes: &[KernelWithRangesAndMicroseconds<'_>],
) -> CaseProfileResponse {
    let id = format!("toy/{operation}/n64/{row}/hot");
    let mut names: Vec<String> =
        vec![id.clone(), "step".into(), "wait".into(), "cuGraphLaunch".into()];
    let mut name = |text: &str| {
        let found = names.iter().position(|name| name == text);
        found.unwrap_or_else(|| {
            names.push(text.to_owned());
            names.len() - 1
        }) as u32
    };
    let on = GpuContextStreamIds { device_ordinal: 0, context_id: 1, stream_id: 7 };
    let mut activity = CuptiRecordedActivity { pid: 42, ..CuptiRecordedActivity::default() };
    let os_thread_id = 5;
    let range = |name_index, start_ns, end_ns| NamedRangeRecord {
        name_index,
        start_ns,
        end_ns,
        os_thread_id,
    };
    for (index, (ranges, ..)) in nodes.iter().enumerate() {
        let graph_node_id = index as u64 + 1;
        let range_name_indices = ranges.iter().map(|range| name(range)).collect();
        activity.graph_nodes.push(GraphNodeRangesRecord { graph_node_id, range_name_indices });
    }
    let mut run = 1_050_000;
    for step in 0..3u64 {
        let launch = 1_000_000 + step * 10_000;
        activity.ranges.push(range(1, launch, launch + 9_000));
        let correlation_id = step as u32 + 1;
        let (start_ns, end_ns) = (launch + 1_000, launch + 6_000);
        activity.calls.push(HostCallRecord {
            name_index: 3,
            start_ns,
            end_ns,
            os_thread_id,
            correlation_id,
        });
        for (index, (_, kernel, us)) in nodes.iter().enumerate() {
            activity.kernels.push(KernelRecord {
                name_index: name(kernel),
                start_ns: run,
                end_ns: run + us * 1_000,
                device_context_stream: on,
                correlation_id,
                grid: [400, 1, 1],
                block: [256, 1, 1],
                graph_node_id: index as u64 + 1,
                ..KernelRecord::default()
            });
            run += us * 1_000 + 1_000;
        }
    }
    activity.ranges.insert(0, range(0, 1_000_000, run + 20_000));
    activity.ranges.push(range(2, 1_031_000, run + 10_000));
    activity.interned_names = names;
    let mut case = profile_responses().swap_remove(0);
    case.case_id.clone_from(&id);
    let recording = case.recording.as_mut().unwrap();
    recording.case_id = id;
    recording.recorded_launches_wall_ns = run + 20_000 - 1_000_000;
    recording.trace = activity;
    recording.device.gpu_model_name = "NVIDIA H100 80GB HBM3".to_owned();
    // The declared work takes 100 µs at the GPU's published peak.
    recording.work = declared_flops(&[("matmul bf16", 98_940_000_000)]);
    recording.limits = vec![ShortestLaunchTime {
        shortest_launch_ns: 125_000.0,
        deciding_ceiling: "matmul bf16".to_owned(),
    }];
    recording.parts = vec![
        part_of_attention("computing_attention_scores", ("matmul bf16", 1_610_612_736)),
        part_of_attention("computing_softmax", ("vector bf16", 62_914_560)),
        part_of_attention("final_matmul", ("matmul bf16", 1_610_612_736)),
    ];
    recording.stages.clear();
    case.summary = Some(RecordedKernelsSummary::summarize_recorded_activity(&recording.trace));
    case
}

#[test]
fn recorded_networks_end_with_the_questions_of_the_guide() {
    const FORWARD_KERNELS: &[KernelWithRangesAndMicroseconds<'_>] = &[
        (&["forward"], "toy_gemm", 60),
        (&["forward", "attention", "computing_attention_scores"], "toy_gemm_batched", 15),
        (&["forward", "attention", "computing_softmax"], "toy_softmax", 40),
        (&["forward", "attention", "final_matmul"], "toy_gemm_batched", 5),
        (&["forward"], "toy_norm", 20),
    ];
    const TRAINING_KERNELS: &[KernelWithRangesAndMicroseconds<'_>] =
        &[(&["backward"], "toy_gemm_backward", 150), (&["optimizer"], "toy_adamw", 30)];
    const FUSED_ATTENTION_KERNELS: &[KernelWithRangesAndMicroseconds<'_>] =
        &[(&["forward"], "toy_gemm", 60), (&["forward", "attention"], "toy_flash_attention", 10)];
    let step = [FORWARD_KERNELS, TRAINING_KERNELS].concat();
    let package = package_with_profile_response(vec![
        profile_of_network_kernels("forward", "cuda/per_op", FORWARD_KERNELS),
        profile_of_network_kernels("forward", "cuda/fused", FUSED_ATTENTION_KERNELS),
        profile_of_network_kernels("train_step", "cuda/per_op", &step),
    ]);
    package.run_kernelgate("profile --dir benches --out out").assert_exit(0);
    let written = std::fs::read_to_string(package.package_path("out/profile.txt")).unwrap();
    let questions = &written[written.find("utilization of the matrix units").unwrap()..];
    insta::assert_snapshot!(questions);
    let json = std::fs::read_to_string(package.package_path("out/profile.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let training = &json[2]["network"];
    assert_eq!(training["largest_kernel_is_that_of_inference"], false);
    assert_eq!(training["matmul_share_of_inference"], 80.0 / 140.0);
    assert_eq!(training["matmul_share_of_training"], 230.0 / 320.0);
    assert_eq!(json[1]["network"]["attention_of_unfused_row_ns"], 60_000.0);
    for chart in ["host", "kinds", "attention", "utilization"] {
        let drawn =
            std::fs::read_to_string(package.package_path(&format!("out/network-{chart}.svg")));
        assert!(drawn.unwrap().contains("train_step"), "{chart}");
    }
}
