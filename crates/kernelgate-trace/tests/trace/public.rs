//! Tests of faults that public traces revealed, each on a small trace of the same kind.

use kernelgate_trace::diagnose::{
    FindingSeverity, HypotheticalSpeedup, IdleCauseKind, TraceDiagnosis, diagnose_trace_in_memory,
};
use kernelgate_trace::model::Trace;
use serde_json::json;

use crate::fixture::kineto::{A100_FILLING_KERNEL, KernelPlaceAndShape, KinetoTrace};
use crate::fixture::{NsysExport, finding_with_id};

/// Steps of a program that loads each batch for `load` µs in a range of a data loader, and then
/// launches 60 kernels of 50 µs that follow each other.
fn trace_with_data_loading(load: f64) -> Trace {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..4 {
        let start = f64::from(step) * (load + 6_000.0);
        trace.add_event(json!({
            "ph": "X", "cat": "user_annotation", "pid": 10, "tid": 100, "ts": start, "dur": load,
            "name": "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        }));
        for kernel in 0..60 {
            let call = start + load + 10.0 + f64::from(kernel) * 12.0;
            let begins = start + load + 40.0 + f64::from(kernel) * 52.0;
            trace.add_launch(call, (begins, 50.0), "void kernel(float*)", A100_FILLING_KERNEL);
        }
    }
    trace.read_as_trace()
}

#[test]
fn loading_data_is_not_launch_bound() {
    let diagnosis = diagnose_trace_in_memory(&trace_with_data_loading(40_000.0));
    assert!(
        finding_with_id(&diagnosis, "launch-bound").is_none(),
        "{}",
        diagnosis.diagnosis_to_text()
    );
    let gaps = finding_with_id(&diagnosis, "gaps").unwrap();
    insta::assert_snapshot!(gaps.finding_title, @"device 0 is idle for 91.2 % of the time in 3 gaps above 50 µs; most of the idle time: host code between launches: enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__");
    insta::assert_snapshot!(gaps.advice, @"load the next batch while the GPU works: more workers of the data loader, pinned memory, batches prepared ahead");
    let cause = &diagnosis.gpu_use_by_process[0].idle_gaps.idle_time_by_cause[0];
    assert_eq!(
        (cause.kind, cause.gap_count, cause.occurs_in_one_gap),
        (IdleCauseKind::HostCodeBeforeLaunch, 3, false)
    );
}

#[test]
fn first_launches_that_load_kernels_are_start_up() {
    let mut trace = KinetoTrace::a100_trace();
    for launch in 0..80 {
        // The launch calls of the first eight kernels are long because they load the kernels; later
        // launch calls of these kernels are short.
        let (at, function) = (f64::from(launch) * 12_000.0, launch % 8);
        let long = if launch < 8 { 11_000.0 } else { 5.0 };
        let id = trace.add_api_call((at, long), "cudaLaunchKernel");
        trace.add_kernel(
            id,
            (at + long + 5.0, 900.0),
            &format!("kernel_{function}"),
            A100_FILLING_KERNEL,
        );
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    let total = &diagnosis.gpu_use_by_process[0].account.whole_trace_account;
    let idle = |kind| total.idle_ns_by_cause.get(&kind).copied().unwrap_or(0);
    // Seven of the eight loading calls cause an idle gap, because the first call precedes the first
    // operation; 900 µs of each gap are host code.
    assert_eq!(idle(IdleCauseKind::FirstKernelLaunch), 7 * 11_000_000);
    assert_eq!(idle(IdleCauseKind::LaunchCallStillRunning), 72 * 5_000);
    let mut trace = KinetoTrace::a100_trace();
    for launch in 0..8 {
        let at = f64::from(launch) * 12_000.0;
        let id = trace.add_api_call((at, 11_000.0), "cudaLaunchKernel");
        trace.add_kernel(
            id,
            (at + 11_005.0, 900.0),
            &format!("kernel_{launch}"),
            A100_FILLING_KERNEL,
        );
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    let gaps = finding_with_id(&diagnosis, "gaps").unwrap();
    insta::assert_snapshot!(gaps.finding_title, @"device 0 is idle for 91.5 % of the time in 7 gaps above 50 µs; most of the idle time: in the first launch of a kernel, which loads it: cudaLaunchKernel");
    insta::assert_snapshot!(gaps.advice, @"it happened once for each kernel, whose first launch loads its code, as start-up does: warm up before recording, or leave it out with --range");
    assert_eq!(
        (gaps.severity, gaps.max_recoverable_ns),
        (FindingSeverity::Warning, Some(7 * 11_000_000))
    );
}

#[test]
fn products_in_fp32_on_cuda_cores_are_found() {
    let device = |major: u32| serde_json::json!([{ "id": 0, "name": "GPU", "computeMajor": major, "computeMinor": 0 }]);
    for (name, major, found) in [
        ("ampere_sgemm_128x64_tn", 8, true),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nt_align1>(Params)", 9, true),
        ("volta_scudnn_128x64_relu_medium_nn_v1", 7, true),
        ("volta_sgemm_64x64_nt", 6, false),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_nn>(Params)", 8, false),
        ("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn", 8, false),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32", 9, false),
        ("nvjet_tst_256x128", 9, false),
    ] {
        let mut trace = KinetoTrace::trace_of_devices(device(major));
        for step in 0..10 {
            let at = f64::from(step) * 1_000.0;
            trace.add_launch(at, (at + 10.0, 980.0), name, A100_FILLING_KERNEL);
        }
        let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
        let products = finding_with_id(&diagnosis, "fp32-matmul");
        assert_eq!(products.is_some(), found, "{name} {major}");
        if let Some(products) = products {
            assert_eq!(products.severity, FindingSeverity::Warning);
            assert!(products.advice.contains("TF32"), "{}", products.advice);
        }
    }
}

#[test]
fn a_long_launch_of_a_short_kernel_is_no_wait() {
    // Each launch call loads its kernel for 11 ms; the kernel ends just before the launch call
    // returns.
    let mut trace = KinetoTrace::a100_trace();
    for launch in 0..8 {
        let at = f64::from(launch) * 12_000.0;
        let id = trace.add_api_call((at, 11_000.0), "cudaLaunchKernel");
        trace.add_kernel(
            id,
            (at + 10_980.0, 5.0),
            &format!("kernel_{launch}"),
            A100_FILLING_KERNEL,
        );
        trace.add_api_call((at + 11_010.0, 2.0), "cudaStreamSynchronize");
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    let gains = &diagnosis.critical_path.gains;
    let waits = gains.iter().find(|of| of.change == HypotheticalSpeedup::NoHostWaits).unwrap();
    assert!(waits.gain_ns <= 8 * 2_000, "{waits:?}");
}

#[test]
fn work_launched_before_the_recording_was_queued() {
    let mut trace = KinetoTrace::a100_trace();
    for kernel in 0..100 {
        trace.add_kernel(
            10_000 + kernel,
            (f64::from(kernel) * 52.0, 50.0),
            "queued",
            A100_FILLING_KERNEL,
        );
    }
    trace.add_launch(5_200.0, (5_215.0, 50.0), "launched", A100_FILLING_KERNEL);
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    let total = &diagnosis.gpu_use_by_process[0].account.whole_trace_account;
    assert_eq!(
        total.idle_ns_by_cause.get(&IdleCauseKind::UsualStartOfQueuedOperation),
        Some(&(99 * 2_000))
    );
    assert_eq!(total.idle_time_without_known_cause_ns(), 0);
}

#[test]
fn digits_of_very_many_range_names_are_removed() {
    let mut export = NsysExport::new();
    export.execute_sql(&format!(
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000)
         INSERT INTO NVTX_EVENTS
         SELECT i * 100, i * 100 + 90, 59, 'aten::add, op_id = ' || i, NULL, {}, 0 FROM n;",
        crate::fixture::global_id_of_process(7) | 7
    ));
    export.add_launch((5_000, 5_010), (6_000, 7_000), 1, "k");
    export.add_launch((9_999_900, 9_999_910), (10_000_000, 10_001_000), 2, "k");
    let kept = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    let streamed = kernelgate_trace::diagnose::diagnose_export_while_reading(&export.sqlite_path())
        .unwrap()
        .unwrap();
    let ranges = |diagnosis: &TraceDiagnosis| {
        let account = &diagnosis.gpu_use_by_process[0].account;
        account
            .range_path_accounts
            .iter()
            .map(|of| (of.range_path.clone(), of.account.span_length_ns()))
            .collect::<Vec<_>>()
    };
    assert_eq!(ranges(&streamed), ranges(&kept));
    assert_eq!(streamed.records, kept.records);
}

#[test]
fn gaps_have_the_causes_of_their_own_class() {
    // The trace has many short gaps caused by launch calls, and a few long gaps caused by host
    // code, which have less time in total.
    let mut trace = KinetoTrace::a100_trace();
    for kernel in 0..600 {
        let step = f64::from(kernel / 60);
        let at = f64::from(kernel) * 50.0 + step * 100.0;
        trace.add_launch(at, (at + 10.0, 40.0), "k", A100_FILLING_KERNEL);
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    let main = &diagnosis.gpu_use_by_process[0].idle_gaps.idle_time_by_cause[0];
    assert_ne!(main.kind, IdleCauseKind::HostCodeBeforeLaunch, "of all gaps: {main:?}");
    let gaps = finding_with_id(&diagnosis, "gaps");
    assert!(gaps.is_none(), "900 µs of 31 ms are few: {gaps:?}");
    let mut trace = KinetoTrace::a100_trace();
    for kernel in 0..600 {
        let step = f64::from(kernel / 60);
        let at = f64::from(kernel) * 50.0 + step * 250.0;
        trace.add_launch(at, (at + 10.0, 40.0), "k", A100_FILLING_KERNEL);
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    let gaps = finding_with_id(&diagnosis, "gaps").unwrap();
    insta::assert_snapshot!(gaps.finding_title, @"device 0 is idle for 7.3 % of the time in 9 gaps above 50 µs; most of the idle time: host code between launches");
    assert_eq!(gaps.evidence[0].total_duration_ns, Some(9 * 250_000));
}

#[test]
fn waits_of_several_functions_are_all_named() {
    let mut trace = KinetoTrace::a100_trace();
    for step in 0..10 {
        let at = f64::from(step) * 3_000.0;
        trace.add_launch(at, (at + 8.0, 1_000.0), "k", A100_FILLING_KERNEL);
        trace.add_api_call((at + 6.0, 1_004.0), "cudaStreamSynchronize");
        trace.add_launch(at + 1_500.0, (at + 1_508.0, 1_000.0), "k", A100_FILLING_KERNEL);
        trace.add_api_call((at + 1_506.0, 1_004.0), "cudaEventSynchronize");
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    let waits = finding_with_id(&diagnosis, "sync-in-loop").unwrap();
    assert_eq!(
        waits.evidence[0].kernel_call_or_copy_name,
        "cudaEventSynchronize, cudaStreamSynchronize"
    );
    assert_eq!(waits.evidence[0].covered_count, 20);
}

#[test]
fn long_host_code_has_the_range_around_it_in_an_export_too() {
    let mut export = NsysExport::new();
    for step in 0..4 {
        let start = 1_000 + step * 10_000_000;
        export.add_nvtx_range(start, Some(start + 9_000_000), 59, &format!("step {step}"));
        export.add_nvtx_range(
            start + 10_000,
            Some(start + 7_000_000),
            59,
            &format!("tokenize {step}"),
        );
        let call = start + 7_500_000;
        export.add_launch((call, call + 5_000), (call + 9_000, call + 900_000), step + 1, "kernel");
    }
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    let cause = &diagnosis.gpu_use_by_process[0].idle_gaps.idle_time_by_cause[0];
    assert_eq!(
        (cause.kind, cause.called_function_or_range_path.as_deref()),
        (IdleCauseKind::HostCodeBeforeLaunch, Some("tokenize #"))
    );
    let streamed = kernelgate_trace::diagnose::diagnose_export_while_reading(&export.sqlite_path())
        .unwrap()
        .unwrap();
    assert_eq!(streamed.diagnosis_to_json(), diagnosis.diagnosis_to_json());
}

#[test]
fn ranges_with_sizes_in_their_names_have_work_in_an_export_too() {
    let mut export = NsysExport::new();
    export.execute_sql("UPDATE TARGET_INFO_GPU SET name = 'NVIDIA H100 80GB HBM3';");
    for step in 0..3 {
        let start = 1_000 + step * 1_000_000;
        export.add_nvtx_range(start, Some(start + 400_000), 59, "gemm_m4096_n4096_k4096_bf16");
        export.add_launch(
            (start + 10, start + 20),
            (start + 50, start + 250_050),
            step + 1,
            "nvjet",
        );
    }
    let found = diagnose_trace_in_memory(&export.read_as_trace().unwrap()).utilization;
    assert_eq!(
        (found.operators[0].work_and_kernel_time.operator_call_count, found.operators.len()),
        (3, 1)
    );
    let expected = 2.0 * 4096f64.powi(3) / 250_000.0 / 989.4e3;
    let share = found.all_operators.matrix_peak_share_of_kernel_time().unwrap();
    assert!((share - expected).abs() < 1e-6, "{share} {expected}");
}

#[test]
fn small_grids_beside_communication_are_not_reported() {
    let at = |stream, grid| KernelPlaceAndShape {
        stream,
        grid_blocks: grid,
        block_threads: 384,
        ..A100_FILLING_KERNEL
    };
    let with = |beside: bool| {
        let mut trace = KinetoTrace::a100_trace();
        for step in 0..4 {
            let start = f64::from(step) * 1_000.0;
            trace.add_launch(start, (start + 20.0, 900.0), "gemm", at(7, 88));
            if beside {
                let name = "void deep_ep::internode::dispatch<false, 8>(int4*)";
                trace.add_launch(start + 6.0, (start + 15.0, 910.0), name, at(9, 20));
            }
        }
        diagnose_trace_in_memory(&trace.read_as_trace())
    };
    assert!(finding_with_id(&with(false), "small-grid").is_some());
    assert!(finding_with_id(&with(true), "small-grid").is_none());
}

#[test]
fn ranks_merged_into_one_file_keep_their_launches() {
    // Two ranks have the same correlation ids, as in a file into which the traces of both ranks
    // were merged.
    let mut trace = KinetoTrace::a100_trace();
    for rank in 0..2 {
        let pid = 1000 + rank;
        for launch in 0..20 {
            let at = f64::from(launch) * 100.0 + f64::from(rank) * 3.0;
            trace.add_event(json!({
                "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": pid,
                "tid": pid, "ts": at, "dur": 5.0, "args": { "correlation": launch + 1 },
            }));
            trace.add_event(json!({
                "ph": "X", "cat": "kernel", "name": "gemm", "pid": 2_000_000 + rank, "tid": 7,
                "ts": at + 10.0, "dur": 40.0, "args": {
                    "correlation": launch + 1, "device": 0, "stream": 7,
                    "grid": [4096, 1, 1], "block": [256, 1, 1],
                },
            }));
        }
    }
    let diagnosis = diagnose_trace_in_memory(&trace.read_as_trace());
    let devices: Vec<(i64, usize)> =
        diagnosis.gpu_use_by_process.iter().map(|of| (of.pid, of.operation_count)).collect();
    assert_eq!(devices, [(1000, 20), (1001, 20)]);
    assert!(diagnosis.data_quality_findings.is_empty(), "{:?}", diagnosis.data_quality_findings);
}
