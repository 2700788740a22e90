//! Finds causes of GPU idle gaps: a gap is split into what the launching thread did before its
//! call, the call, and the time from the call to the operation.

use hashbrown::{HashMap, HashSet};

use crate::analyze::operations::{AllGpuOperations, GpuOperationId};
use crate::analyze::ranges::range_sweep::TableRowsByThread;
use crate::analyze::timeline::idle_time::{GpuIdleGap, ProcessActivityOnGpu};
use crate::diagnose::host::host_waits::WaitGroupIndex;
use crate::model::Trace;
use crate::model::gpu::SynchronisationTarget;
use crate::model::interned_names::InternedNameId;
use crate::model::packed_columns::BitPackedColumn;
use crate::read::{StreamedCallRow, StreamedRangeRow};
use crate::stats::without_four_digit_version_suffix;

/// Longest usual time from a launch to the start of its operation, nanoseconds; a later start has a
/// cause.
pub const MAX_USUAL_START_LATENCY_NS: i64 = 20_000;
/// Longest gap that launching alone can cause, also from Python, nanoseconds; in longer gaps the
/// host did something else.
pub const MIN_GAP_OF_OTHER_HOST_WORK_NS: i64 = 1_000_000;
/// Largest expected difference between a recorder's host clock and GPU clock, nanoseconds.
pub const MAX_HOST_GPU_CLOCK_DIFFERENCE_NS: i64 = 1_000;
/// Shortest first launch call of a kernel, nanoseconds, that is taken to have loaded the kernel's
/// code. Evidence for this threshold: in public traces of five programs all 72 launch calls above
/// 300 µs were the first of their kernel.
const MIN_CODE_LOADING_CALL_NS: i64 = 100_000;
/// Number of launched operations that have not started, from which on the launch queue is taken to
/// be full: CUDA's holds 1024.
const MIN_OPERATIONS_IN_FULL_QUEUE: usize = 1000;

/// Cause for which a GPU was idle during a gap or a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IdleCauseKind {
    /// Before the launch, the launching thread ran code outside CUDA calls.
    HostCode,
    /// Before the launch, the operating system had taken the launching thread off the CPU.
    OffCpu,
    /// Before the launch, the launching thread was in a call of the operating system.
    OsCall,
    /// Before the launch, the launching thread was in another CUDA call.
    OtherCudaCall,
    /// Before the launch, the launching thread waited for the GPU.
    HostWaitForGpu,
    /// The launch call of the next operation was still running.
    LaunchCall,
    /// The launch call of the next operation was long, because it launched a kernel for the first
    /// time and loaded its code.
    FirstLaunch,
    /// Usual time from the end of the launch call, which lies in the gap, to the start of the
    /// operation.
    LaunchLatency,
    /// The next operation was launched before the gap, and started as fast as queued operations
    /// usually do.
    BackToBack,
    /// The next operation was launched but not started, because its stream waited for an event.
    EventWait,
    /// The next operation was launched but not started, because the legacy default stream and
    /// another stream wait for each other.
    DefaultStream,
    /// The next operation was launched but not started, because its stream waited for a host
    /// function.
    HostFunction,
    /// The next operation was launched but not started, because the gap lies between nodes of one
    /// CUDA graph.
    InGraph,
    /// The next operation was launched but not started, while the same process worked on another
    /// GPU, or another process on this GPU.
    WorkElsewhere,
    /// The next operation was launched but not started, behind as many operations as a launch queue
    /// holds.
    FullQueue,
    /// The next operation was launched but not started, because the Windows driver (WDDM) collects
    /// launches and moves memory before it submits them.
    WindowsDriver,
    /// The next operation was launched but not started, and the trace does not show why.
    UnknownDelayAfterLaunch,
    /// The gap ends with a migration of managed pages, which no host call launches.
    PageMigration,
    /// The next operation starts before its own launch call, so the clocks of host and GPU
    /// disagree.
    ClocksDisagree,
    /// The trace does not contain the launch call of the operation after the gap.
    NoLaunchCallRecorded,
}

