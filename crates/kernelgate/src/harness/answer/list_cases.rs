//! Which cases there are.

use crate::harness::selection::backend_choice::ChosenBackend;
use crate::harness::selection::cases::SelectedAndSkippedCases;
use crate::protocol::{
    BenchCaseListing, BenchCaseStatus, ListedBenchCase, ListedImplementation, ListedWorkload,
};
use crate::suite::WorkloadSuite;

/// Lists workloads, implementations and selected cases of a bench executable, as the answer to
/// `kernelgate list`.
pub fn list_workloads_and_selected_cases<'a>(
    suites: impl Iterator<Item = &'a WorkloadSuite>,
    selection: &SelectedAndSkippedCases<'_>,
    place: &ChosenBackend,
) -> BenchCaseListing {
    let mut cases = Vec::new();
    for group in &selection.groups {
        let problem = group.problem.problem();
        let work = problem.work();
        cases.extend(group.cases.iter().map(|case| ListedBenchCase {
            case: case.id.clone(),
            status: BenchCaseStatus::Ok,
            reason: None,
            unsupported: false,
            matmul_flops: work.matmul_flops(),
            bytes: work.total_bytes(),
            host_bytes: problem.host_bytes(),
            device_bytes: group.problem.device_bytes_declared_by_implementation(case.index),
        }));
    }
    cases.extend(selection.skipped.iter().map(|(id, reason)| ListedBenchCase {
        case: id.clone(),
        status: BenchCaseStatus::Skipped,
        reason: Some(reason.clone()),
        unsupported: selection.unsupported.contains(id),
        matmul_flops: 0,
        bytes: 0,
        host_bytes: 0,
        device_bytes: None,
    }));
    let (backend, otherwise) =
        (place.kind.backend_name().to_owned(), place.reason_against_other_backend.clone());
    BenchCaseListing {
        backend,
        otherwise,
        workloads: suites.map(list_axes_and_implementations_of_workload).collect(),
        cases,
    }
}

fn list_axes_and_implementations_of_workload(suite: &WorkloadSuite) -> ListedWorkload {
    let axis = |axis: &crate::workload::Axis| {
        let values = axis.accepted_words().map_or("a number".to_owned(), |words| words.join(" "));
        [axis.name.to_owned(), values, axis.about.to_owned()]
    };
    let row = |row: &crate::suite::ImplementationNameAndBackend| ListedImplementation {
        name: row.name.to_owned(),
        about: row.about.to_owned(),
    };
    ListedWorkload {
        name: suite.workload_name().to_owned(),
        about: suite.workload_description().to_owned(),
        axes: suite.axes_of_workload().iter().map(axis).collect(),
        implementations: suite.implementations_of_workload().iter().map(row).collect(),
    }
}
