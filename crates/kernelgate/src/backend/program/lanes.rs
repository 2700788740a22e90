//! Lanes of concurrent work, and the order of their steps.

/// A sequence of steps: a stream, or a branch of the captured graph. Steps of one lane run in
/// order; steps of two lanes may run concurrently unless one lane waits for the other lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lane(pub(super) usize);

impl Lane {
    /// The first lane: the device's stream, which every program begins and ends on.
    pub const MAIN_LANE: Lane = Self(0);

    /// Number of the lane.
    pub const fn lane_number(self) -> usize {
        self.0
    }
}

/// The `count`-th step of a lane, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaneStepPosition {
    pub lane: Lane,
    count: usize,
}

/// Which steps of every lane are ordered before the next step of each lane (vector clocks).
pub(super) struct LaneOrder {
    /// `before[a][b]` is the number of steps of lane `b` that come before the next step of lane
    /// `a`.
    before: Vec<Vec<usize>>,
    /// Whether a lane follows the first lane's beginning.
    forked: Vec<bool>,
}

impl Default for LaneOrder {
    fn default() -> Self {
        Self { before: vec![vec![0]], forked: vec![true] }
    }
}

impl LaneOrder {
    /// Number of lanes of a program.
    pub fn lane_count(&self) -> usize {
        self.before.len()
    }

    /// Adds a lane.
    pub fn add_lane(&mut self) -> Lane {
        self.before.iter_mut().for_each(|counts| counts.push(0));
        self.before.push(vec![0; self.before.len() + 1]);
        self.forked.push(false);
        Lane(self.before.len() - 1)
    }

    /// Appends a step to a lane and returns the step's position.
    pub fn add_step(&mut self, lane: Lane) -> LaneStepPosition {
        let count = &mut self.before[lane.0][lane.0];
        *count += 1;
        LaneStepPosition { lane, count: *count }
    }

    /// Makes the next step of lane `waiting` start after all steps that lane `on` has so far.
    pub fn wait(&mut self, waiting: Lane, on: Lane) {
        let seen = self.before[on.0].clone();
        let counts = self.before[waiting.0].iter_mut();
        counts.zip(seen).for_each(|(count, seen)| *count = (*count).max(seen));
        self.forked[waiting.0] |= self.forked[on.0];
    }

    /// Whether a lane has waited for the first lane, directly or through other lanes.
    pub fn is_forked(&self, lane: Lane) -> bool {
        self.forked[lane.0]
    }

    /// Whether a step ends before the next step of a lane begins.
    pub fn is_before(&self, step: LaneStepPosition, lane: Lane) -> bool {
        self.before[lane.0][step.lane.0] >= step.count
    }

    /// A lane with steps that the first lane has not waited for.
    pub fn unjoined_lane(&self) -> Option<Lane> {
        let ends = self.before.iter().enumerate().map(|(lane, counts)| (lane, counts[lane]));
        let main = &self.before[Lane::MAIN_LANE.0];
        ends.zip(main).find(|((_, end), seen)| end > *seen).map(|((lane, _), _)| Lane(lane))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_orders_what_the_other_lane_has_so_far() {
        let mut order = LaneOrder::default();
        let side = order.add_lane();
        let first = order.add_step(Lane::MAIN_LANE);
        assert!(!order.is_forked(side) && !order.is_before(first, side));
        order.wait(side, Lane::MAIN_LANE);
        let second = order.add_step(Lane::MAIN_LANE);
        assert!(order.is_forked(side) && order.is_before(first, side));
        assert!(!order.is_before(second, side));
    }

    #[test]
    fn waits_are_transitive() {
        let mut order = LaneOrder::default();
        let [one, two] = [order.add_lane(), order.add_lane()];
        let start = order.add_step(Lane::MAIN_LANE);
        order.wait(one, Lane::MAIN_LANE);
        let middle = order.add_step(one);
        order.wait(two, one);
        assert!(
            order.is_forked(two) && order.is_before(start, two) && order.is_before(middle, two)
        );
        order.add_step(two);
        assert_eq!(order.unjoined_lane(), Some(one));
        order.wait(Lane::MAIN_LANE, one);
        assert_eq!(order.unjoined_lane(), Some(two));
        order.wait(Lane::MAIN_LANE, two);
        assert_eq!(order.unjoined_lane(), None);
    }
}
