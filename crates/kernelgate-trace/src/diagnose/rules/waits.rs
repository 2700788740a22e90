//! Diagnosis rule about loops in which the host repeatedly waits for the GPU.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedRecordKind,
};
use super::super::host::host_waits::{SumOfHostWaits, WaitsWithEqualLaunchCounts};
use super::super::trace_facts::DiagnosisContext;
use super::launches::require_host_calls;
use super::rule_outcome::{
    FindingsOrMissingData, all_records_inspected, count_as_number_with_unit, ns_as_milliseconds,
    sorted_and_limited_evidence,
};
use crate::analyze::timeline::idle_time::ProcessActivityOnGpu;
use crate::model::interned_names::replace_digits_by_number_sign;

/// Smallest number of waits that count as a loop without ranges around them.
const MIN_WAITS_OF_LOOP_WITHOUT_RANGES: usize = 5;

/// Host waits for the GPU that belong to one loop of the program.
#[derive(Default)]
struct HostWaitsOfLoop {
    sum: SumOfHostWaits,
    /// Number of ranges that contain waits of the loop; a path with several such ranges counts as
    /// two.
    ranges_with_waits: usize,
    path: String,
}

impl HostWaitsOfLoop {
    /// Returns the names of the waiting functions, the most frequently called first.
    fn waiting_functions_by_call_count(&self, context: &DiagnosisContext<'_>) -> String {
        let named =
            self.sum.wait_count_by_function.iter().map(|(&name, &count)| {
                (Reverse(count), context.function_name_without_version(name))
            });
        let mut named: Vec<(Reverse<usize>, &str)> = named.collect();
        named.sort_unstable();
        named.iter().map(|(_, name)| *name).collect::<Vec<_>>().join(", ")
    }
}

pub(super) fn waits_in_loops_rule_text() -> String {
    format!(
        "two waits or more in ranges that repeat; without ranges, {MIN_WAITS_OF_LOOP_WITHOUT_RANGES} waits with the same \
         number of launches between them"
    )
}

pub(super) fn find_host_waits_in_loops(context: &DiagnosisContext<'_>) -> FindingsOrMissingData {
    require_host_calls(context)?;
    let inspected =
        all_records_inspected(context.host_summary.calls, InspectedRecordKind::HostCalls);
    let mut loops: Vec<HostWaitsOfLoop> = wait_loops_by_repeated_ranges(context);
    let in_ranges: usize = loops.iter().map(|of| of.sum.wait_count).sum();
    if in_ranges == 0 {
        loops = wait_loops_by_equal_launch_counts(context);
    }
    loops.retain(|of| of.sum.wait_count >= 2);
    if loops.is_empty() {
        return Ok((Vec::new(), inspected));
    }
    let sum =
        |of: fn(&SumOfHostWaits) -> i64| loops.iter().map(|of_loop| of(&of_loop.sum)).sum::<i64>();
    let (total, saved) = (sum(|of| of.total_wait_ns), sum(|of| of.savable_gpu_idle_ns));
    let count: usize = loops.iter().map(|of| of.sum.wait_count).sum();
    let span =
        context.activities.iter().map(ProcessActivityOnGpu::first_start_to_last_end_ns).sum();
    let evidence = loops
        .iter()
        .map(|of| FindingEvidence {
            kernel_call_or_copy_name: of.waiting_functions_by_call_count(context),
            covered_count: of.sum.wait_count,
            total_duration_ns: Some(of.sum.total_wait_ns),
            innermost_common_range_path: (!of.path.is_empty()).then(|| of.path.clone()),
            longest_instance_start_and_end_ns: of.sum.longest_start_and_end_ns,
            process_id_and_device: None,
        })
        .collect();
    let confidence = if in_ranges > 0 {
        FindingConfidence::HighConfidence
    } else {
        FindingConfidence::MediumConfidence
    };
    let behind = match saved {
        0 => "no device is idle behind them".to_owned(),
        ns => format!(
            "behind them the GPU is idle for {:.3} ms",
            ns_as_milliseconds(ns).number_in_unit
        ),
    };
    let found = DiagnosisFinding {
        rule_id: "sync-in-loop",
        severity: FindingSeverity::severity_from_possible_saving(saved, span),
        confidence,
        finding_title: format!(
            "the host waits for the GPU {count} times in a loop, {:.3} ms in all; {behind}",
            ns_as_milliseconds(total).number_in_unit,
        ),
        measured_value: count_as_number_with_unit(count, "calls"),
        rule_threshold: count_as_number_with_unit(2, "calls"),
        max_recoverable_ns: Some(saved),
        remedy: FindingRemedy::NoHostWaits,
        replayed_gain: None,
        evidence: sorted_and_limited_evidence(evidence),
        advice:
            "remove waits from the loop: no tensor.item(), print(tensor) or .cpu() in it; wait \
                 once, behind it, or use events that the GPU waits for"
                .to_owned(),
        false_positive_note: "a benchmark that times each iteration waits on purpose",
    };
    Ok((vec![found], inspected))
}

/// Finds waits in ranges that repeat: ranges of one path, or of paths whose names differ only in
/// numbers.
fn wait_loops_by_repeated_ranges(context: &DiagnosisContext<'_>) -> Vec<HostWaitsOfLoop> {
    let mut loops: HashMap<String, HostWaitsOfLoop> = HashMap::new();
    for (&path, waits) in &context.host_summary.host_waits.waits_by_range_path {
        let path = replace_digits_by_number_sign(
            &context.host_summary.paths.path_text_with_slashes(context.trace, path),
        );
        let repeated = loops.entry(path.clone()).or_default();
        repeated.path = path;
        repeated.ranges_with_waits += 1 + usize::from(waits.waits_in_several_ranges);
        repeated.sum.add_other_waits(&waits.sum);
    }
    let mut loops: Vec<HostWaitsOfLoop> = loops.into_values().collect();
    loops.retain(|of| of.ranges_with_waits >= 2);
    loops.sort_by_key(|of| (Reverse(of.sum.total_wait_ns), of.path.clone()));
    loops
}

/// Finds loops without ranges: waits of a thread with equal numbers of launches between them.
fn wait_loops_by_equal_launch_counts(context: &DiagnosisContext<'_>) -> Vec<HostWaitsOfLoop> {
    let waits = &context.host_summary.host_waits;
    let mut most: BTreeMap<u32, &WaitsWithEqualLaunchCounts> = BTreeMap::new();
    for (&(thread, _), of) in &waits.waits_by_launch_count {
        let largest = most.entry(thread).or_insert(of);
        if (largest.sum.wait_count, largest.earlier_waits_in_trace)
            < (of.sum.wait_count, of.earlier_waits_in_trace)
        {
            *largest = of;
        }
    }
    let enough = |&(thread, of): &(u32, &WaitsWithEqualLaunchCounts)| {
        of.sum.wait_count >= MIN_WAITS_OF_LOOP_WITHOUT_RANGES
            && of.sum.wait_count * 2 >= waits.number_of_waits_of_thread(thread)
    };
    let loops = most.into_iter().filter(enough).map(|(_, of)| HostWaitsOfLoop {
        sum: of.sum.clone(),
        ranges_with_waits: 0,
        path: context
            .host_summary
            .paths
            .path_text_with_slashes(context.trace, of.range_path_of_first_wait),
    });
    loops.collect()
}
