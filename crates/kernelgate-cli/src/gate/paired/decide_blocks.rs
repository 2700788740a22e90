//! Turns the timed blocks of base and head into a verdict for each case.
//!
//! A case is **regressed** if Wilcoxon's signed-rank test on its pairs rejects "the head is not
//! slower than the threshold" three times: for the time, for the time corrected for contention, and
//! for the clock cycles if they were recorded. The p value of a case is the largest of its three p
//! values (an intersection-union test), each of which is valid at any interim analysis. The p
//! values of all cases are adjusted by Benjamini-Hochberg for the error rate
//! [`ComparisonTestPlan::max_false_alarm_probability`]. A case is **improved** if the three tests
//! of a regression, in the other direction, show that the head is faster by more than the
//! threshold. A case is **unchanged** if the tests reject both "slower by the threshold" and
//! "faster by the threshold". At later analyses, a case is also unchanged if nothing shows a change
//! and the confidence interval excludes changes above
//! [`ComparisonTestPlan::max_unchanged_relative_change`]. All other cases continue, and are
//! **inconclusive** after the last block.

use super::alpha_spending::{
    AlphaSpendingSchedule, FINAL_ANALYSIS_ALPHA_SHARE, UnchangedAnalysisSchedule,
    p_value_valid_at_any_stop,
};
use super::log_time_pairs::{DirectionOfChange, LogTimePairsOfCase, mean_contention_beside_build};
use super::{
    CauseOfInconclusiveDecision, ComparedArm, ComparisonTestPlan, ErrorRateFamily,
    PairedDecisionOnCase, PairedDecisionsOfRound, TimedTrialBlocksByCase,
};
use crate::gate::ratio_interval::TimeRatioWithInterval;
use crate::gate::verdict::VerdictOnCase;
use kernelgate::stats::signed_rank::signed_rank_p_value_for_upward_shift;
use kernelgate::stats::{WalshAverages, median, power};

/// Share of the cases, at least two cases, whose processes of one build must differ significantly
/// before the whole environment counts as unstable.
const UNSTABLE_ENVIRONMENT_CASE_SHARE: f64 = 0.1;
/// A case shows evidence of a change if its ratio differs from 1 at this fraction of the error
/// probability [`ComparisonTestPlan::max_missed_change_probability`]; then it cannot be unchanged
/// within the tolerated change. For identical builds this criterion falsely finds evidence of a
/// change at `EVIDENCE_OF_CHANGE_FRACTION` of the error probability, and makes the case
/// inconclusive.
const EVIDENCE_OF_CHANGE_FRACTION: f64 = 0.1;

/// Decides every case for which the blocks so far suffice, with one plan for all cases. The
/// function `decide_cases_with_one_plan` depends only on its arguments and may be called after
/// every block. The argument `last` states that no more blocks come; the reason must not depend on
/// the measured results: a spent budget or an interruption. If all cases are decided before the
/// last block, no final analysis takes place.
///
/// A decided case keeps its verdict when later blocks of other cases arrive. All calls of
/// `decide_cases_with_one_plan` during a comparison must pass the same set of cases, because the
/// number of cases determines the interim analyses.
pub fn decide_cases_with_one_plan(
    cases: &TimedTrialBlocksByCase,
    plan: &ComparisonTestPlan,
    last: bool,
) -> PairedDecisionsOfRound {
    decide_cases_with_own_thresholds(
        cases,
        plan,
        &|_| *plan,
        ErrorRateFamily::CasesOfThisDecision,
        last,
    )
}

