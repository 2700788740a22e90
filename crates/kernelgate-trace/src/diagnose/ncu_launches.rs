//! Helpers for kernel launches that Nsight Compute measured: metrics by name, and evidence for
//! findings.

use std::cmp::Reverse;

use super::finding::{DiagnosisFinding, FindingEvidence};
use super::labels::shortened_kernel_name_for_readers;
use crate::model::Trace;
use crate::model::kernel_metrics::NcuProfiledLaunch;
use crate::stats::shorten_in_the_middle;

/// Returns the value of a metric of a profiled launch; `None` if the report lacks the metric.
pub(super) fn ncu_metric_of_launch(
    trace: &Trace,
    launch: &NcuProfiledLaunch,
    name: &str,
) -> Option<f64> {
    let name = trace.names.find_interned_text(name)?;
    launch.metrics.get(&name).map(|metric| metric.metric_value)
}

/// Returns the duration of a profiled launch, nanoseconds.
#[allow(clippy::cast_possible_truncation)]
pub(super) fn ncu_launch_duration_ns(trace: &Trace, launch: &NcuProfiledLaunch) -> Option<i64> {
    let metric = launch.metrics.get(&trace.names.find_interned_text("Duration")?)?;
    let scale = match trace.names.text_of_name(metric.unit) {
        "ns" | "nsecond" => 1.0,
        "us" | "usecond" => 1e3,
        "ms" | "msecond" => 1e6,
        "s" | "second" => 1e9,
        _ => return None,
    };
    Some((metric.metric_value * scale) as i64)
}

/// Returns the kernel's name, shortened to 60 characters.
pub(super) fn kernel_name_in_60_characters(trace: &Trace, launch: &NcuProfiledLaunch) -> String {
    shorten_in_the_middle(
        &shortened_kernel_name_for_readers(trace.names.text_of_name(launch.kernel_name)),
        60,
    )
}

pub(super) fn evidence_of_ncu_launch(
    trace: &Trace,
    launch: &NcuProfiledLaunch,
    words: String,
) -> Vec<FindingEvidence> {
    let kernel = kernel_name_in_60_characters(trace, launch);
    vec![FindingEvidence {
        kernel_call_or_copy_name: format!("{words}: launch {}, {kernel}", launch.launch_id),
        covered_count: 1,
        total_duration_ns: ncu_launch_duration_ns(trace, launch),
        ..FindingEvidence::default()
    }]
}

/// Largest number of launches that are listed as evidence of one finding.
const MAX_LAUNCHES_PER_FINDING: usize = 5;

/// Joins findings about profiled launches that have the same title; the values are those of the
/// longest launch.
pub(super) fn join_findings_with_same_title(
    mut found: Vec<DiagnosisFinding>,
) -> Vec<DiagnosisFinding> {
    found
        .sort_by_key(|of| Reverse(of.evidence.first().and_then(|launch| launch.total_duration_ns)));
    let mut groups: Vec<(DiagnosisFinding, usize)> = Vec::new();
    for finding in found {
        match groups.iter_mut().find(|(of, _)| of.finding_title == finding.finding_title) {
            Some((group, launches)) => {
                *launches += 1;
                if *launches <= MAX_LAUNCHES_PER_FINDING {
                    group.evidence.extend(finding.evidence.into_iter().take(1));
                }
            }
            None => groups.push((finding, 1)),
        }
    }
    let counted = |(mut finding, launches): (DiagnosisFinding, usize)| {
        if launches > 1 {
            finding.finding_title.push_str(&format!(" ({launches} launches)"));
        }
        finding
    };
    groups.into_iter().map(counted).collect()
}
