//! All diagnosis rules, in the order in which they are applied; the rule about data quality comes
//! first.

mod copies;
mod exposed_transfers;
mod fusion;
mod kernels;
mod launches;
mod managed_memory;
mod memory;
mod metrics;
mod quality;
pub(super) mod rule_list;
mod rule_outcome;
mod waits;
mod work;

use super::account;
use super::answers::KernelTimeAnswers;
use super::critical;
use super::device_memory;
use super::finding::{
    DATA_QUALITY_RULE_ID, DiagnosisFinding, DiagnosisRuleAnswer, FindingSeverity, GpuUseOfProcess,
    InspectedRecordKind, InspectedShareOfRecords, QuestionWithAnswer, TraceDiagnosis,
};
use super::host::gpu_gaps;
use super::network::find_phases_of_network;
use super::trace_facts::DiagnosisContext;
use super::utilization::utilization_of_trace;
use crate::model::TraceRecorder;
use rule_list::{RecordsNeededByRule, RuleReferenceEntry};
use rule_outcome::{DataMissingForRule, FindingsOrMissingData, all_records_inspected};

type DiagnosisRuleFunction = fn(&DiagnosisContext<'_>, &[GpuUseOfProcess]) -> FindingsOrMissingData;

/// A diagnosis rule with its question and the data for its line on the reference page.
struct RuleWithQuestion {
    rule_id: &'static str,
    question: &'static str,
    rule: DiagnosisRuleFunction,
    /// Returns the condition, with its thresholds, under which the rule has a finding.
    condition_text: fn() -> String,
    /// Highest severity that findings of the rule can have.
    highest_severity: FindingSeverity,
    needed_records: RecordsNeededByRule,
}

const ALL_DIAGNOSIS_RULES: &[RuleWithQuestion] = &[
    RuleWithQuestion {
        rule_id: DATA_QUALITY_RULE_ID,
        question: "Is anything wrong with the trace itself?",
        rule: quality::find_data_quality_problems,
        condition_text: quality::data_quality_rule_text,
        highest_severity: FindingSeverity::Severe,
        needed_records: RecordsNeededByRule::AnyTrace,
    },
    RuleWithQuestion {
        rule_id: "launch-bound",
        question: "Does the GPU wait for launches?",
        rule: launches::find_launch_bound_processes,
        condition_text: launches::launch_bound_rule_text,
        highest_severity: FindingSeverity::Severe,
        needed_records: RecordsNeededByRule::OperationsAndLaunchCalls,
    },
    RuleWithQuestion {
        rule_id: "gaps",
        question: "Is the GPU idle between its operations?",
        rule: launches::find_long_idle_gaps,
        condition_text: launches::idle_gaps_rule_text,
        highest_severity: FindingSeverity::Severe,
        needed_records: RecordsNeededByRule::OperationsAndLaunchCalls,
    },
    RuleWithQuestion {
        rule_id: "sync-in-loop",
        question: "Does the host wait for the GPU in a loop?",
        rule: |context, _| waits::find_host_waits_in_loops(context),
        condition_text: waits::waits_in_loops_rule_text,
        highest_severity: FindingSeverity::Severe,
        needed_records: RecordsNeededByRule::OperationsAndLaunchCalls,
    },
    RuleWithQuestion {
        rule_id: "pageable-copy",
        question: "Do asynchronous copies use pageable memory?",
        rule: copies::find_asynchronous_copies_with_pageable_memory,
        condition_text: copies::pageable_copy_rule_threshold_text,
        highest_severity: FindingSeverity::Severe,
        needed_records: RecordsNeededByRule::OperationsAndLaunchCalls,
    },
    RuleWithQuestion {
        rule_id: "synchronous-copy",
        question: "Do copies hold up the host?",
        rule: copies::find_synchronous_copies,
        condition_text: copies::synchronous_copy_rule_threshold_text,
        highest_severity: FindingSeverity::Severe,
        needed_records: RecordsNeededByRule::OperationsAndLaunchCalls,
    },
    RuleWithQuestion {
        rule_id: "synchronous-set",
        question: "Do memsets hold up the host?",
        rule: copies::find_synchronous_memsets,
        condition_text: copies::synchronous_memset_rule_threshold_text,
        highest_severity: FindingSeverity::Severe,
        needed_records: RecordsNeededByRule::OperationsAndLaunchCalls,
    },
    RuleWithQuestion {
        rule_id: "page-migration",
        question: "Do pages of managed memory migrate?",
        rule: |context, _| managed_memory::find_page_migrations(context),
        condition_text: managed_memory::page_migrations_rule_text,
        highest_severity: FindingSeverity::Severe,
        needed_records: RecordsNeededByRule::OperationsAndPageFaults,
    },
    RuleWithQuestion {
        rule_id: "exposed-copy",
        question: "Do copies run with no kernel beside them?",
        rule: exposed_transfers::find_exposed_copies,
        condition_text: exposed_transfers::exposed_copies_threshold_text,
        highest_severity: FindingSeverity::Severe,
        needed_records: RecordsNeededByRule::OperationsAndLaunchCalls,
    },
    RuleWithQuestion {
        rule_id: "exposed-communication",
        question: "Does communication run with no compute beside it?",
        rule: exposed_transfers::find_exposed_communication,
        condition_text: exposed_transfers::exposed_communication_threshold_text,
        highest_severity: FindingSeverity::Severe,
        needed_records: RecordsNeededByRule::OperationsAndLaunchCalls,
    },
    RuleWithQuestion {
        rule_id: "block-size",
        question: "Do block sizes leave lanes of a warp idle?",
        rule: |context, _| kernels::find_block_sizes_with_idle_lanes(context),
        condition_text: kernels::block_sizes_rule_text,
        highest_severity: FindingSeverity::Severe,
        needed_records: RecordsNeededByRule::LaunchShapes,
    },
    RuleWithQuestion {
        rule_id: "small-grid",
        question: "Do grids leave multiprocessors idle?",
        rule: |context, _| kernels::find_grids_smaller_than_gpu(context),
        condition_text: kernels::small_grids_rule_text,
        highest_severity: FindingSeverity::Severe,
        needed_records: RecordsNeededByRule::LaunchShapes,
    },
    RuleWithQuestion {
        rule_id: "tail",
        question: "Does the last wave leave multiprocessors idle?",
        rule: |context, _| kernels::find_launches_with_idle_tail_wave(context),
        condition_text: kernels::tail_waves_rule_text,
        highest_severity: FindingSeverity::Warning,
        needed_records: RecordsNeededByRule::LaunchShapes,
    },
    RuleWithQuestion {
        rule_id: "fp32-matmul",
        question: "Do matrix products run without tensor cores?",
        rule: |context, _| kernels::find_fp32_gemms_on_cuda_cores(context),
        condition_text: kernels::fp32_gemms_rule_text,
        highest_severity: FindingSeverity::Warning,
        needed_records: RecordsNeededByRule::LaunchShapes,
    },
    RuleWithQuestion {
        rule_id: "occupancy",
        question: "Is the theoretical occupancy low?",
        rule: |context, _| kernels::find_low_theoretical_occupancy(context),
        condition_text: kernels::low_occupancy_rule_text,
        highest_severity: FindingSeverity::Information,
        needed_records: RecordsNeededByRule::LaunchShapes,
    },
    RuleWithQuestion {
        rule_id: "fusion",
        question: "Could short kernels be fused?",
        rule: |context, _| fusion::find_fusible_kernels(context),
        condition_text: fusion::fusible_kernels_rule_text,
        highest_severity: FindingSeverity::Information,
        needed_records: RecordsNeededByRule::OperationsAndLaunchCalls,
    },
    RuleWithQuestion {
        rule_id: "sampled-bound",
        question: "Which unit bounds the GPU, by samples?",
        rule: |context, _| metrics::report_bound_from_sampled_counters(context),
        condition_text: metrics::sampled_bound_rule_text,
        highest_severity: FindingSeverity::Information,
        needed_records: RecordsNeededByRule::HardwareCounterSamples,
    },
    RuleWithQuestion {
        rule_id: "kernel-bound",
        question: "Which unit bounds each kernel?",
        rule: |context, _| metrics::report_bound_of_each_kernel(context),
        condition_text: metrics::kernel_bound_rule_text,
        highest_severity: FindingSeverity::Information,
        needed_records: RecordsNeededByRule::NcuMetrics("--section SpeedOfLight"),
    },
    RuleWithQuestion {
        rule_id: "work-bound",
        question: "Which limit bounds each range with declared work?",
        rule: |context, _| work::report_bound_of_declared_work(context),
        condition_text: work::declared_work_bound_rule_text,
        highest_severity: FindingSeverity::Information,
        needed_records: RecordsNeededByRule::DeclaredWork,
    },
    RuleWithQuestion {
        rule_id: "achieved-occupancy",
        question: "Is the achieved occupancy low?",
        rule: |context, _| metrics::find_low_achieved_occupancy(context),
        condition_text: metrics::achieved_occupancy_rule_text,
        highest_severity: FindingSeverity::Information,
        needed_records: RecordsNeededByRule::NcuMetrics("--section Occupancy"),
    },
    RuleWithQuestion {
        rule_id: "stalls",
        question: "Do warps stall mostly for one reason?",
        rule: |context, _| metrics::find_dominant_warp_stalls(context),
        condition_text: metrics::warp_stalls_rule_text,
        highest_severity: FindingSeverity::Warning,
        needed_records: RecordsNeededByRule::NcuMetrics(
            "--section WarpStateStats --section SchedulerStats",
        ),
    },
    RuleWithQuestion {
        rule_id: "coalescing",
        question: "Are accesses to global memory uncoalesced?",
        rule: |context, _| memory::find_uncoalesced_memory_accesses(context),
        condition_text: memory::coalescing_rule_text,
        highest_severity: FindingSeverity::Warning,
        needed_records: RecordsNeededByRule::NcuMetrics(
            "--metrics group:memory__first_level_cache_table",
        ),
    },
    RuleWithQuestion {
        rule_id: "bank-conflicts",
        question: "Do accesses to shared memory conflict?",
        rule: |context, _| memory::find_shared_memory_bank_conflicts(context),
        condition_text: memory::bank_conflicts_rule_text,
        highest_severity: FindingSeverity::Warning,
        needed_records: RecordsNeededByRule::NcuMetrics("--section MemoryWorkloadAnalysis_Tables"),
    },
    RuleWithQuestion {
        rule_id: "divergence",
        question: "Do threads of a warp diverge?",
        rule: |context, _| memory::find_divergent_warps(context),
        condition_text: memory::divergence_rule_text,
        highest_severity: FindingSeverity::Warning,
        needed_records: RecordsNeededByRule::NcuMetrics("--section WarpStateStats"),
    },
];

/// Returns entries about all rules, in the order in which the rules are applied, for the reference
/// page.
pub fn reference_entries_of_all_rules() -> Vec<RuleReferenceEntry> {
    let entry = |asked: &RuleWithQuestion| RuleReferenceEntry {
        rule_id: asked.rule_id,
        question: asked.question,
        condition_text: (asked.condition_text)(),
        highest_severity: asked.highest_severity,
        recording_advice: asked.needed_records.advice_to_record_on_nvidia(),
    };
    ALL_DIAGNOSIS_RULES.iter().map(entry).collect()
}

/// Converts the result of a rule to the answer to its question; its findings are appended to the
/// list.
fn answer_from_rule_result(
    outcome: FindingsOrMissingData,
    findings: &mut Vec<DiagnosisFinding>,
) -> DiagnosisRuleAnswer {
    match outcome {
        Ok((found, inspected)) if found.is_empty() => {
            match inspected.is_share_enough_for_answer_no() {
                true => DiagnosisRuleAnswer::No { inspected },
                false => {
                    let (reason, record) = why_partial_inspection_gives_no_answer(&inspected);
                    DiagnosisRuleAnswer::CannotAnswer {
                        reason,
                        how_to_record: record,
                        inspected: Some(inspected),
                    }
                }
            }
        }
        Ok((found, inspected)) => {
            let answer = DiagnosisRuleAnswer::Yes { finding_count: found.len(), inspected };
            findings.extend(found);
            answer
        }
        Err(DataMissingForRule { missing_data_reason: reason, recording_advice: record }) => {
            DiagnosisRuleAnswer::CannotAnswer { reason, how_to_record: record, inspected: None }
        }
    }
}

/// Returns why no finding in only a part of the records does not answer the question, and how to
/// record the rest.
fn why_partial_inspection_gives_no_answer(inspected: &InspectedShareOfRecords) -> (String, String) {
    let missing = inspected.reason_for_uninspected_records.clone().unwrap_or_default();
    let (why, record) = missing.rsplit_once("; ").unwrap_or((&missing, ""));
    let seen = format!("nothing found in {inspected}");
    let reason = if why.is_empty() { seen } else { format!("{seen}; {why}") };
    (reason, record.to_owned())
}

/// Applies every rule.
pub(super) fn apply_all_rules_to_trace(context: &DiagnosisContext<'_>) -> TraceDiagnosis {
    let trace = context.trace;
    let devices: Vec<GpuUseOfProcess> = context
        .activities
        .iter()
        .zip(account::account_time_of_processes_on_gpus(context))
        .map(|(activity, account)| {
            let device =
                trace.devices.iter().find(|device| device.device_ordinal == activity.gpu_ordinal);
            GpuUseOfProcess {
                pid: trace.processes[activity.process_index as usize].pid,
                gpu_ordinal: activity.gpu_ordinal,
                gpu_name: device
                    .map(|device| device.device_name.clone())
                    .filter(|name| !name.is_empty()),
                first_start_and_last_end_ns: activity.first_start_and_last_end_ns,
                gpu_busy_ns: activity.gpu_busy_ns,
                operation_count: activity.operation_count,
                account,
                idle_gaps: gpu_gaps::report_idle_gaps_of_activity(context, activity),
            }
        })
        .collect();
    let (mut quality, mut findings, mut questions) = (Vec::new(), Vec::new(), Vec::new());
    for RuleWithQuestion { rule_id: id, question, rule, highest_severity: worst, .. } in
        ALL_DIAGNOSIS_RULES
    {
        let found = if *id == DATA_QUALITY_RULE_ID { &mut quality } else { &mut findings };
        let answer = answer_from_rule_result(rule(context, &devices), found);
        debug_assert!(found.iter().all(|of| of.rule_id != *id || of.severity <= *worst), "{id}");
        questions.push(QuestionWithAnswer { rule_id: id, question_text: question, answer });
    }
    quality.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    let critical_path = critical::find_critical_path_and_gains(context, &mut findings);
    let memory =
        device_memory::device_memory_by_process_and_gpu(trace, &context.host_summary.outermost);
    questions.push(answer_device_memory_question(context, memory.len()));
    let version = ["EXPORT_PRODUCT_VERSION", "PRODUCT_VERSION"]
        .iter()
        .find_map(|key| trace.metadata.get(*key));
    let mut recorder = trace.recorder.recorder_label().to_owned();
    if let Some(version) = version {
        recorder.push_str(&format!(" {version}"));
    }
    TraceDiagnosis {
        recorder_and_version: recorder,
        printed_time_origin_ns: match trace.recorder {
            TraceRecorder::PytorchOrChromeTrace
            | TraceRecorder::KernelgateCupti
            | TraceRecorder::XlaProfiler
            | TraceRecorder::Rocprof => {
                trace.first_and_last_activity_ns().map_or(0, |(first, _)| first)
            }
            _ => 0,
        },
        records: [
            ("kernels", trace.kernels.on_gpu.operation_count()),
            ("copies", trace.copies.on_gpu.operation_count()),
            ("sets", trace.memsets.on_gpu.operation_count()),
            ("graph launches", trace.graphs.on_gpu.operation_count()),
            ("CUDA calls", context.host_summary.calls),
            ("ranges", context.host_summary.ranges),
            ("profiled launches", trace.profiled_launches.len()),
        ],
        gpu_use_by_process: devices,
        critical_path,
        device_memory_over_time: memory,
        data_quality_findings: quality,
        findings,
        questions,
        answers: KernelTimeAnswers::answer_kernel_time_questions(context),
        utilization: utilization_of_trace(context),
        network: find_phases_of_network(context),
    }
}

/// The question about device memory is answered by a table instead of a rule.
fn answer_device_memory_question(
    context: &DiagnosisContext<'_>,
    tables: usize,
) -> QuestionWithAnswer {
    let rows = context.trace.allocations.time_ns.len();
    let answer = match tables {
        0 => DiagnosisRuleAnswer::CannotAnswer {
            reason: "allocations were not recorded".to_owned(),
            how_to_record: context.platform.advice_to_record_allocations().to_owned(),
            inspected: None,
        },
        findings => DiagnosisRuleAnswer::Yes {
            finding_count: findings,
            inspected: all_records_inspected(rows, InspectedRecordKind::HostCalls),
        },
    };
    QuestionWithAnswer {
        rule_id: "device memory",
        question_text: "How much device memory was held?",
        answer,
    }
}
