//! Tests of faults like those in `faults.rs` with other vendors, libraries and calls; each row of a
//! table is one input.

use kernelgate_trace::analyze::timeline::BusyTimeCategoryOfGpu;
use kernelgate_trace::diagnose::{
    DiagnosisRuleAnswer, FindingSeverity, IdleCauseKind, TraceDiagnosis, diagnose_trace_in_memory,
};

use crate::fixture::kineto::{A100_FILLING_KERNEL, KernelPlaceAndShape, KinetoTrace};

fn idle_ns_of_cause(diagnosis: &TraceDiagnosis, kind: IdleCauseKind) -> i64 {
    diagnosis.gpu_use_by_process[0]
        .account
        .whole_trace_account
        .idle_ns_by_cause
        .get(&kind)
        .copied()
        .unwrap_or(0)
}

fn trace_of_amd_or_nvidia(amd: bool) -> KinetoTrace {
    if amd { KinetoTrace::mi300x_trace() } else { KinetoTrace::a100_trace() }
}

#[test]
fn idle_time_of_late_starts_is_split_at_launch() {
    // Each row has the launch function, whether the GPU is AMD's, and in microseconds start and
    // length of the launch call and start of the launched operation. An earlier kernel ends at 14
    // µs.
    for (launch, amd, call, start) in [
        ("cudaLaunchKernel", false, (40.0, 5.0), 400_000.0),
        ("cuLaunchKernelEx", false, (40.0, 5.0), 400_000.0),
        ("cudaGraphLaunch", false, (40.0, 5.0), 400_000.0),
        ("hipModuleLaunchKernel", true, (40.0, 5.0), 400_000.0),
        ("cudaLaunchKernel", false, (40.0, 0.0), 400_000.0),
        ("cudaLaunchKernel", false, (14.0, 5.0), 400_000.0),
        ("cudaLaunchKernel", false, (40.0, 300_000.0), 400_000.0),
        ("cudaLaunchKernel", false, (40.0, 5.0), 10_000_000.0),
    ] {
        let mut trace = trace_of_amd_or_nvidia(amd);
        trace.add_launch(0.0, (10.0, 4.0), "first", A100_FILLING_KERNEL);
        let id = trace.add_api_call(call, launch);
        trace.add_kernel(id, (start, 4.0), "second", A100_FILLING_KERNEL);
        let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
        let expected = [call.0 - 14.0, call.1, start - call.0 - call.1];
        let long = call.1 > 1_000.0;
        let called = if long {
            IdleCauseKind::FirstKernelLaunch
        } else {
            IdleCauseKind::LaunchCallStillRunning
        };
        let kinds =
            [IdleCauseKind::HostCodeBeforeLaunch, called, IdleCauseKind::UnknownDelayAfterLaunch];
        let found = kinds.map(|kind| idle_ns_of_cause(&diagnosis, kind) as f64 / 1e3);
        assert_eq!(found, expected, "{launch} {call:?} {start}");
        assert!(diagnosis.findings.iter().all(|of| of.rule_id != "launch-bound"), "{launch}");
    }
}

#[test]
fn communication_of_every_library_is_exposed_by_what_no_compute_hides() {
    for (name, amd) in [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", false),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", true),
        ("_Z23ncclDevKernel_Generic_424ncclDevKernelArgsStorageILm4096EE", true),
        ("nvshmemi_alltoall_kernel", false),
        ("mscclpp::allreduceKernel(int*)", false),
        ("void vllm::cross_device_reduce_2stage<nv_bfloat16, 8>(vllm::RankData*)", false),
        ("void aiter::cross_device_reduce_1stage_naive<__hip_bfloat16, 8>(void*)", true),
        (
            "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot<3>(int)",
            false,
        ),
        ("void quickreduce::allreduce_prototype_twoshot<quickreduce::Twoshot>(int)", true),
    ] {
        for hidden in [0.0, 100.0] {
            let mut trace = trace_of_amd_or_nvidia(amd);
            for step in 0..20 {
                // The host launches far ahead of the GPU.
                let (call, start) = (f64::from(step) * 12.0, f64::from(step) * 1_000.0 + 300.0);
                let beside =
                    KernelPlaceAndShape { stream: 13, grid_blocks: 24, ..A100_FILLING_KERNEL };
                trace.add_launch(call, (start, 400.0), "gemm", A100_FILLING_KERNEL);
                trace.add_launch(call + 6.0, (start + 400.0 - hidden, 500.0), name, beside);
            }
            let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
            let expected = 20 * (500_000 - hidden as i64 * 1_000);
            let total = &diagnosis.gpu_use_by_process[0].account.whole_trace_account;
            assert_eq!(
                total.busy_ns_of_category(BusyTimeCategoryOfGpu::ExposedCommunication),
                expected,
                "{name}"
            );
            let mut findings = diagnosis.findings.iter();
            let exposed = findings.find(|finding| finding.rule_id == "exposed-communication");
            assert_eq!(exposed.and_then(|it| it.max_recoverable_ns), Some(expected), "{name}");
            let shapes = ["small-grid", "tail", "occupancy", "block-size"];
            assert!(diagnosis.findings.iter().all(|of| !shapes.contains(&of.rule_id)), "{name}");
        }
    }
}

