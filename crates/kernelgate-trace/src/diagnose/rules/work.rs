//! Diagnosis rule about what bounds a range with declared work, from the times that the GPU's
//! measured ceilings allow for the work. The rule for declared work needs no hardware counters.

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedRecordKind, MeasuredNumberWithUnit,
};
use super::super::range_tree::{self, MIN_REACHED_SHARE_OF_BOUNDING_LIMIT, TimeBoundOfRange};
use super::super::trace_facts::DiagnosisContext;
use super::rule_outcome::{DataMissingForRule, FindingsOrMissingData, some_records_inspected};

pub(super) fn declared_work_bound_rule_text() -> String {
    format!(
        "each range with declared work: the limit of which it reaches {} %",
        MIN_REACHED_SHARE_OF_BOUNDING_LIMIT * 100.0
    )
}

pub(super) fn report_bound_of_declared_work(
    context: &DiagnosisContext<'_>,
) -> FindingsOrMissingData {
    if context.trace.declared_work.iter().all(|declared| declared.min_ns_by_resource.is_empty()) {
        let record = "kernelgate profile CASE records the declared work of a case";
        return Err(DataMissingForRule::missing_data_with_advice(
            "no range declares its work",
            record,
        ));
    }
    let declared = range_tree::build_tree_of_gpu_work_by_range(context, &[])
        .into_iter()
        .filter(|of| !of.reached_share_of_limits.is_empty());
    let found = declared.map(|of| {
        let highest = of.reached_share_of_limits.iter().map(|(_, reached)| *reached).fold(0.0, f64::max);
        let limits: Vec<String> = of
            .reached_share_of_limits
            .iter()
            .map(|(by, reached)| format!("{:.1} % of the {by} limit", reached * 100.0))
            .collect();
        DiagnosisFinding {
            rule_id: "work-bound",
            severity: FindingSeverity::Information,
            confidence: FindingConfidence::MediumConfidence,
            finding_title: format!(
                "{} is {}: {}",
                of.range_path,
                of.bound.printed_time_bound(),
                limits.join(", ")
            ),
            measured_value: MeasuredNumberWithUnit { number_in_unit: highest * 100.0, unit: "% of a limit" },
            rule_threshold: MeasuredNumberWithUnit {
                number_in_unit: MIN_REACHED_SHARE_OF_BOUNDING_LIMIT * 100.0,
                unit: "% of a limit",
            },
            max_recoverable_ns: None,
            remedy: FindingRemedy::GainNotReplayable,
            replayed_gain: None,
            evidence: vec![FindingEvidence {
                kernel_call_or_copy_name: format!("{} operations on the device", of.operations),
                covered_count: of.ranges_with_operations,
                total_duration_ns: Some(of.total_gpu_span_ns),
                innermost_common_range_path: Some(of.range_path),
                ..FindingEvidence::default()
            }],
            advice: advice_for_bound_of_declared_work(
                of.bound,
                context.platform.cuda_or_hip_graph_term(),
            ),
            false_positive_note: "an implementation that does more than the declared work: measure the \
                             kernels with ncu",
        }
    });
    let found: Vec<DiagnosisFinding> = found.collect();
    let (count, declared) = (found.len(), context.trace.declared_work.len());
    if count == 0 {
        return Err(DataMissingForRule::program_has_no_such_work(
            "no range with declared work launched anything",
        ));
    }
    Ok((
        found,
        some_records_inspected(count.min(declared), declared, InspectedRecordKind::NamedRanges),
    ))
}

fn advice_for_bound_of_declared_work(bound: TimeBoundOfRange, graph: &str) -> String {
    let words = match bound {
        TimeBoundOfRange::LaunchBound => {
            return format!("launch less often: {graph}, fused kernels, a persistent kernel");
        }
        TimeBoundOfRange::MemoryBound => {
            "move fewer bytes: fuse with the neighbours, smaller data types"
        }
        TimeBoundOfRange::ComputeBound => {
            "use a faster unit or a cheaper data type; else only less work helps"
        }
        TimeBoundOfRange::MemoryAndComputeBound => {
            "memory and a unit are used alike: fewer bytes and fewer operations"
        }
        TimeBoundOfRange::LatencyBound | TimeBoundOfRange::BusyWithoutKnownLimit => {
            "more work at once: larger grid, more warps, fewer dependencies between kernels"
        }
    };
    words.to_owned()
}
