//! Tests plant faults in traces, and check that each fault is found and named and that traces
//! without faults get no finding.

use crate::fixture::{NsysExport, finding_with_id, lines_with_word};
use kernelgate_trace::diagnose::checklist::{
    ChecklistLineState, checklist_to_json, checklist_to_text, fill_in_checklist,
};
use kernelgate_trace::diagnose::{
    FindingSeverity, IdleCauseKind, TraceDiagnosis, diagnose_trace_in_memory,
};

/// Returns why the question of a diagnosis rule could not be answered.
fn reason_not_answered(diagnosis: &TraceDiagnosis, id: &str) -> String {
    diagnosis.question_of_rule(id).unwrap().reason_without_answer().unwrap()
}

/// Adds steps of ten kernels of 30 µs each, launched ahead of time by calls of 5 µs.
fn add_steps_of_ten_kernels(
    export: &mut NsysExport,
    steps: i64,
    mut end_of_step: impl FnMut(&mut NsysExport, i64, i64),
) {
    for step in 0..steps {
        let start = 1_000_000 + step * 1_000_000;
        export.add_nvtx_range(start, Some(start + 900_000), 59, &format!("step_{step}"));
        for kernel in 0..10 {
            let call = start + kernel * 10_000;
            let run = start + 50_000 + kernel * 31_000;
            let id = step * 100 + kernel + 1;
            export.add_launch((call, call + 5_000), (run, run + 30_000), id, &format!("k{kernel}"));
        }
        end_of_step(export, start, step);
    }
}

#[test]
fn a_wait_in_a_loop_is_found_with_its_range() {
    let mut export = NsysExport::new();
    add_steps_of_ten_kernels(&mut export, 5, |export, start, _| {
        export.add_api_call(
            7,
            (start + 200_000, start + 400_000),
            0,
            "cudaStreamSynchronize_v3020",
        );
    });
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    let finding = finding_with_id(&diagnosis, "sync-in-loop").unwrap();
    assert_eq!(finding.measured_value.number_in_unit, 5.0);
    assert_eq!(finding.evidence[0].kernel_call_or_copy_name, "cudaStreamSynchronize");
    assert_eq!(finding.evidence[0].innermost_common_range_path.as_deref(), Some("step_#"));
    assert_eq!(finding.evidence[0].total_duration_ns, Some(1_000_000));
    // Each wait except the last ends in the idle time after its step. Without the wait, the host
    // launches the next step earlier by the length of the wait.
    assert_eq!(finding.max_recoverable_ns, Some(4 * 200_000));
    // A step's kernels end at 359 µs, the host's wait at 400 µs; a call of 5 µs launches the next
    // step at 1000 µs, and it starts 45 µs later.
    let expected = [
        (IdleCauseKind::HostCodeBeforeLaunch, 4 * 600_000),
        (IdleCauseKind::UnknownDelayAfterLaunch, 4 * 45_000),
        (IdleCauseKind::LaunchThreadWaitedForGpu, 4 * 41_000),
        (IdleCauseKind::UsualStartOfQueuedOperation, 5 * 9 * 1_000),
        (IdleCauseKind::LaunchCallStillRunning, 4 * 5_000),
    ];
    let causes: Vec<(IdleCauseKind, i64)> = diagnosis.gpu_use_by_process[0]
        .idle_gaps
        .idle_time_by_cause
        .iter()
        .map(|of| (of.kind, of.total_idle_ns))
        .collect();
    assert_eq!(causes, expected);
}

#[test]
fn a_single_wait_at_the_end_is_no_loop() {
    let mut export = NsysExport::new();
    add_steps_of_ten_kernels(&mut export, 5, |_, _, _| {});
    export.add_api_call(7, (9_000_000, 9_100_000), 0, "cudaDeviceSynchronize_v3020");
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    assert!(finding_with_id(&diagnosis, "sync-in-loop").is_none());
    assert!(diagnosis.has_rule_found_nothing("sync-in-loop"));
}

