//! Diagnosis rules about copies and communication during which no kernel computes.

use std::collections::BTreeMap;

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    GpuUseOfProcess, InspectedRecordKind, MeasuredNumberWithUnit,
};
use super::super::labels::shortened_kernel_name_for_readers;
use super::super::text::{format_bytes_with_unit, format_nanoseconds};
use super::super::trace_facts::DiagnosisContext;
use super::launches::require_gpu_operations;
use super::rule_outcome::{
    DataMissingForRule, FindingsOrMissingData, all_records_inspected, percent_or_zero,
    sorted_and_limited_evidence,
};
use crate::analyze::classes::OperationClass;
use crate::analyze::operations::GpuOperationId;
use crate::analyze::timeline::BusyTimeCategoryOfGpu;
use crate::analyze::timeline::span_union::UnionOfTimeSpans;
use crate::stats::shorten_in_the_middle;

/// Smallest share of the span, in percent, for which exposed copies or exposed communication are a
/// finding.
const MIN_EXPOSED_TRANSFER_PERCENT: f64 = 5.0;
/// Largest number of characters of an operation's name in the evidence.
const MAX_EXPOSED_OPERATION_NAME_CHARACTERS: usize = 60;

/// Returns the operations of one class of a process on a GPU.
fn operations_of_class_on_gpu(
    context: &DiagnosisContext<'_>,
    used: &GpuUseOfProcess,
    class: OperationClass,
) -> Vec<GpuOperationId> {
    let own = |id: &GpuOperationId| {
        context.classes.class_of_gpu_operation(*id) == class
            && context.process_id_and_gpu_of_operation(*id) == (used.pid, used.gpu_ordinal)
    };
    context.operations.all_operation_ids().filter(own).collect()
}

/// Nanoseconds in which compute kernels or whole CUDA graphs run on the GPU.
fn gpu_compute_ns(used: &GpuUseOfProcess) -> i64 {
    let lines = [
        BusyTimeCategoryOfGpu::ComputeKernelsAlone,
        BusyTimeCategoryOfGpu::ComputeAndCommunication,
        BusyTimeCategoryOfGpu::ComputeAndMigration,
        BusyTimeCategoryOfGpu::ComputeAndCopy,
        BusyTimeCategoryOfGpu::WholeCudaGraph,
    ];
    lines.iter().map(|&line| used.account.whole_trace_account.busy_ns_of_category(line)).sum()
}

fn number_of_operations_in_class(context: &DiagnosisContext<'_>, class: OperationClass) -> usize {
    context
        .operations
        .all_operation_ids()
        .filter(|&id| context.classes.class_of_gpu_operation(id) == class)
        .count()
}

fn union_of_operation_spans(
    context: &DiagnosisContext<'_>,
    ids: &[GpuOperationId],
) -> UnionOfTimeSpans {
    UnionOfTimeSpans::union_of_spans(
        ids.iter().map(|&id| context.operations.operation_start_and_end_ns(id)).collect(),
    )
}

/// Returns evidence lines for operations, one for each name, most time first.
fn evidence_by_operation_name(
    context: &DiagnosisContext<'_>,
    ids: &[GpuOperationId],
    place: (i64, u32),
) -> Vec<FindingEvidence> {
    let all = &context.operations;
    let mut by_name: BTreeMap<String, (FindingEvidence, u64)> = BTreeMap::new();
    for &id in ids {
        let (start, end) = all.operation_start_and_end_ns(id);
        let name = shorten_in_the_middle(
            &shortened_kernel_name_for_readers(&all.printed_operation_name(id)),
            MAX_EXPOSED_OPERATION_NAME_CHARACTERS,
        );
        let (line, moved) = by_name.entry(name.clone()).or_insert_with(|| {
            let first = FindingEvidence {
                kernel_call_or_copy_name: name,
                total_duration_ns: Some(0),
                longest_instance_start_and_end_ns: Some((start, end)),
                process_id_and_device: Some(place),
                ..FindingEvidence::default()
            };
            (first, 0)
        });
        line.covered_count += 1;
        line.total_duration_ns = line.total_duration_ns.map(|ns| ns + end - start);
        if line.longest_instance_start_and_end_ns.is_some_and(|(from, to)| end - start > to - from)
        {
            line.longest_instance_start_and_end_ns = Some((start, end));
        }
        if let (crate::analyze::operations::GpuOperationKind::Copy, row) =
            all.kind_and_table_row(id)
        {
            *moved += context.trace.copies.copied_bytes[row];
        }
    }
    let lines = by_name.into_values().map(|(mut line, moved)| {
        if moved > 0 {
            line.kernel_call_or_copy_name =
                format!("{}, {}", line.kernel_call_or_copy_name, format_bytes_with_unit(moved));
        }
        line
    });
    sorted_and_limited_evidence(lines.collect())
}

pub(super) fn exposed_copies_threshold_text() -> String {
    format!(
        "copies with no kernel beside them take {MIN_EXPOSED_TRANSFER_PERCENT} % of the span or more"
    )
}

pub(super) fn exposed_communication_threshold_text() -> String {
    format!(
        "communication with no compute beside it takes {MIN_EXPOSED_TRANSFER_PERCENT} % of the span or more"
    )
}

