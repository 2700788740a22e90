//! Diagnosis rules about copies and memsets that block the host or the GPU.

use hashbrown::HashMap;

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    GpuUseOfProcess, InspectedRecordKind, InspectedShareOfRecords,
};
use super::super::text::format_bytes_with_unit as shown_bytes;
use super::super::trace_facts::DiagnosisContext;
use super::launches::require_gpu_operations;
use super::rule_outcome::{
    DataMissingForRule, FindingsOrMissingData, count_as_number_with_unit,
    evidence_of_single_operation, some_records_inspected, sorted_and_limited_evidence,
};
use crate::analyze::operations::{GpuOperationId, GpuOperationKind};
use crate::analyze::timeline::BusyTimeCategoryOfGpu;
use crate::analyze::timeline::idle_time::ProcessActivityOnGpu;
use crate::model::gpu::CopiedMemoryKind;

/// Largest synchronous copy to the device, bytes, that returns at once, because its data is sent
/// within the command.
const MAX_NONBLOCKING_SYNC_COPY_BYTES: u64 = 64 << 10;

/// Copies or memsets with the same fault, such as pageable memory, that make up one finding.
#[derive(Default)]
struct CopiesWithSameFault {
    evidence: Vec<FindingEvidence>,
    copy_count: usize,
    total_copy_ns: i64,
    total_bytes: u64,
    operation_ids: Vec<GpuOperationId>,
}

/// One copy or memset that belongs to a finding.
struct CopyOfFinding {
    operation_id: u32,
    bytes: u64,
    description: String,
}

/// Sums copies, and lists those with equal description and range as one piece of evidence.
fn sum_copies_with_same_fault(
    context: &DiagnosisContext<'_>,
    operations: impl Iterator<Item = CopyOfFinding>,
) -> CopiesWithSameFault {
    let mut groups: HashMap<(String, Option<String>), FindingEvidence> = HashMap::new();
    let mut all = CopiesWithSameFault::default();
    for CopyOfFinding { operation_id: id, bytes, description: what } in operations {
        let (start, end) = context.operations.operation_start_and_end_ns(id);
        all.copy_count += 1;
        all.total_copy_ns += end - start;
        all.total_bytes += bytes;
        all.operation_ids.push(id);
        let range = context.range_path_text_of_operation(id);
        let evidence = groups.entry((what.clone(), range)).or_insert_with(|| FindingEvidence {
            covered_count: 0,
            total_duration_ns: Some(0),
            ..evidence_of_single_operation(context, id, what)
        });
        evidence.covered_count += 1;
        evidence.total_duration_ns = evidence.total_duration_ns.map(|ns| ns + end - start);
        if evidence
            .longest_instance_start_and_end_ns
            .is_some_and(|(from, to)| end - start > to - from)
        {
            evidence.longest_instance_start_and_end_ns = Some((start, end));
        }
    }
    all.evidence = sorted_and_limited_evidence(groups.into_values().collect());
    all
}

/// A copy or memset, with the name of the host function that launched it.
struct OperationAndLaunchFunction<'a> {
    operation_id: u32,
    table_row: usize,
    launch_function: &'a str,
}

/// Returns the copies or memsets whose launch call was recorded, and the share of all copies or
/// memsets that these are.
fn copies_or_memsets_with_recorded_launch<'a>(
    context: &'a DiagnosisContext<'a>,
    (kind, unit): (GpuOperationKind, InspectedRecordKind),
) -> Result<(Vec<OperationAndLaunchFunction<'a>>, InspectedShareOfRecords), DataMissingForRule> {
    require_gpu_operations(context)?;
    let of_kind = |&id: &u32| {
        context.operations.kind_and_table_row(id).0 == kind
            && !context.is_operation_page_migration(id)
    };
    let ids: Vec<u32> = context.operations.all_operation_ids().filter(of_kind).collect();
    if ids.is_empty() {
        return Err(DataMissingForRule::program_has_no_such_work(format!(
            "the trace holds no {}",
            unit.printed_inspected_record_kind()
        )));
    }
    let called = ids.iter().filter_map(|&id| {
        let call = context.host_summary.function_that_launched_operation(context.trace, id)?;
        let (_, row) = context.operations.kind_and_table_row(id);
        Some(OperationAndLaunchFunction {
            operation_id: id,
            table_row: row,
            launch_function: context.function_name_without_version(call),
        })
    });
    let called: Vec<OperationAndLaunchFunction<'a>> = called.collect();
    let record = context.platform.advice_to_record_launch_calls();
    if called.is_empty() {
        let reason = format!(
            "the calls of the {} are not in the trace",
            unit.printed_inspected_record_kind()
        );
        return Err(DataMissingForRule::missing_data_with_advice(reason, record));
    }
    let inspected = InspectedShareOfRecords {
        reason_for_uninspected_records: (called.len() < ids.len())
            .then(|| format!("the calls of the others are not in the trace; {record}")),
        ..some_records_inspected(called.len(), ids.len(), unit)
    };
    Ok((called, inspected))
}

