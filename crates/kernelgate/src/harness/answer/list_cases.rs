//! Lists the workloads, implementations and selected cases of a bench executable.

use crate::harness::selection::backend_choice::ChosenBackend;
use crate::harness::selection::cases::SelectedAndSkippedCases;
use crate::protocol::{
    BenchCaseStatus, BenchListResponse, ListedBenchCase, ListedImplementation, ListedWorkload,
};
use crate::suite::WorkloadSuite;

/// Lists workloads, implementations and selected cases of a bench executable, as the answer to
/// `kernelgate list`.
pub fn list_workloads_and_selected_cases<'a>(
    suites: impl Iterator<Item = &'a WorkloadSuite>,
    selection: &SelectedAndSkippedCases<'_>,
    place: &ChosenBackend,
) -> BenchListResponse {
    let mut cases = Vec::new();
    for group in &selection.problems_with_cases {
        let problem = group.problem.problem();
        let work = problem.work();
        cases.extend(group.cases.iter().map(|case| ListedBenchCase {
            case_id: case.case_id.clone(),
            status: BenchCaseStatus::Ok,
            reason_not_runnable: None,
            runs_on_no_machine: false,
            matmul_flops_per_launch: work.matmul_flops(),
            min_bytes_per_launch: work.total_bytes(),
            peak_host_memory_bytes: problem.host_memory_bytes(),
            declared_device_memory_bytes:
                group.problem.device_bytes_declared_by_implementation(case.implementation_index),
        }));
    }
    cases.extend(selection.skipped_ids_and_reasons.iter().map(|(id, reason)| ListedBenchCase {
        case_id: id.clone(),
        status: BenchCaseStatus::Skipped,
        reason_not_runnable: Some(reason.clone()),
        runs_on_no_machine: selection.unsupported_case_ids.contains(id),
        matmul_flops_per_launch: 0,
        min_bytes_per_launch: 0,
        peak_host_memory_bytes: 0,
        declared_device_memory_bytes: None,
    }));
    let (backend, otherwise) =
        (place.kind.backend_name().to_owned(), place.reason_against_other_backend.clone());
    BenchListResponse {
        backend,
        reason_against_other_backend: otherwise,
        workloads: suites.map(list_axes_and_implementations_of_workload).collect(),
        cases,
    }
}

fn list_axes_and_implementations_of_workload(suite: &WorkloadSuite) -> ListedWorkload {
    let axis = |axis: &crate::workload::Axis| {
        let values = axis.accepted_words().map_or("a number".to_owned(), |words| words.join(" "));
        [axis.axis_name.to_owned(), values, axis.about.to_owned()]
    };
    let row = |row: &crate::suite::ImplementationNameAndBackend| ListedImplementation {
        implementation_name: row.name.to_owned(),
        description: row.about.to_owned(),
    };
    ListedWorkload {
        workload_name: suite.workload_name().to_owned(),
        description: suite.workload_description().to_owned(),
        axes: suite.axes_of_workload().iter().map(axis).collect(),
        implementations: suite.implementations_of_workload().iter().map(row).collect(),
    }
}
