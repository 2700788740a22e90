//! Times in which a GPU did nothing: classes, causes, what ran before and after.

use hashbrown::HashMap;

use super::context::Context;
use crate::analyze::idle::{Activity, Gap};
use crate::analyze::launches::NONE;
use crate::analyze::sweep::ByThread;

/// Gaps below this are normal between kernels of one stream.
pub const WARNING_NS: i64 = 20_000;
/// Gaps above this mean that the GPU waits for the host.
pub const SEVERE_NS: i64 = 50_000;
/// Transitions that are listed.
const TOP: usize = 5;

/// A class of gaps by their length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GapClass {
    /// How many.
    pub count: usize,
    /// How long in all, in nanoseconds.
    pub total_ns: i64,
}

/// Why the GPU had nothing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CauseKind {
    /// The work was launched before the gap: the GPU, or what it depends on, is late.
    Queued,
    /// The host was in the call that launched the work.
    LaunchCall,
    /// The host had waited for the GPU, and launched afterwards.
    Wait,
    /// Another call of CUDA took most of the gap.
    Call,
    /// A call of the operating system took most of the gap.
    OsCall,
    /// The thread was not on a CPU for most of the gap.
    OffCpu,
    /// The host ran code of its own.
    HostCode,
    /// The launch is not in the trace.
    Unknown,
}

impl CauseKind {
    /// As text.
    pub fn label(self) -> &'static str {
        match self {
            Self::Queued => "launched before, not started",
            Self::LaunchCall => "the launch call itself",
            Self::Wait => "after a wait for the GPU",
            Self::Call => "another CUDA call",
            Self::OsCall => "a call of the operating system",
            Self::OffCpu => "the thread was not on a CPU",
            Self::HostCode => "host code between launches",
            Self::Unknown => "the launch is not in the trace",
        }
    }
}

/// Gaps of one cause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cause {
    /// Why.
    pub kind: CauseKind,
    /// The function, of a wait or a call.
    pub function: Option<String>,
    /// How many gaps.
    pub count: usize,
    /// How long in all, in nanoseconds.
    pub total_ns: i64,
    /// The longest.
    pub longest: (i64, i64),
}

/// What ran before gaps and after them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transition {
    /// The operation that ended.
    pub before: String,
    /// The operation that started.
    pub after: String,
    /// The range that it was launched in, where that is one.
    pub range: Option<String>,
    /// How many gaps.
    pub count: usize,
    /// How long in all, in nanoseconds.
    pub total_ns: i64,
    /// The longest.
    pub longest: (i64, i64),
}

/// The gaps of a process on a device.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GapReport {
    /// Below 20 µs: launches follow each other.
    pub normal: GapClass,
    /// 20 to 50 µs: the host interferes.
    pub warning: GapClass,
    /// Above 50 µs: the GPU waits for the host.
    pub severe: GapClass,
    /// The longest, in nanoseconds.
    pub longest_ns: i64,
    /// Causes, the most expensive first.
    pub causes: Vec<Cause>,
    /// What ran before and after, the most expensive first.
    pub transitions: Vec<Transition>,
}

impl GapReport {
    /// All of them.
    pub fn count(&self) -> usize {
        self.normal.count + self.warning.count + self.severe.count
    }

    /// How long in all, in nanoseconds.
    pub fn total_ns(&self) -> i64 {
        self.normal.total_ns + self.warning.total_ns + self.severe.total_ns
    }

    /// The mean length in nanoseconds; 0 without gaps.
    #[allow(clippy::cast_precision_loss)]
    pub fn mean_ns(&self) -> f64 {
        self.total_ns() as f64 / self.count().max(1) as f64
    }

    /// Idle time whose cause is one of these, in nanoseconds.
    pub fn of_causes(&self, kinds: &[CauseKind]) -> i64 {
        self.causes.iter().filter(|of| kinds.contains(&of.kind)).map(|of| of.total_ns).sum()
    }
}

/// Spans that belong together: how many, how long, the longest.
#[derive(Clone, Copy)]
struct Sum {
    count: usize,
    total_ns: i64,
    longest: Gap,
}

impl Sum {
    fn add<K: std::hash::Hash + Eq>(sums: &mut HashMap<K, Self>, key: K, gap: &Gap) {
        let sum = sums.entry(key).or_insert(Self { count: 0, total_ns: 0, longest: *gap });
        sum.count += 1;
        sum.total_ns += gap.length();
        if gap.length() > sum.longest.length() {
            sum.longest = *gap;
        }
    }

    fn span(&self) -> (i64, i64) {
        (self.longest.start, self.longest.end)
    }
}

/// What the threads of a trace did, in order of time.
pub(super) struct HostTime {
    calls: ByThread,
    os_calls: ByThread,
    switches: ByThread,
}

impl HostTime {
    pub(super) fn of(context: &Context<'_>) -> Self {
        let trace = context.trace;
        let threads = trace.threads.len();
        let (calls, os) = (&trace.calls, &trace.os_calls);
        let switches = &trace.switches;
        Self {
            calls: ByThread::sorted(threads, &calls.thread, |_| true, |i| calls.start[i as usize]),
            os_calls: ByThread::sorted(threads, &os.thread, |_| true, |i| os.start[i as usize]),
            switches: ByThread::sorted(
                threads,
                &switches.thread,
                |_| true,
                |i| switches.time[i as usize],
            ),
        }
    }
}