/// Decides the cases with thresholds for each case, and with error rates that are divided over a
/// family of cases: the function `of_case` returns a case's plan, which may differ from `plan` only
/// in the thresholds.
pub fn decide_cases_with_own_thresholds(
    cases: &TimedTrialBlocksByCase,
    plan: &ComparisonTestPlan,
    of_case: &dyn Fn(&str) -> ComparisonTestPlan,
    family: ErrorRateFamily,
    last: bool,
) -> PairedDecisionsOfRound {
    let level =
        plan.max_false_alarm_probability / family.number_of_cases_in_family(cases.len()) as f64;
    let most = plan.max_trial_blocks.saturating_mul(2);
    let settling = UnchangedAnalysisSchedule::for_test_plan(plan);
    let plans: Vec<ComparisonTestPlan> = cases.keys().map(|case| of_case(case)).collect();
    let (change, same) = (
        AlphaSpendingSchedule::for_level_and_most_pairs(level, most),
        AlphaSpendingSchedule::for_level_and_most_pairs(plan.max_missed_change_probability, most),
    );
    let of_plan = |plan| InterimTestsOfCase {
        plan,
        significance_level: level,
        schedule_for_change: &change,
        schedule_for_no_change: &same,
        schedule_for_unchanged: &settling,
    };
    let tests: Vec<InterimTestsOfCase<'_>> = plans.iter().map(of_plan).collect();
    let pairs: Vec<LogTimePairsOfCase> =
        cases.values().map(|blocks| LogTimePairsOfCase::from_trial_blocks(blocks)).collect();
    // The interim analyses before the final one decide first: a decided case gets no final
    // analysis.
    let mut standings: Vec<StatisticalEvidenceOfCase> = tests
        .iter()
        .zip(&pairs)
        .map(|(tests, pairs)| tests.compute_evidence_of_case(pairs, false))
        .collect();
    let before: Vec<AdjustedVerdictOnCase> =
        adjust_verdicts_for_family(&standings, plan, family, true);
    let each = standings.iter_mut().zip(tests.iter().zip(&pairs)).zip(&before);
    for ((standing, (tests, pairs)), concluded) in each {
        if concluded.pairs_at_decision.is_none() && (last || pairs.pair_count() >= most) {
            *standing = tests.compute_evidence_of_case(pairs, true);
        }
    }
    let sound = !has_after_effect_on_next_process(&pairs, plan, last);
    let concluded = adjust_verdicts_for_family(&standings, plan, family, sound);
    let undecided = |index: usize| {
        concluded[index].pairs_at_decision.is_none() && !standings[index].no_more_blocks
    };
    let names = |keep: &dyn Fn(usize) -> bool| -> Vec<String> {
        cases
            .keys()
            .enumerate()
            .filter(|(index, _)| keep(*index))
            .map(|(_, case)| case.clone())
            .collect()
    };
    let mut decisions: Vec<PairedDecisionOnCase> = cases
        .iter()
        .zip(tests.iter().zip(pairs.iter().zip(concluded.iter().zip(&standings))))
        .map(|((case, blocks), (tests, (pairs, (concluded, standing))))| PairedDecisionOnCase {
            case_id: case.clone(),
            base_cpu_contention: mean_contention_beside_build(blocks, ComparedArm::BaseBuild),
            head_cpu_contention: mean_contention_beside_build(blocks, ComparedArm::HeadBuild),
            ..tests.describe_decision_of_case(pairs, concluded, standing.no_more_blocks)
        })
        .collect();
    decisions.sort_by(|a, b| a.verdict.cmp(&b.verdict).then_with(|| a.case_id.cmp(&b.case_id)));
    PairedDecisionsOfRound {
        decisions,
        undecided_cases: names(&undecided),
        cases_with_differing_null_pairs: names(&|index| concluded[index].null_control_found_change),
        environment_is_stable: concluded.iter().all(|concluded| {
            concluded.reason != Some(CauseOfInconclusiveDecision::UnstableEnvironment)
        }),
    }
}

/// The statistical tests of one case, and the interim analyses at which they run.
struct InterimTestsOfCase<'a> {
    plan: &'a ComparisonTestPlan,
    /// Significance level of the test of a single case, already divided by the number of cases.
    significance_level: f64,
    schedule_for_change: &'a AlphaSpendingSchedule,
    /// Interim analyses of the tests that exclude a change of the case's time.
    schedule_for_no_change: &'a AlphaSpendingSchedule,
    /// Analyses at which the case may be declared unchanged within the tolerated change.
    schedule_for_unchanged: &'a UnchangedAnalysisSchedule,
}

/// Evidence for a change of one case in one direction (slower or faster): p values that are valid
/// at any stopping time.
struct EvidenceOfChangeInDirection {
    /// p value of the test for a change of the time alone, without clock cycles and contention.
    p_value_by_time: f64,
    /// Largest of the p values by time, by time corrected for contention, and by clock cycles.
    largest_p_value: f64,
    /// The doubt (contention or clock frequency) whose p value is the larger of the two.
    objection: CauseOfInconclusiveDecision,
    /// Number of pairs at the analysis in which clock cycles excluded a relevant change, so that
    /// more blocks would not help; `None` if none did.
    pairs_when_clock_objected: Option<usize>,
    /// Number of pairs at the interim analysis that gave the p value `largest_p_value`.
    pairs_at_analysis: usize,
}

