//! Runs an action for each selected implementation of each problem.

use crate::backend::BenchTarget;
use crate::harness::running::problem::{CaseError, PreparedProblem};
use crate::harness::selection::cases::{CaseSelectionResult, ProblemGroup, SelectedCase};
use crate::protocol::CaseStatus;

/// Result of each case, by its id.
pub type OutcomeByCase<T> = Vec<(String, Result<T, CaseError>)>;

/// Runs `one` for a selection, one case for each implementation, because hot and cold cases have
/// the same outputs and the same kernels; then adds the skipped cases. Returns the result of each
/// case, and whether the GPU was lost, after which no case runs.
pub fn for_each_implementation<T>(
    selection: &CaseSelectionResult<'_>,
    seed: u64,
    target: &BenchTarget,
    doing: &str,
    mut one: impl FnMut(&ProblemGroup<'_>, &SelectedCase, &mut PreparedProblem) -> Result<T, CaseError>,
) -> (OutcomeByCase<T>, bool) {
    let mut outcomes = Vec::new();
    let mut lost: Option<String> = None;
    for group in &selection.groups {
        let mut ready = match &lost {
            Some(lost) => Err(CaseError::failed(lost.clone())),
            None => PreparedProblem::new(group, seed, target),
        };
        for case in group.cases.chunk_by(|a, b| a.index == b.index).map(|cases| &cases[0]) {
            let outcome = match (&mut ready, &lost) {
                (_, Some(lost)) => Err(CaseError::failed(lost.clone())),
                (Err(error), None) => Err(error.clone()),
                (Ok(ready), None) => {
                    eprintln!("{doing} {}", case.id);
                    one(group, case, ready)
                }
            };
            if matches!(outcome, Err(CaseError::Lost(_))) {
                lost = Some(format!("not run: {} lost the GPU", case.id));
            }
            outcomes.push((case.id.clone(), outcome));
        }
    }
    let skipped = selection
        .skipped
        .iter()
        .map(|(id, reason)| (id.clone(), Err(CaseError::Skip(reason.clone()))));
    outcomes.extend(skipped);
    (outcomes, lost.is_some())
}

/// Status, result and reason of an outcome.
pub fn outcome_parts<T>(outcome: Result<T, CaseError>) -> (CaseStatus, Option<T>, Option<String>) {
    match outcome {
        Ok(found) => (CaseStatus::Ok, Some(found), None),
        Err(CaseError::Skip(reason)) => (CaseStatus::Skipped, None, Some(reason)),
        Err(CaseError::Fail(reason) | CaseError::Lost(reason)) => {
            (CaseStatus::Failed, None, Some(reason.text))
        }
    }
}
