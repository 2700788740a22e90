//! Checks after timing that the CUDA graph or launch that was timed really computes its outputs
//! from its inputs.
//!
//! Before timing, a case is verified with a single launch. The timed graph, or a launch after many
//! others, could do less work than the verified launch. After timing, the harness replaces the
//! inputs, poisons the outputs, runs the timed graph or launch once more, and compares the outputs
//! with the new inputs' reference.
//!
//! Inputs are replaced according to a symmetry of the workload, which is undone on the outputs
//! before comparing; without a symmetry, inputs are redrawn and get a new reference. If no input
//! can be replaced, or memory is insufficient, outputs for the original inputs are compared, and
//! the record says so.
//!
//! A row that returns stored results for inputs it has seen before would pass this comparison.
//! Therefore a further check ([`reused_results`]) launches the row once more with the same inputs,
//! and detects reused results by the launch's time.
//!
//! The checks do not defend against code that deliberately attacks the process. The checks find
//! mistakes and shortcuts: work on other streams, missing launches, stored results, and work in the
//! reset.

use std::borrow::Cow;

use super::changed_inputs::ChangedInputsAndReference;
use crate::backend::{BackendError, LaunchableProblem};
use crate::harness::panic_guard;
use crate::harness::phase_timer;
use crate::harness::running::case_error::{WhyCaseHasNoResult, run_with_panics_as_case_failures};
use crate::harness::running::problem::{PreparedProblem, copy_outputs_to_host};
use crate::harness::selection::cases::SelectedProblem;
use crate::measure::LaunchStopwatch;
use crate::measure::audit::{TimingRefusal, reused_results};
use crate::record::run::{InputChangeAfterTiming, VerificationAfterTiming};
use crate::verify::{self, ComparisonWithReference, OutputVerificationError};
use crate::workload::Tensors;
use kernelgate_cuda::CaseFailureReason;

/// Name of the check after timing in the phase timer.
pub const CHECK_AFTER_TIMING_PHASE: &str = "check after timing";

/// The inputs that a prepared case reads at present: the original inputs, or changed ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OriginalOrChangedInputs {
    /// The inputs with which the case was prepared and verified.
    #[default]
    OriginalInputs,
    /// The inputs with which the last check after timing replaced the original inputs.
    ChangedInputs,
}

/// Findings about a prepared implementation that hold for all of its cases (hot and cold).
#[derive(Debug, Default)]
pub struct FindingsForCasesOfImplementation {
    /// The inputs that launches read at present: original or changed.
    pub current_inputs: OriginalOrChangedInputs,
    /// Outcome of CUPTI's check of the launches' streams, once the check was made: the reason if
    /// CUPTI could not record; equal for hot and cold caches.
    pub checked_reason_without_cupti_record: Option<Option<String>>,
}

