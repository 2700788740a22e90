//! Tests of faults that a diagnosis once got wrong, on inputs that the tests write; where
//! `SHARED_FAULTS` names a folder, also on the reported inputs.

use std::path::PathBuf;

use crate::fixture::kineto::{A100_FILLING_KERNEL, KernelPlaceAndShape, KinetoTrace};
use crate::fixture::{
    NsysExport, finding_titles, finding_with_id, global_id_of_process, lines_with_word,
};
use kernelgate_trace::diagnose::checklist::{ChecklistLineState, fill_in_checklist};
use kernelgate_trace::diagnose::difference::{
    SummedTimesOfTrace, TraceSetupProperty, compare_summed_traces,
};
use kernelgate_trace::diagnose::{
    DiagnosisRuleAnswer, FindingConfidence, FindingSeverity, IdleCauseKind, TraceDiagnosis,
    diagnose_trace_in_memory,
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

/// Returns the idle time of the first device that has this cause, in nanoseconds.
fn idle_ns_of_cause(diagnosis: &TraceDiagnosis, kind: IdleCauseKind) -> i64 {
    let causes = diagnosis.gpu_use_by_process[0].idle_gaps.idle_time_by_cause.iter();
    causes.filter(|cause| cause.kind == kind).map(|cause| cause.total_idle_ns).sum()
}

/// Returns the cause with the most idle time on a device.
fn cause_with_most_idle_time(
    diagnosis: &TraceDiagnosis,
    device: u32,
) -> (IdleCauseKind, Option<&str>) {
    let device = diagnosis.gpu_use_by_process.iter().find(|of| of.gpu_ordinal == device).unwrap();
    let cause = &device.idle_gaps.idle_time_by_cause[0];
    (cause.kind, cause.called_function_or_range_path.as_deref())
}

fn reason_not_answered(diagnosis: &TraceDiagnosis, id: &str) -> String {
    let question = diagnosis.question_of_rule(id).unwrap();
    question.reason_without_answer().unwrap_or_else(|| panic!("{question:?}"))
}

fn state_of_checklist_line(diagnosis: &TraceDiagnosis, line: &str) -> ChecklistLineState {
    let lines = fill_in_checklist(diagnosis);
    lines.iter().find(|of| of.checklist_statement.starts_with(line)).unwrap().line_state
}

/// Trace of a kernel, followed by a kernel that is launched at 40 µs and starts 400 ms later.
fn trace_with_late_kernel() -> KinetoTrace {
    let mut trace = KinetoTrace::a100_trace();
    trace.add_launch(0.0, (10.0, 4.0), "first", A100_FILLING_KERNEL);
    trace
}

#[test]
fn work_launched_long_before_it_starts_is_not_host_code() {
    let written = || {
        let mut trace = trace_with_late_kernel();
        trace.add_launch(40.0, (400_000.0, 4.0), "second", A100_FILLING_KERNEL);
        trace.add_api_call((80.0, 400_000.0), "cudaStreamSynchronize");
        trace.read_as_trace()
    };
    let launched_then_late =
        read_reported_trace_or_skip("gap-launched-then-late/launched_then_late_cuda.json");
    for trace in [Some(written()), launched_then_late].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        assert_eq!(idle_ns_of_cause(&diagnosis, IdleCauseKind::HostCodeBeforeLaunch), 26_000);
        assert_eq!(idle_ns_of_cause(&diagnosis, IdleCauseKind::LaunchCallStillRunning), 5_000);
        assert_eq!(
            idle_ns_of_cause(&diagnosis, IdleCauseKind::UnknownDelayAfterLaunch),
            399_955_000
        );
        assert!(finding_with_id(&diagnosis, "launch-bound").is_none());
        let gaps = finding_with_id(&diagnosis, "gaps").unwrap();
        assert_eq!(
            (gaps.severity, gaps.confidence),
            (FindingSeverity::Warning, FindingConfidence::LowConfidence)
        );
        assert_eq!(gaps.max_recoverable_ns, None, "nobody knows what most of it could save");
    }
}

