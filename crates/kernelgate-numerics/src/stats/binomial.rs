//! How often something happens, from how often it happened: exact intervals after Clopper and
//! Pearson.

/// Bisections of the unit interval: its halves get smaller than the last digit.
const BISECTION_STEPS: usize = 60;

/// Upper end of the one-sided interval for a probability: the largest under which `hits` or fewer
/// of `trials` still happen with a probability of `error`. 1 without trials.
pub fn upper_confidence_bound(hits: usize, trials: usize, error: f64) -> f64 {
    if hits >= trials {
        return 1.0;
    }
    // The probability of at most `hits` hits falls as p rises, so bisection finds the bound.
    largest_holding_argument(|p| at_most_probability(hits, trials, p) > error)
}

/// Lower end: the smallest under which `hits` or more still happen with a probability of `error`. 0
/// without hits.
pub fn lower_confidence_bound(hits: usize, trials: usize, error: f64) -> f64 {
    1.0 - upper_confidence_bound(trials.saturating_sub(hits), trials, error)
}

/// The two-sided 95 % interval: each end wrong with a probability of at most 2.5 %.
pub fn proportion_interval(hits: usize, trials: usize) -> (f64, f64) {
    if trials == 0 {
        return (0.0, 1.0);
    }
    (lower_confidence_bound(hits, trials, 0.025), upper_confidence_bound(hits, trials, 0.025))
}

/// Interval for the median of a distribution, between two of these independent values: the
/// narrowest that misses the median with a probability of at most `error`. `None` for too few
/// values.
pub fn median_interval(values: &[f64], error: f64) -> Option<[f64; 2]> {
    let count = values.len();
    let both_ends = |hits: &usize| 2.0 * at_most_probability(*hits, count, 0.5);
    let beyond = (0..count / 2).take_while(|hits| both_ends(hits) <= error).count();
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let low = beyond.checked_sub(1)?;
    Some([sorted[low], sorted[count - beyond]])
}

/// Largest argument for which a condition that holds at 0 still holds.
fn largest_holding_argument(holds: impl Fn(f64) -> bool) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..BISECTION_STEPS {
        let middle = 0.5 * (low + high);
        if holds(middle) { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

/// P(X <= hits) of a binomial distribution, by its terms in logarithms, so that none underflows.
fn at_most_probability(hits: usize, trials: usize, p: f64) -> f64 {
    let (ln_p, ln_q) = (p.ln(), (-p).ln_1p());
    let mut ln_choose = 0.0;
    let mut sum = 0.0;
    for k in 0..=hits {
        sum += (ln_choose + k as f64 * ln_p + (trials - k) as f64 * ln_q).exp();
        ln_choose += (((trials - k) as f64) / (k + 1) as f64).ln();
    }
    sum.min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// 0 of n has the closed form 1 - error^(1/n); the rest as in R's `binom.test`.
    #[test]
    fn the_binomial_interval_matches_known_values() {
        assert!(
            (upper_confidence_bound(0, 200, 0.05) - (1.0 - 0.05f64.powf(1.0 / 200.0))).abs()
                < 1e-12
        );
        assert!((upper_confidence_bound(0, 200, 0.05) - 0.014_867).abs() < 1e-6);
        let close = |found: (f64, f64), low: f64, high: f64| {
            assert!((found.0 - low).abs() < 1e-6 && (found.1 - high).abs() < 1e-6, "{found:?}");
        };
        close(proportion_interval(1, 20), 0.001_265_09, 0.248_732_76);
        close(proportion_interval(19, 20), 0.751_267_24, 0.998_734_91);
        close(proportion_interval(5, 10), 0.187_086_03, 0.812_913_97);
        close(proportion_interval(20, 20), 0.831_566_52, 1.0);
        assert_eq!(
            (
                upper_confidence_bound(0, 0, 0.05),
                upper_confidence_bound(3, 3, 0.05),
                lower_confidence_bound(0, 9, 0.05),
                proportion_interval(0, 0)
            ),
            (1.0, 1.0, 0.0, (0.0, 1.0))
        );
    }

    /// The ranks of tables of the sign test.
    #[test]
    fn the_interval_of_a_median_is_between_two_ranks() {
        let ranks = |count: usize, error| {
            let values: Vec<f64> = (1..=count).rev().map(|rank| rank as f64).collect();
            median_interval(&values, error)
        };
        assert_eq!((ranks(0, 0.05), ranks(5, 0.05)), (None, None));
        assert_eq!((ranks(6, 0.05), ranks(7, 0.01)), (Some([1.0, 6.0]), None));
        assert_eq!((ranks(16, 0.05), ranks(16, 0.01)), (Some([4.0, 13.0]), Some([3.0, 14.0])));
        let [low, high] = ranks(10_000, 0.05).unwrap();
        assert!((low - 4902.0).abs() <= 1.0 && (high - 5099.0).abs() <= 1.0, "{low} {high}");
    }

    proptest! {
        #[test]
        fn the_binomial_interval_contains_the_observed_share_and_narrows(
            trials in 1usize..400,
            share in 0.0f64..=1.0,
        ) {
            let hits = (share * trials as f64) as usize;
            let (low, high) = proportion_interval(hits, trials);
            let seen = hits as f64 / trials as f64;
            prop_assert!(low <= seen && seen <= high && low >= 0.0 && high <= 1.0);
            let (lower_later, higher_later) = proportion_interval(10 * hits, 10 * trials);
            prop_assert!(higher_later - lower_later < high - low);
            prop_assert!((proportion_interval(trials - hits, trials).0 - (1.0 - high)).abs() < 1e-9);
        }
    }
}
