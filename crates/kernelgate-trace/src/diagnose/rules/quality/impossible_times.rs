//! Finds times that a real GPU cannot have: operations of one stream that overlap, and operations
//! that start before their launch.

use super::super::super::finding::{
    DiagnosisFinding, FindingEvidence, FindingSeverity, MeasuredNumberWithUnit,
};
use super::super::super::text::format_nanoseconds;
use super::super::super::trace_facts::DiagnosisContext;
use super::super::rule_outcome::{
    count_as_number_with_unit, data_quality_finding, evidence_of_single_operation, percent_or_zero,
    sorted_and_limited_evidence,
};
use crate::analyze::operations::{GpuOperationId, GpuOperationKind};
use crate::analyze::time_order::OperationsInOrder;

/// Longest overlap of two operations on a stream, nanoseconds, that may come from programmatic
/// dependent launch or rounding.
pub(super) const MAX_HARMLESS_STREAM_OVERLAP_NS: i64 = 20_000;
/// Share, in percent, from which on impossible or missing times make a trace's sums doubtful.
const MIN_DOUBTFUL_SHARE_PERCENT: f64 = 5.0;

/// An operation that, by its recorded times, ends after later operations of its stream have
/// started.
struct OperationOverlappingLaterOnes {
    operation_id: GpuOperationId,
    overlapped_operation_count: usize,
    /// Time from the start of the first later operation to the end of this operation, nanoseconds.
    overlap_ns: i64,
}

/// Adds a finding if operations of one stream overlap: they must run one after the other, except
/// nodes of a CUDA graph.
pub(super) fn find_overlaps_on_streams(
    context: &DiagnosisContext<'_>,
    found: &mut Vec<DiagnosisFinding>,
) {
    let all = &context.operations;
    let order = OperationsInOrder::sort_operations_by_key(
        all.all_operation_ids().filter(|&id| !may_overlap_others_on_stream(context, id)),
        |id| {
            let times = (all.operation_start_ns(id), all.operation_end_exclusive_ns(id));
            (all.place_of_operation(id), times)
        },
    );
    let mut overlaps: Vec<OperationOverlappingLaterOnes> = Vec::new();
    let mut ahead: Option<GpuOperationId> = None;
    for id in order.iter() {
        let Some(last) =
            ahead.filter(|&last| all.place_of_operation(last) == all.place_of_operation(id))
        else {
            ahead = Some(id);
            continue;
        };
        let (start, end) = (all.operation_start_ns(id), all.operation_end_exclusive_ns(id));
        let last_end = all.operation_end_exclusive_ns(last);
        let beside = last_end.min(end) - start;
        let ns = last_end - start;
        if beside > MAX_HARMLESS_STREAM_OVERLAP_NS
            || (end < last_end && ns > MAX_HARMLESS_STREAM_OVERLAP_NS)
        {
            match overlaps.last_mut().filter(|of| of.operation_id == last) {
                Some(of) => of.overlapped_operation_count += 1,
                None => {
                    overlaps.push(OperationOverlappingLaterOnes {
                        operation_id: last,
                        overlapped_operation_count: 1,
                        overlap_ns: ns,
                    });
                }
            }
        }
        if end > last_end {
            ahead = Some(id);
        }
    }
    if overlaps.is_empty() {
        return;
    }
    let total: i64 = overlaps.iter().map(|of| of.overlap_ns).sum();
    let followers: usize = overlaps.iter().map(|of| of.overlapped_operation_count).sum();
    let longest = overlaps.iter().map(|of| of.overlap_ns).max().unwrap_or(0);
    let busy: i64 = context.activities.iter().map(|of| of.gpu_busy_ns).sum();
    let share = percent_or_zero(total, busy);
    let severity = if share > MIN_DOUBTFUL_SHARE_PERCENT {
        FindingSeverity::Severe
    } else {
        FindingSeverity::Warning
    };
    let mut finding = data_quality_finding(
        severity,
        format!(
            "{} operations overlap {followers} that follow them on one stream, by up to {}: their \
             times are wrong",
            overlaps.len(),
            format_nanoseconds(longest)
        ),
        count_as_number_with_unit(followers, "operations"),
        "record again; busy time, idle time and sums that hold them are doubtful",
        "kernels with programmatic dependent launch, which start before the one ahead ends",
    );
    finding.evidence = sorted_and_limited_evidence(
        overlaps
            .iter()
            .map(|of| {
                let what = format!(
                    "{} overlaps {} that follow",
                    all.printed_operation_name(of.operation_id),
                    of.overlapped_operation_count
                );
                let evidence = evidence_of_single_operation(context, of.operation_id, what);
                FindingEvidence { total_duration_ns: Some(of.overlap_ns), ..evidence }
            })
            .collect(),
    );
    found.push(finding);
}

