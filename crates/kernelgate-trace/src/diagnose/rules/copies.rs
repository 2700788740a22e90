//! Copies and sets that hold up the host or the GPU.

use hashbrown::HashMap;

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedShare, InspectedUnit, ProcessDeviceUse,
};
use super::super::text::format_bytes as shown_bytes;
use super::super::trace_facts::DiagnosisContext;
use super::launches::check_gpu_work;
use super::rule_outcome::{
    MissingData, RuleResult, inspected_some, most_expensive_evidence, number, operation_evidence,
};
use crate::analyze::operations::{OperationId, OperationKind};
use crate::analyze::timeline::BusyTimeLine;
use crate::analyze::timeline::idle_time::DeviceActivity;
use crate::model::gpu::MemoryKind;

/// Synchronous copies to the device up to this size return at once: the data goes with the command.
const MAX_IMMEDIATE_COPY_BYTES: u64 = 64 << 10;

/// A group of operations with one fault, such as pageable copies.
#[derive(Default)]
struct CopyGroup {
    evidence: Vec<FindingEvidence>,
    count: usize,
    total_ns: i64,
    bytes: u64,
    ids: Vec<OperationId>,
}

/// One copy that belongs to a group.
struct CopyOfGroup {
    id: u32,
    bytes: u64,
    what: String,
}

/// Copies with equal description and range are combined.
fn group_copies(
    context: &DiagnosisContext<'_>,
    operations: impl Iterator<Item = CopyOfGroup>,
) -> CopyGroup {
    let mut groups: HashMap<(String, Option<String>), FindingEvidence> = HashMap::new();
    let mut all = CopyGroup::default();
    for CopyOfGroup { id, bytes, what } in operations {
        let (start, end) = context.all.span(id);
        all.count += 1;
        all.total_ns += end - start;
        all.bytes += bytes;
        all.ids.push(id);
        let range = context.path_of_operation(id);
        let evidence = groups.entry((what.clone(), range)).or_insert_with(|| FindingEvidence {
            count: 0,
            total_ns: Some(0),
            ..operation_evidence(context, id, what)
        });
        evidence.count += 1;
        evidence.total_ns = evidence.total_ns.map(|ns| ns + end - start);
        if evidence.span.is_some_and(|(from, to)| end - start > to - from) {
            evidence.span = Some((start, end));
        }
    }
    all.evidence = most_expensive_evidence(groups.into_values().collect());
    all
}

/// An operation of a kind whose call is known.
struct OperationWithCall<'a> {
    id: u32,
    row: usize,
    call: &'a str,
}

/// The copies or sets whose launch call was recorded, and the number of all that were inspected.
fn operations_with_calls<'a>(
    context: &'a DiagnosisContext<'a>,
    (kind, unit): (OperationKind, InspectedUnit),
) -> Result<(Vec<OperationWithCall<'a>>, InspectedShare), MissingData> {
    check_gpu_work(context)?;
    let of_kind =
        |&id: &u32| context.all.kind_and_row(id).0 == kind && !context.is_page_migration(id);
    let ids: Vec<u32> = context.all.ids().filter(of_kind).collect();
    if ids.is_empty() {
        return Err(MissingData::no_work(format!("the trace holds no {}", unit.label())));
    }
    let called = ids.iter().filter_map(|&id| {
        let call = context.host.function_that_launched(context.trace, id)?;
        let (_, row) = context.all.kind_and_row(id);
        Some(OperationWithCall { id, row, call: context.function_name(call) })
    });
    let called: Vec<OperationWithCall<'a>> = called.collect();
    let record = context.platform.record_launches_advice();
    if called.is_empty() {
        let reason = format!("the calls of the {} are not in the trace", unit.label());
        return Err(MissingData::new(reason, record));
    }
    let inspected = InspectedShare {
        missing: (called.len() < ids.len())
            .then(|| format!("the calls of the others are not in the trace; {record}")),
        ..inspected_some(called.len(), ids.len(), unit)
    };
    Ok((called, inspected))
}

/// Severity by the copies' share of all spans, which is an upper bound of the time that a replay
/// can save.
fn copies_severity(context: &DiagnosisContext<'_>, ns: i64) -> FindingSeverity {
    let span = context.activities.iter().map(DeviceActivity::span_of_gaps_ns).sum();
    FindingSeverity::from_saving(ns, span)
}

/// Limits the time `ns` of some operations to the sum of one line of all devices' time.
fn limit_to_one_line(devices: &[ProcessDeviceUse], line: BusyTimeLine, ns: i64) -> i64 {
    ns.min(devices.iter().map(|of| of.account.total.busy_ns_of_line(line)).sum())
}

pub(super) fn pageable_copies_rule_text() -> String {
    "an asynchronous copy from or to pageable memory".to_owned()
}

pub(super) fn synchronous_copies_rule_text() -> String {
    format!(
        "a synchronous copy, but for copies of up to {} KiB to the device",
        MAX_IMMEDIATE_COPY_BYTES >> 10
    )
}

pub(super) fn synchronous_sets_rule_text() -> String {
    "a synchronous memset".to_owned()
}

