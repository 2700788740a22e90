//! Recommends thresholds for the gate from a calibration: judges the recorded times of its
//! comparisons again at other thresholds, without new measurements.
//!
//! Only the threshold with which the calibration was measured and larger multiples of it are tried.
//! A comparison ended when its measured threshold was decided: a smaller threshold would have
//! needed blocks that were not recorded; a larger one needs none.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    CalibrationComparisonKind, CalibrationComparisonRecord, GateCalibration,
    MAX_BLOCKS_OF_RECORDED_PLAN, check_value_in_range,
};
use crate::gate::VerdictOnCase;
use crate::gate::paired::{ComparisonTestPlan, decide_cases_with_one_plan};
use kernelgate::measure::plausibility;
use kernelgate::stats::median;

/// Thresholds that are tried for the recommendation, as multiples of the threshold with which the
/// calibration was measured.
const TRIED_THRESHOLD_MULTIPLES: [f64; 7] = [1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 10.0];
/// A recommended threshold must find slow-downs of this multiple of its size; slow-downs of just
/// its own size are found only half of the time.
const SLOWDOWN_TO_FIND_PER_THRESHOLD: f64 = 2.0;
/// Share of the injected slow-downs that a recommended threshold must find.
const MIN_SHARE_OF_SLOWDOWNS_FOUND: f64 = 0.9;
/// Largest share of unchanged cases that may stay inconclusive with the recommended number of
/// blocks.
const MAX_INCONCLUSIVE_SHARE_OF_UNCHANGED_CASES: f64 = 0.05;
/// Smallest number of A/A comparisons, and of cases with an injected slow-down, from which a
/// threshold is recommended.
pub const MIN_COMPARISONS_TO_RECOMMEND: usize = 20;
/// Smallest difference in contention between two processes of a pair that is used to estimate what
/// contention costs.
const MIN_CONTENTION_DIFFERENCE_OF_PAIR: f64 = 0.1;
/// The recommended budget of a round is this multiple of the time that all its blocks take.
const RECOMMENDED_BUDGET_PER_BLOCK_TIME: f64 = 1.25;

/// Tolerated relative error of a number that was written to a JSON file and read again.
const JSON_ROUNDING_TOLERANCE: f64 = 1e-9;

/// Threshold, number of blocks and budget that comparisons on this device should use, derived from
/// its calibration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RecommendedThresholds {
    /// Smallest tried relative threshold that gave no false alarm and found 90 % of the slow-downs
    /// of twice its size; `None` if no tried threshold did both.
    #[serde(rename = "relative")]
    pub recommended_relative_threshold: Option<f64>,
    /// Smallest number of blocks after which a case may count as unchanged
    /// ([`ComparisonTestPlan::min_blocks_for_unchanged`]), such that at most 5 % of unchanged cases
    /// are inconclusive; `None` if no tried number suffices.
    #[serde(rename = "settle_blocks")]
    pub min_blocks_for_unchanged: Option<usize>,
    /// Recommended budget of a round, seconds: the wall time of all blocks of the calibrated cases,
    /// and a quarter more.
    #[serde(rename = "budget_s")]
    pub recommended_round_budget_s: f64,
    /// Relative time that a unit of contention costs, measured under the sham load and rounded up
    /// to halves; at least the plan's value.
    #[serde(rename = "contention_weight")]
    pub slowdown_per_contention: f64,
    /// Reason why no threshold or number of blocks is recommended; `None` if both are.
    #[serde(rename = "note")]
    pub why_not_recommended: Option<String>,
    /// All thresholds that were tried for the recommendation, with their results.
    #[serde(rename = "tried")]
    pub tried_thresholds: Vec<TriedThresholdResult>,
}

