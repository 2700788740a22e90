//! Formats the diagnosis of a trace as JSON for other programs. Times in the JSON are nanoseconds
//! of the trace's clock.

use hashbrown::HashMap;
use serde_json::{Value, json};

use super::answers::{
    KernelTimeAnswers, KernelWithTimeShare, RangePathHostAndKernelTimes, USUAL_ATTENTION_HEAD_SIZES,
};
use super::critical::gains::CriticalPathAndGains;
use super::device_memory::ProcessMemoryOnGpu;
use super::finding::{
    DiagnosisFinding, DiagnosisRuleAnswer, FindingEvidence, GpuUseOfProcess,
    MeasuredNumberWithUnit, QuestionWithAnswer, TraceDiagnosis,
};
use super::host::gpu_gaps::IdleGapsOfLengthClass;
use super::network::PhasesOfNetwork;
use super::range_tree::RangeTreeRow;
use crate::stats::ValueSummary;

/// Version of the diagnosis's JSON format; the version is raised when a field changes its meaning.
/// The JSON schema of the format is `schema/diagnosis.json` of this crate. Version 2 added a list
/// of doubts about the data, questions with answers, and idle gaps that are split at the launch.
pub const DIAGNOSIS_JSON_SCHEMA_VERSION: u32 = 2;

impl TraceDiagnosis {
    /// Converts the diagnosis of a trace to JSON, with the field `schema_version`.
    pub fn diagnosis_to_json(&self) -> Value {
        let records: serde_json::Map<String, Value> = self
            .records
            .iter()
            .map(|(what, count)| (what.to_lowercase().replace(' ', "_"), (*count).into()))
            .collect();
        let classes: Vec<Value> = self
            .answers
            .ns_and_launches_by_class
            .iter()
            .map(|(class, ns, count)| {
                json!({ "kind": class.printed_work_class_label(), "total_ns": ns, "launches": count })
            })
            .collect();
        let skipped = self.questions.iter();
        let skipped: Vec<Value> = skipped
            .filter_map(|of| {
                Some(json!({ "rule": of.rule_id, "reason": of.reason_without_answer()? }))
            })
            .collect();
        let passed =
            self.questions.iter().map(|of| of.rule_id).filter(|id| self.has_rule_found_nothing(id));
        json!({
            "schema_version": DIAGNOSIS_JSON_SCHEMA_VERSION,
            "recorder": self.recorder_and_version,
            "records": records,
            "devices": self.gpu_use_by_process.iter().map(gpu_use_to_json).collect::<Vec<_>>(),
            "time": self.gpu_use_by_process.iter().map(|of| of.account.process_account_to_json()).collect::<Vec<_>>(),
            "critical_path": critical_path_to_json(&self.critical_path),
            "data_quality": findings_to_json_with_keys(&self.data_quality_findings),
            "findings": findings_to_json_with_keys(&self.findings),
            "questions": self.questions.iter().map(question_to_json).collect::<Vec<_>>(),
            "skipped": skipped,
            "passed": passed.collect::<Vec<_>>(),
            "kernel_ns": self.answers.all_kernels_ns,
            "top_kernels": self.answers.top_kernels.iter().map(kernel_time_share_to_json).collect::<Vec<_>>(),
            "kernel_kinds": classes,
            "softmax_to_matmul": self.answers.softmax_time_by_matmul_time(),
            "softmax_to_matmul_flops": USUAL_ATTENTION_HEAD_SIZES
                .map(|head| (head.to_string(), KernelTimeAnswers::softmax_flops_by_matmul_flops(head)))
                .into_iter()
                .collect::<std::collections::BTreeMap<_, _>>(),
            "device_memory": self.device_memory_over_time.iter().map(device_memory_to_json).collect::<Vec<_>>(),
            "utilization": self.utilization.to_utilization_json(),
            "network": self.network.as_ref().map(PhasesOfNetwork::network_phases_to_json),
            "components": self.answers.components.iter().map(run_component_to_json).collect::<Vec<_>>(),
        })
    }
}

impl RangeTreeRow {
    /// Converts a node of the range tree to JSON.
    pub fn range_tree_node_to_json(&self) -> Value {
        let limits = self.reached_share_of_limits.iter();
        let limits: Vec<Value> =
            limits.map(|(by, reached)| json!({ "by": by, "reached": reached })).collect();
        json!({
            "path": self.range_path,
            "depth": self.depth,
            "times": self.ranges_with_operations,
            "host_ns": self.total_host_ns,
            "span_ns": self.total_gpu_span_ns,
            "busy_ns": self.gpu_busy_ns,
            "own_ns": self.non_overlapping_gpu_ns,
            "share": self.share_of_busy_time,
            "operations": self.operations,
            "bound": self.bound.printed_time_bound(),
            "of_limits": limits,
        })
    }
}

