//! Hardware counters: sampled over time (Nsight Systems) or of single launches (Nsight
//! Compute).

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedShare, InspectedUnit, NumberWithUnit,
};
use super::super::ncu_launches::{
    group_by_title, launch_evidence, launch_metric, shortened_kernel_name,
};
use super::super::trace_facts::DiagnosisContext;
use super::kernels::LOW_OCCUPANCY_PERCENT;
use super::rule_outcome::{
    MAX_EVIDENCE_LINES, MissingData, RuleResult, inspected_all, inspected_some,
};
use crate::model::Trace;
use crate::model::kernel_metrics::ProfiledLaunch;

/// A unit that is used at least this much bounds the kernel, per cent.
const MIN_BOUND_UTILIZATION_PERCENT: f64 = 80.0;
/// Units that are used less than this do not bound.
const LOW_UTILIZATION_PERCENT: f64 = 60.0;
/// Between the two thresholds, memory or compute bounds the kernel if its use is this many
/// percentage points higher.
const DECISIVE_PERCENTAGE_POINTS: f64 = 10.0;
/// Warps that a scheduler issues a cycle from which stalls are hidden.
const STALLS_HIDDEN_ISSUE_RATE: f64 = 0.8;
/// Part of the stalls from which one reason stands out, in percent.
const DOMINANT_STALL_PERCENT: f64 = 30.0;
/// Number of warp samples below which nothing is concluded.
const MIN_WARP_SAMPLES: usize = 100;

/// Checks each launch that a profiler measured. `check` gives nothing where `lack` is missing, which
/// this `option` of `ncu` records, and no finding where a launch has no fault.
pub(super) fn check_each_launch(
    context: &DiagnosisContext<'_>,
    lack: &str,
    option: &str,
    check: impl Fn(&ProfiledLaunch) -> Option<Option<DiagnosisFinding>>,
) -> RuleResult {
    let profiled = &context.trace.profiled;
    let reason = format!("no launch was measured by {}", context.platform.kernel_profiler_name());
    let record = context.platform.profile_single_launches_advice();
    MissingData::unless(!profiled.is_empty(), reason, record)?;
    let checked: Vec<Option<DiagnosisFinding>> = profiled.iter().filter_map(check).collect();
    let record = format!("add {option}");
    MissingData::unless(!checked.is_empty(), format!("the report lacks {lack}"), &record)?;
    let missing = format!("the other launches lack its metrics; record them with {option}");
    let inspected = InspectedShare {
        missing: (checked.len() < profiled.len()).then_some(missing),
        ..inspected_some(checked.len(), profiled.len(), InspectedUnit::ProfiledLaunches)
    };
    Ok((group_by_title(checked.into_iter().flatten().collect()), inspected))
}

/// Name of what bounds a kernel: memory, compute or latency.
fn bound_name(compute: f64, memory: f64) -> &'static str {
    match (compute, memory) {
        _ if compute >= MIN_BOUND_UTILIZATION_PERCENT && compute >= memory => "compute-bound",
        _ if memory >= MIN_BOUND_UTILIZATION_PERCENT => "memory-bound",
        _ if compute < LOW_UTILIZATION_PERCENT && memory < LOW_UTILIZATION_PERCENT => {
            "latency-bound"
        }
        _ if compute - memory >= DECISIVE_PERCENTAGE_POINTS => "compute-bound",
        _ if memory - compute >= DECISIVE_PERCENTAGE_POINTS => "memory-bound",
        _ => "mixed",
    }
}

fn bound_advice(bound: &str) -> &'static str {
    match bound {
        "compute-bound" => {
            "use tensor cores or a cheaper data type, fewer instructions; only less work helps \
             beyond that"
        }
        "memory-bound" => {
            "move fewer bytes: fuse with the neighbours, reuse through shared memory and L2, \
             smaller data types, coalesced accesses"
        }
        "latency-bound" => {
            "more work at once: larger grid, more warps, more independent instructions, prefetching"
        }
        _ => "neither unit stands out: examine stalls and the roofline",
    }
}

