//! Results of rules.

use super::super::finding::{
    Confidence, Evidence, Finding, Inspected, Measure, QUALITY, Remedy, Severity, Unit,
};

/// The result of a rule.
pub(super) enum Outcome {
    /// The findings, and how much the rule could inspect.
    Checked(Vec<Finding>, Inspected),
    /// The rule could inspect nothing.
    Lacks(Lack),
}

/// Data that a rule lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Lack {
    /// The missing data.
    pub reason: String,
    /// How to get the missing data.
    pub record: String,
}

impl Lack {
    pub fn new(reason: impl Into<String>, record: impl Into<String>) -> Self {
        Self { reason: reason.into(), record: record.into() }
    }

    /// A reason to skip a rule that no recording can change, because the program has no such work.
    pub fn absent(reason: impl Into<String>) -> Self {
        Self::new(reason, "")
    }
}

impl From<Lack> for Outcome {
    fn from(lack: Lack) -> Self {
        Self::Lacks(lack)
    }
}

/// An inspection of all records, given their number.
pub(super) fn all_of(count: usize, unit: Unit) -> Inspected {
    some_of(count, count, unit)
}

/// An inspection of some of the records.
pub(super) fn some_of(seen: usize, whole: usize, unit: Unit) -> Inspected {
    let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    Inspected { seen: number(seen), whole: number(whole), unit, missing: None }
}

/// A finding about the trace itself.
pub(super) fn doubt(
    severity: Severity,
    title: String,
    measured: Measure,
    advice: impl Into<String>,
    false_positive: &'static str,
) -> Finding {
    Finding {
        id: QUALITY,
        severity,
        confidence: Confidence::High,
        title,
        measured,
        threshold: Measure { value: 0.0, unit: measured.unit },
        recoverable_ns: None,
        remedy: Remedy::NotReplayed,
        replayed: None,
        evidence: Vec::new(),
        advice: advice.into(),
        false_positive,
    }
}

/// A part of a whole in percent.
#[allow(clippy::cast_precision_loss)]
pub(super) fn percent(part: i64, whole: i64) -> f64 {
    if whole <= 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 }
}

/// `1 gap`, `2 gaps`.
pub(super) fn counted(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

#[allow(clippy::cast_precision_loss)]
pub(super) fn number(count: usize, unit: &'static str) -> Measure {
    Measure { value: count as f64, unit }
}

#[allow(clippy::cast_precision_loss)]
pub(super) fn milliseconds(ns: i64) -> Measure {
    Measure { value: ns as f64 / 1e6, unit: "ms" }
}

/// Evidence of operations that share a name, the most expensive first, at most this many.
pub(super) const EVIDENCE: usize = 5;

pub(super) fn most_expensive(mut evidence: Vec<Evidence>) -> Vec<Evidence> {
    evidence.sort_by(|a, b| {
        b.total_ns
            .cmp(&a.total_ns)
            .then_with(|| a.what.cmp(&b.what))
            .then_with(|| a.span.cmp(&b.span))
    });
    evidence.truncate(EVIDENCE);
    evidence
}
