//! Lower bound of the time that a selection of cases takes.

use std::collections::BTreeMap;

use super::timing::SamplingPlan;
use crate::display::duration;
use crate::harness::selection::cases::CaseSelectionResult;
use crate::harness::settings::BenchSettings;
use crate::record::{Baseline, BaselineStore, Environment, ProcessRun, file};
use crate::stats::median;
use crate::workload::Effort;
use std::time::Duration;

/// The estimate as text, such as "at least 16 min of timing: 212 cases, …".
///
/// The rule: each case is warmed up and timed for as long as the effort asks, or for ten launches
/// if these take longer, by the times of the last session. The time for inputs, references and
/// verification is unknown, so the estimate excludes it and says so.
pub fn estimate_text(
    selection: &CaseSelectionResult<'_>,
    effort: Effort,
    settings: &BenchSettings,
    known_ns: &BTreeMap<String, f64>,
) -> String {
    let (mut time, mut known) = (Duration::ZERO, 0);
    for case in selection.groups.iter().flat_map(|group| &group.cases) {
        let on = case.row.backend;
        let launch_ns = known_ns.get(&case.id).copied();
        known += usize::from(launch_ns.is_some());
        time += SamplingPlan::new(effort, on, launch_ns.unwrap_or(1.0), settings)
            .least_duration(launch_ns.unwrap_or_default());
    }
    format!(
        "at least {} of timing: {} cases, {known} of them by their times in the last session; \
         inputs, references and verification of {} problems come on top; --budget TIME or --shard \
         I/N makes it shorter",
        duration::duration_text(time),
        selection.case_count(),
        selection.groups.len()
    )
}

/// Nanoseconds per launch of each case, as the last session on this device measured them.
pub fn case_times_of_last_session(
    store: &BaselineStore,
    environment: &Environment,
) -> BTreeMap<String, f64> {
    let sessions = store.last_sessions(1).unwrap_or_default();
    let runs = sessions.into_iter().flat_map(|session| session.runs);
    let of_package =
        |run: &ProcessRun| store.package.as_ref().is_none_or(|it| run.may_be_of_package(it));
    let here = runs.filter(|run| {
        of_package(run)
            && run.environment.baseline_folder_name() == environment.baseline_folder_name()
    });
    let cases = here.flat_map(|run| run.cases);
    cases.map(|(id, case)| (id, median(&case.samples.per_launch_ns()))).collect()
}

/// Wall seconds that each problem took, from the package's committed baselines: every machine with
/// the commit has equal numbers.
pub fn recorded_problem_times(store: &BaselineStore) -> BTreeMap<String, f64> {
    let files = store.baseline_files().unwrap_or_default();
    let baselines = files.iter().filter_map(|(.., path)| file::read::<Baseline>(path).ok());
    let mut times: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (problem, seconds) in
        baselines.flat_map(|baseline| baseline.runs).flat_map(|(_, run)| run.problems_s)
    {
        times.entry(problem).or_default().push(seconds);
    }
    times.into_iter().map(|(problem, seconds)| (problem, median(&seconds))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::BackendKind;
    use crate::harness::selection::backend_choice::BenchPlace;
    use crate::harness::selection::cases::select_cases;
    use crate::harness::selection::filter::CaseFilter;
    use crate::harness::selection::sample::suites_of_all_binaries;

    #[test]
    fn a_time_estimate_counts_known_cases_and_names_what_it_excludes() {
        let suites = suites_of_all_binaries();
        let place =
            BenchPlace { kind: BackendKind::Cpu, otherwise: String::new(), l2_bytes: 0, gpus: 1 };
        let own = suites.iter();
        let selection = select_cases(own, Effort::Thorough, &place, &[], &CaseFilter::All).unwrap();
        let (cases, problems) = (selection.case_count(), selection.groups.len());
        let estimate = |known: &BTreeMap<String, f64>| {
            estimate_text(&selection, Effort::Thorough, &BenchSettings::default_settings(), known)
        };
        let plain = estimate(&BTreeMap::new());
        let time = duration::duration_text(Duration::from_secs_f64(4.5 * cases as f64));
        let expected = format!(
            "at least {time} of timing: {cases} cases, 0 of them by their times in the last \
             session; inputs, references and verification of {problems} problems come on top; \
             --budget TIME or --shard I/N makes it shorter"
        );
        assert_eq!(plain, expected);
        // Here each case is estimated as ten launches of an hour each.
        let slow = [(selection.groups[0].cases[0].id.clone(), 3.6e12)].into();
        assert_eq!(
            estimate(&slow),
            "at least 10 h 0 min of timing: 4 cases, 1 of them by their times in the last session; inputs, references and verification of 4 problems come on top; --budget TIME or --shard I/N makes it shorter"
        );
    }
}