impl EvidenceOfChangeInDirection {
    /// Returns the verdict for a case whose time changed while clock cycles or contention do not
    /// confirm the change: inconclusive.
    fn verdict_for_unconfirmed_change(
        &self,
    ) -> (VerdictOnCase, Option<CauseOfInconclusiveDecision>, Option<usize>) {
        match self.pairs_when_clock_objected {
            Some(at) => (
                VerdictOnCase::Inconclusive,
                Some(CauseOfInconclusiveDecision::ClockFrequencyChanged),
                Some(at),
            ),
            None => (VerdictOnCase::Inconclusive, Some(self.objection), None),
        }
    }
}

/// Evidence of one case, before the error rates are adjusted for all cases together.
struct StatisticalEvidenceOfCase {
    slower: EvidenceOfChangeInDirection,
    faster: EvidenceOfChangeInDirection,
    /// p values for differences between processes of one build (null pairs), for both directions.
    null: [f64; 2],
    /// Number of pairs at the interim analysis that excluded any relevant change; `None` if none
    /// did.
    pairs_when_unchanged: Option<usize>,
    /// Whether no more blocks of the comparison come.
    no_more_blocks: bool,
    /// Verdict that the case gets if no test decides; it is final after the last block.
    verdict_without_evidence: (VerdictOnCase, Option<CauseOfInconclusiveDecision>),
    /// Number of pairs of base and head processes measured so far.
    pair_count: usize,
}

