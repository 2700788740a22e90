//! Launches that Nsight Compute measured: their metrics by name, and how they are shown.

use std::cmp::Reverse;

use super::finding::{DiagnosisFinding, FindingEvidence};
use super::labels::readable_name;
use crate::model::Trace;
use crate::model::kernel_metrics::ProfiledLaunch;
use crate::stats::shorten;

/// Value of a launch's metric; `None` if the report lacks it.
pub(super) fn launch_metric(trace: &Trace, launch: &ProfiledLaunch, name: &str) -> Option<f64> {
    let name = trace.names.find(name)?;
    launch.metrics.get(&name).map(|metric| metric.value)
}

/// The duration of a launch in nanoseconds.
#[allow(clippy::cast_possible_truncation)]
pub(super) fn launch_duration_ns(trace: &Trace, launch: &ProfiledLaunch) -> Option<i64> {
    let metric = launch.metrics.get(&trace.names.find("Duration")?)?;
    let scale = match trace.names.text(metric.unit) {
        "ns" | "nsecond" => 1.0,
        "us" | "usecond" => 1e3,
        "ms" | "msecond" => 1e6,
        "s" | "second" => 1e9,
        _ => return None,
    };
    Some((metric.value * scale) as i64)
}

/// The kernel's name, as long as a line has room for.
pub(super) fn shortened_kernel_name(trace: &Trace, launch: &ProfiledLaunch) -> String {
    shorten(&readable_name(trace.names.text(launch.kernel)), 60)
}

pub(super) fn launch_evidence(
    trace: &Trace,
    launch: &ProfiledLaunch,
    words: String,
) -> Vec<FindingEvidence> {
    let kernel = shortened_kernel_name(trace, launch);
    vec![FindingEvidence {
        what: format!("{words}: launch {}, {kernel}", launch.id),
        count: 1,
        total_ns: launch_duration_ns(trace, launch),
        ..FindingEvidence::default()
    }]
}

/// Launches of a finding that are listed.
const MAX_LISTED_LAUNCHES: usize = 5;

/// Joins findings about launches that have the same title, with the value of the longest launch.
pub(super) fn group_by_title(mut found: Vec<DiagnosisFinding>) -> Vec<DiagnosisFinding> {
    found.sort_by_key(|of| Reverse(of.evidence.first().and_then(|launch| launch.total_ns)));
    let mut groups: Vec<(DiagnosisFinding, usize)> = Vec::new();
    for finding in found {
        match groups.iter_mut().find(|(of, _)| of.title == finding.title) {
            Some((group, launches)) => {
                *launches += 1;
                if *launches <= MAX_LISTED_LAUNCHES {
                    group.evidence.extend(finding.evidence.into_iter().take(1));
                }
            }
            None => groups.push((finding, 1)),
        }
    }
    let counted = |(mut finding, launches): (DiagnosisFinding, usize)| {
        if launches > 1 {
            finding.title.push_str(&format!(" ({launches} launches)"));
        }
        finding
    };
    groups.into_iter().map(counted).collect()
}