/// The gaps of an activity.
pub(super) fn report(context: &Context<'_>, host: &HostTime, activity: &Activity) -> GapReport {
    let mut report = GapReport::default();
    let mut causes: HashMap<(CauseKind, Option<&str>), Sum> = HashMap::new();
    let mut transitions: HashMap<(u64, u64), Sum> = HashMap::new();
    for gap in &activity.gaps {
        let length = gap.length();
        let class = match length {
            _ if length < WARNING_NS => &mut report.normal,
            _ if length <= SEVERE_NS => &mut report.warning,
            _ => &mut report.severe,
        };
        class.count += 1;
        class.total_ns += length;
        report.longest_ns = report.longest_ns.max(length);
        Sum::add(&mut causes, cause(context, host, gap), gap);
        let kinds = (kind_key(context, gap.before), kind_key(context, gap.after));
        Sum::add(&mut transitions, kinds, gap);
    }
    report.causes = causes
        .into_iter()
        .map(|((kind, function), sum)| Cause {
            kind,
            function: function.map(str::to_owned),
            count: sum.count,
            total_ns: sum.total_ns,
            longest: sum.span(),
        })
        .collect();
    report.causes.sort_by(|a, b| {
        b.total_ns.cmp(&a.total_ns).then_with(|| (a.kind, &a.function).cmp(&(b.kind, &b.function)))
    });
    let mut sums: Vec<((u64, u64), Sum)> = transitions.into_iter().collect();
    sums.sort_by_key(|&(kinds, sum)| (std::cmp::Reverse(sum.total_ns), kinds));
    report.transitions = sums
        .iter()
        .take(TOP)
        .map(|(_, sum)| Transition {
            before: context.all.name(sum.longest.before),
            after: context.all.name(sum.longest.after),
            range: context.path_of(sum.longest.after),
            count: sum.count,
            total_ns: sum.total_ns,
            longest: sum.span(),
        })
        .collect();
    report
}

/// The same for operations of the same name.
fn kind_key(context: &Context<'_>, operation: u32) -> u64 {
    let (kind, index) = context.all.part(operation);
    let name = match kind {
        crate::analyze::operations::Kind::Kernel => {
            context.trace.functions[context.trace.kernels.function[index] as usize].demangled.0
        }
        crate::analyze::operations::Kind::Copy => context.trace.copies.kind[index].0,
        _ => 0,
    };
    (kind as u64) << 32 | u64::from(name)
}

/// Why the GPU was idle, with the function that is to blame.
pub(super) fn cause<'a>(
    context: &Context<'a>,
    host: &HostTime,
    gap: &Gap,
) -> (CauseKind, Option<&'a str>) {
    let launch = context.launches.call_of[gap.after as usize];
    if launch == NONE {
        return (CauseKind::Unknown, None);
    }
    let calls = &context.trace.calls;
    let (start, end) = (calls.start[launch as usize], calls.end[launch as usize]);
    if end <= gap.start {
        return (CauseKind::Queued, None);
    }
    if start <= gap.start {
        return (CauseKind::LaunchCall, Some(context.call_name(launch)));
    }
    // The GPU ran dry while the host had not begun to launch.
    let thread = calls.thread[launch as usize] as usize;
    let until = start.min(gap.end);
    let window = until - gap.start;
    let own = host.calls.of(thread);
    let first = own.partition_point(|&call| calls.start[call as usize] < start);
    let mut longest: (i64, Option<u32>) = (0, None);
    for &call in own[..first].iter().rev() {
        let (begin, end) = (calls.start[call as usize], calls.end[call as usize]);
        if end < gap.start {
            break;
        }
        if context.waits[call as usize] {
            return (CauseKind::Wait, Some(context.call_name(call)));
        }
        let inside = end.min(until) - begin.max(gap.start);
        if inside > longest.0 {
            longest = (inside, Some(call));
        }
    }
    if end.min(gap.end) - start > window {
        return (CauseKind::LaunchCall, Some(context.call_name(launch)));
    }
    if let (inside, Some(call)) = longest
        && inside * 2 > window
    {
        return (CauseKind::Call, Some(context.call_name(call)));
    }
    if let Some(function) = os_call(context, host, thread, (gap.start, until)) {
        return (CauseKind::OsCall, Some(function));
    }
    if off_cpu(context, host, thread, (gap.start, until)) * 2 > window {
        return (CauseKind::OffCpu, None);
    }
    (CauseKind::HostCode, None)
}

/// A call of the operating system that fills most of a span of a thread.
fn os_call<'a>(
    context: &Context<'a>,
    host: &HostTime,
    thread: usize,
    (start, end): (i64, i64),
) -> Option<&'a str> {
    let os = &context.trace.os_calls;
    let own = host.os_calls.of(thread);
    let first = own.partition_point(|&call| os.start[call as usize] < end);
    // They nest little: the last few are those that can reach into the span.
    own[..first].iter().rev().take(8).find_map(|&call| {
        let call = call as usize;
        let inside = os.end[call].min(end) - os.start[call].max(start);
        (inside * 2 > end - start).then(|| context.trace.names.text(os.name[call]))
    })
}

/// Nanoseconds of a span in which a thread was not on a CPU.
fn off_cpu(context: &Context<'_>, host: &HostTime, thread: usize, (start, end): (i64, i64)) -> i64 {
    let switches = &context.trace.switches;
    let own = host.switches.of(thread);
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