impl InterimTestsOfCase<'_> {
    fn compute_evidence_of_case(
        &self,
        pairs: &LogTimePairsOfCase,
        ended: bool,
    ) -> StatisticalEvidenceOfCase {
        let plan = self.plan;
        let n = pairs.pair_count();
        let change = |direction| {
            let p = |test: &dyn Fn(usize) -> f64| {
                p_value_valid_at_any_stop(
                    self.schedule_for_change.analyses_up_to_pairs(n, ended),
                    test,
                )
            };
            let (time, at) = p(&|n| pairs.p_of_no_change_beyond_threshold(n, direction, plan));
            let (contention, contention_at) =
                p(&|n| pairs.p_within_threshold_despite_contention(n, direction, plan));
            let (cycles, cycles_at) =
                p(&|n| pairs.p_of_no_change_beyond_threshold_in_cycles(n, direction, plan));
            let (same, same_at) = p_value_valid_at_any_stop(
                self.schedule_for_no_change.analyses_up_to_pairs(n, ended),
                |n| pairs.p_of_change_by_threshold_in_cycles(n, direction, plan),
            );
            EvidenceOfChangeInDirection {
                p_value_by_time: time,
                largest_p_value: time.max(contention).max(cycles),
                objection: if cycles > contention {
                    CauseOfInconclusiveDecision::ClockFrequencyChanged
                } else {
                    CauseOfInconclusiveDecision::DifferentCpuContention
                },
                pairs_when_clock_objected: (same <= plan.max_missed_change_probability)
                    .then_some(same_at.max(at)),
                pairs_at_analysis: at.max(contention_at).max(if pairs.are_cycles_used() {
                    cycles_at
                } else {
                    0
                }),
            }
        };
        let null =
            [DirectionOfChange::HeadSlower, DirectionOfChange::HeadFaster].map(|direction| {
                p_value_valid_at_any_stop(
                    self.schedule_for_change.analyses_up_to_pairs(n, ended),
                    |n| pairs.p_of_equal_null_pairs(n, direction, plan),
                )
                .0
            });
        let same = |direction| {
            p_value_valid_at_any_stop(
                self.schedule_for_no_change.analyses_up_to_pairs(n, ended),
                |n| pairs.p_of_change_by_threshold(n, direction, plan),
            )
        };
        let (slower, faster) =
            (same(DirectionOfChange::HeadSlower), same(DirectionOfChange::HeadFaster));
        let same_at = slower.1.max(faster.1);
        let excluded = slower.0.max(faster.0) <= plan.max_missed_change_probability
            && !self.may_contention_of_base_hide_slowdown(pairs, same_at);
        let settled_at = || {
            let UnchangedAnalysisSchedule {
                pairs_at_early_analyses: early,
                early_tail_probability: early_tail,
                ..
            } = self.schedule_for_unchanged;
            early.iter().copied().find(|analysis| {
                *analysis <= n
                    && self.is_unchanged_within_tolerance(pairs, *analysis, *early_tail)
                        == Some(true)
            })
        };
        StatisticalEvidenceOfCase {
            slower: change(DirectionOfChange::HeadSlower),
            faster: change(DirectionOfChange::HeadFaster),
            null,
            pairs_when_unchanged: if excluded { Some(same_at) } else { settled_at() },
            no_more_blocks: ended,
            verdict_without_evidence: if ended {
                self.verdict_after_last_block(pairs)
            } else {
                (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::IntervalTooWide))
            },
            pair_count: n,
        }
    }

    /// Returns the number of pairs of the given interim analysis, or of the final one if there is
    /// none.
    fn pairs_at_analysis_or_end(&self, analysis: Option<usize>, pairs: usize) -> usize {
        analysis.unwrap_or_else(|| self.plan.max_trial_blocks.saturating_mul(2).max(pairs))
    }

    /// Returns whether the base's processes suffered so much more contention than the head's that
    /// this may hide a slow-down of the head.
    fn may_contention_of_base_hide_slowdown(&self, pairs: &LogTimePairsOfCase, n: usize) -> bool {
        pairs.p_of_base_not_more_contended(n, self.plan)
            <= FINAL_ANALYSIS_ALPHA_SHARE * self.plan.max_missed_change_probability
    }

    /// Returns whether the first `n` pairs show no change and exclude changes above the tolerated
    /// one, at this error probability for each side; `None` if contention may hide a change.
    fn is_unchanged_within_tolerance(
        &self,
        pairs: &LogTimePairsOfCase,
        n: usize,
        tail: f64,
    ) -> Option<bool> {
        let threshold = pairs.log_of_threshold_ratio(n, self.plan);
        let margin = self.plan.max_unchanged_relative_change.ln_1p().max(threshold);
        let times = &pairs.log_time_ratios[..n];
        let walsh = WalshAverages::averages_of_all_pairs(times);
        let all_beyond = |sign: f64| times.iter().all(|time| sign * time > threshold);
        // If there are too few pairs for an interval of the requested confidence, only pairs that
        // all lie beyond the threshold count as evidence of a change.
        let evidence = all_beyond(1.0)
            || all_beyond(-1.0)
            || walsh
                .interval_with_tail_probability(EVIDENCE_OF_CHANGE_FRACTION * tail)
                .is_some_and(|(low, high)| low > 0.0 || high < 0.0);
        let small = !evidence
            && walsh
                .interval_with_tail_probability(tail)
                .is_some_and(|(low, high)| low > -margin && high < margin);
        if small && self.may_contention_of_base_hide_slowdown(pairs, n) {
            None
        } else {
            Some(small)
        }
    }

    fn verdict_after_last_block(
        &self,
        pairs: &LogTimePairsOfCase,
    ) -> (VerdictOnCase, Option<CauseOfInconclusiveDecision>) {
        let n = pairs.pair_count();
        match self.is_unchanged_within_tolerance(
            pairs,
            n,
            self.schedule_for_unchanged.final_tail_probability,
        ) {
            None => (
                VerdictOnCase::Inconclusive,
                Some(CauseOfInconclusiveDecision::DifferentCpuContention),
            ),
            Some(true) => (VerdictOnCase::Unchanged, None),
            Some(false)
                if n < self
                    .schedule_for_change
                    .fewest_pairs_for_final_significance(self.significance_level) =>
            {
                let throttled = pairs.excludes_throttled_blocks();
                let doubt = if throttled {
                    CauseOfInconclusiveDecision::TooManyThrottledBlocks
                } else {
                    CauseOfInconclusiveDecision::TooFewPairs
                };
                (VerdictOnCase::Inconclusive, Some(doubt))
            }
            Some(false) => {
                (VerdictOnCase::Inconclusive, Some(CauseOfInconclusiveDecision::IntervalTooWide))
            }
        }
    }

    /// Describes the decision on a case: times, ratios, p values and needed pairs; the caller adds
    /// case id and contention.
    fn describe_decision_of_case(
        &self,
        pairs: &LogTimePairsOfCase,
        concluded: &AdjustedVerdictOnCase,
        ended: bool,
    ) -> PairedDecisionOnCase {
        let plan = self.plan;
        let n = pairs.pair_count();
        let threshold = pairs.log_of_threshold_ratio(n, plan);
        let walsh = WalshAverages::averages_of_all_pairs(&pairs.log_time_ratios);
        let tail = FINAL_ANALYSIS_ALPHA_SHARE * plan.max_missed_change_probability;
        let level = FINAL_ANALYSIS_ALPHA_SHARE * self.significance_level;
        let center = walsh.hodges_lehmann_center().unwrap_or(0.0).abs();
        let open = matches!(
            concluded.reason,
            None | Some(
                CauseOfInconclusiveDecision::TooFewPairs
                    | CauseOfInconclusiveDecision::TooManyThrottledBlocks
                    | CauseOfInconclusiveDecision::IntervalTooWide
            )
        ) && concluded.verdict == VerdictOnCase::Inconclusive;
        // Once the comparison has ended, only a larger budget helps, and any even number of pairs
        // can then be its final analysis.
        let analysed_at = |analysis: Option<usize>, pairs: usize| match ended {
            true => pairs.next_multiple_of(2),
            false => self.pairs_at_analysis_or_end(analysis, pairs),
        };
        // A change above the threshold must be shown to exceed it; a smaller one must be shown to
        // be below it or within the tolerated change.
        let wanted_power = plan.statistical_power;
        let detectable = power::detectable_shift_of_signed_rank_test(&walsh, level, wanted_power);
        let shown = |distance: f64, settles: f64| match walsh.standard_error_of_center() {
            Some(error) => {
                power::pairs_needed_to_find_effect(n, error, distance, settles, wanted_power)
                    .map(|needed| needed.max(n + 1))
            }
            None => Some(power::fewest_pairs_that_can_reach_level(settles).max(n + 1)),
        };
        let needed = || {
            if center > threshold {
                return shown(center - threshold, level).map(|pairs| {
                    analysed_at(self.schedule_for_change.pairs_of_next_analysis(pairs), pairs)
                });
            }
            let UnchangedAnalysisSchedule {
                pairs_at_early_analyses: early,
                early_tail_probability: early_tail,
                final_tail_probability: last_tail,
            } = self.schedule_for_unchanged;
            let analysis = |pairs: usize| early.iter().copied().find(|it| *it >= pairs);
            let settles = if ended { *last_tail } else { *early_tail };
            let tolerated = plan.max_unchanged_relative_change.ln_1p().max(threshold);
            let settled =
                shown(tolerated - center, settles).map(|pairs| analysed_at(analysis(pairs), pairs));
            let same = shown(threshold - center, tail).map(|pairs| {
                analysed_at(self.schedule_for_no_change.pairs_of_next_analysis(pairs), pairs)
            });
            [same, settled].into_iter().flatten().min()
        };
        let middle = |times: &[f64]| if times.is_empty() { 0.0 } else { median(times) };
        PairedDecisionOnCase {
            case_id: String::new(),
            verdict: concluded.verdict,
            reason: concluded.reason,
            base_median_launch_ns: middle(&pairs.base_launch_ns),
            head_median_launch_ns: middle(&pairs.head_launch_ns),
            ratio: time_ratio_with_interval(&walsh, tail),
            cycle_ratio: pairs.log_cycle_ratios.as_ref().filter(|cycles| !cycles.is_empty()).map(
                |cycles| {
                    time_ratio_with_interval(&WalshAverages::averages_of_all_pairs(cycles), tail)
                },
            ),
            null_pair_ratio: time_ratio_with_interval(
                &WalshAverages::averages_of_all_pairs(&pairs.log_ratios_of_one_build),
                tail,
            ),
            relative_threshold: threshold.exp_m1(),
            p_value_of_not_slower: concluded.p_value_of_not_slower,
            p_value_of_not_faster: concluded.p_value_of_not_faster,
            smallest_detectable_slowdown: detectable.map(|shift| (threshold + shift).exp_m1()),
            usable_pairs: n,
            pairs_needed: if open { needed() } else { None },
            pairs_at_decision: concluded.pairs_at_decision,
            base_cpu_contention: None,
            head_cpu_contention: None,
        }
    }
}

