//! Recommends thresholds from comparisons with a known answer: their recorded times are judged
//! again at other thresholds, without a new measurement.
//!
//! Only multiples from 1 on are tried: the measured threshold and larger ones. A comparison ended
//! when the measured threshold was decided: a smaller one would have needed more blocks, which
//! nobody measured, while a larger one never needs more blocks to fail a case.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Calibration, CalibrationComparison, ComparisonKind, MAX_BLOCKS, in_range};
use crate::gate::Verdict;
use crate::gate::paired::{TestPlan, decide_all};
use kernelgate::measure::plausibility;
use kernelgate::stats::median;

/// Thresholds that are tried, as multiples of the measured one.
const TRIED_MULTIPLES: [f64; 7] = [1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 10.0];
/// Size of a slow-down that must be found, as a multiple of the threshold: at the threshold itself
/// half of the slow-downs are found.
const FOUND_SLOWDOWN_PER_THRESHOLD: f64 = 2.0;
/// Share of the injected slow-downs that must be found.
const REQUIRED_POWER: f64 = 0.9;
/// Share of unchanged cases that may stay inconclusive.
const MAX_INCONCLUSIVE_SHARE: f64 = 0.05;
/// Smallest number of comparisons, and injected cases, for a recommendation.
pub const MIN_COMPARISONS_TO_RECOMMEND: usize = 20;
/// Smallest difference in contention for which a pair of processes shows what contention costs.
const MIN_CONTENTION_DIFFERENCE: f64 = 0.1;
/// Recommended budget as a multiple of the time that the blocks took.
const BUDGET_PER_BLOCK_TIME: f64 = 1.25;

/// Largest relative error of a number that was written to a file and read again.
const ROUNDING_ERROR: f64 = 1e-9;

/// Thresholds and budgets that the gate should use on this device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecommendedThresholds {
    /// Smallest threshold without a false alarm that finds slow-downs of twice its size with 90 %;
    /// `None` if no threshold does, or too little was measured.
    pub relative: Option<f64>,
    /// Smallest [`TestPlan::settle_blocks`] with which the power suffices and at most 5 % of
    /// unchanged cases are inconclusive; `None` if no tried number suffices.
    pub settle_blocks: Option<usize>,
    /// Wall time of all blocks of the calibrated cases and a quarter more, seconds.
    pub budget_s: f64,
    /// Cost of a unit of contention under the sham load, rounded up to halves; not less than the
    /// plan's.
    pub contention_weight: f64,
    /// Reason why no threshold is recommended, or a warning.
    pub note: Option<String>,
    /// Thresholds that were tried for the recommendation.
    pub tried: Vec<TriedThreshold>,
}

/// A tried threshold, with its results on the recorded comparisons.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TriedThreshold {
    /// The threshold.
    pub relative: f64,
    /// Number of comparisons that would have judged an unchanged case as slower.
    pub false_alarms: usize,
    /// Comparisons that were tried.
    pub comparisons: usize,
    /// Share of the cases of A/A comparisons that would have been inconclusive.
    pub inconclusive: f64,
    /// The smallest injected slow-down that is at least twice the threshold, per cent; `None` if
    /// no slow-down is that large.
    pub percent: Option<f64>,
    /// Number of cases with that injected percentage that would have been found.
    pub found: usize,
    /// Cases with that percentage.
    pub of: usize,
}

impl TriedThreshold {
    fn meets_requirements(&self) -> bool {
        self.false_alarms == 0
            && self.of >= MIN_COMPARISONS_TO_RECOMMEND
            && self.found as f64 >= REQUIRED_POWER * self.of as f64
    }
}

