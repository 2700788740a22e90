//! Hodges-Lehmann estimate and confidence interval that belong to the signed-rank test.

use super::normal;
use super::signed_rank::critical_signed_rank_sum;

/// Walsh averages: the sorted means of every two differences, and each difference itself; the
/// signed-rank test accepts exactly the shifts between two of them (Hodges and Lehmann 1963;
/// Lehmann, Nonparametrics, section 4.3).
#[derive(Debug, Clone, PartialEq)]
pub struct WalshAverages {
    /// Sorted.
    sorted_walsh_averages: Vec<f64>,
    /// Differences.
    difference_count: usize,
}

impl WalshAverages {
    /// Computes the means of all pairs of differences, and of each with itself; drops NaN
    /// differences. The memory needed for the averages grows with the square of the number of
    /// differences.
    pub fn averages_of_all_pairs(differences: &[f64]) -> Self {
        let values: Vec<f64> =
            differences.iter().copied().filter(|value| !value.is_nan()).collect();
        let mut averages = Vec::with_capacity(values.len() * (values.len() + 1) / 2);
        for (i, a) in values.iter().enumerate() {
            averages.extend(values[i..].iter().map(|b| 0.5 * (a + b)));
        }
        averages.sort_by(f64::total_cmp);
        Self { sorted_walsh_averages: averages, difference_count: values.len() }
    }

    /// Hodges-Lehmann estimate of the differences' center: the median of their Walsh averages. None
    /// without differences.
    pub fn hodges_lehmann_center(&self) -> Option<f64> {
        let last = self.sorted_walsh_averages.len().checked_sub(1)?;
        Some(
            0.5 * (self.sorted_walsh_averages[last / 2]
                + self.sorted_walsh_averages[last.div_ceil(2)]),
        )
    }

    /// Exact confidence interval of the center of symmetric differences, which lies below and above
    /// the interval with a probability of at most `tail` each; `None` for too few differences.
    pub fn interval_with_tail_probability(&self, tail: f64) -> Option<(f64, f64)> {
        let beyond = critical_signed_rank_sum(self.difference_count, tail)?;
        let last = self.sorted_walsh_averages.len().checked_sub(beyond + 1)?;
        (beyond <= last)
            .then(|| (self.sorted_walsh_averages[beyond], self.sorted_walsh_averages[last]))
    }

    /// Returns the smallest and the largest difference; `None` without differences.
    pub fn smallest_and_largest_difference(&self) -> Option<(f64, f64)> {
        Some((*self.sorted_walsh_averages.first()?, *self.sorted_walsh_averages.last()?))
    }

    /// Standard error of the Hodges-Lehmann estimate, from the width of the exact interval with
    /// tails of at most 5 %; needs five differences.
    pub fn standard_error_of_center(&self) -> Option<f64> {
        // Five differences are needed, because n differences have no tail probability below 2⁻ⁿ.
        let (low, high) = self.interval_with_tail_probability(0.05)?;
        // Actual tail probability of the interval, which is below 5 % because the distribution is
        // discrete.
        let tail =
            self.approximate_rank_sum_tail(critical_signed_rank_sum(self.difference_count, 0.05)?);
        Some((high - low) / (-2.0 * normal::standard_normal_quantile(tail)))
    }

