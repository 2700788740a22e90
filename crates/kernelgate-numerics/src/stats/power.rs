//! Power of the paired signed-rank test: the shift that given pairs can detect, and the number of
//! pairs that a given shift needs.

use super::{WalshAverages, normal};

/// Smallest upward shift that the one-sided signed-rank test at `level` finds with probability
/// `power` (at least ½), estimated from the differences, in their unit.
///
/// Half of all samples are rejected at a shift as large as the distance between estimate and lower
/// end of the exact one-sided interval. For a power above ½, standard errors are added: the normal
/// quantile of `power` times the standard error. The estimate also holds for few pairs and small
/// levels, where the formula (z + z)·σ/√n would give a much too small shift.
///
/// Returns `None` if there are so few differences that no outcome reaches the level.
pub fn detectable_shift_of_signed_rank_test(
    walsh: &WalshAverages,
    level: f64,
    power: f64,
) -> Option<f64> {
    // Half the interval's width averages both sides, because the distance to one end may depend on
    // a single difference.
    let (low, high) = walsh.interval_with_tail_probability(level)?;
    Some(
        0.5 * (high - low)
            + normal::standard_normal_quantile(power).max(0.0)
                * walsh.standard_error_of_center()?,
    )
}

/// Number of pairs with which a shift of `effect` is found with `power`: ((z + z)·error/effect)²
/// times `pairs`, whose standard error is `error`; at least as many as `level` needs. The result is
/// `None` if `effect` is not a positive shift.
pub fn pairs_needed_to_find_effect(
    pairs: usize,
    error: f64,
    effect: f64,
    level: f64,
    power: f64,
) -> Option<usize> {
    let quantiles =
        normal::standard_normal_quantile(power) - normal::standard_normal_quantile(level);
    let needed = pairs as f64 * (quantiles * error / effect).powi(2);
    (effect > 0.0 && needed.is_finite() && needed < 1e9)
        .then(|| (needed.ceil() as usize).max(fewest_pairs_that_can_reach_level(level)))
}

/// Smallest number of differences with which the signed-rank test can reach p <= `level`: n
/// differences of one sign have p = 2⁻ⁿ.
pub fn fewest_pairs_that_can_reach_level(level: f64) -> usize {
    (1..1000).find(|&n| 0.5f64.powi(n) <= level).map_or(usize::MAX, |n| n as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::signed_rank::signed_rank_p_value_for_upward_shift;
    use proptest::prelude::*;
    use rand::SeedableRng;
    use rand_distr::{Distribution, StandardNormal};

    #[test]
    fn numbers_of_needed_pairs_match_known_values() {
        assert_eq!(
            (
                fewest_pairs_that_can_reach_level(0.5),
                fewest_pairs_that_can_reach_level(0.05),
                fewest_pairs_that_can_reach_level(0.01),
                fewest_pairs_that_can_reach_level(0.0)
            ),
            (1, 5, 7, usize::MAX)
        );
        // z(0.975) + z(0.8) = 2.8016: an effect as large as the standard error of 10 pairs is found
        // with 10 · 2.8016² = 79 pairs.
        assert_eq!(pairs_needed_to_find_effect(10, 1.0, 1.0, 0.025, 0.8), Some(79));
        assert_eq!(pairs_needed_to_find_effect(10, 1.0, 100.0, 0.01, 0.8), Some(7));
        assert_eq!(
            (
                pairs_needed_to_find_effect(10, 1.0, 0.0, 0.05, 0.8),
                pairs_needed_to_find_effect(10, f64::NAN, 1.0, 0.05, 0.8)
            ),
            (None, None)
        );
        assert_eq!(
            detectable_shift_of_signed_rank_test(
                &WalshAverages::averages_of_all_pairs(&[1.0; 6]),
                0.01,
                0.8
            ),
            None
        );
        assert_eq!(
            detectable_shift_of_signed_rank_test(
                &WalshAverages::averages_of_all_pairs(&[1.0; 7]),
                0.01,
                0.8
            ),
            Some(0.0)
        );
    }

    /// Shifts 400 samples by the median of their detectable shifts; the test must find the shift in
    /// 70 to 90 % of them.
    #[test]
    fn a_detectable_shift_is_found_with_the_given_power() {
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(1);
        for (pairs, level) in [(8, 0.01), (14, 1.25e-4), (24, 1e-3), (40, 0.01)] {
            let mut samples: Vec<Vec<f64>> = Vec::new();
            samples.resize_with(400, || {
                (0..pairs).map(|_| StandardNormal.sample(&mut random)).collect()
            });
            let called: Vec<f64> = samples
                .iter()
                .filter_map(|sample| {
                    detectable_shift_of_signed_rank_test(
                        &WalshAverages::averages_of_all_pairs(sample),
                        level,
                        0.8,
                    )
                })
                .collect();
            let shift = crate::stats::median(&called);
            let found = |sample: &Vec<f64>| {
                signed_rank_p_value_for_upward_shift(
                    &sample.iter().map(|v| v + shift).collect::<Vec<_>>(),
                ) <= level
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
        fn smaller_levels_and_more_power_need_larger_shifts(
            values in prop::collection::vec(-1.0f64..1.0, 12..30),
            level in 0.001f64..0.05,
        ) {
            let walsh = WalshAverages::averages_of_all_pairs(&values);
            let at = |level, power| detectable_shift_of_signed_rank_test(&walsh, level, power).unwrap();
            prop_assert!(
                at(level, 0.8) >= at(2.0 * level, 0.8) && at(level, 0.9) >= at(level, 0.8)
            );
        }
    }
}