impl IdleCauseKind {
    /// Returns the label of this value in printed output.
    pub fn printed_idle_cause(self) -> &'static str {
        match self {
            Self::HostCode => "host code between launches",
            Self::OffCpu => "the thread was not on a CPU",
            Self::OsCall => "a call of the operating system",
            Self::OtherCudaCall => "another CUDA call",
            Self::HostWaitForGpu => "in a wait for the GPU",
            Self::LaunchCall => "in the launch call",
            Self::FirstLaunch => "in the first launch of a kernel, which loads it",
            Self::FullQueue => "launched, not started: behind a full queue",
            Self::LaunchLatency => "launch latency",
            Self::BackToBack => "between queued operations",
            Self::EventWait => "launched, not started: waits for an event",
            Self::DefaultStream => "launched, not started: behind the default stream",
            Self::HostFunction => "launched, not started: behind a host function",
            Self::InGraph => "launched, not started: between nodes of a graph",
            Self::WorkElsewhere => "launched, not started: another device or process worked",
            Self::WindowsDriver => "launched, not started: the Windows driver submits later",
            Self::UnknownDelayAfterLaunch => {
                "launched, not started: the reason is not in the trace"
            }
            Self::PageMigration => "before a page migration, which nobody launches",
            Self::ClocksDisagree => "starts before its launch: the clocks disagree",
            Self::NoLaunchCallRecorded => "the launch is not in the trace",
        }
    }

    /// Label of the idle cause with at most 32 characters, for a table.
    pub fn printed_idle_cause_for_table(self) -> &'static str {
        match self {
            Self::FirstLaunch => "first launches, which load code",
            Self::EventWait => "late start: waits for an event",
            Self::DefaultStream => "late start: the default stream",
            Self::HostFunction => "late start: a host function",
            Self::InGraph => "between nodes of a graph",
            Self::WorkElsewhere => "late start: another one worked",
            Self::FullQueue => "late start: behind a full queue",
            Self::WindowsDriver => "late start: the Windows driver",
            Self::UnknownDelayAfterLaunch => "late start: reason not in trace",
            Self::PageMigration => "before a page migration",
            Self::ClocksDisagree => "clocks of host and device differ",
            other => other.printed_idle_cause(),
        }
    }

    /// Returns whether the idle cause means that the host was launching, or ran its own code before
    /// launching.
    pub fn is_launching_or_own_host_code(self) -> bool {
        matches!(
            self,
            Self::LaunchCall | Self::LaunchLatency | Self::HostCode | Self::OsCall | Self::OffCpu
        )
    }

    /// Key of the idle cause in JSON; the key never changes.
    pub fn idle_cause_json_key(self) -> &'static str {
        match self {
            Self::HostCode => "host_code",
            Self::OffCpu => "off_cpu",
            Self::OsCall => "os_call",
            Self::OtherCudaCall => "cuda_call",
            Self::HostWaitForGpu => "wait",
            Self::LaunchCall => "launch_call",
            Self::FirstLaunch => "first_launch",
            Self::FullQueue => "full_queue",
            Self::LaunchLatency => "launch_latency",
            Self::BackToBack => "back_to_back",
            Self::EventWait => "event_wait",
            Self::DefaultStream => "default_stream",
            Self::HostFunction => "host_function",
            Self::InGraph => "in_graph",
            Self::WorkElsewhere => "elsewhere",
            Self::WindowsDriver => "windows_driver",
            Self::UnknownDelayAfterLaunch => "not_started",
            Self::PageMigration => "page_migration",
            Self::ClocksDisagree => "clocks_disagree",
            Self::NoLaunchCallRecorded => "launch_not_recorded",
        }
    }

    /// Returns whether the idle cause means that the next operation was not launched yet, or that
    /// its launch was just completed.
    pub fn is_before_or_right_after_launch(self) -> bool {
        matches!(
            self,
            Self::HostCode
                | Self::OffCpu
                | Self::OsCall
                | Self::OtherCudaCall
                | Self::HostWaitForGpu
                | Self::LaunchCall
                | Self::FirstLaunch
                | Self::LaunchLatency
        )
    }

    /// Whether the trace shows the reason for the idle time.
    pub fn is_reason_in_trace(self) -> bool {
        !matches!(
            self,
            Self::UnknownDelayAfterLaunch | Self::ClocksDisagree | Self::NoLaunchCallRecorded
        )
    }
}

/// An idle cause, with the name of the responsible function, or of the range around most of the
/// host code.
pub type IdleCauseAndBlamedName = (IdleCauseKind, Option<InternedNameId>);

/// Largest number of parts of a gap whose lengths are stored in columns; the lengths of gaps with
/// more parts are stored in a map.
const MAX_GAP_PARTS_IN_COLUMNS: usize = 4;

