//! The bound of a range whose work is declared, by the times that the device's measured ceilings
//! allow for it. No hardware counter is needed.

use super::super::context::Context;
use super::super::finding::{
    Confidence, DeviceUse, Evidence, Finding, Measure, Remedy, Severity, Unit,
};
use super::super::tree::{self, Bound, REACHED};
use super::outcome::{Lack, Outcome, some_of};

pub(super) fn finds() -> String {
    format!("each range with declared work: the limit of which it reaches {} %", REACHED * 100.0)
}

pub(super) fn work_bound(context: &Context<'_>, _: &[DeviceUse]) -> Outcome {
    if context.trace.work.iter().all(|declared| declared.limits.is_empty()) {
        let record = "kernelgate profile CASE records the declared work of a case";
        return Lack::new("no range declares its work", record).into();
    }
    let declared = tree::range_tree(context, &[]).into_iter().filter(|of| !of.of_limits.is_empty());
    let found = declared.map(|of| {
        let highest = of.of_limits.iter().map(|(_, reached)| *reached).fold(0.0, f64::max);
        let limits: Vec<String> = of
            .of_limits
            .iter()
            .map(|(by, reached)| format!("{:.1} % of the {by} limit", reached * 100.0))
            .collect();
        Finding {
            id: "work-bound",
            severity: Severity::Information,
            confidence: Confidence::Medium,
            title: format!("{} is {}: {}", of.path, of.bound.label(), limits.join(", ")),
            measured: Measure { value: highest * 100.0, unit: "% of a limit" },
            threshold: Measure { value: REACHED * 100.0, unit: "% of a limit" },
            recoverable_ns: None,
            remedy: Remedy::NotReplayed,
            replayed: None,
            evidence: vec![Evidence {
                what: format!("{} operations on the device", of.operations),
                count: of.times,
                total_ns: Some(of.span_ns),
                range: Some(of.path),
                ..Evidence::default()
            }],
            advice: advice(of.bound, context.platform.graph()),
            false_positive: "an implementation that does more than the declared work: measure the \
                             kernels with ncu",
        }
    });
    let found: Vec<Finding> = found.collect();
    let (count, declared) = (found.len(), context.trace.work.len());
    if count == 0 {
        return Lack::absent("no range with declared work launched anything").into();
    }
    Outcome::Checked(found, some_of(count.min(declared), declared, Unit::Ranges))
}

fn advice(bound: Bound, graph: &str) -> String {
    let words = match bound {
        Bound::Launch => {
            return format!("launch less often: {graph}, fused kernels, a persistent kernel");
        }
        Bound::Memory => "move fewer bytes: fuse with the neighbours, smaller data types",
        Bound::Compute => "use a faster unit or a cheaper data type; else only less work helps",
        Bound::Mixed => "memory and a unit are used alike: fewer bytes and fewer operations",
        Bound::Latency | Bound::Busy => {
            "more work at once: larger grid, more warps, fewer dependencies between kernels"
        }
    };
    words.to_owned()
}