fn bound_rule_text() -> String {
    format!(
        "{MIN_BOUND_UTILIZATION_PERCENT} % of either peak: that one; both below {LOW_UTILIZATION_PERCENT} %: latency; {DECISIVE_PERCENTAGE_POINTS} points apart: the \
         larger; else mixed"
    )
}

pub(super) fn kernel_bound_rule_text() -> String {
    format!("each measured kernel: {}", bound_rule_text())
}

pub(super) fn sampled_bound_rule_text() -> String {
    format!(
        "cycles in which multiprocessors issue, and DRAM bandwidth, by {MIN_WARP_SAMPLES} samples or more: \
         {}",
        bound_rule_text()
    )
}

pub(super) fn achieved_occupancy_rule_text() -> String {
    format!(
        "a theoretical occupancy below {LOW_OCCUPANCY_PERCENT} %, or an achieved one {DECISIVE_PERCENTAGE_POINTS} points lower than \
         the theoretical one"
    )
}

pub(super) fn stalls_rule_text() -> String {
    format!(
        "fewer than {STALLS_HIDDEN_ISSUE_RATE} warps issued a cycle, and one reason above {DOMINANT_STALL_PERCENT} % of stalls"
    )
}

pub(super) fn kernel_bound_rule(context: &DiagnosisContext<'_>) -> RuleResult {
    let (lack, option) = ("compute and memory throughput", "--section SpeedOfLight");
    check_each_launch(context, lack, option, |launch| {
        let metric = |name| launch_metric(context.trace, launch, name);
        let (compute, memory) = (metric("Compute (SM) Throughput")?, metric("Memory Throughput")?);
        let bound = bound_name(compute, memory);
        let small = metric("Waves Per SM").filter(|&waves| waves < 1.0 && bound == "latency-bound");
        let because = if small.is_some() { ": its grid does not fill the GPU" } else { "" };
        let waves = small.map_or(String::new(), |waves| format!(", {waves:.2} waves"));
        let words = format!("compute {compute:.1} %, memory {memory:.1} % of their peaks{waves}");
        Some(Some(DiagnosisFinding {
            id: "kernel-bound",
            severity: FindingSeverity::Information,
            confidence: FindingConfidence::High,
            title: format!("{} is {bound}{because}", shortened_kernel_name(context.trace, launch)),
            measured: NumberWithUnit { value: compute.max(memory), unit: "% of peak" },
            threshold: NumberWithUnit { value: MIN_BOUND_UTILIZATION_PERCENT, unit: "% of peak" },
            recoverable_ns: None,
            remedy: FindingRemedy::NotReplayed,
            replayed: None,
            evidence: launch_evidence(context.trace, launch, words),
            advice: bound_advice(bound).to_owned(),
            false_positive: "Nsight Compute measured with cold caches or fixed clocks",
        }))
    })
}

pub(super) fn achieved_occupancy_rule(context: &DiagnosisContext<'_>) -> RuleResult {
    check_each_launch(context, "occupancy", "--section Occupancy", |launch| {
        let metric = |name: &str| launch_metric(context.trace, launch, name);
        let theoretical = metric("Theoretical Occupancy")?;
        let achieved = metric("Achieved Occupancy");
        let far =
            achieved.is_some_and(|achieved| achieved < theoretical - DECISIVE_PERCENTAGE_POINTS);
        let (low, threshold) = match far {
            true => {
                let threshold = theoretical - DECISIVE_PERCENTAGE_POINTS;
                ("achieved occupancy is below the theoretical one", threshold)
            }
            false => ("theoretical occupancy is low", LOW_OCCUPANCY_PERCENT),
        };
        if theoretical >= LOW_OCCUPANCY_PERCENT && !far {
            return Some(None);
        }
        let limit = ["Registers", "Shared Mem", "Warps", "SM", "Barriers"]
            .iter()
            .filter_map(|of| Some((metric(&format!("Block Limit {of}"))?, *of)))
            .min_by(|a, b| a.0.total_cmp(&b.0));
        let limiter = limit.map_or(String::new(), |(blocks, of)| {
            format!(", limited by {} ({blocks:.0} blocks)", of.to_lowercase())
        });
        let achieved_words =
            achieved.map_or(String::new(), |achieved| format!(", achieved {achieved:.1} %"));
        let words = format!("theoretical {theoretical:.1} %{achieved_words}{limiter}");
        Some(Some(DiagnosisFinding {
            id: "achieved-occupancy",
            severity: FindingSeverity::Information,
            confidence: FindingConfidence::High,
            title: format!("{}: the {low}", shortened_kernel_name(context.trace, launch)),
            measured: NumberWithUnit { value: achieved.unwrap_or(theoretical), unit: "%" },
            threshold: NumberWithUnit { value: threshold, unit: "%" },
            recoverable_ns: None,
            remedy: FindingRemedy::NotReplayed,
            replayed: None,
            evidence: launch_evidence(context.trace, launch, words),
            advice: "fewer registers, less shared memory or another block size; if achieved is \
                     far below theoretical, balance the blocks and enlarge the grid"
                .to_owned(),
            false_positive: "GEMM and attention kernels that hide latency in other ways",
        }))
    })
}

