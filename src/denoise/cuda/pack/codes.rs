//! Quantised weights in the layout of the persistent kernel: panels as those of bf16, units of
//! eight columns and 64 of k. Each unit has `[k / 16][8 columns][16 codes]` and for each column a
//! bf16 factor of its decoded codes.
//!
//! fp8: the kernel reads a code's bits as a bf16 with the same exponent field, which is 2^-120 of
//! its value; the factor compensates for that. The bytes of four codes are those of k + 2, k, k +
//! 3, k + 1, so that shifts alone move neighbours of k into the two halves of a word.
//!
//! int4: a code is a number plus 8. A word has eight codes: even k in its lower half, odd k in its
//! upper half, each in the order of k. A unit is half a group of k and has its scales.

use half::bf16;
use kernelgate::workload::Dtype;

/// Columns and k of a unit.
pub const COLUMNS: usize = 8;
pub const DEPTH: usize = 64;
/// Codes of a thread's 16-byte access.
pub const GROUP: usize = 16;
/// Position of the code of each k among four.
const PLACES: [usize; 4] = [1, 3, 0, 2];
/// Offset of the factors, behind the codes.
pub const FP8_FACTORS_OFFSET: usize = COLUMNS * DEPTH;
/// Bytes of a unit of fp8.
pub const FP8_UNIT_BYTES: usize = FP8_FACTORS_OFFSET + COLUMNS * Dtype::Bf16.bytes();

/// Offset of the factors in a unit of int4.
pub const INT4_FACTORS_OFFSET: usize = COLUMNS * DEPTH / 2;
pub const INT4_UNIT_BYTES: usize = INT4_FACTORS_OFFSET + COLUMNS * Dtype::Bf16.bytes();

/// Writes a unit of int4: the numbers of its columns at each k, as `codes` gives them, and their
/// scales.
pub fn pack_int4_unit<'a>(to: &mut [u8], codes: impl Fn(usize) -> &'a [i8], scales: &[bf16]) {
    let (places, factors) = to.split_at_mut(INT4_FACTORS_OFFSET);
    places.fill(0);
    for k in 0..DEPTH {
        for (column, &code) in codes(k).iter().enumerate() {
            let place = int4_code_position(k, column);
            places[place / 2] |= ((code + 8) as u8) << (place % 2 * 4);
        }
    }
    factors.copy_from_slice(bytemuck::cast_slice(scales));
}

/// Position of a code of int4 in its unit, in units of four bits.
const fn int4_code_position(k: usize, column: usize) -> usize {
    (k / GROUP * COLUMNS + column) * GROUP + k % GROUP / 8 * 8 + k % 8 / 2 + k % 2 * 4
}

/// Writes a unit of fp8: the codes of its columns at each k, as `codes` gives them, and their factors.
pub fn pack_fp8_unit<'a>(to: &mut [u8], codes: impl Fn(usize) -> &'a [u8], exponents: &[i8]) {
    let (places, factors) = to.split_at_mut(FP8_FACTORS_OFFSET);
    for k in 0..DEPTH {
        for (column, &code) in codes(k).iter().enumerate() {
            places[place(k, column)] = code;
        }
    }
    for (&exponent, factor) in exponents.iter().zip(factors.chunks_exact_mut(2)) {
        let power = bf16::from_f32(2f32.powi(i32::from(exponent) + 120));
        factor.copy_from_slice(&power.to_le_bytes());
    }
}

/// Position of a code in its unit.
const fn place(k: usize, column: usize) -> usize {
    (k / GROUP * COLUMNS + column) * GROUP + k % GROUP / 4 * 4 + PLACES[k % 4]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_a_unit_are_all_different() {
        let mut places: Vec<_> = (0..FP8_FACTORS_OFFSET).map(|i| place(i / 8, i % 8)).collect();
        assert_eq!([0, 1, 2, 3, 16].map(|k| place(k, 0)), [1, 3, 0, 2, 129]);
        places.sort_unstable();
        assert_eq!(places, (0..FP8_FACTORS_OFFSET).collect::<Vec<_>>());
        let mut places: Vec<_> =
            (0..FP8_FACTORS_OFFSET).map(|i| int4_code_position(i / 8, i % 8)).collect();
        assert_eq!([0, 1, 2, 8, 16].map(|k| int4_code_position(k, 0)), [0, 4, 1, 8, 128]);
        places.sort_unstable();
        assert_eq!(places, (0..FP8_FACTORS_OFFSET).collect::<Vec<_>>());
    }
}
