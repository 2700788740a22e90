//! Formats the diagnosis of a trace as JSON for other programs. Times in the JSON are nanoseconds
//! of the trace's clock.

use hashbrown::HashMap;
use serde_json::{Value, json};

use super::answers::{
    KernelTimeAnswers, KernelWithTimeShare, RunComponentByRangePath, USUAL_ATTENTION_HEAD_SIZES,
};
use super::critical::gains::CriticalPathAndGains;
use super::device_memory::ProcessMemoryOnGpu;
use super::finding::{
    DiagnosisFinding, FindingEvidence, GpuUseOfProcess, MeasuredNumberWithUnit, QuestionWithAnswer,
    RuleAnswer, TraceDiagnosis,
};
use super::host::gpu_gaps::GapsOfLengthClass;
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
            .classes
            .iter()
            .map(|(class, ns, count)| {
                json!({ "kind": class.printed_work_class_label(), "total_ns": ns, "launches": count })
            })
            .collect();
        let skipped = self.questions.iter();
        let skipped: Vec<Value> = skipped
            .filter_map(|of| Some(json!({ "rule": of.id, "reason": of.reason_without_answer()? })))
            .collect();
        let passed =
            self.questions.iter().map(|of| of.id).filter(|id| self.has_rule_found_nothing(id));
        json!({
            "schema_version": DIAGNOSIS_JSON_SCHEMA_VERSION,
            "recorder": self.recorder,
            "records": records,
            "devices": self.devices.iter().map(gpu_use_to_json).collect::<Vec<_>>(),
            "time": self.devices.iter().map(|of| of.account.iterations_to_json()).collect::<Vec<_>>(),
            "critical_path": critical_path_to_json(&self.critical_path),
            "data_quality": findings_to_json_with_keys(&self.quality),
            "findings": findings_to_json_with_keys(&self.findings),
            "questions": self.questions.iter().map(question_to_json).collect::<Vec<_>>(),
            "skipped": skipped,
            "passed": passed.collect::<Vec<_>>(),
            "kernel_ns": self.answers.kernel_ns,
            "top_kernels": self.answers.top_kernels.iter().map(kernel_time_share_to_json).collect::<Vec<_>>(),
            "kernel_kinds": classes,
            "softmax_to_matmul": self.answers.softmax_time_by_matmul_time(),
            "softmax_to_matmul_flops": USUAL_ATTENTION_HEAD_SIZES
                .map(|head| (head.to_string(), KernelTimeAnswers::softmax_flops_by_matmul_flops(head)))
                .into_iter()
                .collect::<std::collections::BTreeMap<_, _>>(),
            "device_memory": self.memory.iter().map(device_memory_to_json).collect::<Vec<_>>(),
            "utilization": self.utilization.to_utilization_json(),
            "network": self.network.as_ref().map(PhasesOfNetwork::network_phases_to_json),
            "components": self.answers.components.iter().map(run_component_to_json).collect::<Vec<_>>(),
        })
    }
}