/// Returns the Hodges-Lehmann estimate of the ratio with its confidence interval, or with the range
/// of the pairs if there are too few for an interval.
fn time_ratio_with_interval(walsh: &WalshAverages, tail: f64) -> TimeRatioWithInterval {
    let (low, high) = walsh
        .interval_with_tail_probability(tail)
        .or(walsh.smallest_and_largest_difference())
        .unwrap_or((f64::NEG_INFINITY, f64::INFINITY));
    TimeRatioWithInterval {
        estimated_ratio: walsh.hodges_lehmann_center().unwrap_or(0.0).exp(),
        ratio_low: low.exp(),
        ratio_high: high.exp(),
    }
}

/// Tests over all cases together whether one build's processes leave an after-effect (heat, load)
/// that slows the next process. All cases share such after-effects, so their median per block shows
/// them even if each single case is too noisy.
fn has_after_effect_on_next_process(
    pairs: &[LogTimePairsOfCase],
    plan: &ComparisonTestPlan,
    last: bool,
) -> bool {
    let blocks = pairs.iter().map(|pairs| pairs.pair_count() / 2).max().unwrap_or(0);
    let null: Vec<f64> = (0..blocks)
        .map(|block| {
            median(
                &pairs
                    .iter()
                    .filter_map(|pairs| pairs.mean_of_null_pairs_in_block(block))
                    .collect::<Vec<_>>(),
            )
        })
        .collect();
    let threshold = plan.relative_time_change_threshold.ln_1p();
    let spending = AlphaSpendingSchedule::for_level_and_most_pairs(
        plan.max_false_alarm_probability,
        plan.max_trial_blocks,
    );
    [1.0, -1.0].into_iter().any(|sign| {
        let test = |n: usize| {
            signed_rank_p_value_for_upward_shift(
                &null[..n].iter().map(|value| sign * value - threshold).collect::<Vec<_>>(),
            )
        };
        p_value_valid_at_any_stop(
            spending.analyses_up_to_pairs(blocks, last || blocks >= plan.max_trial_blocks),
            test,
        )
        .0 <= plan.max_false_alarm_probability
    })
}

