//! Counts with their exact intervals, from comparisons with a known answer.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{Calibration, CalibrationComparison, ComparisonKind};
use crate::gate::Verdict;
use kernelgate::stats::{WalshAverages, binomial, mean, median, quantile};

/// A proportion of hits, with the exact confidence interval of its probability.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ProportionWithInterval {
    /// Number of events.
    pub hits: usize,
    /// Number of trials.
    pub of: usize,
    /// Lower end of the 95 % confidence interval.
    pub low: f64,
    /// Upper end of the 95 % confidence interval.
    pub high: f64,
}

impl ProportionWithInterval {
    /// Computes a proportion with its confidence interval.
    pub fn new(hits: usize, of: usize) -> Self {
        let (low, high) = binomial::proportion_interval(hits, of);
        Self { hits, of, low, high }
    }

    /// Observed share of hits; 0 if there were no trials.
    pub fn share(self) -> f64 {
        if self.of == 0 { 0.0 } else { self.hits as f64 / self.of as f64 }
    }
}

/// Tables of a calibration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CalibrationSummary {
    /// One row for each kind of the calibration's comparisons: A/A, sham load, other layout, and
    /// injected slow-downs.
    pub kinds: Vec<ComparisonTally>,
    /// Slow-downs that were found, by kind and case; an entry without a case sums all cases.
    pub power: Vec<MeasuredPower>,
    /// Time differences between processes of one executable, by case.
    pub noise: Vec<ProcessNoise>,
}

/// Counts over all comparisons of one kind.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ComparisonTally {
    /// Name of the kind of comparison: "A/A".
    pub kind: String,
    /// Comparisons that called a case slower; if one case alone was made slower, comparisons that
    /// called another case slower.
    pub fired: ProportionWithInterval,
    /// Upper end of the one-sided 95 % interval for the probability of a false alarm, for kinds in
    /// which nothing is slower.
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
    /// Comparisons in which a process failed, or a case that was not to be delayed.
    pub broken: usize,
    /// Mean number of blocks of a comparison, in both rounds together.
    pub blocks: f64,
    /// Mean wall time of a comparison, seconds.
    pub wall_s: f64,
    /// Wall time of the longest comparison, seconds.
    pub longest_s: f64,
}

/// Numbers of injected slow-downs that comparisons found and missed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MeasuredPower {
    /// Name of the kind of comparison: "2 % slower".
    pub kind: String,
    /// Requested slow-down, per cent.
    pub percent: f64,
    /// Id of the case; `None` for the counts of all cases together.
    pub case: Option<String>,
    /// Cases called slower.
    pub found: ProportionWithInterval,
    /// Number of slowed cases that were called unchanged or faster.
    pub missed: usize,
    /// Mean of the added time, per cent of the base's time in the comparison itself.
    pub added: f64,
    /// Mean slow-down that the comparisons with an injected delay estimated, per cent.
    pub measured: f64,
    /// Comparisons in which the delay could not be made, with the reason.
    pub not_injected: Option<(usize, String)>,
}

/// Differences between processes of one executable, from the pairs of the A/A comparisons.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProcessNoise {
    /// The case.
    pub case: String,
    /// Median time of a launch over the processes, nanoseconds.
    pub time_ns: f64,
    /// Number of pairs.
    pub pairs: usize,
    /// Per cent by which a process differs from the next: half the width of the middle 68 % of the
    /// pairs, over √2; for a normal distribution this is the standard deviation.
    pub process: f64,
    /// Half of the width of the middle 95 % of the pairs, per cent.
    pub widest: f64,
    /// Median share of the CPU time that co-running processes took, where known.
    pub contention: Option<f64>,
}

/// Counts the verdicts of all comparisons of a calibration.
pub fn summarise_calibration(calibration: &Calibration) -> CalibrationSummary {
    let all = calibration.kinds();
    let kinds = all.iter().filter_map(|kind| tally_comparisons(calibration, *kind)).collect();
    let power = all.iter().flat_map(|kind| injection_power(calibration, *kind)).collect();
    let noise =
        calibration.cases.keys().filter_map(|case| process_noise(calibration, case)).collect();
    CalibrationSummary { kinds, power, noise }
}

