//! Wilcoxon's signed-rank test (1945) for paired differences, with its exact distribution.
//!
//! Under the null hypothesis each difference has either sign with probability ½; the test assumes
//! nothing else, so outliers and heavy tails cost power and never validity.

use std::sync::OnceLock;

use super::normal;

/// Largest number of differences for which the signed-rank test is exact; with more differences the
/// normal approximation is used.
pub const MAX_PAIRS_OF_EXACT_SIGNED_RANK_TEST: usize = 128;

/// One-sided p value for an upward shift: the probability, over all signs, of a positive rank sum
/// at least as large as the observed one.
///
/// Differences of 0 are dropped, as Wilcoxon did; differences of equal size share the mean of their
/// ranks, and the exact distribution uses the shared ranks. For more than
/// [`MAX_PAIRS_OF_EXACT_SIGNED_RANK_TEST`] differences the p value is a normal approximation with
/// continuity and tie correction. The p value is 1 if a difference is NaN, or if no difference is
/// left.
pub fn signed_rank_p_value_for_upward_shift(differences: &[f64]) -> f64 {
    if differences.iter().any(|difference| difference.is_nan()) {
        return 1.0;
    }
    let ranks = doubled_ranks_and_signs(differences);
    let total: usize = ranks.iter().map(|(rank, _)| rank).sum();
    // Positive and negative rank sum have the same distribution, and a large positive sum means a
    // small negative sum, so the lower tail is computed.
    let negative: usize =
        ranks.iter().filter(|(_, positive)| !positive).map(|(rank, _)| rank).sum();
    if ranks.is_empty() {
        1.0
    } else if ranks.len() <= MAX_PAIRS_OF_EXACT_SIGNED_RANK_TEST {
        lower_tail_of_doubled_rank_sum(
            &ranks.into_iter().map(|(rank, _)| rank).collect::<Vec<_>>(),
            negative,
        )
    } else {
        let squares: f64 = ranks.iter().map(|(rank, _)| (*rank as f64).powi(2)).sum();
        // A step of one rank is a step of two in doubled ranks, so the continuity correction of
        // half a rank is 1.
        normal::standard_normal_cdf(
            (negative as f64 - 0.5 * total as f64 + 1.0) / (0.25 * squares).sqrt(),
        )
        .min(1.0)
    }
}

/// Largest rank sum s of `pairs` untied differences with P(sum <= s) at most `tail`; `None` if
/// P(sum <= 0) = 2⁻ⁿ is already larger. For more than [`MAX_PAIRS_OF_EXACT_SIGNED_RANK_TEST`] pairs
/// the rank sum is a normal approximation with continuity correction.
pub fn critical_signed_rank_sum(pairs: usize, tail: f64) -> Option<usize> {
    let total = pairs * (pairs + 1) / 2;
    if pairs == 0 || tail.is_nan() || tail < 0.5f64.powi(pairs.try_into().unwrap_or(i32::MAX)) {
        return None;
    }
    if pairs > MAX_PAIRS_OF_EXACT_SIGNED_RANK_TEST {
        let n = pairs as f64;
        let sd = (n * (n + 1.0) * (2.0 * n + 1.0) / 24.0).sqrt();
        let sum = 0.5 * total as f64 - 0.5 + sd * normal::standard_normal_quantile(tail.min(0.5));
        return (sum >= 0.0).then_some(sum as usize);
    }
    cumulative_rank_sum_probabilities(pairs).partition_point(|below| *below <= tail).checked_sub(1)
}

/// Probability that doubled ranks, each included with probability ½, sum to at most `sum`; computed
/// from the nearer end of the distribution.
fn lower_tail_of_doubled_rank_sum(doubled: &[usize], sum: usize) -> f64 {
    let untied = doubled.iter().enumerate().all(|(index, rank)| *rank == 2 * (index + 1));
    // Without ties only even doubled rank sums occur, so sums are halved.
    let unit = if untied { 2 } else { 1 };
    let (sum, total) = (sum / unit, doubled.iter().sum::<usize>() / unit);
    if sum >= total {
        return 1.0;
    }
    let at_most = |sum: usize| match untied {
        true => cumulative_rank_sum_probabilities(doubled.len())[sum],
        false => probabilities_of_rank_sums_up_to(doubled.iter().copied(), sum).iter().sum(),
    };
    let above = total - sum - 1;
    if above < sum { 1.0 - at_most(above) } else { at_most(sum).min(1.0) }
}

