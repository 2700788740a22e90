//! 8-bit floats of 4 exponent and 3 mantissa bits, and tensors rounded to them with a scale a head.
//!
//! Deliberately absent: scales of other blocks, and scales that do not follow from the tensor.

use rayon::prelude::*;

/// Largest number: 448. There is no infinity.
const MAX: f32 = 448.0;
/// Exponent below which numbers are multiples of 2^-9.
const MIN_EXPONENT: i32 = -6;
const MANTISSA_BITS: i32 = 3;

/// The bits of the nearest number, ties to even; what is larger than the largest becomes that.
pub fn bits(x: f32) -> u8 {
    let sign = u8::from(x.is_sign_negative()) << 7;
    let magnitude = x.abs().min(MAX);
    // The exponent of the number's last bit.
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(MIN_EXPONENT) - MANTISSA_BITS;
    // Exact: a power of two that f32 holds. The first number of the next exponent is 16 here, which
    // carries into the exponent's bits.
    let steps = (magnitude / 2f32.powi(exponent)).round_ties_even() as i32;
    let below = exponent + MANTISSA_BITS - MIN_EXPONENT;
    sign | ((below << MANTISSA_BITS) + steps) as u8
}

/// The number of those bits.
#[cfg(test)]
pub fn value(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
    let magnitude = match exponent {
        0 => mantissa * 2f32.powi(MIN_EXPONENT - MANTISSA_BITS),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 1 + MIN_EXPONENT - MANTISSA_BITS),
    };
    if bits >> 7 == 1 { -magnitude } else { magnitude }
}

/// Of each of the parts, so many elements long, the bits of x / scale and the scale with which the
/// largest magnitude becomes the largest number; 1 of zeros.
pub fn quantised(values: &[half::bf16], part: usize) -> (Vec<i8>, Vec<f32>) {
    let parts: Vec<(Vec<i8>, f32)> = values
        .par_chunks(part)
        .map(|values| {
            let largest = values.iter().fold(0f32, |most, x| most.max(x.to_f32().abs()));
            let scale = if largest > 0.0 { largest / MAX } else { 1.0 };
            (values.iter().map(|x| bits(x.to_f32() / scale) as i8).collect(), scale)
        })
        .collect();
    let (values, scales): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    (values.concat(), scales)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_its_bits_and_what_lies_between_two_goes_to_the_nearer() {
        // 0x7f is NaN.
        for positive in 0..0x7f {
            assert_eq!(bits(value(positive)), positive);
            assert_eq!(bits(-value(positive)), positive | 0x80);
        }
        for below in 0..0x7e {
            let (low, high) = (value(below), value(below + 1));
            let middle = (low + high) / 2.0;
            assert!(low < high);
            assert_eq!(bits(middle), below + below % 2, "tie between {low} and {high}");
            assert_eq!(bits(middle - (high - low) / 16.0), below);
            assert_eq!(bits(middle + (high - low) / 16.0), below + 1);
        }
        assert_eq!((value(0x7e), bits(1e9), bits(f32::MIN)), (448.0, 0x7e, 0xfe));
    }

    #[test]
    fn a_part_uses_the_whole_range() {
        let values = [0.5, -1.0, 0.0, 0.0, 30.0, 60.0].map(half::bf16::from_f32);
        let (found, scales) = quantised(&values, 2);
        assert_eq!(
            found.iter().map(|&x| value(x as u8)).collect::<Vec<_>>(),
            [224.0, -448.0, 0.0, 0.0, 224.0, 448.0]
        );
        assert_eq!(scales, [1.0 / 448.0, 1.0, 60.0 / 448.0]);
    }
}
