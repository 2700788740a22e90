//! Lists of operations, sorted by time. Most recorders write operations in that order, and then no
//! list is made.

use crate::analyze::operations::OperationId;
use crate::model::packed_columns::{PackedColumn, partition_point};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SortedOperations {
    /// All operations with numbers below this one, in numeric order.
    Numbers(u32),
    /// The operations of a list, in the order of the list.
    Listed(PackedColumn<OperationId>),
}

impl Default for SortedOperations {
    fn default() -> Self {
        Self::Numbers(0)
    }
}

impl SortedOperations {
    /// Operations, given in the order of their numbers, by a key; of one key by their numbers.
    pub fn operations_by_key<K: Ord>(
        ids: impl Iterator<Item = OperationId> + Clone,
        key: impl Fn(OperationId) -> K,
    ) -> Self {
        if !ids.clone().is_sorted_by_key(&key) {
            let mut ids: Vec<OperationId> = ids.collect();
            ids.sort_unstable_by_key(|&id| (key(id), id));
            return Self::Listed(ids.into_iter().collect());
        }
        let mut count = 0;
        let numbered = ids.clone().all(|id| {
            count += 1;
            id == count - 1
        });
        if numbered { Self::Numbers(count) } else { Self::Listed(ids.collect()) }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Self::Numbers(count) => *count as usize,
            Self::Listed(ids) => ids.len(),
        }
    }

    /// Returns whether the list contains no operation.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn get(&self, position: usize) -> Option<OperationId> {
        match self {
            Self::Numbers(count) => u32::try_from(position).ok().filter(|number| number < count),
            Self::Listed(ids) => ids.get(position),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = OperationId> + Clone + '_ {
        (0..self.len()).filter_map(|position| self.get(position))
    }

    /// The first position at which a condition no longer holds.
    pub fn partition_point(&self, holds: impl Fn(OperationId) -> bool) -> usize {
        partition_point(self.len(), |position| self.get(position).is_some_and(&holds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_in_numeric_order_stores_no_numbers() {
        let starts = [3, 5, 5, 9];
        let order = SortedOperations::operations_by_key(0..4, |id| starts[id as usize]);
        assert_eq!(order, SortedOperations::Numbers(4));
        assert_eq!(order.iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(order.partition_point(|id| starts[id as usize] < 6), 3);
        assert_eq!((order.get(3), order.get(4)), (Some(3), None));
    }

    #[test]
    fn lists_in_another_order_are_sorted_and_stored() {
        let starts = [9, 5, 3, 5];
        let order = SortedOperations::operations_by_key(0..4, |id| starts[id as usize]);
        assert_eq!(order, SortedOperations::Listed([2, 1, 3, 0].into_iter().collect()));
        assert_eq!(order.partition_point(|id| starts[id as usize] < 6), 3);
        let some =
            SortedOperations::operations_by_key([1, 3].into_iter(), |id| starts[id as usize]);
        assert_eq!(
            some,
            SortedOperations::Listed([1, 3].into_iter().collect()),
            "of one key by their numbers"
        );
    }
}
