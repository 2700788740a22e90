//! Diagnosis rules on hardware counters, sampled over time (Nsight Systems) or measured for single
//! launches (Nsight Compute).

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedRecordKind, InspectedShareOfRecords, MeasuredNumberWithUnit,
};
use super::super::ncu_launches::{
    evidence_of_ncu_launch, join_findings_with_same_title, kernel_name_in_60_characters,
    ncu_metric_of_launch,
};
use super::super::trace_facts::DiagnosisContext;
use super::kernels::LOW_OCCUPANCY_PERCENT;
use super::rule_outcome::{
    DataMissingForRule, FindingsOrMissingData, MAX_EVIDENCE_LINES_OF_FINDING,
    all_records_inspected, some_records_inspected,
};
use crate::model::Trace;
use crate::model::kernel_metrics::NcuProfiledLaunch;

/// Smallest use of a unit's peak, in percent, from which on the unit bounds the kernel.
const MIN_BOUNDING_UTILIZATION_PERCENT: f64 = 80.0;
/// Use of a unit's peak, in percent, below which the unit does not bound the kernel.
const MAX_UNBOUNDING_UTILIZATION_PERCENT: f64 = 60.0;
/// Between both thresholds, memory or compute bounds the kernel only if its use of the peak is
/// higher by this many percentage points.
const MIN_DECISIVE_PERCENTAGE_POINTS: f64 = 10.0;
/// Number of warps that a scheduler issues per cycle, from which on stalls of other warps are
/// hidden.
const MIN_ISSUE_RATE_HIDING_STALLS: f64 = 0.8;
/// Smallest share of the stalls, in percent, that one reason must have to be reported.
const MIN_DOMINANT_STALL_PERCENT: f64 = 30.0;
/// Smallest number of counter samples from which the mean is used.
const MIN_COUNTER_SAMPLES: usize = 100;

/// Applies `check` to each launch that Nsight Compute profiled. `check` returns `None` if metrics
/// are missing (`lack` names them, `option` is the `ncu` option that records them), and
/// `Some(None)` if the launch has no fault.
pub(super) fn check_each_profiled_launch(
    context: &DiagnosisContext<'_>,
    lack: &str,
    option: &str,
    check: impl Fn(&NcuProfiledLaunch) -> Option<Option<DiagnosisFinding>>,
) -> FindingsOrMissingData {
    let profiled = &context.trace.profiled_launches;
    let reason = format!("no launch was measured by {}", context.platform.kernel_profiler_name());
    let record = context.platform.advice_to_profile_single_kernel_launches();
    DataMissingForRule::error_unless_recorded(!profiled.is_empty(), reason, record)?;
    let checked: Vec<Option<DiagnosisFinding>> = profiled.iter().filter_map(check).collect();
    let record = format!("add {option}");
    DataMissingForRule::error_unless_recorded(
        !checked.is_empty(),
        format!("the report lacks {lack}"),
        &record,
    )?;
    let missing = format!("the other launches lack its metrics; record them with {option}");
    let inspected = InspectedShareOfRecords {
        reason_for_uninspected_records: (checked.len() < profiled.len()).then_some(missing),
        ..some_records_inspected(
            checked.len(),
            profiled.len(),
            InspectedRecordKind::ProfiledLaunches,
        )
    };
    Ok((join_findings_with_same_title(checked.into_iter().flatten().collect()), inspected))
}

/// Returns the name of what bounds a kernel (memory, compute or latency) from the use of both
/// peaks, in percent.
fn bound_from_utilization(compute_percent: f64, memory_percent: f64) -> &'static str {
    match (compute_percent, memory_percent) {
        _ if compute_percent >= MIN_BOUNDING_UTILIZATION_PERCENT
            && compute_percent >= memory_percent =>
        {
            "compute-bound"
        }
        _ if memory_percent >= MIN_BOUNDING_UTILIZATION_PERCENT => "memory-bound",
        _ if compute_percent < MAX_UNBOUNDING_UTILIZATION_PERCENT
            && memory_percent < MAX_UNBOUNDING_UTILIZATION_PERCENT =>
        {
            "latency-bound"
        }
        _ if compute_percent - memory_percent >= MIN_DECISIVE_PERCENTAGE_POINTS => "compute-bound",
        _ if memory_percent - compute_percent >= MIN_DECISIVE_PERCENTAGE_POINTS => "memory-bound",
        _ => "mixed",
    }
}

