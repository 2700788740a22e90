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
    pub hits: usize,
    /// Number of trials.
    pub of: usize,
    /// Lower end of the 95 % confidence interval of the probability.
    pub low: f64,
    /// Upper end of the 95 % confidence interval of the probability.
    pub high: f64,
}

impl ProportionWithInterval {
    /// Computes the confidence interval of a proportion.
    pub fn from_counts(hits: usize, of: usize) -> Self {
        let (low, high) = binomial::probability_interval_95(hits, of);
        Self { hits, of, low, high }
    }

    /// Returns the observed proportion of hits; 0 if there were no trials.
    pub fn observed_proportion(self) -> f64 {
        if self.of == 0 { 0.0 } else { self.hits as f64 / self.of as f64 }
    }
}

/// Tables of a calibration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CalibrationSummaryTables {
    /// One row for each kind of comparison in the calibration: A/A, sham load, other layout, and
    /// injected slow-downs.
    pub kinds: Vec<TallyOfComparisonKind>,
    /// Slow-downs that were found, by kind of comparison and case; a row without a case sums all
    /// cases.
    pub power: Vec<InjectedSlowdownDetection>,
    /// Noise between processes of one executable, one row for each case.
    pub noise: Vec<NoiseBetweenProcesses>,
}

/// Verdict counts, false alarms and times over all comparisons of one kind of a calibration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TallyOfComparisonKind {
    /// Name of the kind of comparison, such as "A/A" or "2 % slower".
    pub kind: String,
    /// Comparisons that judged any case as slower; where only one case was slowed, comparisons that
    /// judged another case as slower.
    pub fired: ProportionWithInterval,
    /// Upper end of the one-sided 95 % confidence interval of the false-alarm probability; `None`
    /// for kinds in which all cases were slowed.
    pub fired_bound: Option<f64>,
    /// Cases called inconclusive.
    pub inconclusive: ProportionWithInterval,
    /// Cases called slower.
    pub regressed: usize,
    /// Cases called faster.
    pub improved: usize,
    /// Cases called unchanged.
    pub unchanged: usize,
    /// Inconclusive cases by reason.
    pub reasons: BTreeMap<String, usize>,
    /// Number of comparisons in which a process failed, or a case failed into which no delay was to
    /// be injected.
    pub broken: usize,
    /// Mean number of blocks of a comparison, both rounds together.
    pub blocks: f64,
    /// Mean wall time of a comparison of this kind, seconds.
    pub wall_s: f64,
    /// Wall time of the longest comparison of this kind, seconds.
    pub longest_s: f64,
}

/// Number of injected slow-downs that comparisons of one kind found and missed, for one case or all
/// cases.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct InjectedSlowdownDetection {
    /// Name of the kind of comparison, with the injected size: "2 % slower".
    pub kind: String,
    /// Requested slow-down, per cent.
    pub percent: f64,
    /// Id of the case; `None` in the row that counts all cases together.
    pub case: Option<String>,
    /// Cases called slower.
    pub found: ProportionWithInterval,
    /// Number of slowed cases that were judged as unchanged or faster.
    pub missed: usize,
    /// Mean of the injected delay, per cent of the base's time in the same comparison.
    pub added: f64,
    /// Mean slow-down that the comparisons estimated for the delayed cases, per cent.
    pub measured: f64,
    /// Number of comparisons in which the delay could not be injected, with the first reason;
    /// `None` if every comparison had the delay.
    pub not_injected: Option<(usize, String)>,
}

/// Time differences of one case between processes of one executable, from the pairs of the A/A
/// comparisons.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NoiseBetweenProcesses {
    /// Id of the case: `workload/problem/implementation/cache`.
    pub case: String,
    /// Median of the case's time per launch over all processes, nanoseconds.
    pub time_ns: f64,
    /// Number of pairs.
    pub pairs: usize,
    /// Estimated standard deviation between processes, per cent: half the width of the middle 68 %
    /// of the pairs' differences, divided by √2.
    pub process: f64,
    /// Half of the width of the middle 95 % of the pairs' differences, per cent.
    pub widest: f64,
    /// Median share of the CPU time that other processes used; `None` if it was not measured.
    pub contention: Option<f64>,
}

