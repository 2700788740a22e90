//! Why a GPU had nothing to do: told from the launch of the operation behind the gap, and from what
//! the thread that launched it did before.

use crate::analyze::idle::{Activity, Gap};
use crate::analyze::sweep::ByThread;
use crate::model::Trace;
use crate::model::names::Name;
use crate::read::CallRow;

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

/// Why, with the function that is to blame.
pub(super) type Why = (CauseKind, Option<Name>);

/// A call that may explain a gap.
#[derive(Debug, Clone, Copy)]
struct Past {
    start: i64,
    end: i64,
    name: Name,
    waits: bool,
}

/// Calls in a row that were over before a gap, behind which none is looked for that reaches into
/// it: calls nest little.
const OVER: usize = 8;

/// What threads did, as far as it may explain gaps that are not over yet.
#[derive(Debug, Default)]
pub(super) struct LatelyDone {
    /// By thread, in order of time.
    calls: Vec<Vec<Past>>,
    os_calls: ByThread,
    switches: ByThread,
    /// By activity, the first gap that is not over.
    gap: Vec<usize>,
}

impl LatelyDone {
    /// That of a trace of which no call went by yet.
    pub fn of(trace: &Trace, activities: &[Activity]) -> Self {
        let threads = trace.threads.len();
        let (os, switches) = (&trace.os_calls, &trace.switches);
        let time = |row: u32| switches.time[row as usize];
        Self {
            calls: vec![Vec::new(); threads],
            os_calls: ByThread::sorted(threads, &os.thread, |_| true, |i| os.start[i as usize]),
            switches: ByThread::sorted(threads, &switches.thread, |_| true, time),
            gap: vec![0; activities.len()],
        }
    }

    /// The next call.
    pub fn add(&mut self, activities: &[Activity], call: &CallRow, waits: bool) {
        let thread = call.thread as usize;
        if self.calls.len() <= thread {
            self.calls.resize_with(thread + 1, Vec::new);
        }
        if self.calls[thread].len() == self.calls[thread].capacity() {
            let since = self.idle_since(activities, call);
            self.calls[thread].retain(|past| past.end >= since);
        }
        let CallRow { start, end, name, .. } = *call;
        self.calls[thread].push(Past { start, end, name, waits });
    }

    /// The earliest start of a gap of the caller's process that is not over: what was over before
    /// explains none that is to come.
    fn idle_since(&mut self, activities: &[Activity], call: &CallRow) -> i64 {
        let own = activities.iter().zip(&mut self.gap).filter(|(of, _)| of.process == call.process);
        let starts = own.map(|(activity, next)| {
            let over = activity.gaps[*next..].iter().take_while(|gap| gap.end < call.start);
            *next += over.count();
            activity.gaps.get(*next).map_or(i64::MAX, |gap| gap.start)
        });
        starts.min().unwrap_or(i64::MAX)
    }

    /// Why the GPU was idle until what a call launched.
    pub fn why(&self, trace: &Trace, launch: &CallRow, gap: &Gap) -> Why {
        let CallRow { start, end, name, .. } = *launch;
        if end <= gap.start {
            return (CauseKind::Queued, None);
        }
        if start <= gap.start {
            return (CauseKind::LaunchCall, Some(name));
        }
        // The GPU ran dry while the host had not begun to launch.
        let thread = launch.thread as usize;
        let until = start.min(gap.end);
        let window = until - gap.start;
        let mut longest: (i64, Option<Name>) = (0, None);
        let mut over = 0;
        let past = self.calls.get(thread).map_or(&[][..], |calls| calls);
        for call in past.iter().rev().filter(|call| call.start < start) {
            if call.end < gap.start {
                over += 1;
                if over == OVER {
                    break;
                }
                continue;
            }
            if call.waits {
                return (CauseKind::Wait, Some(call.name));
            }
            let inside = call.end.min(until) - call.start.max(gap.start);
            if inside > longest.0 {
                longest = (inside, Some(call.name));
            }
        }
        if end.min(gap.end) - start > window {
            return (CauseKind::LaunchCall, Some(name));
        }
        if let (inside, Some(function)) = longest
            && inside * 2 > window
        {
            return (CauseKind::Call, Some(function));
        }
        if let Some(function) = self.os_call(trace, thread, (gap.start, until)) {
            return (CauseKind::OsCall, Some(function));
        }
        if self.off_cpu(trace, thread, (gap.start, until)) * 2 > window {
            return (CauseKind::OffCpu, None);
        }
        (CauseKind::HostCode, None)
    }

    /// A call of the operating system that fills most of a span of a thread.
    fn os_call(&self, trace: &Trace, thread: usize, (start, end): (i64, i64)) -> Option<Name> {
        let os = &trace.os_calls;
        let own = self.os_calls.of(thread);
        let first = own.partition_point(|&call| os.start[call as usize] < end);
        // The last few are those that can reach into the span.
        own[..first].iter().rev().take(OVER).find_map(|&call| {
            let call = call as usize;
            let inside = os.end[call].min(end) - os.start[call].max(start);
            (inside * 2 > end - start).then(|| os.name[call])
        })
    }

    /// Nanoseconds of a span in which a thread was not on a CPU.
    fn off_cpu(&self, trace: &Trace, thread: usize, (start, end): (i64, i64)) -> i64 {
        let switches = &trace.switches;
        let own = self.switches.of(thread);
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
