//! Faults that a diagnosis once got wrong, each on inputs that the test writes; and on the reported
//! inputs themselves where `SHARED_FAULTS` names their folder.

use std::path::PathBuf;

use crate::fixture::kineto::{FULL, KernelPlaceAndShape, KinetoTrace};
use crate::fixture::{NsysExport, finding_titles, global_id_of_process, lines_with_word};
use kernelgate_trace::diagnose::checklist::{ChecklistLineState, fill_in_checklist};
use kernelgate_trace::diagnose::difference::{
    SummedTimesOfTrace, TraceSetupProperty, compare_summed_traces,
};
use kernelgate_trace::diagnose::{
    DiagnosisFinding, FindingConfidence, FindingSeverity, IdleCauseKind, RuleAnswer,
    TraceDiagnosis, diagnose_trace_in_memory,
};
use kernelgate_trace::model::Trace;
use kernelgate_trace::read::{self, WantedTraceParts};
use serde_json::json;

/// A reported input, or `None` after saying why it is not tested.
fn read_reported_trace_or_skip(name: &str) -> Option<Trace> {
    let Some(folder) = std::env::var_os("SHARED_FAULTS") else {
        println!("skipped: SHARED_FAULTS does not name a folder with reported inputs");
        return None;
    };
    let path = PathBuf::from(folder).join(name);
    Some(read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap())
}

fn finding_with_id<'a>(diagnosis: &'a TraceDiagnosis, id: &str) -> Option<&'a DiagnosisFinding> {
    diagnosis.findings.iter().find(|finding| finding.id == id)
}

/// Idle time of the first device by cause, in nanoseconds.
fn idle_ns_of_cause(diagnosis: &TraceDiagnosis, kind: IdleCauseKind) -> i64 {
    let causes = diagnosis.devices[0].gaps.idle_time_by_cause.iter();
    causes.filter(|cause| cause.kind == kind).map(|cause| cause.total_ns).sum()
}

/// The cause with most idle time on a device.
fn cause_with_most_idle_time(
    diagnosis: &TraceDiagnosis,
    device: u32,
) -> (IdleCauseKind, Option<&str>) {
    let device = diagnosis.devices.iter().find(|of| of.device == device).unwrap();
    let cause = &device.gaps.idle_time_by_cause[0];
    (cause.kind, cause.function.as_deref())
}

fn reason_not_answered(diagnosis: &TraceDiagnosis, id: &str) -> String {
    let question = diagnosis.question_of_rule(id).unwrap();
    question.reason_without_answer().unwrap_or_else(|| panic!("{question:?}"))
}

fn state_of_checklist_line(diagnosis: &TraceDiagnosis, line: &str) -> ChecklistLineState {
    let lines = fill_in_checklist(diagnosis);
    lines.iter().find(|of| of.condition.starts_with(line)).unwrap().line_state
}

/// A kernel, then one that is launched at 40 µs and starts 400 ms later.
fn trace_with_late_kernel() -> KinetoTrace {
    let mut trace = KinetoTrace::a100_trace();
    trace.add_launch(0.0, (10.0, 4.0), "first", FULL);
    trace
}

#[test]
fn work_launched_long_before_it_starts_is_not_host_code() {
    let written = || {
        let mut trace = trace_with_late_kernel();
        trace.add_launch(40.0, (400_000.0, 4.0), "second", FULL);
        trace.add_api_call((80.0, 400_000.0), "cudaStreamSynchronize");
        trace.read_as_trace()
    };
    let launched_then_late =
        read_reported_trace_or_skip("gap-launched-then-late/launched_then_late_cuda.json");
    for trace in [Some(written()), launched_then_late].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        assert_eq!(idle_ns_of_cause(&diagnosis, IdleCauseKind::HostCode), 26_000);
        assert_eq!(idle_ns_of_cause(&diagnosis, IdleCauseKind::LaunchCall), 5_000);
        assert_eq!(
            idle_ns_of_cause(&diagnosis, IdleCauseKind::UnknownDelayAfterLaunch),
            399_955_000
        );
        assert!(finding_with_id(&diagnosis, "launch-bound").is_none());
        let gaps = finding_with_id(&diagnosis, "gaps").unwrap();
        assert_eq!(
            (gaps.severity, gaps.confidence),
            (FindingSeverity::Warning, FindingConfidence::Low)
        );
        assert_eq!(gaps.recoverable_ns, None, "nobody knows what most of it could save");
    }
}

#[test]
fn idle_time_that_no_replay_mends_stays_a_warning() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..10 {
        let start = f64::from(step) * 10_000.0;
        trace.add_api_call((start, 2.0), "cudaStreamWaitEvent");
        trace.add_launch(start + 5.0, (start + 9_000.0, 100.0), "waits", FULL);
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    assert_eq!(cause_with_most_idle_time(&diagnosis, 0).0, IdleCauseKind::EventWait);
    let gaps = finding_with_id(&diagnosis, "gaps").unwrap();
    assert_eq!(gaps.severity, FindingSeverity::Warning, "{}", gaps.finding_title);
    assert!(gaps.recoverable_ns < Some(10_000_000), "{:?}", gaps.recoverable_ns);
}

#[test]
fn the_driver_of_windows_submits_work_later() {
    let mut export = NsysExport::new();
    export.add_launch((0, 5_000), (10_000, 14_000), 1, "a");
    export.add_launch((40_000, 45_000), (700_000, 710_000), 2, "b");
    let cause = |export: &NsysExport| {
        let trace = export.read_as_trace().unwrap();
        diagnose_trace_in_memory(&trace).devices[0].gaps.idle_time_by_cause[0].kind
    };
    assert_eq!(cause(&export), IdleCauseKind::UnknownDelayAfterLaunch);
    export.execute_sql("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)");
    for (name, value, expected) in [
        ("SoftwarePlatform", "L4X", IdleCauseKind::UnknownDelayAfterLaunch),
        (
            "SoftwareReleaseVersion",
            "6.6.87.2-microsoft-standard-WSL2",
            IdleCauseKind::WindowsDriver,
        ),
        ("SoftwarePlatform", "Windows", IdleCauseKind::WindowsDriver),
    ] {
        export.execute_sql("DELETE FROM TARGET_INFO_SYSTEM_ENV");
        export.execute_sql(&format!(
            "INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('{name}', '{value}')"
        ));
        assert_eq!(cause(&export), expected, "{value}");
    }
}

