//! What rules give, and how they say it.

use super::super::finding::{Evidence, Finding, Measure};

/// What applying a rule gives.
pub(super) enum Outcome {
    /// What it found, or nothing.
    Found(Vec<Finding>),
    /// It lacks data: what, and how to get it.
    Skipped(String),
}

/// A part of a whole in percent.
#[allow(clippy::cast_precision_loss)]
pub(super) fn percent(part: i64, whole: i64) -> f64 {
    if whole <= 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 }
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
