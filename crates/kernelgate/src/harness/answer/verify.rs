//! Answers `kernelgate verify`: compares the outputs of each case with its reference, and writes
//! the tensors to files on request.

use std::collections::BTreeMap;
use std::path::Path;

use super::per_case::{run_once_per_implementation, status_result_and_reason_of_outcome};
use crate::backend::{BackendError, BenchDevices};
use crate::harness::running::problem::{PreparedProblem, WhyCaseHasNoResult};
use crate::harness::selection::cases::{SelectedAndSkippedCases, SelectedCase, SelectedProblem};
use crate::protocol::CaseVerificationResponse;
use crate::record::tensors;
use crate::record::text::path_for_terminal;
use crate::verify::{
    ComparisonWithReference, ErrorsRelativeToReference, launch_again_and_compare_bits,
};
use crate::workload::{Tensor, Tensors};

/// Verifies one case per implementation; if `dump` is given, tensors are written into this folder
/// as `CASE.tensors`.
pub fn verify_one_case_per_implementation(
    selection: &SelectedAndSkippedCases<'_>,
    seed: u64,
    target: BenchDevices,
    dump: Option<&Path>,
) -> Vec<CaseVerificationResponse> {
    let (mut launched, mut data_sets) = (BTreeMap::new(), BTreeMap::new());
    let one = |group: &SelectedProblem<'_>, case: &SelectedCase, ready: &mut PreparedProblem| {
        let outcome = verify_case_and_dump_tensors(group, case, ready, &target, dump);
        // The answer also contains the kernels that a case with wrong outputs launched.
        launched.insert(case.case_id.clone(), ready.kernels.names_of_launched_kernels());
        data_sets.insert(
            case.case_id.clone(),
            (ready.input_data_set_id(), ready.hash_of_single_data_set()),
        );
        outcome
    };
    let (outcomes, lost) = run_once_per_implementation(selection, seed, &target, "verifying", one);
    if lost {
        // After the GPU is lost, freeing its resources may hang, so they are leaked until the
        // process ends.
        std::mem::forget(target);
    }
    let verified = |(case, outcome): (String, _)| {
        let (status, found, reason) = status_result_and_reason_of_outcome(outcome);
        let repeatable = found.as_ref().map(|(_, repeatable)| *repeatable);
        let ComparisonWithReference {
            errors,
            by_output,
            compared_elements,
            all_elements: total,
            ..
        } = found.unwrap_or_default().0;
        let ErrorsRelativeToReference { max_error, relative_l2, rounding_error: rounding } = errors;
        let (data_set, inputs) = data_sets.remove(&case).unzip();
        CaseVerificationResponse {
            launched_kernels: launched.remove(&case).unwrap_or_default(),
            input_data_set_hash: data_set,
            single_seed_inputs_hash: inputs.flatten(),
            case_id: case,
            status,
            compared_elements,
            output_elements: total,
            max_error_over_max_reference: max_error,
            relative_l2_error: relative_l2,
            rounding_relative_l2_error: rounding,
            errors_by_output: by_output,
            repeated_launch_is_bit_equal: repeatable,
            failure_or_skip_reason: reason,
        }
    };
    outcomes.into_iter().map(verified).collect()
}

fn verify_case_and_dump_tensors(
    group: &SelectedProblem<'_>,
    case: &SelectedCase,
    ready: &mut PreparedProblem,
    target: &BenchDevices,
    dump: Option<&Path>,
) -> Result<(ComparisonWithReference, bool), WhyCaseHasNoResult> {
    let (mut executable, comparison) = ready.prepare_and_verify_case(group, case, target)?;
    let repeatable = match launch_again_and_compare_bits(executable.as_mut()) {
        Ok(repeatable) => repeatable,
        Err(lost @ BackendError::DeviceLost(_)) => {
            std::mem::forget(executable);
            return Err(lost.into());
        }
        Err(error) => {
            return Err(WhyCaseHasNoResult::failed_with(format!("second launch: {error}")));
        }
    };
    if let Some(folder) = dump {
        let outputs = executable
            .outputs_on_host()
            .map_err(|error| WhyCaseHasNoResult::failed_with(error.to_string()))?;
        let path = folder.join(format!("{}.tensors", case.case_id.replace('/', "_")));
        let written = tensors::write_tensor_file_atomically(
            &path,
            &inputs_outputs_and_reference_for_dump(ready, outputs),
        );
        // Failing to write the tensor file does not make the case fail.
        if let Err(cause) = written {
            eprintln!("failed to write {}: {cause}", path_for_terminal(&path));
        }
    }
    Ok((comparison, repeatable))
}

/// Collects inputs, outputs and reference of a case under distinct names for the tensor file.
fn inputs_outputs_and_reference_for_dump(ready: &PreparedProblem, outputs: &Tensors) -> Tensors {
    let mut all = Tensors::new();
    ready
        .inputs
        .iter()
        .for_each(|(name, tensor)| all.insert(&format!("input/{name}"), tensor.clone()));
    outputs.iter().for_each(|(name, tensor)| all.insert(&format!("output/{name}"), tensor.clone()));
    for (i, expected) in ready.expected.iter().enumerate() {
        let Some(rows) = &expected.row_indices else {
            let tensor =
                Tensor::new(expected.output_shape.clone(), expected.expected_values.clone());
            all.insert(&format!("expected/{}", expected.output_name), tensor);
            continue;
        };
        // If only some rows of an output have a reference, the row numbers are stored with the
        // expected values.
        let part = ready.expected[..i]
            .iter()
            .filter(|earlier| earlier.output_name == expected.output_name)
            .count();
        let indices: Vec<f64> = rows.iter().map(|&row| row as f64).collect();
        let values =
            Tensor::new([rows.len(), expected.row_elements()], expected.expected_values.clone());
        all.insert(&format!("expected/{}/{part}/values", expected.output_name), values);
        all.insert(
            &format!("expected/{}/{part}/rows", expected.output_name),
            Tensor::new([rows.len()], indices.into()),
        );
    }
    all
}
