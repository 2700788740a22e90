//! Waits for the GPU that repeat.

use hashbrown::{HashMap, HashSet};

use super::super::context::Context;
use super::super::finding::{Confidence, DeviceUse, Evidence, Finding, Severity};
use super::super::gaps::CauseKind;
use super::super::labels::without_numbers;
use super::outcome::{Outcome, milliseconds, most_expensive, number};
use crate::analyze::launches::NONE;
use crate::analyze::sweep::ByThread;

/// Waits that make a loop, where no range says so.
const REPEATS: usize = 5;

/// Waits of one loop.
#[derive(Default)]
struct Loop {
    count: usize,
    total_ns: i64,
    longest: Option<(i64, i64)>,
    /// Ranges that hold one of them.
    ranges: HashSet<u32>,
    functions: HashMap<String, usize>,
    path: String,
}

impl Loop {
    fn add(&mut self, context: &Context<'_>, call: u32) {
        let calls = &context.trace.calls;
        let span = (calls.start[call as usize], calls.end[call as usize]);
        self.count += 1;
        self.total_ns += span.1 - span.0;
        if self.longest.is_none_or(|(start, end)| span.1 - span.0 > end - start) {
            self.longest = Some(span);
        }
        *self.functions.entry(context.call_name(call).to_owned()).or_default() += 1;
    }

    fn function(&self) -> &str {
        let most =
            self.functions.iter().max_by_key(|&(name, &count)| (count, std::cmp::Reverse(name)));
        most.map_or("", |(name, _)| name)
    }
}

pub(super) fn in_loops(context: &Context<'_>, devices: &[DeviceUse]) -> Outcome {
    if context.trace.calls.is_empty() {
        return Outcome::Skipped(
            "CUDA calls were not recorded; record with --trace=cuda".to_owned(),
        );
    }
    let mut loops: Vec<Loop> = by_ranges(context);
    let in_ranges: usize = loops.iter().map(|of| of.count).sum();
    if in_ranges == 0 {
        loops = periodic(context);
    }
    loops.retain(|of| of.count >= 2);
    if loops.is_empty() {
        return Outcome::Found(Vec::new());
    }
    let total: i64 = loops.iter().map(|of| of.total_ns).sum();
    let count: usize = loops.iter().map(|of| of.count).sum();
    let idle: i64 = devices.iter().map(|of| of.gaps.of_causes(&[CauseKind::Wait])).sum();
    let evidence = loops
        .iter()
        .map(|of| Evidence {
            what: of.function().to_owned(),
            count: of.count,
            total_ns: Some(of.total_ns),
            range: (!of.path.is_empty()).then(|| of.path.clone()),
            span: of.longest,
            place: None,
        })
        .collect();
    let confidence = if in_ranges > 0 { Confidence::High } else { Confidence::Medium };
    Outcome::Found(vec![Finding {
        id: "sync-in-loop",
        severity: if idle > 0 { Severity::Severe } else { Severity::Warning },
        confidence,
        title: format!(
            "the host waits for the GPU {count} times in a loop, {:.3} ms in all; {:.3} ms of idle \
             GPU follow such waits",
            milliseconds(total).value,
            milliseconds(idle).value
        ),
        measured: number(count, "calls"),
        threshold: number(2, "calls"),
        recoverable_ns: Some(idle),
        evidence: most_expensive(evidence),
        advice: "remove waits from the loop: no tensor.item(), print(tensor) or .cpu() in it; wait \
                 once, behind it, or use events that the GPU waits for",
        false_positive: "a benchmark that times each iteration waits on purpose",
    }])
}

/// Waits inside ranges that repeat: of one path, or of siblings whose names differ in a number.
fn by_ranges(context: &Context<'_>) -> Vec<Loop> {
    let mut loops: HashMap<String, Loop> = HashMap::new();
    let waiting = (0u32..).zip(&context.waits).filter(|&(_, &waits)| waits).map(|(call, _)| call);
    for call in waiting {
        let range = context.range_of_call[call as usize];
        if range == NONE {
            continue;
        }
        let path = context.path_of_call(call).unwrap_or_default();
        let of = loops.entry(without_numbers(&path)).or_default();
        of.path = without_numbers(&path);
        of.ranges.insert(range);
        of.add(context, call);
    }
    let mut loops: Vec<Loop> = loops.into_values().collect();
    loops.retain(|of| of.ranges.len() >= 2);
    loops.sort_by_key(|of| (std::cmp::Reverse(of.total_ns), of.path.clone()));
    loops
}

/// Waits of a thread with the same number of launches between them.
fn periodic(context: &Context<'_>) -> Vec<Loop> {
    let calls = &context.trace.calls;
    let relevant = |call: u32| context.waits[call as usize] || context.launched[call as usize];
    let by_thread =
        ByThread::sorted(context.trace.threads.len(), &calls.thread, relevant, |call| {
            calls.start[call as usize]
        });
    let mut loops = Vec::new();
    for thread in 0..context.trace.threads.len() {
        let mut launches = 0usize;
        let mut between: HashMap<usize, Vec<u32>> = HashMap::new();
        let mut waits = 0usize;
        for &call in by_thread.of(thread) {
            if !context.waits[call as usize] {
                launches += 1;
                continue;
            }
            waits += 1;
            if launches > 0 {
                between.entry(launches).or_default().push(call);
            }
            launches = 0;
        }
        let most = between.into_values().max_by_key(|calls| (calls.len(), calls.first().copied()));
        let Some(most) = most.filter(|calls| calls.len() >= REPEATS && calls.len() * 2 >= waits)
        else {
            continue;
        };
        let mut of = Loop::default();
        most.iter().for_each(|&call| of.add(context, call));
        of.path = context.path_of_call(most[0]).unwrap_or_default();
        loops.push(of);
    }
    loops
}
