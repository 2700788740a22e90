//! Results of rules.

use super::super::finding::{
    DATA_QUALITY_RULE_ID, DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy,
    FindingSeverity, InspectedRecordKind, InspectedShareOfRecords, MeasuredNumberWithUnit,
};
use super::super::trace_facts::DiagnosisContext;
use crate::analyze::operations::GpuOperationId;

/// Result of a diagnosis rule: its findings and the share of records that it inspected, or the data
/// that it lacks.
pub(super) type FindingsOrMissingData =
    Result<(Vec<DiagnosisFinding>, InspectedShareOfRecords), DataMissingForRule>;

/// Data that a diagnosis rule needs and the trace lacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DataMissingForRule {
    pub missing_data_reason: String,
    /// Advice on how to record the missing data.
    pub recording_advice: String,
}

impl DataMissingForRule {
    pub fn missing_data_with_advice(reason: impl Into<String>, record: impl Into<String>) -> Self {
        Self { missing_data_reason: reason.into(), recording_advice: record.into() }
    }

    /// Returns the missing data as an error unless `recorded` is true.
    pub fn error_unless_recorded(
        recorded: bool,
        reason: impl Into<String>,
        record: &str,
    ) -> Result<(), Self> {
        if recorded { Ok(()) } else { Err(Self::missing_data_with_advice(reason, record)) }
    }

    /// Returns a reason that no better recording can change, because the program has no work of
    /// this kind.
    pub fn program_has_no_such_work(reason: impl Into<String>) -> DataMissingForRule {
        Self::missing_data_with_advice(reason, "")
    }
}

/// Returns the inspected share of a rule that inspected all `count` records.
pub(super) fn all_records_inspected(
    count: usize,
    unit: InspectedRecordKind,
) -> InspectedShareOfRecords {
    some_records_inspected(count, count, unit)
}

/// Returns the inspected share of a rule that inspected `seen` of `whole` records.
pub(super) fn some_records_inspected(
    seen: usize,
    whole: usize,
    unit: InspectedRecordKind,
) -> InspectedShareOfRecords {
    let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
    InspectedShareOfRecords {
        inspected_count_or_ns: number(seen),
        whole_count_or_ns: number(whole),
        inspected_record_kind: unit,
        reason_for_uninspected_records: None,
    }
}

/// Makes evidence of a single GPU operation.
pub(super) fn evidence_of_single_operation(
    context: &DiagnosisContext<'_>,
    id: GpuOperationId,
    what: String,
) -> FindingEvidence {
    FindingEvidence {
        kernel_call_or_copy_name: what,
        covered_count: 1,
        total_duration_ns: Some(context.operations.operation_length_ns(id)),
        innermost_common_range_path: context.range_path_text_of_operation(id),
        longest_instance_start_and_end_ns: Some(context.operations.operation_start_and_end_ns(id)),
        process_id_and_device: Some(context.process_id_and_gpu_of_operation(id)),
    }
}

/// Makes a finding of the data-quality rule, which casts doubt on the trace.
pub(super) fn data_quality_finding(
    severity: FindingSeverity,
    title: String,
    measured: MeasuredNumberWithUnit,
    advice: impl Into<String>,
    false_positive: &'static str,
) -> DiagnosisFinding {
    DiagnosisFinding {
        rule_id: DATA_QUALITY_RULE_ID,
        severity,
        confidence: FindingConfidence::HighConfidence,
        finding_title: title,
        measured_value: measured,
        rule_threshold: MeasuredNumberWithUnit { number_in_unit: 0.0, unit: measured.unit },
        max_recoverable_ns: None,
        remedy: FindingRemedy::GainNotReplayable,
        replayed_gain: None,
        evidence: Vec::new(),
        advice: advice.into(),
        false_positive_note: false_positive,
    }
}

/// Returns `part` in percent of `whole`; 0 if `whole` is not positive.
#[allow(clippy::cast_precision_loss)]
pub(super) fn percent_or_zero(part: i64, whole: i64) -> f64 {
    if whole <= 0 { 0.0 } else { part as f64 / whole as f64 * 100.0 }
}

/// Writes a count with its noun in singular or plural: `1 gap`, `2 gaps`.
pub(super) fn count_with_singular_or_plural(count: usize, noun: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{plural}")
}

#[allow(clippy::cast_precision_loss)]
pub(super) fn count_as_number_with_unit(
    count: usize,
    unit: &'static str,
) -> MeasuredNumberWithUnit {
    MeasuredNumberWithUnit { number_in_unit: count as f64, unit }
}

#[allow(clippy::cast_precision_loss)]
pub(super) fn ns_as_milliseconds(ns: i64) -> MeasuredNumberWithUnit {
    MeasuredNumberWithUnit { number_in_unit: ns as f64 / 1e6, unit: "ms" }
}

/// Largest number of evidence lines of a finding; operations with most time come first.
pub(super) const MAX_EVIDENCE_LINES_OF_FINDING: usize = 5;

pub(super) fn sorted_and_limited_evidence(
    mut evidence: Vec<FindingEvidence>,
) -> Vec<FindingEvidence> {
    evidence.sort_by(|a, b| {
        b.total_duration_ns
            .cmp(&a.total_duration_ns)
            .then_with(|| a.kernel_call_or_copy_name.cmp(&b.kernel_call_or_copy_name))
            .then_with(|| {
                a.longest_instance_start_and_end_ns.cmp(&b.longest_instance_start_and_end_ns)
            })
    });
    evidence.truncate(MAX_EVIDENCE_LINES_OF_FINDING);
    evidence
}