impl RangeTreeRow {
    /// Converts this value to JSON.
    pub fn range_tree_node_to_json(&self) -> Value {
        let limits = self.of_limits.iter();
        let limits: Vec<Value> =
            limits.map(|(by, reached)| json!({ "by": by, "reached": reached })).collect();
        json!({
            "path": self.path,
            "depth": self.depth,
            "times": self.opened_count,
            "host_ns": self.host_ns,
            "span_ns": self.span_ns,
            "busy_ns": self.busy_ns,
            "own_ns": self.own_ns,
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
                "phase": phase.name,
                "times": phase.range_count,
                "peak_bytes": phase.peak_bytes,
                "change_bytes": phase.change_bytes,
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
        "device": of.device,
        "peak_bytes": of.peak_time_and_bytes.1,
        "peak_ns": of.peak_time_and_bytes.0,
        "end_bytes": of.bytes_held_at_end_of_trace(),
        "allocations": of.allocation_count,
        "given_back": of.free_count,
        "given_back_unknown": of.frees_without_allocation,
        "phases": phases,
        "over_time": over_time,
    })
}

fn gpu_use_to_json(device: &GpuUseOfProcess) -> Value {
    let gaps = &device.gaps;
    let class =
        |class: GapsOfLengthClass| json!({ "count": class.gap_count, "total_ns": class.total_ns });
    let causes: Vec<Value> = gaps
        .idle_time_by_cause
        .iter()
        .map(|cause| {
            json!({
                "key": cause.kind.idle_cause_json_key(),
                "cause": cause.kind.printed_idle_cause(),
                "function": cause.function,
                "count": cause.gap_count,
                "total_ns": cause.total_ns,
                "longest_ns": cause.longest_ns,
                "longest": time_span_to_json(Some(cause.longest_start_and_end_ns)),
            })
        })
        .collect();
    let transitions: Vec<Value> = gaps
        .transitions
        .iter()
        .map(|transition| {
            json!({
                "before": transition.operation_before,
                "after": transition.operation_after,
                "range": transition.range,
                "count": transition.gap_count,
                "total_ns": transition.total_ns,
                "longest": time_span_to_json(Some(transition.longest_gap_start_and_end_ns)),
            })
        })
        .collect();
    json!({
        "key": format!("{}:{}", device.pid, device.device),
        "process": device.pid,
        "device": device.device,
        "name": device.name,
        "span": time_span_to_json(Some(device.first_start_and_last_end_ns)),
        "busy_ns": device.busy_ns,
        "operations": device.operations,
        "gaps": {
            "normal": class(gaps.gaps_below_20_us),
            "warning": class(gaps.gaps_of_20_to_50_us),
            "severe": class(gaps.gaps_above_50_us),
            "mean_ns": gaps.mean_length_of_gaps_ns(),
            "longest_ns": gaps.longest_ns,
            "causes": causes,
            "transitions": transitions,
        },
    })
}

/// Converts a question with its answer, which is "yes", "no" or "cannot answer".
fn question_to_json(question: &QuestionWithAnswer) -> Value {
    let (answer, findings, inspected) = match &question.answer {
        RuleAnswer::Yes { findings, inspected } => ("yes", *findings, Some(inspected)),
        RuleAnswer::No { inspected } => ("no", 0, Some(inspected)),
        RuleAnswer::CannotAnswer { inspected, .. } => ("cannot answer", 0, inspected.as_ref()),
    };
    let (reason, record) = match &question.answer {
        RuleAnswer::CannotAnswer { reason, record, .. } => {
            (Some(reason), Some(record).filter(|record| !record.is_empty()))
        }
        _ => (None, None),
    };
    json!({
        "id": question.id,
        "question": question.question_text,
        "answer": answer,
        "findings": findings,
        "inspected": inspected.map(|of| json!({
            "seen": of.inspected_amount,
            "whole": of.whole_amount,
            "unit": of.unit.record_kind_json_key(),
            "share": of.inspected_share_of_records(),
            "missing": of.reason_for_missing_records,
        })),
        "reason": reason,
        "record": record,
    })
}

/// Converts the critical path (the longest chain of dependent operations), with its segments and
/// the gains of changes.
fn critical_path_to_json(path: &CriticalPathAndGains) -> Value {
    let segments = path.segments.iter().map(|(kind, ns)| json!({ "kind": kind, "total_ns": ns }));
    let gains = path.gains.iter().map(|of| {
        json!({
            "change": of.change.printed_speedup_label(),
            "removed_ns": of.operation_ns_removed_by_change,
            "gain_ns": of.gain_ns,
        })
    });
    json!({
        "total_ns": path.total_ns,
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
        format!("{}{device}", of.id)
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
        "id": finding.id,
        "severity": finding.severity.printed_severity_label(),
        "confidence": finding.confidence.printed_confidence_label(),
        "title": finding.finding_title,
        "measured": number_with_unit_to_json(finding.measured_value),
        "threshold": number_with_unit_to_json(finding.threshold),
        "recoverable_ns": finding.recoverable_ns,
        "replayed_ns": finding.replayed_gain.map(|of| of.alone_ns),
        "replayed_further_ns": finding.replayed_gain.map(|of| of.further_ns),
        "evidence": finding.evidence.iter().map(evidence_to_json).collect::<Vec<_>>(),
        "advice": finding.advice,
        "false_positive": finding.false_positive_note,
    })
}

fn evidence_to_json(evidence: &FindingEvidence) -> Value {
    json!({
        "what": evidence.kernel_call_or_copy_name,
        "count": evidence.count,
        "total_ns": evidence.total_ns,
        "range": evidence.range,
        "span": time_span_to_json(evidence.longest_start_and_end_ns),
        "process": evidence.process_id_and_device.map(|(pid, _)| pid),
        "device": evidence.process_id_and_device.map(|(_, device)| device),
    })
}

fn kernel_time_share_to_json(kernel: &KernelWithTimeShare) -> Value {
    json!({
        "name": kernel.name,
        "kind": kernel.class.printed_work_class_label(),
        "share": kernel.share_of_kernel_time,
        "times_ns": value_summary_to_json(&kernel.summary),
    })
}

fn run_component_to_json(component: &RunComponentByRangePath) -> Value {
    json!({
        "range": component.path,
        "depth": component.depth,
        "host_ns": value_summary_to_json(&component.host_times),
        "kernels": component.kernels,
        "kernel_ns": component.kernel_ns,
        "share": component.share_of_kernel_time,
        "variation": component.coefficient_of_variation_of_host_time(),
    })
}

fn value_summary_to_json(summary: &ValueSummary) -> Value {
    json!({
        "count": summary.count,
        "total": summary.total,
        "mean": summary.mean,
        "median": summary.median,
        "min": summary.min,
        "max": summary.max,
        "deviation": summary.deviation,
    })
}

fn number_with_unit_to_json(measure: MeasuredNumberWithUnit) -> Value {
    json!({ "value": measure.value, "unit": measure.unit })
}

fn time_span_to_json(span: Option<(i64, i64)>) -> Value {
    span.map_or(Value::Null, |(start, end)| json!({ "start": start, "end": end }))
}