/// Verdict on a case, after adjustment for the number of cases.
struct AdjustedVerdictOnCase {
    verdict: VerdictOnCase,
    reason: Option<CauseOfInconclusiveDecision>,
    /// Number of pairs at the interim analysis that decided the case; `None` if none did.
    pairs_at_decision: Option<usize>,
    p_value_of_not_slower: f64,
    p_value_of_not_faster: f64,
    null_control_found_change: bool,
}

fn adjust_verdicts_for_family(
    standings: &[StatisticalEvidenceOfCase],
    plan: &ComparisonTestPlan,
    family: ErrorRateFamily,
    sound: bool,
) -> Vec<AdjustedVerdictOnCase> {
    let adjusted = |p: &dyn Fn(&StatisticalEvidenceOfCase) -> f64| {
        family.adjust_p_values_for_family(&standings.iter().map(p).collect::<Vec<_>>())
    };
    let significant = |p: f64| p <= plan.max_false_alarm_probability;
    let (slower, faster) =
        (adjusted(&|s| s.slower.largest_p_value), adjusted(&|s| s.faster.largest_p_value));
    let (slower_in_time, faster_in_time) =
        (adjusted(&|s| s.slower.p_value_by_time), adjusted(&|s| s.faster.p_value_by_time));
    let (up, down) = (adjusted(&|s| s.null[0]), adjusted(&|s| s.null[1]));
    let fired: Vec<bool> =
        up.iter().zip(&down).map(|(&up, &down)| significant(up.min(down))).collect();
    let count = fired.iter().filter(|fired| **fired).count();
    let sound = sound
        && (count < 2 || count as f64 <= UNSTABLE_ENVIRONMENT_CASE_SHARE * standings.len() as f64);
    let one = |(i, standing): (usize, &StatisticalEvidenceOfCase)| {
        let (verdict, reason, at) = if !sound {
            (
                VerdictOnCase::Inconclusive,
                Some(CauseOfInconclusiveDecision::UnstableEnvironment),
                Some(standing.pair_count),
            )
        } else if fired[i] {
            (
                VerdictOnCase::Inconclusive,
                Some(CauseOfInconclusiveDecision::IdenticalBuildsDiffer),
                Some(standing.pair_count),
            )
        } else if significant(slower[i]) {
            (VerdictOnCase::Regressed, None, Some(standing.slower.pairs_at_analysis))
        } else if significant(faster[i]) {
            (VerdictOnCase::Improved, None, Some(standing.faster.pairs_at_analysis))
        } else if significant(slower_in_time[i]) {
            standing.slower.verdict_for_unconfirmed_change()
        } else if significant(faster_in_time[i]) {
            standing.faster.verdict_for_unconfirmed_change()
        } else if let Some(at) = standing.pairs_when_unchanged {
            (VerdictOnCase::Unchanged, None, Some(at))
        } else {
            (standing.verdict_without_evidence.0, standing.verdict_without_evidence.1, None)
        };
        AdjustedVerdictOnCase {
            verdict,
            reason,
            pairs_at_decision: at,
            p_value_of_not_slower: slower[i],
            p_value_of_not_faster: faster[i],
            null_control_found_change: fired[i],
        }
    };
    standings.iter().enumerate().map(one).collect()
}