#[test]
fn late_starts_of_launched_work_have_the_recorded_reason() {
    let with = |before: &dyn Fn(&mut KinetoTrace)| {
        let mut trace = trace_with_late_kernel();
        before(&mut trace);
        trace.add_launch(40.0, (400_000.0, 4.0), "second", FULL);
        let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
        let (kind, function) = cause_with_most_idle_time(&diagnosis, 0);
        (kind, function.map(str::to_owned))
    };
    let named = |kind, function: &str| (kind, Some(function.to_owned()));
    let event = with(&|trace| {
        trace.add_api_call((30.0, 2.0), "cudaStreamWaitEvent");
    });
    assert_eq!(event, named(IdleCauseKind::EventWait, "cudaStreamWaitEvent"));
    let function = with(&|trace| {
        trace.add_api_call((30.0, 2.0), "hipLaunchHostFunc");
    });
    assert_eq!(function, named(IdleCauseKind::HostFunction, "hipLaunchHostFunc"));
    let other_device = with(&|trace| {
        let other = KernelPlaceAndShape { device: 1, ..FULL };
        trace.add_launch(20.0, (30.0, 399_000.0), "long", other);
    });
    assert_eq!(other_device, (IdleCauseKind::WorkElsewhere, None));
    // The event that another stream waits for holds up nothing here.
    let other_stream = with(&|trace| {
        let id = trace.add_api_call((30.0, 2.0), "cudaStreamWaitEvent");
        trace.add_event(json!({
            "ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "pid": 0, "tid": 9,
            "ts": 31.0, "dur": 1.0,
            "args": { "correlation": id, "device": 0, "context": 1, "stream": 9 },
        }));
    });
    assert_eq!(other_stream, (IdleCauseKind::UnknownDelayAfterLaunch, None));
    // A wait that an earlier launch is behind is over with that launch.
    let launched_since = with(&|trace| {
        trace.add_api_call((16.0, 1.0), "cudaStreamWaitEvent");
        trace.add_launch(17.0, (24.0, 1.0), "between", FULL);
    });
    assert_eq!(launched_since, (IdleCauseKind::UnknownDelayAfterLaunch, None));
}

#[test]
fn nodes_of_a_graph_that_start_late_are_queued() {
    let mut trace = KinetoTrace::a100_trace();
    let graph = trace.add_api_call((0.0, 5.0), "cudaGraphLaunch");
    trace.add_kernel(graph, (10.0, 5.0), "a", FULL);
    trace.add_kernel(graph, (16.0, 5.0), "b", FULL);
    trace.add_kernel(graph, (500.0, 5.0), "c", FULL);
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    assert_eq!(idle_ns_of_cause(&diagnosis, IdleCauseKind::InGraph), 479_000);
    assert_eq!(idle_ns_of_cause(&diagnosis, IdleCauseKind::BackToBack), 1_000);
}

/// Steps of 7 ms: a kernel of 100 µs, a wait of 3 µs when it is over, then the host.
fn trace_of_steps_with_short_waits(before_launch: impl Fn(&mut KinetoTrace, f64)) -> Trace {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..20 {
        let start = f64::from(step) * 7_000.0;
        trace.add_launch(start, (start + 10.0, 100.0), "step_kernel", FULL);
        trace.add_api_call((start + 200.0, 3.0), "cudaEventSynchronize");
        before_launch(&mut trace, start + 250.0);
    }
    trace.read_as_trace()
}

#[test]
fn a_short_wait_does_not_get_the_time_behind_it() {
    let written = trace_of_steps_with_short_waits(|_, _| ());
    let report = read_reported_trace_or_skip("gap-blames-short-wait/short_wait_long_host.json");
    for trace in [Some(written), report].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        assert_eq!(cause_with_most_idle_time(&diagnosis, 0).0, IdleCauseKind::HostCode);
        assert_eq!(idle_ns_of_cause(&diagnosis, IdleCauseKind::HostWaitForGpu), 19 * 3_000);
        let waits = finding_with_id(&diagnosis, "sync-in-loop").unwrap();
        assert_eq!(waits.recoverable_ns, Some(19 * 3_000));
        assert_eq!(waits.severity, FindingSeverity::Information);
    }
    let allocating = trace_of_steps_with_short_waits(|trace, at| {
        trace.add_api_call((at, 6_500.0), "cudaMalloc");
    });
    let diagnosis = diagnose_trace_in_memory(&allocating);
    assert_eq!(
        cause_with_most_idle_time(&diagnosis, 0),
        (IdleCauseKind::OtherCudaCall, Some("cudaMalloc"))
    );
    assert_eq!(idle_ns_of_cause(&diagnosis, IdleCauseKind::OtherCudaCall), 19 * 6_500_000);
    insta::assert_snapshot!(finding_with_id(&diagnosis, "gaps").unwrap().advice, @"move this call out of the loop: allocate once, copy asynchronously");
}

