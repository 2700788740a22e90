//! Fixes the interim analyses of a comparison, and the share of the error rate (alpha) that each
//! may spend.
//!
//! A test that is repeated as data arrive sooner or later rejects a true hypothesis, so its
//! repetitions must share the error rate. Each interim analysis has a weight; the weights sum to at
//! most one, and the p value of an analysis is divided by its weight. By the union bound, the
//! smallest of the divided p values is valid at any stopping time, even if the analyses depend on
//! each other. Before the first block, the test plan and the number of cases fix at which numbers
//! of pairs the analyses take place.

use super::ComparisonTestPlan;
use kernelgate::stats::power::fewest_pairs_that_can_reach_level;

/// Weight of the final analysis, after a comparison's last block, which most comparisons of
/// unchanged builds reach.
pub const FINAL_ANALYSIS_ALPHA_SHARE: f64 = 0.5;
/// Share of the error probability that the final analysis gets among the analyses that may declare
/// a case unchanged within the tolerated change. With half as much for all earlier analyses
/// together, six pairs suffice at the final one.
const UNCHANGED_FINAL_ANALYSIS_ALPHA_SHARE: f64 = 2.0 / 3.0;
/// Weight of the first interim analysis, which finds large changes early.
const FIRST_ANALYSIS_ALPHA_SHARE: f64 = 0.25;
/// Factor by which the number of pairs grows from one interim analysis to the next.
const PAIRS_GROWTH_BETWEEN_ANALYSES: f64 = 1.4;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightedInterimAnalysis {
    /// Number of pairs of processes after which the interim analysis takes place.
    pub pairs_at_analysis: usize,
    /// Share of the test's error rate (alpha) that the interim analysis may spend.
    pub alpha_share: f64,
}

/// The interim analyses of one test, and the share of its error rate (alpha) that each may spend.
#[derive(Debug, Clone, PartialEq)]
pub struct AlphaSpendingSchedule {
    /// The interim analyses before the final one, in ascending order of their numbers of pairs.
    early_analyses: Vec<WeightedInterimAnalysis>,
    /// Weight of the final analysis, after the last block.
    final_analysis_alpha_share: f64,
}

impl AlphaSpendingSchedule {
    /// Fixes the interim analyses of a test with significance level `level` and at most `most`
    /// pairs. The first analysis takes the smallest even number of pairs that can reach its part of
    /// the level; if that is not below `most`, there is only the final analysis.
    ///
    /// The final analysis has a fixed weight whenever it takes place, because the remaining time
    /// may determine its moment, but not the measured results.
    pub fn for_level_and_most_pairs(level: f64, most: usize) -> Self {
        let mut early = Vec::new();
        let mut pairs = fewest_pairs_that_can_reach_level(level * FIRST_ANALYSIS_ALPHA_SHARE)
            .div_ceil(2)
            .saturating_mul(2);
        while pairs < most {
            early.push(WeightedInterimAnalysis {
                pairs_at_analysis: pairs,
                alpha_share: FIRST_ANALYSIS_ALPHA_SHARE,
            });
            pairs = (pairs as f64 * PAIRS_GROWTH_BETWEEN_ANALYSES / 2.0).ceil() as usize * 2;
        }
        let later = early.len().saturating_sub(1);
        for analysis in early.iter_mut().skip(1) {
            analysis.alpha_share =
                (1.0 - FINAL_ANALYSIS_ALPHA_SHARE - FIRST_ANALYSIS_ALPHA_SHARE) / later as f64;
        }
        if early.is_empty() {
            return Self { early_analyses: early, final_analysis_alpha_share: 1.0 };
        }
        Self { early_analyses: early, final_analysis_alpha_share: FINAL_ANALYSIS_ALPHA_SHARE }
    }

    /// Returns the interim analyses with at most this number of pairs, and after the last block
    /// also the final one.
    pub fn analyses_up_to_pairs(
        &self,
        pairs: usize,
        ended: bool,
    ) -> impl Iterator<Item = WeightedInterimAnalysis> {
        let last = (ended && pairs > 0).then_some(WeightedInterimAnalysis {
            pairs_at_analysis: pairs,
            alpha_share: self.final_analysis_alpha_share,
        });
        self.early_analyses
            .iter()
            .copied()
            .filter(move |analysis| analysis.pairs_at_analysis <= pairs)
            .chain(last)
    }

    /// Returns the number of pairs of the first interim analysis with at least this number of
    /// pairs; `None` if only the final one follows.
    pub fn pairs_of_next_analysis(&self, pairs: usize) -> Option<usize> {
        self.early_analyses
            .iter()
            .map(|analysis| analysis.pairs_at_analysis)
            .find(|analysis| *analysis >= pairs)
    }

    /// Returns the smallest number of pairs with which the final analysis of a test at this level
    /// can be significant.
    pub fn fewest_pairs_for_final_significance(&self, level: f64) -> usize {
        fewest_pairs_that_can_reach_level(level * self.final_analysis_alpha_share)
    }
}

/// Analyses at which a case may be declared unchanged because a change above the tolerated one is
/// excluded.
#[derive(Debug, Clone, PartialEq)]
pub struct UnchangedAnalysisSchedule {
    /// Numbers of pairs at which a case may be declared unchanged before the final analysis.
    pub pairs_at_early_analyses: Vec<usize>,
    /// Error probability of each analysis before the final one, for each end of the confidence
    /// interval.
    pub early_tail_probability: f64,
    /// Error probability of the final analysis, for each end of the confidence interval.
    pub final_tail_probability: f64,
}

