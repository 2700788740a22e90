//! Times as the small JSON formats that continuous-benchmarking services take; what they make of
//! them is theirs.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::gate::comparison::Comparison;
use kernelgate::record::ProcessRun;
use kernelgate::stats::{Spread, median};

/// A case's time with a range, nanoseconds a launch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Metric {
    /// The time.
    pub value: f64,
    /// Lower end; none where it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lower_value: Option<f64>,
    /// Upper end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upper_value: Option<f64>,
}

/// Times by case.
pub type Metrics = BTreeMap<String, Metric>;

/// Of runs: the median over the process runs with their range, with one run the quartiles of its
/// samples.
pub fn of_runs(runs: &[ProcessRun]) -> Metrics {
    let mut spreads: BTreeMap<&String, Vec<Spread>> = BTreeMap::new();
    for (id, case) in runs.iter().flat_map(|run| &run.cases) {
        spreads.entry(id).or_default().push(Spread::of(&case.samples.per_launch_ns()));
    }
    let metric = |spreads: &[Spread]| {
        let medians: Vec<f64> = spreads.iter().map(|spread| spread.median).collect();
        let (low, high) = match spreads {
            [only] => (only.q1, only.q3),
            _ => (
                medians.iter().copied().fold(f64::INFINITY, f64::min),
                medians.iter().copied().fold(0.0, f64::max),
            ),
        };
        Metric { value: median(&medians), lower_value: Some(low), upper_value: Some(high) }
    };
    spreads.into_iter().map(|(id, spreads)| (id.clone(), metric(&spreads))).collect()
}

/// Of a comparison: the head's times, with the interval of the change around them.
pub fn of_comparison(comparison: &Comparison) -> Metrics {
    let timed = comparison.judged.iter().filter(|judged| judged.is_timed());
    let metric = |value: f64, low: f64, high: f64| {
        let end = |end: f64| Some(end).filter(|end| end.is_finite() && *end > 0.0);
        Metric { value, lower_value: end(value * low), upper_value: end(value * high) }
    };
    timed
        .map(|judged| {
            let (ratio, time_ns) = (judged.ratio, judged.head_ns);
            let metric = metric(time_ns, ratio.low / ratio.center, ratio.high / ratio.center);
            (judged.case.clone(), metric)
        })
        .collect()
}

/// Bencher Metric Format: `{"CASE": {"latency": {"value": …}}}`, for `bencher run --adapter json`.
/// Its `latency` is in nanoseconds.
pub fn bencher(metrics: &Metrics) -> impl Serialize {
    metrics
        .iter()
        .map(|(id, metric)| (id.clone(), BTreeMap::from([("latency", *metric)])))
        .collect::<BTreeMap<_, _>>()
}

/// The list that github-action-benchmark takes as its tool `customSmallerIsBetter`.
pub fn smaller_is_better(metrics: &Metrics) -> impl Serialize {
    #[derive(Serialize)]
    struct Entry {
        name: String,
        unit: &'static str,
        value: f64,
        #[serde(skip_serializing_if = "Option::is_none")]
        range: Option<String>,
    }
    let range = |metric: &Metric| {
        Some(format!("± {:.1}", (metric.upper_value? - metric.lower_value?) / 2.0))
    };
    let entry = |(name, metric): (&String, &Metric)| Entry {
        name: name.clone(),
        unit: "ns",
        value: metric.value,
        range: range(metric),
    };
    metrics.iter().map(entry).collect::<Vec<_>>()
}
