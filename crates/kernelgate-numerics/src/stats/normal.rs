//! The standard normal distribution.

use std::f64::consts::PI;

/// Below this the alternating part of the series loses too many digits and the continued fraction
/// takes over.
const MAX_SERIES_ARGUMENT: f64 = 4.0;
/// Number of terms that brings both expansions below 1e-13 relative in their ranges.
const EXPANSION_TERMS: u32 = 80;

fn normal_density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * PI).sqrt()
}

/// P(Z <= x), to about 1e-12 relative: near zero by the series ½ + φ(x)·(x + x³/3 + x⁵/15 + …), far
/// out by Laplace's continued fraction of the tail (Abramowitz and Stegun, 26.2.11 and 26.2.14).
/// NaN for NaN.
pub fn normal_cdf(x: f64) -> f64 {
    if x.abs() < MAX_SERIES_ARGUMENT {
        let (mut term, mut sum) = (x, x);
        for k in 1..=EXPANSION_TERMS {
            term *= x * x / f64::from(2 * k + 1);
            sum += term;
        }
        return 0.5 + normal_density(x) * sum;
    }
    let fraction =
        (1..=EXPANSION_TERMS).rev().fold(x.abs(), |fraction, k| x.abs() + f64::from(k) / fraction);
    let tail = normal_density(x) / fraction;
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// The x with P(Z <= x) = p, by bisection of [`normal_cdf`]; infinite at 0 and 1, NaN outside.
pub fn normal_quantile(p: f64) -> f64 {
    if p <= 0.0 || p >= 1.0 || p.is_nan() {
        return match p {
            0.0 => f64::NEG_INFINITY,
            1.0 => f64::INFINITY,
            _ => f64::NAN,
        };
    }
    // The distribution function keeps its relative precision in the lower half only.
    if p > 0.5 {
        return -normal_quantile(1.0 - p);
    }
    let (mut low, mut high) = (-40.0, 0.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if normal_cdf(middle) < p { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Values of Wichura's AS 241 and of R's `pnorm`.
    #[test]
    fn normal_quantiles_match_known_values() {
        for (x, p) in [
            (0.0, 0.5),
            (1.0, 0.841_344_746_068_542_9),
            (-1.959_963_984_540_054, 0.025),
            (-3.0, 1.349_898_031_630_094_6e-3),
            (-6.0, 9.865_876_450_376_98e-10),
            (-10.0, 7.619_853_024_160_527e-24),
        ] {
            assert!((normal_cdf(x) / p - 1.0).abs() < 1e-10, "{x}: {}", normal_cdf(x));
            assert!((normal_quantile(p) - x).abs() < 1e-9, "{p}: {}", normal_quantile(p));
        }
        assert_eq!(
            (normal_quantile(0.0), normal_quantile(1.0)),
            (f64::NEG_INFINITY, f64::INFINITY)
        );
        assert!(
            normal_quantile(-0.1).is_nan()
                && normal_quantile(f64::NAN).is_nan()
                && normal_cdf(f64::NAN).is_nan()
        );
    }

    proptest! {
        #[test]
        fn the_normal_quantile_inverts_the_distribution_function(p in 1e-12f64..1.0) {
            prop_assert!((normal_cdf(normal_quantile(p)) - p).abs() < 1e-9 * p.max(1e-3));
        }

        #[test]
        fn both_tails_of_the_normal_distribution_are_symmetric(x in -8.0f64..8.0) {
            prop_assert!((normal_cdf(x) + normal_cdf(-x) - 1.0).abs() < 1e-12);
        }
    }
}