impl UnchangedAnalysisSchedule {
    /// Places the analyses after the number of blocks from which a case may be declared unchanged,
    /// twice as many and so on, and at the end; the end gets most of the error probability.
    pub fn for_test_plan(plan: &ComparisonTestPlan) -> Self {
        let (first, most) = (
            plan.min_blocks_for_unchanged.saturating_mul(2),
            plan.max_trial_blocks.saturating_mul(2),
        );
        let doubled = std::iter::successors(Some(first).filter(|first| *first > 0), |pairs| {
            pairs.checked_mul(2)
        });
        let early: Vec<usize> = doubled.take_while(|pairs| *pairs < most).collect();
        let all = FINAL_ANALYSIS_ALPHA_SHARE * plan.max_missed_change_probability;
        let last_tail =
            if early.is_empty() { all } else { UNCHANGED_FINAL_ANALYSIS_ALPHA_SHARE * all };
        let early_tail = (all - last_tail) / early.len().max(1) as f64;
        Self {
            pairs_at_early_analyses: early,
            early_tail_probability: early_tail,
            final_tail_probability: last_tail,
        }
    }
}

/// Returns a p value that is valid at any stopping time: the smallest p / weight over the analyses,
/// with the number of pairs of that analysis.
pub fn p_value_valid_at_any_stop(
    analyses: impl Iterator<Item = WeightedInterimAnalysis>,
    p: impl Fn(usize) -> f64,
) -> (f64, usize) {
    analyses
        .map(|analysis| {
            (
                (p(analysis.pairs_at_analysis) / analysis.alpha_share).min(1.0),
                analysis.pairs_at_analysis,
            )
        })
        .fold((1.0, 0), |best, at| if at.0 < best.0 { at } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_analysis_can_find_a_regression_and_all_spend_at_most_alpha() {
        for cases in [1, 2, 5, 20, 200] {
            for most in [4, 16, 24, 48, 100] {
                let level = 0.01 / f64::from(cases);
                let spending = AlphaSpendingSchedule::for_level_and_most_pairs(level, most);
                let all: Vec<WeightedInterimAnalysis> =
                    spending.analyses_up_to_pairs(most, true).collect();
                let spent: f64 = all.iter().map(|analysis| analysis.alpha_share).sum();
                assert!((0.75 - 1e-12..=1.0 + 1e-12).contains(&spent), "{cases} {most}: {all:?}");
                assert!(
                    all.windows(2)
                        .all(|pair| pair[0].pairs_at_analysis < pair[1].pairs_at_analysis),
                    "{all:?}"
                );
                if all.len() > 1 {
                    assert!(
                        0.5f64.powi(all[0].pairs_at_analysis as i32) <= level * all[0].alpha_share
                    );
                }
            }
        }
    }

    /// Checks the interim analyses against the numbers in docs/concepts/decision.md.
    #[test]
    fn the_fewest_pairs_that_can_show_a_regression_are_known() {
        let first = |cases: f64| {
            AlphaSpendingSchedule::for_level_and_most_pairs(0.01 / cases, 48)
                .analyses_up_to_pairs(48, false)
                .next()
                .map(|analysis| analysis.pairs_at_analysis)
        };
        assert_eq!([1.0, 5.0, 20.0, 40.0].map(first), [Some(10), Some(12), Some(14), Some(14)]);
        let at_the_end = |cases: f64| {
            AlphaSpendingSchedule::for_level_and_most_pairs(0.01 / cases, 48)
                .fewest_pairs_for_final_significance(0.01 / cases)
        };
        assert_eq!([1.0, 5.0, 20.0, 40.0].map(at_the_end), [8, 10, 12, 13]);
    }

    #[test]
    fn analyses_for_unchanged_take_place_at_doubling_blocks_and_at_the_end() {
        let analyses = |settle_blocks, max_blocks| {
            let plan = ComparisonTestPlan {
                min_blocks_for_unchanged: settle_blocks,
                max_trial_blocks: max_blocks,
                max_missed_change_probability: 0.06,
                ..ComparisonTestPlan::default()
            };
            let UnchangedAnalysisSchedule {
                pairs_at_early_analyses: early,
                early_tail_probability: early_tail,
                final_tail_probability: last_tail,
            } = UnchangedAnalysisSchedule::for_test_plan(&plan);
            let spent = early.len() as f64 * early_tail + last_tail;
            assert!((spent - 0.03).abs() < 1e-12, "{early:?}");
            (early, (1e3 * last_tail).round())
        };
        assert_eq!(analyses(24, 96), (vec![48, 96], 20.0));
        assert_eq!(analyses(24, 97), (vec![48, 96, 192], 20.0));
        assert_eq!(
            [analyses(24, 24), analyses(0, 96), analyses(100, 8)],
            [(vec![], 30.0), (vec![], 30.0), (vec![], 30.0)]
        );
        assert_eq!(
            fewest_pairs_that_can_reach_level(
                UnchangedAnalysisSchedule::for_test_plan(&ComparisonTestPlan::default())
                    .final_tail_probability
            ),
            6
        );
    }

    #[test]
    fn the_sequential_p_value_is_the_smallest_p_divided_by_its_weight() {
        let analyses = [
            WeightedInterimAnalysis { pairs_at_analysis: 4, alpha_share: 0.25 },
            WeightedInterimAnalysis { pairs_at_analysis: 8, alpha_share: 0.5 },
        ];
        assert_eq!(
            p_value_valid_at_any_stop(analyses.into_iter(), |pairs| if pairs == 4 {
                0.01
            } else {
                0.1
            }),
            (0.04, 4)
        );
        assert_eq!(p_value_valid_at_any_stop([].into_iter(), |_| 0.0), (1.0, 0));
    }
}
