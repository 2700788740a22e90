//! Compressed columns of integers: each block of rows stores its minimum, and the distance of each
//! row from the minimum in few bits. Reading any row of a compressed column, or replacing it, takes
//! constant time.

use std::collections::VecDeque;
use std::marker::PhantomData;

const ROWS_PER_PACKED_BLOCK: usize = 256;
/// Number of bytes that are read at once to decode the packed distance of a row.
const PACKED_READ_BYTES: usize = 8;
/// Number of blocks that are kept uncompressed while their rows are being replaced.
const MAX_UNCOMPRESSED_BLOCKS: usize = 8;

/// An integer-like value that a compressed column can store.
pub trait PackableInteger: Copy {
    /// Converts the value to the 64-bit integer that the compressed column stores.
    fn to_packed_integer(self) -> i64;
    /// Converts the 64-bit integer that the compressed column stores back to the value.
    fn from_packed_integer(number: i64) -> Self;
}

impl PackableInteger for i64 {
    fn to_packed_integer(self) -> i64 {
        self
    }

    fn from_packed_integer(number: i64) -> Self {
        number
    }
}

impl PackableInteger for u64 {
    fn to_packed_integer(self) -> i64 {
        self.cast_signed()
    }

    fn from_packed_integer(number: i64) -> Self {
        number.cast_unsigned()
    }
}

impl PackableInteger for u32 {
    fn to_packed_integer(self) -> i64 {
        i64::from(self)
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn from_packed_integer(number: i64) -> Self {
        number as Self
    }
}

#[derive(Debug, Clone)]
pub struct BitPackedColumn<T> {
    blocks: Vec<BitPackedBlock>,
    /// Indices of the uncompressed blocks, least recently uncompressed first.
    uncompressed_block_indices: VecDeque<usize>,
    rows: usize,
    value_type: PhantomData<T>,
}

/// A block of up to 256 bit-packed rows.
#[derive(Debug, Clone)]
struct BitPackedBlock {
    /// Minimum of the block's rows; 0 if the block stores rows in full 64-bit width.
    block_minimum: i64,
    /// Bits per row for the distance from the minimum; 0 if all rows equal the minimum.
    bits_per_row: u32,
    /// Bit mask of the lowest `bits` bits, with which the distance of a row is cut out.
    row_bit_mask: u64,
    distances_from_minimum: Box<[u8]>,
}

impl BitPackedBlock {
    fn pack_equal_rows(value: i64) -> BitPackedBlock {
        Self {
            block_minimum: value,
            bits_per_row: 0,
            row_bit_mask: 0,
            distances_from_minimum: Box::default(),
        }
    }

    /// Packs the rows of a block into the fewest bits that hold each row's distance from the
    /// minimum.
    fn pack_block_rows(rows: &[i64; ROWS_PER_PACKED_BLOCK]) -> BitPackedBlock {
        let (mut least, mut most) = (rows[0], rows[0]);
        for &row in rows {
            (least, most) = (least.min(row), most.max(row));
        }
        let widest = most.wrapping_sub(least).cast_unsigned();
        match u64::BITS - widest.leading_zeros() {
            0 => Self::pack_equal_rows(least),
            // A distance of up to 57 bits lies within eight bytes, at whichever bit of the first
            // byte it starts.
            bits @ 1..=57 => Self::block_of_distances_from_least(rows, least, bits),
            _ => Self::pack_block_at_full_width(rows),
        }
    }

    /// Stores the rows of a block in full 64-bit width, so that single rows can be replaced.
    fn pack_block_at_full_width(rows: &[i64; ROWS_PER_PACKED_BLOCK]) -> BitPackedBlock {
        Self::block_of_distances_from_least(rows, 0, u64::BITS)
    }

    fn block_of_distances_from_least(
        rows: &[i64; ROWS_PER_PACKED_BLOCK],
        least: i64,
        bits: u32,
    ) -> Self {
        let mut distances = vec![0; ROWS_PER_PACKED_BLOCK / 8 * bits as usize + PACKED_READ_BYTES];
        // Collects packed bits until a 64-bit word is full; all rows of a block together fill whole
        // words.
        let (mut pending, mut count) = (0u64, 0);
        let mut words = distances.as_chunks_mut::<PACKED_READ_BYTES>().0.iter_mut();
        for row in rows {
            let distance = row.wrapping_sub(least).cast_unsigned();
            pending |= distance << count;
            count += bits;
            if count >= u64::BITS {
                count -= u64::BITS;
                if let Some(word) = words.next() {
                    *word = pending.to_le_bytes();
                }
                pending = distance.checked_shr(bits - count).unwrap_or(0);
            }
        }
        let mask = u64::MAX >> (u64::BITS - bits);
        Self {
            block_minimum: least,
            bits_per_row: bits,
            row_bit_mask: mask,
            distances_from_minimum: distances.into(),
        }
    }

