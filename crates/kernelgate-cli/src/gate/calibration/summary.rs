//! Summarises a calibration in tables: false alarms, slow-downs found and missed, and noise, with
//! exact confidence intervals.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{CalibrationComparisonKind, CalibrationComparisonRecord, GateCalibration};
use crate::gate::VerdictOnCase;
use kernelgate::stats::{WalshAverages, binomial, mean, median, quantile_by_interpolation};

/// A proportion of hits among trials, with the exact (binomial) 95 % confidence interval of its
/// probability.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ProportionWithInterval {
    /// Number of events.
    #[serde(rename = "hits")]
    pub event_count: usize,
    /// Number of trials.
    #[serde(rename = "of")]
    pub trial_count: usize,
    /// Lower end of the 95 % confidence interval of the probability.
    #[serde(rename = "low")]
    pub probability_low: f64,
    /// Upper end of the 95 % confidence interval of the probability.
    #[serde(rename = "high")]
    pub probability_high: f64,
}

impl ProportionWithInterval {
    /// Computes a proportion of hits among trials with its 95 % confidence interval.
    pub fn from_counts(hits: usize, of: usize) -> Self {
        let (low, high) = binomial::probability_interval_95(hits, of);
        Self { event_count: hits, trial_count: of, probability_low: low, probability_high: high }
    }

    /// Returns the observed proportion of hits; 0 if there were no trials.
    pub fn observed_proportion(self) -> f64 {
        if self.trial_count == 0 { 0.0 } else { self.event_count as f64 / self.trial_count as f64 }
    }
}

/// Tables that summarise a calibration: verdict counts, slow-downs found, and noise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CalibrationSummaryTables {
    /// One row for each kind of comparison in the calibration, such as A/A, sham load, other layout
    /// or an injected slow-down.
    #[serde(rename = "kinds")]
    pub tallies_by_kind: Vec<TallyOfComparisonKind>,
    /// Slow-downs that were found, by kind of comparison and case; a row without a case sums all
    /// cases.
    #[serde(rename = "power")]
    pub slowdown_detections: Vec<InjectedSlowdownDetection>,
    /// Noise between processes of one executable, one row for each case.
    #[serde(rename = "noise")]
    pub noise_by_case: Vec<NoiseBetweenProcesses>,
}

/// Verdict counts, false alarms and times over all comparisons of one kind of a calibration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TallyOfComparisonKind {
    /// Name of the kind of comparison, such as "A/A" or "2 % slower".
    #[serde(rename = "kind")]
    pub comparison_kind_name: String,
    /// Comparisons that judged any case as slower; where only one case was slowed, comparisons that
    /// judged another case as slower.
    #[serde(rename = "fired")]
    pub comparisons_with_alarm: ProportionWithInterval,
    /// Upper end of the one-sided 95 % confidence interval of the false-alarm probability; `None`
    /// for kinds in which all cases were slowed.
    #[serde(rename = "fired_bound")]
    pub false_alarm_probability_bound: Option<f64>,
    /// Cases called inconclusive.
    #[serde(rename = "inconclusive")]
    pub inconclusive_cases: ProportionWithInterval,
    /// Cases called slower.
    #[serde(rename = "regressed")]
    pub regressed_cases: usize,
    /// Cases called faster.
    #[serde(rename = "improved")]
    pub improved_cases: usize,
    /// Cases called unchanged.
    #[serde(rename = "unchanged")]
    pub unchanged_cases: usize,
    /// Number of inconclusive cases by reason.
    #[serde(rename = "reasons")]
    pub inconclusive_cases_by_reason: BTreeMap<String, usize>,
    /// Number of comparisons in which a process failed, or a case failed into which no delay was to
    /// be injected.
    #[serde(rename = "broken")]
    pub comparisons_with_failure: usize,
    /// Mean number of blocks of a comparison, both rounds together.
    #[serde(rename = "blocks")]
    pub mean_trial_blocks: f64,
    /// Mean wall time of a comparison of this kind, seconds.
    #[serde(rename = "wall_s")]
    pub mean_comparison_wall_s: f64,
    /// Wall time of the longest comparison of this kind, seconds.
    #[serde(rename = "longest_s")]
    pub longest_comparison_wall_s: f64,
}

/// Number of injected slow-downs that comparisons of one kind found and missed, for one case or all
/// cases.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct InjectedSlowdownDetection {
    /// Name of the kind of calibration comparison, with the size of the injected slow-down: "2 %
    /// slower".
    #[serde(rename = "kind")]
    pub comparison_kind_name: String,
    /// Size of the slow-down that the calibration was requested to inject, per cent.
    #[serde(rename = "percent")]
    pub requested_slowdown_percent: f64,
    /// Id of the case; `None` in the row that counts all cases together.
    #[serde(rename = "case")]
    pub case_id: Option<String>,
    /// Cases called slower.
    #[serde(rename = "found")]
    pub slowdowns_found: ProportionWithInterval,
    /// Number of slowed cases that were judged as unchanged or faster.
    #[serde(rename = "missed")]
    pub slowdowns_missed: usize,
    /// Mean of the injected delay, per cent of the base's time in the same comparison.
    #[serde(rename = "added")]
    pub mean_injected_delay_percent: f64,
    /// Mean slow-down that the comparisons estimated for the delayed cases, per cent.
    #[serde(rename = "measured")]
    pub mean_measured_slowdown_percent: f64,
    /// Number of comparisons in which the delay could not be injected, with the first reason;
    /// `None` if every comparison had the delay.
    #[serde(rename = "not_injected")]
    pub failed_injections_with_reason: Option<(usize, String)>,
}

