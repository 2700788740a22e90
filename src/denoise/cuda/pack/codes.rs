//! Quantised weights in the layout of the persistent kernel: panels as in bf16, in units of eight
//! columns by 64 rows of k. Each unit of quantised weights has codes `[k / 16][8 columns][16
//! codes]` and, for each column, a bf16 factor that multiplies the decoded codes.
//!
//! The kernel places the bits of an fp8 code in a bf16 with the same exponent bits, which is 2^-120
//! of the code's value; the column's factor compensates. Four fp8 codes are stored in the byte
//! order k + 2, k, k + 3, k + 1, so that shifts alone move neighbours along k into the halves of a
//! word.
//!
//! An int4 code is the quantised integer plus 8. A 32-bit word has eight int4 codes: those of even
//! k in its lower half, those of odd k in its upper half, each in ascending order of k. An int4
//! unit covers half a scale group of k and contains the scales of its columns.

use half::bf16;
use kernelgate::workload::Dtype;

/// Number of weight columns in a unit of quantised weights.
pub const COLUMNS_PER_QUANTISED_UNIT: usize = 8;
pub const K_ROWS_PER_QUANTISED_UNIT: usize = 64;
/// Number of fp8 codes in a thread's 16-byte load.
pub const FP8_CODES_PER_16_BYTE_LOAD: usize = 16;
/// Position of the fp8 code of each k within a word of four neighbouring codes.
const FP8_CODE_POSITIONS_IN_WORD: [usize; 4] = [1, 3, 0, 2];
/// Byte offset of the bf16 column factors in an fp8 unit, after the codes.
pub const FP8_FACTORS_BYTE_OFFSET_IN_UNIT: usize =
    COLUMNS_PER_QUANTISED_UNIT * K_ROWS_PER_QUANTISED_UNIT;
/// Number of bytes of an fp8 unit: codes and column factors.
pub const FP8_UNIT_BYTES: usize =
    FP8_FACTORS_BYTE_OFFSET_IN_UNIT + COLUMNS_PER_QUANTISED_UNIT * Dtype::Bf16.bytes_per_element();

/// Byte offset of the bf16 column factors in an int4 unit, after the codes.
pub const INT4_FACTORS_BYTE_OFFSET_IN_UNIT: usize =
    COLUMNS_PER_QUANTISED_UNIT * K_ROWS_PER_QUANTISED_UNIT / 2;
pub const INT4_UNIT_BYTES: usize =
    INT4_FACTORS_BYTE_OFFSET_IN_UNIT + COLUMNS_PER_QUANTISED_UNIT * Dtype::Bf16.bytes_per_element();

/// Writes the packed bytes of one unit of int4 weights, eight columns by 64 rows of k. The function
/// `codes` returns the eight columns' quantised integers at one k; `scales` has one scale for each
/// column.
pub fn write_packed_int4_unit<'a>(
    to: &mut [u8],
    codes: impl Fn(usize) -> &'a [i8],
    scales: &[bf16],
) {
    let (places, factors) = to.split_at_mut(INT4_FACTORS_BYTE_OFFSET_IN_UNIT);
    places.fill(0);
    for k in 0..K_ROWS_PER_QUANTISED_UNIT {
        for (column, &code) in codes(k).iter().enumerate() {
            let place = int4_code_index_in_unit(k, column);
            places[place / 2] |= ((code + 8) as u8) << (place % 2 * 4);
        }
    }
    factors.copy_from_slice(bytemuck::cast_slice(scales));
}

/// Index of an int4 code among the 4-bit positions of its unit.
const fn int4_code_index_in_unit(k: usize, column: usize) -> usize {
    (k / FP8_CODES_PER_16_BYTE_LOAD * COLUMNS_PER_QUANTISED_UNIT + column)
        * FP8_CODES_PER_16_BYTE_LOAD
        + k % FP8_CODES_PER_16_BYTE_LOAD / 8 * 8
        + k % 8 / 2
        + k % 2 * 4
}

/// Writes the packed bytes of one unit of fp8 weights, eight columns by 64 rows of k. The function
/// `codes` returns the eight columns' fp8 codes at one k; `exponents` has the power of two of each
/// column.
pub fn write_packed_fp8_unit<'a>(
    to: &mut [u8],
    codes: impl Fn(usize) -> &'a [u8],
    exponents: &[i8],
) {
    let (places, factors) = to.split_at_mut(FP8_FACTORS_BYTE_OFFSET_IN_UNIT);
    for k in 0..K_ROWS_PER_QUANTISED_UNIT {
        for (column, &code) in codes(k).iter().enumerate() {
            places[fp8_code_offset_in_unit(k, column)] = code;
        }
    }
    for (&exponent, factor) in exponents.iter().zip(factors.chunks_exact_mut(2)) {
        let power = bf16::from_f32(2f32.powi(i32::from(exponent) + 120));
        factor.copy_from_slice(&power.to_le_bytes());
    }
}

/// Byte offset of the fp8 code of a row k and a column within its packed unit.
const fn fp8_code_offset_in_unit(k: usize, column: usize) -> usize {
    (k / FP8_CODES_PER_16_BYTE_LOAD * COLUMNS_PER_QUANTISED_UNIT + column)
        * FP8_CODES_PER_16_BYTE_LOAD
        + k % FP8_CODES_PER_16_BYTE_LOAD / 4 * 4
        + FP8_CODE_POSITIONS_IN_WORD[k % 4]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_quantised_weight_of_a_unit_has_its_own_position() {
        let mut places: Vec<_> = (0..FP8_FACTORS_BYTE_OFFSET_IN_UNIT)
            .map(|i| fp8_code_offset_in_unit(i / 8, i % 8))
            .collect();
        assert_eq!([0, 1, 2, 3, 16].map(|k| fp8_code_offset_in_unit(k, 0)), [1, 3, 0, 2, 129]);
        places.sort_unstable();
        assert_eq!(places, (0..FP8_FACTORS_BYTE_OFFSET_IN_UNIT).collect::<Vec<_>>());
        let mut places: Vec<_> = (0..FP8_FACTORS_BYTE_OFFSET_IN_UNIT)
            .map(|i| int4_code_index_in_unit(i / 8, i % 8))
            .collect();
        assert_eq!([0, 1, 2, 8, 16].map(|k| int4_code_index_in_unit(k, 0)), [0, 4, 1, 8, 128]);
        places.sort_unstable();
        assert_eq!(places, (0..FP8_FACTORS_BYTE_OFFSET_IN_UNIT).collect::<Vec<_>>());
    }
}
