//! What is wrong with a trace, with evidence; data quality first.
//!
//! A rule measures a value, holds it against a threshold and says what it saw: which kernels, in
//! which range, when. A rule whose data the trace lacks is skipped, with the reason. `difference` says
//! what changed between two traces. Absent: what ranges and rules mean for a workload.

mod answers;
pub mod checklist;
mod context;
mod device_memory;
pub mod difference;
mod finding;
mod gaps;
mod json;
mod labels;
mod profiled;
mod rules;
mod text;
mod tree;

pub use answers::{Answers, Component, KernelClass, KernelShare};
pub use device_memory::{MemoryPhase, MemoryUse};
pub use finding::{
    Confidence, DeviceUse, Diagnosis, Evidence, Finding, Measure, Severity, Skipped,
};
pub use gaps::{Cause, CauseKind, GapClass, GapReport, Transition};
pub use labels::short_name;
pub use tree::{Bound, RangeUse};

use crate::model::Trace;

/// What the device did in each range, outer ranges before those inside. Ranges that differ in
/// numbers only are one, but for those of these names.
pub fn range_tree(trace: &Trace, apart: &[&str]) -> Vec<RangeUse> {
    tree::of(&context::Context::of(trace), apart)
}

/// Diagnoses a trace.
pub fn diagnose(trace: &Trace) -> Diagnosis {
    rules::apply(&context::Context::of(trace))
}