#[test]
fn waits_without_ranges_are_a_loop_if_the_launches_between_them_repeat() {
    let mut export = NsysExport::new();
    for i in 0..8 {
        let start = 1_000_000 + i * 100_000;
        for k in 0..3 {
            let call = start + k * 10_000;
            export.add_launch(
                (call, call + 5_000),
                (call + 6_000, call + 9_000),
                i * 3 + k + 1,
                "k",
            );
        }
        export.add_api_call(7, (start + 40_000, start + 50_000), 0, "cuStreamSynchronize");
    }
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    let finding = finding_with_id(&diagnosis, "sync-in-loop").unwrap();
    assert_eq!(finding.evidence[0].covered_count, 8);
}

#[test]
fn pageable_and_synchronous_copies_are_found() {
    let mut export = NsysExport::new();
    // Copies from the host to the device; memory kind 0 is pageable, 1 pinned, 2 device memory.
    export.add_api_call(7, (100, 200), 1, "cudaMemcpyAsync_v3020");
    export.add_memory_copy((1000, 2000), 1, (1, 0, 2));
    export.add_api_call(7, (300, 400), 2, "cudaMemcpyAsync_v3020");
    export.add_memory_copy((3000, 4000), 2, (1, 1, 2));
    export.add_api_call(7, (500, 600), 3, "cudaMemcpy_v3020");
    export.add_memory_copy((5000, 7000), 3, (2, 2, 1));
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    let pageable = finding_with_id(&diagnosis, "pageable-copy").unwrap();
    assert_eq!(pageable.evidence.len(), 1);
    assert_eq!(pageable.evidence[0].covered_count, 1, "the pinned one is not blamed");
    insta::assert_snapshot!(pageable.evidence[0].kernel_call_or_copy_name, @"cudaMemcpyAsync Host-to-Device (pageable to device)");
    let synchronous = finding_with_id(&diagnosis, "synchronous-copy").unwrap();
    assert_eq!(synchronous.evidence[0].kernel_call_or_copy_name, "cudaMemcpy Device-to-Host");
    assert_eq!(synchronous.max_recoverable_ns, Some(2000));
}

/// Export with 200 kernels of 3 µs, each launched by a call of 6 µs; host code takes 6 µs between
/// two calls.
fn launch_bound_export() -> NsysExport {
    let mut export = NsysExport::new();
    for i in 0..200 {
        let start = 1_000_000 + i * 12_000;
        export.add_launch((start, start + 6_000), (start + 7_000, start + 10_000), i + 1, "tiny");
    }
    export
}

#[test]
fn short_kernels_behind_long_launches_are_launch_bound() {
    let diagnosis = diagnose_trace_in_memory(&launch_bound_export().read_as_trace().unwrap());
    let finding = finding_with_id(&diagnosis, "launch-bound").unwrap();
    assert_eq!(finding.severity, FindingSeverity::Severe);
    // The 200 kernels of 3 µs run within 199 × 12 + 3 µs.
    assert!((finding.measured_value.number_in_unit - 600.0 / 2391.0 * 100.0).abs() < 1e-9);
    // A replay as a CUDA graph leaves a gap of 1 µs between two kernels.
    assert_eq!(finding.max_recoverable_ns, Some(199 * 8_000), "the GPU waited for the host");
    // The gap of 9 µs has 2 µs of host code, 6 µs of the launch call and 1 µs of launch latency.
    let causes: Vec<(IdleCauseKind, i64)> = diagnosis.gpu_use_by_process[0]
        .idle_gaps
        .idle_time_by_cause
        .iter()
        .map(|of| (of.kind, of.total_idle_ns))
        .collect();
    let expected = [
        (IdleCauseKind::LaunchCallStillRunning, 199 * 6_000),
        (IdleCauseKind::HostCodeBeforeLaunch, 199 * 2_000),
        (IdleCauseKind::LaunchLatency, 199 * 1_000),
    ];
    assert_eq!(causes, expected);
}