pub(super) fn pageable_copies_rule(
    context: &DiagnosisContext<'_>,
    devices: &[ProcessDeviceUse],
) -> RuleResult {
    let copies = &context.trace.copies;
    let (called, mut inspected) =
        operations_with_calls(context, (OperationKind::Copy, InspectedUnit::Copies))?;
    let memory = |row: usize| [copies.source[row], copies.target[row]];
    let recorded =
        called.iter().filter(|of| !memory(of.row).contains(&MemoryKind::Unknown)).count();
    if recorded == 0 {
        let record = context.platform.record_launches_advice();
        return Err(MissingData::new(
            "the kinds of memory of the copies are not in the trace",
            record,
        ));
    }
    if recorded < called.len() {
        inspected.seen = i64::try_from(recorded).unwrap_or(i64::MAX);
        inspected.missing = Some("the kinds of memory of the others are not recorded".to_owned());
    }
    let found = called
        .iter()
        .filter(|of| of.call.contains("Async") && memory(of.row).contains(&MemoryKind::Pageable))
        .map(|&OperationWithCall { id, row, call }| {
            let direction = context.trace.names.text(copies.kind[row]);
            let [from, to] = memory(row).map(MemoryKind::label);
            let what = format!("{call} {direction} ({from} to {to})");
            CopyOfGroup { id, bytes: copies.bytes[row], what }
        });
    let group = group_copies(context, found);
    if group.count == 0 {
        return Ok((Vec::new(), inspected));
    }
    let saved = limit_to_one_line(devices, BusyTimeLine::Copy, group.total_ns);
    #[allow(clippy::cast_precision_loss)]
    let speed = group.bytes as f64 / group.total_ns.max(1) as f64;
    // A few bytes show latency, not speed.
    let speed = if speed >= 0.05 { format!(" at {speed:.1} GB/s") } else { String::new() };
    let found = DiagnosisFinding {
        id: "pageable-copy",
        severity: copies_severity(context, saved),
        confidence: FindingConfidence::High,
        title: format!(
            "asynchronous copies with pageable memory: {}, {}{speed}; the host waits for each",
            group.count,
            shown_bytes(group.bytes)
        ),
        measured: number(group.count, "copies"),
        threshold: number(0, "copies"),
        recoverable_ns: Some(saved),
        remedy: FindingRemedy::WithoutOperations(group.ids),
        replayed: None,
        evidence: group.evidence,
        advice: format!(
            "allocate the host side page-locked, and copy asynchronously: {}",
            context.platform.pinned_memory_advice()
        ),
        false_positive: "copies at start-up, such as loading a model once",
    };
    Ok((vec![found], inspected))
}

pub(super) fn synchronous_copies_rule(
    context: &DiagnosisContext<'_>,
    devices: &[ProcessDeviceUse],
) -> RuleResult {
    let copies = &context.trace.copies;
    let (called, inspected) =
        operations_with_calls(context, (OperationKind::Copy, InspectedUnit::Copies))?;
    let found = called
        .iter()
        .filter(|of| {
            let small = context.trace.names.text(copies.kind[of.row]) == "Host-to-Device"
                && copies.bytes[of.row] <= MAX_IMMEDIATE_COPY_BYTES;
            of.call.to_ascii_lowercase().contains("memcpy") && !of.call.contains("Async") && !small
        })
        .map(|&OperationWithCall { id, row, call }| {
            let what = format!("{call} {}", context.trace.names.text(copies.kind[row]));
            CopyOfGroup { id, bytes: copies.bytes[row], what }
        });
    let group = group_copies(context, found);
    let saved = limit_to_one_line(devices, BusyTimeLine::Copy, group.total_ns);
    let kind = ("synchronous-copy", InspectedUnit::Copies);
    Ok((synchronous_finding(context, devices, kind, (group, saved)), inspected))
}

pub(super) fn synchronous_sets_rule(
    context: &DiagnosisContext<'_>,
    devices: &[ProcessDeviceUse],
) -> RuleResult {
    let (called, inspected) =
        operations_with_calls(context, (OperationKind::Set, InspectedUnit::Sets))?;
    let found = called
        .iter()
        .filter(|of| of.call.to_ascii_lowercase().contains("memset") && !of.call.contains("Async"))
        .map(|&OperationWithCall { id, row, call }| CopyOfGroup {
            id,
            bytes: context.trace.sets.bytes[row],
            what: call.to_owned(),
        });
    let group = group_copies(context, found);
    let saved = limit_to_one_line(devices, BusyTimeLine::Set, group.total_ns);
    let kind = ("synchronous-set", InspectedUnit::Sets);
    Ok((synchronous_finding(context, devices, kind, (group, saved)), inspected))
}

/// Makes a finding of a group of copies, with its exposed time. The asynchronous form hides the
/// exposed time behind other work, so it saves no more than the time of that work.
fn synchronous_finding(
    context: &DiagnosisContext<'_>,
    devices: &[ProcessDeviceUse],
    (id, unit): (&'static str, InspectedUnit),
    (group, exposed_ns): (CopyGroup, i64),
) -> Vec<DiagnosisFinding> {
    if group.count == 0 {
        return Vec::new();
    }
    let busy_ns: i64 = devices.iter().map(|of| of.busy_ns).sum();
    let saved = exposed_ns.min(busy_ns - exposed_ns);
    let unit = unit.label();
    #[allow(clippy::cast_precision_loss)]
    let milliseconds = group.total_ns as f64 / 1e6;
    vec![DiagnosisFinding {
        id,
        severity: copies_severity(context, saved),
        confidence: FindingConfidence::High,
        title: format!(
            "{unit} that hold up the host: {}, {milliseconds:.3} ms on the GPU",
            group.count
        ),
        measured: number(group.count, unit),
        threshold: number(0, unit),
        recoverable_ns: Some(saved),
        remedy: FindingRemedy::WithoutOperations(group.ids),
        replayed: None,
        evidence: group.evidence,
        advice: "use the asynchronous form on a stream, with page-locked memory".to_owned(),
        false_positive: "calls at start-up, or whose result the host needs at once",
    }]
}
