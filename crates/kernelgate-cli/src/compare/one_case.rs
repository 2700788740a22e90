//! Compares one case of two revisions by its times alone, as a bisection needs repeatedly. In a
//! comparison of one case for a bisection, the package's rules accept no change, and output errors
//! and costs are not judged.

use super::engine::ComparisonEngine;
use super::session::{ComparisonSession, ProgressAndChildProcesses, resume_or_create_trials};
use super::{BuildComparisonRequest, CompareError};
use crate::gate::comparison::Comparison;

/// The comparison of one case, with the name of the bench that has the case.
pub struct SingleCaseComparison {
    pub comparison: Comparison,
    /// Name of the bench that has the case in base or head; `None` if no bench has it.
    pub bench_with_case: Option<String>,
}

/// Compares one case of two revisions; the request's filter must match no other case.
pub fn compare_one_case(
    request: &BuildComparisonRequest,
    case: &str,
    tools: ProgressAndChildProcesses,
) -> Result<SingleCaseComparison, CompareError> {
    let session = ComparisonSession::prepare_sides_in_locked_folder(request, false, tools)?;
    let identity = session.facts_that_identify_comparison(request)?;
    let trials = match resume_or_create_trials(request, &session, identity.clone()) {
        // If the interrupted comparison was of another build, it starts anew, which costs the
        // bisection one comparison and not its earlier answers.
        Err(_) if request.resume_interrupted_comparison => resume_or_create_trials(
            &BuildComparisonRequest { resume_interrupted_comparison: false, ..request.clone() },
            &session,
            identity,
        )?,
        trials => trials?,
    };
    let mut engine = ComparisonEngine::engine_with_trials(request, &session, trials);
    let prepared = engine.verify_and_match_sides()?;
    engine.resolve_test_plan_for_device(&prepared)?;
    let bench = prepared.bench_of_case.get(case).cloned();
    let comparison = engine.run_both_rounds(prepared)?;
    Ok(SingleCaseComparison { comparison, bench_with_case: bench })
}