#[test]
fn a_wait_saves_no_time_in_which_something_else_holds_up_the_launch() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..20 {
        let start = f64::from(step) * 10_000.0;
        trace.add_launch(start, (start + 3_000.0, 5_000.0), "step_kernel", FULL);
        // The wait ends as the kernel does; the next one starts 3 ms after its launch.
        trace.add_api_call((start + 10.0, 8_000.0), "cudaDeviceSynchronize");
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    let waits = finding_with_id(&diagnosis, "sync-in-loop").unwrap();
    // From the end of a kernel to that of the next launch call.
    assert_eq!(waits.recoverable_ns, Some(19 * 2_005_000), "{}", waits.finding_title);
    assert_eq!(
        idle_ns_of_cause(&diagnosis, IdleCauseKind::UnknownDelayAfterLaunch),
        19 * 2_995_000
    );
}

#[test]
fn waits_in_a_loop_get_no_idle_time_of_other_waits() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..8 {
        let start = f64::from(step) * 1_000.0;
        trace.add_event(json!({
            "ph": "X", "cat": "cpu_op", "name": "aten::to", "pid": 10, "tid": 100, "ts": start,
            "dur": 300.0,
        }));
        let id = trace.add_api_call((start + 1.0, 5.0), "cudaMemcpyAsync");
        trace.add_memory_copy(id, (start + 10.0, 900.0), "HtoD (Pinned -> Device)", 1000);
        trace.add_api_call((start + 20.0, 10.0), "cudaStreamSynchronize");
    }
    trace.add_api_call((7_950.0, 5.0), "cudaDeviceSynchronize");
    trace.add_launch(1_000_000.0, (1_000_010.0, 100.0), "first_kernel", FULL);
    let report = read_reported_trace_or_skip("sync-loop-idle-of-others/other_idle.json");
    for trace in [Some(trace.read_as_trace()), report].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        let waits = finding_with_id(&diagnosis, "sync-in-loop").unwrap();
        assert_eq!((waits.recoverable_ns, waits.severity), (Some(0), FindingSeverity::Information));
        assert_eq!(
            waits.finding_title,
            "the host waits for the GPU 8 times in a loop, 0.080 ms in all; no device is idle behind them"
        );
    }
}

#[test]
fn waits_that_cost_little_are_information() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..50 {
        let start = f64::from(step) * 4_000.0;
        trace.add_launch(start, (start + 6.0, 3_990.0), "solve", FULL);
        trace.add_api_call((start + 7.0, 3_990.0), "cudaStreamSynchronize");
    }
    let report = read_reported_trace_or_skip("cheap-waits-severe/cheap_waits.json");
    for trace in [Some(trace.read_as_trace()), report].into_iter().flatten() {
        let waits = diagnose_trace_in_memory(&trace);
        let waits = finding_with_id(&waits, "sync-in-loop").unwrap();
        assert_eq!(waits.recoverable_ns, Some(49 * 9_000), "49 gaps of 10 us, 1 us stays");
        assert_eq!(waits.severity, FindingSeverity::Information, "0.2 % of the span");
    }
}

#[test]
fn a_call_that_happened_once_is_start_up() {
    let with = |name: &str| {
        let mut trace = KinetoTrace::a100_trace();
        trace.add_launch(0.0, (10.0, 50.0), "init_kernel", FULL);
        trace.add_api_call((70.0, 6_000_000.0), name);
        for step in 0..40 {
            let start = 6_001_000.0 + f64::from(step) * 100.0;
            trace.add_launch(start, (start + 10.0, 95.0), "step", FULL);
        }
        trace.read_as_trace()
    };
    // The first launch of a kernel loads its module.
    let mut first_launch = KinetoTrace::a100_trace();
    for step in 0..40 {
        let start = f64::from(step) * 60.0 + if step > 5 { 6_500.0 } else { 0.0 };
        let length = if step == 6 { 6_400.0 } else { 5.0 };
        let begin = if step == 6 { start - 6_400.0 } else { start };
        let id = first_launch.add_api_call((begin, length), "hipLaunchKernel");
        first_launch.add_kernel(id, (start + 10.0, 50.0), "step", FULL);
    }
    let report = read_reported_trace_or_skip("one-time-call-in-loop/one_slow_call.json");
    let written = [with("cudaFree"), with("cudaMalloc"), first_launch.read_as_trace()];
    for trace in written.into_iter().chain(report) {
        let diagnosis = diagnose_trace_in_memory(&trace);
        let gaps = finding_with_id(&diagnosis, "gaps").unwrap();
        assert_eq!(
            gaps.advice,
            "it happened once, as start-up does (context, library or module loading, the first launch of a kernel, reading data): warm up before recording, or leave it out with --range"
        );
        assert!(gaps.severity < FindingSeverity::Severe, "{gaps:?}");
        assert!(diagnosis.quality.is_empty(), "no clock jumped: {:?}", diagnosis.quality);
    }
}

