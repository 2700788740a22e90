//! Quantiles and the mean of a sample.

/// Returns the `q` quantile of the values, linear between order statistics (Hyndman-Fan type 7, the
/// default of R and NumPy).
///
/// `values` has at least one element, holds no NaN and need not be sorted; `q` lies between 0 and
/// 1.
pub fn quantile_by_interpolation(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let position = q.clamp(0.0, 1.0) * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[position.floor() as usize], sorted[position.ceil() as usize]);
    low + (high - low) * position.fract()
}

/// Arithmetic mean of the values; 0 without values.
pub fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// The middle value.
pub fn median(values: &[f64]) -> f64 {
    quantile_by_interpolation(values, 0.5)
}

/// Returns the value at which half of the total weight is reached; if half is reached between two
/// values, their middle, so that equal weights give [`median`].
///
/// `values` has at least one element, holds no NaN and need not be sorted; `weights` has the same
/// length, and each weight is above 0.
pub fn weighted_median(values: &[f64], weights: &[f64]) -> f64 {
    let mut sorted: Vec<(f64, f64)> = values.iter().copied().zip(weights.iter().copied()).collect();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
    let half = 0.5 * sorted.iter().map(|(_, weight)| weight).sum::<f64>();
    // Sums of weights are rounded, so a sum within 1e-12 of half the total weight counts as half.
    let slack = 1e-12 * half;
    let mut below = 0.0;
    for (index, (value, weight)) in sorted.iter().enumerate() {
        below += weight;
        match sorted.get(index + 1) {
            Some((next, _)) if (below - half).abs() <= slack => return 0.5 * (value + next),
            _ if below > half => return *value,
            _ => {}
        }
    }
    sorted[sorted.len() - 1].0
}

/// Returns half the difference of largest and smallest value, divided by the median. The function
/// needs at least one value, and all values must be positive.
pub fn half_range_by_median(values: &[f64]) -> f64 {
    let highest = values.iter().copied().fold(0.0, f64::max);
    let lowest = values.iter().copied().fold(f64::INFINITY, f64::min);
    (highest - lowest) / (2.0 * median(values))
}

/// Median and quartiles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MedianAndQuartiles {
    /// First quartile.
    pub q1: f64,
    /// Median.
    pub median: f64,
    /// Third quartile.
    pub q3: f64,
}

impl MedianAndQuartiles {
    /// Computes median and quartiles of a slice that has at least one value and no NaN.
    pub fn median_and_quartiles_from_values(values: &[f64]) -> MedianAndQuartiles {
        Self {
            q1: quantile_by_interpolation(values, 0.25),
            median: median(values),
            q3: quantile_by_interpolation(values, 0.75),
        }
    }

    /// Half the difference of third and first quartile, divided by the median.
    pub fn half_interquartile_range_by_median(&self) -> f64 {
        (self.q3 - self.q1) / (2.0 * self.median)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn weighted_medians_and_quartiles_match_known_values() {
        let values = [7.0, 1.0, 3.0, 5.0];
        assert_eq!(median(&values), 4.0);
        assert_eq!(
            MedianAndQuartiles::median_and_quartiles_from_values(&values),
            MedianAndQuartiles { q1: 2.5, median: 4.0, q3: 5.5 }
        );
        assert_eq!(quantile_by_interpolation(&[2.0], 0.25), 2.0);
    }

    #[test]
    fn a_heavy_weight_moves_the_weighted_median() {
        assert_eq!(weighted_median(&[3.0, 1.0, 2.0], &[1.0, 1.0, 9.0]), 2.0);
        assert_eq!(weighted_median(&[1.0, 2.0, 3.0], &[3.0, 1.0, 1.0]), 1.0);
        assert_eq!(weighted_median(&[1.0, 2.0, 3.0], &[2.0, 1.0, 1.0]), 1.5);
        assert_eq!(weighted_median(&[4.0], &[0.5]), 4.0);
    }

    proptest! {
        #[test]
        fn equal_weights_give_the_unweighted_median(
            values in prop::collection::vec(0.1f64..1e9, 1..50),
            weight in 0.1f64..1e6,
        ) {
            let middle = weighted_median(&values, &vec![weight; values.len()]);
            let difference = (middle - median(&values)).abs();
            prop_assert!(difference <= 1e-9 * middle, "{middle} and {}", median(&values));
        }

        #[test]
        fn quantiles_are_ordered_and_lie_inside_the_sample(
            values in prop::collection::vec(0.1f64..1e9, 1..50),
            a in 0.0f64..1.0,
            b in 0.0f64..1.0,
        ) {
            let (low, high) = (quantile_by_interpolation(&values, a.min(b)), quantile_by_interpolation(&values, a.max(b)));
            let (min, max) = (quantile_by_interpolation(&values, 0.0), quantile_by_interpolation(&values, 1.0));
            prop_assert!(min <= low && low <= high && high <= max);
            prop_assert!(values.contains(&min) && values.contains(&max));
        }
    }
}
