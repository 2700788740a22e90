//! Why a GPU had nothing to do: each gap is split into what the thread that launched the next
//! operation did before its call, the call itself, and the time from the call to the operation.

use hashbrown::{HashMap, HashSet};

use crate::analyze::operations::{AllOperations, OperationId};
use crate::analyze::ranges::range_sweep::RowsByThread;
use crate::analyze::timeline::idle_time::{DeviceActivity, IdleGap};
use crate::diagnose::host::host_waits::WaitSiteId;
use crate::model::Trace;
use crate::model::gpu::SynchronisationKind;
use crate::model::interned_names::NameId;
use crate::model::packed_columns::PackedColumn;
use crate::read::{CallRow, RangeRow};
use crate::stats::without_interface_version;

/// Launched work starts within this time unless something holds it up.
pub const MAX_START_LATENCY_NS: i64 = 20_000;
/// Launching a kernel takes less, also from Python: the host did something else in longer gaps.
pub const MIN_GAP_WITH_OTHER_HOST_WORK_NS: i64 = 1_000_000;
/// Largest disagreement of a recorder's clocks for host and device, nanoseconds.
pub const HOST_DEVICE_CLOCK_ERROR_NS: i64 = 1_000;
/// A first launch call that takes at least this long loads the kernel's code, nanoseconds. In
/// public traces of five programs all 72 launch calls above 300 µs were first launches.
const MIN_CODE_LOADING_NS: i64 = 100_000;
/// Launched operations that have not started from which a queue counts as full: CUDA's holds 1024.
const FULL_QUEUE_OPERATIONS: usize = 1000;

/// Cause for which the GPU was idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IdleCauseKind {
    /// Before the launch the host ran code outside of CUDA calls.
    HostCode,
    /// Before the launch the operating system had taken the thread off the CPU.
    OffCpu,
    /// Before the launch the host was in a call of the operating system.
    OsCall,
    /// Before the launch the host was in another CUDA call.
    Call,
    /// The GPU was idle because the host waited for it before the next launch.
    Wait,
    /// The host call that launches the work was still running.
    LaunchCall,
    /// A long call that launched a kernel for the first time, and loaded its code.
    FirstLaunch,
    /// The usual time from the end of the launch call, in the gap, to the start of the operation.
    LaunchLatency,
    /// The work was launched before the gap, and started as fast as queued work usually does.
    BackToBack,
    /// Launched, not started: an event that the stream waits for.
    EventWait,
    /// The launched work was delayed: the legacy default stream waits for another stream, or
    /// another stream waits for it.
    DefaultStream,
    /// Launched, not started: a function of the host in the stream.
    HostFunction,
    /// The work was launched but not started: the gap lies between nodes of one graph.
    InGraph,
    /// The work was launched but not started, while another device or process worked.
    Elsewhere,
    /// Launched, not started, behind as many operations as a queue holds.
    FullQueue,
    /// The launched work was delayed: the Windows driver (WDDM) collects launches, and moves memory
    /// before it submits them.
    WindowsDriver,
    /// Launched, not started; the reason is not in the trace.
    NotStarted,
    /// The gap ends with a migration of managed pages, which no call launches.
    Migration,
    /// The operation starts before its own launch, so the clocks disagree.
    Clocks,
    /// The launch of the operation after the gap is not in the trace.
    Unknown,
}

