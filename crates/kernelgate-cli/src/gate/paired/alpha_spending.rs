//! Interim analyses of a comparison, and the alpha that each may spend.
//!
//! A test that is repeated as data arrive finds something sooner or later. Every interim analysis
//! has a weight; the weights sum to one, and the p value of an analysis is divided by its weight.
//! By the union bound, the smallest of these divided values is a valid p value at any stopping
//! time, however the analyses depend on each other. The analyses are fixed by the plan and the
//! number of cases before the first block.

use super::TestPlan;
use kernelgate::stats::power::fewest_pairs_for_level;

/// Weight of the analysis at the end of the blocks, which most comparisons of unchanged builds
/// reach.
pub const FINAL_ANALYSIS_WEIGHT: f64 = 0.5;
/// Weight of the end among the analyses at which a case may be unchanged by the tolerated change.
/// With half of the weight for all other analyses, six pairs suffice at the end.
const FINAL_UNCHANGED_WEIGHT: f64 = 2.0 / 3.0;
/// Weight of the first interim analysis, where large changes are found.
const FIRST_ANALYSIS_WEIGHT: f64 = 0.25;
/// Factor by which the number of pairs grows from one interim analysis to the next.
const ANALYSIS_PAIRS_GROWTH: f64 = 1.4;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InterimAnalysis {
    /// Number of pairs after which the interim analysis takes place.
    pub pairs: usize,
    /// Share of alpha that the interim analysis spends.
    pub weight: f64,
}

/// The interim analyses of a test, and the share of alpha that each spends.
#[derive(Debug, Clone, PartialEq)]
pub struct AlphaSpending {
    /// Interim analyses before the final one, in the order of their numbers of pairs.
    early: Vec<InterimAnalysis>,
    /// Weight of the analysis at the end.
    last: f64,
}

impl AlphaSpending {
    /// Alpha spending of a test at `level`, of at most `most` pairs. The first analysis takes the
    /// fewest pairs (an even number) that can reach the level times its weight; if that is not
    /// fewer than `most`, only the end is analysed.
    ///
    /// The end has its own weight, whenever it comes, because the time that is left may determine
    /// it, but never the results.
    pub fn new(level: f64, most: usize) -> Self {
        let mut early = Vec::new();
        let mut pairs =
            fewest_pairs_for_level(level * FIRST_ANALYSIS_WEIGHT).div_ceil(2).saturating_mul(2);
        while pairs < most {
            early.push(InterimAnalysis { pairs, weight: FIRST_ANALYSIS_WEIGHT });
            pairs = (pairs as f64 * ANALYSIS_PAIRS_GROWTH / 2.0).ceil() as usize * 2;
        }
        let later = early.len().saturating_sub(1);
        for analysis in early.iter_mut().skip(1) {
            analysis.weight = (1.0 - FINAL_ANALYSIS_WEIGHT - FIRST_ANALYSIS_WEIGHT) / later as f64;
        }
        if early.is_empty() {
            return Self { early, last: 1.0 };
        }
        Self { early, last: FINAL_ANALYSIS_WEIGHT }
    }

    /// Returns the analyses that this number of pairs allows; after the last block only the final
    /// one is added.
    pub fn analyses_up_to(
        &self,
        pairs: usize,
        ended: bool,
    ) -> impl Iterator<Item = InterimAnalysis> {
        let last = (ended && pairs > 0).then_some(InterimAnalysis { pairs, weight: self.last });
        self.early.iter().copied().filter(move |analysis| analysis.pairs <= pairs).chain(last)
    }

    /// Returns the first interim analysis with at least this number of pairs; `None` if only the
    /// final one follows.
    pub fn next_analysis_from(&self, pairs: usize) -> Option<usize> {
        self.early.iter().map(|analysis| analysis.pairs).find(|analysis| *analysis >= pairs)
    }

    /// Smallest number of pairs with which a test at `level` can be significant at its end.
    pub fn fewest_pairs(&self, level: f64) -> usize {
        fewest_pairs_for_level(level * self.last)
    }
}