#[test]
fn launch_shapes_that_are_not_in_the_trace_pass_nothing() {
    let trace_with = |at: KernelPlaceAndShape| {
        let mut trace = KinetoTrace::mi300x_trace();
        for step in 0..200 {
            let start = f64::from(step) * 60.0;
            let id = trace.add_api_call((start, 5.0), "hipLaunchKernel");
            trace.add_kernel(id, (start + 20.0, 50.0), "tiny", at);
        }
        trace.read_as_trace()
    };
    let no_shape = trace_with(KernelPlaceAndShape { grid: 0, block: 0, ..FULL });
    let other_device = trace_with(KernelPlaceAndShape { grid: 1, device: 2, ..FULL });
    let no_shape_reported = read_reported_trace_or_skip("shapes-unknown-passes/no_shape.json");
    let other_device_reported =
        read_reported_trace_or_skip("shapes-unknown-passes/device_offset.json");
    let reasons_of = |trace: &Trace| {
        let diagnosis = diagnose_trace_in_memory(trace);
        let rules = ["block-size", "small-grid", "tail", "occupancy"];
        let reasons =
            rules.map(|rule| format!("{rule}: {}\n", reason_not_answered(&diagnosis, rule)));
        reasons.concat()
    };
    insta::assert_snapshot!(reasons_of(&no_shape), @r"
    block-size: launch shapes are not in the trace; record with rocprofv3 --kernel-trace, which has grid and workgroup
    small-grid: launch shapes are not in the trace; record with rocprofv3 --kernel-trace, which has grid and workgroup
    tail: launch shapes are not in the trace; record with rocprofv3 --kernel-trace, which has grid and workgroup
    occupancy: launch shapes are not in the trace; record with rocprofv3 --kernel-trace, which has grid and workgroup
    ");
    insta::assert_snapshot!(reasons_of(&other_device), @r"
    block-size: device 2, on which the kernels ran, is not described in the trace; record with rocprofv3 --kernel-trace, which has grid and workgroup
    small-grid: device 2, on which the kernels ran, is not described in the trace; record with rocprofv3 --kernel-trace, which has grid and workgroup
    tail: device 2, on which the kernels ran, is not described in the trace; record with rocprofv3 --kernel-trace, which has grid and workgroup
    occupancy: device 2, on which the kernels ran, is not described in the trace; record with rocprofv3 --kernel-trace, which has grid and workgroup
    ");
    for (own, reported) in [(no_shape, no_shape_reported), (other_device, other_device_reported)] {
        let traces = [Some(own), reported].into_iter().flatten().collect::<Vec<_>>();
        let expected = reasons_of(&traces[0]);
        assert!(traces.iter().all(|trace| reasons_of(trace) == expected));
        for diagnosis in traces.iter().map(diagnose_trace_in_memory) {
            for line in ["Good occupancy", "Block size is multiple", "Grid size saturates"] {
                assert_eq!(
                    state_of_checklist_line(&diagnosis, line),
                    ChecklistLineState::NotMeasured,
                    "{line}"
                );
            }
        }
    }
}

#[test]
fn a_rule_names_the_share_of_records_it_inspected() {
    let with_shapes = |known: u32| {
        let mut trace = KinetoTrace::a100_trace();
        for step in 0..100 {
            let start = f64::from(step) * 60.0;
            let grid = if step < known { FULL.grid } else { 0 };
            trace.add_launch(
                start,
                (start + 10.0, 50.0),
                "k",
                KernelPlaceAndShape { grid, ..FULL },
            );
        }
        diagnose_trace_in_memory(&trace.read_as_trace())
    };
    let half = with_shapes(50);
    let reason = reason_not_answered(&half, "small-grid");
    insta::assert_snapshot!(reason, @"nothing found in 50.0 % of 5.000 ms of kernel time; launch shapes are not in the trace; record with a version of PyTorch whose profiler writes grid, block and deviceProperties, or with nsys profile --trace=cuda");
    let json = half.diagnosis_to_json();
    let mut questions = json["questions"].as_array().unwrap().iter();
    let question = questions.find(|question| question["id"] == "small-grid").unwrap();
    assert_eq!(question["answer"], "cannot answer");
    assert_eq!(question["inspected"]["share"], 0.5);
    let most = with_shapes(95);
    let RuleAnswer::No { inspected } = &most.question_of_rule("small-grid").unwrap().answer else {
        panic!("{:?}", most.question_of_rule("small-grid"));
    };
    assert_eq!((inspected.inspected_amount, inspected.whole_amount), (4_750_000, 5_000_000));
}

#[test]
fn pages_that_migrate_are_found_and_are_no_lost_launches() {
    let migrations = |export: &mut NsysExport, from: i64, count: i64, kind: i64| {
        export.execute_sql(&format!(
            "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {count} - 1)
             INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY SELECT {from} + i * 98000,
             {from} + i * 98000 + 6000, 0, 1, 0, NULL, {}, 65536, {kind}, 7, 7 FROM n;",
            global_id_of_process(7)
        ));
    };
    let mut during = NsysExport::new();
    during.add_launch((9_000_000, 9_020_000), (10_000_000, 210_000_000), 2, "add");
    migrations(&mut during, 10_000_000, 2000, 11);
    let written = during.read_as_trace().unwrap();
    let report = read_reported_trace_or_skip("unified-memory/um_during.sqlite");
    for trace in [Some(written), report].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        let only_tables = diagnosis.quality.iter().all(|of| of.measured_value.unit == "tables");
        assert!(only_tables, "no launch is lost: {:?}", diagnosis.quality);
        let pages = finding_with_id(&diagnosis, "page-migration").unwrap();
        assert_eq!((pages.measured_value.value, pages.severity), (2000.0, FindingSeverity::Severe));
        assert_eq!(
            pages.finding_title,
            "131.1 MB of managed memory migrated in 2000 pieces: 2000 while kernels ran, 0 between \
             them"
        );
        assert!(pages.advice.contains("cudaMemPrefetchAsync"), "{}", pages.advice);
        assert_eq!(
            state_of_checklist_line(&diagnosis, "Memory transactions"),
            ChecklistLineState::ConditionFails
        );
    }
    // As the host touches pages; the gaps between have no launch that could be recorded.
    let mut between = NsysExport::new();
    between.add_launch((900_000, 920_000), (1_000_000, 2_000_000), 2, "add");
    migrations(&mut between, 3_000_000, 100, 12);
    let diagnosis = diagnose_trace_in_memory(&between.read_as_trace().unwrap());
    let pages = finding_with_id(&diagnosis, "page-migration").unwrap();
    insta::assert_snapshot!(pages.finding_title, @"6.6 MB of managed memory migrated in 100 pieces: 0 while kernels ran, 100 between them");
    assert_eq!(cause_with_most_idle_time(&diagnosis, 0).0, IdleCauseKind::PageMigration);
    assert!(finding_with_id(&diagnosis, "gaps").unwrap().advice.contains("cudaMemPrefetchAsync"));
}

#[test]
fn a_line_of_several_rules_holds_where_none_lacks_data() {
    let mut trace = KinetoTrace::a100_trace();
    let id = trace.add_api_call((0.0, 5.0), "cudaMemcpyAsync");
    trace.add_memory_copy(id, (10.0, 2.0), "HtoD (Pinned -> Device)", 1024);
    trace.add_launch(20.0, (30.0, 500.0), "k", FULL);
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    assert!(diagnosis.has_rule_found_nothing("pageable-copy"));
    let lines = fill_in_checklist(&diagnosis);
    let line = lines.iter().find(|line| line.condition.contains("transactions")).unwrap();
    assert_eq!(line.line_state, ChecklistLineState::NotMeasured, "nobody counted sectors");
    insta::assert_snapshot!(line.deciding_text, @"nothing found by pageable-copy in 1 of 1 copies, synchronous-copy in 1 of 1 copies; not measured: coalescing: no launch was measured by ncu; measure with: ncu --csv --page details --clock-control none --set full -k regex:KERNEL PROGRAM > ncu.csv");
    // PyTorch's profiler does not record them, so that none in the trace says nothing.
    assert!(!diagnosis.has_rule_found_nothing("page-migration"));
    insta::assert_snapshot!(line.deciding_text, @"nothing found by pageable-copy in 1 of 1 copies, synchronous-copy in 1 of 1 copies; not measured: coalescing: no launch was measured by ncu; measure with: ncu --csv --page details --clock-control none --set full -k regex:KERNEL PROGRAM > ncu.csv");
    assert_eq!(
        state_of_checklist_line(&diagnosis, "Optimal work distribution"),
        ChecklistLineState::Holds
    );
}

#[test]
fn communication_kernels_get_no_advice_about_their_shape() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..20 {
        let start = f64::from(step) * 1_000.0;
        trace.add_launch(start, (start + 20.0, 400.0), "ampere_bf16_s16816gemm", FULL);
        let few = KernelPlaceAndShape { grid: 24, block: 640, ..FULL };
        let name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)";
        trace.add_launch(start + 10.0, (start + 420.0, 590.0), name, few);
    }
    let report = read_reported_trace_or_skip("nccl-advice/nccl_grid.json");
    for trace in [Some(trace.read_as_trace()), report].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        for id in ["small-grid", "block-size", "occupancy", "tail"] {
            let found = finding_with_id(&diagnosis, id);
            let named = found.is_some_and(|found| {
                found.evidence.iter().any(|it| it.kernel_call_or_copy_name.contains("nccl"))
            });
            assert!(!named, "{found:?}");
        }
    }
}