/// Cumulative probabilities P(sum <= 0), P(sum <= 1), … of the signed-rank sum of `pairs` untied
/// differences, at most [`MAX_PAIRS_OF_EXACT_SIGNED_RANK_TEST`]. The probabilities are computed
/// once per process for each number of pairs, because kernelgate's sequential comparison needs them
/// after every block of pairs.
fn cumulative_rank_sum_probabilities(pairs: usize) -> &'static [f64] {
    static RANK_SUM_PROBABILITIES: [OnceLock<Vec<f64>>; MAX_PAIRS_OF_EXACT_SIGNED_RANK_TEST + 1] =
        [const { OnceLock::new() }; MAX_PAIRS_OF_EXACT_SIGNED_RANK_TEST + 1];
    RANK_SUM_PROBABILITIES[pairs].get_or_init(|| {
        let mut below = 0.0;
        let cumulated = probabilities_of_rank_sums_up_to(1..=pairs, pairs * (pairs + 1) / 2)
            .into_iter()
            .map(|probability| {
                below += probability;
                below
            });
        cumulated.collect()
    })
}

/// Returns the probability of each rank sum from 0 to `most`, if each rank is included with
/// probability ½.
fn probabilities_of_rank_sums_up_to(
    ranks: impl IntoIterator<Item = usize>,
    most: usize,
) -> Vec<f64> {
    let mut probability = vec![0.0; most + 1];
    probability[0] = 1.0;
    for rank in ranks {
        for sum in (0..=most).rev() {
            let with = if sum >= rank { probability[sum - rank] } else { 0.0 };
            probability[sum] = 0.5 * (probability[sum] + with);
        }
    }
    probability
}

