//! Faults of the program that a trace shows, with evidence; doubts about the trace come first.
//!
//! A rule answers a question: it compares a value with a threshold and names the kernels, the range
//! and the time that show it. A rule says how much it could inspect; where that is too little it
//! cannot answer, and says how to record the rest. `difference` compares two traces. Absent: the
//! meaning of ranges and rules for a workload.

mod account;
mod answers;
pub mod checklist;
mod context;
mod critical;
mod device_memory;
pub mod difference;
mod finding;
mod host;
mod json;
mod labels;
pub mod network;
mod platform;
mod profiled;
pub mod ranks;
mod rules;
mod text;
mod tree;
mod utilization;

pub use crate::analyze::work::kernel_kinds::KernelClass;
pub use account::{Account, DeviceAccount, Iteration, Iterations, RangeAccount, Transfer};
pub use answers::{Answers, Component, KernelShare};
pub use critical::gains::{CriticalPath, Faster, Gain};
pub use device_memory::{MemoryPhase, MemoryUse};
pub use finding::{
    Answer, Confidence, DeviceUse, Diagnosis, Evidence, Finding, FusedKernel, Inspected, Measure,
    Question, Remedy, ReplayedGain, Severity, ShorterKernels, Unit,
};
pub use host::cause::CauseKind;
pub use host::gaps::{Cause, GapClass, GapReport, Transition};
pub use labels::short_name;
pub use rules::reference::RuleEntry;
pub use rules::rule_entries;
pub use tree::{Bound, RangeUse};

use std::path::Path;

use context::Context;
use host::HostPass;

use crate::error::TraceError;
use crate::model::Trace;
use crate::read::{self, Streamed, Wanted};

/// A trace whose operations, calls and ranges were joined, for several questions.
pub struct Joined<'a>(Context<'a>);

impl<'a> Joined<'a> {
    /// Joins a trace.
    pub fn new(trace: &'a Trace) -> Self {
        Self(Context::new(trace, true))
    }

    /// The device's work in each range, outer ranges before those inside. Ranges that differ in
    /// numbers only are one, but for those of these names.
    pub fn range_tree(&self, apart: &[&str]) -> Vec<RangeUse> {
        tree::range_tree(&self.0, apart)
    }

    /// Diagnoses the job.
    pub fn diagnosis(&self) -> Diagnosis {
        rules::apply(&self.0)
    }
}

/// Diagnoses a trace.
pub fn diagnose(trace: &Trace) -> Diagnosis {
    // The rule about declared work asks for the tree of ranges, utilization for operators.
    let keep_ranges = !trace.work.is_empty() || !trace.ranges.inputs.is_empty();
    rules::apply(&Context::new(trace, keep_ranges))
}

/// Diagnoses an export of any length: ranges and calls are summed while they are read, and not
/// kept. `None` for files of other formats than an export or report of Nsight
/// Systems.
///
/// # Errors
/// Same errors as [`read::open`].
pub fn diagnose_streamed(path: &Path) -> Result<Option<Diagnosis>, TraceError> {
    with_streamed_context(path, rules::apply)
}

/// A result of an export whose ranges and calls are read once.
fn with_streamed_context<T>(
    path: &Path,
    of: impl FnOnce(&Context<'_>) -> T,
) -> Result<Option<T>, TraceError> {
    let mut pass = HostPass::default();
    let columns = Wanted { few_names: true, ..Wanted::ALL };
    let streamed = read::stream(path, &columns, |trace, row| pass.add(trace, row))?;
    Ok(streamed.map(|Streamed { mut trace, names, last }| {
        let host = pass.finish(&trace, |label| names[label.0 as usize], last);
        trace.forget_correlations();
        of(&Context::joined(&trace, host))
    }))
}
