//! Which cases there are.

use crate::harness::selection::backend_choice::BenchPlace;
use crate::harness::selection::cases::CaseSelectionResult;
use crate::protocol::{BenchListing, CaseStatus, ListedCase, ListedProblem, ListedRow};
use crate::suite::Suite;

/// Lists workloads, implementations and selected cases of a bench.
pub fn list_cases<'a>(
    suites: impl Iterator<Item = &'a Suite>,
    selection: &CaseSelectionResult<'_>,
    place: &BenchPlace,
) -> BenchListing {
    let mut cases = Vec::new();
    for group in &selection.groups {
        let problem = group.bound.problem();
        let work = problem.work();
        cases.extend(group.cases.iter().map(|case| ListedCase {
            case: case.id.clone(),
            status: CaseStatus::Ok,
            reason: None,
            unsupported: false,
            matmul_flops: work.matmul_flops(),
            bytes: work.total_bytes(),
            host_bytes: problem.host_bytes(),
            device_bytes: group.bound.device_bytes(case.index),
        }));
    }
    cases.extend(selection.skipped.iter().map(|(id, reason)| ListedCase {
        case: id.clone(),
        status: CaseStatus::Skipped,
        reason: Some(reason.clone()),
        unsupported: selection.unsupported.contains(id),
        matmul_flops: 0,
        bytes: 0,
        host_bytes: 0,
        device_bytes: None,
    }));
    let (backend, otherwise) = (place.kind.name().to_owned(), place.otherwise.clone());
    BenchListing { backend, otherwise, workloads: suites.map(list_workload).collect(), cases }
}

fn list_workload(suite: &Suite) -> ListedProblem {
    let axis = |axis: &crate::workload::Axis| {
        let values = axis.words().map_or("a number".to_owned(), |words| words.join(" "));
        [axis.name.to_owned(), values, axis.about.to_owned()]
    };
    let row = |row: &crate::suite::ImplementationInfo| ListedRow {
        name: row.name.to_owned(),
        about: row.about.to_owned(),
    };
    ListedProblem {
        name: suite.name().to_owned(),
        about: suite.about().to_owned(),
        axes: suite.axes().iter().map(axis).collect(),
        implementations: suite.implementations().iter().map(row).collect(),
    }
}
