//! The standard normal distribution.

use std::f64::consts::PI;

/// Largest |x| for which the normal distribution function uses its series; beyond, the series loses
/// digits and the continued fraction is used.
const MAX_NORMAL_SERIES_ARGUMENT: f64 = 4.0;
/// Number of terms with which the series and the continued fraction both have a relative error
/// below 1e-13.
const NORMAL_EXPANSION_TERMS: u32 = 80;

fn standard_normal_density(x: f64) -> f64 {
    (-0.5 * x * x).exp() / (2.0 * PI).sqrt()
}

/// Returns P(Z <= x) to about 1e-12 relative: near zero by the series ½ + φ(x)·(x + x³/3 + x⁵/15 +
/// …), far out by Laplace's continued fraction (Abramowitz and Stegun). NaN for NaN.
pub fn standard_normal_cdf(x: f64) -> f64 {
    if x.abs() < MAX_NORMAL_SERIES_ARGUMENT {
        let (mut term, mut sum) = (x, x);
        for k in 1..=NORMAL_EXPANSION_TERMS {
            term *= x * x / f64::from(2 * k + 1);
            sum += term;
        }
        return 0.5 + standard_normal_density(x) * sum;
    }
    let fraction = (1..=NORMAL_EXPANSION_TERMS)
        .rev()
        .fold(x.abs(), |fraction, k| x.abs() + f64::from(k) / fraction);
    let tail = standard_normal_density(x) / fraction;
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// Returns the x with P(Z <= x) = p, by bisection of [`standard_normal_cdf`]; infinite for p = 0
/// and 1, NaN for p outside 0 to 1.
pub fn standard_normal_quantile(p: f64) -> f64 {
    if p <= 0.0 || p >= 1.0 || p.is_nan() {
        return match p {
            0.0 => f64::NEG_INFINITY,
            1.0 => f64::INFINITY,
            _ => f64::NAN,
        };
    }
    // [`standard_normal_cdf`] is precise relative to its value only below ½, so the upper half is
    // mirrored.
    if p > 0.5 {
        return -standard_normal_quantile(1.0 - p);
    }
    let (mut low, mut high) = (-40.0, 0.0);
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if standard_normal_cdf(middle) < p { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Expected values are from Wichura's algorithm AS 241 and R's `pnorm`.
    #[test]
    fn normal_cdf_and_quantiles_match_published_values() {
        for (x, p) in [
            (0.0, 0.5),
            (1.0, 0.841_344_746_068_542_9),
            (-1.959_963_984_540_054, 0.025),
            (-3.0, 1.349_898_031_630_094_6e-3),
            (-6.0, 9.865_876_450_376_98e-10),
            (-10.0, 7.619_853_024_160_527e-24),
        ] {
            assert!(
                (standard_normal_cdf(x) / p - 1.0).abs() < 1e-10,
                "{x}: {}",
                standard_normal_cdf(x)
            );
            assert!(
                (standard_normal_quantile(p) - x).abs() < 1e-9,
                "{p}: {}",
                standard_normal_quantile(p)
            );
        }
        assert_eq!(
            (standard_normal_quantile(0.0), standard_normal_quantile(1.0)),
            (f64::NEG_INFINITY, f64::INFINITY)
        );
        assert!(
            standard_normal_quantile(-0.1).is_nan()
                && standard_normal_quantile(f64::NAN).is_nan()
                && standard_normal_cdf(f64::NAN).is_nan()
        );
    }

    proptest! {
        #[test]
        fn the_normal_quantile_inverts_the_distribution_function(p in 1e-12f64..1.0) {
            prop_assert!((standard_normal_cdf(standard_normal_quantile(p)) - p).abs() < 1e-9 * p.max(1e-3));
        }

        #[test]
        fn lower_and_upper_tail_of_the_normal_distribution_add_to_one(x in -8.0f64..8.0) {
            prop_assert!((standard_normal_cdf(x) + standard_normal_cdf(-x) - 1.0).abs() < 1e-12);
        }
    }
}