    /// A row.
    #[inline]
    fn at(&self, index: usize) -> i64 {
        let (byte, shift) = bit_offset_of_packed_row(index, self.bits_per_row);
        let word = self
            .distances_from_minimum
            .get(byte..)
            .and_then(|from| from.first_chunk::<PACKED_READ_BYTES>());
        let distance =
            word.map_or(0, |word| u64::from_le_bytes(*word)) >> shift & self.row_bit_mask;
        self.block_minimum.wrapping_add(distance.cast_signed())
    }

    fn unpack_block_rows(&self) -> [i64; ROWS_PER_PACKED_BLOCK] {
        std::array::from_fn(|index| self.at(index))
    }
}

/// Byte and bit offset within the block at which the packed distance of a row begins.
#[inline]
fn bit_offset_of_packed_row(index: usize, bits: u32) -> (usize, u32) {
    let bit = index * bits as usize;
    (bit / 8, (bit % 8) as u32)
}

impl<T> Default for BitPackedColumn<T> {
    fn default() -> Self {
        Self {
            blocks: Vec::new(),
            uncompressed_block_indices: VecDeque::new(),
            rows: 0,
            value_type: PhantomData,
        }
    }
}

impl<T> BitPackedColumn<T> {
    /// Number of rows of the compressed column.
    pub fn row_count(&self) -> usize {
        self.rows
    }

    /// Whether the compressed column contains no row.
    pub fn has_no_row(&self) -> bool {
        self.rows == 0
    }
}

impl<T: PackableInteger> BitPackedColumn<T> {
    /// Creates a compressed column of `rows` rows that all hold the same value.
    pub fn column_filled_with(rows: usize, value: T) -> BitPackedColumn<T> {
        let blocks = vec![
            BitPackedBlock::pack_equal_rows(value.to_packed_integer());
            rows.div_ceil(ROWS_PER_PACKED_BLOCK)
        ];
        Self { blocks, rows, ..Self::default() }
    }

    /// Decodes the value of a row.
    ///
    /// # Panics
    /// Panics if the column has no such row.
    #[inline]
    pub fn at(&self, row: usize) -> T {
        debug_assert!(row < self.rows, "row {row} of {}", self.rows);
        T::from_packed_integer(
            self.blocks[row / ROWS_PER_PACKED_BLOCK].at(row % ROWS_PER_PACKED_BLOCK),
        )
    }

    /// Decodes the value of a row; `None` if the column has no such row.
    pub fn decoded_row(&self, row: usize) -> Option<T> {
        (row < self.rows).then(|| self.at(row))
    }

    /// All values.
    pub fn iter_decoded_rows(&self) -> impl ExactSizeIterator<Item = T> + DoubleEndedIterator + '_ {
        (0..self.rows).map(|row| self.at(row))
    }

    /// Adds a row.
    pub fn push_row(&mut self, value: T) {
        if self.rows.is_multiple_of(ROWS_PER_PACKED_BLOCK) {
            self.blocks.push(BitPackedBlock::pack_equal_rows(value.to_packed_integer()));
        }
        // Until this push, all rows of the new block equal the pushed value, so the block needs no
        // bits per row.
        self.rows += 1;
        self.replace_row(self.rows - 1, value);
    }

    /// Replaces the value of a row of the compressed column.
    ///
    /// # Panics
    /// Panics if the column has no such row.
    pub fn replace_row(&mut self, row: usize, value: T) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let (number, index, value) =
            (row / ROWS_PER_PACKED_BLOCK, row % ROWS_PER_PACKED_BLOCK, value.to_packed_integer());
        let block = &mut self.blocks[number];
        if block.bits_per_row < u64::BITS {
            if block.at(index) == value {
                return;
            }
            *block = BitPackedBlock::pack_block_at_full_width(&block.unpack_block_rows());
            self.uncompressed_block_indices.push_back(number);
            if self.uncompressed_block_indices.len() > MAX_UNCOMPRESSED_BLOCKS
                && let Some(oldest) = self.uncompressed_block_indices.pop_front()
            {
                self.blocks[oldest] =
                    BitPackedBlock::pack_block_rows(&self.blocks[oldest].unpack_block_rows());
            }
        }
        let (byte, _) = bit_offset_of_packed_row(index, u64::BITS);
        if let Some(word) = self.blocks[number].distances_from_minimum[byte..]
            .first_chunk_mut::<PACKED_READ_BYTES>()
        {
            *word = value.to_le_bytes();
        }
    }

    /// Binary search: returns the first row whose value does not fulfil the condition; the rows
    /// must be partitioned by the condition.
    pub fn first_row_that_fails_condition(&self, holds: impl Fn(T) -> bool) -> usize {
        first_number_that_fails_condition(self.rows, |row| holds(self.at(row)))
    }

    /// Copies the given rows into a new column; returns an empty column if the trace did not record
    /// this column.
    pub(crate) fn select_packed_rows(&self, rows: &[u32]) -> Self {
        if self.has_no_row() {
            return Self::default();
        }
        rows.iter().map(|&row| self.at(row as usize)).collect()
    }
}

