//! Element-wise functions of f32 written so that the compiler vectorises them inside a `pulp`
//! dispatch, and functions of f64 that references share.

/// e^x in f32, relative error below 4e-7 for x in [-87, 88]; flushes to 0 below and saturates
/// above.
///
/// Cody-Waite reduction to |r| ≤ ln2/2, then a degree-6 Taylor polynomial; no branch and no table,
/// so a loop over it vectorises at any width.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding and subtracting 1.5·2^23 rounds to the nearest integer and leaves it in the low
    // mantissa bits.
    const ROUND_TO_INTEGER: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.0, 88.0);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND_TO_INTEGER;
    let n = shifted - ROUND_TO_INTEGER;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let polynomial = 1.0
        + r * (1.0
            + r * (0.5
                + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0))))));
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x < -87.0 { 0.0 } else { polynomial * power }
}

/// 2^x for x ≤ 126, relative error below 4e-7; 2^-126 for anything less than -126, and for NaN.
///
/// x = n + r with |r| ≤ 1/2, a degree-6 polynomial for 2^r, n added to the exponent bits.
/// `mul_add`, because the compiler does not fuse on its own; it is one instruction wherever SIMD is
/// wide (AVX2 and later, Neon).
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    // Adding and subtracting 1.5·2^23 rounds to the nearest integer and leaves it in the low
    // mantissa bits.
    const ROUND_TO_INTEGER: f32 = 12_582_912.0;
    // ln(2)^i / i!
    const C: [f32; 7] = [
        1.0,
        std::f32::consts::LN_2,
        0.240_226_5,
        0.055_504_11,
        0.009_618_129,
        0.001_333_355_8,
        0.000_154_035_3,
    ];
    let x = max_ignoring_nan(x, -126.0);
    let shifted = x + ROUND_TO_INTEGER;
    let r = x - (shifted - ROUND_TO_INTEGER);
    // The polynomial is written out, because a loop here would keep the loop around it from
    // vectorising.
    let power = C[6]
        .mul_add(r, C[5])
        .mul_add(r, C[4])
        .mul_add(r, C[3])
        .mul_add(r, C[2])
        .mul_add(r, C[1])
        .mul_add(r, C[0]);
    f32::from_bits(power.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// Larger of two floats by one instruction; returns `b` if `a` is NaN.
#[inline(always)]
pub fn max_ignoring_nan(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// GELU in its tanh form, `x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`, in f32 with an absolute error
/// below 3e-7·(1 + |x|); it vectorises as [`exp`] does.
///
/// GELU is computed as `x·sigmoid(2u)`, which avoids the cancellation of `1 + tanh(u)` for negative
/// x.
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769;
    x / (1.0 + exp(-TWICE_SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x)))
}

/// Computes the softmax in place: `exp(x - max) / Σ exp(x - max)`, which is finite for any finite
/// scores.
pub fn softmax(row: &mut [f64]) {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum: f64 = row.iter().sum();
    row.iter_mut().for_each(|x| *x /= sum);
}

pub fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gelu_tanh_agrees_with_fp64_over_its_range() {
        for i in -2000..=2000 {
            let x = f64::from(i) / 100.0;
            let exact = 0.5
                * x
                * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh());
            let error = (f64::from(gelu_tanh(x as f32)) - exact).abs();
            assert!(error < 3e-7 * (1.0 + x.abs()), "gelu_tanh({x}) is {error} from {exact}");
        }
        assert_eq!(gelu_tanh(0.0), 0.0);
        assert!(gelu_tanh(f32::NAN).is_nan());
    }

    #[test]
    fn exp2_agrees_with_fp64_over_its_range() {
        for i in -12_600..=12_600 {
            let x = i as f32 / 100.0;
            let exact = f64::from(x).exp2();
            assert!(
                (f64::from(exp2(x)) / exact - 1.0).abs() < 4e-7,
                "exp2({x}) = {} is not {exact}",
                exp2(x)
            );
        }
        assert_eq!(
            (exp2(-1000.0), exp2(0.0), exp2(f32::NEG_INFINITY)),
            (2f32.powi(-126), 1.0, 2f32.powi(-126))
        );
    }

    #[test]
    fn exp_agrees_with_fp64_over_its_range() {
        for i in -8700..=8800 {
            let x = i as f32 / 100.0;
            let exact = f64::from(x).exp();
            assert!(
                (f64::from(exp(x)) / exact - 1.0).abs() < 4e-7,
                "exp({x}) = {} is not {exact}",
                exp(x)
            );
        }
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(0.0), 1.0);
    }
}