#[test]
fn idle_time_that_no_replay_mends_stays_a_warning() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..10 {
        let start = f64::from(step) * 10_000.0;
        trace.add_api_call((start, 2.0), "cudaStreamWaitEvent");
        trace.add_launch(start + 5.0, (start + 9_000.0, 100.0), "waits", A100_FILLING_KERNEL);
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    assert_eq!(cause_with_most_idle_time(&diagnosis, 0).0, IdleCauseKind::StreamWaitedForEvent);
    let gaps = finding_with_id(&diagnosis, "gaps").unwrap();
    assert_eq!(gaps.severity, FindingSeverity::Warning, "{}", gaps.finding_title);
    assert!(gaps.max_recoverable_ns < Some(10_000_000), "{:?}", gaps.max_recoverable_ns);
}

#[test]
fn late_start_on_windows_is_attributed_to_driver() {
    let mut export = NsysExport::new();
    export.add_launch((0, 5_000), (10_000, 14_000), 1, "a");
    export.add_launch((40_000, 45_000), (700_000, 710_000), 2, "b");
    let cause = |export: &NsysExport| {
        let trace = export.read_as_trace().unwrap();
        diagnose_trace_in_memory(&trace).gpu_use_by_process[0].idle_gaps.idle_time_by_cause[0].kind
    };
    assert_eq!(cause(&export), IdleCauseKind::UnknownDelayAfterLaunch);
    export.execute_sql("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)");
    for (name, value, expected) in [
        ("SoftwarePlatform", "L4X", IdleCauseKind::UnknownDelayAfterLaunch),
        (
            "SoftwareReleaseVersion",
            "6.6.87.2-microsoft-standard-WSL2",
            IdleCauseKind::WindowsDriverDelay,
        ),
        ("SoftwarePlatform", "Windows", IdleCauseKind::WindowsDriverDelay),
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
        trace.add_launch(40.0, (400_000.0, 4.0), "second", A100_FILLING_KERNEL);
        let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
        let (kind, function) = cause_with_most_idle_time(&diagnosis, 0);
        (kind, function.map(str::to_owned))
    };
    let named = |kind, function: &str| (kind, Some(function.to_owned()));
    let event = with(&|trace| {
        trace.add_api_call((30.0, 2.0), "cudaStreamWaitEvent");
    });
    assert_eq!(event, named(IdleCauseKind::StreamWaitedForEvent, "cudaStreamWaitEvent"));
    let function = with(&|trace| {
        trace.add_api_call((30.0, 2.0), "hipLaunchHostFunc");
    });
    assert_eq!(function, named(IdleCauseKind::StreamWaitedForHostFunction, "hipLaunchHostFunc"));
    let other_device = with(&|trace| {
        let other = KernelPlaceAndShape { device: 1, ..A100_FILLING_KERNEL };
        trace.add_launch(20.0, (30.0, 399_000.0), "long", other);
    });
    assert_eq!(other_device, (IdleCauseKind::OtherGpuOrProcessBusy, None));
    // A wait of another stream for an event does not delay the late kernel.
    let other_stream = with(&|trace| {
        let id = trace.add_api_call((30.0, 2.0), "cudaStreamWaitEvent");
        trace.add_event(json!({
            "ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "pid": 0, "tid": 9,
            "ts": 31.0, "dur": 1.0,
            "args": { "correlation": id, "device": 0, "context": 1, "stream": 9 },
        }));
    });
    assert_eq!(other_stream, (IdleCauseKind::UnknownDelayAfterLaunch, None));
    // A stream's wait for an event is over if work that was launched after the wait has already
    // run.
    let launched_since = with(&|trace| {
        trace.add_api_call((16.0, 1.0), "cudaStreamWaitEvent");
        trace.add_launch(17.0, (24.0, 1.0), "between", A100_FILLING_KERNEL);
    });
    assert_eq!(launched_since, (IdleCauseKind::UnknownDelayAfterLaunch, None));
}