impl IdleCauseKind {
    /// Label in printed output.
    pub fn label(self) -> &'static str {
        match self {
            Self::HostCode => "host code between launches",
            Self::OffCpu => "the thread was not on a CPU",
            Self::OsCall => "a call of the operating system",
            Self::Call => "another CUDA call",
            Self::Wait => "in a wait for the GPU",
            Self::LaunchCall => "in the launch call",
            Self::FirstLaunch => "in the first launch of a kernel, which loads it",
            Self::FullQueue => "launched, not started: behind a full queue",
            Self::LaunchLatency => "launch latency",
            Self::BackToBack => "between queued operations",
            Self::EventWait => "launched, not started: waits for an event",
            Self::DefaultStream => "launched, not started: behind the default stream",
            Self::HostFunction => "launched, not started: behind a host function",
            Self::InGraph => "launched, not started: between nodes of a graph",
            Self::Elsewhere => "launched, not started: another device or process worked",
            Self::WindowsDriver => "launched, not started: the Windows driver submits later",
            Self::NotStarted => "launched, not started: the reason is not in the trace",
            Self::Migration => "before a page migration, which nobody launches",
            Self::Clocks => "starts before its launch: the clocks disagree",
            Self::Unknown => "the launch is not in the trace",
        }
    }

    /// Label of at most 32 characters, for a table.
    pub fn brief_label(self) -> &'static str {
        match self {
            Self::FirstLaunch => "first launches, which load code",
            Self::EventWait => "late start: waits for an event",
            Self::DefaultStream => "late start: the default stream",
            Self::HostFunction => "late start: a host function",
            Self::InGraph => "between nodes of a graph",
            Self::Elsewhere => "late start: another one worked",
            Self::FullQueue => "late start: behind a full queue",
            Self::WindowsDriver => "late start: the Windows driver",
            Self::NotStarted => "late start: reason not in trace",
            Self::Migration => "before a page migration",
            Self::Clocks => "clocks of host and device differ",
            other => other.label(),
        }
    }

    /// Returns whether the host was launching, or was about to launch.
    pub fn is_host_launching(self) -> bool {
        matches!(
            self,
            Self::LaunchCall | Self::LaunchLatency | Self::HostCode | Self::OsCall | Self::OffCpu
        )
    }

    /// The key of the kind in JSON, which never changes.
    pub fn json_key(self) -> &'static str {
        match self {
            Self::HostCode => "host_code",
            Self::OffCpu => "off_cpu",
            Self::OsCall => "os_call",
            Self::Call => "cuda_call",
            Self::Wait => "wait",
            Self::LaunchCall => "launch_call",
            Self::FirstLaunch => "first_launch",
            Self::FullQueue => "full_queue",
            Self::LaunchLatency => "launch_latency",
            Self::BackToBack => "back_to_back",
            Self::EventWait => "event_wait",
            Self::DefaultStream => "default_stream",
            Self::HostFunction => "host_function",
            Self::InGraph => "in_graph",
            Self::Elsewhere => "elsewhere",
            Self::WindowsDriver => "windows_driver",
            Self::NotStarted => "not_started",
            Self::Migration => "page_migration",
            Self::Clocks => "clocks_disagree",
            Self::Unknown => "launch_not_recorded",
        }
    }

    /// Returns whether the work was not launched yet, or only just.
    pub fn is_before_launch(self) -> bool {
        matches!(
            self,
            Self::HostCode
                | Self::OffCpu
                | Self::OsCall
                | Self::Call
                | Self::Wait
                | Self::LaunchCall
                | Self::FirstLaunch
                | Self::LaunchLatency
        )
    }

    /// Whether the trace contains the reason for the idle time.
    pub fn is_explained(self) -> bool {
        !matches!(self, Self::NotStarted | Self::Clocks | Self::Unknown)
    }
}

/// A cause with the function that is to blame, or the range around most of the host code.
pub type CauseAndName = (IdleCauseKind, Option<NameId>);

/// Number of parts of a gap whose lengths are stored in columns; gaps with more parts are stored in
/// a list.
const STORED_GAP_PARTS: usize = 4;

/// The parts of all idle gaps, by cause.
#[derive(Debug, Default)]
pub struct IdlePartsByCause {
    causes: Vec<Vec<CauseAndName>>,
    numbers: HashMap<Vec<CauseAndName>, u32>,
    /// For the operation after each gap, 1 + index into `causes`; 0: its launch was not read.
    of_gap: PackedColumn<u32>,
    /// For the operation after each gap, the length of each part except the last part, which has
    /// the remainder.
    lengths: [PackedColumn<i64>; STORED_GAP_PARTS - 1],
    /// Durations of the parts of gaps that have several.
    long: HashMap<OperationId, Vec<i64>>,
}

impl IdlePartsByCause {
    pub(in crate::diagnose) fn new(operations: usize) -> Self {
        Self {
            of_gap: PackedColumn::column_filled_with(operations, 0),
            lengths: std::array::from_fn(|_| PackedColumn::column_filled_with(operations, 0)),
            ..Self::default()
        }
    }

