//! Copies and communication during which no kernel computes.

use std::collections::BTreeMap;

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedUnit, NumberWithUnit, ProcessDeviceUse,
};
use super::super::labels::readable_name;
use super::super::text::{format_bytes, time};
use super::super::trace_facts::DiagnosisContext;
use super::launches::check_gpu_work;
use super::rule_outcome::{
    MissingData, RuleResult, inspected_all, most_expensive_evidence, percent,
};
use crate::analyze::classes::OperationClass;
use crate::analyze::operations::OperationId;
use crate::analyze::timeline::BusyTimeLine;
use crate::analyze::timeline::span_union::UnitedSpans;
use crate::stats::shorten;

/// Part of the span from which exposed time is a finding, in percent.
const MIN_EXPOSED_PERCENT: f64 = 5.0;
/// Columns for a name.
const EXPOSED_NAME_WIDTH: usize = 60;

/// Operations of a class on a device.
fn operations_in_class(
    context: &DiagnosisContext<'_>,
    used: &ProcessDeviceUse,
    class: OperationClass,
) -> Vec<OperationId> {
    let own = |id: &OperationId| {
        context.classes.class_of_operation(*id) == class
            && context.process_and_device_of(*id) == (used.pid, used.device)
    };
    context.all.ids().filter(own).collect()
}

/// Nanoseconds in which kernels compute, or whole graphs run.
fn device_compute_ns(used: &ProcessDeviceUse) -> i64 {
    let lines = [
        BusyTimeLine::Compute,
        BusyTimeLine::ComputeAndCommunication,
        BusyTimeLine::ComputeAndMigration,
        BusyTimeLine::ComputeAndCopy,
        BusyTimeLine::Graph,
    ];
    lines.iter().map(|&line| used.account.total.busy_ns_of_line(line)).sum()
}

fn count_of_class(context: &DiagnosisContext<'_>, class: OperationClass) -> usize {
    context.all.ids().filter(|&id| context.classes.class_of_operation(id) == class).count()
}

fn united_spans(context: &DiagnosisContext<'_>, ids: &[OperationId]) -> UnitedSpans {
    UnitedSpans::new(ids.iter().map(|&id| context.all.span(id)).collect())
}

/// Operations of one name as a line, the most expensive first.
fn exposed_evidence(
    context: &DiagnosisContext<'_>,
    ids: &[OperationId],
    place: (i64, u32),
) -> Vec<FindingEvidence> {
    let all = &context.all;
    let mut by_name: BTreeMap<String, (FindingEvidence, u64)> = BTreeMap::new();
    for &id in ids {
        let (start, end) = all.span(id);
        let name = shorten(&readable_name(&all.name(id)), EXPOSED_NAME_WIDTH);
        let (line, moved) = by_name.entry(name.clone()).or_insert_with(|| {
            let first = FindingEvidence {
                what: name,
                total_ns: Some(0),
                span: Some((start, end)),
                place: Some(place),
                ..FindingEvidence::default()
            };
            (first, 0)
        });
        line.count += 1;
        line.total_ns = line.total_ns.map(|ns| ns + end - start);
        if line.span.is_some_and(|(from, to)| end - start > to - from) {
            line.span = Some((start, end));
        }
        if let (crate::analyze::operations::OperationKind::Copy, row) = all.kind_and_row(id) {
            *moved += context.trace.copies.bytes[row];
        }
    }
    let lines = by_name.into_values().map(|(mut line, moved)| {
        if moved > 0 {
            line.what = format!("{}, {}", line.what, format_bytes(moved));
        }
        line
    });
    most_expensive_evidence(lines.collect())
}

pub(super) fn exposed_copies_rule_text() -> String {
    format!("copies with no kernel beside them take {MIN_EXPOSED_PERCENT} % of the span or more")
}

pub(super) fn exposed_communication_rule_text() -> String {
    format!(
        "communication with no compute beside it takes {MIN_EXPOSED_PERCENT} % of the span or more"
    )
}

