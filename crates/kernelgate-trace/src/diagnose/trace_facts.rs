//! Facts about a trace that all rules need, computed once.

use crate::analyze::classes::{CommunicationKind, OperationClass, OperationClasses};
use crate::analyze::launches::calls::LaunchCall;
use crate::analyze::operations::{AllOperations, OperationId};
use crate::analyze::ranges::paths::{ROOT_PATH, RangePathId};
use crate::analyze::timeline::idle_time::{DeviceActivity, IdleGap};
use crate::model::Trace;
use crate::model::interned_names::{NameId, without_numbers_in_name};
use crate::read;

use super::host::gap_cause::{CauseAndName, IdleCauseKind, MAX_START_LATENCY_NS};
use super::host::{HostActivitySummary, HostPassState};
use super::vendor_names::TracePlatform;

/// A trace with its launches, ranges, classes and activities.
pub struct DiagnosisContext<'a> {
    /// The trace. The ranges and calls of the trace may have been read without being kept.
    pub trace: &'a Trace,
    /// Operations of the trace.
    pub all: AllOperations<'a>,
    /// The class of each GPU operation.
    pub classes: OperationClasses<'a>,
    /// The activity of each process on each device.
    pub activities: Vec<DeviceActivity>,
    /// The host's part.
    pub host: HostActivitySummary,
    /// GPU vendor and recorder of the trace.
    pub platform: TracePlatform,
    /// Start of the first operation of each place whose launch was recorded. The host launched the
    /// stream's earlier operations before the recording began.
    first_launched: Vec<i64>,
}

impl<'a> DiagnosisContext<'a> {
    /// Joins a trace in memory; ranges are kept for the tree of ranges.
    pub fn new(trace: &'a Trace, keep_ranges: bool) -> Self {
        let mut pass = HostPassState::new(keep_ranges);
        read::for_each_row(trace, |row| pass.add(trace, row));
        Self::join_trace_and_host(trace, pass.finish_host_pass(trace, |label| label, i64::MAX))
    }

    /// Joins a trace with its host's part, after which it needs no correlation ids.
    pub fn join_trace_and_host(
        trace: &'a Trace,
        (activities, host): (Vec<DeviceActivity>, HostActivitySummary),
    ) -> DiagnosisContext<'a> {
        let classes = classify_operations(trace, &host);
        let (all, platform) = (AllOperations::new(trace), TracePlatform::new(trace));
        let mut first_launched = vec![i64::MAX; trace.places.len()];
        for id in all.ids().filter(|&id| host.launches.has_launch(id)) {
            let first = &mut first_launched[all.place(id).0 as usize];
            *first = all.start(id).min(*first);
        }
        Self { trace, all, classes, activities, host, platform, first_launched }
    }

    /// The range path of an operation: the innermost range around its launch, then the ranges in
    /// which its graph node was created.
    pub fn path_id_of_operation(&self, operation: OperationId) -> RangePathId {
        let inside = self.host.inside_graph.get(operation as usize);
        inside.unwrap_or_else(|| self.host.launched_in.at(operation as usize))
    }

    /// The call that launched an operation, if the call was recorded.
    pub fn launch_call(&self, operation: OperationId) -> Option<LaunchCall> {
        self.host.launches.get(&self.all, operation)
    }

    /// The path of an operation as text, if it is in a range.
    pub fn path_of_operation(&self, operation: OperationId) -> Option<String> {
        self.range_path_text(self.path_id_of_operation(operation))
    }

    /// Text of a range path; `None` for the root.
    pub fn range_path_text(&self, path: RangePathId) -> Option<String> {
        (path != ROOT_PATH).then(|| self.host.paths.text(self.trace, path))
    }

    /// The path of the innermost range that contains both an operation and everything inside a
    /// path.
    pub fn innermost_path_around(&self, path: RangePathId, operation: OperationId) -> RangePathId {
        self.host.paths.innermost_common_path(path, self.path_id_of_operation(operation))
    }

    /// The causes of a gap and the time of each; they add up to its length.
    pub fn causes_of_gap(&self, gap: &IdleGap) -> impl Iterator<Item = (CauseAndName, i64)> {
        let mut parts = self.host.idle.causes_of_gap(gap).peekable();
        let unlaunched = parts.peek().is_none().then(|| {
            let kind = match self.is_page_migration(gap.after) {
                true => IdleCauseKind::Migration,
                false if self.was_queued_before_recording(gap) => IdleCauseKind::BackToBack,
                false => IdleCauseKind::Unknown,
            };
            ((kind, None), gap.gap_ns())
        });
        parts.chain(unlaunched)
    }

    /// Whether the operation after a gap was launched before the recording began, and started as
    /// fast as queued work does.
    fn was_queued_before_recording(&self, gap: &IdleGap) -> bool {
        let first = self.first_launched[self.all.place(gap.after).0 as usize];
        first < i64::MAX && self.all.start(gap.after) < first && gap.gap_ns() < MAX_START_LATENCY_NS
    }

    /// Whether an operation migrates pages of managed memory, which no call launches.
    pub fn is_page_migration(&self, operation: OperationId) -> bool {
        self.classes.class_of_operation(operation) == OperationClass::Migration
    }

    /// The name of a function without its version.
    pub fn function_name(&self, name: NameId) -> &'a str {
        crate::stats::without_interface_version(self.trace.names.text(name))
    }

    /// The function that is to blame for idle time, or the range around host code, without numbers.
    pub fn blamed_function_or_range(&self, (kind, name): CauseAndName) -> Option<String> {
        name.map(|name| match kind {
            IdleCauseKind::HostCode => without_numbers_in_name(self.trace.names.text(name)),
            _ => self.function_name(name).to_owned(),
        })
    }

    pub fn process_and_device_of(&self, operation: OperationId) -> (i64, u32) {
        let place = &self.trace.places[self.all.place(operation).0 as usize];
        (self.trace.processes[place.process as usize].pid, place.device)
    }
}

/// The classes of operations, with copies inside ranges of MPI as communication.
fn classify_operations<'a>(trace: &'a Trace, host: &HostActivitySummary) -> OperationClasses<'a> {
    let classes = OperationClasses::new(trace);
    let paths = &host.paths;
    // A path has a larger number than its parent path.
    let mut by_path: Vec<Option<CommunicationKind>> = Vec::with_capacity(paths.len());
    for path in (0..).take(paths.len()) {
        let own = || CommunicationKind::from_range_name(trace.names.text(paths.name(path)));
        by_path.push(match path {
            ROOT_PATH => None,
            _ => by_path[paths.parent_path(path) as usize].or_else(own),
        });
    }
    if trace.copies.on_gpu.is_empty() || by_path.iter().all(Option::is_none) {
        return classes;
    }
    classes.with_mpi_ranges(|copy| by_path[host.launched_in.at(copy as usize) as usize])
}
