//! Sums the host's waits for the GPU while a trace's calls are read: by the range around the waits,
//! and by the number of launches between waits.

use std::cmp::Reverse;

use hashbrown::HashMap;

use crate::analyze::ranges::paths::{ROOT_RANGE_PATH, RangePathId};
use crate::model::interned_names::InternedNameId;
use crate::model::{DistinctValues, Trace};
use crate::read::StreamedCallRow;

/// CUDA and HIP functions that return only when the GPU has finished earlier work.
const FUNCTIONS_THAT_WAIT_FOR_GPU: &[&str] = &[
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

/// Returns for each name of the trace whether a function of this name waits for the GPU. Names of
/// functions for the per-thread default stream end in `_ptsz`, which is removed before the
/// comparison.
pub(in crate::diagnose) fn which_names_wait_for_gpu(trace: &Trace) -> Vec<bool> {
    (0..trace.names.interned_text_count())
        .map(|index| {
            let text = trace.names.text_of_name(InternedNameId(u32::try_from(index).unwrap_or(0)));
            let name = crate::stats::without_four_digit_version_suffix(text);
            FUNCTIONS_THAT_WAIT_FOR_GPU.contains(&name.trim_end_matches("_ptsz"))
        })
        .collect()
}

/// Sums over a group of waits of the host for the GPU.
#[derive(Debug, Clone, Default)]
pub struct SumOfHostWaits {
    /// Number of these waits.
    pub wait_count: usize,
    /// Total duration of these waits, in nanoseconds.
    pub total_wait_ns: i64,
    /// Start and end of the longest of these waits, nanoseconds; of equally long waits the first.
    pub longest_start_and_end_ns: Option<(i64, i64)>,
    /// Idle time of GPUs after these waits that avoiding them could save, nanoseconds; for each
    /// wait at most its own duration.
    pub savable_gpu_idle_ns: i64,
    /// Number of these waits for each waiting function, by its name.
    pub wait_count_by_function: HashMap<InternedNameId, usize>,
}

/// Group to which a wait belongs: an index into the wait groups of [`HostWaitsOfTrace`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitGroupIndex(u32);

/// Key of a group of waits: range path, thread, and number of launches since the thread's previous
/// wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct WaitGroupKey {
    path: Option<RangePathId>,
    thread_index: u32,
    launches_since_previous_wait: usize,
}

impl SumOfHostWaits {
    fn add_wait_call(&mut self, call: &StreamedCallRow) {
        let span = (call.start_ns, call.end_ns);
        self.wait_count += 1;
        self.total_wait_ns += span.1 - span.0;
        self.longest_start_and_end_ns =
            longer_of_two_spans(self.longest_start_and_end_ns, Some(span));
        *self.wait_count_by_function.entry(call.function_name).or_default() += 1;
    }

    /// Adds another sum of waits to this sum.
    pub fn add_other_waits(&mut self, other: &Self) {
        self.wait_count += other.wait_count;
        self.total_wait_ns += other.total_wait_ns;
        self.savable_gpu_idle_ns += other.savable_gpu_idle_ns;
        self.longest_start_and_end_ns =
            longer_of_two_spans(self.longest_start_and_end_ns, other.longest_start_and_end_ns);
        for (&name, count) in &other.wait_count_by_function {
            *self.wait_count_by_function.entry(name).or_default() += count;
        }
    }
}

fn longer_of_two_spans(a: Option<(i64, i64)>, b: Option<(i64, i64)>) -> Option<(i64, i64)> {
    a.into_iter().chain(b).max_by_key(|&(start, end)| (end - start, Reverse(start)))
}

/// Waits for the GPU inside the ranges of one path.
#[derive(Debug, Clone, Default)]
pub struct WaitsInsideRangePath {
    pub sum: SumOfHostWaits,
    /// Number of the first range of this path that contains a wait.
    first_range_number_with_wait: u32,
    /// Whether the host waits for the GPU in at least two ranges of this range path.
    pub waits_in_several_ranges: bool,
}

/// Waits of one thread with the same number of launches since its previous wait.
#[derive(Debug, Clone)]
pub struct WaitsWithEqualLaunchCounts {
    pub sum: SumOfHostWaits,
    /// Number of waits in the trace before the first of these waits.
    pub earlier_waits_in_trace: usize,
    /// Path of the innermost range around the first of these waits.
    pub range_path_of_first_wait: RangePathId,
}