#[test]
fn short_kernels_of_one_graph_are_not_launch_bound() {
    let mut export = NsysExport::new();
    export.add_api_call(7, (900_000, 950_000), 1, "cudaGraphLaunch_v10000");
    for i in 0..200 {
        let start = 1_000_000 + i * 12_000;
        export.add_kernel(7, (start, start + 3_000), 1, "tiny");
    }
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    assert!(finding_with_id(&diagnosis, "launch-bound").is_none());
    let causes = &diagnosis.gpu_use_by_process[0].idle_gaps.idle_time_by_cause;
    assert_eq!((causes.len(), causes[0].kind), (1, IdleCauseKind::UsualStartOfQueuedOperation));
}

#[test]
fn gaps_are_classed_at_20_and_50_microseconds() {
    let mut export = NsysExport::new();
    let mut start = 1_000_000;
    for (i, gap) in (1..).zip([19_999, 20_000, 50_000, 50_001, 0]) {
        export.add_launch((i * 100, i * 100 + 10), (start, start + 1_000), i, "k");
        start += 1_000 + gap;
    }
    let gaps =
        &diagnose_trace_in_memory(&export.read_as_trace().unwrap()).gpu_use_by_process[0].idle_gaps;
    assert_eq!(
        (
            gaps.gaps_below_20_us.gap_count,
            gaps.gaps_of_20_to_50_us.gap_count,
            gaps.gaps_above_50_us.gap_count
        ),
        (1, 2, 1)
    );
    assert_eq!(
        (gaps.gaps_below_20_us.total_gap_ns, gaps.gaps_above_50_us.total_gap_ns),
        (19_999, 50_001)
    );
    assert_eq!((gaps.longest_gap_ns, gaps.mean_length_of_gaps_ns()), (50_001, 35_000.0));
}

#[test]
fn a_clock_that_jumps_is_reported() {
    let mut export = NsysExport::new();
    export.add_launch((10, 20), (1_000, 2_000), 1, "k");
    export.add_launch((30, 40), (3_000, 4_000), 2, "k");
    export.add_launch(
        (3_600_000_000_000, 3_600_000_000_010),
        (3_600_000_001_000, 3_600_000_002_000),
        3,
        "k",
    );
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    insta::assert_snapshot!(diagnosis.data_quality_findings[0].finding_title, @"one idle time on device 0 is more than 100 times as long as everything else: the clock jumped, or the program paused");
}

#[test]
fn small_grids_are_found_where_the_gpu_is_known() {
    let mut export = NsysExport::new();
    export.add_launch((10, 20), (1_000, 9_000), 1, "narrow");
    export.add_launch((30, 40), (10_000, 12_000), 2, "wide");
    export.execute_sql("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET gridX = 25 WHERE start = 1000;");
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    let finding = finding_with_id(&diagnosis, "small-grid").unwrap();
    assert_eq!(finding.measured_value.number_in_unit, 80.0);
    assert_eq!(finding.max_recoverable_ns, Some(6_000), "three quarters of it idle");
    insta::assert_snapshot!(finding.evidence[0].kernel_call_or_copy_name, @"25 blocks for 100 multiprocessors: grid 25×1×1 of 128 threads, narrow");
    export.execute_sql("DROP TABLE TARGET_INFO_GPU;");
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    let why = reason_not_answered(&diagnosis, "small-grid");
    insta::assert_snapshot!(why, @"device 0, on which the kernels ran, is not described in the trace; record with nsys profile --trace=cuda, and export with --type sqlite");
}