/// Poisons outputs, replaces inputs, runs the timed graph or launch once more, and compares the
/// outputs. The inputs stay replaced; the next check of the same prepared case restores the
/// original inputs and compares with their reference.
///
/// If an earlier process already checked the outputs for changed inputs, `digest` is its digest of
/// the outputs, and only the bits of the outputs for the original inputs are compared.
///
/// # Errors
/// Fails if the outputs are wrong, or the device fails.
pub fn check_outputs_after_timing(
    ready: &mut PreparedProblem,
    group: &SelectedProblem<'_>,
    executable: &mut dyn LaunchableProblem,
    current: &mut OriginalOrChangedInputs,
    stopwatch: &mut dyn LaunchStopwatch,
    digest: Option<&str>,
) -> Result<VerificationAfterTiming, WhyCaseHasNoResult> {
    if let Some(digest) = digest {
        let same = run_with_panics_as_case_failures(|| {
            reused_results::poison_outputs_and_reset(executable)?;
            stopwatch.time_one_replay(executable)?;
            Ok::<_, OutputVerificationError>(
                verify::output_bits_hash_hex(executable.outputs_on_host()?) == digest,
            )
        })?;
        if same {
            return Ok(VerificationAfterTiming::EQUAL_BITS_FOR_UNCHANGED_INPUTS);
        }
    }
    let replaceable =
        executable.names_of_inputs_read_by_launches().into_iter().map(str::to_owned).collect();
    let mut changes = digest.is_none() && ready.choose_changed_inputs(group, replaceable)?;
    if changes && *current == OriginalOrChangedInputs::OriginalInputs {
        changes = ready.compute_reference_of_changed_inputs(group)?;
    }
    let next = match (changes, *current) {
        (true, OriginalOrChangedInputs::OriginalInputs) => OriginalOrChangedInputs::ChangedInputs,
        _ => OriginalOrChangedInputs::OriginalInputs,
    };
    if next == OriginalOrChangedInputs::OriginalInputs {
        ready.compute_reference_once(group)?;
    }
    let carries_state = executable.launches_carry_state();
    let inputs = InputsOfNextCheck {
        changed_inputs_exist: changes,
        next_inputs: next,
        current_inputs: current,
    };
    let replay = panic_guard::catch_panic(|| {
        replace_inputs_rerun_and_compare(ready, group, executable, stopwatch, inputs)
    });
    let how = match changes {
        true => ready.changed_inputs.as_ref().map_or(
            InputChangeAfterTiming::InputsUnchanged,
            ChangedInputsAndReference::recorded_input_change,
        ),
        false => InputChangeAfterTiming::InputsUnchanged,
    };
    let comparison =
        replay.map_err(WhyCaseHasNoResult::failed_with)?.map_err(|error| match error {
            OutputVerificationError::Backend(_) => error.into(),
            wrong => {
                let failure = CaseFailureReason::from(&wrong)
                    .with_name_fact("inputs_after_timing", how.description_for_messages());
                WhyCaseHasNoResult::failed_with(failure.with_failure_sentence(format!(
                "after timing, {}: {wrong}; what was timed does not compute its outputs from its \
                 inputs{}",
                how.description_for_messages(),
                if carries_state {
                    ", or its reset reads an input that `reading` must not list"
                } else {
                    ""
                }
            )))
            }
        })?;
    Ok(VerificationAfterTiming {
        inputs: how,
        max_error: comparison.errors.max_error,
        relative_l2: comparison.errors.relative_l2,
    })
}

/// Inputs with which a check replaces the current inputs of a prepared case.
struct InputsOfNextCheck<'a> {
    /// Whether changed inputs exist.
    changed_inputs_exist: bool,
    next_inputs: OriginalOrChangedInputs,
    current_inputs: &'a mut OriginalOrChangedInputs,
}