/// Time differences of one case between processes of one executable, from the pairs of the A/A
/// comparisons.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NoiseBetweenProcesses {
    /// Id of the case, in the form `workload/problem/implementation/cache`.
    #[serde(rename = "case")]
    pub case_id: String,
    /// Median of the case's time per launch over all processes, nanoseconds.
    #[serde(rename = "time_ns")]
    pub median_launch_ns: f64,
    /// Number of pairs.
    #[serde(rename = "pairs")]
    pub pair_count: usize,
    /// Estimated standard deviation between processes, per cent: half the width of the middle 68 %
    /// of the pairs' differences, divided by √2.
    #[serde(rename = "process")]
    pub process_standard_deviation_percent: f64,
    /// Half of the width of the middle 95 % of the pairs' differences, per cent.
    #[serde(rename = "widest")]
    pub pair_difference_95_half_width_percent: f64,
    /// Median share of the CPU time that other processes used; `None` if it was not measured.
    #[serde(rename = "contention")]
    pub median_contention_share: Option<f64>,
}

/// Summarises a calibration: counts the verdicts of its comparisons, and computes power and noise.
pub fn summarise_calibration(calibration: &GateCalibration) -> CalibrationSummaryTables {
    let all = calibration.contained_comparison_kinds();
    let kinds =
        all.iter().filter_map(|kind| tally_comparisons_of_kind(calibration, *kind)).collect();
    let power = all.iter().flat_map(|kind| detection_rows_of_kind(calibration, *kind)).collect();
    let noise = calibration
        .launch_ns_by_case
        .keys()
        .filter_map(|case| noise_of_case_between_processes(calibration, case))
        .collect();
    CalibrationSummaryTables {
        tallies_by_kind: kinds,
        slowdown_detections: power,
        noise_by_case: noise,
    }
}

fn tally_comparisons_of_kind(
    calibration: &GateCalibration,
    kind: CalibrationComparisonKind,
) -> Option<TallyOfComparisonKind> {
    let comparisons: Vec<&CalibrationComparisonRecord> =
        calibration.comparisons_of_kind(kind).collect();
    let count = comparisons.len();
    let mean = |value: &dyn Fn(&CalibrationComparisonRecord) -> f64| {
        comparisons.iter().map(|comparisons| value(comparisons)).sum::<f64>() / count as f64
    };
    let cases: Vec<VerdictOnCase> = comparisons
        .iter()
        .flat_map(|comparisons| comparisons.verdicts_by_case().map(|(_, verdict)| verdict))
        .collect();
    let with = |wanted: VerdictOnCase| cases.iter().filter(|verdict| **verdict == wanted).count();
    let everything = matches!(
        kind,
        CalibrationComparisonKind::SlowdownByWaitPercent(_)
            | CalibrationComparisonKind::SlowdownByWorkPercent(_)
    );
    let has_fired = |comparisons: &&&CalibrationComparisonRecord| {
        if everything { comparisons.has_regressed_case() } else { comparisons.has_false_alarm() }
    };
    let fired = comparisons.iter().filter(has_fired).count();
    let mut reasons = BTreeMap::new();
    for reason in
        comparisons.iter().flat_map(|comparisons| comparisons.inconclusive_reasons_by_case.values())
    {
        *reasons.entry(reason.clone()).or_default() += 1;
    }
    let broken = |comparisons: &&&CalibrationComparisonRecord| {
        !comparisons.failed_bench_processes.is_empty()
            || comparisons
                .failed_cases_with_reason
                .keys()
                .any(|case| !comparisons.injected_delays_ns.contains_key(case))
    };
    (count > 0).then(|| TallyOfComparisonKind {
        comparison_kind_name: kind.kind_name(),
        comparisons_with_alarm: ProportionWithInterval::from_counts(fired, count),
        false_alarm_probability_bound: (!everything)
            .then(|| binomial::upper_bound_of_probability(fired, count, 0.05)),
        inconclusive_cases: ProportionWithInterval::from_counts(
            with(VerdictOnCase::Inconclusive),
            cases.len(),
        ),
        regressed_cases: with(VerdictOnCase::Regressed),
        improved_cases: with(VerdictOnCase::Improved),
        unchanged_cases: with(VerdictOnCase::Unchanged),
        inconclusive_cases_by_reason: reasons,
        comparisons_with_failure: comparisons.iter().filter(broken).count(),
        mean_trial_blocks: mean(&|comparisons| comparisons.process_count as f64 / 4.0),
        mean_comparison_wall_s: mean(&|comparisons| comparisons.comparison_wall_s),
        longest_comparison_wall_s: comparisons
            .iter()
            .map(|comparisons| comparisons.comparison_wall_s)
            .fold(0.0, f64::max),
    })
}