/// For every idle gap of a trace, its causes in order of time and the length of each part, stored
/// compactly.
#[derive(Debug, Default)]
pub struct GapPartsByCause {
    distinct_cause_lists: Vec<Vec<IdleCauseAndBlamedName>>,
    index_of_cause_list: HashMap<Vec<IdleCauseAndBlamedName>, u32>,
    /// For the operation after each gap, 1 + index of the gap's causes in `distinct_cause_lists`; 0
    /// if the operation's launch was not read.
    cause_list_of_gap: BitPackedColumn<u32>,
    /// For the operation after each gap, the length of each part of the gap except the last, which
    /// is the remainder, nanoseconds.
    lengths: [BitPackedColumn<i64>; MAX_GAP_PARTS_IN_COLUMNS - 1],
    /// For gaps with more parts than columns, the lengths of all parts by the operation after the
    /// gap, nanoseconds.
    parts_of_long_gaps: HashMap<GpuOperationId, Vec<i64>>,
}

impl GapPartsByCause {
    pub(in crate::diagnose) fn without_gaps_of_operations(operations: usize) -> Self {
        Self {
            cause_list_of_gap: BitPackedColumn::column_filled_with(operations, 0),
            lengths: std::array::from_fn(|_| BitPackedColumn::column_filled_with(operations, 0)),
            ..Self::default()
        }
    }

    /// Stores causes and lengths of the parts of a gap; the lengths add up to the gap's length.
    pub(in crate::diagnose) fn store_parts_of_gap(
        &mut self,
        gap: &GpuIdleGap,
        parts: &[(IdleCauseAndBlamedName, i64)],
    ) {
        let causes: Vec<IdleCauseAndBlamedName> = parts.iter().map(|&(why, _)| why).collect();
        let number = self.index_of_cause_list.get(&causes).copied().unwrap_or_else(|| {
            let new = u32::try_from(self.distinct_cause_lists.len() + 1);
            let new = new.expect("fewer than 2^32 combinations of causes");
            self.index_of_cause_list.insert(causes.clone(), new);
            self.distinct_cause_lists.push(causes);
            new
        });
        self.cause_list_of_gap.replace_row(gap.operation_after as usize, number);
        if parts.len() > MAX_GAP_PARTS_IN_COLUMNS {
            self.parts_of_long_gaps
                .insert(gap.operation_after, parts.iter().map(|&(_, ns)| ns).collect());
            return;
        }
        let Some((_, all_but_last)) = parts.split_last() else { return };
        for (lengths, (_, ns)) in self.lengths.iter_mut().zip(all_but_last) {
            lengths.replace_row(gap.operation_after as usize, *ns);
        }
    }

    /// Replaces label numbers of ranges, which were read before their names, by names.
    pub(in crate::diagnose) fn replace_range_labels_by_names(
        &mut self,
        name_of: impl Fn(InternedNameId) -> InternedNameId,
    ) {
        self.index_of_cause_list = HashMap::new();
        for (kind, range) in self.distinct_cause_lists.iter_mut().flatten() {
            if *kind == IdleCauseKind::HostCode {
                *range = range.map(&name_of);
            }
        }
    }

    /// Returns the causes of a gap and the nanoseconds of each, in order of time; they add up to
    /// the gap's length. Nothing is returned if the trace does not contain the launch of the
    /// operation after the gap.
    pub fn causes_and_ns_of_gap(
        &self,
        gap: &GpuIdleGap,
    ) -> impl Iterator<Item = (IdleCauseAndBlamedName, i64)> {
        let id = gap.operation_after as usize;
        let number = self.cause_list_of_gap.at(id).checked_sub(1);
        let causes = number.map_or(&[][..], |number| &self.distinct_cause_lists[number as usize]);
        let listed = if causes.len() > MAX_GAP_PARTS_IN_COLUMNS {
            self.parts_of_long_gaps.get(&gap.operation_after)
        } else {
            None
        };
        let mut rest = gap.idle_gap_length_ns();
        causes.iter().enumerate().map(move |(part, &why)| {
            let ns = match listed {
                Some(lengths) => lengths[part],
                None if part + 1 == causes.len() => rest,
                None => self.lengths[part].at(id),
            };
            rest -= ns;
            (why, ns)
        })
    }
}

/// Kind of CUDA function after which later work of a stream may start late.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamHoldingKind {
    /// The function makes a stream wait for an event.
    Event,
    /// The function makes a stream wait until a host function has run.
    HostFunction,
}

