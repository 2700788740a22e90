//! Runs an action once for each selected implementation of each problem.

use crate::backend::BenchDevices;
use crate::harness::running::problem::{PreparedProblem, WhyCaseHasNoResult};
use crate::harness::selection::cases::{SelectedAndSkippedCases, SelectedCase, SelectedProblem};
use crate::protocol::BenchCaseStatus;

/// Results of an action, such as verifying, one for each case id.
pub type OutcomeByCaseId<T> = Vec<(String, Result<T, WhyCaseHasNoResult>)>;

/// Calls `one` for one case of each selected implementation, because hot and cold cases have equal
/// outputs and kernels; then adds the skipped cases. Returns the outcome of each case, and whether
/// the GPU was lost; after a loss, no further case runs.
pub fn run_once_per_implementation<T>(
    selection: &SelectedAndSkippedCases<'_>,
    seed: u64,
    target: &BenchDevices,
    doing: &str,
    mut one: impl FnMut(
        &SelectedProblem<'_>,
        &SelectedCase,
        &mut PreparedProblem,
    ) -> Result<T, WhyCaseHasNoResult>,
) -> (OutcomeByCaseId<T>, bool) {
    let mut outcomes = Vec::new();
    let mut lost: Option<String> = None;
    for group in &selection.problems_with_cases {
        let mut ready = match &lost {
            Some(lost) => Err(WhyCaseHasNoResult::failed_with(lost.clone())),
            None => PreparedProblem::with_inputs_and_reference(group, seed, target),
        };
        for case in group
            .cases
            .chunk_by(|a, b| a.implementation_index == b.implementation_index)
            .map(|cases| &cases[0])
        {
            let outcome = match (&mut ready, &lost) {
                (_, Some(lost)) => Err(WhyCaseHasNoResult::failed_with(lost.clone())),
                (Err(error), None) => Err(error.clone()),
                (Ok(ready), None) => {
                    eprintln!("{doing} {}", case.case_id);
                    one(group, case, ready)
                }
            };
            if matches!(outcome, Err(WhyCaseHasNoResult::GpuLost(_))) {
                lost = Some(format!("not run: {} lost the GPU", case.case_id));
            }
            outcomes.push((case.case_id.clone(), outcome));
        }
    }
    let skipped = selection
        .skipped_ids_and_reasons
        .iter()
        .map(|(id, reason)| (id.clone(), Err(WhyCaseHasNoResult::Skipped(reason.clone()))));
    outcomes.extend(skipped);
    (outcomes, lost.is_some())
}

/// Splits the outcome of a case into status, result, and reason of a skip or failure.
pub fn status_result_and_reason_of_outcome<T>(
    outcome: Result<T, WhyCaseHasNoResult>,
) -> (BenchCaseStatus, Option<T>, Option<String>) {
    match outcome {
        Ok(found) => (BenchCaseStatus::Ok, Some(found), None),
        Err(WhyCaseHasNoResult::Skipped(reason)) => (BenchCaseStatus::Skipped, None, Some(reason)),
        Err(WhyCaseHasNoResult::Failed(reason) | WhyCaseHasNoResult::GpuLost(reason)) => {
            (BenchCaseStatus::Failed, None, Some(reason.failure_sentence))
        }
    }
}
