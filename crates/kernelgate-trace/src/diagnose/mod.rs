//! Faults of the program that a trace shows, with evidence; doubts about the trace come first.
//!
//! Each rule answers a question: it compares a value with a threshold, and names the kernels, the
//! range and the time as evidence. A rule states how many records it could inspect; with too few
//! records it gives no answer, and states how to record more. `difference` compares two traces.
//! Absent: the meaning of ranges and rules for a workload.

mod account;
mod answers;
pub mod checklist;
mod critical;
mod device_memory;
pub mod difference;
mod finding;
mod host;
mod json;
mod labels;
mod ncu_launches;
pub mod network;
mod range_tree;
pub mod ranks;
mod rules;
mod text;
mod trace_facts;
mod utilization;
mod vendor_names;

pub use crate::analyze::work::kernel_kinds::KernelClass;
pub use account::{
    DeviceIteration, DeviceIterations, DeviceTimeAccount, RangeTimeAccount, TimeAccount,
    TransferSum,
};
pub use answers::{KernelTimeShare, RunComponent, TraceAnswers};
pub use critical::gains::{ChangeGain, CriticalPath, FasterPart};
pub use device_memory::{MemoryUse, OutermostRangeMemory};
pub use finding::{
    DiagnosisFinding, DiagnosisQuestion, FindingConfidence, FindingEvidence, FindingRemedy,
    FindingSeverity, FusibleKernel, InspectedShare, InspectedUnit, NumberWithUnit,
    ProcessDeviceUse, QuestionAnswer, ReplayedGain, ShortenedKernels, TraceDiagnosis,
};
pub use host::gap_cause::IdleCauseKind;
pub use host::gpu_gaps::{GapLengthClass, IdleCause, IdleGapReport, OperationsAroundGap};
pub use labels::readable_name;
pub use range_tree::{RangeTreeNode, TimeBound};
pub use rules::rule_entries;
pub use rules::rule_list::RuleEntry;

use std::path::Path;

use host::HostPassState;
use trace_facts::DiagnosisContext;

use crate::error::TraceError;
use crate::model::Trace;
use crate::read::{self, StreamedRows, WantedTraceParts};

/// A trace whose operations, calls and ranges were joined, for several questions.
pub struct JoinedTrace<'a>(DiagnosisContext<'a>);

impl<'a> JoinedTrace<'a> {
    /// Joins a trace.
    pub fn new(trace: &'a Trace) -> Self {
        Self(DiagnosisContext::new(trace, true))
    }

    /// The device's work in each range, outer ranges before those inside. Ranges whose names differ
    /// only in numbers are merged, except ranges named in `apart`.
    pub fn range_tree(&self, apart: &[&str]) -> Vec<RangeTreeNode> {
        range_tree::build_range_tree(&self.0, apart)
    }

    /// Diagnoses the job.
    pub fn diagnose_whole_job(&self) -> TraceDiagnosis {
        rules::apply_all_rules(&self.0)
    }
}

/// Diagnoses a trace.
pub fn diagnose(trace: &Trace) -> TraceDiagnosis {
    // The rule about declared work asks for the tree of ranges, utilization for operators.
    let keep_ranges = !trace.work.is_empty() || !trace.ranges.inputs.is_empty();
    rules::apply_all_rules(&DiagnosisContext::new(trace, keep_ranges))
}

/// Diagnoses an export of any length: ranges and calls are summed while they are read, and not
/// kept. `None` for files of other formats than an export or report of Nsight
/// Systems.
pub fn diagnose_streamed(path: &Path) -> Result<Option<TraceDiagnosis>, TraceError> {
    with_streamed_context(path, rules::apply_all_rules)
}

/// A result of an export whose ranges and calls are read once.
fn with_streamed_context<T>(
    path: &Path,
    of: impl FnOnce(&DiagnosisContext<'_>) -> T,
) -> Result<Option<T>, TraceError> {
    let mut pass = HostPassState::default();
    let columns = WantedTraceParts { few_names: true, ..WantedTraceParts::ALL };
    let streamed = read::stream_trace_rows(path, &columns, |trace, row| pass.add(trace, row))?;
    Ok(streamed.map(|StreamedRows { mut trace, names, last }| {
        let host = pass.finish_host_pass(&trace, |label| names[label.0 as usize], last);
        trace.forget_correlations();
        of(&DiagnosisContext::join_trace_and_host(&trace, host))
    }))
}