fn stream_holding_kind_of_function(function: &str) -> Option<StreamHoldingKind> {
    const EVENT_WAIT_FUNCTIONS: &[&str] =
        &["cudaStreamWaitEvent", "cuStreamWaitEvent", "hipStreamWaitEvent"];
    const HOST_FUNCTION_ENQUEUE_FUNCTIONS: &[&str] = &[
        "cudaLaunchHostFunc",
        "cuLaunchHostFunc",
        "hipLaunchHostFunc",
        "cudaStreamAddCallback",
        "cuStreamAddCallback",
        "hipStreamAddCallback",
    ];
    let function = without_four_digit_version_suffix(function).trim_end_matches("_ptsz");
    if EVENT_WAIT_FUNCTIONS.contains(&function) {
        return Some(StreamHoldingKind::Event);
    }
    HOST_FUNCTION_ENQUEUE_FUNCTIONS.contains(&function).then_some(StreamHoldingKind::HostFunction)
}

/// A host call that makes a stream wait; it is kept until the next launch into the stream.
#[derive(Debug, Clone, Copy)]
struct CallThatHoldsStream {
    holding_kind: StreamHoldingKind,
    function_name: InternedNameId,
    /// Stream that the call makes wait; `None` if the trace does not record the stream.
    held_stream: Option<u64>,
}

/// Largest number of calls that hold a stream that are kept for each thread.
const MAX_HOLDING_CALLS_PER_THREAD: usize = 16;

/// A past host call that may explain an idle gap.
#[derive(Debug, Clone, Copy)]
struct PastHostCall {
    start: i64,
    end_ns: i64,
    name: InternedNameId,
    wait: Option<WaitGroupIndex>,
}

/// Number of consecutive calls that ended before a gap after which the backward search for calls
/// that reach into the gap stops.
const MAX_ENDED_CALLS_IN_SEARCH: usize = 8;

/// An idle gap, and the launch call of the operation that ended the gap.
#[derive(Debug, Clone, Copy)]
pub(in crate::diagnose) struct GapAndItsEndingLaunch<'a> {
    pub launch: &'a StreamedCallRow,
    pub gap: &'a GpuIdleGap,
    /// Index of the activity (process on a GPU) in which the gap lies.
    pub activity: usize,
    /// Stream of the operation that ended the gap.
    pub stream: u64,
    /// Whether the operation before the gap was launched by the same call.
    pub same_launch: bool,
    /// Number of operations that had been launched before and had not started.
    pub pending: usize,
}

/// An idle gap while it is divided into parts by cause.
#[derive(Debug, Default)]
pub(in crate::diagnose) struct GapPartsInProgress {
    /// Causes and lengths of the gap's parts in order of time; each cause occurs once.
    pub parts: Vec<(IdleCauseAndBlamedName, i64)>,
    /// Waits that reach into the gap before the launch, and how many nanoseconds of the gap
    /// avoiding each could save, at most its length.
    pub waits: Vec<(WaitGroupIndex, i64)>,
}

impl GapPartsInProgress {
    fn clear_gap_parts(&mut self) {
        self.parts.clear();
        self.waits.clear();
    }

    fn add_part_of_gap(&mut self, why: IdleCauseAndBlamedName, ns: i64) {
        if ns <= 0 {
            return;
        }
        match self.parts.iter_mut().find(|(known, _)| *known == why) {
            Some((_, total)) => *total += ns,
            None => self.parts.push((why, ns)),
        }
    }
}

/// A past NVTX range that may explain a long gap.
#[derive(Debug, Clone, Copy)]
struct PastNamedRange {
    start: i64,
    end: i64,
    label: InternedNameId,
}

/// Shortest host code, nanoseconds, that is named after the range around most of it.
const MIN_HOST_CODE_NAMED_AFTER_RANGE_NS: i64 = MIN_GAP_OF_OTHER_HOST_WORK_NS / 2;

/// Returns, for each kernel function in each process, the kernel that ran first.
fn first_kernels_of_functions(trace: &Trace) -> HashSet<GpuOperationId> {
    let kernels = &trace.kernels;
    let mut first: HashMap<(u32, u32), (i64, GpuOperationId)> = HashMap::new();
    for (id, function) in (0u32..).zip(kernels.function.iter_decoded_rows()) {
        let row = id as usize;
        let process = trace.process_index_of_place(kernels.on_gpu.place.at(row));
        let start = (kernels.on_gpu.start.at(row), id);
        let earliest = first.entry((process, function)).or_insert(start);
        *earliest = start.min(*earliest);
    }
    first.into_values().map(|(_, id)| id).collect()
}

