//! Times in the small JSON formats of continuous-benchmarking services.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::gate::comparison::Comparison;
use kernelgate::record::{CaseRecord, ProcessRun};
use kernelgate::stats::{QuartileSpread, median};

/// A metric: a number with a range.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CaseMetric {
    /// The number.
    pub value: f64,
    /// Lower end of the metric's range; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lower_value: Option<f64>,
    /// Upper end of the metric's range; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upper_value: Option<f64>,
}

/// Measures of a case.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CaseMetricValues {
    /// Time of one launch, nanoseconds.
    pub latency: CaseMetric,
    /// Energy of a launch, joules; absent without `--energy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub energy: Option<CaseMetric>,
}

/// Measured values by case.
pub type MetricsByCase = BTreeMap<String, CaseMetricValues>;

/// Metrics of runs: the median over the process runs with their range; for a single run the
/// quartiles of its samples, and the accuracy of its energy. A case without samples gets no metric.
pub fn from_runs(runs: &[ProcessRun]) -> MetricsByCase {
    let mut cases: BTreeMap<&String, Vec<&CaseRecord>> = BTreeMap::new();
    for (id, case) in runs.iter().flat_map(|run| &run.cases) {
        if !case.samples.launches.is_empty() {
            cases.entry(id).or_default().push(case);
        }
    }
    let metrics = |runs: &[&CaseRecord]| {
        let spreads: Vec<QuartileSpread> = runs
            .iter()
            .map(|case| QuartileSpread::from_values(&case.samples.per_launch_ns()))
            .collect();
        let times: Vec<[f64; 3]> = spreads.iter().map(|it| [it.q1, it.median, it.q3]).collect();
        let energy = runs.iter().filter_map(|case| case.samples.energy.as_ref()?.measured_energy());
        let energies: Vec<[f64; 3]> = energy
            .map(|it| [1.0 - it.relative, 1.0, 1.0 + it.relative].map(|share| share * it.launch_j))
            .collect();
        Some(CaseMetricValues {
            latency: metric_over_runs(&times)?,
            energy: metric_over_runs(&energies),
        })
    };
    let case = |(id, runs): (&String, Vec<&CaseRecord>)| Some((id.clone(), metrics(&runs)?));
    cases.into_iter().filter_map(case).collect()
}

/// Median of the middles of several runs with their range, or the only run with its own range;
/// `None` without a run.
fn metric_over_runs(runs: &[[f64; 3]]) -> Option<CaseMetric> {
    let middles: Vec<f64> = runs.iter().map(|[_, middle, _]| *middle).collect();
    let (low, high) = match runs {
        [] => return None,
        [[low, _, high]] => (*low, *high),
        _ => (
            middles.iter().copied().fold(f64::INFINITY, f64::min),
            middles.iter().copied().fold(0.0, f64::max),
        ),
    };
    Some(CaseMetric { value: median(&middles), lower_value: Some(low), upper_value: Some(high) })
}

/// Metrics of a comparison: times of the head, with the interval of the change as range.
pub fn metrics_of_comparison(comparison: &Comparison) -> MetricsByCase {
    let timed = comparison.judged.iter().filter(|judged| judged.is_timed());
    let metric = |value: f64, low: f64, high: f64| {
        let end = |end: f64| Some(end).filter(|end| end.is_finite() && *end > 0.0);
        CaseMetric { value, lower_value: end(value * low), upper_value: end(value * high) }
    };
    timed
        .map(|judged| {
            let (ratio, time_ns) = (judged.ratio, judged.head_ns);
            let latency = metric(time_ns, ratio.low / ratio.center, ratio.high / ratio.center);
            (judged.case.clone(), CaseMetricValues { latency, energy: None })
        })
        .collect()
}

/// Bencher Metric Format: Formats metrics as `{"CASE": {"latency": {"value": …}}}`, for `bencher
/// run --adapter json`. Bencher defines `latency` in nanoseconds; this program adds `energy` in
/// joules.
pub fn bencher_metric_format(metrics: &MetricsByCase) -> impl Serialize {
    metrics
}

/// The list that github-action-benchmark takes as its tool `customSmallerIsBetter`.
pub fn smaller_is_better_format(metrics: &MetricsByCase) -> impl Serialize {
    #[derive(Serialize)]
    struct MetricEntry {
        name: String,
        unit: &'static str,
        value: f64,
        #[serde(skip_serializing_if = "Option::is_none")]
        range: Option<String>,
    }
    let entry = |name: String, unit, metric: &CaseMetric| {
        let half = metric.upper_value.zip(metric.lower_value).map(|(high, low)| (high - low) / 2.0);
        let range = half.map(|half| match unit {
            "ns" => format!("± {half:.1}"),
            _ => format!("± {half:.3e}"),
        });
        MetricEntry { name, unit, value: metric.value, range }
    };
    let entries = |(id, metrics): (&String, &CaseMetricValues)| {
        let energy = metrics.energy.as_ref();
        let energy = energy.map(|metric| entry(format!("{id} (energy)"), "J", metric));
        [entry(id.clone(), "ns", &metrics.latency)].into_iter().chain(energy)
    };
    metrics.iter().flat_map(entries).collect::<Vec<_>>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::measure::energy::{EnergyMeasurement, LaunchEnergy};
    use kernelgate::record::{Environment, Provenance};

    #[test]
    fn energy_is_a_separate_metric() {
        let mut run = ProcessRun::start_now("b", "s", Environment::cpu(), Provenance::default());
        let mut case = CaseRecord::untimed_samples(vec![2e6, 2e6]);
        run.cases.insert("w/f/n1/cpu/hot".to_owned(), case.clone());
        let energy =
            EnergyMeasurement { launch_j: 0.5, relative: 0.1, power_w: 250.0, window_s: 1.0 };
        case.samples.energy = Some(LaunchEnergy::Measured(energy));
        run.cases.insert("w/f/n1/cuda/fast/hot".to_owned(), case);
        let metrics = from_runs(&[run]);
        let cpu = serde_json::json!({
            "latency": {"value": 2e6, "lower_value": 2e6, "upper_value": 2e6},
        });
        let mut gpu = cpu.clone();
        gpu["energy"] = serde_json::json!({"value": 0.5, "lower_value": 0.45, "upper_value": 0.55});
        let bmf = serde_json::to_value(bencher_metric_format(&metrics)).unwrap();
        assert_eq!(bmf, serde_json::json!({"w/f/n1/cpu/hot": cpu, "w/f/n1/cuda/fast/hot": gpu}));
        let list = serde_json::to_value(smaller_is_better_format(&metrics)).unwrap();
        let units: Vec<_> = list.as_array().unwrap().iter().map(|it| it["unit"].clone()).collect();
        assert_eq!(units, ["ns", "ns", "J"]);
        assert_eq!(list[2]["name"], "w/f/n1/cuda/fast/hot (energy)");
    }
}
