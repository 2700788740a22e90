//! Data about a trace that all diagnosis rules need, computed once.

use crate::analyze::classes::{
    CommunicationLibraryAndCollective, OperationClass, OperationClassesOfTrace,
};
use crate::analyze::launches::calls::OperationLaunchCall;
use crate::analyze::operations::{AllGpuOperations, GpuOperationId};
use crate::analyze::ranges::paths::{ROOT_RANGE_PATH, RangePathId};
use crate::analyze::timeline::idle_time::{GpuIdleGap, ProcessActivityOnGpu};
use crate::model::Trace;
use crate::model::interned_names::{InternedNameId, replace_digits_by_number_sign};
use crate::read;

use super::host::gap_cause::{IdleCauseAndBlamedName, IdleCauseKind, MAX_USUAL_START_LATENCY_NS};
use super::host::{HostSummaryOfTrace, HostSummaryPass};
use super::vendor_names::TraceVendorAndRecorder;

/// A trace with its launches, ranges, operation classes and activities, on which diagnosis rules
/// work.
pub struct DiagnosisContext<'a> {
    /// The trace; it may lack ranges and calls, which were then read without being kept.
    pub trace: &'a Trace,
    /// All GPU operations of the trace, numbered in one sequence.
    pub operations: AllGpuOperations<'a>,
    /// The class of each GPU operation, such as compute, communication or copy.
    pub classes: OperationClassesOfTrace<'a>,
    /// Activity (busy and idle time) of each process on each GPU.
    pub activities: Vec<ProcessActivityOnGpu>,
    /// Calls, ranges and waits of the host in the trace.
    pub host_summary: HostSummaryOfTrace,
    /// GPU vendor and recorder of the trace, for advice.
    pub platform: TraceVendorAndRecorder,
    /// For each place (process, GPU and stream), the start of the first operation whose launch was
    /// recorded. Operations of the stream before that time were launched before the recording
    /// began.
    first_launched_start_ns_by_stream: Vec<i64>,
}

impl<'a> DiagnosisContext<'a> {
    /// Joins a trace in memory; single ranges are kept if `keep_ranges`, for the range tree.
    pub fn join_trace_in_memory(trace: &'a Trace, keep_ranges: bool) -> Self {
        let mut pass = HostSummaryPass::prepare_host_summary_pass(keep_ranges);
        read::for_each_range_and_call_by_time(trace, |row| pass.process_next_row(trace, row));
        Self::join_trace_and_host_summary(
            trace,
            pass.finish_pass_with_range_names(trace, |label| label, i64::MAX),
        )
    }