    /// Probability of a signed-rank sum of at most `sum` for these pairs: exact for 0, otherwise a
    /// normal approximation with continuity correction.
    fn approximate_rank_sum_tail(&self, sum: usize) -> f64 {
        let n = self.difference_count as f64;
        if sum == 0 {
            return 0.5f64.powf(n);
        }
        let sd = (n * (n + 1.0) * (2.0 * n + 1.0) / 24.0).sqrt();
        normal::standard_normal_cdf((sum as f64 + 0.5 - 0.25 * n * (n + 1.0)) / sd).min(0.05)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::signed_rank::signed_rank_p_value_for_upward_shift;
    use proptest::prelude::*;

    /// Hollander and Wolfe, example 3.1 (Hamilton depression scale): Hodges-Lehmann estimate -0.46,
    /// 96 % interval -0.786 to -0.010.
    #[test]
    #[allow(clippy::approx_constant)] // A depression score of 3.14.
    fn the_walsh_interval_agrees_with_hollander_and_wolfe() {
        let before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30];
        let after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29];
        let differences: Vec<f64> =
            after.iter().zip(before).map(|(after, before)| after - before).collect();
        let walsh = WalshAverages::averages_of_all_pairs(&differences);
        assert!((walsh.hodges_lehmann_center().unwrap() + 0.46).abs() < 1e-9);
        let (low, high) = walsh.interval_with_tail_probability(0.02).unwrap();
        assert!((low + 0.786).abs() < 1e-9 && (high + 0.010).abs() < 1e-9, "{low} {high}");
        assert_eq!(walsh.interval_with_tail_probability(0.001), None);
    }

    #[test]
    fn walsh_averages_of_no_numbers_have_no_interval() {
        let none = WalshAverages::averages_of_all_pairs(&[f64::NAN]);
        assert_eq!(
            (
                none.hodges_lehmann_center(),
                none.interval_with_tail_probability(0.5),
                none.smallest_and_largest_difference(),
                none.standard_error_of_center()
            ),
            (None, None, None, None)
        );
        assert_eq!(
            WalshAverages::averages_of_all_pairs(&[1.0, 2.0, 3.0, 4.0]).standard_error_of_center(),
            None
        );
        assert_eq!(
            WalshAverages::averages_of_all_pairs(&[2.0]).smallest_and_largest_difference(),
            Some((2.0, 2.0))
        );
    }

    /// For n normal differences of standard deviation 1, the standard error of the estimate is
    /// sqrt(pi / (3 n)).
    #[test]
    fn the_standard_error_for_normal_differences_is_as_in_theory() {
        for n in [6, 9, 12, 16, 40] {
            let scores: Vec<f64> = (0..n)
                .map(|i| normal::standard_normal_quantile((f64::from(i) + 0.5) / f64::from(n)))
                .collect();
            let expected = (std::f64::consts::PI / (3.0 * f64::from(n))).sqrt();
            let error =
                WalshAverages::averages_of_all_pairs(&scores).standard_error_of_center().unwrap();
            assert!((error / expected).ln().abs() < 0.25, "{n}: {error} for {expected}");
        }
    }

    proptest! {
        #[test]
        fn the_interval_contains_exactly_the_shifts_not_rejected(
            values in prop::collection::vec(-1.0f64..1.0, 6..30),
            tail in 0.02f64..0.3,
        ) {
            let walsh = WalshAverages::averages_of_all_pairs(&values);
            let (low, high) = walsh.interval_with_tail_probability(tail).unwrap();
            let p = |at: f64, sign: f64| {
                signed_rank_p_value_for_upward_shift(&values.iter().map(|v| sign * (v - at)).collect::<Vec<_>>())
            };
            let step = 1e-9;
            // A shift just outside the interval is rejected by the signed-rank test, and a shift
            // just inside is not.
            prop_assert!(p(low - step, 1.0) <= tail && p(high + step, -1.0) <= tail);
            prop_assert!(p(low + step, 1.0) > tail && p(high - step, -1.0) > tail);
        }

        #[test]
        fn the_walsh_estimate_lies_in_its_interval_and_moves_with_values(
            values in prop::collection::vec(-1.0f64..1.0, 6..30),
            by in -3.0f64..3.0,
        ) {
            let walsh = WalshAverages::averages_of_all_pairs(&values);
            let (low, high) = walsh.interval_with_tail_probability(0.05).unwrap();
            let estimate = walsh.hodges_lehmann_center().unwrap();
            prop_assert!(low <= estimate && estimate <= high);
            let moved = WalshAverages::averages_of_all_pairs(&values.iter().map(|v| v + by).collect::<Vec<_>>());
            prop_assert!((moved.hodges_lehmann_center().unwrap() - estimate - by).abs() < 1e-12);
            prop_assert!(
                (moved.standard_error_of_center().unwrap() - walsh.standard_error_of_center().unwrap()).abs() < 1e-12
            );
        }
    }
}