/// Whether a trace was recorded on Windows, or on Linux inside Windows (WSL), which uses the same
/// driver.
fn was_recorded_with_windows_driver(trace: &Trace) -> bool {
    let mentions = |key: &str, text: &str| {
        trace.metadata.get(key).is_some_and(|of| of.to_ascii_lowercase().contains(text))
    };
    mentions("SoftwarePlatform", "windows") || mentions("SoftwareReleaseVersion", "microsoft")
}

/// Past calls and ranges of each thread while a trace is read, as far as they may explain gaps that
/// have not ended.
#[derive(Debug, Default)]
pub(in crate::diagnose) struct PastCallsAndRangesByThread {
    /// Past calls of each thread that may reach into a gap, in order of time.
    calls: Vec<Vec<PastHostCall>>,
    /// Past ranges of each thread that are long enough to name host code, in order of their start.
    ranges: Vec<Vec<PastNamedRange>>,
    /// For each thread, its calls that make streams wait.
    held: Vec<Vec<CallThatHoldsStream>>,
    /// For each function name, how its calls make a stream wait.
    holds: Vec<Option<StreamHoldingKind>>,
    /// Streams that wait for an event, by process and by correlation id of the call that makes them
    /// wait.
    event_streams: HashMap<(u32, u32), u64>,
    os_calls: TableRowsByThread,
    switches: TableRowsByThread,
    /// For each kernel function in each process, the kernel that ran first.
    first: HashSet<GpuOperationId>,
    /// Whether the trace was recorded with the Windows driver (WDDM).
    windows: bool,
    /// For each activity, the index of its first gap that has not ended at the current time.
    gap: Vec<usize>,
    /// For each activity, the idle nanoseconds up to the end of each of its gaps; empty if there is
    /// only one activity.
    idle_until: Vec<BitPackedColumn<i64>>,
    split: GapPartsInProgress,
}

impl PastCallsAndRangesByThread {
    /// Returns the state before the first host call of a trace is read.
    pub fn state_before_first_call(trace: &Trace, activities: &[ProcessActivityOnGpu]) -> Self {
        let threads = trace.threads.len();
        let (os, switches) = (&trace.os_calls, &trace.context_switches);
        let time = |row: u32| switches.time[row as usize];
        let holds = (0..trace.names.interned_text_count())
            .map(|index| {
                stream_holding_kind_of_function(
                    trace.names.text_of_name(InternedNameId(u32::try_from(index).unwrap_or(0))),
                )
            })
            .collect();
        let syncs = &trace.synchronisation_waits;
        let event_streams = (0..syncs.kind.len())
            .filter(|&row| syncs.kind[row] == SynchronisationTarget::StreamWaitsEvent)
            .map(|row| {
                let place = &trace.places[syncs.on_gpu.place.at(row).0 as usize];
                ((place.process, syncs.on_gpu.correlation.at(row)), place.stream)
            })
            .filter(|&((_, correlation), _)| correlation != 0)
            .collect();
        let all = AllGpuOperations::number_operations_of_trace(trace);
        let idle_until = |activity: &ProcessActivityOnGpu| {
            let sums = activity.gaps.iter(&all).scan(0, |sum, gap| {
                *sum += gap.idle_gap_length_ns();
                Some(*sum)
            });
            sums.collect()
        };
        Self {
            calls: vec![Vec::new(); threads],
            ranges: vec![Vec::new(); threads],
            held: vec![Vec::new(); threads],
            holds,
            event_streams,
            os_calls: TableRowsByThread::group_rows_by_thread(
                threads,
                &os.thread,
                |_| true,
                |i| os.start[i as usize],
            ),
            switches: TableRowsByThread::group_rows_by_thread(
                threads,
                &switches.thread,
                |_| true,
                time,
            ),
            first: first_kernels_of_functions(trace),
            windows: was_recorded_with_windows_driver(trace),
            gap: vec![0; activities.len()],
            idle_until: match activities.len() {
                0 | 1 => Vec::new(),
                _ => activities.iter().map(idle_until).collect(),
            },
            split: GapPartsInProgress::default(),
        }
    }

