//! Tests of the shares of a GPU's peak FLOP rate and bandwidth that operators reach, computed from
//! recorded shapes or from sizes in kernel names.

use crate::fixture::{lines_with_word, write_temporary_file};
use kernelgate_trace::analyze::work::device_peaks::MatrixPrecision;
use kernelgate_trace::analyze::work::utilization::RooflineLimitOfWork;
use kernelgate_trace::diagnose::{TraceDiagnosis, diagnose_trace_in_memory};
use kernelgate_trace::read::{self, WantedTraceParts};

/// An operator that launches a kernel, 1 ms behind the one before.
struct SyntheticOperatorCall {
    operator_name: &'static str,
    event_arguments_json: &'static str,
    kernel_name: &'static str,
    kernel_us: u32,
}

const BF16_MATMUL_CALL: SyntheticOperatorCall = SyntheticOperatorCall {
    operator_name: "aten::mm",
    event_arguments_json: r#""Input Dims": [[4096, 4096], [4096, 4096]],
        "Input type": ["c10::BFloat16", "c10::BFloat16"], "Concrete Inputs": ["", ""]"#,
    kernel_name: "nvjet_tst_256x128",
    kernel_us: 278,
};

fn diagnose_operator_calls(device: &str, operators: &[SyntheticOperatorCall]) -> TraceDiagnosis {
    let mut events = Vec::new();
    for (number, operator) in (1u32..).zip(operators) {
        let at = number * 1000;
        let SyntheticOperatorCall {
            operator_name: name,
            event_arguments_json: arguments,
            kernel_name: kernel,
            kernel_us: us,
        } = operator;
        events.push(format!(
            r#"{{"ph": "X", "cat": "user_annotation", "name": "step", "pid": 5, "tid": 5,
                "ts": {at}, "dur": 900, "args": {{}}}},
            {{"ph": "X", "cat": "cpu_op", "name": "aten::matmul", "pid": 5, "tid": 5,
                "ts": {}, "dur": 80, "args": {{"External id": {number}}}}},
            {{"ph": "X", "cat": "cpu_op", "name": "{name}", "pid": 5, "tid": 5,
                "ts": {}, "dur": 60, "args": {{"External id": {number}, {arguments}}}}},
            {{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 5, "tid": 5,
                "ts": {}, "dur": 5, "args": {{"correlation": {number}}}}},
            {{"ph": "X", "cat": "kernel", "name": "{kernel}", "pid": 0, "tid": 7, "ts": {},
                "dur": {us}, "args": {{"device": 0, "stream": 7, "correlation": {number}}}}}"#,
            at + 5,
            at + 10,
            at + 20,
            at + 100
        ));
    }
    let text = format!(
        r#"{{"deviceProperties": [{{"id": 0, "name": "{device}", "numSms": 132}}],
        "traceEvents": [{}]}}"#,
        events.join(",")
    );
    let (_folder, path) = write_temporary_file("t.json", text.as_bytes());
    diagnose_trace_in_memory(&read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap())
}

fn assert_within_one_percent(value: Option<f64>, expected: f64) {
    assert!(
        value.is_some_and(|value| (value / expected - 1.0).abs() < 0.01),
        "{value:?} {expected}"
    );
}