/// Returns a severity from the copies' share of the activities' time, which is an upper bound of
/// what a replay can save.
fn severity_of_copy_time(context: &DiagnosisContext<'_>, ns: i64) -> FindingSeverity {
    let span =
        context.activities.iter().map(ProcessActivityOnGpu::first_start_to_last_end_ns).sum();
    FindingSeverity::severity_from_possible_saving(ns, span)
}

/// Limits a saving in nanoseconds to the total time of one busy-time line (such as copies) over all
/// devices.
fn ns_limited_to_busy_time(
    devices: &[GpuUseOfProcess],
    line: BusyTimeCategoryOfGpu,
    ns: i64,
) -> i64 {
    ns.min(devices.iter().map(|of| of.account.whole_trace_account.busy_ns_of_category(line)).sum())
}

pub(super) fn pageable_copy_rule_threshold_text() -> String {
    "an asynchronous copy from or to pageable memory".to_owned()
}

pub(super) fn synchronous_copy_rule_threshold_text() -> String {
    format!(
        "a synchronous copy, but for copies of up to {} KiB to the device",
        MAX_NONBLOCKING_SYNC_COPY_BYTES >> 10
    )
}

pub(super) fn synchronous_memset_rule_threshold_text() -> String {
    "a synchronous memset".to_owned()
}

pub(super) fn find_asynchronous_copies_with_pageable_memory(
    context: &DiagnosisContext<'_>,
    devices: &[GpuUseOfProcess],
) -> FindingsOrMissingData {
    let copies = &context.trace.copies;
    let (called, mut inspected) = copies_or_memsets_with_recorded_launch(
        context,
        (GpuOperationKind::Copy, InspectedRecordKind::Copies),
    )?;
    let memory = |row: usize| [copies.source_memory[row], copies.target_memory[row]];
    let recorded = called
        .iter()
        .filter(|of| !memory(of.table_row).contains(&CopiedMemoryKind::Unknown))
        .count();
    if recorded == 0 {
        let record = context.platform.advice_to_record_launch_calls();
        return Err(DataMissingForRule::missing_data_with_advice(
            "the kinds of memory of the copies are not in the trace",
            record,
        ));
    }
    if recorded < called.len() {
        inspected.inspected_count_or_ns = i64::try_from(recorded).unwrap_or(i64::MAX);
        inspected.reason_for_uninspected_records =
            Some("the kinds of memory of the others are not recorded".to_owned());
    }
    let found = called
        .iter()
        .filter(|of| {
            of.launch_function.contains("Async")
                && memory(of.table_row).contains(&CopiedMemoryKind::Pageable)
        })
        .map(
            |&OperationAndLaunchFunction {
                 operation_id,
                 table_row: row,
                 launch_function: call,
             }| {
                let direction = context.trace.names.text_of_name(copies.direction_label[row]);
                let [from, to] = memory(row).map(CopiedMemoryKind::memory_kind_label);
                let what = format!("{call} {direction} ({from} to {to})");
                CopyOfFinding { operation_id, bytes: copies.copied_bytes[row], description: what }
            },
        );
    let group = sum_copies_with_same_fault(context, found);
    if group.copy_count == 0 {
        return Ok((Vec::new(), inspected));
    }
    let saved =
        ns_limited_to_busy_time(devices, BusyTimeCategoryOfGpu::ExposedCopies, group.total_copy_ns);
    #[allow(clippy::cast_precision_loss)]
    let speed = group.total_bytes as f64 / group.total_copy_ns.max(1) as f64;
    // The speed of copies is printed only from 0.05 GB/s on, because small copies show latency and
    // not bandwidth.
    let speed = if speed >= 0.05 { format!(" at {speed:.1} GB/s") } else { String::new() };
    let found = DiagnosisFinding {
        rule_id: "pageable-copy",
        severity: severity_of_copy_time(context, saved),
        confidence: FindingConfidence::HighConfidence,
        finding_title: format!(
            "asynchronous copies with pageable memory: {}, {}{speed}; the host waits for each",
            group.copy_count,
            shown_bytes(group.total_bytes)
        ),
        measured_value: count_as_number_with_unit(group.copy_count, "copies"),
        rule_threshold: count_as_number_with_unit(0, "copies"),
        max_recoverable_ns: Some(saved),
        remedy: FindingRemedy::NoTimeForOperations(group.operation_ids),
        replayed_gain: None,
        evidence: group.evidence,
        advice: format!(
            "allocate the host side page-locked, and copy asynchronously: {}",
            context.platform.pinned_memory_allocation_advice()
        ),
        false_positive_note: "copies at start-up, such as loading a model once",
    };
    Ok((vec![found], inspected))
}

