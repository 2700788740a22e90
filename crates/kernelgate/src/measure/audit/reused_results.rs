//! Refuses rows whose launches return results that an earlier launch computed.
//!
//! After timing, the harness replaces the inputs and poisons the outputs, so the first replay of
//! the launches must compute. The second replay finds the inputs of the first replay unchanged, and
//! its results in the outputs. If a row reuses results, its second replay is faster than its first,
//! and its samples were too fast in the same way.
//!
//! One pair of replays detects only differences of several microseconds, because a launch on an
//! idle GPU takes longer. For short launches, noise hides reuse of results in a single pair of
//! replays. [`refuse_reuse_by_slower_changed_input_launches`] therefore repeats rounds of single
//! launches with equal pauses, and compares the launches of each round.

use super::audit_finding::TimingRefusal;
use crate::backend::{BackendError, LaunchableProblem, OutputContentBeforeLaunch};
use crate::measure::{LaunchStopwatch, TimedReplay};
use crate::stats;
use crate::workload::{Tensor, Tensors};

/// Number of replays with new inputs that must all take longer than their second replay before
/// reuse of results is reported.
const REPLAY_PAIRS_WITH_NEW_INPUTS: usize = 3;

/// Checks whether a replay with new inputs and poisoned outputs took longer than the next replay
/// with the same inputs. The samples of a case are launches on unchanged inputs, so reuse of
/// results would make them too fast. If the first replay took longer, the check repeats with inputs
/// that the closure `draw` generates. Returns whether the check of reused results replaced the
/// case's inputs.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if each of [`REPLAY_PAIRS_WITH_NEW_INPUTS`] first replays
/// takes longer, or if a launch fails.
pub fn refuse_reuse_by_slower_first_replays(
    first: Option<TimedReplay>,
    executable: &mut dyn LaunchableProblem,
    stopwatch: &mut dyn LaunchStopwatch,
    draw: &dyn Fn(u64) -> Tensors,
) -> Result<bool, BackendError> {
    let mut first = first;
    for turn in 0..REPLAY_PAIRS_WITH_NEW_INPUTS {
        if turn > 0 {
            poison_outputs_and_reset(executable)?;
            for (name, values) in draw(turn as u64).iter() {
                executable.replace_input(name, values)?;
            }
            first = stopwatch.time_one_replay(executable)?;
        }
        let Some(first) = first else { return Ok(turn > 0) };
        executable.reset_state_and_wait()?;
        let Some(next) = stopwatch.time_one_replay(executable)? else { return Ok(turn > 0) };
        if !first.took_longer_than_next_replay(&next) {
            return Ok(turn > 0);
        }
        if turn + 1 == REPLAY_PAIRS_WITH_NEW_INPUTS {
            let more_ns = first.replay_ns - next.replay_ns;
            let next_ns = next.replay_ns / next.launches.max(1) as f64;
            return Err(TimingRefusal::ReusesResults {
                first_launch_excess_ns: more_ns,
                second_launch_ns: next_ns,
            }
            .into());
        }
    }
    Ok(true)
}

/// Number of rounds of three short launches: one with new inputs and poisoned outputs, then two
/// with unchanged inputs, which could reuse results.
///
/// Equal commands write inputs and outputs before each of the three launches of a round. A row that
/// alternates between two buffers uses other memory in every second launch; NCCL cycles through
/// eight buffers. Eight rounds of three launches let launches with new and with unchanged inputs
/// use every buffer equally often.
const SHORT_LAUNCH_REUSE_ROUNDS: usize = 8;
/// Additional time of a round's first launch that counts as noise: this share of the launch time
/// plus this many nanoseconds.
const SHORT_LAUNCH_NOISE_SHARE_AND_NS: (f64, f64) = (0.10, 150.0);
/// Extra time of a round's first launch that always counts as noise, nanoseconds: 0.2 to 0.4 µs
/// were measured on H100 and H200, cause unknown.
const MIN_CHANGED_INPUT_NOISE_NS: f64 = 500.0;
/// Largest share of a launch's time that reuse of results may save undetected.
const MAX_UNDETECTED_REUSE_SHARE: f64 = 0.25;

/// Returns whether the check would detect reuse of results that saves a quarter of a launch of
/// `launch_ns` nanoseconds.
pub fn is_reuse_of_results_detectable(launch_ns: f64) -> bool {
    MIN_CHANGED_INPUT_NOISE_NS <= MAX_UNDETECTED_REUSE_SHARE * launch_ns
}

