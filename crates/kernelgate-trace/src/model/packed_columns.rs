//! Columns of numbers in few bits: each block of rows stores its least value, and for each row the
//! distance from it. Reading or replacing any row of a column takes constant time.

use std::collections::VecDeque;
use std::marker::PhantomData;

const BLOCK_ROWS: usize = 256;
/// Bytes that are read for a distance.
const READ_WORD_BYTES: usize = 8;
/// Blocks that are stored uncompressed while their rows change.
const UNPACKED_BLOCKS: usize = 8;

/// A value that a packed column can store.
pub trait PackedValue: Copy {
    /// Converts the value to a number.
    fn number(self) -> i64;
    /// Value from its number.
    fn from_number(number: i64) -> Self;
}

impl PackedValue for i64 {
    fn number(self) -> i64 {
        self
    }

    fn from_number(number: i64) -> Self {
        number
    }
}

impl PackedValue for u64 {
    fn number(self) -> i64 {
        self.cast_signed()
    }

    fn from_number(number: i64) -> Self {
        number.cast_unsigned()
    }
}

impl PackedValue for u32 {
    fn number(self) -> i64 {
        i64::from(self)
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn from_number(number: i64) -> Self {
        number as Self
    }
}

#[derive(Debug, Clone)]
pub struct PackedColumn<T> {
    blocks: Vec<PackedBlock>,
    /// Blocks stored with full width, oldest first.
    wide: VecDeque<usize>,
    rows: usize,
    cell: PhantomData<T>,
}

/// A block of packed rows.
#[derive(Debug, Clone)]
struct PackedBlock {
    /// The least value, or 0 in a block that is as wide as any value.
    least: i64,
    /// Bits of the distance of a row from it; 0: all rows are the least value.
    bits: u32,
    /// The lowest `bits` bits.
    mask: u64,
    distances: Box<[u8]>,
}

impl PackedBlock {
    fn from_constant(value: i64) -> PackedBlock {
        Self { least: value, bits: 0, mask: 0, distances: Box::default() }
    }

    /// Packs rows into as few bits as their values need.
    fn pack_rows(rows: &[i64; BLOCK_ROWS]) -> PackedBlock {
        let (mut least, mut most) = (rows[0], rows[0]);
        for &row in rows {
            (least, most) = (least.min(row), most.max(row));
        }
        let widest = most.wrapping_sub(least).cast_unsigned();
        match u64::BITS - widest.leading_zeros() {
            0 => Self::from_constant(least),
            // A value of up to 57 bits lies within eight bytes, whichever bit of the first byte it
            // starts at.
            bits @ 1..=57 => Self::new(rows, least, bits),
            _ => Self::full_width_block(rows),
        }
    }

    /// Stores rows in full width, so that each row can be replaced.
    fn full_width_block(rows: &[i64; BLOCK_ROWS]) -> PackedBlock {
        Self::new(rows, 0, u64::BITS)
    }

    fn new(rows: &[i64; BLOCK_ROWS], least: i64, bits: u32) -> Self {
        let mut distances = vec![0; BLOCK_ROWS / 8 * bits as usize + READ_WORD_BYTES];
        // Bits that are not written yet; all rows together fill whole words.
        let (mut pending, mut count) = (0u64, 0);
        let mut words = distances.as_chunks_mut::<READ_WORD_BYTES>().0.iter_mut();
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
        Self { least, bits, mask, distances: distances.into() }
    }

    /// A row.
    #[inline]
    fn at(&self, index: usize) -> i64 {
        let (byte, shift) = bit_position(index, self.bits);
        let word =
            self.distances.get(byte..).and_then(|from| from.first_chunk::<READ_WORD_BYTES>());
        let distance = word.map_or(0, |word| u64::from_le_bytes(*word)) >> shift & self.mask;
        self.least.wrapping_add(distance.cast_signed())
    }

    fn unpack_rows(&self) -> [i64; BLOCK_ROWS] {
        std::array::from_fn(|index| self.at(index))
    }
}

/// Byte and bit at which the distance of a row begins.
#[inline]
fn bit_position(index: usize, bits: u32) -> (usize, u32) {
    let bit = index * bits as usize;
    (bit / 8, (bit % 8) as u32)
}

impl<T> Default for PackedColumn<T> {
    fn default() -> Self {
        Self { blocks: Vec::new(), wide: VecDeque::new(), rows: 0, cell: PhantomData }
    }
}

impl<T> PackedColumn<T> {
    /// Number of rows of the column.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Whether the column has no row.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }
}

impl<T: PackedValue> PackedColumn<T> {
    /// A column of `rows` rows with one value.
    pub fn column_filled_with(rows: usize, value: T) -> PackedColumn<T> {
        let blocks = vec![PackedBlock::from_constant(value.number()); rows.div_ceil(BLOCK_ROWS)];
        Self { blocks, rows, ..Self::default() }
    }

    /// The value of a row, which must exist.
    ///
    /// # Panics
    /// Panics if the row does not exist.
    #[inline]
    pub fn at(&self, row: usize) -> T {
        debug_assert!(row < self.rows, "row {row} of {}", self.rows);
        T::from_number(self.blocks[row / BLOCK_ROWS].at(row % BLOCK_ROWS))
    }