/// Binary search over 0..`count`: returns the first number that does not fulfil the condition; the
/// numbers must be partitioned by the condition.
pub(crate) fn first_number_that_fails_condition(
    count: usize,
    holds: impl Fn(usize) -> bool,
) -> usize {
    let (mut first, mut end) = (0, count);
    while first < end {
        let middle = first.midpoint(end);
        match holds(middle) {
            true => first = middle + 1,
            false => end = middle,
        }
    }
    first
}

impl<T: PackableInteger> Extend<T> for BitPackedColumn<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, values: I) {
        values.into_iter().for_each(|value| self.push_row(value));
    }
}

impl<T: PackableInteger> FromIterator<T> for BitPackedColumn<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        let mut column = Self::default();
        column.extend(values);
        column
    }
}

impl<T: PackableInteger + PartialEq> PartialEq for BitPackedColumn<T> {
    fn eq(&self, other: &Self) -> bool {
        self.rows == other.rows && self.iter_decoded_rows().eq(other.iter_decoded_rows())
    }
}

impl<T: PackableInteger + Eq> Eq for BitPackedColumn<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test data: pseudo-random numbers of 1 to 64 bits in no order.
    fn pseudo_random_number_for_row(row: usize) -> i64 {
        let mixed = (row as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ mixed >> 29).cast_signed() >> (row / 300 % 64)
    }

    #[test]
    fn packed_columns_store_rows_of_any_width_exactly() {
        let extremes = [i64::MIN, i64::MAX, 0, -1, 1];
        let rows: Vec<i64> = (0..20_000)
            .map(pseudo_random_number_for_row)
            .chain(extremes)
            .chain([7; 1000])
            .collect();
        let column: BitPackedColumn<i64> = rows.iter().copied().collect();
        assert_eq!((column.row_count(), column.has_no_row()), (rows.len(), false));
        assert!(column.iter_decoded_rows().eq(rows.iter().copied()));
        assert_eq!((column.decoded_row(3), column.decoded_row(rows.len())), (Some(rows[3]), None));
    }

    #[test]
    fn replaced_rows_of_a_packed_column_are_exact_in_any_order() {
        let mut rows = vec![-5; 10_000];
        let mut column = BitPackedColumn::column_filled_with(rows.len(), -5);
        for step in 0..40_000 {
            let row = step * 7919 % rows.len();
            rows[row] = pseudo_random_number_for_row(step);
            column.replace_row(row, rows[row]);
        }
        assert!(column.iter_decoded_rows().eq(rows.iter().copied()));
        assert_eq!(
            column.select_packed_rows(&[3, 9_999]).iter_decoded_rows().collect::<Vec<_>>(),
            [rows[3], rows[9_999]]
        );
    }

    #[test]
    fn neighbouring_values_take_few_bytes_in_a_packed_column() {
        let column: BitPackedColumn<i64> = (0..100_000).map(|row| row * 10_000 + row % 7).collect();
        let narrow = column.blocks.iter().filter(|block| block.bits_per_row < u64::BITS);
        let bytes: usize = narrow.map(|block| block.distances_from_minimum.len()).sum();
        assert!(bytes < 100_000 * 3, "{bytes}");
        assert_eq!(column.first_row_that_fails_condition(|start| start < 50_000_000), 5000);
    }

    #[test]
    fn unsigned_rows_of_a_packed_column_keep_their_upper_bits() {
        let column: BitPackedColumn<u64> = [u64::MAX, 0, 1 << 63].into_iter().collect();
        assert_eq!(column.iter_decoded_rows().collect::<Vec<_>>(), [u64::MAX, 0, 1 << 63]);
        let column: BitPackedColumn<u32> = [u32::MAX, 0, 3].into_iter().collect();
        assert_eq!(column.iter_decoded_rows().collect::<Vec<_>>(), [u32::MAX, 0, 3]);
    }
}
