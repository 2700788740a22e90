//! Finds what bounds a range with declared work, by the times that the device's measured ceilings
//! allow. The rule for declared work needs no hardware counter.

use super::super::finding::{
    DiagnosisFinding, FindingConfidence, FindingEvidence, FindingRemedy, FindingSeverity,
    InspectedUnit, NumberWithUnit,
};
use super::super::range_tree::{self, MIN_BOUNDING_LIMIT_SHARE, TimeBound};
use super::super::trace_facts::DiagnosisContext;
use super::rule_outcome::{MissingData, RuleResult, inspected_some};

pub(super) fn work_bound_rule_text() -> String {
    format!(
        "each range with declared work: the limit of which it reaches {} %",
        MIN_BOUNDING_LIMIT_SHARE * 100.0
    )
}

pub(super) fn work_bound_rule(context: &DiagnosisContext<'_>) -> RuleResult {
    if context.trace.work.iter().all(|declared| declared.limits.is_empty()) {
        let record = "kernelgate profile CASE records the declared work of a case";
        return Err(MissingData::new("no range declares its work", record));
    }
    let declared = range_tree::build_range_tree(context, &[])
        .into_iter()
        .filter(|of| !of.of_limits.is_empty());
    let found = declared.map(|of| {
        let highest = of.of_limits.iter().map(|(_, reached)| *reached).fold(0.0, f64::max);
        let limits: Vec<String> = of
            .of_limits
            .iter()
            .map(|(by, reached)| format!("{:.1} % of the {by} limit", reached * 100.0))
            .collect();
        DiagnosisFinding {
            id: "work-bound",
            severity: FindingSeverity::Information,
            confidence: FindingConfidence::Medium,
            title: format!("{} is {}: {}", of.path, of.bound.label(), limits.join(", ")),
            measured: NumberWithUnit { value: highest * 100.0, unit: "% of a limit" },
            threshold: NumberWithUnit {
                value: MIN_BOUNDING_LIMIT_SHARE * 100.0,
                unit: "% of a limit",
            },
            recoverable_ns: None,
            remedy: FindingRemedy::NotReplayed,
            replayed: None,
            evidence: vec![FindingEvidence {
                what: format!("{} operations on the device", of.operations),
                count: of.times,
                total_ns: Some(of.span_ns),
                range: Some(of.path),
                ..FindingEvidence::default()
            }],
            advice: advice_for_bound(of.bound, context.platform.graph_term()),
            false_positive: "an implementation that does more than the declared work: measure the \
                             kernels with ncu",
        }
    });
    let found: Vec<DiagnosisFinding> = found.collect();
    let (count, declared) = (found.len(), context.trace.work.len());
    if count == 0 {
        return Err(MissingData::no_work("no range with declared work launched anything"));
    }
    Ok((found, inspected_some(count.min(declared), declared, InspectedUnit::Ranges)))
}

fn advice_for_bound(bound: TimeBound, graph: &str) -> String {
    let words = match bound {
        TimeBound::Launch => {
            return format!("launch less often: {graph}, fused kernels, a persistent kernel");
        }
        TimeBound::Memory => "move fewer bytes: fuse with the neighbours, smaller data types",
        TimeBound::Compute => "use a faster unit or a cheaper data type; else only less work helps",
        TimeBound::Mixed => "memory and a unit are used alike: fewer bytes and fewer operations",
        TimeBound::Latency | TimeBound::Busy => {
            "more work at once: larger grid, more warps, fewer dependencies between kernels"
        }
    };
    words.to_owned()
}
