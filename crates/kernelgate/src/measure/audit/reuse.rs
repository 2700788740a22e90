//! Results that an earlier launch computed, and a later one returns.
//!
//! After timing the inputs are new and the outputs poisoned. The first replay then has to compute;
//! the next one finds the same inputs and its own results. A row that reuses results is faster the
//! second time, and the samples are of such launches.

use super::refusal::Refusal;
use crate::backend::{BackendError, Executable};
use crate::measure::{Replay, Stopwatch};
use crate::workload::Tensors;

/// First replays, each for inputs of its own, that all have to take longer than the next one.
const TRIES: usize = 3;

/// Checks whether the first replay, for new inputs and with poisoned outputs, took longer than the
/// next one, which finds inputs and outputs as the first left them. The samples are such next ones.
/// If the first took longer, the check repeats with inputs from `draw`. Returns whether it replaced
/// inputs.
///
/// # Errors
/// [`BackendError::NotTimed`] if each of [`TRIES`] first replays takes longer; when a launch fails.
pub fn check(
    first: Option<Replay>,
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
    draw: &dyn Fn(u64) -> Tensors,
) -> Result<bool, BackendError> {
    let mut first = first;
    for turn in 0..TRIES {
        if turn > 0 {
            without_results(executable)?;
            for (name, values) in draw(turn as u64).iter() {
                executable.replace_input(name, values)?;
            }
            first = stopwatch.replay(executable)?;
        }
        let Some(first) = first else { return Ok(turn > 0) };
        executable.settle()?;
        let Some(next) = stopwatch.replay(executable)? else { return Ok(turn > 0) };
        if !first.did_more_than(&next) {
            return Ok(turn > 0);
        }
        if turn + 1 == TRIES {
            let more_ns = first.elapsed_ns - next.elapsed_ns;
            let next_ns = next.elapsed_ns / next.launches.max(1) as f64;
            return Err(Refusal::Reuses { more_ns, next_ns }.into());
        }
    }
    Ok(true)
}

/// Poisons outputs and resets the state that launches carry on. Inputs are replaced after the reset,
/// so a reset cannot precompute results from them.
pub fn without_results(executable: &mut dyn Executable) -> Result<(), BackendError> {
    executable.poison_outputs()?;
    executable.settle()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;

    use super::*;
    use crate::backend::cpu::CpuTask;
    use crate::measure::{Sample, Technique};

    /// Replays take so long, one after the other, nanoseconds; none where it cannot tell.
    struct Takes(Vec<Option<f64>>);

    fn replay(elapsed_ns: f64) -> Replay {
        Replay { elapsed_ns, clock_mhz: None, launches: 10, allowed_ns: 10e3 }
    }

    impl Stopwatch for Takes {
        fn time(&mut self, _: &mut dyn Executable, _: u64) -> Result<Sample, BackendError> {
            unreachable!("nothing is timed here")
        }

        fn replay(&mut self, _: &mut dyn Executable) -> Result<Option<Replay>, BackendError> {
            Ok(self.0.remove(0).map(replay))
        }

        fn technique(&self) -> Technique {
            Technique::default()
        }
    }

    /// The first replay takes so long, then those; how often other inputs were drawn.
    fn reuse(
        first_ns: impl Into<Option<f64>>,
        then_ns: &[Option<f64>],
    ) -> (Result<bool, BackendError>, usize) {
        let drawn = Cell::new(0);
        let x = || Tensors::new().with("x", [1], vec![drawn.get() as f32]);
        let mut task = CpuTask::new(Arc::new(x()), Tensors::new(), |_, _| {});
        let mut takes = Takes(then_ns.to_vec());
        let draw = |_| {
            drawn.set(drawn.get() + 1);
            x()
        };
        let found = check(first_ns.into().map(replay), &mut task, &mut takes, &draw);
        assert!(takes.0.is_empty(), "{:?} are left", takes.0);
        (found, drawn.get())
    }

    #[test]
    fn results_are_reused_where_each_launch_for_new_inputs_takes_longer_than_the_next() {
        let (short, long) = (Some(100e3), Some(150e3));
        let (found, drawn) = reuse(150e3, &[short, long, short, long, short]);
        let why = found.unwrap_err().to_string();
        assert!(why.contains("takes 50.0 µs longer") && why.contains("takes 10.0 µs"), "{why}");
        assert_eq!(drawn, 2);
        // One that does not is enough, and inputs that were drawn are told of.
        assert_eq!(reuse(150e3, &[short, long, short, short, short]), (Ok(true), 2));
        assert_eq!(reuse(110e3, &[short]), (Ok(false), 0));
        assert_eq!(reuse(150e3, &[None]), (Ok(false), 0));
        assert_eq!(reuse(150e3, &[short, None]), (Ok(true), 1));
        // Nothing is launched where nothing would be told.
        assert_eq!(reuse(None, &[]), (Ok(false), 0));
    }
}