fn advice_for_kernel_bound(bound: &str) -> &'static str {
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

fn bound_thresholds_text() -> String {
    format!(
        "{MIN_BOUNDING_UTILIZATION_PERCENT} % of either peak: that one; both below {MAX_UNBOUNDING_UTILIZATION_PERCENT} %: latency; {MIN_DECISIVE_PERCENTAGE_POINTS} points apart: the \
         larger; else mixed"
    )
}

pub(super) fn kernel_bound_rule_text() -> String {
    format!("each measured kernel: {}", bound_thresholds_text())
}

pub(super) fn sampled_bound_rule_text() -> String {
    format!(
        "cycles in which multiprocessors issue, and DRAM bandwidth, by {MIN_COUNTER_SAMPLES} samples or more: \
         {}",
        bound_thresholds_text()
    )
}

pub(super) fn achieved_occupancy_rule_text() -> String {
    format!(
        "a theoretical occupancy below {LOW_OCCUPANCY_PERCENT} %, or an achieved one {MIN_DECISIVE_PERCENTAGE_POINTS} points lower than \
         the theoretical one"
    )
}

pub(super) fn warp_stalls_rule_text() -> String {
    format!(
        "fewer than {MIN_ISSUE_RATE_HIDING_STALLS} warps issued a cycle, and one reason above {MIN_DOMINANT_STALL_PERCENT} % of stalls"
    )
}

pub(super) fn report_bound_of_each_kernel(context: &DiagnosisContext<'_>) -> FindingsOrMissingData {
    let (lack, option) = ("compute and memory throughput", "--section SpeedOfLight");
    check_each_profiled_launch(context, lack, option, |launch| {
        let metric = |name| ncu_metric_of_launch(context.trace, launch, name);
        let (compute, memory) = (metric("Compute (SM) Throughput")?, metric("Memory Throughput")?);
        let bound = bound_from_utilization(compute, memory);
        let small = metric("Waves Per SM").filter(|&waves| waves < 1.0 && bound == "latency-bound");
        let because = if small.is_some() { ": its grid does not fill the GPU" } else { "" };
        let waves = small.map_or(String::new(), |waves| format!(", {waves:.2} waves"));
        let words = format!("compute {compute:.1} %, memory {memory:.1} % of their peaks{waves}");
        Some(Some(DiagnosisFinding {
            rule_id: "kernel-bound",
            severity: FindingSeverity::Information,
            confidence: FindingConfidence::HighConfidence,
            finding_title: format!(
                "{} is {bound}{because}",
                kernel_name_in_60_characters(context.trace, launch)
            ),
            measured_value: MeasuredNumberWithUnit {
                number_in_unit: compute.max(memory),
                unit: "% of peak",
            },
            rule_threshold: MeasuredNumberWithUnit {
                number_in_unit: MIN_BOUNDING_UTILIZATION_PERCENT,
                unit: "% of peak",
            },
            max_recoverable_ns: None,
            remedy: FindingRemedy::GainNotReplayable,
            replayed_gain: None,
            evidence: evidence_of_ncu_launch(context.trace, launch, words),
            advice: advice_for_kernel_bound(bound).to_owned(),
            false_positive_note: "Nsight Compute measured with cold caches or fixed clocks",
        }))
    })
}

pub(super) fn find_low_achieved_occupancy(context: &DiagnosisContext<'_>) -> FindingsOrMissingData {
    check_each_profiled_launch(context, "occupancy", "--section Occupancy", |launch| {
        let metric = |name: &str| ncu_metric_of_launch(context.trace, launch, name);
        let theoretical = metric("Theoretical Occupancy")?;
        let achieved = metric("Achieved Occupancy");
        let far = achieved
            .is_some_and(|achieved| achieved < theoretical - MIN_DECISIVE_PERCENTAGE_POINTS);
        let (low, threshold) = match far {
            true => {
                let threshold = theoretical - MIN_DECISIVE_PERCENTAGE_POINTS;
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
            rule_id: "achieved-occupancy",
            severity: FindingSeverity::Information,
            confidence: FindingConfidence::HighConfidence,
            finding_title: format!(
                "{}: the {low}",
                kernel_name_in_60_characters(context.trace, launch)
            ),
            measured_value: MeasuredNumberWithUnit {
                number_in_unit: achieved.unwrap_or(theoretical),
                unit: "%",
            },
            rule_threshold: MeasuredNumberWithUnit { number_in_unit: threshold, unit: "%" },
            max_recoverable_ns: None,
            remedy: FindingRemedy::GainNotReplayable,
            replayed_gain: None,
            evidence: evidence_of_ncu_launch(context.trace, launch, words),
            advice: "fewer registers, less shared memory or another block size; if achieved is \
                     far below theoretical, balance the blocks and enlarge the grid"
                .to_owned(),
            false_positive_note: "GEMM and attention kernels that hide latency in other ways",
        }))
    })
}