pub(super) fn find_warp_stalls(context: &DiagnosisContext<'_>) -> RuleResult {
    let (lack, option) = ("warp states", "--section WarpStateStats --section SchedulerStats");
    check_each_launch(context, lack, option, |launch| {
        let all = stall_reasons_of_launch(context.trace, launch);
        let sum: f64 = all.iter().map(|(_, value)| value).sum();
        let (reason, most) = all.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
        let issue = launch_metric(context.trace, launch, "Issued Warp Per Scheduler")?;
        let share = if sum > 0.0 { most / sum * 100.0 } else { 0.0 };
        if issue >= STALLS_HIDDEN_ISSUE_RATE || share <= DOMINANT_STALL_PERCENT {
            return Some(None);
        }
        let kernel = shortened_kernel_name(context.trace, launch);
        Some(Some(DiagnosisFinding {
            id: "stalls",
            severity: FindingSeverity::Warning,
            confidence: FindingConfidence::High,
            title: format!("{kernel}: warps wait mostly for one reason: {reason}"),
            measured: NumberWithUnit { value: share, unit: "% of stalls" },
            threshold: NumberWithUnit { value: DOMINANT_STALL_PERCENT, unit: "% of stalls" },
            recoverable_ns: None,
            remedy: FindingRemedy::NotReplayed,
            replayed: None,
            evidence: evidence_with_stalled_lines(
                context.trace,
                launch,
                launch_evidence(context.trace, launch, format!("{issue:.2} warps issued a cycle")),
            ),
            advice: advice_for_stall(reason).to_owned(),
            false_positive: "stalls that other warps hide: the scheduler still issues",
        }))
    })
}

/// Metrics of stalls by their begin and end: warps by cycle, then samples. A report may hold both,
/// and samples once more for the cycles that issued nothing.
const STALL_METRIC_AFFIXES: [(&str, &str); 4] = [
    ("Stall ", ""),
    ("smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"),
    ("smsp__average_warp_latency_issue_stalled_", ".ratio"),
    ("smsp__pcsamp_warps_issue_stalled_", ""),
];

/// Reasons for which warps of a launch wait, with their values, of the first kind that it holds.
fn stall_reasons_of_launch(trace: &Trace, launch: &ProfiledLaunch) -> Vec<(String, f64)> {
    let of_kind = |(begin, end): (&str, &str)| -> Vec<(String, f64)> {
        let metrics = launch.metrics.iter();
        let stalls = metrics.filter_map(|(&name, metric)| {
            let reason = trace.names.text(name).strip_prefix(begin)?.strip_suffix(end)?;
            let issues = reason == "selected" || reason.ends_with("_not_issued");
            (!issues).then(|| (reason.replace('_', " "), metric.value))
        });
        stalls.collect()
    };
    STALL_METRIC_AFFIXES.into_iter().map(of_kind).find(|all| !all.is_empty()).unwrap_or_default()
}

/// Evidence with the source lines at which warps waited most.
fn evidence_with_stalled_lines(
    trace: &Trace,
    launch: &ProfiledLaunch,
    mut evidence: Vec<FindingEvidence>,
) -> Vec<FindingEvidence> {
    for line in launch.lines.iter().take(MAX_EVIDENCE_LINES - 1) {
        let (file, reason) = (trace.names.text(line.file), trace.names.text(line.reason));
        evidence.push(FindingEvidence {
            what: format!("{file}:{}: samples of warps that wait, most for {reason}", line.line),
            count: usize::try_from(line.samples).unwrap_or(usize::MAX),
            ..FindingEvidence::default()
        });
    }
    evidence
}