#[test]
fn sampled_bound_uses_issue_and_dram_not_activity() {
    let mut export = NsysExport::new();
    export.add_launch((10, 20), (1_000, 9_000), 1, "k");
    export.execute_sql(
        "CREATE TABLE TARGET_INFO_GPU_METRICS (typeId INTEGER, metricId INTEGER, metricName TEXT);
         CREATE TABLE GPU_METRICS (timestamp INTEGER, typeId INTEGER, metricId INTEGER,
            value INTEGER);
         INSERT INTO TARGET_INFO_GPU_METRICS VALUES (256, 1, 'SMs Active [Throughput %]'),
            (256, 2, 'SM Issue [Throughput %]'), (256, 3, 'DRAM Read Bandwidth [Throughput %]'),
            (256, 4, 'DRAM Write Bandwidth [Throughput %]');
         INSERT INTO GPU_METRICS VALUES (-5, 256, 2, 100);",
    );
    let sample = |count: i64| {
        export.execute_sql(&format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})
             INSERT INTO GPU_METRICS SELECT i, 256, m.metricId, CASE m.metricId WHEN 1 THEN 99
             WHEN 2 THEN 16 WHEN 3 THEN 54 ELSE 27 END FROM n, TARGET_INFO_GPU_METRICS m;"
        ));
    };
    sample(50);
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    let why = reason_not_answered(&diagnosis, "sampled-bound");
    insta::assert_snapshot!(why, @"fewer than 100 samples of SM issue and DRAM bandwidth: too few to conclude; sample for longer, or more often");
    sample(50);
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    let bound = finding_with_id(&diagnosis, "sampled-bound").unwrap();
    insta::assert_snapshot!(bound.finding_title, @"GPU 0 is memory-bound on average: SM issue 16 %, DRAM read 54 % and write 27 %");
}

#[test]
fn short_kernels_that_always_follow_each_other_could_be_fused() {
    let chain = |third: &str| {
        let mut export = NsysExport::new();
        for i in 0..10 {
            // The host launches far ahead of the GPU.
            let (call, run) = (1_000_000 + i * 20_000, 1_050_000 + i * 46_000);
            let mut launch = |kernel: i64, at: i64, length: i64, name: &str| {
                let call = call + kernel * 6_000;
                export.add_launch(
                    (call, call + 5_000),
                    (at, at + length),
                    i * 10 + kernel + 1,
                    name,
                );
            };
            launch(0, run, 40_000, "gemm");
            launch(1, run + 40_000, 3_000, "bias");
            launch(2, run + 44_000, 2_000, third);
        }
        diagnose_trace_in_memory(&export.read_as_trace().unwrap())
    };
    let diagnosis = chain("gelu");
    let fusion = finding_with_id(&diagnosis, "fusion").unwrap();
    // The fusible pair does not contain the gemm; fusing saves the shorter kernel (2 µs) and the
    // gap of 1 µs.
    assert_eq!(fusion.evidence.len(), 1);
    assert_eq!(fusion.evidence[0].kernel_call_or_copy_name, "bias → gelu");
    assert_eq!(fusion.max_recoverable_ns, Some(10 * (2_000 + 1_000)));
    assert!(
        (fusion.measured_value.number_in_unit - 500.0 / 45.0).abs() < 1e-9,
        "{}",
        fusion.measured_value.number_in_unit
    );
    // A kernel that also runs after other kernels is not fused, because then another kernel
    // produces its input.
    assert!(finding_with_id(&chain("gemm"), "fusion").is_none());
}

#[test]
fn block_sizes_that_are_no_multiple_of_a_warp_are_found() {
    let mut export = NsysExport::new();
    export.add_launch((10, 20), (1_000, 9_000), 1, "odd");
    export.add_launch((30, 40), (10_000, 12_000), 2, "even");
    assert!(
        diagnose_trace_in_memory(&export.read_as_trace().unwrap())
            .has_rule_found_nothing("block-size")
    );
    export.execute_sql("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET blockX = 40 WHERE start = 1000;");
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    let finding = finding_with_id(&diagnosis, "block-size").unwrap();
    assert_eq!(finding.measured_value.number_in_unit, 80.0);
    assert_eq!(finding.max_recoverable_ns, Some(3_000), "24 of 64 threads idle");
}

