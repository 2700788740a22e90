//! Floats of eight bits: a sign, four bits of exponent, three of significand, no infinity.
//!
//! Deliberately absent: scales, which each family chooses for itself.

/// The largest value.
pub const MAX_E4M3: f32 = 448.0;
/// Exponent bias: the exponent's bits minus the exponent.
const EXPONENT_BIAS: i32 = 7;

/// The nearest code, to even between two; beyond the largest that one; of NaN a NaN.
pub fn encode_e4m3(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = x.abs();
    let code = if x.is_nan() {
        0x7f
    } else if magnitude >= MAX_E4M3 {
        0x7e
    } else if magnitude < 2f32.powi(1 - EXPONENT_BIAS) {
        // Subnormal codes are multiples of 2^-9.
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        let bits = magnitude.to_bits();
        let rounded = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
        (rounded - ((127 - EXPONENT_BIAS as u32) << 3)) as u8
    };
    sign | code
}

/// The value of a code.
pub fn decode_e4m3(code: u8) -> f32 {
    let magnitude = match code & 0x7f {
        0x7f => f32::NAN,
        subnormal @ 0..8 => f32::from(subnormal) / 512.0,
        normal => f32::from_bits((u32::from(normal) << 20) + ((127 - EXPONENT_BIAS as u32) << 23)),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_the_published_ones() {
        // OCP 8-bit floating point: largest, one, least normal, largest and least subnormal.
        for (code, value) in [
            (0x7e, 448.0),
            (0x38, 1.0),
            (0x08, 2f32.powi(-6)),
            (0x07, 0.875 * 2f32.powi(-6)),
            (0x01, 2f32.powi(-9)),
            (0x00, 0.0),
            (0xc1, -2.25),
        ] {
            assert_eq!((decode_e4m3(code), encode_e4m3(value)), (value, code), "{code:#x}");
        }
        assert!(
            decode_e4m3(0x7f).is_nan()
                && decode_e4m3(0xff).is_nan()
                && encode_e4m3(f32::NAN) & 0x7f == 0x7f
        );
    }

    #[test]
    fn the_nearest_code_is_taken_and_the_even_one_between_two() {
        let mut codes: Vec<u8> = (0..0x7f).collect();
        codes.sort_by(|&a, &b| decode_e4m3(a).total_cmp(&decode_e4m3(b)));
        assert_eq!(codes, (0..0x7f).collect::<Vec<_>>());
        for &code in &codes[..0x7e] {
            let (below, above) = (decode_e4m3(code), decode_e4m3(code + 1));
            let middle = (below + above) / 2.0;
            assert_eq!(encode_e4m3(below), code);
            assert_eq!(encode_e4m3(middle.next_down()), code);
            assert_eq!(encode_e4m3(middle.next_up()), code + 1);
            assert_eq!(encode_e4m3(middle), if code % 2 == 0 { code } else { code + 1 });
            assert_eq!(encode_e4m3(-middle), encode_e4m3(middle) | 0x80);
        }
        assert_eq!((encode_e4m3(1e9), encode_e4m3(f32::INFINITY)), (0x7e, 0x7e));
    }

    #[test]
    fn every_number_has_its_bits_and_what_lies_between_two_goes_to_the_nearer() {
        // 0x7f is NaN.
        for positive in 0..0x7f {
            assert_eq!(encode_e4m3(decode_e4m3(positive)), positive);
            assert_eq!(encode_e4m3(-decode_e4m3(positive)), positive | 0x80);
        }
        for below in 0..0x7e {
            let (low, high) = (decode_e4m3(below), decode_e4m3(below + 1));
            let middle = (low + high) / 2.0;
            assert!(low < high);
            assert_eq!(encode_e4m3(middle), below + below % 2, "tie between {low} and {high}");
            assert_eq!(encode_e4m3(middle - (high - low) / 16.0), below);
            assert_eq!(encode_e4m3(middle + (high - low) / 16.0), below + 1);
        }
        assert_eq!(
            (decode_e4m3(0x7e), encode_e4m3(1e9), encode_e4m3(f32::MIN)),
            (448.0, 0x7e, 0xfe)
        );
    }
}