#[test]
fn nodes_of_a_graph_that_start_late_are_queued() {
    let mut trace = KinetoTrace::a100_trace();
    let graph = trace.add_api_call((0.0, 5.0), "cudaGraphLaunch");
    trace.add_kernel(graph, (10.0, 5.0), "a", A100_FILLING_KERNEL);
    trace.add_kernel(graph, (16.0, 5.0), "b", A100_FILLING_KERNEL);
    trace.add_kernel(graph, (500.0, 5.0), "c", A100_FILLING_KERNEL);
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    assert_eq!(idle_ns_of_cause(&diagnosis, IdleCauseKind::BetweenCudaGraphNodes), 479_000);
    assert_eq!(idle_ns_of_cause(&diagnosis, IdleCauseKind::UsualStartOfQueuedOperation), 1_000);
}

/// Trace of steps of 7 ms: a kernel of 100 µs, a wait of 3 µs that begins when the kernel has
/// ended, then host code.
fn trace_of_steps_with_short_waits(before_launch: impl Fn(&mut KinetoTrace, f64)) -> Trace {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..20 {
        let start = f64::from(step) * 7_000.0;
        trace.add_launch(start, (start + 10.0, 100.0), "step_kernel", A100_FILLING_KERNEL);
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
        assert_eq!(cause_with_most_idle_time(&diagnosis, 0).0, IdleCauseKind::HostCodeBeforeLaunch);
        assert_eq!(
            idle_ns_of_cause(&diagnosis, IdleCauseKind::LaunchThreadWaitedForGpu),
            19 * 3_000
        );
        let waits = finding_with_id(&diagnosis, "sync-in-loop").unwrap();
        assert_eq!(waits.max_recoverable_ns, Some(19 * 3_000));
        assert_eq!(waits.severity, FindingSeverity::Information);
    }
    let allocating = trace_of_steps_with_short_waits(|trace, at| {
        trace.add_api_call((at, 6_500.0), "cudaMalloc");
    });
    let diagnosis = diagnose_trace_in_memory(&allocating);
    assert_eq!(
        cause_with_most_idle_time(&diagnosis, 0),
        (IdleCauseKind::LaunchThreadInOtherCudaCall, Some("cudaMalloc"))
    );
    assert_eq!(
        idle_ns_of_cause(&diagnosis, IdleCauseKind::LaunchThreadInOtherCudaCall),
        19 * 6_500_000
    );
    insta::assert_snapshot!(finding_with_id(&diagnosis, "gaps").unwrap().advice, @"move this call out of the loop: allocate once, copy asynchronously");
}

#[test]
fn a_wait_saves_no_time_in_which_something_else_holds_up_the_launch() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..20 {
        let start = f64::from(step) * 10_000.0;
        trace.add_launch(start, (start + 3_000.0, 5_000.0), "step_kernel", A100_FILLING_KERNEL);
        // The host's wait ends when the kernel ends; the next kernel starts 3 ms after its launch.
        trace.add_api_call((start + 10.0, 8_000.0), "cudaDeviceSynchronize");
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    let waits = finding_with_id(&diagnosis, "sync-in-loop").unwrap();
    // Each wait could save the time from the end of a kernel to the end of the next launch call.
    assert_eq!(waits.max_recoverable_ns, Some(19 * 2_005_000), "{}", waits.finding_title);
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
    trace.add_launch(1_000_000.0, (1_000_010.0, 100.0), "first_kernel", A100_FILLING_KERNEL);
    let report = read_reported_trace_or_skip("sync-loop-idle-of-others/other_idle.json");
    for trace in [Some(trace.read_as_trace()), report].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        let waits = finding_with_id(&diagnosis, "sync-in-loop").unwrap();
        assert_eq!(
            (waits.max_recoverable_ns, waits.severity),
            (Some(0), FindingSeverity::Information)
        );
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
        trace.add_launch(start, (start + 6.0, 3_990.0), "solve", A100_FILLING_KERNEL);
        trace.add_api_call((start + 7.0, 3_990.0), "cudaStreamSynchronize");
    }
    let report = read_reported_trace_or_skip("cheap-waits-severe/cheap_waits.json");
    for trace in [Some(trace.read_as_trace()), report].into_iter().flatten() {
        let waits = diagnose_trace_in_memory(&trace);
        let waits = finding_with_id(&waits, "sync-in-loop").unwrap();
        assert_eq!(waits.max_recoverable_ns, Some(49 * 9_000), "49 gaps of 10 us, 1 us stays");
        assert_eq!(waits.severity, FindingSeverity::Information, "0.2 % of the span");
    }
}