    /// The next call.
    pub fn add_past_call(
        &mut self,
        trace: &Trace,
        activities: &[ProcessActivityOnGpu],
        call: &StreamedCallRow,
        wait: Option<WaitGroupIndex>,
    ) {
        let thread = call.thread as usize;
        if self.calls.len() <= thread {
            self.calls.resize_with(thread + 1, Vec::new);
            self.held.resize_with(thread + 1, Vec::new);
        }
        if self.calls[thread].len() == self.calls[thread].capacity() {
            let since =
                self.start_of_earliest_unended_gap(trace, activities, (call.process, call.start));
            self.calls[thread].retain(|past| past.end_ns >= since);
        }
        let StreamedCallRow { start, end, name, .. } = *call;
        self.calls[thread].push(PastHostCall { start, end_ns: end, name, wait });
        if let Some(by) = self.holds.get(name.0 as usize).copied().flatten() {
            let stream = self.event_streams.get(&(call.process, call.correlation)).copied();
            let held = &mut self.held[thread];
            if held.len() == MAX_HOLDING_CALLS_PER_THREAD {
                held.remove(0);
            }
            held.push(CallThatHoldsStream {
                holding_kind: by,
                function_name: name,
                held_stream: stream,
            });
        }
    }

    /// The next range.
    pub fn add_past_range(
        &mut self,
        trace: &Trace,
        activities: &[ProcessActivityOnGpu],
        row: &StreamedRangeRow,
    ) {
        if row.end.saturating_sub(row.start) < MIN_HOST_CODE_NAMED_AFTER_RANGE_NS {
            return;
        }
        let thread = row.thread as usize;
        if self.ranges.len() <= thread {
            self.ranges.resize_with(thread + 1, Vec::new);
        }
        if self.ranges[thread].len() == self.ranges[thread].capacity() {
            let process = trace.threads[thread].process;
            let since = self.start_of_earliest_unended_gap(trace, activities, (process, row.start));
            self.ranges[thread].retain(|past| past.end >= since);
        }
        let StreamedRangeRow { start, end, name_index: label, .. } = *row;
        self.ranges[thread].push(PastNamedRange { start, end, label: InternedNameId(label) });
    }

    /// Returns the label of the shortest range that covers most of a long span.
    fn label_of_range_around_most_of(
        &self,
        thread: usize,
        (start, end): (i64, i64),
    ) -> Option<InternedNameId> {
        if end - start < MIN_HOST_CODE_NAMED_AFTER_RANGE_NS {
            return None;
        }
        let most = |of: &&PastNamedRange| (of.end.min(end) - of.start.max(start)) * 2 > end - start;
        let around = self.ranges.get(thread)?.iter().filter(most);
        around.min_by_key(|of| of.end.saturating_sub(of.start)).map(|of| of.label)
    }

    /// Forgets calls that made these streams wait, because the thread has now launched work into
    /// the streams.
    pub fn forget_waits_of_streams(&mut self, thread: u32, streams: impl Iterator<Item = u64>) {
        let Some(held) = self.held.get_mut(thread as usize).filter(|held| !held.is_empty()) else {
            return;
        };
        let streams: HashSet<u64> = streams.collect();
        held.retain(|held| held.held_stream.is_some_and(|stream| !streams.contains(&stream)));
    }

    /// Returns the earliest start of a gap of a process that ends after `time`; calls that ended
    /// before it explain no later gap.
    fn start_of_earliest_unended_gap(
        &mut self,
        trace: &Trace,
        activities: &[ProcessActivityOnGpu],
        (process, time): (u32, i64),
    ) -> i64 {
        let all = AllGpuOperations::number_operations_of_trace(trace);
        let own = activities.iter().zip(&mut self.gap).filter(|(of, _)| of.process == process);
        let starts = own.map(|(activity, next)| {
            let over =
                activity.gaps.idle_gaps_from_index(&all, *next).take_while(|gap| gap.end < time);
            *next += over.count();
            activity.gaps.idle_gap_at_index(&all, *next).map_or(i64::MAX, |gap| gap.start_ns)
        });
        starts.min().unwrap_or(i64::MAX)
    }

