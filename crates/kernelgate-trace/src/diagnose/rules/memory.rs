//! Diagnosis rules about a kernel's memory accesses and warps, from Nsight Compute's metrics:
//! coalescing, bank conflicts, divergence.

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingRemedy, FindingSeverity, MeasuredNumberWithUnit,
};
use super::super::ncu_launches::{
    evidence_of_ncu_launch, kernel_name_in_60_characters, ncu_metric_of_launch,
};
use super::super::trace_facts::DiagnosisContext;
use super::metrics::check_each_profiled_launch;
use super::rule_outcome::FindingsOrMissingData;
use crate::model::kernel_metrics::NcuProfiledLaunch;

/// Bytes of a memory sector; a coalesced access uses all of them.
const MEMORY_SECTOR_BYTES: f64 = 32.0;
/// Smallest mean number of bytes used of each sector for which accesses count as coalesced.
const MIN_USED_BYTES_OF_COALESCED_SECTOR: f64 = 0.75 * MEMORY_SECTOR_BYTES;
/// Share of a launch's sectors below which its loads, or its stores, are not judged.
const MIN_JUDGED_SECTOR_SHARE: f64 = 0.1;
/// Largest number of sectors per request for which accesses count as coalesced: 16 bytes a thread
/// are 16 sectors a warp.
const MAX_COALESCED_SECTORS_PER_REQUEST: f64 = 16.0;
/// Largest share of shared-memory wavefronts, in percent, that may be due to bank conflicts without
/// a finding.
const MAX_CONFLICTING_WAVEFRONTS_PERCENT: f64 = 10.0;
/// Smallest mean number of active threads of a warp without a finding about divergence.
const MIN_ACTIVE_THREADS_WITHOUT_DIVERGENCE: f64 = 24.0;

/// Value of a profiled launch's metric, with the rule's threshold and words for evidence.
struct MetricValueAndThreshold {
    metric_value: f64,
    metric_threshold: f64,
    unit: &'static str,
    evidence_text: String,
}

/// Texts of a rule's finding about profiled launches whose metric is on the wrong side of the
/// threshold.
struct ProfiledLaunchFindingTexts {
    finding_id: &'static str,
    title: &'static str,
    advice: &'static str,
    false_positive_note: &'static str,
    /// Option of `ncu` that records the metrics which the rule needs.
    ncu_option: &'static str,
}

/// Applies a rule to each profiled launch; `held` returns the measured value and whether it is a
/// fault, or `None` if metrics are missing.
fn check_metric_of_each_launch(
    context: &DiagnosisContext<'_>,
    words: &ProfiledLaunchFindingTexts,
    held: impl Fn(&NcuProfiledLaunch) -> Option<(bool, MetricValueAndThreshold)>,
) -> FindingsOrMissingData {
    check_each_profiled_launch(context, "the metrics", words.ncu_option, |launch| {
        let (fault, held) = held(launch)?;
        Some(fault.then(|| DiagnosisFinding {
            rule_id: words.finding_id,
            severity: FindingSeverity::Warning,
            confidence: FindingConfidence::HighConfidence,
            finding_title: format!(
                "{}: {}",
                kernel_name_in_60_characters(context.trace, launch),
                words.title
            ),
            measured_value: MeasuredNumberWithUnit {
                number_in_unit: held.metric_value,
                unit: held.unit,
            },
            rule_threshold: MeasuredNumberWithUnit {
                number_in_unit: held.metric_threshold,
                unit: held.unit,
            },
            max_recoverable_ns: None,
            remedy: FindingRemedy::GainNotReplayable,
            replayed_gain: None,
            evidence: evidence_of_ncu_launch(context.trace, launch, held.evidence_text),
            advice: words.advice.to_owned(),
            false_positive_note: words.false_positive_note,
        }))
    })
}

pub(super) fn coalescing_rule_text() -> String {
    format!(
        "fewer than {MIN_USED_BYTES_OF_COALESCED_SECTOR} of the {MEMORY_SECTOR_BYTES} bytes of a sector used, or more than {MAX_COALESCED_SECTORS_PER_REQUEST} sectors a \
         request, in loads or stores that have {} % of the sectors",
        MIN_JUDGED_SECTOR_SHARE * 100.0
    )
}

pub(super) fn bank_conflicts_rule_text() -> String {
    format!(
        "more than {MAX_CONFLICTING_WAVEFRONTS_PERCENT} % of the shared-memory wavefronts are conflicts"
    )
}

pub(super) fn divergence_rule_text() -> String {
    format!(
        "fewer than {MIN_ACTIVE_THREADS_WITHOUT_DIVERGENCE} threads of a warp active on average"
    )
}