impl RecommendedThresholds {
    /// Checks that the recommended values can result from comparisons with this plan, because
    /// `compare` uses them.
    pub(super) fn validate(&self, plan: &TestPlan) -> Result<(), String> {
        for tried in &self.tried {
            in_range("recommended.tried.relative", tried.relative, 0.0..1e12)?;
            in_range(
                "recommended.tried.inconclusive",
                tried.inconclusive,
                0.0..1.0 + ROUNDING_ERROR,
            )?;
            let percent = tried.percent.unwrap_or_default();
            in_range("recommended.tried.percent", percent, 0.0..1e4)?;
            for (field, part, all) in [
                ("false_alarms", tried.false_alarms, tried.comparisons),
                ("found", tried.found, tried.of),
            ] {
                plausibility::check_count(&format!("recommended.tried.{field}"), all as u64)?;
                if part > all {
                    return Err(format!("recommended.tried.{field} is {part} of {all}"));
                }
            }
        }
        if let Some(relative) = self.relative {
            in_range("recommended.relative", relative, 0.0..1e12)?;
            let is = |tried: &TriedThreshold| {
                (tried.relative - relative).abs() <= ROUNDING_ERROR * relative
            };
            if !self.tried.iter().any(is) {
                return Err(format!("recommended.relative is {relative}, which was not tried"));
            }
        }
        if let Some(blocks) = self.settle_blocks
            && !(1..=MAX_BLOCKS).contains(&blocks)
        {
            return Err(format!("recommended.settle_blocks is {blocks}"));
        }
        in_range("recommended.budget_s", self.budget_s, 0.0..1e12)?;
        in_range("recommended.contention_weight", self.contention_weight, 0.0..1e12)?;
        if self.contention_weight < plan.contention_weight * (1.0 - ROUNDING_ERROR) {
            return Err(format!(
                "recommended.contention_weight is {}, less than the plan's {}",
                self.contention_weight, plan.contention_weight
            ));
        }
        Ok(())
    }
}

/// Recommends thresholds and budgets.
pub fn recommend(calibration: &Calibration) -> RecommendedThresholds {
    let plan = calibration.plan;
    let tried: Vec<TriedThreshold> = TRIED_MULTIPLES
        .iter()
        .map(|step| {
            evaluate_threshold(calibration, &TestPlan { relative: step * plan.relative, ..plan })
        })
        .collect();
    let null = calibration.comparisons_of(ComparisonKind::Null).count();
    let chosen = tried
        .iter()
        .find(|tried| tried.meets_requirements())
        .filter(|_| null >= MIN_COMPARISONS_TO_RECOMMEND);
    let relative = chosen.map(|tried| tried.relative);
    let settle_blocks =
        relative.and_then(|relative| fewest_blocks(calibration, &TestPlan { relative, ..plan }));
    let note = match (null < MIN_COMPARISONS_TO_RECOMMEND, relative, settle_blocks) {
        (true, ..) => Some(format!(
            "{null} A/A comparisons: too few to recommend anything, {MIN_COMPARISONS_TO_RECOMMEND} are needed"
        )),
        (false, None, _) => Some(
            "no threshold that was tried has no false alarm and finds twice as much with 90 %"
                .to_owned(),
        ),
        (false, Some(_), None) => Some(format!(
            "more than {} % of unchanged cases stay inconclusive",
            100.0 * MAX_INCONCLUSIVE_SHARE
        )),
        _ => None,
    };
    RecommendedThresholds {
        relative,
        settle_blocks,
        budget_s: (BUDGET_PER_BLOCK_TIME * seconds_per_block(calibration) * plan.max_blocks as f64)
            .ceil(),
        contention_weight: contention_weight(calibration),
        note,
        tried,
    }
}

/// Returns the verdicts that a plan gives to a recorded comparison. A case that only this plan
/// judges as slower was not timed in a second round: its first round counts.
pub fn replay(comparison: &CalibrationComparison, plan: &TestPlan) -> BTreeMap<String, Verdict> {
    let first = decide_all(&comparison.observed(false, plan.max_blocks), plan, true);
    let second =
        Some(comparison.observed(true, plan.max_blocks)).filter(|observed| !observed.is_empty());
    let second = second.map(|observed| decide_all(&observed, plan, true));
    let again = |case: &str| {
        second.as_ref().and_then(|second| second.decision(case)).map(|decision| decision.verdict)
    };
    let verdict = |case: &str, verdict: Verdict| match (verdict, again(case)) {
        (Verdict::Regressed, Some(Verdict::Regressed) | None) => Verdict::Regressed,
        (Verdict::Regressed, Some(_)) => Verdict::Inconclusive,
        (other, _) => other,
    };
    // A case that failed after its first round has no verdict.
    let judged =
        first.decisions.iter().filter(|decision| comparison.verdicts.contains_key(&decision.case));
    judged
        .map(|decision| (decision.case.clone(), verdict(&decision.case, decision.verdict)))
        .collect()
}