/// Largest number of points in time for which the JSON contains the held device memory.
const MAX_MEMORY_POINTS_IN_JSON: usize = 1000;

fn device_memory_to_json(of: &ProcessMemoryOnGpu) -> Value {
    let phases: Vec<Value> = of
        .phases
        .iter()
        .map(|phase| {
            json!({
                "phase": phase.phase_name,
                "times": phase.range_count,
                "peak_bytes": phase.peak_bytes,
                "change_bytes": phase.held_bytes_change,
            })
        })
        .collect();
    let over_time: Vec<Value> = of
        .thinned_bytes_over_time(MAX_MEMORY_POINTS_IN_JSON)
        .into_iter()
        .map(|(time_ns, bytes)| json!({ "time_ns": time_ns, "bytes": bytes }))
        .collect();
    json!({
        "process": of.pid,
        "device": of.gpu_ordinal,
        "peak_bytes": of.peak_time_ns_and_bytes.1,
        "peak_ns": of.peak_time_ns_and_bytes.0,
        "end_bytes": of.bytes_held_at_end_of_trace(),
        "allocations": of.allocation_count,
        "given_back": of.free_count,
        "given_back_unknown": of.frees_without_allocation,
        "phases": phases,
        "over_time": over_time,
    })
}

fn gpu_use_to_json(device: &GpuUseOfProcess) -> Value {
    let gaps = &device.idle_gaps;
    let class = |class: IdleGapsOfLengthClass| json!({ "count": class.gap_count, "total_ns": class.total_gap_ns });
    let causes: Vec<Value> = gaps
        .idle_time_by_cause
        .iter()
        .map(|cause| {
            json!({
                "key": cause.kind.idle_cause_json_key(),
                "cause": cause.kind.printed_idle_cause(),
                "function": cause.called_function_or_range_path,
                "count": cause.gap_count,
                "total_ns": cause.total_idle_ns,
                "longest_ns": cause.longest_in_one_gap_ns,
                "longest": time_span_to_json(Some(cause.longest_gap_start_and_end_ns)),
            })
        })
        .collect();
    let transitions: Vec<Value> = gaps
        .gaps_by_operation_pair
        .iter()
        .map(|transition| {
            json!({
                "before": transition.operation_before,
                "after": transition.operation_after,
                "range": transition.common_range_path,
                "count": transition.gap_count,
                "total_ns": transition.total_gap_ns,
                "longest": time_span_to_json(Some(transition.longest_gap_start_and_end_ns)),
            })
        })
        .collect();
    json!({
        "key": format!("{}:{}", device.pid, device.gpu_ordinal),
        "process": device.pid,
        "device": device.gpu_ordinal,
        "name": device.gpu_name,
        "span": time_span_to_json(Some(device.first_start_and_last_end_ns)),
        "busy_ns": device.gpu_busy_ns,
        "operations": device.operation_count,
        "gaps": {
            "normal": class(gaps.gaps_below_20_us),
            "warning": class(gaps.gaps_of_20_to_50_us),
            "severe": class(gaps.gaps_above_50_us),
            "mean_ns": gaps.mean_length_of_gaps_ns(),
            "longest_ns": gaps.longest_gap_ns,
            "causes": causes,
            "transitions": transitions,
        },
    })
}

/// Converts a question with its answer, which is "yes", "no" or "cannot answer".
fn question_to_json(question: &QuestionWithAnswer) -> Value {
    let (answer, findings, inspected) = match &question.answer {
        DiagnosisRuleAnswer::Yes { finding_count: findings, inspected } => {
            ("yes", *findings, Some(inspected))
        }
        DiagnosisRuleAnswer::No { inspected } => ("no", 0, Some(inspected)),
        DiagnosisRuleAnswer::CannotAnswer { inspected, .. } => {
            ("cannot answer", 0, inspected.as_ref())
        }
    };
    let (reason, record) = match &question.answer {
        DiagnosisRuleAnswer::CannotAnswer { reason, how_to_record: record, .. } => {
            (Some(reason), Some(record).filter(|record| !record.is_empty()))
        }
        _ => (None, None),
    };
    json!({
        "id": question.rule_id,
        "question": question.question_text,
        "answer": answer,
        "findings": findings,
        "inspected": inspected.map(|of| json!({
            "seen": of.inspected_count_or_ns,
            "whole": of.whole_count_or_ns,
            "unit": of.inspected_record_kind.record_kind_json_key(),
            "share": of.inspected_share_of_records(),
            "missing": of.reason_for_uninspected_records,
        })),
        "reason": reason,
        "record": record,
    })
}