    /// Splits the idle gap before a launched operation into parts by cause.
    pub fn split_gap_into_causes(
        &mut self,
        trace: &Trace,
        activities: &[ProcessActivityOnGpu],
        late: &GapAndItsEndingLaunch<'_>,
    ) -> &GapPartsInProgress {
        let mut split = std::mem::take(&mut self.split);
        split.clear_gap_parts();
        let &GapAndItsEndingLaunch { launch, gap, .. } = late;
        if launch.start > gap.end + MAX_HOST_GPU_CLOCK_DIFFERENCE_NS {
            split.add_part_of_gap((IdleCauseKind::ClocksDisagree, None), gap.idle_gap_length_ns());
            self.split = split;
            return &self.split;
        }
        let called = launch.start.clamp(gap.start_ns, gap.end);
        let returned = launch.end.clamp(called, gap.end);
        self.split_span_before_launch(trace, launch, (gap.start_ns, called), &mut split);
        let loads = returned - called >= MIN_CODE_LOADING_CALL_NS
            && self.first.contains(&gap.operation_after);
        let kind = if loads { IdleCauseKind::FirstLaunch } else { IdleCauseKind::LaunchCall };
        split.add_part_of_gap((kind, Some(launch.name)), returned - called);
        let after = (returned, gap.end);
        let why = self.cause_of_late_start(trace, activities, late, after);
        split.add_part_of_gap(why, after.1 - after.0);
        // Without its waits the host would launch earlier by their length; several waits together
        // save at most the gap, less the time of other delays.
        let latency = matches!(why.0, IdleCauseKind::LaunchLatency | IdleCauseKind::BackToBack);
        let mut left = if latency { gap.idle_gap_length_ns() } else { returned - gap.start_ns };
        for (_, ns) in split.waits.iter_mut().rev() {
            *ns = (*ns).min(left);
            left -= *ns;
        }
        self.split = split;
        &self.split
    }

    /// Splits a span before a launch by the host calls of the launching thread.
    fn split_span_before_launch(
        &self,
        trace: &Trace,
        launch: &StreamedCallRow,
        span: (i64, i64),
        split: &mut GapPartsInProgress,
    ) {
        let thread = launch.thread as usize;
        let past = self.calls.get(thread).map_or(&[][..], |calls| calls);
        let first = index_of_first_call_ending_after(past, span.0);
        let mut at = span.0;
        // An outer call comes before the calls inside it, and covers them.
        for call in past[first..].iter().filter(|call| call.start < launch.start) {
            let (start, end) = (call.start.max(at), call.end_ns.min(span.1));
            if end <= start {
                continue;
            }
            split.waits.extend(call.wait.map(|wait| (wait, call.end_ns - call.start)));
            self.split_span_without_cuda_calls(trace, thread, (at, start), split);
            let kind = if call.wait.is_some() {
                IdleCauseKind::HostWaitForGpu
            } else {
                IdleCauseKind::OtherCudaCall
            };
            split.add_part_of_gap((kind, Some(call.name)), end - start);
            at = end;
        }
        self.split_span_without_cuda_calls(trace, thread, (at, span.1), split);
    }

    /// Splits a span in which the launching thread made no CUDA call, by its calls of the operating
    /// system.
    fn split_span_without_cuda_calls(
        &self,
        trace: &Trace,
        thread: usize,
        span: (i64, i64),
        split: &mut GapPartsInProgress,
    ) {
        if span.1 <= span.0 {
            return;
        }
        let os = &trace.os_calls;
        let own = self.os_calls.rows_of_thread(thread);
        let until = own.partition_point(|&call| os.start[call as usize] < span.1);
        let mut first = own[..until].partition_point(|&call| os.start[call as usize] < span.0);
        // Only the last few operating-system calls can reach into the span.
        first = first.saturating_sub(MAX_ENDED_CALLS_IN_SEARCH);
        let mut at = span.0;
        for &call in &own[first..until] {
            let call = call as usize;
            let (start, end) = (os.start[call].max(at), os.end[call].min(span.1));
            if end <= start {
                continue;
            }
            self.split_span_without_any_call(trace, thread, (at, start), split);
            split.add_part_of_gap((IdleCauseKind::OsCall, Some(os.name[call])), end - start);
            at = end;
        }
        self.split_span_without_any_call(trace, thread, (at, span.1), split);
    }

    /// Splits a span in which the launching thread made no call: off the CPU, or in host code.
    fn split_span_without_any_call(
        &self,
        trace: &Trace,
        thread: usize,
        span: (i64, i64),
        split: &mut GapPartsInProgress,
    ) {
        if span.1 > span.0 {
            let off = self.ns_off_cpu_in_span(trace, thread, span);
            split.add_part_of_gap((IdleCauseKind::OffCpu, None), off);
            let range = self.label_of_range_around_most_of(thread, span);
            split.add_part_of_gap((IdleCauseKind::HostCode, range), span.1 - span.0 - off);
        }
    }

