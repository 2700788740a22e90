//! Rules about repeated waits of the host for the GPU.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedUnit,
};
use super::super::host::host_waits::{HostWaitSum, RegularWaits};
use super::super::trace_facts::DiagnosisContext;
use super::launches::check_launch_calls;
use super::rule_outcome::{
    RuleResult, in_milliseconds, inspected_all, most_expensive_evidence, number,
};
use crate::analyze::timeline::idle_time::DeviceActivity;
use crate::model::interned_names::without_numbers_in_name;

/// Number of waits that count as a loop if no range encloses them.
const MIN_LOOP_REPEATS: usize = 5;

/// Waits of one loop.
#[derive(Default)]
struct WaitingLoop {
    sum: HostWaitSum,
    /// Ranges that hold a wait of the loop: several ranges of one path count as two.
    ranges: usize,
    path: String,
}

impl WaitingLoop {
    /// Names of the waiting functions, the most frequently called first.
    fn functions_by_calls(&self, context: &DiagnosisContext<'_>) -> String {
        let named = self
            .sum
            .functions
            .iter()
            .map(|(&name, &count)| (Reverse(count), context.function_name(name)));
        let mut named: Vec<(Reverse<usize>, &str)> = named.collect();
        named.sort_unstable();
        named.iter().map(|(_, name)| *name).collect::<Vec<_>>().join(", ")
    }
}

pub(super) fn waits_finding_text() -> String {
    format!(
        "two waits or more in ranges that repeat; without ranges, {MIN_LOOP_REPEATS} waits with the same \
         number of launches between them"
    )
}

pub(super) fn waits_in_loops_rule(context: &DiagnosisContext<'_>) -> RuleResult {
    check_launch_calls(context)?;
    let inspected = inspected_all(context.host.calls, InspectedUnit::Calls);
    let mut loops: Vec<WaitingLoop> = loops_by_ranges(context);
    let in_ranges: usize = loops.iter().map(|of| of.sum.count).sum();
    if in_ranges == 0 {
        loops = loops_by_launch_count(context);
    }
    loops.retain(|of| of.sum.count >= 2);
    if loops.is_empty() {
        return Ok((Vec::new(), inspected));
    }
    let sum =
        |of: fn(&HostWaitSum) -> i64| loops.iter().map(|of_loop| of(&of_loop.sum)).sum::<i64>();
    let (total, saved) = (sum(|of| of.total_ns), sum(|of| of.saved_ns));
    let count: usize = loops.iter().map(|of| of.sum.count).sum();
    let span = context.activities.iter().map(DeviceActivity::span_of_gaps_ns).sum();
    let evidence = loops
        .iter()
        .map(|of| FindingEvidence {
            what: of.functions_by_calls(context),
            count: of.sum.count,
            total_ns: Some(of.sum.total_ns),
            range: (!of.path.is_empty()).then(|| of.path.clone()),
            span: of.sum.longest,
            place: None,
        })
        .collect();
    let confidence =
        if in_ranges > 0 { FindingConfidence::High } else { FindingConfidence::Medium };
    let behind = match saved {
        0 => "no device is idle behind them".to_owned(),
        ns => format!("behind them the GPU is idle for {:.3} ms", in_milliseconds(ns).value),
    };
    let found = DiagnosisFinding {
        id: "sync-in-loop",
        severity: FindingSeverity::from_saving(saved, span),
        confidence,
        title: format!(
            "the host waits for the GPU {count} times in a loop, {:.3} ms in all; {behind}",
            in_milliseconds(total).value,
        ),
        measured: number(count, "calls"),
        threshold: number(2, "calls"),
        recoverable_ns: Some(saved),
        remedy: FindingRemedy::NoWaits,
        replayed: None,
        evidence: most_expensive_evidence(evidence),
        advice:
            "remove waits from the loop: no tensor.item(), print(tensor) or .cpu() in it; wait \
                 once, behind it, or use events that the GPU waits for"
                .to_owned(),
        false_positive: "a benchmark that times each iteration waits on purpose",
    };
    Ok((vec![found], inspected))
}

/// Waits inside ranges that repeat: of one path, or of siblings whose names differ in a number.
fn loops_by_ranges(context: &DiagnosisContext<'_>) -> Vec<WaitingLoop> {
    let mut loops: HashMap<String, WaitingLoop> = HashMap::new();
    for (&path, waits) in &context.host.waits.in_ranges {
        let path = without_numbers_in_name(&context.host.paths.text(context.trace, path));
        let repeated = loops.entry(path.clone()).or_default();
        repeated.path = path;
        repeated.ranges += 1 + usize::from(waits.several);
        repeated.sum.add_waits(&waits.sum);
    }
    let mut loops: Vec<WaitingLoop> = loops.into_values().collect();
    loops.retain(|of| of.ranges >= 2);
    loops.sort_by_key(|of| (Reverse(of.sum.total_ns), of.path.clone()));
    loops
}

/// Finds waits of a thread with equal numbers of launches between them.
fn loops_by_launch_count(context: &DiagnosisContext<'_>) -> Vec<WaitingLoop> {
    let waits = &context.host.waits;
    let mut most: BTreeMap<u32, &RegularWaits> = BTreeMap::new();
    for (&(thread, _), of) in &waits.at_intervals {
        let largest = most.entry(thread).or_insert(of);
        if (largest.sum.count, largest.before) < (of.sum.count, of.before) {
            *largest = of;
        }
    }
    let enough = |&(thread, of): &(u32, &RegularWaits)| {
        of.sum.count >= MIN_LOOP_REPEATS && of.sum.count * 2 >= waits.waits_of_thread(thread)
    };
    let loops = most.into_iter().filter(enough).map(|(_, of)| WaitingLoop {
        sum: of.sum.clone(),
        ranges: 0,
        path: context.host.paths.text(context.trace, of.path),
    });
    loops.collect()
}
