//! Writes measured times and energies in the JSON formats of Bencher and github-action-benchmark,
//! two services for continuous benchmarking.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::gate::comparison::Comparison;
use kernelgate::record::{BenchProcessRun, CaseRecordWithSamples};
use kernelgate::stats::{MedianAndQuartiles, median};

/// A metric of a case: a measured value (time or energy) with an optional range.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct MetricWithRange {
    /// Value of the metric.
    #[serde(rename = "value")]
    pub metric_value: f64,
    /// Lower end of the metric's range; `None` if the range has no finite lower end.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "lower_value")]
    pub range_lower_end: Option<f64>,
    /// Upper end of the metric's range; `None` if the range has no finite upper end.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "upper_value")]
    pub range_upper_end: Option<f64>,
}

/// Measured time and energy of one launch of a case.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LatencyAndEnergy {
    /// Time of one launch in nanoseconds.
    #[serde(rename = "latency")]
    pub launch_latency_ns: MetricWithRange,
    /// Energy of one launch in joules; `None` unless it was measured with `--energy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "energy")]
    pub launch_energy_j: Option<MetricWithRange>,
}

/// Measured values by case.
pub type MetricsByCase = BTreeMap<String, LatencyAndEnergy>;

/// Time and energy of each case: the median over several process runs with their range, or, for a
/// single run, the quartiles of its samples and the accuracy of its energy. A case without samples
/// is not among the metrics.
pub fn metrics_of_process_runs(runs: &[BenchProcessRun]) -> MetricsByCase {
    let mut cases: BTreeMap<&String, Vec<&CaseRecordWithSamples>> = BTreeMap::new();
    for (id, case) in runs.iter().flat_map(|run| &run.cases) {
        if !case.samples.launches_per_sample.is_empty() {
            cases.entry(id).or_default().push(case);
        }
    }
    let metrics = |runs: &[&CaseRecordWithSamples]| {
        let spreads: Vec<MedianAndQuartiles> = runs
            .iter()
            .map(|case| {
                MedianAndQuartiles::median_and_quartiles_from_values(
                    &case.samples.launch_times_by_sample_ns(),
                )
            })
            .collect();
        let times: Vec<[f64; 3]> = spreads.iter().map(|it| [it.q1, it.median, it.q3]).collect();
        let energy =
            runs.iter().filter_map(|case| case.samples.energy.as_ref()?.measured_launch_energy());
        let energies: Vec<[f64; 3]> = energy
            .map(|it| {
                [1.0 - it.relative_resolution, 1.0, 1.0 + it.relative_resolution]
                    .map(|share| share * it.energy_per_launch_j)
            })
            .collect();
        Some(LatencyAndEnergy {
            launch_latency_ns: median_and_range_over_runs(&times)?,
            launch_energy_j: median_and_range_over_runs(&energies),
        })
    };
    let case =
        |(id, runs): (&String, Vec<&CaseRecordWithSamples>)| Some((id.clone(), metrics(&runs)?));
    cases.into_iter().filter_map(case).collect()
}

/// The median of the middle values of several process runs with their range, or a single run with
/// its own low and high; `None` without a run.
fn median_and_range_over_runs(runs: &[[f64; 3]]) -> Option<MetricWithRange> {
    let middles: Vec<f64> = runs.iter().map(|[_, middle, _]| *middle).collect();
    let (low, high) = match runs {
        [] => return None,
        [[low, _, high]] => (*low, *high),
        _ => (
            middles.iter().copied().fold(f64::INFINITY, f64::min),
            middles.iter().copied().fold(0.0, f64::max),
        ),
    };
    Some(MetricWithRange {
        metric_value: median(&middles),
        range_lower_end: Some(low),
        range_upper_end: Some(high),
    })
}