/// Replaces the inputs, runs the timed graph or launch once more, and compares the outputs; then
/// checks whether the launch reuses results.
fn replace_inputs_rerun_and_compare(
    ready: &mut PreparedProblem,
    group: &SelectedProblem<'_>,
    executable: &mut dyn LaunchableProblem,
    stopwatch: &mut dyn LaunchStopwatch,
    InputsOfNextCheck { changed_inputs_exist: changes, next_inputs: next, current_inputs: current }: InputsOfNextCheck<'_>,
) -> Result<ComparisonWithReference, OutputVerificationError> {
    if ready.expected.is_empty()
        && group.problem.problem().source_of_expected_outputs().has_no_reference_to_compare()
    {
        // An earlier run verified equal bits, so this run has not compared the outputs of this row
        // yet.
        verify::launch_again_on_poisoned_outputs(executable)?;
        ready.expected = verify::reference_from_outputs(copy_outputs_to_host(executable)?);
    }
    let changed = ready.changed_inputs.as_ref().filter(|_| changes);
    let replace = |executable: &mut dyn LaunchableProblem| {
        let _activity = phase_timer::start_timed_activity("inputs replaced");
        for (name, values) in changed.iter().flat_map(|changed| changed.changed_inputs.iter()) {
            let original = || ready.inputs.tensor(name);
            let next =
                if next == OriginalOrChangedInputs::ChangedInputs { values } else { original() };
            executable.replace_input(name, next)?;
        }
        Ok::<_, BackendError>(())
    };
    reused_results::poison_outputs_and_reset(executable)?;
    // If no input can be changed, only a comparison of the output bits before and after the launch
    // shows that the reset does not compute the outputs.
    let before = match executable.launches_carry_state() && changed.is_none() {
        true => Some(verify::output_bits_hash_hex(copy_outputs_to_host(executable)?)),
        false => None,
    };
    replace(executable)?;
    *current = next;
    let first = stopwatch.time_one_replay(executable)?;
    let outputs = copy_outputs_to_host(executable)?;
    let after = before.is_some().then(|| verify::output_bits_hash_hex(outputs));
    let compare = phase_timer::start_timed_activity("compare");
    let (outputs, expected) =
        match changed.filter(|_| next == OriginalOrChangedInputs::ChangedInputs) {
            Some(changed) => {
                changed.outputs_and_reference(outputs, &ready.expected).map_err(|problem| {
                    OutputVerificationError::MalformedReference {
                        output: "all".to_owned(),
                        reason: problem,
                    }
                })?
            }
            None => (Cow::Borrowed(outputs), ready.expected.as_slice()),
        };
    let comparison =
        verify::compare_outputs_with_reference(&outputs, expected, &ready.error_bounds)?;
    drop(compare);
    if before.is_some() && before == after {
        return Err(BackendError::from(TimingRefusal::OutputsComputedByReset).into());
    }
    let replaced = changed.iter().flat_map(|changed| changed.changed_inputs.iter());
    let names: Vec<&str> = replaced.map(|(name, _)| name).collect();
    let draw = |turn: u64| match names.is_empty() {
        true => Tensors::new(),
        false => group.problem.problem().redraw_inputs(&names, ready.input_seed ^ turn),
    };
    let mut reuse =
        reused_results::refuse_reuse_by_slower_first_replays(first, executable, stopwatch, &draw);
    if let (Ok(replaced), Some(changed)) = (&reuse, changed) {
        let replaced = *replaced;
        let new: Vec<_> = changed.changed_inputs.iter().collect();
        let named = |&(name, _): &(_, _)| (name, ready.inputs.tensor(name));
        let original: Vec<_> = new.iter().map(named).collect();
        let short = reused_results::refuse_reuse_by_slower_changed_input_launches(
            executable,
            stopwatch,
            [&original, &new],
        );
        reuse = short.map(|also| also || replaced);
    }
    if !matches!(reuse, Ok(false)) {
        replace(executable)?;
    }
    reuse?;
    Ok(comparison)
}

impl PreparedProblem {
    /// Chooses new values for some of the named inputs; returns whether any input can be changed.
    fn choose_changed_inputs(
        &mut self,
        group: &SelectedProblem<'_>,
        replaceable: Vec<String>,
    ) -> Result<bool, WhyCaseHasNoResult> {
        // If a problem has no reference, its expected outputs for other inputs are unknown.
        if group.problem.problem().source_of_expected_outputs().has_no_reference_to_compare() {
            return Ok(false);
        }
        if !self
            .changed_inputs
            .as_ref()
            .is_some_and(|changed| changed.were_made_for_replaceable_inputs(&replaceable))
        {
            let _activity = phase_timer::start_timed_activity("other inputs");
            self.changed_inputs = None;
            self.changed_inputs = ChangedInputsAndReference::by_symmetry_or_redrawing(
                group,
                &self.inputs,
                replaceable,
                self.input_seed,
            )
            .map_err(WhyCaseHasNoResult::failed_with)?;
        }
        Ok(self.changed_inputs.is_some())
    }

    /// Computes the expected outputs for the changed inputs; returns whether they exist. If another
    /// row computes the reference, its memory may not fit on the GPU beside the timed row.
    fn compute_reference_of_changed_inputs(
        &mut self,
        group: &SelectedProblem<'_>,
    ) -> Result<bool, WhyCaseHasNoResult> {
        if self
            .changed_inputs
            .as_ref()
            .is_some_and(ChangedInputsAndReference::were_changed_by_symmetry)
        {
            self.compute_reference_once(group)?;
        }
        let Some(mut changed) = self.changed_inputs.take() else { return Ok(false) };
        let computed = changed.compute_reference_if_redrawn(&self.inputs, |inputs| {
            self.expected_outputs_for_inputs(group, inputs)
        });
        self.changed_inputs = Some(changed);
        match computed {
            Ok(()) => Ok(true),
            Err(WhyCaseHasNoResult::Skipped(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