/// A threshold that was tried for the recommendation, with its results on the recorded comparisons.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TriedThresholdResult {
    /// The tried threshold, as a relative slow-down.
    #[serde(rename = "relative")]
    pub relative_threshold: f64,
    /// Number of comparisons in which the tried threshold judges a case as slower that was not
    /// delayed.
    #[serde(rename = "false_alarms")]
    pub comparisons_with_false_alarm: usize,
    /// Number of recorded comparisons on which the threshold was tried.
    #[serde(rename = "comparisons")]
    pub comparison_count: usize,
    /// Share of the cases of A/A comparisons that are inconclusive with the tried threshold.
    #[serde(rename = "inconclusive")]
    pub inconclusive_share: f64,
    /// Smallest injected slow-down that is at least twice the tried threshold, per cent; `None` if
    /// the calibration injected none so large.
    #[serde(rename = "percent")]
    pub injected_slowdown_percent: Option<f64>,
    /// Number of cases with an injected slow-down that the tried threshold judges as slower.
    #[serde(rename = "found")]
    pub slowdowns_found: usize,
    /// Number of cases with an injected slow-down on which the threshold was tried.
    #[serde(rename = "of")]
    pub slowdowns_injected: usize,
}

impl TriedThresholdResult {
    fn meets_error_rate_requirements(&self) -> bool {
        self.comparisons_with_false_alarm == 0
            && self.slowdowns_injected >= MIN_COMPARISONS_TO_RECOMMEND
            && self.slowdowns_found as f64
                >= MIN_SHARE_OF_SLOWDOWNS_FOUND * self.slowdowns_injected as f64
    }
}

impl RecommendedThresholds {
    /// Checks that the recommended values, read from a file, can result from a calibration with
    /// this plan, because `compare` uses them.
    pub(super) fn check_recommendation_fits_plan(
        &self,
        plan: &ComparisonTestPlan,
    ) -> Result<(), String> {
        for tried in &self.tried_thresholds {
            check_value_in_range(
                "recommended.tried.relative",
                tried.relative_threshold,
                0.0..1e12,
            )?;
            check_value_in_range(
                "recommended.tried.inconclusive",
                tried.inconclusive_share,
                0.0..1.0 + JSON_ROUNDING_TOLERANCE,
            )?;
            let percent = tried.injected_slowdown_percent.unwrap_or_default();
            check_value_in_range("recommended.tried.percent", percent, 0.0..1e4)?;
            for (field, part, all) in [
                ("false_alarms", tried.comparisons_with_false_alarm, tried.comparison_count),
                ("found", tried.slowdowns_found, tried.slowdowns_injected),
            ] {
                plausibility::check_count_plausible(
                    &format!("recommended.tried.{field}"),
                    all as u64,
                )?;
                if part > all {
                    return Err(format!("recommended.tried.{field} is {part} of {all}"));
                }
            }
        }
        if let Some(relative) = self.recommended_relative_threshold {
            check_value_in_range("recommended.relative", relative, 0.0..1e12)?;
            let is = |tried: &TriedThresholdResult| {
                (tried.relative_threshold - relative).abs() <= JSON_ROUNDING_TOLERANCE * relative
            };
            if !self.tried_thresholds.iter().any(is) {
                return Err(format!("recommended.relative is {relative}, which was not tried"));
            }
        }
        if let Some(blocks) = self.min_blocks_for_unchanged
            && !(1..=MAX_BLOCKS_OF_RECORDED_PLAN).contains(&blocks)
        {
            return Err(format!("recommended.settle_blocks is {blocks}"));
        }
        check_value_in_range("recommended.budget_s", self.recommended_round_budget_s, 0.0..1e12)?;
        check_value_in_range(
            "recommended.contention_weight",
            self.slowdown_per_contention,
            0.0..1e12,
        )?;
        if self.slowdown_per_contention
            < plan.slowdown_per_contention * (1.0 - JSON_ROUNDING_TOLERANCE)
        {
            return Err(format!(
                "recommended.contention_weight is {}, less than the plan's {}",
                self.slowdown_per_contention, plan.slowdown_per_contention
            ));
        }
        Ok(())
    }
}