    /// Stores the parts of a gap, which add up to its length.
    pub(in crate::diagnose) fn set(&mut self, gap: &IdleGap, parts: &[(CauseAndName, i64)]) {
        let causes: Vec<CauseAndName> = parts.iter().map(|&(why, _)| why).collect();
        let number = self.numbers.get(&causes).copied().unwrap_or_else(|| {
            let new = u32::try_from(self.causes.len() + 1);
            let new = new.expect("fewer than 2^32 combinations of causes");
            self.numbers.insert(causes.clone(), new);
            self.causes.push(causes);
            new
        });
        self.of_gap.set_row(gap.after as usize, number);
        if parts.len() > STORED_GAP_PARTS {
            self.long.insert(gap.after, parts.iter().map(|&(_, ns)| ns).collect());
            return;
        }
        let Some((_, all_but_last)) = parts.split_last() else { return };
        for (lengths, (_, ns)) in self.lengths.iter_mut().zip(all_but_last) {
            lengths.set_row(gap.after as usize, *ns);
        }
    }

    /// Replaces labels of ranges by their names.
    pub(in crate::diagnose) fn rename_range_labels(&mut self, name_of: impl Fn(NameId) -> NameId) {
        self.numbers = HashMap::new();
        for (kind, range) in self.causes.iter_mut().flatten() {
            if *kind == IdleCauseKind::HostCode {
                *range = range.map(&name_of);
            }
        }
    }

    /// The causes of a gap and the time of each, in order of time; they add up to its length. No
    /// part is returned if the launch of the operation after the gap is not in the trace.
    pub fn causes_of_gap(&self, gap: &IdleGap) -> impl Iterator<Item = (CauseAndName, i64)> {
        let id = gap.after as usize;
        let number = self.of_gap.at(id).checked_sub(1);
        let causes = number.map_or(&[][..], |number| &self.causes[number as usize]);
        let listed = if causes.len() > STORED_GAP_PARTS { self.long.get(&gap.after) } else { None };
        let mut rest = gap.gap_ns();
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

/// Functions that can delay a later launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HoldingFunction {
    /// The call holds up a stream until an event.
    Event,
    /// A stream, until a function of the host has run.
    HostFunction,
}

fn holding_kind_of_function(function: &str) -> Option<HoldingFunction> {
    const EVENT_WAIT_FUNCTIONS: &[&str] =
        &["cudaStreamWaitEvent", "cuStreamWaitEvent", "hipStreamWaitEvent"];
    const HOST_FUNCTION_CALLS: &[&str] = &[
        "cudaLaunchHostFunc",
        "cuLaunchHostFunc",
        "hipLaunchHostFunc",
        "cudaStreamAddCallback",
        "cuStreamAddCallback",
        "hipStreamAddCallback",
    ];
    let function = without_interface_version(function).trim_end_matches("_ptsz");
    if EVENT_WAIT_FUNCTIONS.contains(&function) {
        return Some(HoldingFunction::Event);
    }
    HOST_FUNCTION_CALLS.contains(&function).then_some(HoldingFunction::HostFunction)
}

/// A call that holds up a stream, until the next launch into that stream.
#[derive(Debug, Clone, Copy)]
struct StreamHoldingCall {
    by: HoldingFunction,
    name: NameId,
    /// Stream that the waiting call holds up; `None` if the trace does not record the stream.
    stream: Option<u64>,
}

/// Largest number of such calls that are kept for a thread.
const MAX_HOLDING_CALLS_PER_THREAD: usize = 16;

/// A call that may explain a gap.
#[derive(Debug, Clone, Copy)]
struct RecentCall {
    start: i64,
    end: i64,
    name: NameId,
    wait: Option<WaitSiteId>,
}

/// Number of consecutive calls that ended before a gap after which the search for a call that
/// reaches into the gap stops: calls nest little.
const MAX_CALLS_ENDED_BEFORE_GAP: usize = 8;

/// A launch and the gap that its operation ended.
#[derive(Debug, Clone, Copy)]
pub(in crate::diagnose) struct LateLaunchAndGap<'a> {
    pub launch: &'a CallRow,
    pub gap: &'a IdleGap,
    /// Index of the activity in which the gap lies.
    pub activity: usize,
    /// Stream of the operation after the gap.
    pub stream: u64,
    /// Whether the operation before the gap has the same launch.
    pub same_launch: bool,
    /// Operations that were launched before and had not started.
    pub pending: usize,
}