/// Summarises a calibration: counts the verdicts of its comparisons, and computes power and noise.
pub fn summarise_calibration(calibration: &GateCalibration) -> CalibrationSummaryTables {
    let all = calibration.contained_comparison_kinds();
    let kinds =
        all.iter().filter_map(|kind| tally_comparisons_of_kind(calibration, *kind)).collect();
    let power = all.iter().flat_map(|kind| detection_rows_of_kind(calibration, *kind)).collect();
    let noise = calibration
        .cases
        .keys()
        .filter_map(|case| noise_of_case_between_processes(calibration, case))
        .collect();
    CalibrationSummaryTables { kinds, power, noise }
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
    let everything =
        matches!(kind, CalibrationComparisonKind::Injected(_) | CalibrationComparisonKind::Work(_));
    let has_fired = |comparisons: &&&CalibrationComparisonRecord| {
        if everything { comparisons.has_regressed_case() } else { comparisons.has_false_alarm() }
    };
    let fired = comparisons.iter().filter(has_fired).count();
    let mut reasons = BTreeMap::new();
    for reason in comparisons.iter().flat_map(|comparisons| comparisons.reasons.values()) {
        *reasons.entry(reason.clone()).or_default() += 1;
    }
    let broken = |comparisons: &&&CalibrationComparisonRecord| {
        !comparisons.broken.is_empty()
            || comparisons.failed.keys().any(|case| !comparisons.delays_ns.contains_key(case))
    };
    (count > 0).then(|| TallyOfComparisonKind {
        kind: kind.kind_name(),
        fired: ProportionWithInterval::from_counts(fired, count),
        fired_bound: (!everything)
            .then(|| binomial::upper_bound_of_probability(fired, count, 0.05)),
        inconclusive: ProportionWithInterval::from_counts(
            with(VerdictOnCase::Inconclusive),
            cases.len(),
        ),
        regressed: with(VerdictOnCase::Regressed),
        improved: with(VerdictOnCase::Improved),
        unchanged: with(VerdictOnCase::Unchanged),
        reasons,
        broken: comparisons.iter().filter(broken).count(),
        blocks: mean(&|comparisons| comparisons.processes as f64 / 4.0),
        wall_s: mean(&|comparisons| comparisons.wall_s),
        longest_s: comparisons.iter().map(|comparisons| comparisons.wall_s).fold(0.0, f64::max),
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
        comparisons.iter().flat_map(|comparisons| comparisons.delays_ns.keys()).collect();
    let mut rows: Vec<InjectedSlowdownDetection> = cases
        .iter()
        .map(|case| detection_of_slowdown_in_cases(&comparisons, (kind, percent), &[case]))
        .collect();
    if rows.len() > 1 {
        let all: Vec<&String> = cases.into_iter().collect();
        rows.insert(
            0,
            InjectedSlowdownDetection {
                case: None,
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
            if let Some(reason) = comparison.failed.get(case) {
                not_injected.get_or_insert_with(|| (0, reason.clone())).0 += 1;
            }
            let Some(delay_ns) = comparison.delays_ns.get(case) else { continue };
            let Some(verdict) = comparison.verdicts.get(case) else { continue };
            verdicts.push(*verdict);
            if let Some(series) =
                comparison.first.get(case).filter(|series| !series.base.time_ns.is_empty())
            {
                added.push(100.0 * *delay_ns / median(&series.base.time_ns));
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
        kind: kind.kind_name(),
        percent,
        case: cases.first().map(|case| (*case).clone()),
        found: ProportionWithInterval::from_counts(
            with(&[VerdictOnCase::Regressed]),
            verdicts.len(),
        ),
        missed: with(&[VerdictOnCase::Unchanged, VerdictOnCase::Improved]),
        added: mean(&added),
        measured: mean(&measured),
        not_injected,
    }
}

fn noise_of_case_between_processes(
    calibration: &GateCalibration,
    case: &str,
) -> Option<NoiseBetweenProcesses> {
    let series: Vec<_> = calibration
        .comparisons_of_kind(CalibrationComparisonKind::Null)
        .filter_map(|known| known.first.get(case))
        .collect();
    let differences: Vec<f64> =
        series.iter().flat_map(|series| log_time_ratios_of_pairs(series)).collect();
    if differences.is_empty() {
        return None;
    }
    let columns = || series.iter().flat_map(|series| [&series.base, &series.head]);
    let times: Vec<f64> = columns().flat_map(|column| column.time_ns.iter().copied()).collect();
    let shares: Vec<f64> =
        columns().flat_map(|column| column.contention.iter().flatten().copied()).collect();
    let span = |tail: f64| {
        100.0
            * 0.5
            * (quantile_by_interpolation(&differences, 1.0 - tail)
                - quantile_by_interpolation(&differences, tail))
    };
    Some(NoiseBetweenProcesses {
        case: case.to_owned(),
        time_ns: median(&times),
        pairs: differences.len(),
        process: span(0.158_655) / std::f64::consts::SQRT_2,
        widest: span(0.025),
        contention: (!shares.is_empty()).then(|| median(&shares)),
    })
}

/// Returns ln(head time / base time) of each pair of neighbouring base and head processes.
fn log_time_ratios_of_pairs(series: &super::CaseBlocksAsColumns) -> Vec<f64> {
    series
        .base
        .time_ns
        .iter()
        .zip(&series.head.time_ns)
        .map(|(base, head)| (head / base).ln())
        .collect()
}