/// Analyses at which a case may be declared unchanged, because changes above the tolerated one are
/// excluded.
#[derive(Debug, Clone, PartialEq)]
pub struct UnchangedAnalyses {
    /// Numbers of pairs after which such an analysis takes place before the end.
    pub early: Vec<usize>,
    /// Probability that each of these analyses may spend on either end of the interval.
    pub early_tail: f64,
    /// Probability that the analysis at the end may spend on either end of the interval.
    pub last_tail: f64,
}

impl UnchangedAnalyses {
    /// After the pairs of `plan.settle_blocks`, after twice as many and so on, and at the end,
    /// which has most of the probability, because a comparison of long cases reaches no other.
    pub fn new(plan: &TestPlan) -> Self {
        let (first, most) =
            (plan.settle_blocks.saturating_mul(2), plan.max_blocks.saturating_mul(2));
        let doubled = std::iter::successors(Some(first).filter(|first| *first > 0), |pairs| {
            pairs.checked_mul(2)
        });
        let early: Vec<usize> = doubled.take_while(|pairs| *pairs < most).collect();
        let all = FINAL_ANALYSIS_WEIGHT * plan.missed;
        let last_tail = if early.is_empty() { all } else { FINAL_UNCHANGED_WEIGHT * all };
        let early_tail = (all - last_tail) / early.len().max(1) as f64;
        Self { early, early_tail, last_tail }
    }
}

/// A p value that is valid at any interim analysis: the smallest over the analyses of p over
/// weight, with the pairs of that analysis.
pub fn always_valid_p(
    analyses: impl Iterator<Item = InterimAnalysis>,
    p: impl Fn(usize) -> f64,
) -> (f64, usize) {
    analyses
        .map(|analysis| ((p(analysis.pairs) / analysis.weight).min(1.0), analysis.pairs))
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
                let spending = AlphaSpending::new(level, most);
                let all: Vec<InterimAnalysis> = spending.analyses_up_to(most, true).collect();
                let spent: f64 = all.iter().map(|analysis| analysis.weight).sum();
                assert!((0.75 - 1e-12..=1.0 + 1e-12).contains(&spent), "{cases} {most}: {all:?}");
                assert!(all.windows(2).all(|pair| pair[0].pairs < pair[1].pairs), "{all:?}");
                if all.len() > 1 {
                    assert!(0.5f64.powi(all[0].pairs as i32) <= level * all[0].weight);
                }
            }
        }
    }

    /// Compares the analyses with the numbers of docs/concepts/decision.md.
    #[test]
    fn the_fewest_pairs_that_can_show_a_regression_are_known() {
        let first = |cases: f64| {
            AlphaSpending::new(0.01 / cases, 48)
                .analyses_up_to(48, false)
                .next()
                .map(|analysis| analysis.pairs)
        };
        assert_eq!([1.0, 5.0, 20.0, 40.0].map(first), [Some(10), Some(12), Some(14), Some(14)]);
        let at_the_end =
            |cases: f64| AlphaSpending::new(0.01 / cases, 48).fewest_pairs(0.01 / cases);
        assert_eq!([1.0, 5.0, 20.0, 40.0].map(at_the_end), [8, 10, 12, 13]);
    }

    #[test]
    fn analyses_for_unchanged_take_place_at_doubling_blocks_and_at_the_end() {
        let analyses = |settle_blocks, max_blocks| {
            let plan = TestPlan { settle_blocks, max_blocks, missed: 0.06, ..TestPlan::default() };
            let UnchangedAnalyses { early, early_tail, last_tail } = UnchangedAnalyses::new(&plan);
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
            fewest_pairs_for_level(UnchangedAnalyses::new(&TestPlan::default()).last_tail),
            6
        );
    }

    #[test]
    fn the_sequential_p_value_is_the_smallest_p_divided_by_its_weight() {
        let analyses =
            [InterimAnalysis { pairs: 4, weight: 0.25 }, InterimAnalysis { pairs: 8, weight: 0.5 }];
        assert_eq!(
            always_valid_p(analyses.into_iter(), |pairs| if pairs == 4 { 0.01 } else { 0.1 }),
            (0.04, 4)
        );
        assert_eq!(always_valid_p([].into_iter(), |_| 0.0), (1.0, 0));
    }
}
