//! The check after timing: what was timed computes its outputs from its inputs.
//!
//! A case is verified before it is timed, by a launch. What is timed is another thing: a graph, or
//! a launch after many others, which may do less. So once the samples are taken, the inputs that
//! every launch reads are replaced, the outputs poisoned, the very graph or launch that was timed
//! is run once more, and its outputs are compared with the reference of the new inputs.
//!
//! Inputs are replaced along a symmetry of the workload, whose reference then follows from the one
//! that is there; without a symmetry they are drawn anew. Where no input can be replaced, or memory
//! is short, the outputs are compared for the old inputs, and the record says so.
//!
//! Deliberately absent: defence against code that attacks the process. This finds mistakes and
//! shortcuts: work on other streams, nothing launched, a remembered result.

use super::cases::Group;
use super::guard;
use super::problem::{CaseError, Ready, case_error};
use crate::backend::{BackendError, Executable};
use crate::measure::Stopwatch;
use crate::record::environment::available_memory;
use crate::record::run::{AfterTiming, InputChange};
use crate::verify::{self, VerifyError};
use crate::workload::{Expected, Symmetry, Tensors};

/// Other inputs of a problem.
pub struct ChangedInputs {
    /// Names of the inputs that may be replaced: what this was made for.
    replaceable: Vec<String>,
    /// Those that are, with their new values.
    values: Tensors,
    /// How they were made.
    how: How,
    /// Their reference, once it was needed.
    expected: Option<Vec<Expected>>,
}

#[derive(Clone, Copy)]
enum How {
    Symmetry(Symmetry),
    Redrawn,
}

impl From<How> for InputChange {
    fn from(how: How) -> Self {
        match how {
            How::Symmetry(Symmetry::Roll { .. }) => Self::Rolled,
            How::Symmetry(Symmetry::Negate { .. }) => Self::Negated,
            How::Redrawn => Self::Redrawn,
        }
    }
}

/// Replaces inputs, poisons outputs, runs what was timed, and compares; the inputs are then put
/// back. `digest` is that of the outputs for the inputs as they were, where an earlier process of
/// this executable did all of this: then the inputs stay, and its bits are compared.
///
/// # Errors
/// When the outputs are wrong, or the device fails.
pub fn check(
    ready: &mut Ready,
    group: &Group<'_>,
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
    seed: u64,
    digest: Option<&str>,
) -> Result<AfterTiming, CaseError> {
    if let Some(digest) = digest {
        let same = guard::catch(|| {
            replay_on_poison(executable, stopwatch)?;
            Ok::<_, BackendError>(verify::digest(executable.outputs()?) == digest)
        });
        if same.map_err(CaseError::Fail)?.map_err(|error| case_error(error.into()))? {
            return Ok(AfterTiming::SAME_BITS);
        }
    }
    let replaceable = executable.launch_inputs().into_iter().map(str::to_owned).collect();
    if digest.is_some() || !ready.change_inputs(group, replaceable, seed)? {
        ready.compute_reference(group)?;
        return compare(executable, stopwatch, ready, None, &ready.expected);
    }
    ready.compute_changed_reference(group)?;
    let changed = ready.changed.as_ref().expect("inputs were changed");
    let expected = changed.expected.as_ref().expect("its reference was computed");
    compare(executable, stopwatch, ready, Some(changed), expected)
}

fn replay_on_poison(
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
) -> Result<(), BackendError> {
    executable.poison_outputs()?;
    stopwatch.replay(executable)?;
    executable.synchronize()
}

