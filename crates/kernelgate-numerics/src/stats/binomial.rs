//! Confidence intervals for the probability of an event from its observed frequency: exact
//! intervals after Clopper and Pearson.

/// Number of bisection steps on the interval from 0 to 1 that brings the error below the last digit
/// of an f64.
const PROBABILITY_BISECTION_STEPS: usize = 60;

/// Upper one-sided confidence bound of an event's probability: the largest p at which `hits` or
/// fewer of `trials` have a probability of `error`; 1 without trials.
pub fn upper_bound_of_probability(hits: usize, trials: usize, error: f64) -> f64 {
    if hits >= trials {
        return 1.0;
    }
    // The probability of at most `hits` hits falls as p rises, so bisection finds the largest p.
    largest_argument_by_bisection(|p| binomial_cdf(hits, trials, p) > error)
}

/// Lower one-sided confidence bound of an event's probability: the smallest p at which `hits` or
/// more have a probability of `error`; 0 without hits.
pub fn lower_bound_of_probability(hits: usize, trials: usize, error: f64) -> f64 {
    1.0 - upper_bound_of_probability(trials.saturating_sub(hits), trials, error)
}

/// Two-sided 95 % confidence interval of an event's probability; each end is wrong with a
/// probability of at most 2.5 %.
pub fn probability_interval_95(hits: usize, trials: usize) -> (f64, f64) {
    if trials == 0 {
        return (0.0, 1.0);
    }
    (
        lower_bound_of_probability(hits, trials, 0.025),
        upper_bound_of_probability(hits, trials, 0.025),
    )
}

/// Confidence interval for the median of a distribution from independent values: the narrowest
/// between two values that misses it with at most `error`. Returns `None` if there are too few
/// values for an interval with this `error`.
pub fn confidence_interval_of_median(values: &[f64], error: f64) -> Option<[f64; 2]> {
    let count = values.len();
    let both_ends = |hits: &usize| 2.0 * binomial_cdf(*hits, count, 0.5);
    let beyond = (0..count / 2).take_while(|hits| both_ends(hits) <= error).count();
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let low = beyond.checked_sub(1)?;
    Some([sorted[low], sorted[count - beyond]])
}

/// Finds by bisection the largest argument between 0 and 1 at which a condition holds that holds at
/// 0.
fn largest_argument_by_bisection(holds: impl Fn(f64) -> bool) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..PROBABILITY_BISECTION_STEPS {
        let middle = 0.5 * (low + high);
        if holds(middle) { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

/// Returns P(X <= hits) of a binomial distribution; sums its terms from their logarithms, so that
/// no term underflows.
fn binomial_cdf(hits: usize, trials: usize, p: f64) -> f64 {
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

    /// Expected values: the upper bound for 0 of n is 1 - error^(1/n); the other values are from
    /// R's `binom.test`.
    #[test]
    fn the_binomial_interval_matches_r_and_the_closed_form() {
        assert!(
            (upper_bound_of_probability(0, 200, 0.05) - (1.0 - 0.05f64.powf(1.0 / 200.0))).abs()
                < 1e-12
        );
        assert!((upper_bound_of_probability(0, 200, 0.05) - 0.014_867).abs() < 1e-6);
        let close = |found: (f64, f64), low: f64, high: f64| {
            assert!((found.0 - low).abs() < 1e-6 && (found.1 - high).abs() < 1e-6, "{found:?}");
        };
        close(probability_interval_95(1, 20), 0.001_265_09, 0.248_732_76);
        close(probability_interval_95(19, 20), 0.751_267_24, 0.998_734_91);
        close(probability_interval_95(5, 10), 0.187_086_03, 0.812_913_97);
        close(probability_interval_95(20, 20), 0.831_566_52, 1.0);
        assert_eq!(
            (
                upper_bound_of_probability(0, 0, 0.05),
                upper_bound_of_probability(3, 3, 0.05),
                lower_bound_of_probability(0, 9, 0.05),
                probability_interval_95(0, 0)
            ),
            (1.0, 1.0, 0.0, (0.0, 1.0))
        );
    }

    /// Expected values: ranks from published tables of the sign test.
    #[test]
    fn the_median_interval_lies_between_two_ranks_of_the_sign_test() {
        let ranks = |count: usize, error| {
            let values: Vec<f64> = (1..=count).rev().map(|rank| rank as f64).collect();
            confidence_interval_of_median(&values, error)
        };
        assert_eq!((ranks(0, 0.05), ranks(5, 0.05)), (None, None));
        assert_eq!((ranks(6, 0.05), ranks(7, 0.01)), (Some([1.0, 6.0]), None));
        assert_eq!((ranks(16, 0.05), ranks(16, 0.01)), (Some([4.0, 13.0]), Some([3.0, 14.0])));
        let [low, high] = ranks(10_000, 0.05).unwrap();
        assert!((low - 4902.0).abs() <= 1.0 && (high - 5099.0).abs() <= 1.0, "{low} {high}");
    }

    proptest! {
        #[test]
        fn the_binomial_interval_contains_the_share_and_narrows(
            trials in 1usize..400,
            share in 0.0f64..=1.0,
        ) {
            let hits = (share * trials as f64) as usize;
            let (low, high) = probability_interval_95(hits, trials);
            let seen = hits as f64 / trials as f64;
            prop_assert!(low <= seen && seen <= high && low >= 0.0 && high <= 1.0);
            let (lower_later, higher_later) = probability_interval_95(10 * hits, 10 * trials);
            prop_assert!(higher_later - lower_later < high - low);
            prop_assert!((probability_interval_95(trials - hits, trials).0 - (1.0 - high)).abs() < 1e-9);
        }
    }
}