pub(super) fn find_dominant_warp_stalls(context: &DiagnosisContext<'_>) -> FindingsOrMissingData {
    let (lack, option) = ("warp states", "--section WarpStateStats --section SchedulerStats");
    check_each_profiled_launch(context, lack, option, |launch| {
        let all = stall_reasons_and_values_of_launch(context.trace, launch);
        let sum: f64 = all.iter().map(|(_, value)| value).sum();
        let (reason, most) = all.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
        let issue = ncu_metric_of_launch(context.trace, launch, "Issued Warp Per Scheduler")?;
        let share = if sum > 0.0 { most / sum * 100.0 } else { 0.0 };
        if issue >= MIN_ISSUE_RATE_HIDING_STALLS || share <= MIN_DOMINANT_STALL_PERCENT {
            return Some(None);
        }
        let kernel = kernel_name_in_60_characters(context.trace, launch);
        Some(Some(DiagnosisFinding {
            rule_id: "stalls",
            severity: FindingSeverity::Warning,
            confidence: FindingConfidence::HighConfidence,
            finding_title: format!("{kernel}: warps wait mostly for one reason: {reason}"),
            measured_value: MeasuredNumberWithUnit { number_in_unit: share, unit: "% of stalls" },
            rule_threshold: MeasuredNumberWithUnit {
                number_in_unit: MIN_DOMINANT_STALL_PERCENT,
                unit: "% of stalls",
            },
            max_recoverable_ns: None,
            remedy: FindingRemedy::GainNotReplayable,
            replayed_gain: None,
            evidence: with_most_stalled_source_lines(
                context.trace,
                launch,
                evidence_of_ncu_launch(
                    context.trace,
                    launch,
                    format!("{issue:.2} warps issued a cycle"),
                ),
            ),
            advice: advice_for_stall_reason(reason).to_owned(),
            false_positive_note: "stalls that other warps hide: the scheduler still issues",
        }))
    })
}

/// Prefix and suffix of the names of stall metrics: first warps per cycle, then samples. A report
/// may contain stall metrics of both kinds, and the sampled kind a second time for cycles in which
/// no warp was issued.
const STALL_METRIC_PREFIXES_AND_SUFFIXES: [(&str, &str); 4] = [
    ("Stall ", ""),
    ("smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"),
    ("smsp__average_warp_latency_issue_stalled_", ".ratio"),
    ("smsp__pcsamp_warps_issue_stalled_", ""),
];

/// Returns the reasons for which warps of a profiled launch stalled, with their values, from the
/// first kind of metric that the report has.
fn stall_reasons_and_values_of_launch(
    trace: &Trace,
    launch: &NcuProfiledLaunch,
) -> Vec<(String, f64)> {
    let of_kind = |(begin, end): (&str, &str)| -> Vec<(String, f64)> {
        let metrics = launch.metrics.iter();
        let stalls = metrics.filter_map(|(&name, metric)| {
            let reason = trace.names.text_of_name(name).strip_prefix(begin)?.strip_suffix(end)?;
            let issues = reason == "selected" || reason.ends_with("_not_issued");
            (!issues).then(|| (reason.replace('_', " "), metric.metric_value))
        });
        stalls.collect()
    };
    STALL_METRIC_PREFIXES_AND_SUFFIXES
        .into_iter()
        .map(of_kind)
        .find(|all| !all.is_empty())
        .unwrap_or_default()
}

