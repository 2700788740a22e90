//! Answers `kernelgate verify`: every case is compared with its reference, and its tensors are
//! written on request.

use std::collections::BTreeMap;
use std::path::Path;

use super::per_case::{for_each_implementation, outcome_parts};
use crate::backend::{BackendError, BenchTarget};
use crate::harness::running::problem::{CaseError, PreparedProblem};
use crate::harness::selection::cases::{CaseSelectionResult, ProblemGroup, SelectedCase};
use crate::protocol::VerifiedCase;
use crate::record::tensors;
use crate::record::text::printable_path;
use crate::verify::{OutputComparison, OutputErrors, repeats_bit_by_bit};
use crate::workload::{Tensor, Tensors};

/// Verifies one case an implementation; `dump` is a folder for `CASE.tensors`.
pub fn verify_cases(
    selection: &CaseSelectionResult<'_>,
    seed: u64,
    target: BenchTarget,
    dump: Option<&Path>,
) -> Vec<VerifiedCase> {
    let (mut launched, mut data_sets) = (BTreeMap::new(), BTreeMap::new());
    let one = |group: &ProblemGroup<'_>, case: &SelectedCase, ready: &mut PreparedProblem| {
        let outcome = verify_one_case(group, case, ready, &target, dump);
        // The kernels that a wrong case launched are reported too.
        launched.insert(case.id.clone(), ready.kernels.launched_kernels());
        data_sets
            .insert(case.id.clone(), (ready.input_data_set_id(), ready.inputs_of_one_data_set()));
        outcome
    };
    let (outcomes, lost) = for_each_implementation(selection, seed, &target, "verifying", one);
    if lost {
        // A lost device gives nothing back, and may never answer: it is left to the end of the
        // process.
        std::mem::forget(target);
    }
    let verified = |(case, outcome): (String, _)| {
        let (status, found, reason) = outcome_parts(outcome);
        let repeatable = found.as_ref().map(|(_, repeatable)| *repeatable);
        let OutputComparison { errors, by_output, checked, total, .. } =
            found.unwrap_or_default().0;
        let OutputErrors { max_error, relative_l2, rounding } = errors;
        let (data_set, inputs) = data_sets.remove(&case).unzip();
        VerifiedCase {
            kernels: launched.remove(&case).unwrap_or_default(),
            data_set,
            inputs: inputs.flatten(),
            case,
            status,
            checked,
            total,
            max_error,
            relative_l2,
            rounding,
            by_output,
            repeatable,
            reason,
        }
    };
    outcomes.into_iter().map(verified).collect()
}

fn verify_one_case(
    group: &ProblemGroup<'_>,
    case: &SelectedCase,
    ready: &mut PreparedProblem,
    target: &BenchTarget,
    dump: Option<&Path>,
) -> Result<(OutputComparison, bool), CaseError> {
    let (mut executable, comparison) = ready.prepare_and_verify(group, case, target)?;
    let repeatable = match repeats_bit_by_bit(executable.as_mut()) {
        Ok(repeatable) => repeatable,
        Err(lost @ BackendError::Lost(_)) => {
            std::mem::forget(executable);
            return Err(lost.into());
        }
        Err(error) => return Err(CaseError::failed(format!("second launch: {error}"))),
    };
    if let Some(folder) = dump {
        let outputs = executable.outputs().map_err(|error| CaseError::failed(error.to_string()))?;
        let path = folder.join(format!("{}.tensors", case.id.replace('/', "_")));
        let written = tensors::write(&path, &tensors_to_dump(ready, outputs));
        // A file that cannot be written is not the fault of the case.
        if let Err(cause) = written {
            eprintln!("failed to write {}: {cause}", printable_path(&path));
        }
    }
    Ok((comparison, repeatable))
}

/// Names the inputs, outputs and reference of a case for a dump: each name once.
fn tensors_to_dump(ready: &PreparedProblem, outputs: &Tensors) -> Tensors {
    let mut all = Tensors::new();
    ready
        .inputs
        .iter()
        .for_each(|(name, tensor)| all.insert(&format!("input/{name}"), tensor.clone()));
    outputs.iter().for_each(|(name, tensor)| all.insert(&format!("output/{name}"), tensor.clone()));
    for (i, expected) in ready.expected.iter().enumerate() {
        let Some(rows) = &expected.rows else {
            let tensor = Tensor::new(expected.shape.clone(), expected.values.clone());
            all.insert(&format!("expected/{}", expected.name), tensor);
            continue;
        };
        // An output may have several references, each for some of its rows, which are listed with
        // the values.
        let part =
            ready.expected[..i].iter().filter(|earlier| earlier.name == expected.name).count();
        let indices: Vec<f64> = rows.iter().map(|&row| row as f64).collect();
        let values = Tensor::new([rows.len(), expected.row_elements()], expected.values.clone());
        all.insert(&format!("expected/{}/{part}/values", expected.name), values);
        all.insert(
            &format!("expected/{}/{part}/rows", expected.name),
            Tensor::new([rows.len()], indices.into()),
        );
    }
    all
}