/// Recommends thresholds, numbers of blocks and budgets for comparisons, from a calibration.
pub fn recommend_thresholds(calibration: &GateCalibration) -> RecommendedThresholds {
    let plan = calibration.plan;
    let tried: Vec<TriedThresholdResult> = TRIED_THRESHOLD_MULTIPLES
        .iter()
        .map(|step| {
            evaluate_tried_threshold(
                calibration,
                &ComparisonTestPlan {
                    relative_time_change_threshold: step * plan.relative_time_change_threshold,
                    ..plan
                },
            )
        })
        .collect();
    let null = calibration.comparisons_of_kind(CalibrationComparisonKind::IdenticalBuilds).count();
    let chosen = tried
        .iter()
        .find(|tried| tried.meets_error_rate_requirements())
        .filter(|_| null >= MIN_COMPARISONS_TO_RECOMMEND);
    let relative = chosen.map(|tried| tried.relative_threshold);
    let settle_blocks = relative.and_then(|relative| {
        fewest_sufficient_settle_blocks(
            calibration,
            &ComparisonTestPlan { relative_time_change_threshold: relative, ..plan },
        )
    });
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
            100.0 * MAX_INCONCLUSIVE_SHARE_OF_UNCHANGED_CASES
        )),
        _ => None,
    };
    RecommendedThresholds {
        recommended_relative_threshold: relative,
        min_blocks_for_unchanged: settle_blocks,
        recommended_round_budget_s: (RECOMMENDED_BUDGET_PER_BLOCK_TIME
            * mean_block_seconds(calibration)
            * plan.max_trial_blocks as f64)
            .ceil(),
        slowdown_per_contention: contention_weight_from_sham_load(calibration),
        why_not_recommended: note,
        tried_thresholds: tried,
    }
}

/// Judges the recorded times of a comparison again with another test plan, and returns the verdicts
/// by case. If only the new plan judges a case as slower, there are no times of a confirming second
/// round, and the verdict of the first round counts.
pub fn judge_recorded_times_again(
    comparison: &CalibrationComparisonRecord,
    plan: &ComparisonTestPlan,
) -> BTreeMap<String, VerdictOnCase> {
    let first = decide_cases_with_one_plan(
        &comparison.blocks_of_round(false, plan.max_trial_blocks),
        plan,
        true,
    );
    let second = Some(comparison.blocks_of_round(true, plan.max_trial_blocks))
        .filter(|observed| !observed.is_empty());
    let second = second.map(|observed| decide_cases_with_one_plan(&observed, plan, true));
    let again = |case: &str| {
        second
            .as_ref()
            .and_then(|second| second.decision_on_case(case))
            .map(|decision| decision.verdict)
    };
    let verdict = |case: &str, verdict: VerdictOnCase| match (verdict, again(case)) {
        (VerdictOnCase::Regressed, Some(VerdictOnCase::Regressed) | None) => {
            VerdictOnCase::Regressed
        }
        (VerdictOnCase::Regressed, Some(_)) => VerdictOnCase::Inconclusive,
        (other, _) => other,
    };
    // A case that failed after the first round had no verdict when it was recorded, so judging its
    // times again gives no verdict either.
    let judged = first
        .decisions
        .iter()
        .filter(|decision| comparison.verdicts.contains_key(&decision.case_id));
    judged
        .map(|decision| (decision.case_id.clone(), verdict(&decision.case_id, decision.verdict)))
        .collect()
}

