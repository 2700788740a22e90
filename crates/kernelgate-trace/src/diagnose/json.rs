//! Formats a diagnosis as JSON, for programs. Times are nanoseconds of the trace's clock.

use hashbrown::HashMap;
use serde_json::{Value, json};

use super::answers::{HEAD_SIZES, KernelTimeShare, RunComponent, TraceAnswers};
use super::critical::gains::CriticalPath;
use super::device_memory::MemoryUse;
use super::finding::{
    DiagnosisFinding, DiagnosisQuestion, FindingEvidence, NumberWithUnit, ProcessDeviceUse,
    QuestionAnswer, TraceDiagnosis,
};
use super::host::gpu_gaps::GapLengthClass;
use super::network::NetworkPhases;
use super::range_tree::RangeTreeNode;
use crate::stats::ValueSummary;

/// Version of the JSON format; it is raised when a field changes its meaning. The schema of the
/// format is `schema/diagnosis.json` of this crate. Version 2: a list for doubts about the data,
/// questions with their answers, gaps split at the launch.
pub const DIAGNOSIS_JSON_SCHEMA: u32 = 2;

impl TraceDiagnosis {
    /// Converts the diagnosis to JSON, with `schema_version`.
    pub fn to_json(&self) -> Value {
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
                json!({ "kind": class.label(), "total_ns": ns, "launches": count })
            })
            .collect();
        let skipped = self.questions.iter();
        let skipped: Vec<Value> = skipped
            .filter_map(|of| Some(json!({ "rule": of.id, "reason": of.missing_data_reason()? })))
            .collect();
        let passed = self.questions.iter().map(|of| of.id).filter(|id| self.has_rule_passed(id));
        json!({
            "schema_version": DIAGNOSIS_JSON_SCHEMA,
            "recorder": self.recorder,
            "records": records,
            "devices": self.devices.iter().map(device_json).collect::<Vec<_>>(),
            "time": self.devices.iter().map(|of| of.account.to_json()).collect::<Vec<_>>(),
            "critical_path": critical_path_json(&self.critical_path),
            "data_quality": finding_list_json(&self.quality),
            "findings": finding_list_json(&self.findings),
            "questions": self.questions.iter().map(question_json).collect::<Vec<_>>(),
            "skipped": skipped,
            "passed": passed.collect::<Vec<_>>(),
            "kernel_ns": self.answers.kernel_ns,
            "top_kernels": self.answers.top_kernels.iter().map(kernel_json).collect::<Vec<_>>(),
            "kernel_kinds": classes,
            "softmax_to_matmul": self.answers.softmax_over_matmul_time(),
            "softmax_to_matmul_flops": HEAD_SIZES
                .map(|head| (head.to_string(), TraceAnswers::softmax_to_matmul_flops(head)))
                .into_iter()
                .collect::<std::collections::BTreeMap<_, _>>(),
            "device_memory": self.memory.iter().map(memory_json).collect::<Vec<_>>(),
            "utilization": self.utilization.to_json(),
            "network": self.network.as_ref().map(NetworkPhases::to_json),
            "components": self.answers.components.iter().map(component_json).collect::<Vec<_>>(),
        })
    }
}

impl RangeTreeNode {
    /// Converts to JSON.
    pub fn to_json(&self) -> Value {
        let limits = self.of_limits.iter();
        let limits: Vec<Value> =
            limits.map(|(by, reached)| json!({ "by": by, "reached": reached })).collect();
        json!({
            "path": self.path,
            "depth": self.depth,
            "times": self.times,
            "host_ns": self.host_ns,
            "span_ns": self.span_ns,
            "busy_ns": self.busy_ns,
            "own_ns": self.own_ns,
            "share": self.share,
            "operations": self.operations,
            "bound": self.bound.label(),
            "of_limits": limits,
        })
    }
}

/// Points of memory over time that are written.
const MAX_MEMORY_POINTS: usize = 1000;

fn memory_json(of: &MemoryUse) -> Value {
    let phases: Vec<Value> = of
        .phases
        .iter()
        .map(|phase| {
            json!({
                "phase": phase.name,
                "times": phase.times,
                "peak_bytes": phase.peak_bytes,
                "change_bytes": phase.change_bytes,
            })
        })
        .collect();
    let over_time: Vec<Value> = of
        .bytes_over_time(MAX_MEMORY_POINTS)
        .into_iter()
        .map(|(time_ns, bytes)| json!({ "time_ns": time_ns, "bytes": bytes }))
        .collect();
    json!({
        "process": of.pid,
        "device": of.device,
        "peak_bytes": of.peak.1,
        "peak_ns": of.peak.0,
        "end_bytes": of.bytes_at_end(),
        "allocations": of.taken,
        "given_back": of.given_back,
        "given_back_unknown": of.unknown,
        "phases": phases,
        "over_time": over_time,
    })
}