fn compare(
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
    ready: &Ready,
    changed: Option<&ChangedInputs>,
    expected: &[Expected],
) -> Result<AfterTiming, CaseError> {
    let names = || changed.iter().flat_map(|changed| changed.values.iter());
    let compared = guard::catch(|| {
        for (name, values) in names() {
            executable.replace_input(name, values)?;
        }
        replay_on_poison(executable, stopwatch)?;
        verify::compare(executable.outputs()?, expected, ready.tolerance)
    });
    let how = changed.map_or(InputChange::Same, |changed| changed.how.into());
    let comparison = compared.map_err(CaseError::Fail)?.map_err(|error| match error {
        VerifyError::Backend(_) => case_error(error),
        wrong => CaseError::Fail(format!(
            "after timing, {}: {wrong}; what was timed does not compute its outputs from its inputs",
            how.words()
        )),
    })?;
    let restored = guard::catch(|| {
        names().try_for_each(|(name, _)| executable.replace_input(name, ready.inputs.tensor(name)))
    });
    restored.map_err(CaseError::Fail)?.map_err(|error| case_error(error.into()))?;
    Ok(AfterTiming {
        inputs: how,
        max_error: comparison.max_error,
        relative_l2: comparison.relative_l2,
    })
}

impl Ready {
    /// Makes other values of some of those inputs; whether there are any.
    fn change_inputs(
        &mut self,
        group: &Group<'_>,
        replaceable: Vec<String>,
        seed: u64,
    ) -> Result<bool, CaseError> {
        if self.changed.as_ref().is_some_and(|changed| changed.replaceable == replaceable) {
            return Ok(true);
        }
        self.changed = None;
        let problem = group.bound.problem();
        // As much again as the problem takes: other inputs and another reference.
        if replaceable.is_empty() || problem.host_bytes() > available_memory() {
            return Ok(false);
        }
        let named = |name: &&str| replaceable.iter().any(|replaceable| replaceable == name);
        let made = guard::catch(|| {
            let by_symmetry = problem.symmetries().into_iter().find_map(|symmetry| {
                let all = symmetry.inputs().iter().all(&named);
                let values = all.then(|| symmetry.changed(&self.inputs)).flatten()?;
                Some((values, How::Symmetry(symmetry)))
            });
            by_symmetry.unwrap_or_else(|| {
                let names: Vec<&str> = replaceable.iter().map(String::as_str).collect();
                (problem.redraw(&names, !seed), How::Redrawn)
            })
        });
        let (values, how) = made.map_err(|panic| CaseError::Fail(format!("inputs: {panic}")))?;
        // Nothing drawn, or another shape: a fault of the workload's own.
        let fits = |(name, values): (&str, &crate::workload::Tensor)| {
            self.inputs
                .get(name)
                .is_some_and(|old| old.shape() == values.shape() && old.dtype() == values.dtype())
                && named(&name)
        };
        if !values.iter().all(fits) {
            return Err(CaseError::Fail("inputs drawn again have other shapes".to_owned()));
        }
        let differs = values.iter().any(|(name, values)| self.inputs.tensor(name) != values);
        if differs {
            self.changed = Some(ChangedInputs { replaceable, values, how, expected: None });
        }
        Ok(differs)
    }

    /// Computes the reference of the changed inputs, unless that was done.
    fn compute_changed_reference(&mut self, group: &Group<'_>) -> Result<(), CaseError> {
        let Some(changed) = &self.changed else { return Ok(()) };
        if changed.expected.is_some() {
            return Ok(());
        }
        let how = changed.how;
        if let How::Symmetry(_) = how {
            self.compute_reference(group)?;
        }
        let changed = self.changed.as_mut().expect("it was there");
        let made = guard::catch(|| match how {
            How::Symmetry(symmetry) => symmetry.expected(&self.expected),
            How::Redrawn => {
                let mut inputs = self.inputs.as_ref().clone();
                for (name, values) in changed.values.iter() {
                    inputs.insert(name, values.clone());
                }
                Some(group.bound.problem().reference(&inputs))
            }
        });
        changed.expected = made.map_err(|panic| CaseError::Fail(format!("reference: {panic}")))?;
        if changed.expected.is_none() {
            let why = "a symmetry of the workload does not know every output of its reference";
            return Err(CaseError::Fail(why.to_owned()));
        }
        Ok(())
    }
}
