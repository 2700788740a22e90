//! The check after timing: the timed graph or launch computes its outputs from its inputs.
//!
//! A case is verified before it is timed, by a launch. The timed graph, or a launch after many
//! others, may do less work. Once the samples are taken, the inputs that every launch reads are
//! replaced, the outputs are poisoned, the very graph or launch that was timed runs once more, and
//! its outputs are compared with the reference of the new inputs.
//!
//! Inputs are replaced along a symmetry of the workload, whose effect on the outputs is undone
//! before they are compared; without a symmetry they are drawn anew, with a reference of their own.
//! If no input can be replaced, or memory is short, the outputs are compared for the old inputs,
//! and the record states that.
//!
//! A row that returns remembered results for inputs it has seen would pass. Therefore the check of
//! reused results ([`reused_results`]) launches the row once more for the inputs of its comparison.
//!
//! This module deliberately has no defence against code that attacks the process. The check after
//! timing finds mistakes and shortcuts: work on other streams, no launch at all, a remembered
//! result, work in the reset.

use std::borrow::Cow;

use super::changed_inputs::ChangedInputs;
use crate::backend::{BackendError, Executable};
use crate::harness::panic_guard;
use crate::harness::phase_timer;
use crate::harness::running::case_error::{CaseError, guard_panics};
use crate::harness::running::problem::{PreparedProblem, copy_outputs};
use crate::harness::selection::cases::ProblemGroup;
use crate::measure::Stopwatch;
use crate::measure::audit::{TimingRefusal, reused_results};
use crate::record::run::{AfterTiming, InputChange};
use crate::verify::{self, OutputComparison, VerifyError};
use crate::workload::Tensors;
use kernelgate_cuda::CaseFailure;

/// Name of the checks after timing in the phase timer.
pub const PHASE_NAME: &str = "check after timing";

/// The inputs that an executable reads now: the original inputs, or changed ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CurrentInputs {
    /// Inputs that the case was prepared and verified with.
    #[default]
    Original,
    /// Inputs that the last check put in place of the original ones.
    Changed,
}

/// Findings about an executable that hold for all of its cases.
#[derive(Debug, Default)]
pub struct ExecutableFindings {
    /// The inputs that launches read at present: original or changed.
    pub inputs: CurrentInputs,
    /// Reason why the launches work on other streams, once a check has looked for such work; a
    /// launch does the same for hot and cold caches.
    pub elsewhere: Option<Option<String>>,
}

/// Poisons outputs, replaces inputs, runs the timed graph or launch, and compares. The inputs stay
/// replaced: the next check of this executable restores the original ones and compares with their
/// reference.
///
/// `digest` is the digest of the outputs for the original inputs, if an earlier process of this
/// executable made this check: then the inputs stay, and the bits of the outputs are compared.
///
/// # Errors
/// Fails if the outputs are wrong, or the device fails.
pub fn check_after_timing(
    ready: &mut PreparedProblem,
    group: &ProblemGroup<'_>,
    executable: &mut dyn Executable,
    current: &mut CurrentInputs,
    stopwatch: &mut dyn Stopwatch,
    digest: Option<&str>,
) -> Result<AfterTiming, CaseError> {
    if let Some(digest) = digest {
        let same = guard_panics(|| {
            reused_results::poison_and_reset(executable)?;
            stopwatch.replay_timed(executable)?;
            Ok::<_, VerifyError>(verify::digest_of_outputs(executable.outputs()?) == digest)
        })?;
        if same {
            return Ok(AfterTiming::SAME_BITS_VERIFICATION);
        }
    }
    let replaceable = executable.launch_inputs().into_iter().map(str::to_owned).collect();
    let mut changes = digest.is_none() && ready.change_replaceable_inputs(group, replaceable)?;
    if changes && *current == CurrentInputs::Original {
        changes = ready.prepare_changed_inputs(group)?;
    }
    let next = match (changes, *current) {
        (true, CurrentInputs::Original) => CurrentInputs::Changed,
        _ => CurrentInputs::Original,
    };
    if next == CurrentInputs::Original {
        ready.compute_reference_once(group)?;
    }
    let carries_state = executable.carries_state();
    let inputs = ReplacementInputs { changes, next, current };
    let replay = panic_guard::catch_panic(|| {
        replay_with_inputs(ready, group, executable, stopwatch, inputs)
    });
    let how = match changes {
        true => ready.changed.as_ref().map_or(InputChange::Same, ChangedInputs::input_change),
        false => InputChange::Same,
    };
    let comparison = replay.map_err(CaseError::failed)?.map_err(|error| match error {
        VerifyError::Backend(_) => error.into(),
        wrong => {
            let failure = CaseFailure::from(&wrong).with_name("inputs_after_timing", how.words());
            CaseError::failed(failure.with_text(format!(
                "after timing, {}: {wrong}; what was timed does not compute its outputs from its \
                 inputs{}",
                how.words(),
                if carries_state {
                    ", or its reset reads an input that `reading` must not list"
                } else {
                    ""
                }
            )))
        }
    })?;
    Ok(AfterTiming {
        inputs: how,
        max_error: comparison.errors.max_error,
        relative_l2: comparison.errors.relative_l2,
    })
}

