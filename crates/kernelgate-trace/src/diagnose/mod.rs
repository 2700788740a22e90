//! What is wrong with a trace, with evidence; data quality first.
//!
//! A rule measures a value, holds it against a threshold and says what it saw: which kernels, in
//! which range, when. A rule whose data the trace lacks is skipped, with the reason. `difference` says
//! what changed between two traces. Absent: what ranges and rules mean for a workload.

mod answers;
pub mod checklist;
mod context;
pub mod difference;
mod finding;
mod gaps;
mod json;
mod labels;
mod profiled;
mod rules;
mod text;

pub use answers::{Answers, Component, KernelClass, KernelShare};
pub use finding::{
    Confidence, DeviceUse, Diagnosis, Evidence, Finding, Measure, Severity, Skipped,
};
pub use gaps::{Cause, CauseKind, GapClass, GapReport, Transition};
pub use labels::short_name;

use crate::model::Trace;

/// Diagnoses a trace.
pub fn diagnose(trace: &Trace) -> Diagnosis {
    rules::apply(&context::Context::of(trace))
}
