//! Changed inputs of a problem and their reference, for the check after timing: cases were verified
//! and timed with the original inputs.

use std::borrow::Cow;
use std::sync::Arc;

use crate::harness::panic_guard;
use crate::harness::selection::cases::ProblemGroup;
use crate::record::environment::available_host_memory;
use crate::record::run::InputChange;
use crate::workload::{Expected, Symmetry, Tensor, Tensors};

/// New values of those inputs that every launch of a case reads.
pub struct ChangedInputs {
    /// Names of the inputs that may be replaced.
    replaceable: Vec<String>,
    /// The replaced inputs, with their new values.
    pub values: Tensors,
    /// The way in which the inputs were changed.
    how: ExpectedChange,
    /// Reference for the changed inputs, if these were drawn anew and a check needed the reference.
    expected: Option<Vec<Expected>>,
}

#[derive(Clone, Copy)]
enum ExpectedChange {
    Symmetry(Symmetry),
    Redrawn,
}

impl ChangedInputs {
    /// Changes some of a problem's inputs: by the workload's first symmetry that involves no other
    /// input, else by drawing new values. `None` if that changes nothing, or if memory is too short
    /// for other inputs and another reference.
    ///
    /// # Errors
    /// Fails if the workload draws other shapes, or panics.
    pub fn new(
        group: &ProblemGroup<'_>,
        inputs: &Tensors,
        replaceable: Vec<String>,
        seed: u64,
    ) -> Result<Option<Self>, String> {
        let problem = group.bound.problem();
        if replaceable.is_empty() || problem.host_bytes() > available_host_memory() {
            return Ok(None);
        }
        let may_change = |name: &str| replaceable.iter().any(|replaceable| replaceable == name);
        let (values, how) = panic_guard::catch_panic(|| {
            let by_symmetry = problem.symmetries().into_iter().find_map(|symmetry| {
                let all = symmetry.inputs().into_iter().all(may_change);
                let values = all.then(|| symmetry.changed_inputs(inputs)).flatten()?;
                Some((values, ExpectedChange::Symmetry(symmetry)))
            });
            by_symmetry.unwrap_or_else(|| {
                let names: Vec<&str> = replaceable.iter().map(String::as_str).collect();
                (problem.redraw(&names, !seed), ExpectedChange::Redrawn)
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
        Ok(differs.then_some(Self { replaceable, values, how, expected: None }))
    }

    /// Whether the changed inputs were made for a row with these replaceable inputs.
    pub fn suit_replaceable_inputs(&self, replaceable: &[String]) -> bool {
        self.replaceable == replaceable
    }

    /// How the inputs were changed, for the record.
    pub fn input_change(&self) -> InputChange {
        match self.how {
            ExpectedChange::Symmetry(Symmetry::Roll { .. }) => InputChange::Rolled,
            ExpectedChange::Symmetry(Symmetry::Negate { .. }) => InputChange::Negated,
            ExpectedChange::Redrawn => InputChange::Redrawn,
        }
    }

    /// Returns the outputs and the reference to compare them with. If the inputs were changed by a
    /// symmetry, its effect on the outputs is undone and the outputs are compared with the original
    /// reference; otherwise the new inputs have a reference of their own.
    ///
    /// # Errors
    /// Fails if the symmetry does not know every output.
    pub fn outputs_and_reference<'a>(
        &'a self,
        outputs: &'a Tensors,
        original: &'a [Expected],
    ) -> Result<(Cow<'a, Tensors>, &'a [Expected]), String> {
        match self.how {
            ExpectedChange::Redrawn => {
                Ok((Cow::Borrowed(outputs), self.expected.as_deref().unwrap_or_default()))
            }
            ExpectedChange::Symmetry(symmetry) => match symmetry.undo_on_outputs(outputs) {
                Some(undone) => Ok((Cow::Owned(undone), original)),
                None => Err("a symmetry of the workload does not know all its outputs".to_owned()),
            },
        }
    }

    /// Whether outputs are compared with the reference of the original inputs.
    pub fn are_changed_by_symmetry(&self) -> bool {
        matches!(self.how, ExpectedChange::Symmetry(_))
    }

    /// Ensures that inputs that were drawn anew have a reference: The function `compute` returns
    /// the reference for all inputs.
    ///
    /// # Errors
    /// Fails with the error of the closure `compute`.
    pub fn compute_expected_outputs<E>(
        &mut self,
        inputs: &Tensors,
        compute: impl FnOnce(Arc<Tensors>) -> Result<Vec<Expected>, E>,
    ) -> Result<(), E> {
        if self.expected.is_some() || self.are_changed_by_symmetry() {
            return Ok(());
        }
        self.expected = Some(compute(Arc::new(inputs.replaced_by(&self.values)))?);
        Ok(())
    }
}
