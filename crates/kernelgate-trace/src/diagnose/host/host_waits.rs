//! Waits of the host for the GPU, summed while calls are read: by the range around them, and by the
//! number of launches between them.

use std::cmp::Reverse;

use hashbrown::HashMap;

use crate::analyze::ranges::paths::{ROOT_PATH, RangePathId};
use crate::model::interned_names::NameId;
use crate::model::{InternedValues, Trace};
use crate::read::CallRow;

/// Functions whose call returns only when the GPU has finished.
const WAITING_FUNCTIONS: &[&str] = &[
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaThreadSynchronize",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "hipDeviceSynchronize",
    "hipStreamSynchronize",
    "hipEventSynchronize",
];

/// For each name of a call, whether the call waits for the GPU. Function names for the per-thread
/// default stream end in `_ptsz`.
pub(in crate::diagnose) fn names_that_wait(trace: &Trace) -> Vec<bool> {
    (0..trace.names.len())
        .map(|index| {
            let text = trace.names.text(NameId(u32::try_from(index).unwrap_or(0)));
            let name = crate::stats::without_interface_version(text);
            WAITING_FUNCTIONS.contains(&name.trim_end_matches("_ptsz"))
        })
        .collect()
}

/// Waits that belong together.
#[derive(Debug, Clone, Default)]
pub struct HostWaitSum {
    /// How many.
    pub count: usize,
    /// Total duration, in nanoseconds.
    pub total_ns: i64,
    /// Start and end of the longest wait; of equally long waits the first wait counts.
    pub longest: Option<(i64, i64)>,
    /// Idle time of devices after these waits that could be saved, nanoseconds: for each wait at
    /// most its own duration.
    pub saved_ns: i64,
    /// Number of calls of each waiting function.
    pub functions: HashMap<NameId, usize>,
}

/// A wait: an index into the sites of [`HostWaits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitSiteId(u32);

/// Key of waits that belong together: the path of their range, and the launches before them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct WaitSite {
    path: Option<RangePathId>,
    thread: u32,
    launches: usize,
}

impl HostWaitSum {
    fn add(&mut self, call: &CallRow) {
        let span = (call.start, call.end);
        self.count += 1;
        self.total_ns += span.1 - span.0;
        self.longest = longer_span(self.longest, Some(span));
        *self.functions.entry(call.name).or_default() += 1;
    }

    /// Adds another sum of waits to this one.
    pub fn add_waits(&mut self, other: &Self) {
        self.count += other.count;
        self.total_ns += other.total_ns;
        self.saved_ns += other.saved_ns;
        self.longest = longer_span(self.longest, other.longest);
        for (&name, count) in &other.functions {
            *self.functions.entry(name).or_default() += count;
        }
    }
}

fn longer_span(a: Option<(i64, i64)>, b: Option<(i64, i64)>) -> Option<(i64, i64)> {
    a.into_iter().chain(b).max_by_key(|&(start, end)| (end - start, Reverse(start)))
}

/// Waits in the ranges of a path.
#[derive(Debug, Clone, Default)]
pub struct WaitsInRanges {
    pub sum: HostWaitSum,
    /// Number of the first range that contains such a wait.
    first: u32,
    /// Whether further ranges contain similar waits too.
    pub several: bool,
}

/// Waits of a thread with the same number of launches before each.
#[derive(Debug, Clone)]
pub struct RegularWaits {
    pub sum: HostWaitSum,
    /// Number of waits before the first one of these ranges.
    pub before: usize,
    /// Range path around the first wait.
    pub path: RangePathId,
}

/// All waits of the host for the GPU in a trace.
#[derive(Debug, Default)]
pub struct HostWaits {
    /// Waits by the path of the innermost range around them.
    pub in_ranges: HashMap<RangePathId, WaitsInRanges>,
    /// Waits by thread and by the number of launches since the thread's previous wait, at least
    /// one.
    pub at_intervals: HashMap<(u32, usize), RegularWaits>,
    /// For each thread, the launches since its last wait, and its waits.
    threads: Vec<(usize, usize)>,
    sites: InternedValues<WaitSite>,
    count: usize,
}

impl HostWaits {
    /// Counts a launch that a thread made.
    pub(in crate::diagnose) fn count_launch(&mut self, thread: u32) {
        self.counters_of_thread(thread).0 += 1;
    }

    /// Adds a wait, with the path and the number of its innermost enclosing range.
    pub(in crate::diagnose) fn add(
        &mut self,
        call: &CallRow,
        range: Option<(RangePathId, u32)>,
    ) -> WaitSiteId {
        if let Some((path, number)) = range {
            let first = WaitsInRanges { first: number, ..WaitsInRanges::default() };
            let in_range = self.in_ranges.entry(path).or_insert(first);
            in_range.several |= in_range.first != number;
            in_range.sum.add(call);
        }
        let (launches, waits) = self.counters_of_thread(call.thread);
        *waits += 1;
        let launches = std::mem::take(launches);
        if launches > 0 {
            let path = range.map_or(ROOT_PATH, |(path, _)| path);
            let first = RegularWaits { sum: HostWaitSum::default(), before: self.count, path };
            self.at_intervals.entry((call.thread, launches)).or_insert(first).sum.add(call);
        }
        self.count += 1;
        let path = range.map(|(path, _)| path);
        WaitSiteId(self.sites.intern(WaitSite { path, thread: call.thread, launches }))
    }

    /// Adds idle time that could be saved without a wait.
    pub(in crate::diagnose) fn add_saved_time(&mut self, wait: WaitSiteId, ns: i64) {
        let WaitSite { path, thread, launches } = self.sites.values[wait.0 as usize];
        if let Some(of) = path.and_then(|path| self.in_ranges.get_mut(&path)) {
            of.sum.saved_ns += ns;
        }
        if let Some(of) = self.at_intervals.get_mut(&(thread, launches)) {
            of.sum.saved_ns += ns;
        }
    }

    /// Number of waits of a thread.
    pub fn waits_of_thread(&self, thread: u32) -> usize {
        self.threads.get(thread as usize).map_or(0, |&(_, waits)| waits)
    }

    fn counters_of_thread(&mut self, thread: u32) -> &mut (usize, usize) {
        let thread = thread as usize;
        if self.threads.len() <= thread {
            self.threads.resize(thread + 1, (0, 0));
        }
        &mut self.threads[thread]
    }

    /// Renumbers the range paths; two old numbers may become one.
    pub(in crate::diagnose) fn renumber_paths(
        &mut self,
        now_is: impl Fn(RangePathId) -> RangePathId,
    ) {
        self.at_intervals.values_mut().for_each(|of| of.path = now_is(of.path));
        for (path, of) in std::mem::take(&mut self.in_ranges) {
            let renamed = self.in_ranges.entry(now_is(path));
            let renamed =
                renamed.or_insert(WaitsInRanges { first: of.first, ..WaitsInRanges::default() });
            renamed.several |= of.several || renamed.first != of.first;
            renamed.sum.add_waits(&of.sum);
        }
    }
}
