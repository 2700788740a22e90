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
/// be full, because CUDA's launch queue holds 1024.
const MIN_OPERATIONS_IN_FULL_QUEUE: usize = 1000;

/// Cause for which a GPU was idle during a gap or a part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IdleCauseKind {
    /// Before the launch, the launching thread ran code outside CUDA calls.
    HostCodeBeforeLaunch,
    /// Before the launch, the operating system had taken the launching thread off the CPU.
    LaunchThreadOffCpu,
    /// Before the launch, the launching thread was in a call of the operating system.
    LaunchThreadInOsCall,
    /// Before the launch, the launching thread was in another CUDA call.
    LaunchThreadInOtherCudaCall,
    /// Before the launch, the launching thread waited for the GPU.
    LaunchThreadWaitedForGpu,
    /// The launch call of the next operation was still running.
    LaunchCallStillRunning,
    /// The launch call of the next operation was long, because it launched a kernel for the first
    /// time and loaded its code.
    FirstKernelLaunch,
    /// Usual time from the end of the launch call, which lies in the gap, to the start of the
    /// operation.
    LaunchLatency,
    /// The next operation was launched before the gap, and started as fast as queued operations
    /// usually do.
    UsualStartOfQueuedOperation,
    /// The next operation was launched but not started, because its stream waited for an event.
    StreamWaitedForEvent,
    /// The next operation was launched but not started, because the legacy default stream and
    /// another stream wait for each other.
    StreamWaitedForDefaultStream,
    /// The next operation was launched but not started, because its stream waited for a host
    /// function.
    StreamWaitedForHostFunction,
    /// The next operation was launched but not started, because the gap lies between nodes of one
    /// CUDA graph.
    BetweenCudaGraphNodes,
    /// The next operation was launched but not started, while the same process worked on another
    /// GPU, or another process on this GPU.
    OtherGpuOrProcessBusy,
    /// The next operation was launched but not started, behind as many operations as a launch queue
    /// holds.
    LaunchQueueFull,
    /// The next operation was launched but not started, because the Windows driver (WDDM) collects
    /// launches and moves memory before it submits them.
    WindowsDriverDelay,
    /// The next operation was launched but not started, and the trace does not show why.
    UnknownDelayAfterLaunch,
    /// The gap ends with a migration of managed pages, which no host call launches.
    PageMigration,
    /// The next operation starts before its own launch call, so the clocks of host and GPU
    /// disagree.
    HostAndGpuClocksDisagree,
    /// The trace does not contain the launch call of the operation after the gap.
    NoLaunchCallRecorded,
}