/// Steps of 1 ms: 400 µs of compute and 590 µs of an all-reduce that begins so much later.
fn trace_of_steps_with_all_reduce(behind: f64, stream: u32) -> Trace {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..40 {
        let start = f64::from(step) * 1_000.0;
        trace.add_launch(start, (start + 20.0, 400.0), "ampere_bf16_s16816gemm", FULL);
        let name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)";
        let at = KernelPlaceAndShape { stream, ..FULL };
        trace.add_launch(start + 6.0, (start + 20.0 + behind, 590.0), name, at);
    }
    trace.read_as_trace()
}

#[test]
fn communication_without_compute_beside_it_is_found() {
    // In the report the host is ahead by 300 µs, and launches every millisecond without a wait.
    let report = read_reported_trace_or_skip("nccl-advice/nccl_exposed.json")
        .map(|trace| (trace, 12_095_000));
    let steps = Some((trace_of_steps_with_all_reduce(400.0, 7), 23_600_000));
    for (trace, saved) in [steps, report].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        let exposed = finding_with_id(&diagnosis, "exposed-communication").unwrap();
        assert_eq!(
            (exposed.recoverable_ns, exposed.severity),
            (Some(saved), FindingSeverity::Severe)
        );
        assert_eq!(exposed.measured_value.value.round(), 59.0, "{}", exposed.finding_title);
        assert_eq!(
            exposed.finding_title,
            "device 0 communicates for 23.600 ms, 23.600 ms of it with no compute beside it: 59.0 % of the time; it is on a stream that computes, so that nothing can overlap there"
        );
        assert!(
            exposed.evidence[0].kernel_call_or_copy_name.contains("ncclDevKernel_AllReduce"),
            "{exposed:?}"
        );
    }
    // 200 of 590 µs are hidden behind the kernel.
    let half = diagnose_trace_in_memory(&trace_of_steps_with_all_reduce(200.0, 20));
    let exposed = finding_with_id(&half, "exposed-communication").unwrap();
    assert_eq!(exposed.measured_value.value.round(), 39.0, "{}", exposed.finding_title);
    insta::assert_snapshot!(exposed.finding_title, @"device 0 communicates for 23.600 ms, 15.600 ms of it with no compute beside it: 39.2 % of the time");
}

#[test]
fn a_trace_of_only_copies_is_reported_as_such() {
    let copies = |beside: bool| {
        let mut trace = KinetoTrace::a100_trace();
        for step in 0..20 {
            let start = f64::from(step) * 11_000.0;
            let id = trace.add_api_call((start, 2.0), "cudaMemcpyAsync");
            trace.add_memory_copy(
                id,
                (start + 20.0, 5_000.0),
                "HtoD (Pinned -> Device)",
                64_000_000,
            );
            let id = trace.add_api_call((start + 2.0, 2.0), "cudaLaunchKernel");
            let at = KernelPlaceAndShape { stream: 8, ..FULL };
            let kernel = if beside { (start + 20.0, 10_000.0) } else { (start + 5_020.0, 500.0) };
            trace.add_kernel(id, kernel, "solve", at);
            let id = trace.add_api_call((start + 4.0, 2.0), "cudaMemcpyAsync");
            trace.add_memory_copy(
                id,
                (start + 5_520.0, 5_000.0),
                "DtoH (Device -> Pinned)",
                64_000_000,
            );
        }
        trace.read_as_trace()
    };
    let report = read_reported_trace_or_skip("copy-bound-not-said/copy_bound.json");
    for trace in [Some(copies(false)), report].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        let first = &diagnosis.findings[0];
        assert_eq!((first.id, first.severity), ("exposed-copy", FindingSeverity::Severe));
        assert_eq!(first.recoverable_ns, Some(200_000_000));
        assert_eq!(
            first.finding_title,
            "device 0 copies for 91.1 % of the time, 91.1 % with no kernel beside it; kernels run for 4.6 %"
        );
        assert_eq!(
            first.advice,
            "keep data on the device between launches, or copy beside kernels: another stream, page-locked memory (pin_memory=True and non_blocking=True), the next batch while this one is computed"
        );
    }
    // All but 500 µs of each step is beside the kernel: 4.5 % of the time.
    let diagnosis = diagnose_trace_in_memory(&copies(true));
    assert!(finding_with_id(&diagnosis, "exposed-copy").is_none(), "{:?}", diagnosis.findings);
}

