//! Findings of Nsight Compute about a kernel's memory accesses and warps: coalescing, bank
//! conflicts, divergence.

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingRemedy, FindingSeverity, NumberWithUnit,
};
use super::super::ncu_launches::{launch_evidence, launch_metric, shortened_kernel_name};
use super::super::trace_facts::DiagnosisContext;
use super::metrics::check_each_launch;
use super::rule_outcome::RuleResult;
use crate::model::kernel_metrics::ProfiledLaunch;

/// Bytes of a sector, all of which a coalesced access uses.
const SECTOR_BYTES: f64 = 32.0;
/// Used bytes of a sector below which accesses are not coalesced.
const MIN_COALESCED_SECTOR_BYTES: f64 = 0.75 * SECTOR_BYTES;
/// Share of the sectors below which loads, or stores, are ignored beside the other kind.
const IGNORED_SECTOR_SHARE: f64 = 0.1;
/// Sectors of a request that no coalesced access needs: 16 bytes a thread are 16 sectors a warp.
const MAX_COALESCED_SECTORS: f64 = 16.0;
/// Part of the shared-memory wavefronts that may be due to conflicts, in percent.
const MAX_CONFLICT_WAVEFRONT_PERCENT: f64 = 10.0;
/// Threads of a warp that are active on average, below which it diverges.
const MIN_ACTIVE_THREADS_PER_WARP: f64 = 24.0;

/// A launch's value compared with a threshold.
struct LaunchMetricValue {
    value: f64,
    threshold: f64,
    unit: &'static str,
    words: String,
}

/// The finding about every launch whose value is on the wrong side.
struct LaunchFindingText {
    id: &'static str,
    title: &'static str,
    advice: &'static str,
    false_positive: &'static str,
    /// The option of `ncu` without which the report lacks the metrics.
    option: &'static str,
}

/// Applies to each launch; `held` gives nothing where metrics lack, and whether it is a fault.
fn check_launch_values(
    context: &DiagnosisContext<'_>,
    words: &LaunchFindingText,
    held: impl Fn(&ProfiledLaunch) -> Option<(bool, LaunchMetricValue)>,
) -> RuleResult {
    check_each_launch(context, "the metrics", words.option, |launch| {
        let (fault, held) = held(launch)?;
        Some(fault.then(|| DiagnosisFinding {
            id: words.id,
            severity: FindingSeverity::Warning,
            confidence: FindingConfidence::High,
            title: format!("{}: {}", shortened_kernel_name(context.trace, launch), words.title),
            measured: NumberWithUnit { value: held.value, unit: held.unit },
            threshold: NumberWithUnit { value: held.threshold, unit: held.unit },
            recoverable_ns: None,
            remedy: FindingRemedy::NotReplayed,
            replayed: None,
            evidence: launch_evidence(context.trace, launch, held.words),
            advice: words.advice.to_owned(),
            false_positive: words.false_positive,
        }))
    })
}

pub(super) fn coalescing_rule_text() -> String {
    format!(
        "fewer than {MIN_COALESCED_SECTOR_BYTES} of the {SECTOR_BYTES} bytes of a sector used, or more than {MAX_COALESCED_SECTORS} sectors a \
         request, in loads or stores that have {} % of the sectors",
        IGNORED_SECTOR_SHARE * 100.0
    )
}

pub(super) fn bank_conflicts_rule_text() -> String {
    format!(
        "more than {MAX_CONFLICT_WAVEFRONT_PERCENT} % of the shared-memory wavefronts are conflicts"
    )
}

pub(super) fn divergence_rule_text() -> String {
    format!("fewer than {MIN_ACTIVE_THREADS_PER_WARP} threads of a warp active on average")
}

