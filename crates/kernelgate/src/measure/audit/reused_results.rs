//! Detects launches that return results which an earlier launch computed.
//!
//! After timing the inputs are new and the outputs poisoned, so the first replay has to compute.
//! The next replay finds unchanged inputs and the results of the replay before. A row that reuses
//! results is faster the second time, and so are its samples.
//!
//! One pair of replays resolves only some microseconds, because a launch after an idle moment takes
//! longer. Noise hides reuse by short launches. [`check_short_reuse`] therefore repeats rounds of
//! single launches with equal pauses, and compares the launches of each round.

use super::audit_finding::TimingRefusal;
use crate::backend::{BackendError, Executable, OutputContent};
use crate::measure::{ReplayResult, Stopwatch};
use crate::stats;
use crate::workload::{Tensor, Tensors};

/// Number of replays with new inputs that must all take longer than the replay after them, before
/// reuse is reported.
const REPLAYS_WITH_NEW_INPUTS: usize = 3;

/// Checks whether a replay with new inputs and poisoned outputs took longer than the next replay,
/// which finds inputs and outputs unchanged. The samples of a case are launches with unchanged
/// inputs. If the first took longer, the check repeats with inputs from `draw`. Returns whether the
/// check replaced inputs.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if each of [`REPLAYS_WITH_NEW_INPUTS`] first replays takes
/// longer, or if a launch fails.
pub fn check_result_reuse(
    first: Option<ReplayResult>,
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
    draw: &dyn Fn(u64) -> Tensors,
) -> Result<bool, BackendError> {
    let mut first = first;
    for turn in 0..REPLAYS_WITH_NEW_INPUTS {
        if turn > 0 {
            poison_and_reset(executable)?;
            for (name, values) in draw(turn as u64).iter() {
                executable.replace_input(name, values)?;
            }
            first = stopwatch.replay_timed(executable)?;
        }
        let Some(first) = first else { return Ok(turn > 0) };
        executable.reset_and_wait()?;
        let Some(next) = stopwatch.replay_timed(executable)? else { return Ok(turn > 0) };
        if !first.did_more_than_next(&next) {
            return Ok(turn > 0);
        }
        if turn + 1 == REPLAYS_WITH_NEW_INPUTS {
            let more_ns = first.elapsed_ns - next.elapsed_ns;
            let next_ns = next.elapsed_ns / next.launches.max(1) as f64;
            return Err(TimingRefusal::Reuses { more_ns, next_ns }.into());
        }
    }
    Ok(true)
}

/// Rounds of three short launches: one launch with new inputs and poisoned outputs, then two
/// launches with unchanged inputs, which find their results.
///
/// Equal commands write inputs and outputs before each of the three launches. A row whose launches
/// alternate between buffers finds other memory in every second launch, and NCCL in every launch of
/// eight. With three launches a round, eight rounds, each kind meets every buffer equally often.
const SHORT_LAUNCH_ROUNDS: usize = 8;
/// Additional time of a round's first launch that counts as noise: share of a launch, and
/// nanoseconds.
const SHORT_LAUNCH_NOISE: (f64, f64) = (0.10, 150.0);
/// Additional time of a round's first launch that counts as noise however short the launch is,
/// nanoseconds: 0.2 to 0.4 µs for rows of 0.4 to 1.2 µs on an H100 and an H200, cause unknown.
const CHANGED_INPUT_NOISE_NS: f64 = 500.0;
/// Share of a launch that reuse may save without an error.
const MAX_SAVED_SHARE: f64 = 0.25;

/// Returns whether the check finds reuse that saves more than a quarter of such a launch; launches
/// that are too short for that are marked.
pub fn is_reuse_detectable(launch_ns: f64) -> bool {
    CHANGED_INPUT_NOISE_NS <= MAX_SAVED_SHARE * launch_ns
}

/// Checks whether short launches for changed inputs take longer than repeated launches for equal
/// inputs, alternating between two sets of inputs. Returns whether it replaced inputs.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if launches with new inputs take longer, or if a launch
/// fails.
pub fn check_short_reuse(
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
    inputs: [&[(&str, &Tensor)]; 2],
) -> Result<bool, BackendError> {
    if stopwatch.replay_short(executable)?.is_none() {
        return Ok(false);
    }
    let (mut more_ns, mut same_ns) = (Vec::new(), Vec::new());
    // Before the first round the device may hold either set of inputs.
    for round in 0..=SHORT_LAUNCH_ROUNDS {
        let mut launch_ns = |content: OutputContent| {
            for (name, values) in inputs[round % 2] {
                executable.replace_input(name, values)?;
            }
            executable.rewrite_outputs(content)?;
            executable.reset_and_wait()?;
            stopwatch.replay_short(executable)
        };
        let other = launch_ns(OutputContent::Poison)?;
        let same = [launch_ns(OutputContent::Results)?, launch_ns(OutputContent::Results)?];
        let (Some(other), [Some(same), Some(again)]) = (other, same) else { return Ok(true) };
        if round > 0 {
            more_ns.push(other - (same + again) / 2.0);
            same_ns.extend([same, again]);
        }
    }
    compare_short_launches(&more_ns, &same_ns).map(|()| true)
}