/// Kernels of 50 µs, back to back, of which one has an impossible time.
fn trace_with_impossible_time(change: impl Fn(u32, f64) -> ((f64, f64), f64)) -> Trace {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..1000u32 {
        let start = f64::from(step) * 60.0;
        let (kernel, call) = change(step, start);
        trace.add_launch(call, kernel, "norm_kernel", FULL);
    }
    trace.read_as_trace()
}

#[test]
fn operations_that_overlap_their_successors_are_doubted_first() {
    let long = trace_with_impossible_time(|step, start| {
        let length = if step == 400 { 2_000_000.0 } else { 50.0 };
        ((start + 20.0, length), start)
    });
    let report = read_reported_trace_or_skip("impossible-times/impossible_duration.json");
    for trace in [Some(long), report].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        let first = &diagnosis.quality[0];
        assert_eq!(first.severity, FindingSeverity::Severe);
        assert_eq!(
            first.finding_title,
            "1 operations overlap 599 that follow them on one stream, by up to 2.000 s: their times are wrong"
        );
        assert!(
            diagnosis.diagnosis_to_text().find(&first.finding_title[..30])
                < diagnosis.diagnosis_to_text().find("Gaps")
        );
    }
    // Every kernel ends 40 µs behind the start of the next.
    let all = trace_with_impossible_time(|_, start| ((start + 20.0, 100.0), start));
    let diagnosis = diagnose_trace_in_memory(&all);
    insta::assert_snapshot!(diagnosis.quality[0].finding_title, @"999 operations overlap 999 that follow them on one stream, by up to 40.0 µs: their times are wrong");
    // Programmatic dependent launch overlaps by a few microseconds.
    let dependent = trace_with_impossible_time(|_, start| ((start + 20.0, 62.0), start));
    assert!(diagnose_trace_in_memory(&dependent).quality.is_empty());
}

#[test]
fn operations_that_start_before_their_launch_are_doubted() {
    let early = trace_with_impossible_time(|step, start| {
        let call = if step % 25 == 1 { start + 55.0 } else { start };
        ((start + 20.0, 30.0), call)
    });
    let diagnosis = diagnose_trace_in_memory(&early);
    let title = &diagnosis.quality[0].finding_title;
    insta::assert_snapshot!(title, @"40 of 1000 operations start before the call that launched them, by up to 35.0 µs: the clocks of host and device disagree");
    assert!(idle_ns_of_cause(&diagnosis, IdleCauseKind::ClocksDisagree) > 0);
    let rounded = trace_with_impossible_time(|_, start| ((start + 20.0, 30.0), start + 20.5));
    assert!(
        diagnose_trace_in_memory(&rounded).quality.is_empty(),
        "half a microsecond is rounding"
    );
}

#[test]
fn operations_without_times_do_not_count() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..100 {
        let start = 1_000_000.0 + f64::from(step) * 60.0;
        let times = if step % 40 == 3 { (0.0, 0.0) } else { (start + 20.0, 50.0) };
        trace.add_launch(start, times, "k", FULL);
    }
    let report = read_reported_trace_or_skip("impossible-times/zero_times.json");
    for trace in [Some(trace.read_as_trace()), report].into_iter().flatten() {
        assert_eq!((trace.kernels.on_gpu.operation_count(), trace.quality.without_times), (97, 3));
        let diagnosis = diagnose_trace_in_memory(&trace);
        let (start, end) = diagnosis.devices[0].first_start_and_last_end_ns;
        assert!(end - start < 10_000_000, "{:?}", diagnosis.devices[0].first_start_and_last_end_ns);
        assert_eq!(
            diagnosis.quality[0].finding_title,
            "3 operations have no times and do not count: 3.0 % of all"
        );
    }
}

#[test]
fn the_speed_of_pageable_copies_is_of_their_own_bytes() {
    let mut trace = KinetoTrace::a100_trace();
    let id = trace.add_api_call((0.0, 5.0), "cudaMemcpyAsync");
    trace.add_memory_copy(id, (10.0, 2.0), "HtoD (Pageable -> Device)", 1024);
    let id = trace.add_api_call((100.0, 250_000.0), "cudaMemcpy");
    trace.add_memory_copy(id, (110.0, 240_000.0), "HtoD (Pageable -> Device)", 1_000_000_000);
    trace.add_launch(260_000.0, (260_010.0, 50.0), "k", FULL);
    let report = read_reported_trace_or_skip("pageable-speed/pageable_speed.json");
    for trace in [Some(trace.read_as_trace()), report].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        let pageable = finding_with_id(&diagnosis, "pageable-copy").unwrap();
        assert_eq!(
            pageable.finding_title,
            "asynchronous copies with pageable memory: 1, 1.0 kB at 0.5 GB/s; the host waits for each"
        );
        assert_eq!(pageable.severity, FindingSeverity::Information, "2 us of 260 ms");
    }
}