fn evaluate_threshold(calibration: &Calibration, plan: &TestPlan) -> TriedThreshold {
    let (mut false_alarms, mut comparisons, mut inconclusive, mut cases) = (0, 0, 0, 0);
    let untouched = |comparison: &&CalibrationComparison| {
        comparison.delays_ns.len() < comparison.verdicts.len()
    };
    for comparison in calibration.comparisons.iter().filter(untouched) {
        let verdicts = replay(comparison, plan);
        comparisons += 1;
        false_alarms += usize::from(verdicts.iter().any(|(case, verdict)| {
            *verdict == Verdict::Regressed && !comparison.delays_ns.contains_key(case)
        }));
        if comparison.kind == ComparisonKind::Null {
            cases += verdicts.len();
            inconclusive +=
                verdicts.values().filter(|verdict| **verdict == Verdict::Inconclusive).count();
        }
    }
    let smallest = 100.0 * FOUND_SLOWDOWN_PER_THRESHOLD * plan.relative;
    let percent =
        calibration.injected_percents().into_iter().find(|percent| *percent >= smallest - 1e-9);
    let (mut found, mut of) = (0, 0);
    let slower = |comparison: &&CalibrationComparison| {
        percent.is_some() && comparison.kind.injected_percent() == percent
    };
    for comparison in calibration.comparisons.iter().filter(slower) {
        for (_, verdict) in replay(comparison, plan)
            .into_iter()
            .filter(|(case, _)| comparison.delays_ns.contains_key(case))
        {
            of += 1;
            found += usize::from(verdict == Verdict::Regressed);
        }
    }
    let inconclusive = if cases == 0 { 0.0 } else { inconclusive as f64 / cases as f64 };
    TriedThreshold {
        relative: plan.relative,
        false_alarms,
        comparisons,
        inconclusive,
        percent,
        found,
        of,
    }
}

/// The fewest blocks after which cases may be unchanged, from four upwards in steps of two.
fn fewest_blocks(calibration: &Calibration, plan: &TestPlan) -> Option<usize> {
    (4..=plan.settle_blocks.min(plan.max_blocks)).step_by(2).find(|settle_blocks| {
        let tried =
            evaluate_threshold(calibration, &TestPlan { settle_blocks: *settle_blocks, ..*plan });
        tried.meets_requirements() && tried.inconclusive <= MAX_INCONCLUSIVE_SHARE
    })
}

/// Mean time of a block of these cases, seconds.
fn seconds_per_block(calibration: &Calibration) -> f64 {
    let sum = |value: &dyn Fn(&CalibrationComparison) -> f64| {
        calibration.comparisons.iter().map(value).sum::<f64>()
    };
    let blocks = sum(&|comparison| comparison.processes as f64 / 4.0);
    if blocks > 0.0 { sum(&|comparison| comparison.wall_s) / blocks } else { 0.0 }
}

fn contention_weight(calibration: &Calibration) -> f64 {
    let mut costs = Vec::new();
    for series in calibration
        .comparisons_of(ComparisonKind::Sham)
        .flat_map(|comparison| comparison.first.values())
    {
        let sides = series.base.time_ns.iter().zip(&series.head.time_ns);
        let shares = series.base.contention.iter().zip(&series.head.contention);
        costs.extend(sides.zip(shares).filter_map(|((base_ns, head_ns), (base, head))| {
            let more = (*head)? - (*base)?;
            (more >= MIN_CONTENTION_DIFFERENCE).then(|| (head_ns / base_ns).ln() / more)
        }));
    }
    let assumed = calibration.plan.contention_weight;
    if costs.is_empty() { assumed } else { assumed.max((2.0 * median(&costs)).ceil() / 2.0) }
}
