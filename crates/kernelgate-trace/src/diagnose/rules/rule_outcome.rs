//! Results of rules.

use super::super::finding::{
    DATA_QUALITY_ID, DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy,
    FindingSeverity, InspectedShare, InspectedUnit, NumberWithUnit,
};
use super::super::trace_facts::DiagnosisContext;
use crate::analyze::operations::OperationId;

/// The findings of a rule and how much it could inspect, or the data that it lacks.
pub(super) type RuleResult = Result<(Vec<DiagnosisFinding>, InspectedShare), MissingData>;

/// Data that a rule needs and the trace lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MissingData {
    pub reason: String,
    /// Advice on how to record the missing data.
    pub record: String,
}

impl MissingData {
    pub fn new(reason: impl Into<String>, record: impl Into<String>) -> Self {
        Self { reason: reason.into(), record: record.into() }
    }

    /// An error unless the data was recorded.
    pub fn unless(recorded: bool, reason: impl Into<String>, record: &str) -> Result<(), Self> {
        if recorded { Ok(()) } else { Err(Self::new(reason, record)) }
    }

    /// A reason to skip a rule that no recording can change, because the program has no such work.
    pub fn no_work(reason: impl Into<String>) -> MissingData {
        Self::new(reason, "")
    }
}

/// An inspection of all records, given their number.
pub(super) fn inspected_all(count: usize, unit: InspectedUnit) -> InspectedShare {
    inspected_some(count, count, unit)
}

/// An inspection of some of the records.
pub(super) fn inspected_some(seen: usize, whole: usize, unit: InspectedUnit) -> InspectedShare {
    let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    InspectedShare { seen: number(seen), whole: number(whole), unit, missing: None }
}

/// Evidence of a single operation.
pub(super) fn operation_evidence(
    context: &DiagnosisContext<'_>,
    id: OperationId,
    what: String,
) -> FindingEvidence {
    FindingEvidence {
        what,
        count: 1,
        total_ns: Some(context.all.length(id)),
        range: context.path_of_operation(id),
        span: Some(context.all.span(id)),
        place: Some(context.process_and_device_of(id)),
    }
}

/// Makes a finding that doubts the trace itself.
pub(super) fn doubtful_trace_finding(
    severity: FindingSeverity,
    title: String,
    measured: NumberWithUnit,
    advice: impl Into<String>,
    false_positive: &'static str,
) -> DiagnosisFinding {
    DiagnosisFinding {
        id: DATA_QUALITY_ID,
        severity,
        confidence: FindingConfidence::High,
        title,
        measured,
        threshold: NumberWithUnit { value: 0.0, unit: measured.unit },
        recoverable_ns: None,
        remedy: FindingRemedy::NotReplayed,
        replayed: None,
        evidence: Vec::new(),
        advice: advice.into(),
        false_positive,
    }
}

/// A part in per cent of a whole.
#[allow(clippy::cast_precision_loss)]
pub(super) fn percent(part: i64, whole: i64) -> f64 {
    if whole <= 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 }
}

/// `1 gap`, `2 gaps`.
pub(super) fn count_with_noun(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

#[allow(clippy::cast_precision_loss)]
pub(super) fn number(count: usize, unit: &'static str) -> NumberWithUnit {
    NumberWithUnit { value: count as f64, unit }
}

#[allow(clippy::cast_precision_loss)]
pub(super) fn in_milliseconds(ns: i64) -> NumberWithUnit {
    NumberWithUnit { value: ns as f64 / 1e6, unit: "ms" }
}

/// Maximum number of lines of evidence, the most expensive operations first.
pub(super) const MAX_EVIDENCE_LINES: usize = 5;

pub(super) fn most_expensive_evidence(mut evidence: Vec<FindingEvidence>) -> Vec<FindingEvidence> {
    evidence.sort_by(|a, b| {
        b.total_ns
            .cmp(&a.total_ns)
            .then_with(|| a.what.cmp(&b.what))
            .then_with(|| a.span.cmp(&b.span))
    });
    evidence.truncate(MAX_EVIDENCE_LINES);
    evidence
}