/// Converts the critical path (the longest chain of dependent operations), with its segments and
/// the gains of changes.
fn critical_path_to_json(path: &CriticalPathAndGains) -> Value {
    let segments = path
        .critical_path_ns_by_segment_kind
        .iter()
        .map(|(kind, ns)| json!({ "kind": kind, "total_ns": ns }));
    let gains = path.gains.iter().map(|of| {
        json!({
            "change": of.change.printed_speedup_label(),
            "removed_ns": of.operation_ns_removed_by_change,
            "gain_ns": of.gain_ns,
        })
    });
    json!({
        "total_ns": path.critical_path_ns,
        "segments": segments.collect::<Vec<_>>(),
        "gains": gains.collect::<Vec<_>>(),
    })
}

/// Converts findings, each with a key that the same finding also has in another recording of the
/// program.
fn findings_to_json_with_keys(all: &[DiagnosisFinding]) -> Vec<Value> {
    let mut known: HashMap<String, usize> = HashMap::new();
    let key = |of: &DiagnosisFinding| {
        let device = of.evidence.first().and_then(|evidence| evidence.process_id_and_device);
        let device = device.map_or(String::new(), |(_, device)| format!(":{device}"));
        format!("{}{device}", of.rule_id)
    };
    let mut row = |of: &DiagnosisFinding| {
        let key = key(of);
        let before = known.entry(key.clone()).or_default();
        *before += 1;
        let key = if *before > 1 { format!("{key}#{before}") } else { key };
        finding_to_json(of, &key)
    };
    all.iter().map(&mut row).collect()
}

fn finding_to_json(finding: &DiagnosisFinding, key: &str) -> Value {
    json!({
        "key": key,
        "id": finding.rule_id,
        "severity": finding.severity.printed_severity_label(),
        "confidence": finding.confidence.printed_confidence_label(),
        "title": finding.finding_title,
        "measured": number_with_unit_to_json(finding.measured_value),
        "threshold": number_with_unit_to_json(finding.rule_threshold),
        "recoverable_ns": finding.max_recoverable_ns,
        "replayed_ns": finding.replayed_gain.map(|of| of.saved_ns_alone),
        "replayed_further_ns": finding.replayed_gain.map(|of| of.further_saved_ns),
        "evidence": finding.evidence.iter().map(evidence_to_json).collect::<Vec<_>>(),
        "advice": finding.advice,
        "false_positive": finding.false_positive_note,
    })
}

fn evidence_to_json(evidence: &FindingEvidence) -> Value {
    json!({
        "what": evidence.kernel_call_or_copy_name,
        "count": evidence.covered_count,
        "total_ns": evidence.total_duration_ns,
        "range": evidence.innermost_common_range_path,
        "span": time_span_to_json(evidence.longest_instance_start_and_end_ns),
        "process": evidence.process_id_and_device.map(|(pid, _)| pid),
        "device": evidence.process_id_and_device.map(|(_, device)| device),
    })
}

fn kernel_time_share_to_json(kernel: &KernelWithTimeShare) -> Value {
    json!({
        "name": kernel.kernel_name,
        "kind": kernel.class.printed_work_class_label(),
        "share": kernel.share_of_kernel_time,
        "times_ns": value_summary_to_json(&kernel.launch_time_summary),
    })
}

fn run_component_to_json(component: &RangePathHostAndKernelTimes) -> Value {
    json!({
        "range": component.range_path,
        "depth": component.enclosing_range_count,
        "host_ns": value_summary_to_json(&component.host_times),
        "kernels": component.kernel_count,
        "kernel_ns": component.kernel_ns,
        "share": component.share_of_kernel_time,
        "variation": component.coefficient_of_variation_of_host_time(),
    })
}

fn value_summary_to_json(summary: &ValueSummary) -> Value {
    json!({
        "count": summary.value_count,
        "total": summary.total,
        "mean": summary.mean,
        "median": summary.median,
        "min": summary.min,
        "max": summary.max,
        "deviation": summary.standard_deviation,
    })
}

fn number_with_unit_to_json(measure: MeasuredNumberWithUnit) -> Value {
    json!({ "value": measure.number_in_unit, "unit": measure.unit })
}

fn time_span_to_json(span: Option<(i64, i64)>) -> Value {
    span.map_or(Value::Null, |(start, end)| json!({ "start": start, "end": end }))
}