/// Compares the additional time of the first launch of each round with its noise. The estimate is
/// the median over means of two rounds: differences between odd and even launches cancel in each
/// mean.
fn compare_short_launches(more_ns: &[f64], same_ns: &[f64]) -> Result<(), BackendError> {
    let more_ns = stats::WalshAverages::new(more_ns).hodges_lehmann_center().unwrap_or_default();
    let next_ns = stats::median(same_ns);
    let (share, noise_ns) = SHORT_LAUNCH_NOISE;
    if more_ns > (share * next_ns + noise_ns).max(CHANGED_INPUT_NOISE_NS) {
        return Err(TimingRefusal::Reuses { more_ns, next_ns }.into());
    }
    Ok(())
}

/// Additional time of a launch that is captured alone, beyond each captured with others, that is
/// noise: share of a launch, and nanoseconds.
const ALONE_LAUNCH_NOISE: (f64, f64) = (0.25, 2000.0);
/// Additional time of a graph for each root node beyond the first, nanoseconds: a launch of 4
/// kernels on 4 streams takes 4.4 µs in a batch and 8.8 µs alone on an H100. Launches that are
/// captured together pay the time of their roots once.
const GRAPH_ROOT_NS: f64 = 1000.0;
/// Largest number of graph roots that are counted, so that a row cannot hide a reuse behind many
/// roots.
const MAX_GRAPH_ROOTS: usize = 4;

/// Checks that each of several launches captured together takes as long as one captured alone,
/// whose graph has `roots` root nodes: the first launch of a capture could compute the results that
/// the others return.
///
/// # Errors
/// Fails if launches in a batch take far less than a launch alone.
pub fn check_batch_reuse(
    alone_ns: f64,
    together_ns: f64,
    roots: usize,
) -> Result<(), TimingRefusal> {
    let (share, noise_ns) = ALONE_LAUNCH_NOISE;
    let noise_ns = noise_ns + GRAPH_ROOT_NS * (roots.clamp(1, MAX_GRAPH_ROOTS) - 1) as f64;
    if alone_ns > (1.0 + share) * together_ns + noise_ns {
        return Err(TimingRefusal::ReusesInBatch { alone_ns, together_ns });
    }
    Ok(())
}

