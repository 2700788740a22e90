//! Compares one case of two revisions by times alone, which a bisection needs many times. The
//! changes that the package's rules accept in the head do not count, and neither do errors and
//! costs.

use super::engine::ComparisonEngine;
use super::session::{ComparisonSession, SessionTools, open_trials};
use super::{CompareError, ComparisonRequest};
use crate::gate::comparison::Comparison;

/// A comparison of one case, with the bench that has the case.
pub struct SingleCaseComparison {
    pub comparison: Comparison,
    /// Name of the bench that has the case, on either side.
    pub bench: Option<String>,
}

/// Compares a case; the request's filter must match no other case.
pub fn compare_one_case(
    request: &ComparisonRequest,
    case: &str,
    tools: SessionTools,
) -> Result<SingleCaseComparison, CompareError> {
    let session = ComparisonSession::open_session(request, false, tools)?;
    let identity = session.comparison_identity(request)?;
    let trials = match open_trials(request, &session, identity.clone()) {
        // The interrupted comparison was of another build: a fresh start costs a question, not a
        // search.
        Err(_) if request.resume => open_trials(
            &ComparisonRequest { resume: false, ..request.clone() },
            &session,
            identity,
        )?,
        trials => trials?,
    };
    let mut engine = ComparisonEngine::new(request, &session, trials);
    let prepared = engine.prepare()?;
    engine.resolve_plan(&prepared)?;
    let bench = prepared.owners.get(case).cloned();
    let comparison = engine.compare(prepared)?;
    Ok(SingleCaseComparison { comparison, bench })
}
