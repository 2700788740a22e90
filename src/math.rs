//! Elementwise f32 functions that vectorise inside a `pulp` dispatch, and f64 functions that
//! several references share.

/// Computes e^x in f32 with a relative error below 4e-7 for x in [-87, 88]; returns 0 below this
/// range and saturates above it.
///
/// The exponential uses Cody-Waite reduction to |r| ≤ ln2/2 and a degree-6 Taylor polynomial,
/// without branch or table, so that loops over it vectorise.
#[inline(always)]
pub fn vectorisable_exp(x: f32) -> f32 {
    // Adding and subtracting 1.5·2^23 rounds an f32 to the nearest integer and leaves the integer
    // in the low mantissa bits.
    const ROUND_F32_TO_INTEGER: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.0, 88.0);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND_F32_TO_INTEGER;
    let n = shifted - ROUND_F32_TO_INTEGER;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let polynomial = 1.0
        + r * (1.0
            + r * (0.5
                + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0))))));
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { polynomial * power }
}

/// Computes 2^x in f32 for x ≤ 126 with a relative error below 4e-7; returns 2^-126 for x < -126
/// and for NaN.
///
/// The code splits x = n + r with |r| ≤ 1/2, computes 2^r by a polynomial of degree 6, and adds n
/// to the exponent bits. The code calls `mul_add` explicitly, because the compiler does not fuse
/// multiplication and addition on its own.
#[inline(always)]
pub fn vectorisable_exp2(x: f32) -> f32 {
    // Adding and subtracting 1.5·2^23 rounds an f32 to the nearest integer and leaves the integer
    // in the low mantissa bits.
    const ROUND_F32_TO_INTEGER: f32 = 12_582_912.0;
    // ln(2)^i / i!
    const EXP2_POLYNOMIAL_COEFFICIENTS: [f32; 7] = [
        1.0,
        std::f32::consts::LN_2,
        0.240_226_5,
        0.055_504_11,
        0.009_618_129,
        0.001_333_355_8,
        0.000_154_035_3,
    ];
    let x = max_or_second_if_first_is_nan(x, -126.0);
    let shifted = x + ROUND_F32_TO_INTEGER;
    let r = x - (shifted - ROUND_F32_TO_INTEGER);
    // The polynomial is written without a loop, because an inner loop would keep the caller's loop
    // from vectorising.
    let power = EXP2_POLYNOMIAL_COEFFICIENTS[6]
        .mul_add(r, EXP2_POLYNOMIAL_COEFFICIENTS[5])
        .mul_add(r, EXP2_POLYNOMIAL_COEFFICIENTS[4])
        .mul_add(r, EXP2_POLYNOMIAL_COEFFICIENTS[3])
        .mul_add(r, EXP2_POLYNOMIAL_COEFFICIENTS[2])
        .mul_add(r, EXP2_POLYNOMIAL_COEFFICIENTS[1])
        .mul_add(r, EXP2_POLYNOMIAL_COEFFICIENTS[0]);
    f32::from_bits(power.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// Returns the larger of two floats by one machine instruction; returns `b` if `a` is NaN.
#[inline(always)]
pub fn max_or_second_if_first_is_nan(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// GELU in its tanh form, `x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`, in f32 with an absolute error
/// below 3e-7·(1 + |x|); loops over this function vectorise.
///
/// GELU is computed as `x·sigmoid(2u)`, which avoids the cancellation of `1 + tanh(u)` for negative
/// x.
#[inline(always)]
pub fn vectorisable_gelu_tanh(x: f32) -> f32 {
    const TWICE_SQRT_OF_2_OVER_PI: f32 = 1.595_769;
    x / (1.0 + vectorisable_exp(-TWICE_SQRT_OF_2_OVER_PI * (x + 0.044_715 * x * x * x)))
}

/// Computes the fp64 softmax `exp(x - max) / Σ exp(x - max)` of a row in place, which is finite for
/// any finite scores.
pub fn softmax_in_place_f64(row: &mut [f64]) {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum: f64 = row.iter().sum();
    row.iter_mut().for_each(|x| *x /= sum);
}

pub fn sigmoid_f64(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectorisable_gelu_agrees_with_fp64_over_its_range() {
        for i in -2000..=2000 {
            let x = f64::from(i) / 100.0;
            let exact = 0.5
                * x
                * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh());
            let error = (f64::from(vectorisable_gelu_tanh(x as f32)) - exact).abs();
            assert!(error < 3e-7 * (1.0 + x.abs()), "gelu_tanh({x}) is {error} from {exact}");
        }
        assert_eq!(vectorisable_gelu_tanh(0.0), 0.0);
        assert!(vectorisable_gelu_tanh(f32::NAN).is_nan());
    }

    #[test]
    fn vectorisable_exp2_agrees_with_fp64_over_its_range() {
        for i in -12_600..=12_600 {
            let x = i as f32 / 100.0;
            let exact = f64::from(x).exp2();
            assert!(
                (f64::from(vectorisable_exp2(x)) / exact - 1.0).abs() < 4e-7,
                "exp2({x}) = {} is not {exact}",
                vectorisable_exp2(x)
            );
        }
        assert_eq!(
            (
                vectorisable_exp2(-1000.0),
                vectorisable_exp2(0.0),
                vectorisable_exp2(f32::NEG_INFINITY)
            ),
            (2f32.powi(-126), 1.0, 2f32.powi(-126))
        );
    }

    #[test]
    fn vectorisable_exp_agrees_with_fp64_over_its_range() {
        for i in -8700..=8800 {
            let x = i as f32 / 100.0;
            let exact = f64::from(x).exp();
            assert!(
                (f64::from(vectorisable_exp(x)) / exact - 1.0).abs() < 4e-7,
                "exp({x}) = {} is not {exact}",
                vectorisable_exp(x)
            );
        }
        assert_eq!(vectorisable_exp(-1000.0), 0.0);
        assert_eq!(vectorisable_exp(f32::NEG_INFINITY), 0.0);
        assert!(vectorisable_exp(f32::NAN).is_nan());
        assert_eq!(vectorisable_exp(0.0), 1.0);
    }
}