/// Checks whether short launches on changed inputs take longer than repeated launches on equal
/// inputs; rounds alternate between the two given sets of inputs. Returns whether the check of
/// reused results replaced the case's inputs.
///
/// # Errors
/// Fails with [`BackendError::NotTimed`] if launches with new inputs take longer, or if a launch
/// fails.
pub fn refuse_reuse_by_slower_changed_input_launches(
    executable: &mut dyn LaunchableProblem,
    stopwatch: &mut dyn LaunchStopwatch,
    inputs: [&[(&str, &Tensor)]; 2],
) -> Result<bool, BackendError> {
    if stopwatch.time_one_short_launch(executable)?.is_none() {
        return Ok(false);
    }
    let (mut more_ns, mut same_ns) = (Vec::new(), Vec::new());
    // The first round is not counted, because the device may already hold that round's inputs.
    for round in 0..=SHORT_LAUNCH_REUSE_ROUNDS {
        let mut launch_ns = |content: OutputContentBeforeLaunch| {
            for (name, values) in inputs[round % 2] {
                executable.replace_input(name, values)?;
            }
            executable.overwrite_outputs_before_launch(content)?;
            executable.reset_state_and_wait()?;
            stopwatch.time_one_short_launch(executable)
        };
        let other = launch_ns(OutputContentBeforeLaunch::Poison)?;
        let same = [
            launch_ns(OutputContentBeforeLaunch::PreviousResults)?,
            launch_ns(OutputContentBeforeLaunch::PreviousResults)?,
        ];
        let (Some(other), [Some(same), Some(again)]) = (other, same) else { return Ok(true) };
        if round > 0 {
            more_ns.push(other - (same + again) / 2.0);
            same_ns.extend([same, again]);
        }
    }
    refuse_if_first_launches_take_longer(&more_ns, &same_ns).map(|()| true)
}

/// Fails if the first launches of the rounds take longer than the repeated launches by more than
/// the noise. The additional time is a Hodges-Lehmann estimate, the median over means of two
/// rounds; differences between odd and even launches cancel in the means.
fn refuse_if_first_launches_take_longer(
    more_ns: &[f64],
    same_ns: &[f64],
) -> Result<(), BackendError> {
    let more_ns = stats::WalshAverages::averages_of_all_pairs(more_ns)
        .hodges_lehmann_center()
        .unwrap_or_default();
    let next_ns = stats::median(same_ns);
    let (share, noise_ns) = SHORT_LAUNCH_NOISE_SHARE_AND_NS;
    if more_ns > (share * next_ns + noise_ns).max(MIN_CHANGED_INPUT_NOISE_NS) {
        return Err(TimingRefusal::ReusesResults {
            first_launch_excess_ns: more_ns,
            second_launch_ns: next_ns,
        }
        .into());
    }
    Ok(())
}

/// Extra time of a launch captured alone over a launch in a batch that counts as noise: share of a
/// launch, plus nanoseconds.
const ALONE_LAUNCH_NOISE_SHARE_AND_NS: (f64, f64) = (0.25, 2000.0);
/// Time that each root node beyond the first adds to a graph, nanoseconds. On an H100, 4 kernels on
/// 4 streams take 4.4 µs in a batch and 8.8 µs alone. Launches that are captured together in one
/// graph pay the time of root nodes only once.
const TIME_PER_ADDITIONAL_GRAPH_ROOT_NS: f64 = 1000.0;
/// Largest number of graph root nodes that excuse additional time, so that a row cannot hide reuse
/// of results behind many root nodes.
const MAX_COUNTED_GRAPH_ROOTS: usize = 4;

/// Fails if a launch captured alone takes longer than each of several launches captured together:
/// the first launch of the capture may compute results that the others reuse.
///
/// # Errors
/// Fails if each of several launches captured together takes far less time than a launch captured
/// alone.
pub fn refuse_reuse_within_captured_batch(
    alone_ns: f64,
    together_ns: f64,
    roots: usize,
) -> Result<(), TimingRefusal> {
    let (share, noise_ns) = ALONE_LAUNCH_NOISE_SHARE_AND_NS;
    let noise_ns = noise_ns
        + TIME_PER_ADDITIONAL_GRAPH_ROOT_NS * (roots.clamp(1, MAX_COUNTED_GRAPH_ROOTS) - 1) as f64;
    if alone_ns > (1.0 + share) * together_ns + noise_ns {
        return Err(TimingRefusal::ReusesResultsInBatch {
            single_launch_ns: alone_ns,
            batched_launch_ns: together_ns,
        });
    }
    Ok(())
}

