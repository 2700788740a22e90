//! Runs benches that use Criterion without kernelgate. Criterion's flags control the processes of
//! these benches, and the times are read from Criterion's result folder.
//!
//! Each process of a Criterion bench gets its own empty result folder. kernelgate cannot verify the
//! outputs of such benches nor delay their launches, and their sources may set sample sizes and
//! times that override the flags. Deliberately absent: The module `benches::criterion` knows
//! Criterion's flags and file formats.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::by_protocol::record_removal_failure_text;
use super::process::{
    SharedTrialSettings, TrialProcessToRun, command_in_package_folder, run_to_end_or_timeout,
};
use crate::benches::criterion::{
    self, CRITERION_LIST_ARGUMENTS, CRITERION_SAMPLE_SIZE, ListedCriterionTitles,
};
use crate::benches::process_output;
use crate::compare::sides::leftover_files;
use kernelgate::gpu_time;
use kernelgate::harness::filter::CaseIdFilter;
use kernelgate::measure::CaseSampleConditions;
use kernelgate::measure::contention::HostCpuTimeTicks;
use kernelgate::record::criterion_store::{
    self as store, CaseInCriterionStore, title_without_criterions_number,
};
use kernelgate::record::text::{
    clean_message_for_terminal, join_lines_with_spaces, refuse_control_characters,
};
use kernelgate::record::{
    BenchProcessRun, CaseRecordWithSamples, CommitAndChanges, SamplesOfCase, TrialSamplingPlan,
    file,
};

/// Exit code with which a Rust program ends after a panic.
const RUST_PANIC_EXIT_CODE: i32 = 101;
/// Key of a bench process's total wall time in [`BenchProcessRun::wall_s_by_activity`], as benches
/// with kernelgate's harness record it.
const WHOLE_PROCESS_TIME_KEY: &str = "whole";

/// The reason why a Criterion bench gave no list of its cases.
#[derive(Debug, PartialEq, Eq)]
pub enum CriterionListFailure {
    /// The bench does not understand Criterion's flags; the text states the reason.
    UnsupportedHarness(String),
    /// The bench hung, panicked or was killed; the text states the reason.
    ProcessFailed(String),
}

/// Runs a Criterion bench with `--list` and returns the case titles that it printed.
pub fn list_criterion_cases(
    setup: &SharedTrialSettings<'_>,
    (program, package): (&Path, &Path),
    timeout: Duration,
) -> Result<ListedCriterionTitles, CriterionListFailure> {
    let store = make_empty_criterion_folder(setup, "criterion-list")
        .map_err(CriterionListFailure::ProcessFailed)?;
    let mut command = command_in_package_folder(program, package);
    criterion::set_criterion_result_folder(&mut command, &store)
        .args(CRITERION_LIST_ARGUMENTS)
        .stdout(Stdio::piped());
    let ended = run_to_end_or_timeout(setup, &mut command, timeout);
    if !store::is_criterion_store_empty(&store) {
        let why = "it ignores Criterion's flags: asked to list its cases it measured them";
        return Err(CriterionListFailure::UnsupportedHarness(why.to_owned()));
    }
    let prefix = "asked to list its cases it";
    let ended = match ended {
        Ok(ended) => ended,
        Err(why) => return Err(CriterionListFailure::ProcessFailed(format!("{prefix} was {why}"))),
    };
    if !ended.exit_status.success() {
        let how = format!("{prefix} ended with {}", ended.process_failure_text());
        // A `main` that does not know `--list` exits with an error code; a bench that panicked or
        // was killed knows Criterion's flags but is broken.
        return Err(match ended.exit_status.code() {
            Some(code) if code != RUST_PANIC_EXIT_CODE => {
                CriterionListFailure::UnsupportedHarness(how)
            }
            _ => CriterionListFailure::ProcessFailed(how),
        });
    }
    if ended.captured_stdout.output_truncated {
        let why = format!(
            "{prefix} printed more than {} bytes, the limit",
            process_output::KEPT_BYTES_AT_STREAM_START
        );
        return Err(CriterionListFailure::UnsupportedHarness(why));
    }
    let text = String::from_utf8_lossy(&ended.captured_stdout.kept_bytes);
    let listed =
        criterion::parse_criterion_list(&text).map_err(CriterionListFailure::UnsupportedHarness)?;
    if listed == ListedCriterionTitles::default() {
        let why = "asked to list its cases it listed none, as a main that ignores Criterion's \
                   flags would";
        return Err(CriterionListFailure::UnsupportedHarness(why.to_owned()));
    }
    Ok(listed)
}

