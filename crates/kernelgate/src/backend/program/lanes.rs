//! Lanes of a program, which may run concurrently, and the order between their steps.

/// A sequence of a program's steps: a CUDA stream, or a branch of the captured CUDA graph. Steps of
/// one lane run in order; steps of different lanes may run concurrently unless one lane waits for
/// the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProgramLane(pub(super) usize);

impl ProgramLane {
    /// The first lane: the device's stream, on which every program begins and ends.
    pub const MAIN_LANE: ProgramLane = Self(0);

    /// Number of the lane in its program; the main lane has number 0.
    pub const fn lane_number(self) -> usize {
        self.0
    }
}

/// Position of a step in its lane; the first step has `step_count` 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LaneStepPosition {
    pub lane: ProgramLane,
    step_count: usize,
}

/// For each lane, how many steps of every lane are finished before the lane's next step begins
/// (vector clocks).
pub(super) struct OrderOfLaneSteps {
    /// Element `[a][b]` is the number of steps of lane `b` that finish before the next step of lane
    /// `a` begins.
    steps_finished_before: Vec<Vec<usize>>,
    /// For each lane, whether it has waited for the first lane, directly or through other lanes.
    lane_has_forked: Vec<bool>,
}

impl Default for OrderOfLaneSteps {
    fn default() -> Self {
        Self { steps_finished_before: vec![vec![0]], lane_has_forked: vec![true] }
    }
}

impl OrderOfLaneSteps {
    /// Number of lanes in the program.
    pub fn lane_count(&self) -> usize {
        self.steps_finished_before.len()
    }

    /// Adds a lane.
    pub fn add_lane(&mut self) -> ProgramLane {
        self.steps_finished_before.iter_mut().for_each(|counts| counts.push(0));
        self.steps_finished_before.push(vec![0; self.steps_finished_before.len() + 1]);
        self.lane_has_forked.push(false);
        ProgramLane(self.steps_finished_before.len() - 1)
    }

    /// Appends a step to a lane and returns the step's position.
    pub fn add_step(&mut self, lane: ProgramLane) -> LaneStepPosition {
        let count = &mut self.steps_finished_before[lane.0][lane.0];
        *count += 1;
        LaneStepPosition { lane, step_count: *count }
    }

    /// Makes the next step of lane `waiting` begin after all steps that lane `on` has so far.
    pub fn make_lane_wait_for_lane(&mut self, waiting: ProgramLane, on: ProgramLane) {
        let seen = self.steps_finished_before[on.0].clone();
        let counts = self.steps_finished_before[waiting.0].iter_mut();
        counts.zip(seen).for_each(|(count, seen)| *count = (*count).max(seen));
        self.lane_has_forked[waiting.0] |= self.lane_has_forked[on.0];
    }

    /// Whether a lane has waited for the first lane, directly or through other lanes.
    pub fn has_waited_for_main_lane(&self, lane: ProgramLane) -> bool {
        self.lane_has_forked[lane.0]
    }

    /// Whether a step is guaranteed to finish before the next step of a lane begins.
    pub fn finishes_before_next_step_of_lane(
        &self,
        step: LaneStepPosition,
        lane: ProgramLane,
    ) -> bool {
        self.steps_finished_before[lane.0][step.lane.0] >= step.step_count
    }

    /// Returns a lane with steps for which the first lane has not waited; `None` if the first lane
    /// has waited for every step.
    pub fn lane_not_awaited_by_main_lane(&self) -> Option<ProgramLane> {
        let ends = self
            .steps_finished_before
            .iter()
            .enumerate()
            .map(|(lane, counts)| (lane, counts[lane]));
        let main = &self.steps_finished_before[ProgramLane::MAIN_LANE.0];
        ends.zip(main).find(|((_, end), seen)| end > *seen).map(|((lane, _), _)| ProgramLane(lane))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_covers_only_earlier_steps_of_the_other_lane() {
        let mut order = OrderOfLaneSteps::default();
        let side = order.add_lane();
        let first = order.add_step(ProgramLane::MAIN_LANE);
        assert!(
            !order.has_waited_for_main_lane(side)
                && !order.finishes_before_next_step_of_lane(first, side)
        );
        order.make_lane_wait_for_lane(side, ProgramLane::MAIN_LANE);
        let second = order.add_step(ProgramLane::MAIN_LANE);
        assert!(
            order.has_waited_for_main_lane(side)
                && order.finishes_before_next_step_of_lane(first, side)
        );
        assert!(!order.finishes_before_next_step_of_lane(second, side));
    }

    #[test]
    fn lane_waits_are_transitive() {
        let mut order = OrderOfLaneSteps::default();
        let [one, two] = [order.add_lane(), order.add_lane()];
        let start = order.add_step(ProgramLane::MAIN_LANE);
        order.make_lane_wait_for_lane(one, ProgramLane::MAIN_LANE);
        let middle = order.add_step(one);
        order.make_lane_wait_for_lane(two, one);
        assert!(
            order.has_waited_for_main_lane(two)
                && order.finishes_before_next_step_of_lane(start, two)
                && order.finishes_before_next_step_of_lane(middle, two)
        );
        order.add_step(two);
        assert_eq!(order.lane_not_awaited_by_main_lane(), Some(one));
        order.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, one);
        assert_eq!(order.lane_not_awaited_by_main_lane(), Some(two));
        order.make_lane_wait_for_lane(ProgramLane::MAIN_LANE, two);
        assert_eq!(order.lane_not_awaited_by_main_lane(), None);
    }
}