fn tally_comparisons(calibration: &Calibration, kind: ComparisonKind) -> Option<ComparisonTally> {
    let comparisons: Vec<&CalibrationComparison> = calibration.comparisons_of(kind).collect();
    let count = comparisons.len();
    let mean = |value: &dyn Fn(&CalibrationComparison) -> f64| {
        comparisons.iter().map(|comparisons| value(comparisons)).sum::<f64>() / count as f64
    };
    let cases: Vec<Verdict> = comparisons
        .iter()
        .flat_map(|comparisons| comparisons.judged().map(|(_, verdict)| verdict))
        .collect();
    let with = |wanted: Verdict| cases.iter().filter(|verdict| **verdict == wanted).count();
    let everything = matches!(kind, ComparisonKind::Injected(_) | ComparisonKind::Work(_));
    let has_fired = |comparisons: &&&CalibrationComparison| {
        if everything { comparisons.has_regressed_case() } else { comparisons.is_false_alarm() }
    };
    let fired = comparisons.iter().filter(has_fired).count();
    let mut reasons = BTreeMap::new();
    for reason in comparisons.iter().flat_map(|comparisons| comparisons.reasons.values()) {
        *reasons.entry(reason.clone()).or_default() += 1;
    }
    let broken = |comparisons: &&&CalibrationComparison| {
        !comparisons.broken.is_empty()
            || comparisons.failed.keys().any(|case| !comparisons.delays_ns.contains_key(case))
    };
    (count > 0).then(|| ComparisonTally {
        kind: kind.name(),
        fired: ProportionWithInterval::new(fired, count),
        fired_bound: (!everything).then(|| binomial::upper_confidence_bound(fired, count, 0.05)),
        inconclusive: ProportionWithInterval::new(with(Verdict::Inconclusive), cases.len()),
        regressed: with(Verdict::Regressed),
        improved: with(Verdict::Improved),
        unchanged: with(Verdict::Unchanged),
        reasons,
        broken: comparisons.iter().filter(broken).count(),
        blocks: mean(&|comparisons| comparisons.processes as f64 / 4.0),
        wall_s: mean(&|comparisons| comparisons.wall_s),
        longest_s: comparisons.iter().map(|comparisons| comparisons.wall_s).fold(0.0, f64::max),
    })
}

fn injection_power(calibration: &Calibration, kind: ComparisonKind) -> Vec<MeasuredPower> {
    let Some(percent) = kind.injected_percent() else { return Vec::new() };
    let comparisons: Vec<&CalibrationComparison> = calibration.comparisons_of(kind).collect();
    let cases: BTreeSet<&String> =
        comparisons.iter().flat_map(|comparisons| comparisons.delays_ns.keys()).collect();
    let mut rows: Vec<MeasuredPower> = cases
        .iter()
        .map(|case| power_for_slowdown(&comparisons, (kind, percent), &[case]))
        .collect();
    if rows.len() > 1 {
        let all: Vec<&String> = cases.into_iter().collect();
        rows.insert(
            0,
            MeasuredPower { case: None, ..power_for_slowdown(&comparisons, (kind, percent), &all) },
        );
    }
    rows
}

fn power_for_slowdown(
    comparisons: &[&CalibrationComparison],
    (kind, percent): (ComparisonKind, f64),
    cases: &[&String],
) -> MeasuredPower {
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
                        * WalshAverages::new(&pair_ratios(series))
                            .hodges_lehmann_center()
                            .unwrap_or(0.0)
                            .exp_m1(),
                );
            }
        }
    }
    let with =
        |wanted: &[Verdict]| verdicts.iter().filter(|verdict| wanted.contains(verdict)).count();
    MeasuredPower {
        kind: kind.name(),
        percent,
        case: cases.first().map(|case| (*case).clone()),
        found: ProportionWithInterval::new(with(&[Verdict::Regressed]), verdicts.len()),
        missed: with(&[Verdict::Unchanged, Verdict::Improved]),
        added: mean(&added),
        measured: mean(&measured),
        not_injected,
    }
}

fn process_noise(calibration: &Calibration, case: &str) -> Option<ProcessNoise> {
    let series: Vec<_> = calibration
        .comparisons_of(ComparisonKind::Null)
        .filter_map(|known| known.first.get(case))
        .collect();
    let differences: Vec<f64> = series.iter().flat_map(|series| pair_ratios(series)).collect();
    if differences.is_empty() {
        return None;
    }
    let columns = || series.iter().flat_map(|series| [&series.base, &series.head]);
    let times: Vec<f64> = columns().flat_map(|column| column.time_ns.iter().copied()).collect();
    let shares: Vec<f64> =
        columns().flat_map(|column| column.contention.iter().flatten().copied()).collect();
    let span = |tail: f64| {
        100.0 * 0.5 * (quantile(&differences, 1.0 - tail) - quantile(&differences, tail))
    };
    Some(ProcessNoise {
        case: case.to_owned(),
        time_ns: median(&times),
        pairs: differences.len(),
        process: span(0.158_655) / std::f64::consts::SQRT_2,
        widest: span(0.025),
        contention: (!shares.is_empty()).then(|| median(&shares)),
    })
}

/// Returns ln(head / base) for neighbouring processes.
fn pair_ratios(series: &super::BlockSeries) -> Vec<f64> {
    series
        .base
        .time_ns
        .iter()
        .zip(&series.head.time_ns)
        .map(|(base, head)| (head / base).ln())
        .collect()
}