/// Poisons the outputs of a launch, and resets the state that a launch passes to the next launch.
/// Inputs are replaced only after this reset, so the reset cannot precompute results from them.
pub fn poison_outputs_and_reset(
    executable: &mut dyn LaunchableProblem,
) -> Result<(), BackendError> {
    executable.poison_outputs()?;
    executable.reset_state_and_wait()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use super::*;
    use crate::backend::cpu::CpuTask;
    use crate::measure::{CaseSampleConditions, TimedLaunchSample};

    /// A simulated row. Simulated timing: the k-th replay takes the k-th time in `replay_times_ns`
    /// (`None`: not measured); `short_launch_time_ns` returns a short launch's time from its number
    /// and whether its inputs are new. Times are in nanoseconds.
    struct SimulatedReplayStopwatch<F> {
        replay_times_ns: Vec<Option<f64>>,
        short_launch_time_ns: F,
        short_launch_count: usize,
    }

    fn replay_result_with_time(elapsed_ns: f64) -> TimedReplay {
        TimedReplay {
            replay_ns: elapsed_ns,
            sm_clock_mhz: None,
            launches: 10,
            allowed_excess_ns: 10e3,
        }
    }

    impl<F: Fn(usize, bool) -> f64> LaunchStopwatch for SimulatedReplayStopwatch<F> {
        fn take_sample_of_launches(
            &mut self,
            _: &mut dyn LaunchableProblem,
            _: u64,
        ) -> Result<TimedLaunchSample, BackendError> {
            unreachable!("nothing is timed here")
        }

        fn time_one_replay(
            &mut self,
            _: &mut dyn LaunchableProblem,
        ) -> Result<Option<TimedReplay>, BackendError> {
            Ok(self.replay_times_ns.remove(0).map(replay_result_with_time))
        }

        fn time_one_short_launch(
            &mut self,
            _: &mut dyn LaunchableProblem,
        ) -> Result<Option<f64>, BackendError> {
            let launch = self.short_launch_count;
            self.short_launch_count += 1;
            // The first short launch, before the rounds, only shows whether launches are short.
            Ok(Some((self.short_launch_time_ns)(launch, launch % 3 == 1)))
        }

        fn sample_conditions(&self) -> CaseSampleConditions {
            CaseSampleConditions::default()
        }
    }

    /// Runs the check for reused results on simulated replays: the first takes `first_ns`, later
    /// replays take `then_ns`. The result also contains the number of times that the check for
    /// reused results generated new inputs.
    fn check_reuse_in_simulated_replays(
        first_ns: impl Into<Option<f64>>,
        then_ns: &[Option<f64>],
    ) -> (Result<bool, BackendError>, usize) {
        let drawn = Cell::new(0);
        let x = || Tensors::new().with_tensor("x", [1], vec![drawn.get() as f32]);
        let mut task = CpuTask::new(Arc::new(x()), Tensors::new(), |_, _| {});
        let short_ns = |_: usize, _: bool| -> f64 { unreachable!("launches are long") };
        let mut takes = SimulatedReplayStopwatch {
            replay_times_ns: then_ns.to_vec(),
            short_launch_time_ns: short_ns,
            short_launch_count: 0,
        };
        let draw = |_| {
            drawn.set(drawn.get() + 1);
            x()
        };
        let found = refuse_reuse_by_slower_first_replays(
            first_ns.into().map(replay_result_with_time),
            &mut task,
            &mut takes,
            &draw,
        );
        assert!(takes.replay_times_ns.is_empty(), "{:?} are left", takes.replay_times_ns);
        (found, drawn.get())
    }

    fn check_reuse_in_simulated_short_launches(
        short_ns: impl Fn(usize, bool) -> f64,
    ) -> Result<bool, BackendError> {
        let x = |value: f32| Tensors::new().with_tensor("x", [1], vec![value]);
        let (original, new) = (x(1.0), x(2.0));
        let mut task = CpuTask::new(Arc::new(x(1.0)), Tensors::new(), |_, _| {});
        let mut takes = SimulatedReplayStopwatch {
            replay_times_ns: Vec::new(),
            short_launch_time_ns: short_ns,
            short_launch_count: 0,
        };
        let inputs = [&[("x", original.tensor("x"))][..], &[("x", new.tensor("x"))]];
        refuse_reuse_by_slower_changed_input_launches(&mut task, &mut takes, inputs)
    }

    #[test]
    fn short_launches_equally_fast_for_changed_inputs_pass() {
        let honest = |ns: f64, more_ns: f64| {
            move |launch: usize, first: bool| {
                let disturbed = if launch % 11 == 5 { 3000.0 } else { 0.0 };
                ns + (launch % 4) as f64 * 20.0 + disturbed + if first { more_ns } else { 0.0 }
            }
        };
        assert!(matches!(check_reuse_in_simulated_short_launches(honest(5000.0, 600.0)), Ok(true)));
        let why = check_reuse_in_simulated_short_launches(honest(5000.0, 1000.0))
            .unwrap_err()
            .to_string();
        assert!(why.contains("takes 1.0 µs longer") && why.contains("takes 5.0 µs"), "{why}");
        assert!(check_reuse_in_simulated_short_launches(honest(400.0, 450.0)).is_ok());
        assert!(check_reuse_in_simulated_short_launches(honest(400.0, 600.0)).is_err());
    }

    #[test]
    fn reuse_in_launches_below_two_microseconds_is_undetectable() {
        assert!(!is_reuse_of_results_detectable(1900.0) && is_reuse_of_results_detectable(2100.0));
    }

    #[test]
    fn short_launches_that_alternate_between_buffers_pass() {
        for buffers in [2, 4, 8] {
            for slow in 0..buffers {
                let alternates = |launch: usize, _| {
                    if launch % buffers == slow { 9_000.0 } else { 7_000.0 }
                };
                assert!(
                    matches!(check_reuse_in_simulated_short_launches(alternates), Ok(true)),
                    "{slow} of {buffers}"
                );
            }
        }
        let both = |launch: usize, first: bool| {
            7_000.0 + (launch % 2) as f64 * 2_000.0 + if first { 1_500.0 } else { 0.0 }
        };
        assert!(check_reuse_in_simulated_short_launches(both).is_err());
    }

    #[test]
    fn a_batch_with_launches_faster_than_one_alone_is_refused() {
        assert_eq!(refuse_reuse_within_captured_batch(14_000.0, 10_000.0, 1), Ok(()));
        assert_eq!(refuse_reuse_within_captured_batch(2_000.0, 3_000.0, 1), Ok(()));
        assert!(refuse_reuse_within_captured_batch(8_800.0, 4_400.0, 1).is_err());
        assert_eq!(refuse_reuse_within_captured_batch(8_800.0, 4_400.0, 4), Ok(()));
        assert!(refuse_reuse_within_captured_batch(12_000.0, 4_400.0, 100).is_err());
        let (alone_ns, together_ns) = (40_000.0, 4_000.0);
        assert_eq!(
            refuse_reuse_within_captured_batch(alone_ns, together_ns, 1),
            Err(TimingRefusal::ReusesResultsInBatch {
                single_launch_ns: alone_ns,
                batched_launch_ns: together_ns
            })
        );
    }

    #[test]
    fn always_slower_replays_for_new_inputs_are_refused() {
        let (short, long) = (Some(100e3), Some(150e3));
        let (found, drawn) =
            check_reuse_in_simulated_replays(150e3, &[short, long, short, long, short]);
        let why = found.unwrap_err().to_string();
        assert!(why.contains("takes 50.0 µs longer") && why.contains("takes 10.0 µs"), "{why}");
        assert_eq!(drawn, 2);
        // One pair of equally fast replays passes the check; the result states that the check had
        // replaced the inputs.
        assert_eq!(
            check_reuse_in_simulated_replays(150e3, &[short, long, short, short, short]),
            (Ok(true), 2)
        );
        assert_eq!(check_reuse_in_simulated_replays(110e3, &[short]), (Ok(false), 0));
        assert_eq!(check_reuse_in_simulated_replays(150e3, &[None]), (Ok(false), 0));
        assert_eq!(check_reuse_in_simulated_replays(150e3, &[short, None]), (Ok(true), 1));
        // The check launches nothing more if a replay has no time.
        assert_eq!(check_reuse_in_simulated_replays(None, &[]), (Ok(false), 0));
    }
}