#[test]
fn advice_without_gpu_work_is_in_the_words_of_the_recorder() {
    let mut pytorch = KinetoTrace::a100_trace();
    pytorch.add_event(json!({
        "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 10, "tid": 100, "ts": 1, "dur": 9,
    }));
    let diagnosis = diagnose_trace_in_memory(&pytorch.read_as_trace());
    let first = &diagnosis.quality[0];
    assert!(first.advice.contains("ProfilerActivity.CUDA"), "{}", first.advice);
    assert!(
        !diagnosis.diagnosis_to_text().contains("--trace=cuda"),
        "{}",
        diagnosis.diagnosis_to_text()
    );
    assert!(!diagnosis.answers_any_gpu_question());
    for question in &diagnosis.questions {
        assert!(!matches!(question.answer, RuleAnswer::No { .. }) || question.id == "data-quality");
    }
    assert!(
        fill_in_checklist(&diagnosis)
            .iter()
            .all(|line| line.line_state == ChecklistLineState::NotMeasured)
    );
    // Rows of a GPU in a form that nobody here reads.
    let mut foreign = KinetoTrace::a100_trace();
    foreign.add_event(json!({
        "ph": "M", "pid": 1, "name": "process_name", "args": { "name": "CUDA functions" },
    }));
    foreign.add_event(json!({ "ph": "X", "pid": 1, "tid": 1, "ts": 60, "dur": 20, "name": "add" }));
    let diagnosis = diagnose_trace_in_memory(&foreign.read_as_trace());
    insta::assert_snapshot!(diagnosis.quality[0].finding_title, @r#"the trace holds no kernel, copy, set or graph launch: nothing about the GPU can be concluded; the rows of "CUDA functions" are not in a form that this program knows, such as that of JAX or of PyTorch's old profiler"#);
}

#[test]
fn the_recorders_reason_is_part_of_the_finding_that_work_is_missing() {
    let export = NsysExport::new();
    export.execute_sql(
        "CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, text TEXT);
         INSERT INTO DIAGNOSTIC_EVENT VALUES (1, 2, 'Installed CUDA driver version (13.3) is not \
         supported by this build of Nsight Systems. CUDA trace will be collected using libraries \
         for driver version 12.9'), (2, 2, 'Not all CUDA events might have been collected.'),
         (3, 1, 'Number of CUPTI events produced: 31. Some CUPTI events might be missing.');",
    );
    let report = read_reported_trace_or_skip("profiler-said-why/driver_too_new.sqlite");
    for trace in [Some(export.read_as_trace().unwrap()), report].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        let first = &diagnosis.quality[0];
        assert_eq!(
            first.finding_title,
            "the trace holds no kernel, copy, set or graph launch: nothing about the GPU can be concluded: the driver (CUDA 13.3) is newer than this Nsight Systems"
        );
        assert_eq!(
            first.advice,
            "update Nsight Systems to a version that supports the driver, and record again"
        );
        assert_eq!(first.evidence.len(), 3, "{:?}", first.evidence);
        assert_eq!(
            first.evidence[0].kernel_call_or_copy_name,
            "Installed CUDA driver version (13.3) is not supported by this build of Nsight Systems. \
             CUDA trace will be collected using libraries for driver version 12.9"
        );
        let text: String =
            diagnosis.diagnosis_to_text().split_whitespace().collect::<Vec<_>>().join(" ");
        for evidence in &first.evidence {
            assert!(text.contains(&evidence.kernel_call_or_copy_name), "in full: {text}");
        }
        assert_eq!(
            state_of_checklist_line(&diagnosis, "Minimal synchronization"),
            ChecklistLineState::NotMeasured
        );
    }
    let export = NsysExport::new();
    export.execute_sql(
        "CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, text TEXT);
         INSERT INTO DIAGNOSTIC_EVENT VALUES (1, 3, 'CUPTI_ERROR_INSUFFICIENT_PRIVILEGES');",
    );
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    insta::assert_snapshot!(diagnosis.quality[0].finding_title, @"the trace holds no kernel, copy, set or graph launch: nothing about the GPU can be concluded: the recorder was not allowed to");
}

#[test]
fn two_machines_are_named_before_their_difference() {
    let machine = |name: &str, capability: u32, more: serde_json::Value| {
        let mut trace = KinetoTrace::trace_of_device(json!({
            "id": 0, "name": name, "computeMajor": capability, "computeMinor": 0, "numSms": 80,
        }));
        for step in 0..20 {
            let start = f64::from(step) * 100.0;
            trace.add_launch(start, (start + 10.0, 80.0), "gemm", FULL);
        }
        trace.more = more;
        trace.read_as_trace()
    };
    let world = |size: u32, driver: u32| json!({ "distributedInfo": { "world_size": size }, "cuda_driver_version": driver });
    use TraceSetupProperty::{Capability, Device, Driver, Ranks};
    let same = || machine("NVIDIA A100", 8, world(8, 12080));
    let base = SummedTimesOfTrace::sum_trace_in_memory(&same());
    let reported = ["a100", "v100"]
        .map(|name| read_reported_trace_or_skip(&format!("two-gpus-not-told/{name}.json")));
    let mut pairs = vec![(same(), machine("Tesla V100", 7, world(16, 13000)))];
    if let [Some(a), Some(b)] = reported {
        pairs.push((a, b));
    }
    let devices = [
        "  device: A NVIDIA A100, B Tesla V100",
        "  device: A NVIDIA A100-SXM4-80GB, B Tesla V100-SXM2-16GB",
    ];
    for ((a, b), device) in pairs.iter().zip(devices) {
        let difference = compare_summed_traces(
            SummedTimesOfTrace::sum_trace_in_memory(a),
            SummedTimesOfTrace::sum_trace_in_memory(b),
        );
        assert_eq!(difference.setup_changes[0].property, Device);
        assert!(difference.are_machines_different());
        let text = difference.difference_to_text(["a", "b"]);
        let first: Vec<&str> = text.lines().take(2).collect();
        assert_eq!(
            first,
            ["Two machines, so the comparison is of both machines and programs:", device]
        );
    }
    let properties = |other: &Trace| {
        let difference =
            compare_summed_traces(base.clone(), SummedTimesOfTrace::sum_trace_in_memory(other));
        difference.setup_changes.iter().map(|change| change.property).collect::<Vec<_>>()
    };
    assert_eq!(properties(&pairs[0].1), [Device, Capability, Ranks, Driver]);
    assert_eq!(properties(&same()), []);
    assert_eq!(properties(&machine("NVIDIA A100", 8, world(4, 12080))), [Ranks]);
}

