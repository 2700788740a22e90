//! Estimates the minimum time that timing the selected cases takes.

use std::collections::BTreeMap;

use super::timing::SamplingPlan;
use crate::display::duration;
use crate::harness::selection::cases::SelectedAndSkippedCases;
use crate::harness::settings::BenchSettings;
use crate::record::{BaselineFile, BenchProcessRun, RecordFoldersOfPackage, RunEnvironment, file};
use crate::stats::median;
use crate::workload::BenchEffort;
use std::time::Duration;

/// Formats the estimated minimum time, such as "at least 16 min of timing: 212 cases, …".
///
/// Each case counts with the warm-up and measurement time of the effort, or with the plan's samples
/// of one launch each if they take longer, by times of the last session. Times for inputs,
/// references and verification are unknown, so the text says that they are excluded.
pub fn minimum_timing_duration_text(
    selection: &SelectedAndSkippedCases<'_>,
    effort: BenchEffort,
    settings: &BenchSettings,
    known_ns: &BTreeMap<String, f64>,
) -> String {
    let (mut time, mut known) = (Duration::ZERO, 0);
    for case in selection.problems_with_cases.iter().flat_map(|group| &group.cases) {
        let on = case.implementation.backend;
        let launch_ns = known_ns.get(&case.case_id).copied();
        known += usize::from(launch_ns.is_some());
        time += SamplingPlan::for_effort_and_launch_time(
            effort,
            on,
            launch_ns.unwrap_or(1.0),
            settings,
        )
        .minimum_sampling_duration(launch_ns.unwrap_or_default());
    }
    format!(
        "at least {} of timing: {} cases, {known} of them by their times in the last session; \
         inputs, references and verification of {} problems come on top; --budget TIME or --shard \
         I/N makes it shorter",
        duration::duration_text(time),
        selection.runnable_case_count(),
        selection.problems_with_cases.len()
    )
}

/// Median nanoseconds per launch of each case in the last session on an equal device.
pub fn median_launch_ns_of_last_session(
    store: &RecordFoldersOfPackage,
    environment: &RunEnvironment,
) -> BTreeMap<String, f64> {
    let sessions = store.read_last_sessions(1).unwrap_or_default();
    let runs = sessions.into_iter().flat_map(|session| session.runs);
    let of_package = |run: &BenchProcessRun| {
        store.package.as_ref().is_none_or(|it| run.may_belong_to_package(it))
    };
    let here = runs.filter(|run| {
        of_package(run)
            && run.environment.baseline_folder_of_device_and_count()
                == environment.baseline_folder_of_device_and_count()
    });
    let cases = here.flat_map(|run| run.cases);
    cases.map(|(id, case)| (id, median(&case.samples.launch_times_by_sample_ns()))).collect()
}

/// Median wall seconds per problem from the package's committed baselines, which are equal on every
/// machine with the same commit.
pub fn median_seconds_per_problem_from_baselines(
    store: &RecordFoldersOfPackage,
) -> BTreeMap<String, f64> {
    let files = store.list_baseline_files().unwrap_or_default();
    let baselines =
        files.iter().filter_map(|(.., path)| file::read_record::<BaselineFile>(path).ok());
    let mut times: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for (problem, seconds) in
        baselines.flat_map(|baseline| baseline.runs).flat_map(|(_, run)| run.wall_s_by_problem)
    {
        times.entry(problem).or_default().push(seconds);
    }
    times.into_iter().map(|(problem, seconds)| (problem, median(&seconds))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::BackendKind;
    use crate::harness::selection::backend_choice::ChosenBackend;
    use crate::harness::selection::cases::select_cases;
    use crate::harness::selection::filter::CaseIdFilter;
    use crate::harness::selection::sample::suites_of_both_test_benches;

    #[test]
    fn a_time_estimate_counts_known_cases_and_names_exclusions() {
        let suites = suites_of_both_test_benches();
        let place = ChosenBackend {
            kind: BackendKind::Cpu,
            reason_against_other_backend: String::new(),
            l2_bytes: 0,
            gpu_count: 1,
        };
        let own = suites.iter();
        let selection =
            select_cases(own, BenchEffort::Thorough, &place, &[], &CaseIdFilter::AllCases).unwrap();
        let (cases, problems) =
            (selection.runnable_case_count(), selection.problems_with_cases.len());
        let estimate = |known: &BTreeMap<String, f64>| {
            minimum_timing_duration_text(
                &selection,
                BenchEffort::Thorough,
                &BenchSettings::settings_of_plain_bench_run(),
                known,
            )
        };
        let plain = estimate(&BTreeMap::new());
        let time = duration::duration_text(Duration::from_secs_f64(4.5 * cases as f64));
        let expected = format!(
            "at least {time} of timing: {cases} cases, 0 of them by their times in the last \
             session; inputs, references and verification of {problems} problems come on top; \
             --budget TIME or --shard I/N makes it shorter"
        );
        assert_eq!(plain, expected);
        // The only known case is estimated with samples of one launch of an hour each.
        let slow = [(selection.problems_with_cases[0].cases[0].case_id.clone(), 3.6e12)].into();
        assert_eq!(
            estimate(&slow),
            "at least 10 h 0 min of timing: 4 cases, 1 of them by their times in the last session; inputs, references and verification of 4 problems come on top; --budget TIME or --shard I/N makes it shorter"
        );
    }
}