fn device_json(device: &ProcessDeviceUse) -> Value {
    let gaps = &device.gaps;
    let class = |class: GapLengthClass| json!({ "count": class.count, "total_ns": class.total_ns });
    let causes: Vec<Value> = gaps
        .causes
        .iter()
        .map(|cause| {
            json!({
                "key": cause.kind.json_key(),
                "cause": cause.kind.label(),
                "function": cause.function,
                "count": cause.count,
                "total_ns": cause.total_ns,
                "longest_ns": cause.longest_ns,
                "longest": span_json(Some(cause.longest)),
            })
        })
        .collect();
    let transitions: Vec<Value> = gaps
        .transitions
        .iter()
        .map(|transition| {
            json!({
                "before": transition.before,
                "after": transition.after,
                "range": transition.range,
                "count": transition.count,
                "total_ns": transition.total_ns,
                "longest": span_json(Some(transition.longest)),
            })
        })
        .collect();
    json!({
        "key": format!("{}:{}", device.pid, device.device),
        "process": device.pid,
        "device": device.device,
        "name": device.name,
        "span": span_json(Some(device.span)),
        "busy_ns": device.busy_ns,
        "operations": device.operations,
        "gaps": {
            "normal": class(gaps.normal),
            "warning": class(gaps.warning),
            "severe": class(gaps.severe),
            "mean_ns": gaps.mean_gap_ns(),
            "longest_ns": gaps.longest_ns,
            "causes": causes,
            "transitions": transitions,
        },
    })
}

/// Every question has an answer: "yes", "no" or "cannot answer".
fn question_json(question: &DiagnosisQuestion) -> Value {
    let (answer, findings, inspected) = match &question.answer {
        QuestionAnswer::Yes { findings, inspected } => ("yes", *findings, Some(inspected)),
        QuestionAnswer::No { inspected } => ("no", 0, Some(inspected)),
        QuestionAnswer::CannotAnswer { inspected, .. } => ("cannot answer", 0, inspected.as_ref()),
    };
    let (reason, record) = match &question.answer {
        QuestionAnswer::CannotAnswer { reason, record, .. } => {
            (Some(reason), Some(record).filter(|record| !record.is_empty()))
        }
        _ => (None, None),
    };
    json!({
        "id": question.id,
        "question": question.text,
        "answer": answer,
        "findings": findings,
        "inspected": inspected.map(|of| json!({
            "seen": of.seen,
            "whole": of.whole,
            "unit": of.unit.json_key(),
            "share": of.inspected_share(),
            "missing": of.missing,
        })),
        "reason": reason,
        "record": record,
    })
}

/// The longest chain of dependent operations, with its segments and gains.
fn critical_path_json(path: &CriticalPath) -> Value {
    let segments = path.segments.iter().map(|(kind, ns)| json!({ "kind": kind, "total_ns": ns }));
    let gains = path.gains.iter().map(|of| {
        json!({
            "change": of.change.label(),
            "removed_ns": of.removed_ns,
            "gain_ns": of.gain_ns,
        })
    });
    json!({
        "total_ns": path.total_ns,
        "segments": segments.collect::<Vec<_>>(),
        "gains": gains.collect::<Vec<_>>(),
    })
}

/// Findings, each with a key that the same finding of another recording has.
fn finding_list_json(all: &[DiagnosisFinding]) -> Vec<Value> {
    let mut known: HashMap<String, usize> = HashMap::new();
    let key = |of: &DiagnosisFinding| {
        let device = of.evidence.first().and_then(|evidence| evidence.place);
        let device = device.map_or(String::new(), |(_, device)| format!(":{device}"));
        format!("{}{device}", of.id)
    };
    let mut row = |of: &DiagnosisFinding| {
        let key = key(of);
        let before = known.entry(key.clone()).or_default();
        *before += 1;
        let key = if *before > 1 { format!("{key}#{before}") } else { key };
        finding_json(of, &key)
    };
    all.iter().map(&mut row).collect()
}

fn finding_json(finding: &DiagnosisFinding, key: &str) -> Value {
    json!({
        "key": key,
        "id": finding.id,
        "severity": finding.severity.label(),
        "confidence": finding.confidence.label(),
        "title": finding.title,
        "measured": number_json(finding.measured),
        "threshold": number_json(finding.threshold),
        "recoverable_ns": finding.recoverable_ns,
        "replayed_ns": finding.replayed.map(|of| of.alone_ns),
        "replayed_further_ns": finding.replayed.map(|of| of.further_ns),
        "evidence": finding.evidence.iter().map(evidence_json).collect::<Vec<_>>(),
        "advice": finding.advice,
        "false_positive": finding.false_positive,
    })
}

fn evidence_json(evidence: &FindingEvidence) -> Value {
    json!({
        "what": evidence.what,
        "count": evidence.count,
        "total_ns": evidence.total_ns,
        "range": evidence.range,
        "span": span_json(evidence.span),
        "process": evidence.place.map(|(pid, _)| pid),
        "device": evidence.place.map(|(_, device)| device),
    })
}

fn kernel_json(kernel: &KernelTimeShare) -> Value {
    json!({
        "name": kernel.name,
        "kind": kernel.class.label(),
        "share": kernel.share,
        "times_ns": summary_json(&kernel.summary),
    })
}

fn component_json(component: &RunComponent) -> Value {
    json!({
        "range": component.path,
        "depth": component.depth,
        "host_ns": summary_json(&component.host),
        "kernels": component.kernels,
        "kernel_ns": component.kernel_ns,
        "share": component.share,
        "variation": component.host_time_variation(),
    })
}

fn summary_json(summary: &ValueSummary) -> Value {
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

fn number_json(measure: NumberWithUnit) -> Value {
    json!({ "value": measure.value, "unit": measure.unit })
}

fn span_json(span: Option<(i64, i64)>) -> Value {
    span.map_or(Value::Null, |(start, end)| json!({ "start": start, "end": end }))
}