    /// Joins a trace with the host summary of the pass that read its ranges and calls.
    pub fn join_trace_and_host_summary(
        trace: &'a Trace,
        (activities, host): (Vec<ProcessActivityOnGpu>, HostSummaryOfTrace),
    ) -> DiagnosisContext<'a> {
        let classes = classify_operations_with_mpi_ranges(trace, &host);
        let (all, platform) = (
            AllGpuOperations::number_operations_of_trace(trace),
            TraceVendorAndRecorder::from_names_in_trace(trace),
        );
        let mut first_launched = vec![i64::MAX; trace.places.len()];
        for id in all.all_operation_ids().filter(|&id| host.launches.has_recorded_launch_call(id)) {
            let first = &mut first_launched[all.place_of_operation(id).0 as usize];
            *first = all.operation_start_ns(id).min(*first);
        }
        Self {
            trace,
            operations: all,
            classes,
            activities,
            host_summary: host,
            platform,
            first_launched_start_ns_by_stream: first_launched,
        }
    }

    /// Returns the range path of an operation: the path of its launch, followed by the ranges in
    /// which its graph node was created.
    pub fn range_path_of_operation(&self, operation: GpuOperationId) -> RangePathId {
        let inside = self.host_summary.range_path_with_graph_ranges.decoded_row(operation as usize);
        inside.unwrap_or_else(|| self.host_summary.range_path_of_launch.at(operation as usize))
    }

    /// Returns the host call that launched an operation, if it was recorded.
    pub fn launch_call_of_gpu_operation(
        &self,
        operation: GpuOperationId,
    ) -> Option<OperationLaunchCall> {
        self.host_summary.launches.launch_call_of_operation(&self.operations, operation)
    }

    /// Returns the range path of an operation as text; `None` outside all ranges.
    pub fn range_path_text_of_operation(&self, operation: GpuOperationId) -> Option<String> {
        self.range_path_text_unless_root(self.range_path_of_operation(operation))
    }

    /// Returns a range path as text; `None` for the root.
    pub fn range_path_text_unless_root(&self, path: RangePathId) -> Option<String> {
        (path != ROOT_RANGE_PATH)
            .then(|| self.host_summary.paths.path_text_with_slashes(self.trace, path))
    }

    /// Returns the innermost range path that encloses both a path and the launch of an operation.
    pub fn common_path_with_operation(
        &self,
        path: RangePathId,
        operation: GpuOperationId,
    ) -> RangePathId {
        self.host_summary.paths.innermost_common_path(path, self.range_path_of_operation(operation))
    }

    /// Returns the causes of an idle gap, with the nanoseconds of each; they add up to the gap's
    /// length.
    pub fn causes_and_ns_of_idle_gap(
        &self,
        gap: &GpuIdleGap,
    ) -> impl Iterator<Item = (IdleCauseAndBlamedName, i64)> {
        let mut parts = self.host_summary.causes_of_gaps.causes_and_ns_of_gap(gap).peekable();
        let unlaunched = parts.peek().is_none().then(|| {
            let kind = match self.is_operation_page_migration(gap.operation_after_gap) {
                true => IdleCauseKind::PageMigration,
                false if self.was_operation_launched_before_recording(gap) => {
                    IdleCauseKind::UsualStartOfQueuedOperation
                }
                false => IdleCauseKind::NoLaunchCallRecorded,
            };
            ((kind, None), gap.idle_gap_length_ns())
        });
        parts.chain(unlaunched)
    }

    /// Whether the operation after a gap was launched before the recording began, and started as
    /// fast as queued work does.
    fn was_operation_launched_before_recording(&self, gap: &GpuIdleGap) -> bool {
        let first = self.first_launched_start_ns_by_stream
            [self.operations.place_of_operation(gap.operation_after_gap).0 as usize];
        first < i64::MAX
            && self.operations.operation_start_ns(gap.operation_after_gap) < first
            && gap.idle_gap_length_ns() < MAX_USUAL_START_LATENCY_NS
    }

    /// Returns whether an operation migrates pages of managed memory; no host call launches such an
    /// operation.
    pub fn is_operation_page_migration(&self, operation: GpuOperationId) -> bool {
        self.classes.class_of_gpu_operation(operation) == OperationClass::PageMigration
    }

    /// Returns the name of a CUDA function without a version suffix such as `_v3020`.
    pub fn function_name_without_version(&self, name: InternedNameId) -> &'a str {
        crate::stats::without_four_digit_version_suffix(self.trace.names.text_of_name(name))
    }

    /// Returns the name of the function responsible for idle time, or the path of the range around
    /// host code, with `#` for numbers.
    pub fn text_of_blamed_function_or_range(
        &self,
        (kind, name): IdleCauseAndBlamedName,
    ) -> Option<String> {
        name.map(|name| match kind {
            IdleCauseKind::HostCodeBeforeLaunch => {
                replace_digits_by_number_sign(self.trace.names.text_of_name(name))
            }
            _ => self.function_name_without_version(name).to_owned(),
        })
    }

    pub fn process_id_and_gpu_of_operation(&self, operation: GpuOperationId) -> (i64, u32) {
        let place = &self.trace.places[self.operations.place_of_operation(operation).0 as usize];
        (self.trace.processes[place.process_index as usize].pid, place.device)
    }
}

/// Classifies the operations of a trace; copies that were launched inside ranges of MPI calls count
/// as communication.
fn classify_operations_with_mpi_ranges<'a>(
    trace: &'a Trace,
    host: &HostSummaryOfTrace,
) -> OperationClassesOfTrace<'a> {
    let classes = OperationClassesOfTrace::classify_operations_by_name(trace);
    let paths = &host.paths;
    // A path has a larger number than its parent path, so the parent's communication is already
    // known.
    let mut by_path: Vec<Option<CommunicationLibraryAndCollective>> =
        Vec::with_capacity(paths.len());
    for path in (0..).take(paths.len()) {
        let own = || {
            CommunicationLibraryAndCollective::communication_from_mpi_range_name(
                trace.names.text_of_name(paths.last_name_of_path(path)),
            )
        };
        by_path.push(match path {
            ROOT_RANGE_PATH => None,
            _ => by_path[paths.parent_of_range_path(path) as usize].or_else(own),
        });
    }
    if trace.copies.on_gpu.has_no_operation() || by_path.iter().all(Option::is_none) {
        return classes;
    }
    classes.classify_copies_in_mpi_ranges(|copy| {
        by_path[host.range_path_of_launch.at(copy as usize) as usize]
    })
}
