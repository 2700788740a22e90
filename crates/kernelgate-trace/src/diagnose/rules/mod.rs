//! The rules, in the order in which they are applied; data quality first.

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
use super::answers::TraceAnswers;
use super::critical;
use super::device_memory;
use super::finding::{
    DATA_QUALITY_ID, DiagnosisFinding, DiagnosisQuestion, FindingSeverity, InspectedShare,
    InspectedUnit, ProcessDeviceUse, QuestionAnswer, TraceDiagnosis,
};
use super::host::gpu_gaps;
use super::network::network_phases;
use super::trace_facts::DiagnosisContext;
use super::utilization::trace_utilization;
use crate::model::TraceRecorder;
use rule_list::{RequiredRecords, RuleEntry};
use rule_outcome::{MissingData, RuleResult, inspected_all};

type RuleFunction = fn(&DiagnosisContext<'_>, &[ProcessDeviceUse]) -> RuleResult;

/// A rule, the question that it answers, and its line of the reference.
struct RuleQuestion {
    id: &'static str,
    question: &'static str,
    rule: RuleFunction,
    /// States when the rule finds something, with its thresholds.
    finds: fn() -> String,
    /// The highest severity of the rule's findings.
    worst: FindingSeverity,
    records: RequiredRecords,
}

const RULES_WITH_QUESTIONS: &[RuleQuestion] = &[
    RuleQuestion {
        id: DATA_QUALITY_ID,
        question: "Is anything wrong with the trace itself?",
        rule: quality::data_quality_rule,
        finds: quality::quality_finding_text,
        worst: FindingSeverity::Severe,
        records: RequiredRecords::Anything,
    },
    RuleQuestion {
        id: "launch-bound",
        question: "Does the GPU wait for launches?",
        rule: launches::launch_bound_rule,
        finds: launches::launch_bound_rule_text,
        worst: FindingSeverity::Severe,
        records: RequiredRecords::Launches,
    },
    RuleQuestion {
        id: "gaps",
        question: "Is the GPU idle between its operations?",
        rule: launches::find_idle_classes,
        finds: launches::gaps_rule_text,
        worst: FindingSeverity::Severe,
        records: RequiredRecords::Launches,
    },
    RuleQuestion {
        id: "sync-in-loop",
        question: "Does the host wait for the GPU in a loop?",
        rule: |context, _| waits::waits_in_loops_rule(context),
        finds: waits::waits_finding_text,
        worst: FindingSeverity::Severe,
        records: RequiredRecords::Launches,
    },
    RuleQuestion {
        id: "pageable-copy",
        question: "Do asynchronous copies use pageable memory?",
        rule: copies::pageable_copies_rule,
        finds: copies::pageable_copies_rule_text,
        worst: FindingSeverity::Severe,
        records: RequiredRecords::Launches,
    },
    RuleQuestion {
        id: "synchronous-copy",
        question: "Do copies hold up the host?",
        rule: copies::synchronous_copies_rule,
        finds: copies::synchronous_copies_rule_text,
        worst: FindingSeverity::Severe,
        records: RequiredRecords::Launches,
    },
    RuleQuestion {
        id: "synchronous-set",
        question: "Do memsets hold up the host?",
        rule: copies::synchronous_sets_rule,
        finds: copies::synchronous_sets_rule_text,
        worst: FindingSeverity::Severe,
        records: RequiredRecords::Launches,
    },
    RuleQuestion {
        id: "page-migration",
        question: "Do pages of managed memory migrate?",
        rule: |context, _| managed_memory::page_migrations_rule(context),
        finds: managed_memory::managed_finding_text,
        worst: FindingSeverity::Severe,
        records: RequiredRecords::Migrations,
    },
    RuleQuestion {
        id: "exposed-copy",
        question: "Do copies run with no kernel beside them?",
        rule: exposed_transfers::find_exposed_copies,
        finds: exposed_transfers::exposed_copies_rule_text,
        worst: FindingSeverity::Severe,
        records: RequiredRecords::Launches,
    },
    RuleQuestion {
        id: "exposed-communication",
        question: "Does communication run with no compute beside it?",
        rule: exposed_transfers::find_exposed_communication,
        finds: exposed_transfers::exposed_communication_rule_text,
        worst: FindingSeverity::Severe,
        records: RequiredRecords::Launches,
    },
    RuleQuestion {
        id: "block-size",
        question: "Do block sizes leave lanes of a warp idle?",
        rule: |context, _| kernels::block_sizes_rule(context),
        finds: kernels::block_sizes_rule_text,
        worst: FindingSeverity::Severe,
        records: RequiredRecords::Shapes,
    },
    RuleQuestion {
        id: "small-grid",
        question: "Do grids leave multiprocessors idle?",
        rule: |context, _| kernels::small_grids_rule(context),
        finds: kernels::small_grids_rule_text,
        worst: FindingSeverity::Severe,
        records: RequiredRecords::Shapes,
    },
    RuleQuestion {
        id: "tail",
        question: "Does the last wave leave multiprocessors idle?",
        rule: |context, _| kernels::tail_waves_rule(context),
        finds: kernels::tail_waves_rule_text,
        worst: FindingSeverity::Warning,
        records: RequiredRecords::Shapes,
    },
    RuleQuestion {
        id: "fp32-matmul",
        question: "Do matrix products run without tensor cores?",
        rule: |context, _| kernels::fp32_gemms_rule(context),
        finds: kernels::fp32_gemms_rule_text,
        worst: FindingSeverity::Warning,
        records: RequiredRecords::Shapes,
    },
    RuleQuestion {
        id: "occupancy",
        question: "Is the theoretical occupancy low?",
        rule: |context, _| kernels::low_occupancy_rule(context),
        finds: kernels::low_occupancy_rule_text,
        worst: FindingSeverity::Information,
        records: RequiredRecords::Shapes,
    },
    RuleQuestion {
        id: "fusion",
        question: "Could short kernels be fused?",
        rule: |context, _| fusion::find_fusible_kernels(context),
        finds: fusion::fusion_finding_text,
        worst: FindingSeverity::Information,
        records: RequiredRecords::Launches,
    },
    RuleQuestion {
        id: "sampled-bound",
        question: "Which unit bounds the GPU, by samples?",
        rule: |context, _| metrics::sampled_bound_rule(context),
        finds: metrics::sampled_bound_rule_text,
        worst: FindingSeverity::Information,
        records: RequiredRecords::Samples,
    },
    RuleQuestion {
        id: "kernel-bound",
        question: "Which unit bounds each kernel?",
        rule: |context, _| metrics::kernel_bound_rule(context),
        finds: metrics::kernel_bound_rule_text,
        worst: FindingSeverity::Information,
        records: RequiredRecords::Metrics("--section SpeedOfLight"),
    },
    RuleQuestion {
        id: "work-bound",
        question: "Which limit bounds each range with declared work?",
        rule: |context, _| work::work_bound_rule(context),
        finds: work::work_bound_rule_text,
        worst: FindingSeverity::Information,
        records: RequiredRecords::DeclaredWork,
    },
    RuleQuestion {
        id: "achieved-occupancy",
        question: "Is the achieved occupancy low?",
        rule: |context, _| metrics::achieved_occupancy_rule(context),
        finds: metrics::achieved_occupancy_rule_text,
        worst: FindingSeverity::Information,
        records: RequiredRecords::Metrics("--section Occupancy"),
    },
    RuleQuestion {
        id: "stalls",
        question: "Do warps stall mostly for one reason?",
        rule: |context, _| metrics::find_warp_stalls(context),
        finds: metrics::stalls_rule_text,
        worst: FindingSeverity::Warning,
        records: RequiredRecords::Metrics("--section WarpStateStats --section SchedulerStats"),
    },
    RuleQuestion {
        id: "coalescing",
        question: "Are accesses to global memory uncoalesced?",
        rule: |context, _| memory::find_uncoalesced_access(context),
        finds: memory::coalescing_rule_text,
        worst: FindingSeverity::Warning,
        records: RequiredRecords::Metrics("--metrics group:memory__first_level_cache_table"),
    },
    RuleQuestion {
        id: "bank-conflicts",
        question: "Do accesses to shared memory conflict?",
        rule: |context, _| memory::bank_conflicts_rule(context),
        finds: memory::bank_conflicts_rule_text,
        worst: FindingSeverity::Warning,
        records: RequiredRecords::Metrics("--section MemoryWorkloadAnalysis_Tables"),
    },
    RuleQuestion {
        id: "divergence",
        question: "Do threads of a warp diverge?",
        rule: |context, _| memory::find_divergence(context),
        finds: memory::divergence_rule_text,
        worst: FindingSeverity::Warning,
        records: RequiredRecords::Metrics("--section WarpStateStats"),
    },
];

/// Every rule, in the order in which they are applied.
pub fn rule_entries() -> Vec<RuleEntry> {
    let entry = |asked: &RuleQuestion| RuleEntry {
        id: asked.id,
        question: asked.question,
        finds: (asked.finds)(),
        worst: asked.worst,
        record: asked.records.recording_command(),
    };
    RULES_WITH_QUESTIONS.iter().map(entry).collect()
}

/// Turns the result of a rule into an answer; its findings are added to the list.
fn answer_of_outcome(outcome: RuleResult, findings: &mut Vec<DiagnosisFinding>) -> QuestionAnswer {
    match outcome {
        Ok((found, inspected)) if found.is_empty() => match inspected.is_enough_for_no() {
            true => QuestionAnswer::No { inspected },
            false => {
                let (reason, record) = partly_inspected_reason(&inspected);
                QuestionAnswer::CannotAnswer { reason, record, inspected: Some(inspected) }
            }
        },
        Ok((found, inspected)) => {
            let answer = QuestionAnswer::Yes { findings: found.len(), inspected };
            findings.extend(found);
            answer
        }
        Err(MissingData { reason, record }) => {
            QuestionAnswer::CannotAnswer { reason, record, inspected: None }
        }
    }
}

/// Why a part without a finding does not answer the question.
fn partly_inspected_reason(inspected: &InspectedShare) -> (String, String) {
    let missing = inspected.missing.clone().unwrap_or_default();
    let (why, record) = missing.rsplit_once("; ").unwrap_or((&missing, ""));
    let seen = format!("nothing found in {inspected}");
    let reason = if why.is_empty() { seen } else { format!("{seen}; {why}") };
    (reason, record.to_owned())
}

/// Applies every rule.
pub(super) fn apply_all_rules(context: &DiagnosisContext<'_>) -> TraceDiagnosis {
    let trace = context.trace;
    let devices: Vec<ProcessDeviceUse> = context
        .activities
        .iter()
        .zip(account::device_time_accounts(context))
        .map(|(activity, account)| {
            let device = trace.devices.iter().find(|device| device.id == activity.device);
            ProcessDeviceUse {
                pid: trace.processes[activity.process as usize].pid,
                device: activity.device,
                name: device.map(|device| device.name.clone()).filter(|name| !name.is_empty()),
                span: activity.span,
                busy_ns: activity.busy_ns,
                operations: activity.operations,
                account,
                gaps: gpu_gaps::report_gaps(context, activity),
            }
        })
        .collect();
    let (mut quality, mut findings, mut questions) = (Vec::new(), Vec::new(), Vec::new());
    for RuleQuestion { id, question, rule, worst, .. } in RULES_WITH_QUESTIONS {
        let found = if *id == DATA_QUALITY_ID { &mut quality } else { &mut findings };
        let answer = answer_of_outcome(rule(context, &devices), found);
        debug_assert!(found.iter().all(|of| of.id != *id || of.severity <= *worst), "{id}");
        questions.push(DiagnosisQuestion { id, text: question, answer });
    }
    quality.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    let critical_path = critical::critical_path(context, &mut findings);
    let memory = device_memory::memory_by_device(trace, &context.host.outermost);
    questions.push(device_memory_question(context, memory.len()));
    let version = ["EXPORT_PRODUCT_VERSION", "PRODUCT_VERSION"]
        .iter()
        .find_map(|key| trace.metadata.get(*key));
    let mut recorder = trace.recorder.label().to_owned();
    if let Some(version) = version {
        recorder.push_str(&format!(" {version}"));
    }
    TraceDiagnosis {
        recorder,
        origin_ns: match trace.recorder {
            TraceRecorder::Chrome
            | TraceRecorder::Cupti
            | TraceRecorder::Xla
            | TraceRecorder::Rocprof => trace.first_and_last_ns().map_or(0, |(first, _)| first),
            _ => 0,
        },
        records: [
            ("kernels", trace.kernels.on_gpu.len()),
            ("copies", trace.copies.on_gpu.len()),
            ("sets", trace.sets.on_gpu.len()),
            ("graph launches", trace.graphs.on_gpu.len()),
            ("CUDA calls", context.host.calls),
            ("ranges", context.host.ranges),
            ("profiled launches", trace.profiled.len()),
        ],
        devices,
        critical_path,
        memory,
        quality,
        findings,
        questions,
        answers: TraceAnswers::new(context),
        utilization: trace_utilization(context),
        network: network_phases(context),
    }
}

/// Device memory is a table, not a rule.
fn device_memory_question(context: &DiagnosisContext<'_>, tables: usize) -> DiagnosisQuestion {
    let rows = context.trace.allocations.time.len();
    let answer = match tables {
        0 => QuestionAnswer::CannotAnswer {
            reason: "allocations were not recorded".to_owned(),
            record: context.platform.record_memory_advice().to_owned(),
            inspected: None,
        },
        findings => {
            QuestionAnswer::Yes { findings, inspected: inspected_all(rows, InspectedUnit::Calls) }
        }
    };
    DiagnosisQuestion { id: "device memory", text: "How much device memory was held?", answer }
}
