//! Wilcoxon's signed-rank test (1945) with its exact distribution.
//!
//! Under H0 each difference is as likely to have either sign, given its size: nothing else is
//! assumed of the distribution, so outliers and heavy tails cost power and never validity.

use std::sync::OnceLock;

use super::normal;

/// Differences up to which the distribution is counted out; beyond, the normal approximation.
pub const MAX_EXACT_PAIRS: usize = 128;

/// One-sided p value of the hypothesis "symmetric about at most zero" against "shifted upwards":
/// the probability, over all signs, of rank sums of positive differences at least as large as the
/// observed sum.
///
/// Zero differences are dropped, as Wilcoxon did; differences of equal size share the mean of their
/// ranks, and the distribution is that of these ranks. More than [`MAX_EXACT_PAIRS`] differences
/// use the normal approximation with continuity and tie correction. The p value is 1 if there is a
/// NaN, or no difference at all.
pub fn signed_rank_p_greater(differences: &[f64]) -> f64 {
    if differences.iter().any(|difference| difference.is_nan()) {
        return 1.0;
    }
    let ranks = doubled_signed_ranks(differences);
    let total: usize = ranks.iter().map(|(rank, _)| rank).sum();
    // Both rank sums have the same distribution, and a large positive sum means a small negative
    // sum.
    let negative: usize =
        ranks.iter().filter(|(_, positive)| !positive).map(|(rank, _)| rank).sum();
    if ranks.is_empty() {
        1.0
    } else if ranks.len() <= MAX_EXACT_PAIRS {
        rank_sum_lower_tail(&ranks.into_iter().map(|(rank, _)| rank).collect::<Vec<_>>(), negative)
    } else {
        let squares: f64 = ranks.iter().map(|(rank, _)| (*rank as f64).powi(2)).sum();
        // A step of one rank is two in doubled ranks, so half a step is one.
        normal::normal_cdf((negative as f64 - 0.5 * total as f64 + 1.0) / (0.25 * squares).sqrt())
            .min(1.0)
    }
}

/// Largest rank sum s of `pairs` differences without ties with P(sum <= s) at most `tail`; none
/// where even 0 is likelier: with n pairs no p value is below 2⁻ⁿ. Beyond [`MAX_EXACT_PAIRS`]
/// differences a normal approximation with continuity correction is used.
pub fn critical_rank_sum(pairs: usize, tail: f64) -> Option<usize> {
    let total = pairs * (pairs + 1) / 2;
    if pairs == 0 || tail.is_nan() || tail < 0.5f64.powi(pairs.try_into().unwrap_or(i32::MAX)) {
        return None;
    }
    if pairs > MAX_EXACT_PAIRS {
        let n = pairs as f64;
        let sd = (n * (n + 1.0) * (2.0 * n + 1.0) / 24.0).sqrt();
        let sum = 0.5 * total as f64 - 0.5 + sd * normal::normal_quantile(tail.min(0.5));
        return (sum >= 0.0).then_some(sum as usize);
    }
    rank_sum_probabilities(pairs).partition_point(|below| *below <= tail).checked_sub(1)
}

/// Probability that the doubled ranks of a random half (each in with probability ½) sum up to at
/// most `sum`, counted from the nearer end.
fn rank_sum_lower_tail(doubled: &[usize], sum: usize) -> f64 {
    let untied = doubled.iter().enumerate().all(|(index, rank)| *rank == 2 * (index + 1));
    // Without ties only even values of the doubled rank sum occur.
    let unit = if untied { 2 } else { 1 };
    let (sum, total) = (sum / unit, doubled.iter().sum::<usize>() / unit);
    if sum >= total {
        return 1.0;
    }
    let at_most = |sum: usize| match untied {
        true => rank_sum_probabilities(doubled.len())[sum],
        false => rank_sum_distribution(doubled.iter().copied(), sum).iter().sum(),
    };
    let above = total - sum - 1;
    if above < sum { 1.0 - at_most(above) } else { at_most(sum).min(1.0) }
}

/// Probabilities of rank sums of at most 0, 1, 2, … for `pairs` ranks without ties, at most
/// [`MAX_EXACT_PAIRS`]. The distributions are computed once per process, because a gate needs them
/// after every block.
fn rank_sum_probabilities(pairs: usize) -> &'static [f64] {
    static RANK_SUM_PROBABILITIES: [OnceLock<Vec<f64>>; MAX_EXACT_PAIRS + 1] =
        [const { OnceLock::new() }; MAX_EXACT_PAIRS + 1];
    RANK_SUM_PROBABILITIES[pairs].get_or_init(|| {
        let mut below = 0.0;
        let cumulated = rank_sum_distribution(1..=pairs, pairs * (pairs + 1) / 2).into_iter().map(
            |probability| {
                below += probability;
                below
            },
        );
        cumulated.collect()
    })
}