/// Returns the command that measures the cases of a trial with Criterion; results go to a new
/// folder with this name.
pub fn criterion_measuring_command(
    setup: &SharedTrialSettings<'_>,
    trial: &TrialProcessToRun<'_>,
    store: &str,
) -> Result<Command, String> {
    let store = make_empty_criterion_folder(setup, store)?;
    let filter = match &trial.request.case_ids_to_run {
        Some(cases) => criterion::criterion_filter_for_cases(cases),
        None => setup.criterion_filter.map(str::to_owned),
    };
    let mut command = command_in_package_folder(&trial.bench_executable, &trial.package_folder);
    criterion::set_criterion_result_folder(&mut command, &store)
        .args(criterion::criterion_measuring_arguments(filter.as_deref(), &trial.request.sampling))
        .env(gpu_time::RECORD_PATH_VARIABLE, &trial.request.run_record_path)
        .stdout(Stdio::null());
    leftover_files::remove_file_or_folder_if_present(&trial.request.run_record_path)
        .map_err(record_removal_failure_text)?;
    Ok(command)
}

/// Reads the run record that a Criterion bench wrote itself because it times a GPU stream with
/// kernelgate; `None` if it wrote none.
fn read_gpu_stream_record(
    trial: &TrialProcessToRun<'_>,
) -> Result<Option<BenchProcessRun>, String> {
    match file::read_record(&trial.request.run_record_path) {
        Ok(run) => Ok(Some(run)),
        Err(error) if error.is_because_file_is_missing() => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// Measures the requested cases of a trial with a Criterion bench, in one process. A case without
/// samples in Criterion's result folder is recorded as skipped, with the reason.
pub fn measure_requested_criterion_cases(
    setup: &SharedTrialSettings<'_>,
    trial: &TrialProcessToRun<'_>,
) -> Result<BenchProcessRun, String> {
    measure_listed_criterion_cases(setup, trial, &ListedCriterionTitles::default())
}

/// Measures as [`measure_requested_criterion_cases`] does; in addition, each listed case that the
/// trial's filter matches counts as requested.
pub fn measure_listed_criterion_cases(
    setup: &SharedTrialSettings<'_>,
    trial: &TrialProcessToRun<'_>,
    listed: &ListedCriterionTitles,
) -> Result<BenchProcessRun, String> {
    const CRITERION_TRIAL_FOLDER: &str = "criterion-trial";
    let mut command = criterion_measuring_command(setup, trial, CRITERION_TRIAL_FOLDER)?;
    let (before, started) = (HostCpuTimeTicks::read_for_finished_children(), Instant::now());
    let ended = run_to_end_or_timeout(setup, &mut command, trial.process_timeout)?;
    let wall_s = started.elapsed().as_secs_f64();
    let after = HostCpuTimeTicks::read_for_finished_children();
    if !ended.exit_status.success() {
        let messages = ended.end_of_stderr();
        let case = criterion::last_case_criterion_began(&messages)
            .map(|case| format!("measuring `{case}`, "));
        return Err(format!(
            "{}{}",
            clean_message_for_terminal(&case.unwrap_or_default()),
            ended.process_failure_text()
        ));
    }
    let contention = before
        .zip(after)
        .and_then(|(before, after)| after.cpu_share_of_other_processes_since(&before));
    let folder = setup.trial_files_folder.join(CRITERION_TRIAL_FOLDER);
    let stored = store::read_criterion_store(&folder).map_err(|why| why.to_string())?;
    let bench = trial.bench_executable.file_name().unwrap_or_default().to_string_lossy();
    let provenance = CommitAndChanges {
        commit: Some(trial.source_commit.trim_end_matches("+changes").to_owned()),
        dirty: trial.source_commit.ends_with("+changes"),
    };
    let own = read_gpu_stream_record(trial)?;
    let environment = own.as_ref().map_or(setup.environment, |own| &own.environment);
    let (session, environment) = (&trial.request.session_name, environment.clone());
    let empty = BenchProcessRun::empty_run_starting_now(&bench, session, environment, provenance);
    let mut run = BenchProcessRun {
        ended_normally: true,
        executable_hash: Some(trial.executable_hash.to_owned()),
        wall_s_by_activity: [(WHOLE_PROCESS_TIME_KEY.to_owned(), wall_s)].into(),
        telemetry: own.as_ref().map(|own| own.telemetry.clone()).unwrap_or_default(),
        ..empty
    };
    let filter = CaseIdFilter::parse_exact_id_or_regex(setup.criterion_filter, false)
        .map_err(|error| error.to_string())?;
    let matches = |title: &&String| {
        filter.selects_case_id(title_without_criterions_number(title).unwrap_or(title))
    };
    let is_requested =
        |id: &String| trial.request.case_ids_to_run.as_ref().is_none_or(|cases| cases.contains(id));
    let mut skip = |id: &str, why: &str| {
        run.skipped.insert(join_lines_with_spaces(id), join_lines_with_spaces(why))
    };
    for (id, why) in stored.unusable_case_reasons.iter().filter(|(id, _)| is_requested(id)) {
        skip(id, why);
    }
    let absent =
        listed.case_titles.iter().filter(matches).filter(|it| !stored.case_titles.contains(*it));
    let requested = trial.request.case_ids_to_run.iter().flatten();
    let unusable = &stored.unusable_case_reasons;
    let requested =
        requested.filter(|id| !stored.cases.contains_key(*id) && !unusable.contains_key(*id));
    for id in absent.chain(requested) {
        skip(id, "it left no samples in Criterion's store (CRITERION_HOME)");
    }
    let mut records = BTreeMap::new();
    for (id, case) in stored.cases.iter().filter(|(id, _)| is_requested(id)) {
        if listed.repeated_case_titles.contains(id) {
            skip(id, "more than one case of its bench has this id");
        } else if let Err(why) = refuse_control_characters(id) {
            skip(id, &why);
        } else {
            let added_ns = trial.injection.injected_delays_ns.get(id).copied().unwrap_or(0.0);
            let mut record = case_record_from_criterion(case, added_ns, contention);
            let of_gpu = own.as_ref().and_then(|own| own.cases.get(id));
            record.samples.conditions.includes_host_launch_time =
                of_gpu.is_some_and(|of_gpu| of_gpu.samples.conditions.includes_host_launch_time);
            records.insert(id, record);
        }
    }
    for (id, record) in records {
        add_valid_case_or_skip_reason(&mut run, id, record);
    }
    Ok(run)
}

/// Adds a case's record to a run if the record is valid; otherwise records the case as skipped, so
/// that the other cases of the bench keep their times.
fn add_valid_case_or_skip_reason(
    run: &mut BenchProcessRun,
    id: &str,
    record: CaseRecordWithSamples,
) {
    match record.check_case_record_plausible() {
        Ok(()) => drop(run.cases.insert(id.to_owned(), record)),
        Err(why) => {
            let why = format!("its samples cannot be recorded: {why}");
            run.skipped.insert(join_lines_with_spaces(id), join_lines_with_spaces(&why));
        }
    }
}

fn case_record_from_criterion(
    case: &CaseInCriterionStore,
    added_ns: f64,
    contention: Option<f64>,
) -> CaseRecordWithSamples {
    let pairs = case.sample_times.iter().zip(&case.iterations_per_sample);
    let elapsed_ns = pairs.map(|(time, iterations)| time + added_ns * *iterations as f64);
    case.to_case_record(SamplesOfCase {
        elapsed_per_sample_ns: elapsed_ns.collect(),
        launches_per_sample: case.iterations_per_sample.clone(),
        conditions: CaseSampleConditions {
            other_processes_cpu_share: contention,
            ..CaseSampleConditions::default()
        },
        ..SamplesOfCase::default()
    })
}

fn make_empty_criterion_folder(
    setup: &SharedTrialSettings<'_>,
    name: &str,
) -> Result<PathBuf, String> {
    let store = setup.trial_files_folder.join(name);
    leftover_files::remove_file_or_folder_if_present(&store)
        .and_then(|()| std::fs::create_dir_all(&store))
        .map_err(|cause| format!("failed to make {}: {cause}", store.display()))?;
    Ok(store)
}

/// Returns the cases whose bench source overrides Criterion's flags, each with the settings:
/// another number of samples, or a measurement much longer than requested.
pub fn sampling_overridden_by_bench_source(
    run: &BenchProcessRun,
    sampling: &TrialSamplingPlan,
) -> BTreeMap<String, Vec<String>> {
    /// A measurement that is at least this many times longer than requested counts as much longer.
    /// The ratio is large because Criterion plans the measurement from a warm-up whose time per
    /// launch may be misleading.
    const MUCH_LONGER_THAN_REQUESTED_RATIO: f64 = 3.0;
    let mut settings: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (id, case) in &run.cases {
        let samples = &case.samples;
        let count = samples.launches_per_sample.len();
        let measured_s = 1e-9 * samples.elapsed_per_sample_ns.iter().sum::<f64>();
        let shortened = samples.launches_per_sample.iter().min().is_some_and(|least| *least > 1);
        let mut set = Vec::new();
        if count != CRITERION_SAMPLE_SIZE {
            set.push(format!("{count} samples"));
        }
        let possible = run
            .wall_s_by_activity
            .get(WHOLE_PROCESS_TIME_KEY)
            .is_some_and(|whole_s| measured_s <= *whole_s);
        if shortened
            && possible
            && measured_s > MUCH_LONGER_THAN_REQUESTED_RATIO * sampling.measurement_s
        {
            set.push(format!("a measurement of about {measured_s:.1} s"));
        }
        if !set.is_empty() {
            settings.entry(id.clone()).or_default().extend(set);
        }
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::record::RunEnvironment;

    #[test]
    fn a_case_with_too_many_launches_is_skipped_and_the_others_stay() {
        let stored = |iterations: &[u64]| CaseInCriterionStore {
            criterion_group_name: "simulated clock".to_owned(),
            iterations_per_sample: iterations.to_vec(),
            sample_times: vec![1e6; iterations.len()],
            samples_file_write_time: None,
        };
        let environment = RunEnvironment::environment_of_process_on_cpu();
        let provenance = CommitAndChanges { commit: None, dirty: false };
        let mut run =
            BenchProcessRun::empty_run_starting_now("ops", "session", environment, provenance);
        for (id, iterations) in [("endless", [u64::MAX, 2]), ("plain", [10, 20])] {
            add_valid_case_or_skip_reason(
                &mut run,
                id,
                case_record_from_criterion(&stored(&iterations), 0.0, None),
            );
        }
        assert_eq!(run.cases.keys().collect::<Vec<_>>(), ["plain"]);
        assert_eq!(
            run.skipped["endless"],
            "its samples cannot be recorded: more launches than can be counted"
        );
    }
}