pub(super) fn find_synchronous_copies(
    context: &DiagnosisContext<'_>,
    devices: &[GpuUseOfProcess],
) -> FindingsOrMissingData {
    let copies = &context.trace.copies;
    let (called, inspected) = copies_or_memsets_with_recorded_launch(
        context,
        (GpuOperationKind::Copy, InspectedRecordKind::Copies),
    )?;
    let found = called
        .iter()
        .filter(|of| {
            let small = context.trace.names.text_of_name(copies.direction_label[of.table_row])
                == "Host-to-Device"
                && copies.copied_bytes[of.table_row] <= MAX_NONBLOCKING_SYNC_COPY_BYTES;
            of.launch_function.to_ascii_lowercase().contains("memcpy")
                && !of.launch_function.contains("Async")
                && !small
        })
        .map(
            |&OperationAndLaunchFunction {
                 operation_id,
                 table_row: row,
                 launch_function: call,
             }| {
                let what = format!(
                    "{call} {}",
                    context.trace.names.text_of_name(copies.direction_label[row])
                );
                CopyOfFinding { operation_id, bytes: copies.copied_bytes[row], description: what }
            },
        );
    let group = sum_copies_with_same_fault(context, found);
    let saved =
        ns_limited_to_busy_time(devices, BusyTimeCategoryOfGpu::ExposedCopies, group.total_copy_ns);
    let kind = ("synchronous-copy", InspectedRecordKind::Copies);
    Ok((finding_of_synchronous_operations(context, devices, kind, (group, saved)), inspected))
}

pub(super) fn find_synchronous_memsets(
    context: &DiagnosisContext<'_>,
    devices: &[GpuUseOfProcess],
) -> FindingsOrMissingData {
    let (called, inspected) = copies_or_memsets_with_recorded_launch(
        context,
        (GpuOperationKind::Memset, InspectedRecordKind::Memsets),
    )?;
    let found = called
        .iter()
        .filter(|of| {
            of.launch_function.to_ascii_lowercase().contains("memset")
                && !of.launch_function.contains("Async")
        })
        .map(
            |&OperationAndLaunchFunction {
                 operation_id,
                 table_row: row,
                 launch_function: call,
             }| CopyOfFinding {
                operation_id,
                bytes: context.trace.memsets.set_bytes[row],
                description: call.to_owned(),
            },
        );
    let group = sum_copies_with_same_fault(context, found);
    let saved =
        ns_limited_to_busy_time(devices, BusyTimeCategoryOfGpu::OnlyMemsets, group.total_copy_ns);
    let kind = ("synchronous-set", InspectedRecordKind::Memsets);
    Ok((finding_of_synchronous_operations(context, devices, kind, (group, saved)), inspected))
}

/// Makes one finding of synchronous copies or memsets, whose exposed time is `exposed_ns`.
/// Asynchronous calls could hide the exposed time behind other GPU work, so at most the time of
/// that work is saved.
fn finding_of_synchronous_operations(
    context: &DiagnosisContext<'_>,
    devices: &[GpuUseOfProcess],
    (id, unit): (&'static str, InspectedRecordKind),
    (group, exposed_ns): (CopiesWithSameFault, i64),
) -> Vec<DiagnosisFinding> {
    if group.copy_count == 0 {
        return Vec::new();
    }
    let busy_ns: i64 = devices.iter().map(|of| of.gpu_busy_ns).sum();
    let saved = exposed_ns.min(busy_ns - exposed_ns);
    let unit = unit.printed_inspected_record_kind();
    #[allow(clippy::cast_precision_loss)]
    let milliseconds = group.total_copy_ns as f64 / 1e6;
    vec![DiagnosisFinding {
        rule_id: id,
        severity: severity_of_copy_time(context, saved),
        confidence: FindingConfidence::HighConfidence,
        finding_title: format!(
            "{unit} that hold up the host: {}, {milliseconds:.3} ms on the GPU",
            group.copy_count
        ),
        measured_value: count_as_number_with_unit(group.copy_count, unit),
        rule_threshold: count_as_number_with_unit(0, unit),
        max_recoverable_ns: Some(saved),
        remedy: FindingRemedy::NoTimeForOperations(group.operation_ids),
        replayed_gain: None,
        evidence: group.evidence,
        advice: "use the asynchronous form on a stream, with page-locked memory".to_owned(),
        false_positive_note: "calls at start-up, or whose result the host needs at once",
    }]
}