/// Adds the source lines at which warps stalled most to the evidence.
fn with_most_stalled_source_lines(
    trace: &Trace,
    launch: &NcuProfiledLaunch,
    mut evidence: Vec<FindingEvidence>,
) -> Vec<FindingEvidence> {
    for line in launch.lines.iter().take(MAX_EVIDENCE_LINES_OF_FINDING - 1) {
        let (file, reason) = (
            trace.names.text_of_name(line.source_file),
            trace.names.text_of_name(line.main_stall_reason_of_line),
        );
        evidence.push(FindingEvidence {
            kernel_call_or_copy_name: format!(
                "{file}:{}: samples of warps that wait, most for {reason}",
                line.line_number
            ),
            covered_count: usize::try_from(line.stalled_sample_count).unwrap_or(usize::MAX),
            ..FindingEvidence::default()
        });
    }
    evidence
}

fn advice_for_stall_reason(reason: &str) -> &'static str {
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

/// Reports what bounds each GPU of a trace, from sampled counters: cycles in which multiprocessors
/// issue, and DRAM bandwidth.
pub(super) fn report_bound_from_sampled_counters(
    context: &DiagnosisContext<'_>,
) -> FindingsOrMissingData {
    let counters = &context.trace.counters;
    if counters.time_ns.is_empty() {
        let record = context.platform.advice_to_sample_hardware_counters();
        return Err(DataMissingForRule::missing_data_with_advice(
            "no hardware counters were sampled",
            record,
        ));
    }
    let mut gpus = counters.gpu_number.clone();
    gpus.sort_unstable();
    gpus.dedup();
    let mut found = Vec::new();
    for gpu in gpus {
        let mean = |words: &[&str]| {
            let (mut sum, mut count) = (0.0, 0usize);
            for row in (0..counters.time_ns.len()).filter(|&row| counters.gpu_number[row] == gpu) {
                let name = context.trace.names.text_of_name(counters.metric_name[row]);
                if words.iter().all(|word| name.contains(word)) {
                    sum += counters.metric_value[row];
                    count += 1;
                }
            }
            #[allow(clippy::cast_precision_loss)]
            (count >= MIN_COUNTER_SAMPLES).then(|| sum / count as f64)
        };
        let issue = mean(&["SM", "Issue"]);
        let (read, write) = (mean(&["DRAM", "Read"]), mean(&["DRAM", "Write"]));
        let (Some(issue), Some(read), Some(write)) = (issue, read, write) else { continue };
        let memory = read + write;
        let bound = bound_from_utilization(issue, memory);
        found.push(DiagnosisFinding {
            rule_id: "sampled-bound",
            severity: FindingSeverity::Information,
            confidence: FindingConfidence::MediumConfidence,
            finding_title: format!(
                "GPU {gpu} is {bound} on average: SM issue {issue:.0} %, DRAM read {read:.0} % and \
                 write {write:.0} %"
            ),
            measured_value: MeasuredNumberWithUnit {
                number_in_unit: issue.max(memory),
                unit: "% of peak",
            },
            rule_threshold: MeasuredNumberWithUnit {
                number_in_unit: MIN_BOUNDING_UTILIZATION_PERCENT,
                unit: "% of peak",
            },
            max_recoverable_ns: None,
            remedy: FindingRemedy::GainNotReplayable,
            replayed_gain: None,
            evidence: Vec::new(),
            advice: advice_for_kernel_bound(bound).to_owned(),
            false_positive_note: "averages hide phases: restrict the trace with --range",
        });
    }
    if found.is_empty() {
        let reason = format!(
            "fewer than {MIN_COUNTER_SAMPLES} samples of SM issue and DRAM bandwidth: too few to conclude"
        );
        return Err(DataMissingForRule::missing_data_with_advice(
            reason,
            "sample for longer, or more often",
        ));
    }
    Ok((found, all_records_inspected(counters.time_ns.len(), InspectedRecordKind::CounterSamples)))
}

#[cfg(test)]
mod tests {
    use super::bound_from_utilization;

    #[test]
    fn every_pair_of_compute_and_memory_use_has_a_bound() {
        assert_eq!(bound_from_utilization(85.0, 40.0), "compute-bound");
        assert_eq!(bound_from_utilization(85.0, 90.0), "memory-bound");
        assert_eq!(bound_from_utilization(16.0, 81.0), "memory-bound");
        assert_eq!(bound_from_utilization(23.6, 21.7), "latency-bound");
        assert_eq!(bound_from_utilization(70.0, 50.0), "compute-bound");
        assert_eq!(bound_from_utilization(50.0, 70.0), "memory-bound");
        assert_eq!(bound_from_utilization(65.0, 62.0), "mixed");
    }
}
