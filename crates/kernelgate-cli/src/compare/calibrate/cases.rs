//! Chooses the cases on which a calibration measures the gate.

use std::collections::{BTreeMap, BTreeSet};

use crate::compare::engine::ComparisonEngine;
use crate::compare::session::{ComparisonSession, PreparedSides};
use crate::compare::{CompareError, ComparisonRequest};
use crate::gate::calibration::Calibration;
use kernelgate::record::{ComparisonTrials, Environment};

/// Range of times of the cases that are chosen on the host if the user names none, nanoseconds:
/// long against the clock's resolution, short against a process.
const HOST_TIME_RANGE_NS: (f64, f64) = (0.5e6, 20e6);
/// Range of the case times for calibration on a GPU, nanoseconds: long enough that one per cent can
/// be added.
const GPU_TIME_RANGE_NS: (f64, f64) = (50e3, 20e6);
/// Largest ratio of the time of a case's first launch to that of a later launch.
const MAX_FIRST_LAUNCH_RATIO: f64 = 4.0;

/// Facts about a calibration's choice of cases before these are timed.
pub struct CalibrationCaseChoice {
    /// Whether the user named the cases; if so, all of them are calibrated.
    pub named: bool,
    /// Largest number of calibrated cases if the user names none.
    pub most: usize,
    /// Calibration that is continued with the cases that it used before.
    pub earlier: Option<Calibration>,
}

/// Reduces the cases to those that will be calibrated, and returns their times. A resumed
/// calibration keeps its cases, because measured times vary from run to run.
pub fn choose_cases(
    request: &ComparisonRequest,
    choice: CalibrationCaseChoice,
    session: &ComparisonSession,
    prepared: &mut PreparedSides,
    environment: &Environment,
) -> Result<BTreeMap<String, f64>, CompareError> {
    let window = if environment.is_on_host() { HOST_TIME_RANGE_NS } else { GPU_TIME_RANGE_NS };
    let named = choice.named || choice.earlier.is_some();
    if let Some(earlier) = choice.earlier {
        prepared.keep(&earlier.cases.into_keys().collect());
    } else if !named {
        let near = (window.0 / MAX_FIRST_LAUNCH_RATIO, window.1 * MAX_FIRST_LAUNCH_RATIO);
        let cases = prepared.cases();
        let verification_ns = prepared.verification_ns.iter().filter(|(id, _)| cases.contains(*id));
        let verification_ns = verification_ns.map(|(id, time_ns)| (id.clone(), *time_ns)).collect();
        prepared.keep(&choose_by_time(&verification_ns, near, choice.most.saturating_mul(3)));
    }
    if prepared.cases().is_empty() {
        return Err(CompareError::NothingToCalibrate);
    }
    session.progress.show_step("timing the cases");
    let mut times_ns =
        ComparisonEngine::new(request, session, ComparisonTrials::default()).probe(prepared)?;
    if !named {
        let chosen = choose_by_time(&times_ns, window, choice.most);
        prepared.keep(&chosen);
        times_ns.retain(|id, _| chosen.contains(id));
    }
    if times_ns.is_empty() { Err(CompareError::NothingToCalibrate) } else { Ok(times_ns) }
}

/// The shortest cases within a window of times, one from each workload per pass.
fn choose_by_time(
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
    fn calibration_cases_are_taken_from_every_workload_shortest_first() {
        let times: BTreeMap<String, f64> = [
            ("a/f/1/cpu/hot", 5.0),
            ("a/f/2/cpu/hot", 3.0),
            ("a/b/1/cpu/hot", 9.0),
            ("c/f/1/cpu/hot", 1.0),
            ("c/f/2/cpu/hot", 50.0),
        ]
        .map(|(id, time_ns)| (id.to_owned(), time_ns))
        .into();
        let chosen =
            |most| choose_by_time(&times, (2.0, 10.0), most).into_iter().collect::<Vec<_>>();
        assert_eq!(chosen(2), ["a/b/1/cpu/hot", "a/f/2/cpu/hot"]);
        assert_eq!(chosen(9).len(), 3);
    }
}