#[test]
fn a_trace_of_rocm_gets_the_words_of_rocm() {
    let mut trace = KinetoTrace::mi300x_trace();
    for step in 0..300 {
        let start = f64::from(step) * 40.0;
        let id = trace.add_api_call((start, 12.0), "hipLaunchKernel");
        trace.add_kernel(id, (start + 20.0, 4.0), &format!("k{}", step % 3), FULL);
    }
    let report = read_reported_trace_or_skip("amd-told-nvidia-tools/amd_launch_bound.json");
    for trace in [Some(trace.read_as_trace()), report].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        assert_eq!(
            finding_with_id(&diagnosis, "launch-bound").unwrap().advice,
            "launch less often: capture the step in a HIP graph, fuse short kernels, or keep a persistent kernel; look for host code between launches"
        );
        let text = diagnosis.diagnosis_to_text();
        for word in ["CUDA graph", "ncu", "nsys", "--gpu-metrics-devices", "cudaHostAlloc"] {
            assert!(!text.contains(word), "{word}: {text}");
        }
        assert!(text.contains("rocprof-compute"), "{text}");
    }
}

#[test]
fn a_wavefront_has_64_threads() {
    let mut trace = KinetoTrace::mi300x_trace();
    let odd = KernelPlaceAndShape { grid: 3040, block: 96, stream: 0, device: 0 };
    for step in 0..200 {
        let start = f64::from(step) * 60.0;
        let id = trace.add_api_call((start, 5.0), "hipLaunchKernel");
        trace.add_kernel(id, (start + 20.0, 50.0), "wave", odd);
    }
    let report = read_reported_trace_or_skip("wave-of-64/wave64.json");
    for trace in [Some(trace.read_as_trace()), report].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        let block = finding_with_id(&diagnosis, "block-size").unwrap();
        let what = &block.evidence[0].kernel_call_or_copy_name;
        assert_eq!(
            what,
            "32 of 128 lanes idle, wavefront of 64: grid 3040×1×1 of 96 threads, wave"
        );
        assert_eq!(block.advice, "make the block size a multiple of 64");
        assert_eq!(
            state_of_checklist_line(&diagnosis, "Block size is multiple"),
            ChecklistLineState::ConditionFails
        );
    }
    let mut nvidia = KinetoTrace::a100_trace();
    nvidia.add_launch(0.0, (10.0, 50.0), "k", KernelPlaceAndShape { block: 96, ..FULL });
    assert!(diagnose_trace_in_memory(&nvidia.read_as_trace()).has_rule_found_nothing("block-size"));
}

#[test]
fn a_softmax_of_a_loss_is_not_set_against_matmul() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..20 {
        let start = f64::from(step) * 2_000.0;
        let matmul = "sm80_xmma_fprop_implicit_gemm_f32";
        trace.add_launch(start, (start + 900.0, 1_000.0), matmul, FULL);
        let softmax = "void cunn_SoftMaxForward<float>(float*)";
        trace.add_launch(start + 10.0, (start + 1_910.0, 2.0), softmax, FULL);
    }
    let report = read_reported_trace_or_skip("softmax-line/softmax_of_loss.json");
    for trace in [Some(trace.read_as_trace()), report].into_iter().flatten() {
        assert_eq!(
            lines_with_word(&diagnose_trace_in_memory(&trace).diagnosis_to_text(), "softmax takes"),
            ""
        );
    }
}

#[test]
fn a_broken_string_costs_its_own_event() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..100 {
        let start = f64::from(step) * 100.0;
        trace.add_event(json!({
            "ph": "X", "cat": "cpu_op", "name": format!("lib {step}"), "pid": 10, "tid": 100,
            "ts": start, "dur": 10,
        }));
        trace.add_launch(start + 1.0, (start + 20.0, 50.0), "k", FULL);
    }
    let whole = trace.json_text();
    for broken in ["a\u{1}b", "Library(\"x\", \"IMPL\")", "{\"ph\": \"X", "a\nb", "\\x"] {
        let text = whole.replace("lib 49", broken);
        let (_folder, path) = crate::fixture::write_temporary_file("broken.json", text.as_bytes());
        let read = read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap();
        assert_eq!(
            (read.kernels.on_gpu.operation_count(), read.ranges.range_count()),
            (100, 99),
            "{broken}"
        );
        assert_eq!(read.quality.broken_events, 1, "{broken}");
        assert_eq!(read.devices.len(), 1, "{broken}");
        let read = diagnose_trace_in_memory(&read);
        assert_eq!(
            finding_titles(&read.quality),
            ["1 events are no valid JSON and do not count"],
            "{broken}"
        );
    }
    for name in ["control_char", "bare_quotes", "control_middle"] {
        let Some(read) =
            read_reported_trace_or_skip(&format!("bad-string-stops-reading/{name}.json"))
        else {
            return;
        };
        assert_eq!(read.quality.broken_events, 1, "{name}");
        assert!(read.quality.unreadable.is_empty(), "{name}");
        let expected = if name == "control_middle" { 100 } else { 2 };
        assert_eq!(read.kernels.on_gpu.operation_count(), expected, "{name}");
    }
}