/// All waits of the host for the GPU in a trace, grouped in two ways.
#[derive(Debug, Default)]
pub struct HostWaitsOfTrace {
    /// Waits by the path of the innermost range around them.
    pub waits_by_range_path: HashMap<RangePathId, WaitsInsideRangePath>,
    /// Waits by thread and by the number of launches since the thread's previous wait, if at least
    /// one.
    pub waits_by_launch_count: HashMap<(u32, usize), WaitsWithEqualLaunchCounts>,
    /// For each thread, the number of launches since its last wait, and the number of its waits.
    launch_and_wait_counts_by_thread: Vec<(usize, usize)>,
    wait_groups: DistinctValues<WaitGroupKey>,
    wait_count: usize,
}

impl HostWaitsOfTrace {
    /// Counts a launch of a thread, for the number of launches since the thread's last wait.
    pub(in crate::diagnose) fn count_launch_of_thread(&mut self, thread: u32) {
        self.launch_and_wait_counters_of_thread(thread).0 += 1;
    }

    /// Adds a host call that waited for the GPU, with path and number of the innermost range around
    /// the call.
    pub(in crate::diagnose) fn add_wait(
        &mut self,
        call: &StreamedCallRow,
        range: Option<(RangePathId, u32)>,
    ) -> WaitGroupIndex {
        if let Some((path, number)) = range {
            let first = WaitsInsideRangePath {
                first_range_number_with_wait: number,
                ..WaitsInsideRangePath::default()
            };
            let in_range = self.waits_by_range_path.entry(path).or_insert(first);
            in_range.waits_in_several_ranges |= in_range.first_range_number_with_wait != number;
            in_range.sum.add_wait_call(call);
        }
        let (launches, waits) = self.launch_and_wait_counters_of_thread(call.thread_index);
        *waits += 1;
        let launches = std::mem::take(launches);
        if launches > 0 {
            let path = range.map_or(ROOT_RANGE_PATH, |(path, _)| path);
            let first = WaitsWithEqualLaunchCounts {
                sum: SumOfHostWaits::default(),
                earlier_waits_in_trace: self.wait_count,
                range_path_of_first_wait: path,
            };
            self.waits_by_launch_count
                .entry((call.thread_index, launches))
                .or_insert(first)
                .sum
                .add_wait_call(call);
        }
        self.wait_count += 1;
        let path = range.map(|(path, _)| path);
        WaitGroupIndex(self.wait_groups.index_of_value(WaitGroupKey {
            path,
            thread_index: call.thread_index,
            launches_since_previous_wait: launches,
        }))
    }

    /// Adds nanoseconds of GPU idle time that avoiding a wait could save.
    pub(in crate::diagnose) fn add_idle_ns_saved_without_wait(
        &mut self,
        wait: WaitGroupIndex,
        ns: i64,
    ) {
        let WaitGroupKey { path, thread_index: thread, launches_since_previous_wait: launches } =
            self.wait_groups.values[wait.0 as usize];
        if let Some(of) = path.and_then(|path| self.waits_by_range_path.get_mut(&path)) {
            of.sum.savable_gpu_idle_ns += ns;
        }
        if let Some(of) = self.waits_by_launch_count.get_mut(&(thread, launches)) {
            of.sum.savable_gpu_idle_ns += ns;
        }
    }

    /// Number of waits for the GPU that a thread made.
    pub fn number_of_waits_of_thread(&self, thread: u32) -> usize {
        self.launch_and_wait_counts_by_thread.get(thread as usize).map_or(0, |&(_, waits)| waits)
    }

    fn launch_and_wait_counters_of_thread(&mut self, thread: u32) -> &mut (usize, usize) {
        let thread = thread as usize;
        if self.launch_and_wait_counts_by_thread.len() <= thread {
            self.launch_and_wait_counts_by_thread.resize(thread + 1, (0, 0));
        }
        &mut self.launch_and_wait_counts_by_thread[thread]
    }

    /// Replaces the path numbers of all waits; waits of two paths that become one are added.
    pub(in crate::diagnose) fn replace_path_numbers(
        &mut self,
        now_is: impl Fn(RangePathId) -> RangePathId,
    ) {
        self.waits_by_launch_count
            .values_mut()
            .for_each(|of| of.range_path_of_first_wait = now_is(of.range_path_of_first_wait));
        for (path, of) in std::mem::take(&mut self.waits_by_range_path) {
            let renamed = self.waits_by_range_path.entry(now_is(path));
            let renamed = renamed.or_insert(WaitsInsideRangePath {
                first_range_number_with_wait: of.first_range_number_with_wait,
                ..WaitsInsideRangePath::default()
            });
            renamed.waits_in_several_ranges |= of.waits_in_several_ranges
                || renamed.first_range_number_with_wait != of.first_range_number_with_wait;
            renamed.sum.add_other_waits(&of.sum);
        }
    }
}