/// Finds copies during which no kernel runs.
pub(super) fn find_exposed_copies(
    context: &DiagnosisContext<'_>,
    used: &[ProcessDeviceUse],
) -> RuleResult {
    check_gpu_work(context)?;
    let count = count_of_class(context, OperationClass::Copy);
    if count == 0 {
        return Err(MissingData::no_work("the trace holds no copies"));
    }
    let found = used.iter().filter_map(|used| {
        let span = used.span.1 - used.span.0;
        let exposed = used.account.total.busy_ns_of_line(BusyTimeLine::Copy);
        let share = percent(exposed, span);
        if share < MIN_EXPOSED_PERCENT {
            return None;
        }
        let copies = operations_in_class(context, used, OperationClass::Copy);
        let copied = united_spans(context, &copies);
        Some(DiagnosisFinding {
            id: "exposed-copy",
            severity: FindingSeverity::from_saving(exposed, span),
            confidence: FindingConfidence::High,
            title: format!(
                "device {} copies for {:.1} % of the time, {share:.1} % with no kernel beside it; \
                 kernels run for {:.1} %",
                used.device,
                percent(copied.covered_ns(), span),
                percent(device_compute_ns(used), span),
            ),
            measured: NumberWithUnit { value: share, unit: "% of the span" },
            threshold: NumberWithUnit { value: MIN_EXPOSED_PERCENT, unit: "% of the span" },
            recoverable_ns: Some(exposed),
            remedy: FindingRemedy::Without(OperationClass::Copy),
            replayed: None,
            evidence: exposed_evidence(context, &copies, (used.pid, used.device)),
            advice: format!(
                "keep data on the device between launches, or copy beside kernels: another stream, \
                 page-locked memory ({}), the next batch while this one is computed",
                context.platform.pinned_memory_advice()
            ),
            false_positive: "a trace that is mostly loading: restrict it with --range",
        })
    });
    Ok((found.collect(), inspected_all(count, InspectedUnit::Copies)))
}

/// Finds communication during which nothing computes.
pub(super) fn find_exposed_communication(
    context: &DiagnosisContext<'_>,
    used: &[ProcessDeviceUse],
) -> RuleResult {
    check_gpu_work(context)?;
    let count = count_of_class(context, OperationClass::Communication);
    if count == 0 {
        return Err(MissingData::no_work("the trace holds no communication kernels"));
    }
    let found = used.iter().filter_map(|used| {
        let span = used.span.1 - used.span.0;
        let exposed = used.account.total.busy_ns_of_line(BusyTimeLine::Communication);
        let share = percent(exposed, span);
        if share < MIN_EXPOSED_PERCENT {
            return None;
        }
        let communication = operations_in_class(context, used, OperationClass::Communication);
        let communicated = united_spans(context, &communication);
        let shares_streams = used
            .account
            .transfers
            .iter()
            .any(|of| of.class == OperationClass::Communication && of.beside_compute > 0);
        // Work that overlaps on one stream shows that the trace does not hold the real streams.
        let stream = match shares_streams && exposed == communicated.covered_ns() {
            true => "; it is on a stream that computes, so that nothing can overlap there",
            false => "",
        };
        Some(DiagnosisFinding {
            id: "exposed-communication",
            severity: FindingSeverity::from_saving(exposed, span),
            confidence: FindingConfidence::High,
            title: format!(
                "device {} communicates for {}, {} of it with no compute beside it: {share:.1} % of \
                 the time{stream}",
                used.device,
                time(communicated.covered_ns()),
                time(exposed),
            ),
            measured: NumberWithUnit { value: share, unit: "% of the span" },
            threshold: NumberWithUnit { value: MIN_EXPOSED_PERCENT, unit: "% of the span" },
            recoverable_ns: Some(exposed),
            remedy: FindingRemedy::Without(OperationClass::Communication),
            replayed: None,
            evidence: exposed_evidence(context, &communication, (used.pid, used.device)),
            advice: "communicate beside compute on a stream of its own: overlap with the backward \
                     pass, larger buckets, fewer collectives; a rank that waits for others shows \
                     as communication, too"
                .to_owned(),
            false_positive: "a rank that waits for a slower one: compare the traces of all ranks",
        })
    });
    Ok((found.collect(), inspected_all(count, InspectedUnit::Operations)))
}
