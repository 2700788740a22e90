//! The 8-bit float format e4m3: a sign, four bits of exponent, three of significand, no infinity.
//!
//! This module deliberately has no scales of e4m3 tensors, because each workload family chooses its
//! own scales.

/// The largest value.
pub const LARGEST_E4M3_VALUE: f32 = 448.0;
/// Exponent bias of e4m3: an exponent n is stored as the bits n + 7.
const E4M3_EXPONENT_BIAS: i32 = 7;

/// Rounds a float to the nearest e4m3 code, ties to even; larger magnitudes saturate at 448, and
/// NaN stays NaN.
pub fn encode_f32_as_e4m3(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = x.abs();
    let code = if x.is_nan() {
        0x7f
    } else if magnitude >= LARGEST_E4M3_VALUE {
        0x7e
    } else if magnitude < 2f32.powi(1 - E4M3_EXPONENT_BIAS) {
        // Subnormal e4m3 codes are multiples of 2^-9.
        (magnitude * 512.0).round_ties_even() as u8
    } else {
        let bits = magnitude.to_bits();
        let rounded = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
        (rounded - ((127 - E4M3_EXPONENT_BIAS as u32) << 3)) as u8
    };
    sign | code
}

/// Converts an e4m3 code to the float that it represents, exactly.
pub fn decode_e4m3_to_f32(code: u8) -> f32 {
    let magnitude = match code & 0x7f {
        0x7f => f32::NAN,
        subnormal @ 0..8 => f32::from(subnormal) / 512.0,
        normal => {
            f32::from_bits((u32::from(normal) << 20) + ((127 - E4M3_EXPONENT_BIAS as u32) << 23))
        }
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_codes_equal_the_values_published_by_ocp() {
        // The OCP specification of 8-bit floats states these values: largest, one, least normal,
        // largest and least subnormal.
        for (code, value) in [
            (0x7e, 448.0),
            (0x38, 1.0),
            (0x08, 2f32.powi(-6)),
            (0x07, 0.875 * 2f32.powi(-6)),
            (0x01, 2f32.powi(-9)),
            (0x00, 0.0),
            (0xc1, -2.25),
        ] {
            assert_eq!(
                (decode_e4m3_to_f32(code), encode_f32_as_e4m3(value)),
                (value, code),
                "{code:#x}"
            );
        }
        assert!(
            decode_e4m3_to_f32(0x7f).is_nan()
                && decode_e4m3_to_f32(0xff).is_nan()
                && encode_f32_as_e4m3(f32::NAN) & 0x7f == 0x7f
        );
    }

    #[test]
    fn e4m3_encoding_rounds_to_the_nearest_code_and_ties_to_even() {
        let mut codes: Vec<u8> = (0..0x7f).collect();
        codes.sort_by(|&a, &b| decode_e4m3_to_f32(a).total_cmp(&decode_e4m3_to_f32(b)));
        assert_eq!(codes, (0..0x7f).collect::<Vec<_>>());
        for &code in &codes[..0x7e] {
            let (below, above) = (decode_e4m3_to_f32(code), decode_e4m3_to_f32(code + 1));
            let middle = (below + above) / 2.0;
            assert_eq!(encode_f32_as_e4m3(below), code);
            assert_eq!(encode_f32_as_e4m3(middle.next_down()), code);
            assert_eq!(encode_f32_as_e4m3(middle.next_up()), code + 1);
            assert_eq!(encode_f32_as_e4m3(middle), if code % 2 == 0 { code } else { code + 1 });
            assert_eq!(encode_f32_as_e4m3(-middle), encode_f32_as_e4m3(middle) | 0x80);
        }
        assert_eq!((encode_f32_as_e4m3(1e9), encode_f32_as_e4m3(f32::INFINITY)), (0x7e, 0x7e));
    }

    #[test]
    fn e4m3_encoding_inverts_decoding_and_rounds_values_between_codes() {
        // 0x7f is NaN.
        for positive in 0..0x7f {
            assert_eq!(encode_f32_as_e4m3(decode_e4m3_to_f32(positive)), positive);
            assert_eq!(encode_f32_as_e4m3(-decode_e4m3_to_f32(positive)), positive | 0x80);
        }
        for below in 0..0x7e {
            let (low, high) = (decode_e4m3_to_f32(below), decode_e4m3_to_f32(below + 1));
            let middle = (low + high) / 2.0;
            assert!(low < high);
            assert_eq!(
                encode_f32_as_e4m3(middle),
                below + below % 2,
                "tie between {low} and {high}"
            );
            assert_eq!(encode_f32_as_e4m3(middle - (high - low) / 16.0), below);
            assert_eq!(encode_f32_as_e4m3(middle + (high - low) / 16.0), below + 1);
        }
        assert_eq!(
            (decode_e4m3_to_f32(0x7e), encode_f32_as_e4m3(1e9), encode_f32_as_e4m3(f32::MIN)),
            (448.0, 0x7e, 0xfe)
        );
    }
}