fn detection_rows_of_kind(
    calibration: &GateCalibration,
    kind: CalibrationComparisonKind,
) -> Vec<InjectedSlowdownDetection> {
    let Some(percent) = kind.injected_slowdown_percent() else { return Vec::new() };
    let comparisons: Vec<&CalibrationComparisonRecord> =
        calibration.comparisons_of_kind(kind).collect();
    let cases: BTreeSet<&String> =
        comparisons.iter().flat_map(|comparisons| comparisons.injected_delays_ns.keys()).collect();
    let mut rows: Vec<InjectedSlowdownDetection> = cases
        .iter()
        .map(|case| detection_of_slowdown_in_cases(&comparisons, (kind, percent), &[case]))
        .collect();
    if rows.len() > 1 {
        let all: Vec<&String> = cases.into_iter().collect();
        rows.insert(
            0,
            InjectedSlowdownDetection {
                case_id: None,
                ..detection_of_slowdown_in_cases(&comparisons, (kind, percent), &all)
            },
        );
    }
    rows
}

fn detection_of_slowdown_in_cases(
    comparisons: &[&CalibrationComparisonRecord],
    (kind, percent): (CalibrationComparisonKind, f64),
    cases: &[&String],
) -> InjectedSlowdownDetection {
    let (mut verdicts, mut added, mut measured) = (Vec::new(), Vec::new(), Vec::new());
    let mut not_injected: Option<(usize, String)> = None;
    for comparison in comparisons {
        for case in cases.iter().copied() {
            if let Some(reason) = comparison.failed_cases_with_reason.get(case) {
                not_injected.get_or_insert_with(|| (0, reason.clone())).0 += 1;
            }
            let Some(delay_ns) = comparison.injected_delays_ns.get(case) else { continue };
            let Some(verdict) = comparison.verdicts.get(case) else { continue };
            verdicts.push(*verdict);
            if let Some(series) = comparison
                .first_round_times
                .get(case)
                .filter(|series| !series.base.process_times_ns.is_empty())
            {
                added.push(100.0 * *delay_ns / median(&series.base.process_times_ns));
                measured.push(
                    100.0
                        * WalshAverages::averages_of_all_pairs(&log_time_ratios_of_pairs(series))
                            .hodges_lehmann_center()
                            .unwrap_or(0.0)
                            .exp_m1(),
                );
            }
        }
    }
    let with = |wanted: &[VerdictOnCase]| {
        verdicts.iter().filter(|verdict| wanted.contains(verdict)).count()
    };
    InjectedSlowdownDetection {
        comparison_kind_name: kind.kind_name(),
        requested_slowdown_percent: percent,
        case_id: cases.first().map(|case| (*case).clone()),
        slowdowns_found: ProportionWithInterval::from_counts(
            with(&[VerdictOnCase::Regressed]),
            verdicts.len(),
        ),
        slowdowns_missed: with(&[VerdictOnCase::Unchanged, VerdictOnCase::Improved]),
        mean_injected_delay_percent: mean(&added),
        mean_measured_slowdown_percent: mean(&measured),
        failed_injections_with_reason: not_injected,
    }
}

fn noise_of_case_between_processes(
    calibration: &GateCalibration,
    case: &str,
) -> Option<NoiseBetweenProcesses> {
    let series: Vec<_> = calibration
        .comparisons_of_kind(CalibrationComparisonKind::IdenticalBuilds)
        .filter_map(|known| known.first_round_times.get(case))
        .collect();
    let differences: Vec<f64> =
        series.iter().flat_map(|series| log_time_ratios_of_pairs(series)).collect();
    if differences.is_empty() {
        return None;
    }
    let columns = || series.iter().flat_map(|series| [&series.base, &series.head]);
    let times: Vec<f64> =
        columns().flat_map(|column| column.process_times_ns.iter().copied()).collect();
    let shares: Vec<f64> = columns()
        .flat_map(|column| column.cpu_contention_shares.iter().flatten().copied())
        .collect();
    let span = |tail: f64| {
        100.0
            * 0.5
            * (quantile_by_interpolation(&differences, 1.0 - tail)
                - quantile_by_interpolation(&differences, tail))
    };
    Some(NoiseBetweenProcesses {
        case_id: case.to_owned(),
        median_launch_ns: median(&times),
        pair_count: differences.len(),
        process_standard_deviation_percent: span(0.158_655) / std::f64::consts::SQRT_2,
        pair_difference_95_half_width_percent: span(0.025),
        median_contention_share: (!shares.is_empty()).then(|| median(&shares)),
    })
}

/// Returns ln(head time / base time) of each pair of neighbouring base and head processes.
fn log_time_ratios_of_pairs(series: &super::CaseBlocksAsColumns) -> Vec<f64> {
    series
        .base
        .process_times_ns
        .iter()
        .zip(&series.head.process_times_ns)
        .map(|(base, head)| (head / base).ln())
        .collect()
}