#[test]
fn transfers_that_hold_up_nothing_save_nothing() {
    // The host launches every millisecond, whatever the GPU does.
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..50 {
        let start = f64::from(step) * 1_000.0;
        trace.add_launch(start, (start + 20.0, 100.0), "gemm", A100_FILLING_KERNEL);
        let id = trace.add_api_call((start + 6.0, 5.0), "cudaMemcpyAsync");
        trace.add_memory_copy(id, (start + 120.0, 300.0), "HtoD (Pinned -> Device)", 10_000_000);
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    let exposed = diagnosis.findings.iter().find(|of| of.rule_id == "exposed-copy").unwrap();
    assert_eq!(exposed.measured_value.number_in_unit.round(), 30.0, "{}", exposed.finding_title);
    let gain = exposed.replayed_gain.unwrap().saved_ns_alone;
    assert_eq!((exposed.max_recoverable_ns, gain), (Some(300_000), 300_000), "the last one alone");
    assert_eq!(exposed.severity, FindingSeverity::Information);
}

#[test]
fn copies_that_bound_a_trace_come_first_whatever_their_kind() {
    for (name, call) in [
        ("HtoD (Pageable -> Device)", "cudaMemcpyAsync"),
        ("HtoD (Pinned -> Device)", "cudaMemcpyAsync"),
        ("DtoH (Device -> Pinned)", "cuMemcpyDtoHAsync_v2"),
        ("PtoP (Device -> Device)", "cudaMemcpyPeerAsync"),
        ("HtoD (Pinned -> Device)", "hipMemcpyAsync"),
    ] {
        let mut trace = trace_of_amd_or_nvidia(call.starts_with("hip"));
        for step in 0..30 {
            let start = f64::from(step) * 1_000.0;
            let id = trace.add_api_call((start, 5.0), call);
            trace.add_memory_copy(id, (start + 10.0, 900.0), name, 10_000_000);
            trace.add_launch(
                start + 6.0,
                (start + 910.0, 50.0),
                "solve",
                KernelPlaceAndShape { stream: 9, ..A100_FILLING_KERNEL },
            );
        }
        let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
        let first = &diagnosis.findings[0];
        let id = match name {
            _ if name.contains("Pageable") => "pageable-copy",
            _ if name.contains("PtoP") => "exposed-communication",
            _ => "exposed-copy",
        };
        assert_eq!((first.rule_id, first.severity), (id, FindingSeverity::Severe), "{name}");
        // The host waits 30 µs longer for the first copy than for each later copy.
        assert!(first.max_recoverable_ns >= Some(30 * 900_000 - 30_000), "{first:?}");
    }
}

#[test]
fn cheap_and_dear_waits_differ_in_severity() {
    for (kernel, severity) in [
        (3_990.0, FindingSeverity::Information),
        (3_880.0, FindingSeverity::Warning),
        (3_200.0, FindingSeverity::Severe),
    ] {
        let mut trace = KinetoTrace::a100_trace();
        for step in 0..50 {
            let start = f64::from(step) * 4_000.0;
            trace.add_launch(start, (start + 6.0, kernel), "solve", A100_FILLING_KERNEL);
            trace.add_api_call((start + 7.0, kernel), "cudaStreamSynchronize");
        }
        let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
        let waits = diagnosis.findings.iter().find(|of| of.rule_id == "sync-in-loop").unwrap();
        assert_eq!(waits.severity, severity, "{}", waits.finding_title);
    }
}

#[test]
fn block_size_rule_uses_warp_size_of_device() {
    for (amd, block, fits) in [
        (true, 64, true),
        (true, 96, false),
        (true, 32, false),
        (false, 32, true),
        (false, 96, true),
        (false, 33, false),
    ] {
        let mut trace = trace_of_amd_or_nvidia(amd);
        for step in 0..100 {
            let start = f64::from(step) * 60.0;
            trace.add_launch(
                start,
                (start + 10.0, 50.0),
                "k",
                KernelPlaceAndShape { block_threads: block, ..A100_FILLING_KERNEL },
            );
        }
        let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
        let answer = &diagnosis.question_of_rule("block-size").unwrap().answer;
        assert_eq!(matches!(answer, DiagnosisRuleAnswer::No { .. }), fits, "{block}: {answer:?}");
    }
}

#[test]
fn copies_that_kernels_hide_save_nothing() {
    for (call, kind) in [("cudaMemcpy", "synchronous-copy"), ("cudaMemcpyAsync", "pageable-copy")] {
        let mut trace = KinetoTrace::a100_trace();
        for step in 0..20 {
            let start = f64::from(step) * 1_000.0;
            trace.add_launch(
                start,
                (start + 20.0, 1_000.0),
                "long",
                KernelPlaceAndShape { stream: 9, ..A100_FILLING_KERNEL },
            );
            let id = trace.add_api_call((start + 30.0, 310.0), call);
            trace.add_memory_copy(
                id,
                (start + 35.0, 300.0),
                "DtoH (Device -> Pageable)",
                30_000_000,
            );
        }
        let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
        let found = diagnosis.findings.iter().find(|of| of.rule_id == kind).unwrap();
        assert_eq!(
            (found.max_recoverable_ns, found.severity),
            (Some(0), FindingSeverity::Information),
            "{call}"
        );
    }
}

#[test]
fn copies_that_nothing_hides_save_their_time() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..20 {
        let start = f64::from(step) * 1_000.0;
        trace.add_launch(start, (start + 20.0, 500.0), "k", A100_FILLING_KERNEL);
        // The call of `cudaMemcpy` waits for the kernel before it, and then for its own copy.
        let id = trace.add_api_call((start + 30.0, 790.0), "cudaMemcpy");
        trace.add_memory_copy(id, (start + 521.0, 298.0), "DtoH (Device -> Pageable)", 30_000_000);
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    let found = diagnosis.findings.iter().find(|of| of.rule_id == "synchronous-copy").unwrap();
    assert_eq!(found.max_recoverable_ns, Some(20 * 298_000));
    // Halving the kernel times also saves half of these times, although the host waits for the
    // kernels inside the copy call.
    let halved = diagnosis
        .critical_path
        .gains
        .iter()
        .find(|of| of.change.printed_speedup_label().ends_with("of k"));
    assert_eq!(halved.map(|of| of.gain_ns), Some(20 * 250_000));
}

#[test]
fn a_block_size_needs_no_description_of_the_device() {
    for devices in [serde_json::json!([]), serde_json::json!([{"id": 0, "name": "NVIDIA A100"}])] {
        let mut trace = KinetoTrace::trace_of_devices(devices);
        for step in 0..100 {
            let start = f64::from(step) * 60.0;
            trace.add_launch(
                start,
                (start + 20.0, 30.0),
                "t",
                KernelPlaceAndShape { block_threads: 33, ..A100_FILLING_KERNEL },
            );
        }
        let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
        let answer = |id: &str| &diagnosis.question_of_rule(id).unwrap().answer;
        assert!(
            matches!(answer("block-size"), DiagnosisRuleAnswer::Yes { .. }),
            "{:?}",
            answer("block-size")
        );
        for rule in ["small-grid", "tail", "occupancy"] {
            assert!(matches!(answer(rule), DiagnosisRuleAnswer::CannotAnswer { .. }), "{rule}");
        }
    }
}

#[test]
fn an_operation_waits_for_its_own_device_first() {
    // Two devices of one process: communication of each, then compute that needs it.
    let mut trace = KinetoTrace::a100_trace();
    let name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)";
    for device in 0..2 {
        for step in 0..20 {
            let ns = f64::from(step) * 1_000.0 + f64::from(device) * 3.0;
            let call = f64::from(step) * 10.0 - 1_000.0 + f64::from(device) * 5.0;
            let at = KernelPlaceAndShape { device, ..A100_FILLING_KERNEL };
            trace.add_launch(call, (ns, 400.0), "gemm", at);
            trace.add_launch(
                call + 1.0,
                (ns + 400.0, 590.0),
                name,
                KernelPlaceAndShape { stream: 13, ..at },
            );
        }
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    let exposed =
        diagnosis.findings.iter().find(|of| of.rule_id == "exposed-communication").unwrap();
    assert_eq!(exposed.severity, FindingSeverity::Severe, "{exposed:?}");
    assert!(exposed.max_recoverable_ns > Some(19 * 580_000), "{:?}", exposed.max_recoverable_ns);
}