/// Poisons outputs and resets the state that launches carry on. Inputs are replaced after the
/// reset, so the reset cannot precompute results from them.
pub fn poison_and_reset(executable: &mut dyn Executable) -> Result<(), BackendError> {
    executable.poison_outputs()?;
    executable.reset_and_wait()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use super::*;
    use crate::backend::cpu::CpuTask;
    use crate::measure::{LaunchSample, SampleConditions};

    /// A simulated row. Long launches take the times of `replays_ns` one after the other, `None`
    /// for an unmeasured one; `short_ns` gives the time of a short launch from its number, and from
    /// whether its inputs are new. Times are in nanoseconds.
    struct SimulatedRow<F> {
        replays_ns: Vec<Option<f64>>,
        short_ns: F,
        launches: usize,
    }

    fn replay_taking(elapsed_ns: f64) -> ReplayResult {
        ReplayResult { elapsed_ns, clock_mhz: None, launches: 10, allowed_ns: 10e3 }
    }

    impl<F: Fn(usize, bool) -> f64> Stopwatch for SimulatedRow<F> {
        fn time_launches(
            &mut self,
            _: &mut dyn Executable,
            _: u64,
        ) -> Result<LaunchSample, BackendError> {
            unreachable!("nothing is timed here")
        }

        fn replay_timed(
            &mut self,
            _: &mut dyn Executable,
        ) -> Result<Option<ReplayResult>, BackendError> {
            Ok(self.replays_ns.remove(0).map(replay_taking))
        }

        fn replay_short(&mut self, _: &mut dyn Executable) -> Result<Option<f64>, BackendError> {
            let launch = self.launches;
            self.launches += 1;
            // One launch before the rounds asks whether this one is short.
            Ok(Some((self.short_ns)(launch, launch % 3 == 1)))
        }

        fn conditions(&self) -> SampleConditions {
            SampleConditions::default()
        }
    }

    /// Checks simulated replays: the first takes `first_ns`, later ones `then_ns`. Also returns how
    /// often other inputs were drawn.
    fn check_simulated_reuse(
        first_ns: impl Into<Option<f64>>,
        then_ns: &[Option<f64>],
    ) -> (Result<bool, BackendError>, usize) {
        let drawn = Cell::new(0);
        let x = || Tensors::new().with("x", [1], vec![drawn.get() as f32]);
        let mut task = CpuTask::new(Arc::new(x()), Tensors::new(), |_, _| {});
        let short_ns = |_: usize, _: bool| -> f64 { unreachable!("launches are long") };
        let mut takes = SimulatedRow { replays_ns: then_ns.to_vec(), short_ns, launches: 0 };
        let draw = |_| {
            drawn.set(drawn.get() + 1);
            x()
        };
        let found =
            check_result_reuse(first_ns.into().map(replay_taking), &mut task, &mut takes, &draw);
        assert!(takes.replays_ns.is_empty(), "{:?} are left", takes.replays_ns);
        (found, drawn.get())
    }

    fn check_short_row(short_ns: impl Fn(usize, bool) -> f64) -> Result<bool, BackendError> {
        let x = |value: f32| Tensors::new().with("x", [1], vec![value]);
        let (original, new) = (x(1.0), x(2.0));
        let mut task = CpuTask::new(Arc::new(x(1.0)), Tensors::new(), |_, _| {});
        let mut takes = SimulatedRow { replays_ns: Vec::new(), short_ns, launches: 0 };
        let inputs = [&[("x", original.tensor("x"))][..], &[("x", new.tensor("x"))]];
        check_short_reuse(&mut task, &mut takes, inputs)
    }

    #[test]
    fn short_launches_that_take_as_long_for_changed_inputs_are_accepted() {
        let honest = |ns: f64, more_ns: f64| {
            move |launch: usize, first: bool| {
                let disturbed = if launch % 11 == 5 { 3000.0 } else { 0.0 };
                ns + (launch % 4) as f64 * 20.0 + disturbed + if first { more_ns } else { 0.0 }
            }
        };
        assert!(matches!(check_short_row(honest(5000.0, 600.0)), Ok(true)));
        let why = check_short_row(honest(5000.0, 1000.0)).unwrap_err().to_string();
        assert!(why.contains("takes 1.0 µs longer") && why.contains("takes 5.0 µs"), "{why}");
        assert!(check_short_row(honest(400.0, 450.0)).is_ok());
        assert!(check_short_row(honest(400.0, 600.0)).is_err());
    }

    #[test]
    fn reuse_in_a_launch_below_two_microseconds_is_not_detectable() {
        assert!(!is_reuse_detectable(1900.0) && is_reuse_detectable(2100.0));
    }

    #[test]
    fn short_launches_that_alternate_between_buffers_are_accepted() {
        for buffers in [2, 4, 8] {
            for slow in 0..buffers {
                let alternates = |launch: usize, _| {
                    if launch % buffers == slow { 9_000.0 } else { 7_000.0 }
                };
                assert!(matches!(check_short_row(alternates), Ok(true)), "{slow} of {buffers}");
            }
        }
        let both = |launch: usize, first: bool| {
            7_000.0 + (launch % 2) as f64 * 2_000.0 + if first { 1_500.0 } else { 0.0 }
        };
        assert!(check_short_row(both).is_err());
    }

    #[test]
    fn a_batch_whose_launches_take_less_than_one_alone_is_refused() {
        assert_eq!(check_batch_reuse(14_000.0, 10_000.0, 1), Ok(()));
        assert_eq!(check_batch_reuse(2_000.0, 3_000.0, 1), Ok(()));
        assert!(check_batch_reuse(8_800.0, 4_400.0, 1).is_err());
        assert_eq!(check_batch_reuse(8_800.0, 4_400.0, 4), Ok(()));
        assert!(check_batch_reuse(12_000.0, 4_400.0, 100).is_err());
        let (alone_ns, together_ns) = (40_000.0, 4_000.0);
        assert_eq!(
            check_batch_reuse(alone_ns, together_ns, 1),
            Err(TimingRefusal::ReusesInBatch { alone_ns, together_ns })
        );
    }

    #[test]
    fn replays_that_are_always_slower_for_new_inputs_count_as_reuse() {
        let (short, long) = (Some(100e3), Some(150e3));
        let (found, drawn) = check_simulated_reuse(150e3, &[short, long, short, long, short]);
        let why = found.unwrap_err().to_string();
        assert!(why.contains("takes 50.0 µs longer") && why.contains("takes 10.0 µs"), "{why}");
        assert_eq!(drawn, 2);
        // One pair without reuse passes the check, and the result states that the inputs were drawn
        // anew.
        assert_eq!(
            check_simulated_reuse(150e3, &[short, long, short, short, short]),
            (Ok(true), 2)
        );
        assert_eq!(check_simulated_reuse(110e3, &[short]), (Ok(false), 0));
        assert_eq!(check_simulated_reuse(150e3, &[None]), (Ok(false), 0));
        assert_eq!(check_simulated_reuse(150e3, &[short, None]), (Ok(true), 1));
        // Nothing is launched if the result could not be conclusive.
        assert_eq!(check_simulated_reuse(None, &[]), (Ok(false), 0));
    }
}
