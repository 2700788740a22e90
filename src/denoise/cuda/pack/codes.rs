//! Quantised weights in the layout of the persistent kernel: panels as in bf16, with units of eight
//! columns and 64 of k. Each unit has `[k / 16][8 columns][16 codes]` and, for each column, a bf16
//! factor that multiplies the decoded codes.
//!
//! For fp8, the kernel places a code's bits in a bf16 with the same exponent bits, which is 2^-120
//! of the code's value; the factor compensates for that. The bytes of four codes are those of k +
//! 2, k, k + 3, k + 1, so that shifts alone move neighbours along k into the two halves of a word.
//!
//! For int4, a code is the number plus 8. A word has eight codes: even k in its lower half, odd k
//! in its upper half, each in ascending order. A unit is half a group of k and contains its scales.

use half::bf16;
use kernelgate::workload::Dtype;

/// Number of columns in a unit of quantised weights.
pub const UNIT_COLUMNS: usize = 8;
pub const UNIT_DEPTH: usize = 64;
/// Number of codes in a thread's 16-byte access.
pub const CODES_PER_ACCESS: usize = 16;
/// Position of the code of each k among four neighbouring codes.
const CODE_POSITIONS: [usize; 4] = [1, 3, 0, 2];
/// Byte offset of the factors in an fp8 unit, after the codes.
pub const FP8_FACTORS_OFFSET: usize = UNIT_COLUMNS * UNIT_DEPTH;
/// Number of bytes of an fp8 unit.
pub const FP8_UNIT_BYTES: usize = FP8_FACTORS_OFFSET + UNIT_COLUMNS * Dtype::Bf16.bytes();

/// Byte offset of the factors in an int4 unit.
pub const INT4_FACTORS_OFFSET: usize = UNIT_COLUMNS * UNIT_DEPTH / 2;
pub const INT4_UNIT_BYTES: usize = INT4_FACTORS_OFFSET + UNIT_COLUMNS * Dtype::Bf16.bytes();

/// Writes a unit of int4. `codes` returns the numbers of all columns at one k; `scales` has one
/// scale for each column.
pub fn pack_int4_unit<'a>(to: &mut [u8], codes: impl Fn(usize) -> &'a [i8], scales: &[bf16]) {
    let (places, factors) = to.split_at_mut(INT4_FACTORS_OFFSET);
    places.fill(0);
    for k in 0..UNIT_DEPTH {
        for (column, &code) in codes(k).iter().enumerate() {
            let place = int4_code_position(k, column);
            places[place / 2] |= ((code + 8) as u8) << (place % 2 * 4);
        }
    }
    factors.copy_from_slice(bytemuck::cast_slice(scales));
}

/// Position of an int4 code in its unit, in units of four bits.
const fn int4_code_position(k: usize, column: usize) -> usize {
    (k / CODES_PER_ACCESS * UNIT_COLUMNS + column) * CODES_PER_ACCESS
        + k % CODES_PER_ACCESS / 8 * 8
        + k % 8 / 2
        + k % 2 * 4
}

/// Writes a unit of fp8. `codes` returns the codes of all columns at one k; `exponents` has one for
/// each column.
pub fn pack_fp8_unit<'a>(to: &mut [u8], codes: impl Fn(usize) -> &'a [u8], exponents: &[i8]) {
    let (places, factors) = to.split_at_mut(FP8_FACTORS_OFFSET);
    for k in 0..UNIT_DEPTH {
        for (column, &code) in codes(k).iter().enumerate() {
            places[fp8_code_position(k, column)] = code;
        }
    }
    for (&exponent, factor) in exponents.iter().zip(factors.chunks_exact_mut(2)) {
        let power = bf16::from_f32(2f32.powi(i32::from(exponent) + 120));
        factor.copy_from_slice(&power.to_le_bytes());
    }
}

/// Position in bytes of an fp8 code in its unit.
const fn fp8_code_position(k: usize, column: usize) -> usize {
    (k / CODES_PER_ACCESS * UNIT_COLUMNS + column) * CODES_PER_ACCESS
        + k % CODES_PER_ACCESS / 4 * 4
        + CODE_POSITIONS[k % 4]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_a_unit_are_all_different() {
        let mut places: Vec<_> =
            (0..FP8_FACTORS_OFFSET).map(|i| fp8_code_position(i / 8, i % 8)).collect();
        assert_eq!([0, 1, 2, 3, 16].map(|k| fp8_code_position(k, 0)), [1, 3, 0, 2, 129]);
        places.sort_unstable();
        assert_eq!(places, (0..FP8_FACTORS_OFFSET).collect::<Vec<_>>());
        let mut places: Vec<_> =
            (0..FP8_FACTORS_OFFSET).map(|i| int4_code_position(i / 8, i % 8)).collect();
        assert_eq!([0, 1, 2, 8, 16].map(|k| int4_code_position(k, 0)), [0, 4, 1, 8, 128]);
        places.sort_unstable();
        assert_eq!(places, (0..FP8_FACTORS_OFFSET).collect::<Vec<_>>());
    }
}