pub(super) fn find_uncoalesced_access(context: &DiagnosisContext<'_>) -> RuleResult {
    const COALESCING_TEXT: LaunchFindingText = LaunchFindingText {
        id: "coalescing",
        title: "accesses to global memory are not coalesced",
        advice: "let neighbouring threads access neighbouring addresses, aligned, 4 to 16 bytes \
                 each; go through shared memory where the layout does not allow it",
        false_positive: "gathers by index, and kernels whose data comes from L2 anyway",
        option: "--page raw, or --metrics group:memory__first_level_cache_table",
    };
    let efficiency = |launch: &ProfiledLaunch, access: &str| {
        let value = |name: String| launch_metric(context.trace, launch, &name);
        let used =
            value(format!("smsp__sass_average_data_bytes_per_sector_mem_global_op_{access}.ratio"));
        let sectors = value(format!(
            "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_{access}.ratio"
        ));
        let held =
            |value, threshold, unit, words| LaunchMetricValue { value, threshold, unit, words };
        let name = if access == "ld" { "loads" } else { "stores" };
        match (used, sectors) {
            // The launch has no access of this kind, so the ratio has no meaning.
            (Some(0.0), _) | (None, Some(0.0)) => {
                Some((false, held(0.0, 0.0, "sectors", format!("no {name}"))))
            }
            (Some(used), _) => {
                let words = format!("{name} use {used:.1} of {SECTOR_BYTES} bytes of a sector");
                Some((
                    used < MIN_COALESCED_SECTOR_BYTES,
                    held(used, MIN_COALESCED_SECTOR_BYTES, "bytes of a sector", words),
                ))
            }
            (None, Some(sectors)) => {
                let words = format!("{name}: {sectors:.1} sectors a request");
                Some((
                    sectors > MAX_COALESCED_SECTORS,
                    held(sectors, MAX_COALESCED_SECTORS, "sectors a request", words),
                ))
            }
            (None, None) => None,
        }
    };
    let counts = |launch: &ProfiledLaunch, access: &str| {
        let sectors = ["ld", "st"].map(|access| {
            let name = format!("l1tex__t_sectors_pipe_lsu_mem_global_op_{access}.sum");
            launch_metric(context.trace, launch, &name)
        });
        let [Some(loads), Some(stores)] = sectors else { return true };
        let own = if access == "ld" { loads } else { stores };
        own >= IGNORED_SECTOR_SHARE * (loads + stores)
    };
    check_launch_values(context, &COALESCING_TEXT, |launch| {
        let both = ["ld", "st"].into_iter().filter_map(|access| {
            let (fault, held) = efficiency(launch, access)?;
            Some((fault && counts(launch, access), held))
        });
        // The worse value of loads and stores decides.
        both.max_by_key(|(fault, _)| *fault)
    })
}

pub(super) fn bank_conflicts_rule(context: &DiagnosisContext<'_>) -> RuleResult {
    const FINDING_TEXT: LaunchFindingText = LaunchFindingText {
        id: "bank-conflicts",
        title: "accesses to shared memory conflict",
        advice: "pad rows by one element, swizzle the index, or access 16 bytes a thread",
        false_positive: "kernels that shared memory does not bound",
        option: "--page raw, or --section MemoryWorkloadAnalysis_Tables",
    };
    check_launch_values(context, &FINDING_TEXT, |launch| {
        let value = |name| launch_metric(context.trace, launch, name);
        let conflicts = value("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum")?;
        let wavefronts = value("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum")?;
        let share = if wavefronts > 0.0 { conflicts / wavefronts * 100.0 } else { 0.0 };
        let words = format!("{conflicts:.0} of {wavefronts:.0} wavefronts are conflicts");
        let unit = "% of wavefronts";
        Some((
            share > MAX_CONFLICT_WAVEFRONT_PERCENT,
            LaunchMetricValue {
                value: share,
                threshold: MAX_CONFLICT_WAVEFRONT_PERCENT,
                unit,
                words,
            },
        ))
    })
}

pub(super) fn find_divergence(context: &DiagnosisContext<'_>) -> RuleResult {
    const FINDING_TEXT: LaunchFindingText = LaunchFindingText {
        id: "divergence",
        title: "threads of a warp take different branches",
        advice: "branch by warp, not by thread; sort or split work of different kinds; predicate \
                 short branches",
        false_positive: "kernels with few threads on purpose, and the last block of a grid",
        option: "--section WarpStateStats",
    };
    check_launch_values(context, &FINDING_TEXT, |launch| {
        let value = |name| launch_metric(context.trace, launch, name);
        let active = value("Avg. Active Threads Per Warp")
            .or_else(|| value("smsp__thread_inst_executed_per_inst_executed.ratio"))?;
        let branches = value("Branch Efficiency");
        let branches =
            branches.map_or(String::new(), |of| format!(", branch efficiency {of:.1} %"));
        let words = format!("{active:.1} of 32 threads active{branches}");
        let unit = "active threads of a warp";
        Some((
            active < MIN_ACTIVE_THREADS_PER_WARP,
            LaunchMetricValue {
                value: active,
                threshold: MIN_ACTIVE_THREADS_PER_WARP,
                unit,
                words,
            },
        ))
    })
}