pub(super) fn find_uncoalesced_memory_accesses(
    context: &DiagnosisContext<'_>,
) -> FindingsOrMissingData {
    const UNCOALESCED_FINDING_TEXTS: ProfiledLaunchFindingTexts = ProfiledLaunchFindingTexts {
        finding_id: "coalescing",
        title: "accesses to global memory are not coalesced",
        advice: "let neighbouring threads access neighbouring addresses, aligned, 4 to 16 bytes \
                 each; go through shared memory where the layout does not allow it",
        false_positive_note: "gathers by index, and kernels whose data comes from L2 anyway",
        ncu_option: "--page raw, or --metrics group:memory__first_level_cache_table",
    };
    let efficiency = |launch: &NcuProfiledLaunch, access: &str| {
        let value = |name: String| ncu_metric_of_launch(context.trace, launch, &name);
        let used =
            value(format!("smsp__sass_average_data_bytes_per_sector_mem_global_op_{access}.ratio"));
        let sectors = value(format!(
            "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_{access}.ratio"
        ));
        let held = |value, threshold, unit, words| MetricValueAndThreshold {
            metric_value: value,
            metric_threshold: threshold,
            unit,
            evidence_text: words,
        };
        let name = if access == "ld" { "loads" } else { "stores" };
        match (used, sectors) {
            // A ratio of 0 means that the launch has no loads (or stores), so they are not judged.
            (Some(0.0), _) | (None, Some(0.0)) => {
                Some((false, held(0.0, 0.0, "sectors", format!("no {name}"))))
            }
            (Some(used), _) => {
                let words =
                    format!("{name} use {used:.1} of {MEMORY_SECTOR_BYTES} bytes of a sector");
                Some((
                    used < MIN_USED_BYTES_OF_COALESCED_SECTOR,
                    held(used, MIN_USED_BYTES_OF_COALESCED_SECTOR, "bytes of a sector", words),
                ))
            }
            (None, Some(sectors)) => {
                let words = format!("{name}: {sectors:.1} sectors a request");
                Some((
                    sectors > MAX_COALESCED_SECTORS_PER_REQUEST,
                    held(sectors, MAX_COALESCED_SECTORS_PER_REQUEST, "sectors a request", words),
                ))
            }
            (None, None) => None,
        }
    };
    let counts = |launch: &NcuProfiledLaunch, access: &str| {
        let sectors = ["ld", "st"].map(|access| {
            let name = format!("l1tex__t_sectors_pipe_lsu_mem_global_op_{access}.sum");
            ncu_metric_of_launch(context.trace, launch, &name)
        });
        let [Some(loads), Some(stores)] = sectors else { return true };
        let own = if access == "ld" { loads } else { stores };
        own >= MIN_JUDGED_SECTOR_SHARE * (loads + stores)
    };
    check_metric_of_each_launch(context, &UNCOALESCED_FINDING_TEXTS, |launch| {
        let both = ["ld", "st"].into_iter().filter_map(|access| {
            let (fault, held) = efficiency(launch, access)?;
            Some((fault && counts(launch, access), held))
        });
        // If only loads or only stores have a fault, the kind with the fault decides.
        both.max_by_key(|(fault, _)| *fault)
    })
}

pub(super) fn find_shared_memory_bank_conflicts(
    context: &DiagnosisContext<'_>,
) -> FindingsOrMissingData {
    const BANK_CONFLICT_FINDING_TEXTS: ProfiledLaunchFindingTexts = ProfiledLaunchFindingTexts {
        finding_id: "bank-conflicts",
        title: "accesses to shared memory conflict",
        advice: "pad rows by one element, swizzle the index, or access 16 bytes a thread",
        false_positive_note: "kernels that shared memory does not bound",
        ncu_option: "--page raw, or --section MemoryWorkloadAnalysis_Tables",
    };
    check_metric_of_each_launch(context, &BANK_CONFLICT_FINDING_TEXTS, |launch| {
        let value = |name| ncu_metric_of_launch(context.trace, launch, name);
        let conflicts = value("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum")?;
        let wavefronts = value("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum")?;
        let share = if wavefronts > 0.0 { conflicts / wavefronts * 100.0 } else { 0.0 };
        let words = format!("{conflicts:.0} of {wavefronts:.0} wavefronts are conflicts");
        let unit = "% of wavefronts";
        Some((
            share > MAX_CONFLICTING_WAVEFRONTS_PERCENT,
            MetricValueAndThreshold {
                metric_value: share,
                metric_threshold: MAX_CONFLICTING_WAVEFRONTS_PERCENT,
                unit,
                evidence_text: words,
            },
        ))
    })
}

pub(super) fn find_divergent_warps(context: &DiagnosisContext<'_>) -> FindingsOrMissingData {
    const DIVERGENCE_FINDING_TEXTS: ProfiledLaunchFindingTexts = ProfiledLaunchFindingTexts {
        finding_id: "divergence",
        title: "threads of a warp take different branches",
        advice: "branch by warp, not by thread; sort or split work of different kinds; predicate \
                 short branches",
        false_positive_note: "kernels with few threads on purpose, and the last block of a grid",
        ncu_option: "--section WarpStateStats",
    };
    check_metric_of_each_launch(context, &DIVERGENCE_FINDING_TEXTS, |launch| {
        let value = |name| ncu_metric_of_launch(context.trace, launch, name);
        let active = value("Avg. Active Threads Per Warp")
            .or_else(|| value("smsp__thread_inst_executed_per_inst_executed.ratio"))?;
        let branches = value("Branch Efficiency");
        let branches =
            branches.map_or(String::new(), |of| format!(", branch efficiency {of:.1} %"));
        let words = format!("{active:.1} of 32 threads active{branches}");
        let unit = "active threads of a warp";
        Some((
            active < MIN_ACTIVE_THREADS_WITHOUT_DIVERGENCE,
            MetricValueAndThreshold {
                metric_value: active,
                metric_threshold: MIN_ACTIVE_THREADS_WITHOUT_DIVERGENCE,
                unit,
                evidence_text: words,
            },
        ))
    })
}