fn evaluate_tried_threshold(
    calibration: &GateCalibration,
    plan: &ComparisonTestPlan,
) -> TriedThresholdResult {
    let (mut false_alarms, mut comparisons, mut inconclusive, mut cases) = (0, 0, 0, 0);
    let untouched = |comparison: &&CalibrationComparisonRecord| {
        comparison.injected_delays_ns.len() < comparison.verdicts.len()
    };
    for comparison in calibration.comparisons.iter().filter(untouched) {
        let verdicts = judge_recorded_times_again(comparison, plan);
        comparisons += 1;
        false_alarms += usize::from(verdicts.iter().any(|(case, verdict)| {
            *verdict == VerdictOnCase::Regressed
                && !comparison.injected_delays_ns.contains_key(case)
        }));
        if comparison.kind == CalibrationComparisonKind::IdenticalBuilds {
            cases += verdicts.len();
            inconclusive += verdicts
                .values()
                .filter(|verdict| **verdict == VerdictOnCase::Inconclusive)
                .count();
        }
    }
    let smallest = 100.0 * SLOWDOWN_TO_FIND_PER_THRESHOLD * plan.relative_time_change_threshold;
    let percent = calibration
        .injected_slowdown_percents()
        .into_iter()
        .find(|percent| *percent >= smallest - 1e-9);
    let (mut found, mut of) = (0, 0);
    let slower = |comparison: &&CalibrationComparisonRecord| {
        percent.is_some() && comparison.kind.injected_slowdown_percent() == percent
    };
    for comparison in calibration.comparisons.iter().filter(slower) {
        for (_, verdict) in judge_recorded_times_again(comparison, plan)
            .into_iter()
            .filter(|(case, _)| comparison.injected_delays_ns.contains_key(case))
        {
            of += 1;
            found += usize::from(verdict == VerdictOnCase::Regressed);
        }
    }
    let inconclusive = if cases == 0 { 0.0 } else { inconclusive as f64 / cases as f64 };
    TriedThresholdResult {
        relative_threshold: plan.relative_time_change_threshold,
        comparisons_with_false_alarm: false_alarms,
        comparison_count: comparisons,
        inconclusive_share: inconclusive,
        injected_slowdown_percent: percent,
        slowdowns_found: found,
        slowdowns_injected: of,
    }
}

/// Returns the smallest sufficient number of blocks after which a case may count as unchanged;
/// tries even numbers from four upwards.
fn fewest_sufficient_settle_blocks(
    calibration: &GateCalibration,
    plan: &ComparisonTestPlan,
) -> Option<usize> {
    (4..=plan.min_blocks_for_unchanged.min(plan.max_trial_blocks)).step_by(2).find(
        |settle_blocks| {
            let tried = evaluate_tried_threshold(
                calibration,
                &ComparisonTestPlan { min_blocks_for_unchanged: *settle_blocks, ..*plan },
            );
            tried.meets_error_rate_requirements()
                && tried.inconclusive_share <= MAX_INCONCLUSIVE_SHARE_OF_UNCHANGED_CASES
        },
    )
}

/// Returns the mean wall time of a block over the calibration's comparisons, seconds.
fn mean_block_seconds(calibration: &GateCalibration) -> f64 {
    let sum = |value: &dyn Fn(&CalibrationComparisonRecord) -> f64| {
        calibration.comparisons.iter().map(value).sum::<f64>()
    };
    let blocks = sum(&|comparison| comparison.process_count as f64 / 4.0);
    if blocks > 0.0 { sum(&|comparison| comparison.comparison_wall_s) / blocks } else { 0.0 }
}

fn contention_weight_from_sham_load(calibration: &GateCalibration) -> f64 {
    let mut costs = Vec::new();
    for series in calibration
        .comparisons_of_kind(CalibrationComparisonKind::ShamLoad)
        .flat_map(|comparison| comparison.first_round_times.values())
    {
        let sides = series.base.process_times_ns.iter().zip(&series.head.process_times_ns);
        let shares =
            series.base.cpu_contention_shares.iter().zip(&series.head.cpu_contention_shares);
        costs.extend(sides.zip(shares).filter_map(|((base_ns, head_ns), (base, head))| {
            let more = (*head)? - (*base)?;
            (more >= MIN_CONTENTION_DIFFERENCE_OF_PAIR).then(|| (head_ns / base_ns).ln() / more)
        }));
    }
    let assumed = calibration.plan.slowdown_per_contention;
    if costs.is_empty() { assumed } else { assumed.max((2.0 * median(&costs)).ceil() / 2.0) }
}