/// An idle gap that is being divided into parts by cause.
#[derive(Debug, Default)]
pub(in crate::diagnose) struct GapSplit {
    /// The parts in order of time, each cause once.
    pub parts: Vec<(CauseAndName, i64)>,
    /// Waits that reach into the gap before the launch, and what of the gap each could save, at
    /// most the time that it took.
    pub waits: Vec<(WaitSiteId, i64)>,
}

impl GapSplit {
    fn clear_gap_parts(&mut self) {
        self.parts.clear();
        self.waits.clear();
    }

    fn add(&mut self, why: CauseAndName, ns: i64) {
        if ns <= 0 {
            return;
        }
        match self.parts.iter_mut().find(|(known, _)| *known == why) {
            Some((_, total)) => *total += ns,
            None => self.parts.push((why, ns)),
        }
    }
}

/// A range that may explain a long gap.
#[derive(Debug, Clone, Copy)]
struct PastRange {
    start: i64,
    end: i64,
    label: NameId,
}

/// Host code that takes at least this long is named by the range around most of it.
const MIN_NAMED_HOST_CODE_NS: i64 = MIN_GAP_WITH_OTHER_HOST_WORK_NS / 2;

/// The first kernel of each function in each process.
fn first_kernel_of_each_function(trace: &Trace) -> HashSet<OperationId> {
    let kernels = &trace.kernels;
    let mut first: HashMap<(u32, u32), (i64, OperationId)> = HashMap::new();
    for (id, function) in (0u32..).zip(kernels.function.iter()) {
        let row = id as usize;
        let process = trace.process_of_place(kernels.on_gpu.place.at(row));
        let start = (kernels.on_gpu.start.at(row), id);
        let earliest = first.entry((process, function)).or_insert(start);
        *earliest = start.min(*earliest);
    }
    first.into_values().map(|(_, id)| id).collect()
}

/// Whether a trace is of Windows, or of Linux inside of it (WSL), which uses the same driver.
fn uses_windows_driver(trace: &Trace) -> bool {
    let mentions = |key: &str, text: &str| {
        trace.metadata.get(key).is_some_and(|of| of.to_ascii_lowercase().contains(text))
    };
    mentions("SoftwarePlatform", "windows") || mentions("SoftwareReleaseVersion", "microsoft")
}

/// Recent calls of each thread, as far as they may explain gaps that are not over yet.
#[derive(Debug, Default)]
pub(in crate::diagnose) struct RecentCallsByThread {
    /// Recent calls of each thread, in order of time.
    calls: Vec<Vec<RecentCall>>,
    /// Ranges of each thread that are long enough to name host code, in order of their start.
    ranges: Vec<Vec<PastRange>>,
    /// Calls of each thread that hold up streams.
    held: Vec<Vec<StreamHoldingCall>>,
    /// How the call of each name holds up a stream.
    holds: Vec<Option<HoldingFunction>>,
    /// Streams that wait for an event, by process and correlation id of the call.
    event_streams: HashMap<(u32, u32), u64>,
    os_calls: RowsByThread,
    switches: RowsByThread,
    /// The first kernel of each function in each process.
    first: HashSet<OperationId>,
    /// Whether the trace was recorded with the Windows driver.
    windows: bool,
    /// Index of the first gap of each activity that is not over.
    gap: Vec<usize>,
    /// Idle time of each activity up to each gap; empty where there is only one activity.
    idle_until: Vec<PackedColumn<i64>>,
    split: GapSplit,
}