/// Inputs that a check puts in the place of the current ones.
struct ReplacementInputs<'a> {
    /// Whether changed inputs exist.
    changes: bool,
    next: CurrentInputs,
    current: &'a mut CurrentInputs,
}

/// Replaces the inputs, runs the timed graph or launch, and compares; then checks whether it reuses
/// results.
fn replay_with_inputs(
    ready: &mut PreparedProblem,
    group: &ProblemGroup<'_>,
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
    ReplacementInputs { changes, next, current }: ReplacementInputs<'_>,
) -> Result<OutputComparison, VerifyError> {
    if ready.expected.is_empty() && group.bound.problem().reference_from().is_without_reference() {
        // A run with equal bits was verified before, so the outputs of this row were not compared
        // yet.
        verify::launch_on_poisoned_outputs(executable)?;
        ready.expected = verify::outputs_as_reference(copy_outputs(executable)?);
    }
    let changed = ready.changed.as_ref().filter(|_| changes);
    let replace = |executable: &mut dyn Executable| {
        let _activity = phase_timer::start_activity("inputs replaced");
        for (name, values) in changed.iter().flat_map(|changed| changed.values.iter()) {
            let original = || ready.inputs.tensor(name);
            let next = if next == CurrentInputs::Changed { values } else { original() };
            executable.replace_input(name, next)?;
        }
        Ok::<_, BackendError>(())
    };
    reused_results::poison_and_reset(executable)?;
    // For inputs that cannot be changed, only this check shows that the reset computes no outputs.
    let before = match executable.carries_state() && changed.is_none() {
        true => Some(verify::digest_of_outputs(copy_outputs(executable)?)),
        false => None,
    };
    replace(executable)?;
    *current = next;
    let first = stopwatch.replay_timed(executable)?;
    let outputs = copy_outputs(executable)?;
    let after = before.is_some().then(|| verify::digest_of_outputs(outputs));
    let compare = phase_timer::start_activity("compare");
    let (outputs, expected) = match changed.filter(|_| next == CurrentInputs::Changed) {
        Some(changed) => changed
            .outputs_and_reference(outputs, &ready.expected)
            .map_err(|problem| VerifyError::Reference { output: "all".to_owned(), problem })?,
        None => (Cow::Borrowed(outputs), ready.expected.as_slice()),
    };
    let comparison = verify::compare_outputs(&outputs, expected, &ready.bounds)?;
    drop(compare);
    if before.is_some() && before == after {
        return Err(BackendError::from(TimingRefusal::ComputedByReset).into());
    }
    let replaced = changed.iter().flat_map(|changed| changed.values.iter());
    let names: Vec<&str> = replaced.map(|(name, _)| name).collect();
    let draw = |turn: u64| match names.is_empty() {
        true => Tensors::new(),
        false => group.bound.problem().redraw(&names, ready.seed ^ turn),
    };
    let mut reuse = reused_results::check_result_reuse(first, executable, stopwatch, &draw);
    if let (Ok(replaced), Some(changed)) = (&reuse, changed) {
        let replaced = *replaced;
        let new: Vec<_> = changed.values.iter().collect();
        let named = |&(name, _): &(_, _)| (name, ready.inputs.tensor(name));
        let original: Vec<_> = new.iter().map(named).collect();
        let short = reused_results::check_short_reuse(executable, stopwatch, [&original, &new]);
        reuse = short.map(|also| also || replaced);
    }
    if !matches!(reuse, Ok(false)) {
        replace(executable)?;
    }
    reuse?;
    Ok(comparison)
}

impl PreparedProblem {
    /// Draws other values for some of the named inputs; returns whether any of them can be changed.
    fn change_replaceable_inputs(
        &mut self,
        group: &ProblemGroup<'_>,
        replaceable: Vec<String>,
    ) -> Result<bool, CaseError> {
        // Without a reference, the expected outputs of other inputs are unknown.
        if group.bound.problem().reference_from().is_without_reference() {
            return Ok(false);
        }
        if !self
            .changed
            .as_ref()
            .is_some_and(|changed| changed.suit_replaceable_inputs(&replaceable))
        {
            let _activity = phase_timer::start_activity("other inputs");
            self.changed = None;
            self.changed = ChangedInputs::new(group, &self.inputs, replaceable, self.seed)
                .map_err(CaseError::failed)?;
        }
        Ok(self.changed.is_some())
    }

    /// Prepares the expected outputs of the changed inputs and returns whether they exist. If the
    /// reference is another row, its memory may not fit beside the timed row.
    fn prepare_changed_inputs(&mut self, group: &ProblemGroup<'_>) -> Result<bool, CaseError> {
        if self.changed.as_ref().is_some_and(ChangedInputs::are_changed_by_symmetry) {
            self.compute_reference_once(group)?;
        }
        let Some(mut changed) = self.changed.take() else { return Ok(false) };
        let computed =
            changed.compute_expected_outputs(&self.inputs, |inputs| self.reference(group, inputs));
        self.changed = Some(changed);
        match computed {
            Ok(()) => Ok(true),
            Err(CaseError::Skip(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
