//! Diagnoses a recorded trace: rules find faults of the traced program, with evidence; doubts about
//! the trace's data come first.
//!
//! Each diagnosis rule answers a question: it compares a measured value with a threshold, and names
//! kernels, range and time as evidence. A diagnosis rule states how many records it could inspect;
//! with too few records it gives no answer, and says how to record more. The module `difference`
//! compares two diagnosed traces. The diagnosis does not know what the ranges and rules mean for a
//! particular workload.

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

pub use crate::analyze::work::kernel_kinds::KernelWorkClass;
pub use account::{
    GpuTimeAccount, GpuTimeAccountOfRange, IterationOnGpu, IterationsOnGpu,
    ProcessTimeAccountOnGpu, TransfersOfOneKind,
};
pub use answers::{KernelTimeAnswers, KernelWithTimeShare, RangePathHostAndKernelTimes};
pub use critical::gains::{CriticalPathAndGains, HypotheticalSpeedup, SpeedupWithGain};
pub use device_memory::{DeviceMemoryDuringPhase, ProcessMemoryOnGpu};
pub use finding::{
    DiagnosisFinding, DiagnosisRuleAnswer, FindingConfidence, FindingEvidence, FindingRemedy,
    FindingSeverity, GpuUseOfProcess, InspectedRecordKind, InspectedShareOfRecords,
    KernelOfFusibleChain, KernelsAndTimeShareAfterRemedy, MeasuredNumberWithUnit,
    QuestionWithAnswer, ReplayedGainOfRemedy, TraceDiagnosis,
};
pub use host::gap_cause::IdleCauseKind;
pub use host::gpu_gaps::{
    GapsBetweenTwoOperations, IdleGapsOfLengthClass, IdleGapsOfProcessOnGpu, IdleTimeOfCause,
};
pub use labels::shortened_kernel_name_for_readers;
pub use range_tree::{RangeTreeRow, TimeBoundOfRange};
pub use rules::reference_entries_of_all_rules;
pub use rules::rule_list::RuleReferenceEntry;

use std::path::Path;

use host::HostSummaryPass;
use trace_facts::DiagnosisContext;

use crate::error::TraceError;
use crate::model::Trace;
use crate::read::{self, ExportWithoutStreamedRows, WantedTraceParts};

/// A trace whose operations, host calls and ranges were joined once, for several analyses.
pub struct TraceJoinedForAnalyses<'a>(DiagnosisContext<'a>);

impl<'a> TraceJoinedForAnalyses<'a> {
    /// Joins a trace.
    pub fn join_trace(trace: &'a Trace) -> Self {
        Self(DiagnosisContext::join_trace_in_memory(trace, true))
    }

    /// Returns the GPU work in the ranges of the trace as a tree in a list, each range before the
    /// ranges inside it. Ranges whose names differ only in numbers are merged, except ranges whose
    /// names are in `names_not_merged`.
    pub fn gpu_work_by_range_tree(&self, apart: &[&str]) -> Vec<RangeTreeRow> {
        range_tree::build_tree_of_gpu_work_by_range(&self.0, apart)
    }

    /// Diagnoses the job.
    pub fn diagnose_joined_trace(&self) -> TraceDiagnosis {
        rules::apply_all_rules_to_trace(&self.0)
    }
}

/// Diagnoses a trace.
pub fn diagnose_trace_in_memory(trace: &Trace) -> TraceDiagnosis {
    // Single ranges are kept for the rule about declared work, and for the peak use of operators.
    let keep_ranges =
        !trace.declared_work.is_empty() || !trace.ranges.operator_inputs_number.is_empty();
    rules::apply_all_rules_to_trace(&DiagnosisContext::join_trace_in_memory(trace, keep_ranges))
}

/// Diagnoses an Nsight Systems export of any length: its ranges and calls are summed while they are
/// read, and are not kept in memory. Returns `None` if the file is not an export or report of
/// Nsight Systems.
pub fn diagnose_export_while_reading(path: &Path) -> Result<Option<TraceDiagnosis>, TraceError> {
    with_context_of_streamed_export(path, rules::apply_all_rules_to_trace)
}

/// Reads ranges and calls of an export once, and passes the resulting diagnosis context to the
/// function `of`, whose result is returned.
fn with_context_of_streamed_export<T>(
    path: &Path,
    of: impl FnOnce(&DiagnosisContext<'_>) -> T,
) -> Result<Option<T>, TraceError> {
    let mut pass = HostSummaryPass::default();
    let columns = WantedTraceParts { may_remove_digits_from_names: true, ..WantedTraceParts::ALL };
    let streamed = read::stream_ranges_and_calls(path, &columns, |trace, row| {
        pass.process_next_row(trace, row)
    })?;
    Ok(streamed.map(
        |ExportWithoutStreamedRows {
             mut trace,
             name_by_range_name_index: names,
             trace_end_ns: last,
         }| {
            let host =
                pass.finish_pass_with_range_names(&trace, |label| names[label.0 as usize], last);
            trace.free_correlation_columns();
            of(&DiagnosisContext::join_trace_and_host_summary(&trace, host))
        },
    ))
}