fn advice_for_stall(reason: &str) -> &'static str {
    let reason = reason.to_ascii_lowercase();
    let has = |word: &str| reason.contains(word);
    match () {
        () if has("long") => "data comes from global memory: prefetch, reuse, coalesce, more warps",
        () if has("short") => "shared memory: avoid bank conflicts, wider accesses",
        () if has("barrier") => "balance the work before __syncthreads, fewer of them",
        () if has("throttle") => "fewer or wider instructions of this pipe",
        () if has("wait") || has("math") => "more independent instructions (unrolling)",
        () => "see the reason in Nsight Compute's guide",
    }
}

/// The bound of the whole trace from sampled counters: issue, not activity, of multiprocessors.
pub(super) fn sampled_bound_rule(context: &DiagnosisContext<'_>) -> RuleResult {
    let counters = &context.trace.counters;
    if counters.time.is_empty() {
        let record = context.platform.sample_counters_advice();
        return Err(MissingData::new("no hardware counters were sampled", record));
    }
    let mut gpus = counters.gpu.clone();
    gpus.sort_unstable();
    gpus.dedup();
    let mut found = Vec::new();
    for gpu in gpus {
        let mean = |words: &[&str]| {
            let (mut sum, mut count) = (0.0, 0usize);
            for row in (0..counters.time.len()).filter(|&row| counters.gpu[row] == gpu) {
                let name = context.trace.names.text(counters.metric[row]);
                if words.iter().all(|word| name.contains(word)) {
                    sum += counters.value[row];
                    count += 1;
                }
            }
            #[allow(clippy::cast_precision_loss)]
            (count >= MIN_WARP_SAMPLES).then(|| sum / count as f64)
        };
        let issue = mean(&["SM", "Issue"]);
        let (read, write) = (mean(&["DRAM", "Read"]), mean(&["DRAM", "Write"]));
        let (Some(issue), Some(read), Some(write)) = (issue, read, write) else { continue };
        let memory = read + write;
        let bound = bound_name(issue, memory);
        found.push(DiagnosisFinding {
            id: "sampled-bound",
            severity: FindingSeverity::Information,
            confidence: FindingConfidence::Medium,
            title: format!(
                "GPU {gpu} is {bound} on average: SM issue {issue:.0} %, DRAM read {read:.0} % and \
                 write {write:.0} %"
            ),
            measured: NumberWithUnit { value: issue.max(memory), unit: "% of peak" },
            threshold: NumberWithUnit { value: MIN_BOUND_UTILIZATION_PERCENT, unit: "% of peak" },
            recoverable_ns: None,
            remedy: FindingRemedy::NotReplayed,
            replayed: None,
            evidence: Vec::new(),
            advice: bound_advice(bound).to_owned(),
            false_positive: "averages hide phases: restrict the trace with --range",
        });
    }
    if found.is_empty() {
        let reason = format!(
            "fewer than {MIN_WARP_SAMPLES} samples of SM issue and DRAM bandwidth: too few to conclude"
        );
        return Err(MissingData::new(reason, "sample for longer, or more often"));
    }
    Ok((found, inspected_all(counters.time.len(), InspectedUnit::Samples)))
}

#[cfg(test)]
mod tests {
    use super::bound_name;

    #[test]
    fn every_pair_of_compute_and_memory_utilization_has_a_bound() {
        assert_eq!(bound_name(85.0, 40.0), "compute-bound");
        assert_eq!(bound_name(85.0, 90.0), "memory-bound");
        assert_eq!(bound_name(16.0, 81.0), "memory-bound");
        assert_eq!(bound_name(23.6, 21.7), "latency-bound");
        assert_eq!(bound_name(70.0, 50.0), "compute-bound");
        assert_eq!(bound_name(50.0, 70.0), "memory-bound");
        assert_eq!(bound_name(65.0, 62.0), "mixed");
    }
}