impl IdleCauseKind {
    /// Returns the label of the idle cause in printed output.
    pub fn printed_idle_cause(self) -> &'static str {
        match self {
            Self::HostCodeBeforeLaunch => "host code between launches",
            Self::LaunchThreadOffCpu => "the thread was not on a CPU",
            Self::LaunchThreadInOsCall => "a call of the operating system",
            Self::LaunchThreadInOtherCudaCall => "another CUDA call",
            Self::LaunchThreadWaitedForGpu => "in a wait for the GPU",
            Self::LaunchCallStillRunning => "in the launch call",
            Self::FirstKernelLaunch => "in the first launch of a kernel, which loads it",
            Self::LaunchQueueFull => "launched, not started: behind a full queue",
            Self::LaunchLatency => "launch latency",
            Self::UsualStartOfQueuedOperation => "between queued operations",
            Self::StreamWaitedForEvent => "launched, not started: waits for an event",
            Self::StreamWaitedForDefaultStream => {
                "launched, not started: behind the default stream"
            }
            Self::StreamWaitedForHostFunction => "launched, not started: behind a host function",
            Self::BetweenCudaGraphNodes => "launched, not started: between nodes of a graph",
            Self::OtherGpuOrProcessBusy => {
                "launched, not started: another device or process worked"
            }
            Self::WindowsDriverDelay => "launched, not started: the Windows driver submits later",
            Self::UnknownDelayAfterLaunch => {
                "launched, not started: the reason is not in the trace"
            }
            Self::PageMigration => "before a page migration, which nobody launches",
            Self::HostAndGpuClocksDisagree => "starts before its launch: the clocks disagree",
            Self::NoLaunchCallRecorded => "the launch is not in the trace",
        }
    }

    /// Label of the idle cause with at most 32 characters, for a table.
    pub fn printed_idle_cause_for_table(self) -> &'static str {
        match self {
            Self::FirstKernelLaunch => "first launches, which load code",
            Self::StreamWaitedForEvent => "late start: waits for an event",
            Self::StreamWaitedForDefaultStream => "late start: the default stream",
            Self::StreamWaitedForHostFunction => "late start: a host function",
            Self::BetweenCudaGraphNodes => "between nodes of a graph",
            Self::OtherGpuOrProcessBusy => "late start: another one worked",
            Self::LaunchQueueFull => "late start: behind a full queue",
            Self::WindowsDriverDelay => "late start: the Windows driver",
            Self::UnknownDelayAfterLaunch => "late start: reason not in trace",
            Self::PageMigration => "before a page migration",
            Self::HostAndGpuClocksDisagree => "clocks of host and device differ",
            other => other.printed_idle_cause(),
        }
    }

    /// Returns whether the idle cause means that the host was launching, or ran its own code before
    /// launching.
    pub fn is_launching_or_own_host_code(self) -> bool {
        matches!(
            self,
            Self::LaunchCallStillRunning
                | Self::LaunchLatency
                | Self::HostCodeBeforeLaunch
                | Self::LaunchThreadInOsCall
                | Self::LaunchThreadOffCpu
        )
    }

    /// Key of the idle cause in JSON; the key never changes.
    pub fn idle_cause_json_key(self) -> &'static str {
        match self {
            Self::HostCodeBeforeLaunch => "host_code",
            Self::LaunchThreadOffCpu => "off_cpu",
            Self::LaunchThreadInOsCall => "os_call",
            Self::LaunchThreadInOtherCudaCall => "cuda_call",
            Self::LaunchThreadWaitedForGpu => "wait",
            Self::LaunchCallStillRunning => "launch_call",
            Self::FirstKernelLaunch => "first_launch",
            Self::LaunchQueueFull => "full_queue",
            Self::LaunchLatency => "launch_latency",
            Self::UsualStartOfQueuedOperation => "back_to_back",
            Self::StreamWaitedForEvent => "event_wait",
            Self::StreamWaitedForDefaultStream => "default_stream",
            Self::StreamWaitedForHostFunction => "host_function",
            Self::BetweenCudaGraphNodes => "in_graph",
            Self::OtherGpuOrProcessBusy => "elsewhere",
            Self::WindowsDriverDelay => "windows_driver",
            Self::UnknownDelayAfterLaunch => "not_started",
            Self::PageMigration => "page_migration",
            Self::HostAndGpuClocksDisagree => "clocks_disagree",
            Self::NoLaunchCallRecorded => "launch_not_recorded",
        }
    }

    /// Returns whether the idle cause means that the next operation was not launched yet, or that
    /// its launch was just completed.
    pub fn is_before_or_right_after_launch(self) -> bool {
        matches!(
            self,
            Self::HostCodeBeforeLaunch
                | Self::LaunchThreadOffCpu
                | Self::LaunchThreadInOsCall
                | Self::LaunchThreadInOtherCudaCall
                | Self::LaunchThreadWaitedForGpu
                | Self::LaunchCallStillRunning
                | Self::FirstKernelLaunch
                | Self::LaunchLatency
        )
    }

    /// Whether the trace shows the reason for the idle time.
    pub fn is_reason_in_trace(self) -> bool {
        !matches!(
            self,
            Self::UnknownDelayAfterLaunch
                | Self::HostAndGpuClocksDisagree
                | Self::NoLaunchCallRecorded
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
pub struct IdleGapPartsByCause {
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

impl IdleGapPartsByCause {
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
        self.cause_list_of_gap.replace_row(gap.operation_after_gap as usize, number);
        if parts.len() > MAX_GAP_PARTS_IN_COLUMNS {
            self.parts_of_long_gaps
                .insert(gap.operation_after_gap, parts.iter().map(|&(_, ns)| ns).collect());
            return;
        }
        let Some((_, all_but_last)) = parts.split_last() else { return };
        for (lengths, (_, ns)) in self.lengths.iter_mut().zip(all_but_last) {
            lengths.replace_row(gap.operation_after_gap as usize, *ns);
        }
    }

    /// Replaces label numbers of ranges, which were read before their names, by names.
    pub(in crate::diagnose) fn replace_range_labels_by_names(
        &mut self,
        name_of: impl Fn(InternedNameId) -> InternedNameId,
    ) {
        self.index_of_cause_list = HashMap::new();
        for (kind, range) in self.distinct_cause_lists.iter_mut().flatten() {
            if *kind == IdleCauseKind::HostCodeBeforeLaunch {
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
        let id = gap.operation_after_gap as usize;
        let number = self.cause_list_of_gap.at(id).checked_sub(1);
        let causes = number.map_or(&[][..], |number| &self.distinct_cause_lists[number as usize]);
        let listed = if causes.len() > MAX_GAP_PARTS_IN_COLUMNS {
            self.parts_of_long_gaps.get(&gap.operation_after_gap)
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
enum StreamHoldingFunctionKind {
    /// The function makes a stream wait for an event.
    WaitForEvent,
    /// The function makes a stream wait until a host function has run.
    WaitForHostFunction,
}

fn stream_holding_kind_of_function(function: &str) -> Option<StreamHoldingFunctionKind> {
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
        return Some(StreamHoldingFunctionKind::WaitForEvent);
    }
    HOST_FUNCTION_ENQUEUE_FUNCTIONS
        .contains(&function)
        .then_some(StreamHoldingFunctionKind::WaitForHostFunction)
}

/// A host call that makes a stream wait; it is kept until the next launch into the stream.
#[derive(Debug, Clone, Copy)]
struct CallThatHoldsStream {
    holding_kind: StreamHoldingFunctionKind,
    function_name: InternedNameId,
    /// Stream that the call makes wait; `None` if the trace does not record the stream.
    held_stream: Option<u64>,
}

/// Largest number of host calls that make streams wait and are kept for each thread.
const MAX_STREAM_HOLDING_CALLS_PER_THREAD: usize = 16;

/// A past host call that may explain an idle gap.
#[derive(Debug, Clone, Copy)]
struct PastHostCall {
    start_ns: i64,
    end_ns: i64,
    function_name: InternedNameId,
    wait_group: Option<WaitGroupIndex>,
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
    /// Whether one host call launched both the operation before and the operation after the gap.
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
    range_start_ns: i64,
    range_end_ns: i64,
    range_name: InternedNameId,
}

/// Shortest host code, nanoseconds, that is named after the range around most of it.
const MIN_HOST_CODE_NAMED_AFTER_RANGE_NS: i64 = MIN_GAP_OF_OTHER_HOST_WORK_NS / 2;

/// Returns, for each kernel function in each process, the kernel that ran first.
fn first_kernels_of_functions(trace: &Trace) -> HashSet<GpuOperationId> {
    let kernels = &trace.kernels;
    let mut first: HashMap<(u32, u32), (i64, GpuOperationId)> = HashMap::new();
    for (id, function) in (0u32..).zip(kernels.function_index.iter_decoded_rows()) {
        let row = id as usize;
        let process = trace.process_index_of_place(kernels.on_gpu.place.at(row));
        let start = (kernels.on_gpu.start_ns.at(row), id);
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
    holds: Vec<Option<StreamHoldingFunctionKind>>,
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
        let time = |row: u32| switches.time_ns[row as usize];
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
                ((place.process_index, syncs.on_gpu.correlation.at(row)), place.stream)
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
                &os.thread_index,
                |_| true,
                |i| os.start_ns[i as usize],
            ),
            switches: TableRowsByThread::group_rows_by_thread(
                threads,
                &switches.thread_index,
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
        let thread = call.thread_index as usize;
        if self.calls.len() <= thread {
            self.calls.resize_with(thread + 1, Vec::new);
            self.held.resize_with(thread + 1, Vec::new);
        }
        if self.calls[thread].len() == self.calls[thread].capacity() {
            let since = self.start_of_earliest_unended_gap(
                trace,
                activities,
                (call.process_index, call.start_ns),
            );
            self.calls[thread].retain(|past| past.end_ns >= since);
        }
        let StreamedCallRow { start_ns: start, end_ns: end, function_name: name, .. } = *call;
        self.calls[thread].push(PastHostCall {
            start_ns: start,
            end_ns: end,
            function_name: name,
            wait_group: wait,
        });
        if let Some(by) = self.holds.get(name.0 as usize).copied().flatten() {
            let stream = self.event_streams.get(&(call.process_index, call.correlation)).copied();
            let held = &mut self.held[thread];
            if held.len() == MAX_STREAM_HOLDING_CALLS_PER_THREAD {
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
        if row.end_ns.saturating_sub(row.start_ns) < MIN_HOST_CODE_NAMED_AFTER_RANGE_NS {
            return;
        }
        let thread = row.thread_index as usize;
        if self.ranges.len() <= thread {
            self.ranges.resize_with(thread + 1, Vec::new);
        }
        if self.ranges[thread].len() == self.ranges[thread].capacity() {
            let process = trace.threads[thread].process_index;
            let since =
                self.start_of_earliest_unended_gap(trace, activities, (process, row.start_ns));
            self.ranges[thread].retain(|past| past.range_end_ns >= since);
        }
        let StreamedRangeRow { start_ns: start, end_ns: end, name_index: label, .. } = *row;
        self.ranges[thread].push(PastNamedRange {
            range_start_ns: start,
            range_end_ns: end,
            range_name: InternedNameId(label),
        });
    }

    /// Returns the label of the shortest range that covers most of a long span.
    fn label_of_range_covering_most(
        &self,
        thread: usize,
        (start, end): (i64, i64),
    ) -> Option<InternedNameId> {
        if end - start < MIN_HOST_CODE_NAMED_AFTER_RANGE_NS {
            return None;
        }
        let most = |of: &&PastNamedRange| {
            (of.range_end_ns.min(end) - of.range_start_ns.max(start)) * 2 > end - start
        };
        let around = self.ranges.get(thread)?.iter().filter(most);
        around
            .min_by_key(|of| of.range_end_ns.saturating_sub(of.range_start_ns))
            .map(|of| of.range_name)
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
        let own =
            activities.iter().zip(&mut self.gap).filter(|(of, _)| of.process_index == process);
        let starts = own.map(|(activity, next)| {
            let over =
                activity.gaps.idle_gaps_from_index(&all, *next).take_while(|gap| gap.end_ns < time);
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
        if launch.start_ns > gap.end_ns + MAX_HOST_GPU_CLOCK_DIFFERENCE_NS {
            split.add_part_of_gap(
                (IdleCauseKind::HostAndGpuClocksDisagree, None),
                gap.idle_gap_length_ns(),
            );
            self.split = split;
            return &self.split;
        }
        let called = launch.start_ns.clamp(gap.start_ns, gap.end_ns);
        let returned = launch.end_ns.clamp(called, gap.end_ns);
        self.split_span_before_launch_by_calls(trace, launch, (gap.start_ns, called), &mut split);
        let loads = returned - called >= MIN_CODE_LOADING_CALL_NS
            && self.first.contains(&gap.operation_after_gap);
        let kind = if loads {
            IdleCauseKind::FirstKernelLaunch
        } else {
            IdleCauseKind::LaunchCallStillRunning
        };
        split.add_part_of_gap((kind, Some(launch.function_name)), returned - called);
        let after = (returned, gap.end_ns);
        let why = self.cause_of_late_start(trace, activities, late, after);
        split.add_part_of_gap(why, after.1 - after.0);
        // Without its waits the host would launch earlier by their length; several waits together
        // save at most the gap, less the time of other delays.
        let latency = matches!(
            why.0,
            IdleCauseKind::LaunchLatency | IdleCauseKind::UsualStartOfQueuedOperation
        );
        let mut left = if latency { gap.idle_gap_length_ns() } else { returned - gap.start_ns };
        for (_, ns) in split.waits.iter_mut().rev() {
            *ns = (*ns).min(left);
            left -= *ns;
        }
        self.split = split;
        &self.split
    }

    /// Splits a span before a launch by the host calls of the launching thread.
    fn split_span_before_launch_by_calls(
        &self,
        trace: &Trace,
        launch: &StreamedCallRow,
        span: (i64, i64),
        split: &mut GapPartsInProgress,
    ) {
        let thread = launch.thread_index as usize;
        let past = self.calls.get(thread).map_or(&[][..], |calls| calls);
        let first = index_of_first_call_ending_after(past, span.0);
        let mut at = span.0;
        // An outer call comes before the calls inside it, and covers them.
        for call in past[first..].iter().filter(|call| call.start_ns < launch.start_ns) {
            let (start, end) = (call.start_ns.max(at), call.end_ns.min(span.1));
            if end <= start {
                continue;
            }
            split.waits.extend(call.wait_group.map(|wait| (wait, call.end_ns - call.start_ns)));
            self.split_span_without_cuda_calls(trace, thread, (at, start), split);
            let kind = if call.wait_group.is_some() {
                IdleCauseKind::LaunchThreadWaitedForGpu
            } else {
                IdleCauseKind::LaunchThreadInOtherCudaCall
            };
            split.add_part_of_gap((kind, Some(call.function_name)), end - start);
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
        let until = own.partition_point(|&call| os.start_ns[call as usize] < span.1);
        let mut first = own[..until].partition_point(|&call| os.start_ns[call as usize] < span.0);
        // Only the last few operating-system calls can reach into the span.
        first = first.saturating_sub(MAX_ENDED_CALLS_IN_SEARCH);
        let mut at = span.0;
        for &call in &own[first..until] {
            let call = call as usize;
            let (start, end) = (os.start_ns[call].max(at), os.end_ns[call].min(span.1));
            if end <= start {
                continue;
            }
            self.split_span_without_any_call(trace, thread, (at, start), split);
            split.add_part_of_gap(
                (IdleCauseKind::LaunchThreadInOsCall, Some(os.function_name[call])),
                end - start,
            );
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
            split.add_part_of_gap((IdleCauseKind::LaunchThreadOffCpu, None), off);
            let range = self.label_of_range_covering_most(thread, span);
            split.add_part_of_gap(
                (IdleCauseKind::HostCodeBeforeLaunch, range),
                span.1 - span.0 - off,
            );
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
        if short && late.launch.end_ns > late.gap.start_ns {
            return (IdleCauseKind::LaunchLatency, None);
        }
        if late.same_launch {
            let kind = if short {
                IdleCauseKind::UsualStartOfQueuedOperation
            } else {
                IdleCauseKind::BetweenCudaGraphNodes
            };
            return (kind, None);
        }
        if short {
            return (IdleCauseKind::UsualStartOfQueuedOperation, None);
        }
        let held = self.held.get(late.launch.thread_index as usize).map_or(&[][..], |held| held);
        let own = |held: &&CallThatHoldsStream| {
            held.held_stream.is_none_or(|stream| stream == late.stream)
        };
        if let Some(held) = held.iter().rev().find(own) {
            let kind = match held.holding_kind {
                StreamHoldingFunctionKind::WaitForEvent => IdleCauseKind::StreamWaitedForEvent,
                StreamHoldingFunctionKind::WaitForHostFunction => {
                    IdleCauseKind::StreamWaitedForHostFunction
                }
            };
            return (kind, Some(held.function_name));
        }
        let streams = &trace.special_streams;
        let process = late.launch.process_index;
        let other = |held: &&CallThatHoldsStream| {
            held.held_stream.is_some_and(|of| {
                streams.synchronise_through_default_stream(process, of, late.stream)
            })
        };
        if let Some(held) = held.iter().rev().find(other) {
            return (IdleCauseKind::StreamWaitedForDefaultStream, Some(held.function_name));
        }
        let others = (0..self.idle_until.len()).filter(|&other| other != late.activity);
        let related = |&other: &usize| {
            let [own, other] = [late.activity, other].map(|index| &activities[index]);
            own.process_index == other.process_index || own.gpu_ordinal == other.gpu_ordinal
        };
        let worked = others.filter(related).any(|other| {
            self.gpu_busy_ns_in_span(trace, other, &activities[other], span) * 2 > span.1 - span.0
        });
        let kind = match late.pending >= MIN_OPERATIONS_IN_FULL_QUEUE {
            _ if worked => IdleCauseKind::OtherGpuOrProcessBusy,
            true => IdleCauseKind::LaunchQueueFull,
            false if self.windows => IdleCauseKind::WindowsDriverDelay,
            false => IdleCauseKind::UnknownDelayAfterLaunch,
        };
        (kind, None)
    }

    /// Nanoseconds of a span in which operations of an activity (process on a GPU) ran.
    fn gpu_busy_ns_in_span(
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
            let over = activity.gaps.first_gap_index_where_not(&all, |gap| gap.end_ns <= until);
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
        let first = own.partition_point(|&row| switches.time_ns[row as usize] <= start);
        let before = first.checked_sub(1).map(|last| own[last]);
        let mut since = before.filter(|&row| !switches.is_put_on_cpu[row as usize]).map(|_| start);
        let mut off = 0;
        for &row in own[first..].iter().take_while(|&&row| switches.time_ns[row as usize] < end) {
            let time = switches.time_ns[row as usize];
            if switches.is_put_on_cpu[row as usize] {
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
