//! Changed inputs of a problem with their expected outputs, for the check after timing.

use std::borrow::Cow;
use std::sync::Arc;

use crate::harness::panic_guard;
use crate::harness::selection::cases::SelectedProblem;
use crate::record::environment::available_host_memory_bytes;
use crate::record::run::InputChangeAfterTiming;
use crate::workload::{Expected, InputSymmetry, Tensor, Tensors};

/// New values of inputs that every launch of a case reads.
pub struct ChangedInputsAndReference {
    /// Names of the inputs that may be replaced.
    replaceable_input_names: Vec<String>,
    /// The inputs that are replaced, with their new values.
    pub changed_inputs: Tensors,
    /// How the inputs were changed, and how expected outputs follow.
    change_method: SymmetryOrNewReference,
    /// Reference for the changed inputs, if they were redrawn and a check needed the reference.
    expected_outputs: Option<Vec<Expected>>,
}

#[derive(Clone, Copy)]
enum SymmetryOrNewReference {
    Symmetry(InputSymmetry),
    RedrawnInputs,
}

impl ChangedInputsAndReference {
    /// Changes some of a problem's inputs: by the workload's first symmetry that needs no other
    /// input, else by drawing new values. Returns `None` if no input changes, or if memory is
    /// insufficient for further inputs and another reference.
    ///
    /// # Errors
    /// Fails if the workload draws other shapes, or panics.
    pub fn by_symmetry_or_redrawing(
        group: &SelectedProblem<'_>,
        inputs: &Tensors,
        replaceable: Vec<String>,
        seed: u64,
    ) -> Result<Option<Self>, String> {
        let problem = group.problem.problem();
        if replaceable.is_empty() || problem.host_memory_bytes() > available_host_memory_bytes() {
            return Ok(None);
        }
        let may_change = |name: &str| replaceable.iter().any(|replaceable| replaceable == name);
        let (values, how) = panic_guard::catch_panic(|| {
            let by_symmetry = problem.symmetries().into_iter().find_map(|symmetry| {
                let all = symmetry.names_of_changed_inputs().into_iter().all(may_change);
                let values = all.then(|| symmetry.apply_to_inputs(inputs)).flatten()?;
                Some((values, SymmetryOrNewReference::Symmetry(symmetry)))
            });
            by_symmetry.unwrap_or_else(|| {
                let names: Vec<&str> = replaceable.iter().map(String::as_str).collect();
                (problem.redraw_inputs(&names, !seed), SymmetryOrNewReference::RedrawnInputs)
            })
        })
        .map_err(|panic| format!("other inputs: {panic}"))?;
        let fits = |(name, values): (&str, &Tensor)| {
            let old = inputs.get(name);
            let same =
                |old: &Tensor| (old.shape(), old.dtype()) == (values.shape(), values.dtype());
            may_change(name) && old.is_some_and(same)
        };
        if !values.iter().all(fits) {
            return Err("other inputs: not of the shapes and dtypes of the first".to_owned());
        }
        let differs = values.iter().any(|(name, values)| inputs.tensor(name) != values);
        Ok(differs.then_some(Self {
            replaceable_input_names: replaceable,
            changed_inputs: values,
            change_method: how,
            expected_outputs: None,
        }))
    }

    /// Whether the changed inputs were made for a row with exactly these replaceable inputs.
    pub fn were_made_for_replaceable_inputs(&self, replaceable: &[String]) -> bool {
        self.replaceable_input_names == replaceable
    }

    /// How the inputs were changed, as stored in the record.
    pub fn recorded_input_change(&self) -> InputChangeAfterTiming {
        match self.change_method {
            SymmetryOrNewReference::Symmetry(InputSymmetry::RotateAlongAxis { .. }) => {
                InputChangeAfterTiming::InputsRotated
            }
            SymmetryOrNewReference::Symmetry(InputSymmetry::NegateInputsAndOutputs { .. }) => {
                InputChangeAfterTiming::InputsNegated
            }
            SymmetryOrNewReference::RedrawnInputs => InputChangeAfterTiming::InputsDrawnAnew,
        }
    }

    /// Returns the outputs and the reference with which they must be compared. For a symmetry, its
    /// effect on the outputs is undone and the original reference is used; redrawn inputs have
    /// their own reference.
    ///
    /// # Errors
    /// Fails if the symmetry does not state its effect on every output.
    pub fn outputs_and_reference<'a>(
        &'a self,
        outputs: &'a Tensors,
        original: &'a [Expected],
    ) -> Result<(Cow<'a, Tensors>, &'a [Expected]), String> {
        match self.change_method {
            SymmetryOrNewReference::RedrawnInputs => {
                Ok((Cow::Borrowed(outputs), self.expected_outputs.as_deref().unwrap_or_default()))
            }
            SymmetryOrNewReference::Symmetry(symmetry) => match symmetry
                .undo_effect_on_outputs(outputs)
            {
                Some(undone) => Ok((Cow::Owned(undone), original)),
                None => Err("a symmetry of the workload does not know all its outputs".to_owned()),
            },
        }
    }

    /// Whether outputs are compared with the reference of the original inputs, because a symmetry
    /// changed the inputs.
    pub fn were_changed_by_symmetry(&self) -> bool {
        matches!(self.change_method, SymmetryOrNewReference::Symmetry(_))
    }

    /// Computes the reference of redrawn inputs, unless it was computed before: the closure
    /// `compute` returns the reference for all inputs.
    ///
    /// # Errors
    /// Fails with the error of `compute`.
    pub fn compute_reference_if_redrawn<E>(
        &mut self,
        inputs: &Tensors,
        compute: impl FnOnce(Arc<Tensors>) -> Result<Vec<Expected>, E>,
    ) -> Result<(), E> {
        if self.expected_outputs.is_some() || self.were_changed_by_symmetry() {
            return Ok(());
        }
        self.expected_outputs =
            Some(compute(Arc::new(inputs.with_tensors_replaced_by(&self.changed_inputs)))?);
        Ok(())
    }
}