#[test]
fn a_call_that_happened_once_is_start_up() {
    let with = |name: &str| {
        let mut trace = KinetoTrace::a100_trace();
        trace.add_launch(0.0, (10.0, 50.0), "init_kernel", A100_FILLING_KERNEL);
        trace.add_api_call((70.0, 6_000_000.0), name);
        for step in 0..40 {
            let start = 6_001_000.0 + f64::from(step) * 100.0;
            trace.add_launch(start, (start + 10.0, 95.0), "step", A100_FILLING_KERNEL);
        }
        trace.read_as_trace()
    };
    // The first launch of each kernel loads the kernel's module, which takes host time.
    let mut first_launch = KinetoTrace::a100_trace();
    for step in 0..40 {
        let start = f64::from(step) * 60.0 + if step > 5 { 6_500.0 } else { 0.0 };
        let length = if step == 6 { 6_400.0 } else { 5.0 };
        let begin = if step == 6 { start - 6_400.0 } else { start };
        let id = first_launch.add_api_call((begin, length), "hipLaunchKernel");
        first_launch.add_kernel(id, (start + 10.0, 50.0), "step", A100_FILLING_KERNEL);
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
        assert!(
            diagnosis.data_quality_findings.is_empty(),
            "no clock jumped: {:?}",
            diagnosis.data_quality_findings
        );
    }
}

