//! Operations in an order of time. Recorders mostly write them in that order, and then nothing is
//! listed: 4 bytes an operation less.

use crate::analyze::operations::OperationId;

/// Operations in an order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Order {
    /// All numbers below this one, in their order.
    Numbers(u32),
    /// These.
    Listed(Vec<OperationId>),
}

impl Default for Order {
    fn default() -> Self {
        Self::Numbers(0)
    }
}

impl Order {
    /// All operations by a key; of one key by their numbers.
    pub fn of_all<K: Ord>(
        ids: std::ops::Range<OperationId>,
        key: impl Fn(OperationId) -> K,
    ) -> Self {
        match ids.start == 0 && ids.clone().is_sorted_by_key(&key) {
            true => Self::Numbers(ids.end),
            false => Self::sorted(ids.collect(), key),
        }
    }

    /// Some operations by a key; of one key by their numbers.
    pub fn sorted<K: Ord>(mut ids: Vec<OperationId>, key: impl Fn(OperationId) -> K) -> Self {
        if !ids.is_sorted_by_key(|&id| (key(id), id)) {
            ids.sort_unstable_by_key(|&id| (key(id), id));
        }
        Self::Listed(ids)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Self::Numbers(count) => *count as usize,
            Self::Listed(ids) => ids.len(),
        }
    }

    /// Whether it has no operation.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The operation at a position.
    pub fn get(&self, position: usize) -> Option<OperationId> {
        match self {
            Self::Numbers(count) => u32::try_from(position).ok().filter(|number| number < count),
            Self::Listed(ids) => ids.get(position).copied(),
        }
    }

    /// The operations.
    pub fn iter(&self) -> impl Iterator<Item = OperationId> + Clone + '_ {
        (0..self.len()).filter_map(|position| self.get(position))
    }

    /// The first position from which on a condition no longer holds.
    pub fn partition_point(&self, holds: impl Fn(OperationId) -> bool) -> usize {
        let (mut first, mut end) = (0, self.len());
        while first < end {
            let middle = first.midpoint(end);
            match self.get(middle).is_some_and(&holds) {
                true => first = middle + 1,
                false => end = middle,
            }
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_of_numbers_lists_nothing() {
        let starts = [3, 5, 5, 9];
        let order = Order::of_all(0..4, |id| starts[id as usize]);
        assert_eq!(order, Order::Numbers(4));
        assert_eq!(order.iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(order.partition_point(|id| starts[id as usize] < 6), 3);
        assert_eq!((order.get(3), order.get(4)), (Some(3), None));
    }

    #[test]
    fn other_orders_are_sorted_and_listed() {
        let starts = [9, 5, 3, 5];
        let order = Order::of_all(0..4, |id| starts[id as usize]);
        assert_eq!(order, Order::Listed(vec![2, 1, 3, 0]));
        assert_eq!(order.partition_point(|id| starts[id as usize] < 6), 3);
        let some = Order::sorted(vec![3, 1], |id| starts[id as usize]);
        assert_eq!(some, Order::Listed(vec![1, 3]), "of one key by their numbers");
    }
}