#[test]
fn matmul_reports_its_share_of_tensor_peak() {
    let found =
        diagnose_operator_calls("NVIDIA H100 80GB HBM3", &[BF16_MATMUL_CALL, BF16_MATMUL_CALL]);
    let utilization = &found.utilization;
    let [product] = &utilization.operators[..] else { panic!("{:?}", utilization.operators) };
    assert_eq!(
        (product.operator_name.as_str(), product.precision),
        ("aten::mm", Some(MatrixPrecision::Fp16OrBf16))
    );
    // The matrix product's 137.4 GFLOP in 278 µs are half of 989 TFLOP/s.
    assert_within_one_percent(product.work_and_kernel_time.matrix_peak_share_of_kernel_time(), 0.5);
    assert_within_one_percent(product.work_and_kernel_time.achieved_tera_flops_per_second(), 494.4);
    assert_within_one_percent(product.work_and_kernel_time.flops_per_byte_moved(), 4096.0 / 3.0);
    assert_eq!(
        product.work_and_kernel_time.roofline_limit_of_work(),
        Some(RooflineLimitOfWork::MatrixUnits)
    );
    let step = utilization.ranges.iter().find(|range| range.range_path == "step").unwrap();
    assert_within_one_percent(
        step.work_and_kernel_time.matrix_peak_share_of_span(step.host_range_ns),
        0.5 * 278.0 / 900.0,
    );
    assert_eq!(utilization.kernel_time_share_with_known_work(), 1.0);
    let text = found.diagnosis_to_text();
    insta::assert_snapshot!(lines_with_word(&text, "Utilization"), @"Utilization of NVIDIA H100 80GB HBM3 (work by shapes, names or declarations)");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    let json = found.diagnosis_to_json();
    assert_within_one_percent(json["utilization"]["all"]["share_of_tensor_peak"].as_f64(), 0.5);
}

#[test]
fn kernel_names_separate_tf32_from_fp32_matmuls() {
    let with = |kernel| SyntheticOperatorCall {
        event_arguments_json: r#""Input Dims": [[1024, 1024], [1024, 1024]], "Input type": ["float", "float"]"#,
        kernel_name: kernel,
        ..BF16_MATMUL_CALL
    };
    let precision = |kernel| {
        diagnose_operator_calls("NVIDIA A100-SXM4-80GB", &[with(kernel)]).utilization.operators[0]
            .precision
    };
    assert_eq!(precision("ampere_sgemm_128x64_tn"), Some(MatrixPrecision::Fp32));
    assert_eq!(precision("cutlass_tensorop_s1688gemm_128x256"), Some(MatrixPrecision::Tf32));
}

#[test]
fn nested_matmul_operators_count_once() {
    // The operator `aten::matmul` also has recorded shapes, and launches a kernel in addition to
    // the kernel of its inner `aten::mm`.
    let shapes = BF16_MATMUL_CALL.event_arguments_json;
    let call = |id: u32, ts: u32| {
        format!(
            r#"{{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 5, "tid": 5,
                "ts": {ts}, "dur": 2, "args": {{"correlation": {id}}}}}"#
        )
    };
    let kernel = |id: u32, (ts, dur): (u32, u32), name: &str| {
        format!(
            r#"{{"ph": "X", "cat": "kernel", "name": "{name}", "pid": 0, "tid": 7, "ts": {ts},
                "dur": {dur}, "args": {{"device": 0, "stream": 7, "correlation": {id}}}}}"#
        )
    };
    let operator = |name: &str, (ts, dur): (u32, u32)| {
        format!(
            r#"{{"ph": "X", "cat": "cpu_op", "name": "{name}", "pid": 5, "tid": 5, "ts": {ts},
                "dur": {dur}, "args": {{"External id": 1, {shapes}}}}}"#
        )
    };
    let events = [
        operator("aten::matmul", (5, 80)),
        call(1, 8),
        operator("aten::mm", (20, 50)),
        call(2, 30),
        kernel(1, (100, 10), "transpose"),
        kernel(2, (120, 278), "nvjet_tst_256x128"),
    ];
    let text = format!(
        r#"{{"deviceProperties": [{{"id": 0, "name": "NVIDIA H100", "numSms": 132}}],
        "traceEvents": [{}]}}"#,
        events.join(",")
    );
    let (_folder, path) = write_temporary_file("t.json", text.as_bytes());
    let found =
        diagnose_trace_in_memory(&read::open_trace_file(&path, &WantedTraceParts::ALL).unwrap())
            .utilization;
    assert_eq!(
        (found.all_operators.operator_call_count, found.operators.len()),
        (1, 1),
        "{:?}",
        found.operators
    );
    assert_eq!(found.operators[0].operator_name, "aten::mm");
    assert_within_one_percent(found.all_operators.achieved_tera_flops_per_second(), 494.4);
    assert_within_one_percent(Some(found.kernel_time_share_with_known_work()), 278.0 / 288.0);
}