#[test]
fn rules_give_no_answer_without_launch_shapes() {
    let trace_with = |at: KernelPlaceAndShape| {
        let mut trace = KinetoTrace::mi300x_trace();
        for step in 0..200 {
            let start = f64::from(step) * 60.0;
            let id = trace.add_api_call((start, 5.0), "hipLaunchKernel");
            trace.add_kernel(id, (start + 20.0, 50.0), "tiny", at);
        }
        trace.read_as_trace()
    };
    let no_shape =
        trace_with(KernelPlaceAndShape { grid_blocks: 0, block_threads: 0, ..A100_FILLING_KERNEL });
    let other_device =
        trace_with(KernelPlaceAndShape { grid_blocks: 1, device: 2, ..A100_FILLING_KERNEL });
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
            let grid = if step < known { A100_FILLING_KERNEL.grid_blocks } else { 0 };
            trace.add_launch(
                start,
                (start + 10.0, 50.0),
                "k",
                KernelPlaceAndShape { grid_blocks: grid, ..A100_FILLING_KERNEL },
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
    let DiagnosisRuleAnswer::No { inspected } =
        &most.question_of_rule("small-grid").unwrap().answer
    else {
        panic!("{:?}", most.question_of_rule("small-grid"));
    };
    assert_eq!(
        (inspected.inspected_count_or_ns, inspected.whole_count_or_ns),
        (4_750_000, 5_000_000)
    );
}

#[test]
fn page_migrations_are_found_and_not_counted_as_unlaunched() {
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
        let only_tables =
            diagnosis.data_quality_findings.iter().all(|of| of.measured_value.unit == "tables");
        assert!(only_tables, "no launch is lost: {:?}", diagnosis.data_quality_findings);
        let pages = finding_with_id(&diagnosis, "page-migration").unwrap();
        assert_eq!(
            (pages.measured_value.number_in_unit, pages.severity),
            (2000.0, FindingSeverity::Severe)
        );
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
    // Pages migrate between kernels, as if the host touched them; the idle gaps between the
    // migrations have no launch call.
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
fn checklist_line_holds_only_if_no_rule_lacks_data() {
    let mut trace = KinetoTrace::a100_trace();
    let id = trace.add_api_call((0.0, 5.0), "cudaMemcpyAsync");
    trace.add_memory_copy(id, (10.0, 2.0), "HtoD (Pinned -> Device)", 1024);
    trace.add_launch(20.0, (30.0, 500.0), "k", A100_FILLING_KERNEL);
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    assert!(diagnosis.has_rule_found_nothing("pageable-copy"));
    let lines = fill_in_checklist(&diagnosis);
    let line = lines.iter().find(|line| line.checklist_statement.contains("transactions")).unwrap();
    assert_eq!(line.line_state, ChecklistLineState::NotMeasured, "nobody counted sectors");
    insta::assert_snapshot!(line.finding_or_command_deciding_line, @"nothing found by pageable-copy in 1 of 1 copies, synchronous-copy in 1 of 1 copies; not measured: coalescing: no launch was measured by ncu; measure with: ncu --csv --page details --clock-control none --set full -k regex:KERNEL PROGRAM > ncu.csv");
    // PyTorch's profiler does not record page migrations, so a trace without them does not show
    // that no page migrated.
    assert!(!diagnosis.has_rule_found_nothing("page-migration"));
    insta::assert_snapshot!(line.finding_or_command_deciding_line, @"nothing found by pageable-copy in 1 of 1 copies, synchronous-copy in 1 of 1 copies; not measured: coalescing: no launch was measured by ncu; measure with: ncu --csv --page details --clock-control none --set full -k regex:KERNEL PROGRAM > ncu.csv");
    assert_eq!(
        state_of_checklist_line(&diagnosis, "Optimal work distribution"),
        ChecklistLineState::ConditionHolds
    );
}

#[test]
fn communication_kernels_get_no_advice_about_their_shape() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..20 {
        let start = f64::from(step) * 1_000.0;
        trace.add_launch(
            start,
            (start + 20.0, 400.0),
            "ampere_bf16_s16816gemm",
            A100_FILLING_KERNEL,
        );
        let few =
            KernelPlaceAndShape { grid_blocks: 24, block_threads: 640, ..A100_FILLING_KERNEL };
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

/// Trace of steps of 1 ms: 400 µs of compute, and an all-reduce of 590 µs that begins `behind` µs
/// after the compute.
fn trace_of_steps_with_all_reduce(behind: f64, stream: u32) -> Trace {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..40 {
        let start = f64::from(step) * 1_000.0;
        trace.add_launch(
            start,
            (start + 20.0, 400.0),
            "ampere_bf16_s16816gemm",
            A100_FILLING_KERNEL,
        );
        let name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)";
        let at = KernelPlaceAndShape { stream, ..A100_FILLING_KERNEL };
        trace.add_launch(start + 6.0, (start + 20.0 + behind, 590.0), name, at);
    }
    trace.read_as_trace()
}

#[test]
fn communication_without_compute_beside_it_is_found() {
    // In the reported trace the host is 300 µs ahead of the GPU, and launches every millisecond
    // without a wait.
    let report = read_reported_trace_or_skip("nccl-advice/nccl_exposed.json")
        .map(|trace| (trace, 12_095_000));
    let steps = Some((trace_of_steps_with_all_reduce(400.0, 7), 23_600_000));
    for (trace, saved) in [steps, report].into_iter().flatten() {
        let diagnosis = diagnose_trace_in_memory(&trace);
        let exposed = finding_with_id(&diagnosis, "exposed-communication").unwrap();
        assert_eq!(
            (exposed.max_recoverable_ns, exposed.severity),
            (Some(saved), FindingSeverity::Severe)
        );
        assert_eq!(
            exposed.measured_value.number_in_unit.round(),
            59.0,
            "{}",
            exposed.finding_title
        );
        assert_eq!(
            exposed.finding_title,
            "device 0 communicates for 23.600 ms, 23.600 ms of it with no compute beside it: 59.0 % of the time; it is on a stream that computes, so that nothing can overlap there"
        );
        assert!(
            exposed.evidence[0].kernel_call_or_copy_name.contains("ncclDevKernel_AllReduce"),
            "{exposed:?}"
        );
    }
    // Compute hides 200 of the 590 µs of each all-reduce.
    let half = diagnose_trace_in_memory(&trace_of_steps_with_all_reduce(200.0, 20));
    let exposed = finding_with_id(&half, "exposed-communication").unwrap();
    assert_eq!(exposed.measured_value.number_in_unit.round(), 39.0, "{}", exposed.finding_title);
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
            let at = KernelPlaceAndShape { stream: 8, ..A100_FILLING_KERNEL };
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
        assert_eq!((first.rule_id, first.severity), ("exposed-copy", FindingSeverity::Severe));
        assert_eq!(first.max_recoverable_ns, Some(200_000_000));
        assert_eq!(
            first.finding_title,
            "device 0 copies for 91.1 % of the time, 91.1 % with no kernel beside it; kernels run for 4.6 %"
        );
        assert_eq!(
            first.advice,
            "keep data on the device between launches, or copy beside kernels: another stream, page-locked memory (pin_memory=True and non_blocking=True), the next batch while this one is computed"
        );
    }
    // All but 500 µs of the copies of a step run beside a kernel, so 4.5 % of the time is exposed.
    let diagnosis = diagnose_trace_in_memory(&copies(true));
    assert!(finding_with_id(&diagnosis, "exposed-copy").is_none(), "{:?}", diagnosis.findings);
}

/// Trace of 1000 kernels of 50 µs, whose launch and kernel times `change` can make impossible.
fn trace_with_impossible_time(change: impl Fn(u32, f64) -> ((f64, f64), f64)) -> Trace {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..1000u32 {
        let start = f64::from(step) * 60.0;
        let (kernel, call) = change(step, start);
        trace.add_launch(call, kernel, "norm_kernel", A100_FILLING_KERNEL);
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
        let first = &diagnosis.data_quality_findings[0];
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
    // Every kernel ends 40 µs after the next kernel of its stream starts.
    let all = trace_with_impossible_time(|_, start| ((start + 20.0, 100.0), start));
    let diagnosis = diagnose_trace_in_memory(&all);
    insta::assert_snapshot!(diagnosis.data_quality_findings[0].finding_title, @"999 operations overlap 999 that follow them on one stream, by up to 40.0 µs: their times are wrong");
    // Programmatic dependent launch overlaps by a few microseconds.
    let dependent = trace_with_impossible_time(|_, start| ((start + 20.0, 62.0), start));
    assert!(diagnose_trace_in_memory(&dependent).data_quality_findings.is_empty());
}

#[test]
fn operations_that_start_before_their_launch_are_doubted() {
    let early = trace_with_impossible_time(|step, start| {
        let call = if step % 25 == 1 { start + 55.0 } else { start };
        ((start + 20.0, 30.0), call)
    });
    let diagnosis = diagnose_trace_in_memory(&early);
    let title = &diagnosis.data_quality_findings[0].finding_title;
    insta::assert_snapshot!(title, @"40 of 1000 operations start before the call that launched them, by up to 35.0 µs: the clocks of host and device disagree");
    assert!(idle_ns_of_cause(&diagnosis, IdleCauseKind::HostAndGpuClocksDisagree) > 0);
    let rounded = trace_with_impossible_time(|_, start| ((start + 20.0, 30.0), start + 20.5));
    assert!(
        diagnose_trace_in_memory(&rounded).data_quality_findings.is_empty(),
        "half a microsecond is rounding"
    );
}

#[test]
fn operations_without_times_do_not_count() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..100 {
        let start = 1_000_000.0 + f64::from(step) * 60.0;
        let times = if step % 40 == 3 { (0.0, 0.0) } else { (start + 20.0, 50.0) };
        trace.add_launch(start, times, "k", A100_FILLING_KERNEL);
    }
    let report = read_reported_trace_or_skip("impossible-times/zero_times.json");
    for trace in [Some(trace.read_as_trace()), report].into_iter().flatten() {
        assert_eq!(
            (trace.kernels.on_gpu.operation_count(), trace.quality.operations_without_times),
            (97, 3)
        );
        let diagnosis = diagnose_trace_in_memory(&trace);
        let (start, end) = diagnosis.gpu_use_by_process[0].first_start_and_last_end_ns;
        assert!(
            end - start < 10_000_000,
            "{:?}",
            diagnosis.gpu_use_by_process[0].first_start_and_last_end_ns
        );
        assert_eq!(
            diagnosis.data_quality_findings[0].finding_title,
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
    trace.add_launch(260_000.0, (260_010.0, 50.0), "k", A100_FILLING_KERNEL);
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
fn advice_without_gpu_work_fits_the_recorder() {
    let mut pytorch = KinetoTrace::a100_trace();
    pytorch.add_event(json!({
        "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 10, "tid": 100, "ts": 1, "dur": 9,
    }));
    let diagnosis = diagnose_trace_in_memory(&pytorch.read_as_trace());
    let first = &diagnosis.data_quality_findings[0];
    assert!(first.advice.contains("ProfilerActivity.CUDA"), "{}", first.advice);
    assert!(
        !diagnosis.diagnosis_to_text().contains("--trace=cuda"),
        "{}",
        diagnosis.diagnosis_to_text()
    );
    assert!(!diagnosis.answers_any_gpu_question());
    for question in &diagnosis.questions {
        assert!(
            !matches!(question.answer, DiagnosisRuleAnswer::No { .. })
                || question.rule_id == "data-quality"
        );
    }
    assert!(
        fill_in_checklist(&diagnosis)
            .iter()
            .all(|line| line.line_state == ChecklistLineState::NotMeasured)
    );
    // The GPU's rows have names that no reader of kernelgate recognises.
    let mut foreign = KinetoTrace::a100_trace();
    foreign.add_event(json!({
        "ph": "M", "pid": 1, "name": "process_name", "args": { "name": "CUDA functions" },
    }));
    foreign.add_event(json!({ "ph": "X", "pid": 1, "tid": 1, "ts": 60, "dur": 20, "name": "add" }));
    let diagnosis = diagnose_trace_in_memory(&foreign.read_as_trace());
    insta::assert_snapshot!(diagnosis.data_quality_findings[0].finding_title, @r#"the trace holds no kernel, copy, set or graph launch: nothing about the GPU can be concluded; the rows of "CUDA functions" are not in a form that this program knows, such as that of JAX or of PyTorch's old profiler"#);
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
        let first = &diagnosis.data_quality_findings[0];
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
    insta::assert_snapshot!(diagnosis.data_quality_findings[0].finding_title, @"the trace holds no kernel, copy, set or graph launch: nothing about the GPU can be concluded: the recorder was not allowed to");
}

#[test]
fn difference_names_changed_devices_first() {
    let machine = |name: &str, capability: u32, more: serde_json::Value| {
        let mut trace = KinetoTrace::trace_of_device(json!({
            "id": 0, "name": name, "computeMajor": capability, "computeMinor": 0, "numSms": 80,
        }));
        for step in 0..20 {
            let start = f64::from(step) * 100.0;
            trace.add_launch(start, (start + 10.0, 80.0), "gemm", A100_FILLING_KERNEL);
        }
        trace.more_document_members = more;
        trace.read_as_trace()
    };
    let world = |size: u32, driver: u32| json!({ "distributedInfo": { "world_size": size }, "cuda_driver_version": driver });
    use TraceSetupProperty::{ComputeCapability, DeviceNames, DriverVersion, RankCount};
    let same = || machine("NVIDIA A100", 8, world(8, 12080));
    let base = SummedTimesOfTrace::sum_times_of_loaded_trace(&same());
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
            SummedTimesOfTrace::sum_times_of_loaded_trace(a),
            SummedTimesOfTrace::sum_times_of_loaded_trace(b),
        );
        assert_eq!(difference.setup_changes[0].property, DeviceNames);
        assert!(difference.are_machines_different());
        let text = difference.difference_to_text(["a", "b"]);
        let first: Vec<&str> = text.lines().take(2).collect();
        assert_eq!(
            first,
            ["Two machines, so the comparison is of both machines and programs:", device]
        );
    }
    let properties = |other: &Trace| {
        let difference = compare_summed_traces(
            base.clone(),
            SummedTimesOfTrace::sum_times_of_loaded_trace(other),
        );
        difference.setup_changes.iter().map(|change| change.property).collect::<Vec<_>>()
    };
    assert_eq!(properties(&pairs[0].1), [DeviceNames, ComputeCapability, RankCount, DriverVersion]);
    assert_eq!(properties(&same()), []);
    assert_eq!(properties(&machine("NVIDIA A100", 8, world(4, 12080))), [RankCount]);
}

#[test]
fn diagnosis_of_rocm_trace_uses_rocm_terms() {
    let mut trace = KinetoTrace::mi300x_trace();
    for step in 0..300 {
        let start = f64::from(step) * 40.0;
        let id = trace.add_api_call((start, 12.0), "hipLaunchKernel");
        trace.add_kernel(id, (start + 20.0, 4.0), &format!("k{}", step % 3), A100_FILLING_KERNEL);
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
    let odd = KernelPlaceAndShape { grid_blocks: 3040, block_threads: 96, stream: 0, device: 0 };
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
    nvidia.add_launch(
        0.0,
        (10.0, 50.0),
        "k",
        KernelPlaceAndShape { block_threads: 96, ..A100_FILLING_KERNEL },
    );
    assert!(diagnose_trace_in_memory(&nvidia.read_as_trace()).has_rule_found_nothing("block-size"));
}

#[test]
fn softmax_of_a_loss_is_not_compared_with_matmul() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..20 {
        let start = f64::from(step) * 2_000.0;
        let matmul = "sm80_xmma_fprop_implicit_gemm_f32";
        trace.add_launch(start, (start + 900.0, 1_000.0), matmul, A100_FILLING_KERNEL);
        let softmax = "void cunn_SoftMaxForward<float>(float*)";
        trace.add_launch(start + 10.0, (start + 1_910.0, 2.0), softmax, A100_FILLING_KERNEL);
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
        trace.add_launch(start + 1.0, (start + 20.0, 50.0), "k", A100_FILLING_KERNEL);
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
        assert_eq!(read.quality.invalid_json_events, 1, "{broken}");
        assert_eq!(read.devices.len(), 1, "{broken}");
        let read = diagnose_trace_in_memory(&read);
        assert_eq!(
            finding_titles(&read.data_quality_findings),
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
        assert_eq!(read.quality.invalid_json_events, 1, "{name}");
        assert!(read.quality.unreadable_parts.is_empty(), "{name}");
        let expected = if name == "control_middle" { 100 } else { 2 };
        assert_eq!(read.kernels.on_gpu.operation_count(), expected, "{name}");
    }
}