/// Nodes of a CUDA graph may run at the same time, and pages migrate at any time.
fn may_overlap_others_on_stream(context: &DiagnosisContext<'_>, id: GpuOperationId) -> bool {
    let node = |row: usize| {
        context.trace.kernels.graph_node.decoded_row(row).is_some_and(|node| node != 0)
    };
    match context.operations.kind_and_table_row(id) {
        (GpuOperationKind::Kernel, row) => node(row),
        (GpuOperationKind::Copy, _) => context.is_operation_page_migration(id),
        (GpuOperationKind::Memset | GpuOperationKind::CudaGraphLaunch, _) => false,
    }
}

/// Adds a finding if operations have no times, because sums do not contain these operations.
pub(super) fn find_operations_without_times(
    context: &DiagnosisContext<'_>,
    found: &mut Vec<DiagnosisFinding>,
) {
    let lost = i64::try_from(context.trace.quality.operations_without_times).unwrap_or(i64::MAX);
    if lost == 0 {
        return;
    }
    let counted = i64::try_from(context.operations.len()).unwrap_or(i64::MAX);
    let share = percent_or_zero(lost, lost.saturating_add(counted));
    let severity = if share > MIN_DOUBTFUL_SHARE_PERCENT {
        FindingSeverity::Severe
    } else {
        FindingSeverity::Information
    };
    let mut finding = data_quality_finding(
        severity,
        format!("{lost} operations have no times and do not count: {share:.1} % of all"),
        MeasuredNumberWithUnit { number_in_unit: share, unit: "% of operations" },
        "record again; sums lack them, and what ran in them counts as idle",
        "a trace that was stopped while the program ran",
    );
    finding.rule_threshold = MeasuredNumberWithUnit {
        number_in_unit: MIN_DOUBTFUL_SHARE_PERCENT,
        unit: "% of operations",
    };
    found.push(finding);
}

/// Adds a finding if operations start before their launch calls, which means that the clocks of
/// host and GPU disagree.
pub(super) fn find_operations_starting_before_launch(
    context: &DiagnosisContext<'_>,
    found: &mut Vec<DiagnosisFinding>,
) {
    let (count, most) = context.host_summary.count_and_largest_ns_before_launch;
    if count == 0 {
        return;
    }
    let launched = context.operations.len()
        - context.classes.page_migration_count()
        - context.host_summary.operations_without_launch_call;
    let share = percent_or_zero(
        i64::try_from(count).unwrap_or(i64::MAX),
        i64::try_from(launched).unwrap_or(i64::MAX),
    );
    let severity = if share > MIN_DOUBTFUL_SHARE_PERCENT {
        FindingSeverity::Warning
    } else {
        FindingSeverity::Information
    };
    let mut finding = data_quality_finding(
        severity,
        format!(
            "{count} of {launched} operations start before the call that launched them, by up to \
             {}: the clocks of host and device disagree",
            format_nanoseconds(most)
        ),
        MeasuredNumberWithUnit { number_in_unit: share, unit: "% of operations" },
        "causes of gaps that are shorter than this are doubtful; record again",
        "nothing",
    );
    finding.rule_threshold =
        MeasuredNumberWithUnit { number_in_unit: 0.0, unit: "% of operations" };
    found.push(finding);
}
