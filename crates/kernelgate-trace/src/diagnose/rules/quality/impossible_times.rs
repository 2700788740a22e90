//! Times that no device can have: operations of one stream that overlap, or start before their
//! launch.

use super::super::super::finding::{
    DiagnosisFinding, FindingEvidence, FindingSeverity, NumberWithUnit,
};
use super::super::super::text::time;
use super::super::super::trace_facts::DiagnosisContext;
use super::super::rule_outcome::{
    doubtful_trace_finding, most_expensive_evidence, number, operation_evidence, percent,
};
use crate::analyze::operations::{OperationId, OperationKind};
use crate::analyze::time_order::SortedOperations;

/// Overlaps up to this are programmatic dependent launch, or rounding, in nanoseconds.
pub(super) const MAX_HARMLESS_OVERLAP_NS: i64 = 20_000;
/// Part of the busy time from which overlaps make all sums doubtful, in percent.
const DOUBTFUL_OVERLAP_PERCENT: f64 = 5.0;

/// An operation that, by its times, ends after the next operation of its stream began.
struct OverlappingOperation {
    id: OperationId,
    followers: usize,
    /// Time from the start of the first overlapped operation to the end of the overlapping one,
    /// nanoseconds.
    ns: i64,
}

/// Finds overlaps: operations of one stream must run one after the other, except nodes of a graph.
pub(super) fn find_stream_overlaps(
    context: &DiagnosisContext<'_>,
    found: &mut Vec<DiagnosisFinding>,
) {
    let all = &context.all;
    let order = SortedOperations::operations_by_key(
        all.ids().filter(|&id| !may_overlap_on_stream(context, id)),
        |id| (all.place(id), all.start(id), all.end(id)),
    );
    let mut overlaps: Vec<OverlappingOperation> = Vec::new();
    let mut ahead: Option<OperationId> = None;
    for id in order.iter() {
        let Some(last) = ahead.filter(|&last| all.place(last) == all.place(id)) else {
            ahead = Some(id);
            continue;
        };
        let beside = all.end(last).min(all.end(id)) - all.start(id);
        let inside = all.end(id) < all.end(last);
        if beside > MAX_HARMLESS_OVERLAP_NS
            || (inside && all.end(last) - all.start(id) > MAX_HARMLESS_OVERLAP_NS)
        {
            match overlaps.last_mut().filter(|of| of.id == last) {
                Some(of) => of.followers += 1,
                None => {
                    let ns = all.end(last) - all.start(id);
                    overlaps.push(OverlappingOperation { id: last, followers: 1, ns });
                }
            }
        }
        if all.end(id) > all.end(last) {
            ahead = Some(id);
        }
    }
    if overlaps.is_empty() {
        return;
    }
    let total: i64 = overlaps.iter().map(|of| of.ns).sum();
    let followers: usize = overlaps.iter().map(|of| of.followers).sum();
    let longest = overlaps.iter().map(|of| of.ns).max().unwrap_or(0);
    let busy: i64 = context.activities.iter().map(|of| of.busy_ns).sum();
    let share = percent(total, busy);
    let severity = if share > DOUBTFUL_OVERLAP_PERCENT {
        FindingSeverity::Severe
    } else {
        FindingSeverity::Warning
    };
    let mut finding = doubtful_trace_finding(
        severity,
        format!(
            "{} operations overlap {followers} that follow them on one stream, by up to {}: their \
             times are wrong",
            overlaps.len(),
            time(longest)
        ),
        number(followers, "operations"),
        "record again; busy time, idle time and sums that hold them are doubtful",
        "kernels with programmatic dependent launch, which start before the one ahead ends",
    );
    finding.evidence = most_expensive_evidence(
        overlaps
            .iter()
            .map(|of| {
                let what = format!("{} overlaps {} that follow", all.name(of.id), of.followers);
                let total_ns = Some(of.ns);
                FindingEvidence { total_ns, ..operation_evidence(context, of.id, what) }
            })
            .collect(),
    );
    found.push(finding);
}

/// Nodes of a graph may run at once, and pages migrate at any time.
fn may_overlap_on_stream(context: &DiagnosisContext<'_>, id: OperationId) -> bool {
    let node = |row: usize| context.trace.kernels.graph_node.get(row).is_some_and(|node| node != 0);
    match context.all.kind_and_row(id) {
        (OperationKind::Kernel, row) => node(row),
        (OperationKind::Copy, _) => context.is_page_migration(id),
        (OperationKind::Set | OperationKind::Graph, _) => false,
    }
}

/// Sums do not contain operations without times.
pub(super) fn find_operations_without_times(
    context: &DiagnosisContext<'_>,
    found: &mut Vec<DiagnosisFinding>,
) {
    let lost = i64::try_from(context.trace.quality.without_times).unwrap_or(i64::MAX);
    if lost == 0 {
        return;
    }
    let counted = i64::try_from(context.all.len()).unwrap_or(i64::MAX);
    let share = percent(lost, lost.saturating_add(counted));
    let severity = if share > DOUBTFUL_OVERLAP_PERCENT {
        FindingSeverity::Severe
    } else {
        FindingSeverity::Information
    };
    let mut finding = doubtful_trace_finding(
        severity,
        format!("{lost} operations have no times and do not count: {share:.1} % of all"),
        NumberWithUnit { value: share, unit: "% of operations" },
        "record again; sums lack them, and what ran in them counts as idle",
        "a trace that was stopped while the program ran",
    );
    finding.threshold = NumberWithUnit { value: DOUBTFUL_OVERLAP_PERCENT, unit: "% of operations" };
    found.push(finding);
}

/// Operations that start before their launch: the clocks of host and device disagree.
pub(super) fn find_starts_before_launches(
    context: &DiagnosisContext<'_>,
    found: &mut Vec<DiagnosisFinding>,
) {
    let (count, most) = context.host.before_launch;
    if count == 0 {
        return;
    }
    let launched = context.all.len()
        - context.classes.migration_count()
        - context.host.operations_without_call;
    let share = percent(
        i64::try_from(count).unwrap_or(i64::MAX),
        i64::try_from(launched).unwrap_or(i64::MAX),
    );
    let severity = if share > DOUBTFUL_OVERLAP_PERCENT {
        FindingSeverity::Warning
    } else {
        FindingSeverity::Information
    };
    let mut finding = doubtful_trace_finding(
        severity,
        format!(
            "{count} of {launched} operations start before the call that launched them, by up to \
             {}: the clocks of host and device disagree",
            time(most)
        ),
        NumberWithUnit { value: share, unit: "% of operations" },
        "causes of gaps that are shorter than this are doubtful; record again",
        "nothing",
    );
    finding.threshold = NumberWithUnit { value: 0.0, unit: "% of operations" };
    found.push(finding);
}