    /// The value of a row, if the row exists.
    pub fn get(&self, row: usize) -> Option<T> {
        (row < self.rows).then(|| self.at(row))
    }

    /// All values.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = T> + DoubleEndedIterator + '_ {
        (0..self.rows).map(|row| self.at(row))
    }

    /// Adds a row.
    pub fn push(&mut self, value: T) {
        if self.rows.is_multiple_of(BLOCK_ROWS) {
            self.blocks.push(PackedBlock::from_constant(value.number()));
        }
        // Up to here all rows of the block equal its first one, and need no bits of their own.
        self.rows += 1;
        self.set_row(self.rows - 1, value);
    }

    /// Replaces the value of a row.
    ///
    /// # Panics
    /// The column has no row with this index.
    pub fn set_row(&mut self, row: usize, value: T) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let (number, index, value) = (row / BLOCK_ROWS, row % BLOCK_ROWS, value.number());
        let block = &mut self.blocks[number];
        if block.bits < u64::BITS {
            if block.at(index) == value {
                return;
            }
            *block = PackedBlock::full_width_block(&block.unpack_rows());
            self.wide.push_back(number);
            if self.wide.len() > UNPACKED_BLOCKS
                && let Some(oldest) = self.wide.pop_front()
            {
                self.blocks[oldest] = PackedBlock::pack_rows(&self.blocks[oldest].unpack_rows());
            }
        }
        let (byte, _) = bit_position(index, u64::BITS);
        if let Some(word) =
            self.blocks[number].distances[byte..].first_chunk_mut::<READ_WORD_BYTES>()
        {
            *word = value.to_le_bytes();
        }
    }

    /// The first row from which on a condition no longer holds.
    pub fn partition_point(&self, holds: impl Fn(T) -> bool) -> usize {
        partition_point(self.rows, |row| holds(self.at(row)))
    }

    /// The rows whose numbers are given; nothing of a column that was not recorded.
    pub(crate) fn select_rows(&self, rows: &[u32]) -> Self {
        if self.is_empty() {
            return Self::default();
        }
        rows.iter().map(|&row| self.at(row as usize)).collect()
    }
}

/// The first of `count` numbers from which on a condition no longer holds.
pub(crate) fn partition_point(count: usize, holds: impl Fn(usize) -> bool) -> usize {
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

impl<T: PackedValue> Extend<T> for PackedColumn<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, values: I) {
        values.into_iter().for_each(|value| self.push(value));
    }
}

impl<T: PackedValue> FromIterator<T> for PackedColumn<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        let mut column = Self::default();
        column.extend(values);
        column
    }
}

impl<T: PackedValue + PartialEq> PartialEq for PackedColumn<T> {
    fn eq(&self, other: &Self) -> bool {
        self.rows == other.rows && self.iter().eq(other.iter())
    }
}

impl<T: PackedValue + Eq> Eq for PackedColumn<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of every width that follow no order.
    fn to_i64(row: usize) -> i64 {
        let mixed = (row as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed ^ mixed >> 29).cast_signed() >> (row / 300 % 64)
    }

    #[test]
    fn packed_columns_store_rows_of_any_width_exactly() {
        let extremes = [i64::MIN, i64::MAX, 0, -1, 1];
        let rows: Vec<i64> = (0..20_000).map(to_i64).chain(extremes).chain([7; 1000]).collect();
        let column: PackedColumn<i64> = rows.iter().copied().collect();
        assert_eq!((column.len(), column.is_empty()), (rows.len(), false));
        assert!(column.iter().eq(rows.iter().copied()));
        assert_eq!((column.get(3), column.get(rows.len())), (Some(rows[3]), None));
    }

    #[test]
    fn replaced_rows_of_a_packed_column_are_exact_in_any_order() {
        let mut rows = vec![-5; 10_000];
        let mut column = PackedColumn::column_filled_with(rows.len(), -5);
        for step in 0..40_000 {
            let row = step * 7919 % rows.len();
            rows[row] = to_i64(step);
            column.set_row(row, rows[row]);
        }
        assert!(column.iter().eq(rows.iter().copied()));
        assert_eq!(
            column.select_rows(&[3, 9_999]).iter().collect::<Vec<_>>(),
            [rows[3], rows[9_999]]
        );
    }

    #[test]
    fn neighbouring_values_take_few_bytes_in_a_packed_column() {
        let column: PackedColumn<i64> = (0..100_000).map(|row| row * 10_000 + row % 7).collect();
        let narrow = column.blocks.iter().filter(|block| block.bits < u64::BITS);
        let bytes: usize = narrow.map(|block| block.distances.len()).sum();
        assert!(bytes < 100_000 * 3, "{bytes}");
        assert_eq!(column.partition_point(|start| start < 50_000_000), 5000);
    }

    #[test]
    fn unsigned_rows_of_a_packed_column_keep_their_upper_bits() {
        let column: PackedColumn<u64> = [u64::MAX, 0, 1 << 63].into_iter().collect();
        assert_eq!(column.iter().collect::<Vec<_>>(), [u64::MAX, 0, 1 << 63]);
        let column: PackedColumn<u32> = [u32::MAX, 0, 3].into_iter().collect();
        assert_eq!(column.iter().collect::<Vec<_>>(), [u32::MAX, 0, 3]);
    }
}