#[test]
fn an_unknown_device_has_rates_and_no_shares() {
    let found = diagnose_operator_calls("Test GPU", &[BF16_MATMUL_CALL]).utilization;
    assert_within_one_percent(found.all_operators.achieved_tera_flops_per_second(), 494.4);
    assert_eq!(
        (
            found.all_operators.matrix_peak_share_of_kernel_time(),
            found.all_operators.roofline_limit_of_work()
        ),
        (None, None)
    );
    insta::assert_snapshot!(found.unanswered_questions.join("\n"), @"shares of the peak: the peaks of Test GPU are not in the table");
}

#[test]
fn operators_without_shapes_are_not_answered() {
    let without =
        SyntheticOperatorCall { event_arguments_json: r#""Ev Idx": 5"#, ..BF16_MATMUL_CALL };
    let found = diagnose_operator_calls("NVIDIA H100", &[without]);
    assert!(found.utilization.operators.is_empty());
    insta::assert_snapshot!(found.utilization.unanswered_questions.join("\n"), @"FLOPs and bytes: the trace has no shapes of operators; record with PyTorch's profiler and record_shapes=True, or put m, n and k into the names of matrix products (gemm_m4096_n512_k1024_bf16)");
    assert_eq!(lines_with_word(&found.diagnosis_to_text(), "Utilization"), "");
    let half = diagnose_operator_calls(
        "NVIDIA H100",
        &[
            SyntheticOperatorCall { event_arguments_json: r#""Ev Idx": 5"#, ..BF16_MATMUL_CALL },
            BF16_MATMUL_CALL,
        ],
    );
    assert_eq!(half.utilization.kernel_time_share_with_known_work(), 0.5);
}

#[test]
fn element_wise_operators_are_limited_by_memory() {
    let add = SyntheticOperatorCall {
        operator_name: "aten::add",
        event_arguments_json: r#""Input Dims": [[33500000], [33500000], []],
            "Input type": ["float", "float", "Scalar"]"#,
        kernel_name: "vectorized_elementwise_kernel",
        kernel_us: 240,
    };
    let found = diagnose_operator_calls("NVIDIA H100 80GB HBM3", &[add]).utilization;
    // At 3350 GB/s the operator's 402 MB take 120 µs, half of its 240 µs.
    assert_within_one_percent(
        found.operators[0].work_and_kernel_time.roofline_share_of_kernel_time(),
        0.5,
    );
    assert_eq!(
        found.operators[0].work_and_kernel_time.roofline_limit_of_work(),
        Some(RooflineLimitOfWork::MemoryBandwidth)
    );
    assert_eq!(found.operators[0].work_and_kernel_time.matrix_peak_share_of_kernel_time(), None);
}

#[test]
fn a_kernel_with_sizes_in_its_name_needs_no_shapes() {
    let named = SyntheticOperatorCall {
        event_arguments_json: r#""Ev Idx": 5"#,
        kernel_name: "gemm_m4096_n4096_k4096_bf16",
        ..BF16_MATMUL_CALL
    };
    let found = diagnose_operator_calls("NVIDIA H100 80GB HBM3", &[named]).utilization;
    assert_within_one_percent(
        found.operators[0].work_and_kernel_time.matrix_peak_share_of_kernel_time(),
        0.5,
    );
}

#[test]
fn shapes_that_need_more_than_the_peak_are_not_believed() {
    let wrong = SyntheticOperatorCall {
        event_arguments_json: r#""Input Dims": [[4096, 40960], [40960, 4096]],
            "Input type": ["c10::BFloat16", "c10::BFloat16"], "Concrete Inputs": ["", ""]"#,
        ..BF16_MATMUL_CALL
    };
    let found =
        diagnose_operator_calls("NVIDIA H100 80GB HBM3", &[wrong, BF16_MATMUL_CALL]).utilization;
    insta::assert_snapshot!(found.unanswered_questions.join("\n"), @"the work of 1 operators, such as aten::mm: their recorded shapes need more than 3 times the tensor peak");
    assert_within_one_percent(found.all_operators.matrix_peak_share_of_kernel_time(), 0.5);
    assert_eq!(found.all_operators.operator_call_count, 1);
}