/// Returns for each nonzero difference twice the rank of its size, so that shared ranks are whole
/// numbers, and whether it is positive.
fn doubled_ranks_and_signs(differences: &[f64]) -> Vec<(usize, bool)> {
    let mut sorted: Vec<f64> =
        differences.iter().copied().filter(|difference| *difference != 0.0).collect();
    sorted.sort_by(|a, b| a.abs().total_cmp(&b.abs()));
    let mut ranks = Vec::with_capacity(sorted.len());
    for group in sorted.chunk_by(|a, b| a.abs() == b.abs()) {
        // A group of equal sizes has the ranks from ranks.len() + 1 to ranks.len() + group.len(),
        // whose doubled mean each member gets.
        let doubled = 2 * ranks.len() + 1 + group.len();
        ranks.extend(group.iter().map(|difference| (doubled, *difference > 0.0)));
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Computes the signed-rank p value by enumerating all combinations of signs.
    fn p_value_by_enumerating_signs(differences: &[f64]) -> f64 {
        let ranks = doubled_ranks_and_signs(differences);
        let sum = |signs: u32| {
            ranks
                .iter()
                .enumerate()
                .filter(|(i, _)| signs >> i & 1 == 1)
                .map(|(_, (rank, _))| rank)
                .sum::<usize>()
        };
        let seen: usize =
            ranks.iter().filter(|(_, positive)| *positive).map(|(rank, _)| rank).sum();
        let all = 1u32 << ranks.len();
        f64::from(u32::try_from((0..all).filter(|&signs| sum(signs) >= seen).count()).unwrap())
            / f64::from(all)
    }

    /// Darwin's maize (Fisher 1935): Darwin's maize heights have a negative rank sum of 24 for 15
    /// pairs, and a two-sided p = 0.04126 (R's `wilcox.test`).
    #[test]
    fn signed_rank_p_values_match_known_values() {
        let maize = [
            49.0, -67.0, 8.0, 16.0, 6.0, 23.0, 28.0, 41.0, 14.0, 29.0, 56.0, 24.0, 75.0, 60.0,
            -48.0,
        ];
        assert!(
            (2.0 * signed_rank_p_value_for_upward_shift(&maize) - 0.041_26).abs() < 1e-5,
            "{}",
            2.0 * signed_rank_p_value_for_upward_shift(&maize)
        );
        assert_eq!(signed_rank_p_value_for_upward_shift(&[1.0, 2.0, 3.0]), 0.125);
        assert_eq!(signed_rank_p_value_for_upward_shift(&[-1.0, -2.0, -3.0]), 1.0);
        assert_eq!(signed_rank_p_value_for_upward_shift(&[0.0, 1.0, 0.0]), 0.5);
        assert_eq!(
            (
                signed_rank_p_value_for_upward_shift(&[]),
                signed_rank_p_value_for_upward_shift(&[0.0]),
                signed_rank_p_value_for_upward_shift(&[f64::NAN, 1.0])
            ),
            (1.0, 1.0, 1.0)
        );
        // With two tied differences the ranks are 1.5, 1.5 and 3; the negative rank sum is 1.5 or
        // less for 3 of the 8 sign combinations.
        assert_eq!(signed_rank_p_value_for_upward_shift(&[1.0, -1.0, 2.0]), 0.375);
    }

    /// Expected values: one-sided critical values of the signed-rank statistic from Hollander and
    /// Wolfe, table A.4.
    #[test]
    fn critical_signed_rank_sums_equal_published_tables() {
        let table = [
            (5, 0.05, Some(0)),
            (5, 0.025, None),
            (6, 0.025, Some(0)),
            (8, 0.025, Some(3)),
            (10, 0.05, Some(10)),
        ];
        for (pairs, tail, sum) in table.into_iter().chain([
            (10, 0.005, Some(3)),
            (20, 0.025, Some(52)),
            (30, 0.025, Some(137)),
        ]) {
            assert_eq!(critical_signed_rank_sum(pairs, tail), sum, "{pairs} pairs at {tail}");
        }
        assert_eq!(
            (critical_signed_rank_sum(0, 0.5), critical_signed_rank_sum(12, f64::NAN)),
            (None, None)
        );
    }

    #[test]
    fn the_normal_approximation_continues_the_exact_p_values() {
        // From 128 to 129 differences, the added large positive difference multiplies p by about
        // 0.6.
        let shifted = |n: i32| -> Vec<f64> {
            (1..=n).map(|i| f64::from(if i % 3 == 1 { -i } else { i })).collect()
        };
        let (exact, beyond) = (
            signed_rank_p_value_for_upward_shift(&shifted(128)),
            signed_rank_p_value_for_upward_shift(&shifted(129)),
        );
        assert!((0.5..0.8).contains(&(beyond / exact)), "{exact} {beyond}");
        let (exact, beyond) = (
            critical_signed_rank_sum(128, 0.01).unwrap(),
            critical_signed_rank_sum(129, 0.01).unwrap(),
        );
        assert!((45..60).contains(&(beyond - exact)), "{exact} {beyond}");
    }

    proptest! {
        #[test]
        fn signed_rank_p_values_equal_enumeration_with_ties_and_zeros(values in prop::collection::vec(-4i8..=5, 0..11)) {
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            prop_assert!((signed_rank_p_value_for_upward_shift(&values) - p_value_by_enumerating_signs(&values)).abs() < 1e-12);
        }

        #[test]
        fn signed_rank_p_values_ignore_scale_and_fall_with_a_shift(
            values in prop::collection::vec(-1.0f64..1.0, 1..40),
            by in 0.0f64..0.5,
        ) {
            let map =
                |f: &dyn Fn(f64) -> f64| signed_rank_p_value_for_upward_shift(&values.iter().map(|v| f(*v)).collect::<Vec<_>>());
            prop_assert_eq!(map(&|v| 4.0 * v), signed_rank_p_value_for_upward_shift(&values));
            prop_assert!(map(&|v| v + by) <= signed_rank_p_value_for_upward_shift(&values) + 1e-12);
            // The p values for both directions add to more than 1, because both include the
            // probability of the observed sum.
            prop_assert!(signed_rank_p_value_for_upward_shift(&values) + map(&|v| -v) > 1.0 - 1e-12);
        }

        #[test]
        fn the_critical_rank_sum_is_the_largest_within_the_tail(
            pairs in 1usize..60,
            tail in 1e-6f64..0.5,
        ) {
            let p =
                |sum| lower_tail_of_doubled_rank_sum(&(1..=pairs).map(|rank| 2 * rank).collect::<Vec<_>>(), 2 * sum);
            match critical_signed_rank_sum(pairs, tail) {
                Some(sum) => {
                    prop_assert!(p(sum) <= tail * (1.0 + 1e-9) && p(sum + 1) > tail * (1.0 - 1e-9))
                }
                None => prop_assert!(p(0) > tail),
            }
        }
    }
}
