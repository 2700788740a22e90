//! Facts about a trace that all rules need, computed once.

use crate::analyze::classes::{Class, Classes, Communication};
use crate::analyze::launches::calls::LaunchCall;
use crate::analyze::operations::{AllOperations, OperationId};
use crate::analyze::ranges::paths::{PathId, ROOT};
use crate::analyze::timeline::idle::{Activity, Gap};
use crate::model::Trace;
use crate::model::names::{Name, without_numbers};
use crate::read;

use super::host::cause::{CauseKind, LATENCY_NS, Why};
use super::host::{Host, HostPass};
use super::platform::Platform;

/// A trace with its launches, ranges, classes and activities.
pub struct Context<'a> {
    /// The trace. Its ranges and calls may have been read without being kept.
    pub trace: &'a Trace,
    /// Operations of the trace.
    pub all: AllOperations<'a>,
    /// The class of each operation.
    pub classes: Classes<'a>,
    /// The activity of each process on each device.
    pub activities: Vec<Activity>,
    /// The host's part.
    pub host: Host,
    /// Vendor and recorder of the trace.
    pub platform: Platform,
    /// Start of the first operation of each place whose launch was recorded. The host launched what
    /// ran before it on that stream before the recording began.
    first_launched: Vec<i64>,
}

impl<'a> Context<'a> {
    /// Joins a trace in memory; ranges are kept for the tree of ranges.
    pub fn new(trace: &'a Trace, keep_ranges: bool) -> Self {
        let mut pass = HostPass::new(keep_ranges);
        read::rows_of(trace, |row| pass.add(trace, row));
        Self::joined(trace, pass.finish(trace, |label| label, i64::MAX))
    }

    /// Joins a trace with its host's part, after which it needs no correlation ids.
    pub fn joined(trace: &'a Trace, (activities, host): (Vec<Activity>, Host)) -> Self {
        let classes = classes(trace, &host);
        let (all, platform) = (AllOperations::new(trace), Platform::new(trace));
        let mut first_launched = vec![i64::MAX; trace.places.len()];
        for id in all.ids().filter(|&id| host.launches.has(id)) {
            let first = &mut first_launched[all.place(id).0 as usize];
            *first = all.start(id).min(*first);
        }
        Self { trace, all, classes, activities, host, platform, first_launched }
    }

    /// The path of an operation: of the innermost range around its launch, then of the ranges in
    /// which the node of a graph was created that launched it.
    pub fn path_id(&self, operation: OperationId) -> PathId {
        let inside = self.host.inside_graph.get(operation as usize);
        inside.unwrap_or_else(|| self.host.launched_in.at(operation as usize))
    }

    /// The call that launched an operation, where the trace holds it.
    pub fn launch(&self, operation: OperationId) -> Option<LaunchCall> {
        self.host.launches.get(&self.all, operation)
    }

    /// The path of an operation as text, if it is in a range.
    pub fn path_of(&self, operation: OperationId) -> Option<String> {
        self.range(self.path_id(operation))
    }

    /// A path as text, if it is that of a range.
    pub fn range(&self, path: PathId) -> Option<String> {
        (path != ROOT).then(|| self.host.paths.text(self.trace, path))
    }

    /// The path of the innermost range that contains both an operation and everything inside a
    /// path.
    pub fn around(&self, path: PathId, operation: OperationId) -> PathId {
        self.host.paths.common(path, self.path_id(operation))
    }

    /// The causes of a gap and the time of each; they add up to its length.
    pub fn causes_of(&self, gap: &Gap) -> impl Iterator<Item = (Why, i64)> {
        let mut parts = self.host.idle.parts(gap).peekable();
        let unlaunched = parts.peek().is_none().then(|| {
            let kind = match self.is_migration(gap.after) {
                true => CauseKind::Migration,
                false if self.was_queued(gap) => CauseKind::BackToBack,
                false => CauseKind::Unknown,
            };
            ((kind, None), gap.length())
        });
        parts.chain(unlaunched)
    }

    /// Whether the operation behind a gap was launched before the recording began, and followed as
    /// soon as queued work does.
    fn was_queued(&self, gap: &Gap) -> bool {
        let first = self.first_launched[self.all.place(gap.after).0 as usize];
        first < i64::MAX && self.all.start(gap.after) < first && gap.length() < LATENCY_NS
    }

    /// Whether an operation migrates pages of managed memory, which no call launches.
    pub fn is_migration(&self, operation: OperationId) -> bool {
        self.classes.class(operation) == Class::Migration
    }

    /// The name of a function without its version.
    pub fn function(&self, name: Name) -> &'a str {
        crate::stats::without_version(self.trace.names.text(name))
    }

    /// The function that is to blame for idle time, or the range around host code, without numbers.
    pub fn blamed(&self, (kind, name): Why) -> Option<String> {
        name.map(|name| match kind {
            CauseKind::HostCode => without_numbers(self.trace.names.text(name)),
            _ => self.function(name).to_owned(),
        })
    }

    /// Process id and device of an operation.
    pub fn place_of(&self, operation: OperationId) -> (i64, u32) {
        let place = &self.trace.places[self.all.place(operation).0 as usize];
        (self.trace.processes[place.process as usize].pid, place.device)
    }
}

/// The classes of operations, with copies inside ranges of MPI as communication.
fn classes<'a>(trace: &'a Trace, host: &Host) -> Classes<'a> {
    let classes = Classes::new(trace);
    let paths = &host.paths;
    // A path is numbered behind the one around it.
    let mut by_path: Vec<Option<Communication>> = Vec::with_capacity(paths.len());
    for path in (0..).take(paths.len()) {
        let own = || Communication::in_range(trace.names.text(paths.name(path)));
        by_path.push(match path {
            ROOT => None,
            _ => by_path[paths.parent(path) as usize].or_else(own),
        });
    }
    if trace.copies.on_gpu.is_empty() || by_path.iter().all(Option::is_none) {
        return classes;
    }
    classes.with_ranges(|copy| by_path[host.launched_in.at(copy as usize) as usize])
}