/// Finds GPUs whose copies run without any kernel for at least 5 % of the span.
pub(super) fn find_exposed_copies(
    context: &DiagnosisContext<'_>,
    used: &[GpuUseOfProcess],
) -> FindingsOrMissingData {
    require_gpu_operations(context)?;
    let count = number_of_operations_in_class(context, OperationClass::Copy);
    if count == 0 {
        return Err(DataMissingForRule::program_has_no_such_work("the trace holds no copies"));
    }
    let found = used.iter().filter_map(|used| {
        let span = used.first_start_and_last_end_ns.1 - used.first_start_and_last_end_ns.0;
        let exposed = used
            .account
            .whole_trace_account
            .busy_ns_of_category(BusyTimeCategoryOfGpu::ExposedCopies);
        let share = percent_or_zero(exposed, span);
        if share < MIN_EXPOSED_TRANSFER_PERCENT {
            return None;
        }
        let copies = operations_of_class_on_gpu(context, used, OperationClass::Copy);
        let copied = union_of_operation_spans(context, &copies);
        Some(DiagnosisFinding {
            rule_id: "exposed-copy",
            severity: FindingSeverity::severity_from_possible_saving(exposed, span),
            confidence: FindingConfidence::HighConfidence,
            finding_title: format!(
                "device {} copies for {:.1} % of the time, {share:.1} % with no kernel beside it; \
                 kernels run for {:.1} %",
                used.gpu_ordinal,
                percent_or_zero(copied.total_covered_ns(), span),
                percent_or_zero(gpu_compute_ns(used), span),
            ),
            measured_value: MeasuredNumberWithUnit { number_in_unit: share, unit: "% of the span" },
            rule_threshold: MeasuredNumberWithUnit {
                number_in_unit: MIN_EXPOSED_TRANSFER_PERCENT,
                unit: "% of the span",
            },
            max_recoverable_ns: Some(exposed),
            remedy: FindingRemedy::NoTimeForOperationClass(OperationClass::Copy),
            replayed_gain: None,
            evidence: evidence_by_operation_name(context, &copies, (used.pid, used.gpu_ordinal)),
            advice: format!(
                "keep data on the device between launches, or copy beside kernels: another stream, \
                 page-locked memory ({}), the next batch while this one is computed",
                context.platform.pinned_memory_allocation_advice()
            ),
            false_positive_note: "a trace that is mostly loading: restrict it with --range",
        })
    });
    Ok((found.collect(), all_records_inspected(count, InspectedRecordKind::Copies)))
}

/// Finds GPUs whose communication runs without compute for at least 5 % of the span.
pub(super) fn find_exposed_communication(
    context: &DiagnosisContext<'_>,
    used: &[GpuUseOfProcess],
) -> FindingsOrMissingData {
    require_gpu_operations(context)?;
    let count = number_of_operations_in_class(context, OperationClass::Communication);
    if count == 0 {
        return Err(DataMissingForRule::program_has_no_such_work(
            "the trace holds no communication kernels",
        ));
    }
    let found = used.iter().filter_map(|used| {
        let span = used.first_start_and_last_end_ns.1 - used.first_start_and_last_end_ns.0;
        let exposed = used.account.whole_trace_account.busy_ns_of_category(BusyTimeCategoryOfGpu::ExposedCommunication);
        let share = percent_or_zero(exposed, span);
        if share < MIN_EXPOSED_TRANSFER_PERCENT {
            return None;
        }
        let communication = operations_of_class_on_gpu(context, used, OperationClass::Communication);
        let communicated = union_of_operation_spans(context, &communication);
        let shares_streams = used
            .account
            .transfers
            .iter()
            .any(|of| of.transfer_class == OperationClass::Communication && of.transfer_count_on_compute_streams > 0);
        // If compute overlaps with communication on one stream, the trace does not contain the real
        // streams, so the sentence about streams is omitted.
        let stream = match shares_streams && exposed == communicated.total_covered_ns() {
            true => "; it is on a stream that computes, so that nothing can overlap there",
            false => "",
        };
        Some(DiagnosisFinding {
            rule_id: "exposed-communication",
            severity: FindingSeverity::severity_from_possible_saving(exposed, span),
            confidence: FindingConfidence::HighConfidence,
            finding_title: format!(
                "device {} communicates for {}, {} of it with no compute beside it: {share:.1} % of \
                 the time{stream}",
                used.gpu_ordinal,
                format_nanoseconds(communicated.total_covered_ns()),
                format_nanoseconds(exposed),
            ),
            measured_value: MeasuredNumberWithUnit { number_in_unit: share, unit: "% of the span" },
            rule_threshold: MeasuredNumberWithUnit { number_in_unit: MIN_EXPOSED_TRANSFER_PERCENT, unit: "% of the span" },
            max_recoverable_ns: Some(exposed),
            remedy: FindingRemedy::NoTimeForOperationClass(OperationClass::Communication),
            replayed_gain: None,
            evidence: evidence_by_operation_name(context, &communication, (used.pid, used.gpu_ordinal)),
            advice: "communicate beside compute on a stream of its own: overlap with the backward \
                     pass, larger buckets, fewer collectives; a rank that waits for others shows \
                     as communication, too"
                .to_owned(),
            false_positive_note: "a rank that waits for a slower one: compare the traces of all ranks",
        })
    });
    Ok((found.collect(), all_records_inspected(count, InspectedRecordKind::GpuOperations)))
}