/// Time of each case in the head build of a comparison; its range is the interval of the change
/// from base to head.
pub fn head_metrics_of_comparison(comparison: &Comparison) -> MetricsByCase {
    let timed = comparison.judged_cases.iter().filter(|judged| judged.has_times());
    let metric = |value: f64, low: f64, high: f64| {
        let end = |end: f64| Some(end).filter(|end| end.is_finite() && *end > 0.0);
        MetricWithRange {
            metric_value: value,
            range_lower_end: end(value * low),
            range_upper_end: end(value * high),
        }
    };
    timed
        .map(|judged| {
            let (ratio, time_ns) = (judged.ratio, judged.head_launch_ns);
            let latency = metric(
                time_ns,
                ratio.ratio_low / ratio.estimated_ratio,
                ratio.ratio_high / ratio.estimated_ratio,
            );
            (
                judged.case_id.clone(),
                LatencyAndEnergy { launch_latency_ns: latency, launch_energy_j: None },
            )
        })
        .collect()
}

/// Bencher Metric Format: Formats metrics as `{"CASE": {"latency": {"value": …}}}`, for `bencher
/// run --adapter json`. Bencher itself defines `latency` in nanoseconds; kernelgate adds the metric
/// `energy` in joules.
pub fn bencher_metric_format(metrics: &MetricsByCase) -> impl Serialize {
    metrics
}

/// Formats metrics as the JSON list that github-action-benchmark reads with its tool setting
/// `customSmallerIsBetter`.
pub fn github_action_benchmark_format(metrics: &MetricsByCase) -> impl Serialize {
    #[derive(Serialize)]
    struct NamedMetricEntry {
        name: String,
        unit: &'static str,
        value: f64,
        #[serde(skip_serializing_if = "Option::is_none")]
        range: Option<String>,
    }
    let entry = |name: String, unit, metric: &MetricWithRange| {
        let half = metric
            .range_upper_end
            .zip(metric.range_lower_end)
            .map(|(high, low)| (high - low) / 2.0);
        let range = half.map(|half| match unit {
            "ns" => format!("± {half:.1}"),
            _ => format!("± {half:.3e}"),
        });
        NamedMetricEntry { name, unit, value: metric.metric_value, range }
    };
    let entries = |(id, metrics): (&String, &LatencyAndEnergy)| {
        let energy = metrics.launch_energy_j.as_ref();
        let energy = energy.map(|metric| entry(format!("{id} (energy)"), "J", metric));
        [entry(id.clone(), "ns", &metrics.launch_latency_ns)].into_iter().chain(energy)
    };
    metrics.iter().flat_map(entries).collect::<Vec<_>>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::measure::energy::{LaunchEnergyMeasurement, LaunchEnergyOrReason};
    use kernelgate::record::{CommitAndChanges, RunEnvironment};

    #[test]
    fn energy_is_a_metric_besides_latency() {
        let mut run = BenchProcessRun::empty_run_starting_now(
            "b",
            "s",
            RunEnvironment::environment_of_process_on_cpu(),
            CommitAndChanges::default(),
        );
        let mut case = CaseRecordWithSamples::example_with_sample_times(vec![2e6, 2e6]);
        run.cases.insert("w/f/n1/cpu/hot".to_owned(), case.clone());
        let energy = LaunchEnergyMeasurement {
            energy_per_launch_j: 0.5,
            relative_resolution: 0.1,
            mean_card_power_w: 250.0,
            measurement_s: 1.0,
        };
        case.samples.energy = Some(LaunchEnergyOrReason::Measured(energy));
        run.cases.insert("w/f/n1/cuda/fast/hot".to_owned(), case);
        let metrics = metrics_of_process_runs(&[run]);
        let cpu = serde_json::json!({
            "latency": {"value": 2e6, "lower_value": 2e6, "upper_value": 2e6},
        });
        let mut gpu = cpu.clone();
        gpu["energy"] = serde_json::json!({"value": 0.5, "lower_value": 0.45, "upper_value": 0.55});
        let bmf = serde_json::to_value(bencher_metric_format(&metrics)).unwrap();
        assert_eq!(bmf, serde_json::json!({"w/f/n1/cpu/hot": cpu, "w/f/n1/cuda/fast/hot": gpu}));
        let list = serde_json::to_value(github_action_benchmark_format(&metrics)).unwrap();
        let units: Vec<_> = list.as_array().unwrap().iter().map(|it| it["unit"].clone()).collect();
        assert_eq!(units, ["ns", "ns", "J"]);
        assert_eq!(list[2]["name"], "w/f/n1/cuda/fast/hot (energy)");
    }
}
