//! Chooses the cases that a calibration of the gate compares with themselves.

use std::collections::{BTreeMap, BTreeSet};

use crate::compare::engine::ComparisonEngine;
use crate::compare::session::{ComparisonSession, PreparedSides};
use crate::compare::{BuildComparisonRequest, CompareError};
use crate::gate::calibration::GateCalibration;
use kernelgate::record::{ComparisonTrialsFile, RunEnvironment};

/// On the CPU, a calibration without named cases chooses cases whose time is in this range,
/// nanoseconds: long against the clock's resolution, short against a process.
const CALIBRATION_CASE_TIME_RANGE_ON_HOST_NS: (f64, f64) = (0.5e6, 20e6);
/// On a GPU, a calibration without named cases chooses cases whose time is in this range,
/// nanoseconds: long enough that a delay of one per cent can be injected.
const CALIBRATION_CASE_TIME_RANGE_ON_GPU_NS: (f64, f64) = (50e3, 20e6);
/// Assumed largest ratio of the time of a case's first launch to that of a later launch, used to
/// preselect the cases of a calibration.
const MAX_FIRST_TO_LATER_LAUNCH_TIME_RATIO: f64 = 4.0;

/// How a calibration chooses its cases: named by the user, kept from an interrupted calibration, or
/// chosen by their times.
pub struct CalibrationCaseSelection {
    /// Whether the user named the cases; if so, the calibration uses all of them.
    pub cases_chosen_by_user: bool,
    /// Largest number of cases that a calibration chooses by itself if the user names none.
    pub max_chosen_cases: usize,
    /// The interrupted calibration that is resumed; its cases are used again.
    pub interrupted_calibration: Option<GateCalibration>,
}

/// Reduces the prepared cases to those that the calibration will compare, and returns each case's
/// time in nanoseconds. A resumed calibration keeps the cases of its earlier part, because a new
/// choice by measured times could differ.
pub fn choose_calibration_cases(
    request: &BuildComparisonRequest,
    choice: CalibrationCaseSelection,
    session: &ComparisonSession,
    prepared: &mut PreparedSides,
    environment: &RunEnvironment,
) -> Result<BTreeMap<String, f64>, CompareError> {
    let window = if environment.is_cpu_run() {
        CALIBRATION_CASE_TIME_RANGE_ON_HOST_NS
    } else {
        CALIBRATION_CASE_TIME_RANGE_ON_GPU_NS
    };
    let named = choice.cases_chosen_by_user || choice.interrupted_calibration.is_some();
    if let Some(earlier) = choice.interrupted_calibration {
        prepared.retain_cases(&earlier.launch_ns_by_case.into_keys().collect());
    } else if !named {
        let near = (
            window.0 / MAX_FIRST_TO_LATER_LAUNCH_TIME_RATIO,
            window.1 * MAX_FIRST_TO_LATER_LAUNCH_TIME_RATIO,
        );
        let cases = prepared.case_ids_to_compare();
        let verification_ns =
            prepared.verification_launch_ns.iter().filter(|(id, _)| cases.contains(*id));
        let verification_ns = verification_ns.map(|(id, time_ns)| (id.clone(), *time_ns)).collect();
        prepared.retain_cases(&choose_shortest_cases_of_each_workload(
            &verification_ns,
            near,
            choice.max_chosen_cases.saturating_mul(3),
        ));
    }
    if prepared.case_ids_to_compare().is_empty() {
        return Err(CompareError::NoCaseToCalibrate);
    }
    session.progress.show_current_step("timing the cases");
    let mut times_ns =
        ComparisonEngine::engine_with_trials(request, session, ComparisonTrialsFile::default())
            .time_cases_in_one_process(prepared)?;
    if !named {
        let chosen =
            choose_shortest_cases_of_each_workload(&times_ns, window, choice.max_chosen_cases);
        prepared.retain_cases(&chosen);
        times_ns.retain(|id, _| chosen.contains(id));
    }
    if times_ns.is_empty() { Err(CompareError::NoCaseToCalibrate) } else { Ok(times_ns) }
}

/// Chooses the cases with times within a window: the shortest of each workload first, then the
/// second shortest of each, up to a number.
fn choose_shortest_cases_of_each_workload(
    times_ns: &BTreeMap<String, f64>,
    (low, high): (f64, f64),
    most: usize,
) -> BTreeSet<String> {
    let mut workloads: BTreeMap<String, Vec<(&String, f64)>> = BTreeMap::new();
    for (id, time_ns) in times_ns.iter().filter(|(_, time_ns)| (low..=high).contains(*time_ns)) {
        let workload = id.split('/').take(2).collect::<Vec<_>>().join("/");
        workloads.entry(workload).or_default().push((id, *time_ns));
    }
    let mut ranked: Vec<(usize, f64, &String)> = Vec::new();
    for cases in workloads.values_mut() {
        cases.sort_by(|a, b| a.1.total_cmp(&b.1));
        ranked.extend(cases.iter().enumerate().map(|(rank, (id, time_ns))| (rank, *time_ns, *id)));
    }
    ranked.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    ranked.into_iter().take(most).map(|(.., id)| id.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calibration_takes_the_shortest_cases_of_each_workload_first() {
        let times: BTreeMap<String, f64> = [
            ("a/f/1/cpu/hot", 5.0),
            ("a/f/2/cpu/hot", 3.0),
            ("a/b/1/cpu/hot", 9.0),
            ("c/f/1/cpu/hot", 1.0),
            ("c/f/2/cpu/hot", 50.0),
        ]
        .map(|(id, time_ns)| (id.to_owned(), time_ns))
        .into();
        let chosen = |most| {
            choose_shortest_cases_of_each_workload(&times, (2.0, 10.0), most)
                .into_iter()
                .collect::<Vec<_>>()
        };
        assert_eq!(chosen(2), ["a/b/1/cpu/hot", "a/f/2/cpu/hot"]);
        assert_eq!(chosen(9).len(), 3);
    }
}
