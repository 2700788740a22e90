//! Detectable effect of a paired comparison, and the number of pairs that a given effect needs.

use super::{WalshAverages, normal};

/// Smallest upward shift that the one-sided signed-rank test at `level` finds with probability
/// `power` (at least ½), in the unit of the differences, estimated from their own spread.
///
/// A sample of this shape is rejected at the shift that lifts the lower end of its exact one-sided
/// interval to zero: half of all samples at the distance between estimate and end. The rest of the
/// power adds standard errors. The result is valid for few pairs and strict levels too, where the
/// smallest difference limits the interval and the usual formula (z + z)·σ/√n promises far too
/// much.
///
/// `None` if no outcome of so few differences reaches the level.
pub fn detectable_shift(walsh: &WalshAverages, level: f64, power: f64) -> Option<f64> {
    // The mean of both sides: one end alone is the luck of one difference.
    let (low, high) = walsh.interval_with_tail(level)?;
    Some(0.5 * (high - low) + normal::normal_quantile(power).max(0.0) * walsh.standard_error()?)
}

/// Differences with which a shift of `effect` is found at `level` with probability `power`, if
/// `pairs` have the standard error `error`: ((z + z)·error/effect)² times `pairs`, and not fewer
/// than reach the level at all. None without an effect.
pub fn pairs_needed(
    pairs: usize,
    error: f64,
    effect: f64,
    level: f64,
    power: f64,
) -> Option<usize> {
    let quantiles = normal::normal_quantile(power) - normal::normal_quantile(level);
    let needed = pairs as f64 * (quantiles * error / effect).powi(2);
    (effect > 0.0 && needed.is_finite() && needed < 1e9)
        .then(|| (needed.ceil() as usize).max(fewest_pairs_for_level(level)))
}

/// Fewest differences of which any outcome reaches `level`: n of one sign have p = 2⁻ⁿ.
pub fn fewest_pairs_for_level(level: f64) -> usize {
    (1..1000).find(|&n| 0.5f64.powi(n) <= level).map_or(usize::MAX, |n| n as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::signed_rank::signed_rank_p_greater;
    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand_distr::{Distribution, StandardNormal};

    #[test]
    fn the_power_of_the_test_matches_known_values() {
        assert_eq!(
            (
                fewest_pairs_for_level(0.5),
                fewest_pairs_for_level(0.05),
                fewest_pairs_for_level(0.01),
                fewest_pairs_for_level(0.0)
            ),
            (1, 5, 7, usize::MAX)
        );
        // z(0.975) + z(0.8) = 2.8016: one standard error of 10 pairs is found with 79.
        assert_eq!(pairs_needed(10, 1.0, 1.0, 0.025, 0.8), Some(79));
        assert_eq!(pairs_needed(10, 1.0, 100.0, 0.01, 0.8), Some(7));
        assert_eq!(
            (pairs_needed(10, 1.0, 0.0, 0.05, 0.8), pairs_needed(10, f64::NAN, 1.0, 0.05, 0.8)),
            (None, None)
        );
        assert_eq!(detectable_shift(&WalshAverages::new(&[1.0; 6]), 0.01, 0.8), None);
        assert_eq!(detectable_shift(&WalshAverages::new(&[1.0; 7]), 0.01, 0.8), Some(0.0));
    }

    /// In 400 samples each, a shift of the median detectable size is found in 80 % of them, give or
    /// take ten points.
    #[test]
    fn shifts_reported_as_detectable_are_detected_with_the_given_power() {
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(1);
        for (pairs, level) in [(8, 0.01), (14, 1.25e-4), (24, 1e-3), (40, 0.01)] {
            let mut samples: Vec<Vec<f64>> = Vec::new();
            samples.resize_with(400, || {
                (0..pairs).map(|_| StandardNormal.sample(&mut random)).collect()
            });
            let called: Vec<f64> = samples
                .iter()
                .filter_map(|sample| detectable_shift(&WalshAverages::new(sample), level, 0.8))
                .collect();
            let shift = crate::stats::median(&called);
            let found = |sample: &Vec<f64>| {
                signed_rank_p_greater(&sample.iter().map(|v| v + shift).collect::<Vec<_>>())
                    <= level
            };
            let power = samples.iter().filter(|sample| found(sample)).count() as f64 / 400.0;
            assert!(
                (0.7..=0.9).contains(&power),
                "{pairs} pairs at {level}: {shift} is found in {power}"
            );
        }
    }

    proptest! {
        #[test]
        fn stricter_levels_and_more_power_need_larger_effects(
            values in prop::collection::vec(-1.0f64..1.0, 12..30),
            level in 0.001f64..0.05,
        ) {
            let walsh = WalshAverages::new(&values);
            let at = |level, power| detectable_shift(&walsh, level, power).unwrap();
            prop_assert!(
                at(level, 0.8) >= at(2.0 * level, 0.8) && at(level, 0.9) >= at(level, 0.8)
            );
        }
    }
}