#[test]
fn a_checklist_line_holds_fails_or_names_the_tool_to_measure() {
    let mut export = launch_bound_export();
    export.add_api_call(7, (100, 200), 1000, "cudaMemcpyAsync_v3020");
    export.add_memory_copy((500_000, 900_000), 1000, (1, 0, 2));
    let lines = fill_in_checklist(&diagnose_trace_in_memory(&export.read_as_trace().unwrap()));
    let line =
        |text: &str| lines.iter().find(|line| line.checklist_statement.starts_with(text)).unwrap();
    assert_eq!(line("Minimal synchronization").line_state, ChecklistLineState::ConditionHolds);
    let transactions = line("Memory transactions");
    assert_eq!(transactions.line_state, ChecklistLineState::ConditionFails);
    insta::assert_snapshot!(transactions.finding_or_command_deciding_line, @"asynchronous copies with pageable memory: 1, 1.0 MB at 2.5 GB/s; the host waits for each");
    let conflicts = line("No bank conflicts");
    assert_eq!(conflicts.line_state, ChecklistLineState::NotMeasured);
    assert!(
        conflicts.finding_or_command_deciding_line.contains("ncu --csv"),
        "{}",
        conflicts.finding_or_command_deciding_line
    );
    assert_eq!(line("Unrolled").line_state, ChecklistLineState::NotMeasured);
    assert_eq!(lines.len(), 16);
    let text = checklist_to_text(&lines);
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    insta::assert_snapshot!(lines_with_word(&text, "saturates"), @"[x] Grid size saturates GPU");
    assert_eq!(checklist_to_json(&lines)[0]["group"], "Memory");
}

#[test]
fn softmax_time_is_compared_with_matmul_time() {
    let mut export = NsysExport::new();
    export.add_launch((10, 20), (1_000, 9_000), 1, "ampere_sgemm_128x64_tn");
    export.add_launch((30, 40), (10_000, 12_000), 2, "softmax_warp_forward");
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    assert_eq!(diagnosis.answers.softmax_time_by_matmul_time(), Some(0.25));
    let text = diagnosis.diagnosis_to_text();
    // Softmax takes 5 FLOPs per score and the matrix products 4 × 64, so its time ratio of 0.25 is
    // 12.8 times its FLOP ratio of 0.0195.
    insta::assert_snapshot!(lines_with_word(&text, "softmax"), @r"
    18.2 %      2.0 µs  softmax_warp_forward
    9.1 %      1.0 µs  half the time of softmax_warp_forward
    ampere_sgemm_128x64_tn → softmax_warp_forward
    20.0 %      2.0 µs         1 × 2.0 µs    softmax        softmax_warp_forward
    20.0 %      2.0 µs         1 launches  softmax
    softmax takes 0.25 of the time of matmul
    ");
    insta::assert_snapshot!(lines_with_word(&text, "FLOP"), @r"
    and does of the FLOPs, if that matmul is attention's alone (--range):
    0.020 for heads of 64 (a FLOP takes 13 times as long)
    0.010 for heads of 128 (a FLOP takes 26 times as long)
    ");
    assert_eq!(diagnosis.diagnosis_to_json()["softmax_to_matmul_flops"]["128"], 5.0 / 512.0);
    export.execute_sql("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE start = 1000;");
    assert_eq!(
        diagnose_trace_in_memory(&export.read_as_trace().unwrap())
            .answers
            .softmax_time_by_matmul_time(),
        None
    );
}

#[test]
fn the_report_reads_well() {
    let mut export = launch_bound_export();
    export.add_nvtx_range(1_000_000, Some(2_200_000), 59, "warm-up");
    export.add_nvtx_range(2_200_000, Some(3_500_000), 59, "benchmark");
    export.add_api_call(7, (100, 200), 1000, "cudaMemcpyAsync_v3020");
    export.add_memory_copy((500_000, 900_000), 1000, (1, 0, 2));
    let diagnosis = diagnose_trace_in_memory(&export.read_as_trace().unwrap());
    let text = diagnosis.diagnosis_to_text();
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    insta::assert_snapshot!(text);
    let json = diagnosis.diagnosis_to_json();
    assert_eq!(json["schema_version"], 2);
    assert_eq!(json["devices"][0]["gaps"]["severe"]["count"], 1);
    let ids: Vec<&str> = json["findings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|finding| finding["id"].as_str().unwrap())
        .collect();
    assert!(ids.contains(&"launch-bound") && ids.contains(&"pageable-copy"), "{ids:?}");
}