impl RecentCallsByThread {
    /// State before the first call of a trace is read.
    pub fn new(trace: &Trace, activities: &[DeviceActivity]) -> Self {
        let threads = trace.threads.len();
        let (os, switches) = (&trace.os_calls, &trace.switches);
        let time = |row: u32| switches.time[row as usize];
        let holds = (0..trace.names.len())
            .map(|index| {
                holding_kind_of_function(
                    trace.names.text(NameId(u32::try_from(index).unwrap_or(0))),
                )
            })
            .collect();
        let syncs = &trace.syncs;
        let event_streams = (0..syncs.kind.len())
            .filter(|&row| syncs.kind[row] == SynchronisationKind::StreamWaitsEvent)
            .map(|row| {
                let place = &trace.places[syncs.on_gpu.place.at(row).0 as usize];
                ((place.process, syncs.on_gpu.correlation.at(row)), place.stream)
            })
            .filter(|&((_, correlation), _)| correlation != 0)
            .collect();
        let all = AllOperations::new(trace);
        let idle_until = |activity: &DeviceActivity| {
            let sums = activity.gaps.iter(&all).scan(0, |sum, gap| {
                *sum += gap.gap_ns();
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
            os_calls: RowsByThread::sorted_by_thread(
                threads,
                &os.thread,
                |_| true,
                |i| os.start[i as usize],
            ),
            switches: RowsByThread::sorted_by_thread(threads, &switches.thread, |_| true, time),
            first: first_kernel_of_each_function(trace),
            windows: uses_windows_driver(trace),
            gap: vec![0; activities.len()],
            idle_until: match activities.len() {
                0 | 1 => Vec::new(),
                _ => activities.iter().map(idle_until).collect(),
            },
            split: GapSplit::default(),
        }
    }

    /// The next call.
    pub fn add(
        &mut self,
        trace: &Trace,
        activities: &[DeviceActivity],
        call: &CallRow,
        wait: Option<WaitSiteId>,
    ) {
        let thread = call.thread as usize;
        if self.calls.len() <= thread {
            self.calls.resize_with(thread + 1, Vec::new);
            self.held.resize_with(thread + 1, Vec::new);
        }
        if self.calls[thread].len() == self.calls[thread].capacity() {
            let since = self.earliest_open_gap(trace, activities, (call.process, call.start));
            self.calls[thread].retain(|past| past.end >= since);
        }
        let CallRow { start, end, name, .. } = *call;
        self.calls[thread].push(RecentCall { start, end, name, wait });
        if let Some(by) = self.holds.get(name.0 as usize).copied().flatten() {
            let stream = self.event_streams.get(&(call.process, call.correlation)).copied();
            let held = &mut self.held[thread];
            if held.len() == MAX_HOLDING_CALLS_PER_THREAD {
                held.remove(0);
            }
            held.push(StreamHoldingCall { by, name, stream });
        }
    }

    /// The next range.
    pub fn add_range(&mut self, trace: &Trace, activities: &[DeviceActivity], row: &RangeRow) {
        if row.end.saturating_sub(row.start) < MIN_NAMED_HOST_CODE_NS {
            return;
        }
        let thread = row.thread as usize;
        if self.ranges.len() <= thread {
            self.ranges.resize_with(thread + 1, Vec::new);
        }
        if self.ranges[thread].len() == self.ranges[thread].capacity() {
            let process = trace.threads[thread].process;
            let since = self.earliest_open_gap(trace, activities, (process, row.start));
            self.ranges[thread].retain(|past| past.end >= since);
        }
        let RangeRow { start, end, label, .. } = *row;
        self.ranges[thread].push(PastRange { start, end, label: NameId(label) });
    }

    /// The label of the shortest range around most of a long span.
    fn range_around_span(&self, thread: usize, (start, end): (i64, i64)) -> Option<NameId> {
        if end - start < MIN_NAMED_HOST_CODE_NS {
            return None;
        }
        let most = |of: &&PastRange| (of.end.min(end) - of.start.max(start)) * 2 > end - start;
        let around = self.ranges.get(thread)?.iter().filter(most);
        around.min_by_key(|of| of.end.saturating_sub(of.start)).map(|of| of.label)
    }

    /// After a launch, earlier events and host functions no longer hold up the stream.
    pub fn forget_stream_causes(&mut self, thread: u32, streams: impl Iterator<Item = u64>) {
        let Some(held) = self.held.get_mut(thread as usize).filter(|held| !held.is_empty()) else {
            return;
        };
        let streams: HashSet<u64> = streams.collect();
        held.retain(|held| held.stream.is_some_and(|stream| !streams.contains(&stream)));
    }

    /// The earliest start of a gap of a process that is not over at a time: what ended before it
    /// explains no later gap.
    fn earliest_open_gap(
        &mut self,
        trace: &Trace,
        activities: &[DeviceActivity],
        (process, time): (u32, i64),
    ) -> i64 {
        let all = AllOperations::new(trace);
        let own = activities.iter().zip(&mut self.gap).filter(|(of, _)| of.process == process);
        let starts = own.map(|(activity, next)| {
            let over = activity.gaps.from(&all, *next).take_while(|gap| gap.end < time);
            *next += over.count();
            activity.gaps.get(&all, *next).map_or(i64::MAX, |gap| gap.start)
        });
        starts.min().unwrap_or(i64::MAX)
    }

    /// Splits the gap before a launched operation.
    pub fn split_gap(
        &mut self,
        trace: &Trace,
        activities: &[DeviceActivity],
        late: &LateLaunchAndGap<'_>,
    ) -> &GapSplit {
        let mut split = std::mem::take(&mut self.split);
        split.clear_gap_parts();
        let &LateLaunchAndGap { launch, gap, .. } = late;
        if launch.start > gap.end + HOST_DEVICE_CLOCK_ERROR_NS {
            split.add((IdleCauseKind::Clocks, None), gap.gap_ns());
            self.split = split;
            return &self.split;
        }
        let called = launch.start.clamp(gap.start, gap.end);
        let returned = launch.end.clamp(called, gap.end);
        self.split_before_launch(trace, launch, (gap.start, called), &mut split);
        let loads = returned - called >= MIN_CODE_LOADING_NS && self.first.contains(&gap.after);
        let kind = if loads { IdleCauseKind::FirstLaunch } else { IdleCauseKind::LaunchCall };
        split.add((kind, Some(launch.name)), returned - called);
        let after = (returned, gap.end);
        let why = self.split_launched_but_not_started(trace, activities, late, after);
        split.add(why, after.1 - after.0);
        // Without its waits the host would launch earlier by their length; several waits save at
        // most one gap, and no time in which another cause delays the operation.
        let latency = matches!(why.0, IdleCauseKind::LaunchLatency | IdleCauseKind::BackToBack);
        let mut left = if latency { gap.gap_ns() } else { returned - gap.start };
        for (_, ns) in split.waits.iter_mut().rev() {
            *ns = (*ns).min(left);
            left -= *ns;
        }
        self.split = split;
        &self.split
    }

    /// Splits a span before a launch by the calls of its thread.
    fn split_before_launch(
        &self,
        trace: &Trace,
        launch: &CallRow,
        span: (i64, i64),
        split: &mut GapSplit,
    ) {
        let thread = launch.thread as usize;
        let past = self.calls.get(thread).map_or(&[][..], |calls| calls);
        let first = first_call_reaching(past, span.0);
        let mut at = span.0;
        // An outer call comes before the inner calls, which it covers.
        for call in past[first..].iter().filter(|call| call.start < launch.start) {
            let (start, end) = (call.start.max(at), call.end.min(span.1));
            if end <= start {
                continue;
            }
            split.waits.extend(call.wait.map(|wait| (wait, call.end - call.start)));
            self.split_without_cuda_calls(trace, thread, (at, start), split);
            let kind = if call.wait.is_some() { IdleCauseKind::Wait } else { IdleCauseKind::Call };
            split.add((kind, Some(call.name)), end - start);
            at = end;
        }
        self.split_without_cuda_calls(trace, thread, (at, span.1), split);
    }

    /// Divides a time span in which the host made no CUDA call.
    fn split_without_cuda_calls(
        &self,
        trace: &Trace,
        thread: usize,
        span: (i64, i64),
        split: &mut GapSplit,
    ) {
        if span.1 <= span.0 {
            return;
        }
        let os = &trace.os_calls;
        let own = self.os_calls.rows_of_thread(thread);
        let until = own.partition_point(|&call| os.start[call as usize] < span.1);
        let mut first = own[..until].partition_point(|&call| os.start[call as usize] < span.0);
        // Only the last few calls can reach into the time span.
        first = first.saturating_sub(MAX_CALLS_ENDED_BEFORE_GAP);
        let mut at = span.0;
        for &call in &own[first..until] {
            let call = call as usize;
            let (start, end) = (os.start[call].max(at), os.end[call].min(span.1));
            if end <= start {
                continue;
            }
            self.split_without_calls(trace, thread, (at, start), split);
            split.add((IdleCauseKind::OsCall, Some(os.name[call])), end - start);
            at = end;
        }
        self.split_without_calls(trace, thread, (at, span.1), split);
    }

    /// Divides a time span in which the host made no call at all.
    fn split_without_calls(
        &self,
        trace: &Trace,
        thread: usize,
        span: (i64, i64),
        split: &mut GapSplit,
    ) {
        if span.1 > span.0 {
            let off = self.time_off_cpu_ns(trace, thread, span);
            split.add((IdleCauseKind::OffCpu, None), off);
            let range = self.range_around_span(thread, span);
            split.add((IdleCauseKind::HostCode, range), span.1 - span.0 - off);
        }
    }

    /// Why launched work does not start for a span.
    fn split_launched_but_not_started(
        &self,
        trace: &Trace,
        activities: &[DeviceActivity],
        late: &LateLaunchAndGap<'_>,
        span: (i64, i64),
    ) -> CauseAndName {
        let short = span.1 - span.0 < MAX_START_LATENCY_NS;
        if short && late.launch.end > late.gap.start {
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
        let own =
            |held: &&StreamHoldingCall| held.stream.is_none_or(|stream| stream == late.stream);
        if let Some(held) = held.iter().rev().find(own) {
            let kind = match held.by {
                HoldingFunction::Event => IdleCauseKind::EventWait,
                HoldingFunction::HostFunction => IdleCauseKind::HostFunction,
            };
            return (kind, Some(held.name));
        }
        let streams = &trace.streams;
        let process = late.launch.process;
        let other = |held: &&StreamHoldingCall| {
            held.stream.is_some_and(|of| streams.wait_for_each_other(process, of, late.stream))
        };
        if let Some(held) = held.iter().rev().find(other) {
            return (IdleCauseKind::DefaultStream, Some(held.name));
        }
        let others = (0..self.idle_until.len()).filter(|&other| other != late.activity);
        let related = |&other: &usize| {
            let [own, other] = [late.activity, other].map(|index| &activities[index]);
            own.process == other.process || own.device == other.device
        };
        let worked = others.filter(related).any(|other| {
            self.busy_ns_in_span(trace, other, &activities[other], span) * 2 > span.1 - span.0
        });
        let kind = match late.pending >= FULL_QUEUE_OPERATIONS {
            _ if worked => IdleCauseKind::Elsewhere,
            true => IdleCauseKind::FullQueue,
            false if self.windows => IdleCauseKind::WindowsDriver,
            false => IdleCauseKind::NotStarted,
        };
        (kind, None)
    }

    /// How long an activity worked in a span, in nanoseconds.
    fn busy_ns_in_span(
        &self,
        trace: &Trace,
        index: usize,
        activity: &DeviceActivity,
        (start, end): (i64, i64),
    ) -> i64 {
        let all = AllOperations::new(trace);
        let (start, end) = (start.max(activity.span.0), end.min(activity.span.1));
        if end <= start {
            return 0;
        }
        let idle = |until: i64| {
            let over = activity.gaps.partition_point(&all, |gap| gap.end <= until);
            let whole = over.checked_sub(1).map_or(0, |last| self.idle_until[index].at(last));
            whole + activity.gaps.get(&all, over).map_or(0, |gap| (until - gap.start).max(0))
        };
        end - start - (idle(end) - idle(start))
    }

    /// Nanoseconds of a span in which a thread was not on a CPU.
    fn time_off_cpu_ns(&self, trace: &Trace, thread: usize, (start, end): (i64, i64)) -> i64 {
        let switches = &trace.switches;
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

/// The first of the past calls that may reach beyond a time.
fn first_call_reaching(past: &[RecentCall], time: i64) -> usize {
    let (mut first, mut over) = (past.len(), 0);
    for (index, call) in past.iter().enumerate().rev() {
        if call.end > time {
            (first, over) = (index, 0);
        } else {
            over += 1;
            if over == MAX_CALLS_ENDED_BEFORE_GAP {
                break;
            }
        }
    }
    first
}
