//! Lists of GPU operations of a trace in order of a time or another key. Most recorders write
//! operations in order of time; then the order of their ids is the sorted order, and no list is
//! stored.

use crate::analyze::operations::GpuOperationId;
use crate::model::packed_columns::{BitPackedColumn, first_number_that_fails_condition};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OperationsInOrder {
    /// All operations with ids below this number, in order of their ids.
    AllBelowId(u32),
    /// Operations in an order that differs from the order of their ids.
    ListedIds(BitPackedColumn<GpuOperationId>),
}

impl Default for OperationsInOrder {
    fn default() -> Self {
        Self::AllBelowId(0)
    }
}

impl OperationsInOrder {
    /// Sorts operations by `key`; operations with equal keys are in order of their ids. The
    /// iterator gives the ids in ascending order.
    pub fn sort_operations_by_key<K: Ord>(
        ids: impl Iterator<Item = GpuOperationId> + Clone,
        key: impl Fn(GpuOperationId) -> K,
    ) -> Self {
        if !ids.clone().is_sorted_by_key(&key) {
            let mut ids: Vec<GpuOperationId> = ids.collect();
            ids.sort_unstable_by_key(|&id| (key(id), id));
            return Self::ListedIds(ids.into_iter().collect());
        }
        let mut count = 0;
        let numbered = ids.clone().all(|id| {
            count += 1;
            id == count - 1
        });
        if numbered { Self::AllBelowId(count) } else { Self::ListedIds(ids.collect()) }
    }

    /// Returns the number of operations in the list.
    pub fn len(&self) -> usize {
        match self {
            Self::AllBelowId(count) => *count as usize,
            Self::ListedIds(ids) => ids.row_count(),
        }
    }

    /// Returns whether the list of operations is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn get(&self, position: usize) -> Option<GpuOperationId> {
        match self {
            Self::AllBelowId(count) => u32::try_from(position).ok().filter(|number| number < count),
            Self::ListedIds(ids) => ids.decoded_row(position),
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = GpuOperationId> + Clone + '_ {
        (0..self.len()).filter_map(|position| self.get(position))
    }

    /// Returns the first position at which `holds` is false, if it holds for all operations before.
    pub fn first_position_where_not(&self, holds: impl Fn(GpuOperationId) -> bool) -> usize {
        first_number_that_fails_condition(self.len(), |position| {
            self.get(position).is_some_and(&holds)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_already_in_order_are_stored_as_a_count() {
        let starts = [3, 5, 5, 9];
        let order = OperationsInOrder::sort_operations_by_key(0..4, |id| starts[id as usize]);
        assert_eq!(order, OperationsInOrder::AllBelowId(4));
        assert_eq!(order.iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(order.first_position_where_not(|id| starts[id as usize] < 6), 3);
        assert_eq!((order.get(3), order.get(4)), (Some(3), None));
    }

    #[test]
    fn operations_in_another_order_are_sorted_and_stored() {
        let starts = [9, 5, 3, 5];
        let order = OperationsInOrder::sort_operations_by_key(0..4, |id| starts[id as usize]);
        assert_eq!(order, OperationsInOrder::ListedIds([2, 1, 3, 0].into_iter().collect()));
        assert_eq!(order.first_position_where_not(|id| starts[id as usize] < 6), 3);
        let some =
            OperationsInOrder::sort_operations_by_key([1, 3].into_iter(), |id| starts[id as usize]);
        assert_eq!(
            some,
            OperationsInOrder::ListedIds([1, 3].into_iter().collect()),
            "of one key by their numbers"
        );
    }
}