    /// Returns the cause for which an operation that was launched did not start during a span.
    fn cause_of_late_start(
        &self,
        trace: &Trace,
        activities: &[ProcessActivityOnGpu],
        late: &GapAndItsEndingLaunch<'_>,
        span: (i64, i64),
    ) -> IdleCauseAndBlamedName {
        let short = span.1 - span.0 < MAX_USUAL_START_LATENCY_NS;
        if short && late.launch.end > late.gap.start_ns {
            return (IdleCauseKind::LaunchLatency, None);
        }
        if late.same_launch {
            let kind = if short { IdleCauseKind::BackToBack } else { IdleCauseKind::InGraph };
            return (kind, None);
        }
        if short {
            return (IdleCauseKind::BackToBack, None);
        }
        let held = self.held.get(late.launch.thread as usize).map_or(&[][..], |held| held);
        let own = |held: &&CallThatHoldsStream| {
            held.held_stream.is_none_or(|stream| stream == late.stream)
        };
        if let Some(held) = held.iter().rev().find(own) {
            let kind = match held.holding_kind {
                StreamHoldingKind::Event => IdleCauseKind::EventWait,
                StreamHoldingKind::HostFunction => IdleCauseKind::HostFunction,
            };
            return (kind, Some(held.function_name));
        }
        let streams = &trace.special_streams;
        let process = late.launch.process;
        let other = |held: &&CallThatHoldsStream| {
            held.held_stream.is_some_and(|of| {
                streams.synchronise_through_default_stream(process, of, late.stream)
            })
        };
        if let Some(held) = held.iter().rev().find(other) {
            return (IdleCauseKind::DefaultStream, Some(held.function_name));
        }
        let others = (0..self.idle_until.len()).filter(|&other| other != late.activity);
        let related = |&other: &usize| {
            let [own, other] = [late.activity, other].map(|index| &activities[index]);
            own.process == other.process || own.device == other.device
        };
        let worked = others.filter(related).any(|other| {
            self.busy_ns_of_activity_in_span(trace, other, &activities[other], span) * 2
                > span.1 - span.0
        });
        let kind = match late.pending >= MIN_OPERATIONS_IN_FULL_QUEUE {
            _ if worked => IdleCauseKind::WorkElsewhere,
            true => IdleCauseKind::FullQueue,
            false if self.windows => IdleCauseKind::WindowsDriver,
            false => IdleCauseKind::UnknownDelayAfterLaunch,
        };
        (kind, None)
    }

    /// Nanoseconds of a span in which operations of an activity (process on a GPU) ran.
    fn busy_ns_of_activity_in_span(
        &self,
        trace: &Trace,
        index: usize,
        activity: &ProcessActivityOnGpu,
        (start, end): (i64, i64),
    ) -> i64 {
        let all = AllGpuOperations::number_operations_of_trace(trace);
        let (start, end) = (
            start.max(activity.first_start_and_last_end_ns.0),
            end.min(activity.first_start_and_last_end_ns.1),
        );
        if end <= start {
            return 0;
        }
        let idle = |until: i64| {
            let over = activity.gaps.first_gap_index_where_not(&all, |gap| gap.end <= until);
            let whole = over.checked_sub(1).map_or(0, |last| self.idle_until[index].at(last));
            whole
                + activity
                    .gaps
                    .idle_gap_at_index(&all, over)
                    .map_or(0, |gap| (until - gap.start_ns).max(0))
        };
        end - start - (idle(end) - idle(start))
    }

    /// Nanoseconds of a span in which a thread was not on a CPU, by recorded thread switches.
    fn ns_off_cpu_in_span(&self, trace: &Trace, thread: usize, (start, end): (i64, i64)) -> i64 {
        let switches = &trace.context_switches;
        let own = self.switches.rows_of_thread(thread);
        let first = own.partition_point(|&row| switches.time[row as usize] <= start);
        let before = first.checked_sub(1).map(|last| own[last]);
        let mut since = before.filter(|&row| !switches.on_cpu[row as usize]).map(|_| start);
        let mut off = 0;
        for &row in own[first..].iter().take_while(|&&row| switches.time[row as usize] < end) {
            let time = switches.time[row as usize];
            if switches.on_cpu[row as usize] {
                off += since.take().map_or(0, |since| time - since);
            } else {
                since = since.or(Some(time));
            }
        }
        off + since.map_or(0, |since| end - since)
    }
}

/// Returns the index of the first past call that may end after `time`.
fn index_of_first_call_ending_after(past: &[PastHostCall], time: i64) -> usize {
    let (mut first, mut over) = (past.len(), 0);
    for (index, call) in past.iter().enumerate().rev() {
        if call.end_ns > time {
            (first, over) = (index, 0);
        } else {
            over += 1;
            if over == MAX_ENDED_CALLS_IN_SEARCH {
                break;
            }
        }
    }
    first
}