/// Returns the probabilities of the rank sums 0 to `most`.
fn rank_sum_distribution(ranks: impl IntoIterator<Item = usize>, most: usize) -> Vec<f64> {
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

/// Twice the rank of each size, so that half ranks are whole numbers, and whether the difference is
/// positive; zeros are dropped.
fn doubled_signed_ranks(differences: &[f64]) -> Vec<(usize, bool)> {
    let mut sorted: Vec<f64> =
        differences.iter().copied().filter(|difference| *difference != 0.0).collect();
    sorted.sort_by(|a, b| a.abs().total_cmp(&b.abs()));
    let mut ranks = Vec::with_capacity(sorted.len());
    for group in sorted.chunk_by(|a, b| a.abs() == b.abs()) {
        // First and last rank of the group are ranks.len() + 1 and ranks.len() + group.len().
        let doubled = 2 * ranks.len() + 1 + group.len();
        ranks.extend(group.iter().map(|difference| (doubled, *difference > 0.0)));
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Computes the p value by enumeration of all signs.
    fn enumerated_p_value(differences: &[f64]) -> f64 {
        let ranks = doubled_signed_ranks(differences);
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

    /// Darwin's maize (Fisher 1935): W- = 24 of 15 pairs, two-sided p = 0.04126 (R's wilcox.test).
    #[test]
    fn wilcoxon_p_values_match_known_values() {
        let maize = [
            49.0, -67.0, 8.0, 16.0, 6.0, 23.0, 28.0, 41.0, 14.0, 29.0, 56.0, 24.0, 75.0, 60.0,
            -48.0,
        ];
        assert!(
            (2.0 * signed_rank_p_greater(&maize) - 0.041_26).abs() < 1e-5,
            "{}",
            2.0 * signed_rank_p_greater(&maize)
        );
        assert_eq!(signed_rank_p_greater(&[1.0, 2.0, 3.0]), 0.125);
        assert_eq!(signed_rank_p_greater(&[-1.0, -2.0, -3.0]), 1.0);
        assert_eq!(signed_rank_p_greater(&[0.0, 1.0, 0.0]), 0.5);
        assert_eq!(
            (
                signed_rank_p_greater(&[]),
                signed_rank_p_greater(&[0.0]),
                signed_rank_p_greater(&[f64::NAN, 1.0])
            ),
            (1.0, 1.0, 1.0)
        );
        // A tie: ranks 1.5, 1.5, 3 and the negative sum 1.5 or less in 3 of 8 cases.
        assert_eq!(signed_rank_p_greater(&[1.0, -1.0, 2.0]), 0.375);
    }

    /// Tables of the signed-rank statistic, one-sided (Hollander and Wolfe, table A.4).
    #[test]
    fn critical_values_equal_published_wilcoxon_tables() {
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
            assert_eq!(critical_rank_sum(pairs, tail), sum, "{pairs} pairs at {tail}");
        }
        assert_eq!((critical_rank_sum(0, 0.5), critical_rank_sum(12, f64::NAN)), (None, None));
    }

    #[test]
    fn the_normal_approximation_continues_the_exact_p_values() {
        // One more large positive difference multiplies p by about 0.6.
        let shifted = |n: i32| -> Vec<f64> {
            (1..=n).map(|i| f64::from(if i % 3 == 1 { -i } else { i })).collect()
        };
        let (exact, beyond) =
            (signed_rank_p_greater(&shifted(128)), signed_rank_p_greater(&shifted(129)));
        assert!((0.5..0.8).contains(&(beyond / exact)), "{exact} {beyond}");
        let (exact, beyond) =
            (critical_rank_sum(128, 0.01).unwrap(), critical_rank_sum(129, 0.01).unwrap());
        assert!((45..60).contains(&(beyond - exact)), "{exact} {beyond}");
    }

    proptest! {
        #[test]
        fn wilcoxon_p_values_equal_counting_with_ties_and_zeros(values in prop::collection::vec(-4i8..=5, 0..11)) {
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            prop_assert!((signed_rank_p_greater(&values) - enumerated_p_value(&values)).abs() < 1e-12);
        }

        #[test]
        fn the_wilcoxon_test_ignores_scale_and_an_upward_shift_lowers_p(
            values in prop::collection::vec(-1.0f64..1.0, 1..40),
            by in 0.0f64..0.5,
        ) {
            let map =
                |f: &dyn Fn(f64) -> f64| signed_rank_p_greater(&values.iter().map(|v| f(*v)).collect::<Vec<_>>());
            prop_assert_eq!(map(&|v| 4.0 * v), signed_rank_p_greater(&values));
            prop_assert!(map(&|v| v + by) <= signed_rank_p_greater(&values) + 1e-12);
            // The two directions overlap in the probability of the observed sum.
            prop_assert!(signed_rank_p_greater(&values) + map(&|v| -v) > 1.0 - 1e-12);
        }

        #[test]
        fn the_critical_rank_sum_is_the_largest_within_the_tail(
            pairs in 1usize..60,
            tail in 1e-6f64..0.5,
        ) {
            let p =
                |sum| rank_sum_lower_tail(&(1..=pairs).map(|rank| 2 * rank).collect::<Vec<_>>(), 2 * sum);
            match critical_rank_sum(pairs, tail) {
                Some(sum) => {
                    prop_assert!(p(sum) <= tail * (1.0 + 1e-9) && p(sum + 1) > tail * (1.0 - 1e-9))
                }
                None => prop_assert!(p(0) > tail),
            }
        }
    }
}
