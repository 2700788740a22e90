//! Runs benches that use Criterion alone: flags drive their processes, and times are read from
//! Criterion's store.
//!
//! Each process of such a bench gets its own folder for results. Nothing verifies what such a bench
//! computes, no delay can be made in it, and how long it takes is in the end up to its source:
//! groups may set their own sample size and times, which flags do not override. Deliberately
//! absent: Criterion's flags and files are in another module (`benches::criterion`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::by_protocol::cannot_remove_record;
use super::process::{TrialProcess, TrialSetup, command_in_package, run_to_end};
use crate::benches::criterion::{self, CRITERION_SAMPLES, LIST_ARGUMENTS, ListedCriterionIds};
use crate::benches::process_output;
use crate::compare::sides::leftover_files;
use kernelgate::gpu_time;
use kernelgate::harness::filter::CaseFilter;
use kernelgate::measure::SampleConditions;
use kernelgate::measure::contention::CpuTimeTicks;
use kernelgate::record::criterion_store::{
    self as store, StoredCriterionCase, title_without_repeat_suffix,
};
use kernelgate::record::text::{check_plain_text, on_one_line, printable_on_terminal};
use kernelgate::record::{CaseRecord, CaseSamples, ProcessRun, Provenance, TrialSampling, file};

/// Exit code of a Rust program that panicked.
const PANIC_EXIT_CODE: i32 = 101;
/// Name of the wall time of a whole process in [`ProcessRun::spent_s`], as benches of this harness
/// record it.
const WHOLE_PROCESS_TIME: &str = "whole";

/// The reason why a bench has no list of cases.
#[derive(Debug, PartialEq, Eq)]
pub enum CaseListFailure {
    /// Criterion's flags do not drive the bench, with the reason.
    Undrivable(String),
    /// Error: the bench hung or failed, with the reason.
    Broken(String),
}

/// Lists the cases of a bench executable.
pub fn list_criterion_cases(
    setup: &TrialSetup<'_>,
    (program, package): (&Path, &Path),
    timeout: Duration,
) -> Result<ListedCriterionIds, CaseListFailure> {
    let store = fresh_criterion_folder(setup, "criterion-list").map_err(CaseListFailure::Broken)?;
    let mut command = command_in_package(program, package);
    criterion::with_criterion_folder(&mut command, &store)
        .args(LIST_ARGUMENTS)
        .stdout(Stdio::piped());
    let ended = run_to_end(setup, &mut command, timeout);
    if !store::is_empty(&store) {
        let why = "it ignores Criterion's flags: asked to list its cases it measured them";
        return Err(CaseListFailure::Undrivable(why.to_owned()));
    }
    let prefix = "asked to list its cases it";
    let ended = match ended {
        Ok(ended) => ended,
        Err(why) => return Err(CaseListFailure::Broken(format!("{prefix} was {why}"))),
    };
    if !ended.status.success() {
        let how = format!("{prefix} ended with {}", ended.process_failure());
        // A `main` that does not know the flag ends with an exit code; one that panics or is killed
        // may have listed its cases before.
        return Err(match ended.status.code() {
            Some(code) if code != PANIC_EXIT_CODE => CaseListFailure::Undrivable(how),
            _ => CaseListFailure::Broken(how),
        });
    }
    if ended.printed.cut {
        let why = format!(
            "{prefix} printed more than {} bytes, the limit",
            process_output::KEPT_START_BYTES
        );
        return Err(CaseListFailure::Undrivable(why));
    }
    let text = String::from_utf8_lossy(&ended.printed.kept);
    let listed = criterion::parse_criterion_list(&text).map_err(CaseListFailure::Undrivable)?;
    if listed == ListedCriterionIds::default() {
        let why = "asked to list its cases it listed none, as a main that ignores Criterion's \
                   flags would";
        return Err(CaseListFailure::Undrivable(why.to_owned()));
    }
    Ok(listed)
}

/// The command that measures the cases of a trial, with a store of that name.
pub fn measuring_command(
    setup: &TrialSetup<'_>,
    trial: &TrialProcess<'_>,
    store: &str,
) -> Result<Command, String> {
    let store = fresh_criterion_folder(setup, store)?;
    let filter = match &trial.request.cases {
        Some(cases) => criterion::regex_for_cases(cases),
        None => setup.filter.map(str::to_owned),
    };
    let mut command = command_in_package(&trial.program, &trial.package);
    criterion::with_criterion_folder(&mut command, &store)
        .args(criterion::measuring_arguments(filter.as_deref(), &trial.request.sampling))
        .env(gpu_time::RECORD_VARIABLE, &trial.request.record)
        .stdout(Stdio::null());
    leftover_files::remove_path(&trial.request.record).map_err(cannot_remove_record)?;
    Ok(command)
}

/// Reads the run record that a Criterion bench wrote itself, if it measures the time of a GPU
/// stream.
fn read_own_record(trial: &TrialProcess<'_>) -> Result<Option<ProcessRun>, String> {
    match file::read(&trial.request.record) {
        Ok(run) => Ok(Some(run)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// Measures the cases of a trial with Criterion. A case without a time in the store is skipped,
/// with the reason.
pub fn measure_criterion_trial(
    setup: &TrialSetup<'_>,
    trial: &TrialProcess<'_>,
) -> Result<ProcessRun, String> {
    measure_listed_cases(setup, trial, &ListedCriterionIds::default())
}

/// Measures as [`measure_criterion_trial`] does; a listed case that the trial's filter matches
/// counts as requested.
pub fn measure_listed_cases(
    setup: &TrialSetup<'_>,
    trial: &TrialProcess<'_>,
    listed: &ListedCriterionIds,
) -> Result<ProcessRun, String> {
    const CRITERION_STORE_FOLDER: &str = "criterion-trial";
    let mut command = measuring_command(setup, trial, CRITERION_STORE_FOLDER)?;
    let (before, started) = (CpuTimeTicks::for_children(), Instant::now());
    let ended = run_to_end(setup, &mut command, trial.timeout)?;
    let wall_s = started.elapsed().as_secs_f64();
    let after = CpuTimeTicks::for_children();
    if !ended.status.success() {
        let messages = ended.messages();
        let case = criterion::case_that_ran(&messages).map(|case| format!("measuring `{case}`, "));
        return Err(format!(
            "{}{}",
            printable_on_terminal(&case.unwrap_or_default()),
            ended.process_failure()
        ));
    }
    let contention =
        before.zip(after).and_then(|(before, after)| after.taken_by_others_since(&before));
    let stored =
        store::read(&setup.work.join(CRITERION_STORE_FOLDER)).map_err(|why| why.to_string())?;
    let bench = trial.program.file_name().unwrap_or_default().to_string_lossy();
    let provenance = Provenance {
        commit: Some(trial.commit.trim_end_matches("+changes").to_owned()),
        dirty: trial.commit.ends_with("+changes"),
    };
    let own = read_own_record(trial)?;
    let environment = own.as_ref().map_or(setup.environment, |own| &own.environment);
    let mut run = ProcessRun {
        complete: true,
        executable: Some(trial.hash.to_owned()),
        spent_s: [(WHOLE_PROCESS_TIME.to_owned(), wall_s)].into(),
        telemetry: own.as_ref().map(|own| own.telemetry.clone()).unwrap_or_default(),
        ..ProcessRun::start_now(&bench, &trial.request.session, environment.clone(), provenance)
    };
    let filter = CaseFilter::parse(setup.filter, false).map_err(|error| error.to_string())?;
    let matches =
        |title: &&String| filter.matches_id(title_without_repeat_suffix(title).unwrap_or(title));
    let is_requested =
        |id: &String| trial.request.cases.as_ref().is_none_or(|cases| cases.contains(id));
    let mut skip = |id: &str, why: &str| run.skipped.insert(on_one_line(id), on_one_line(why));
    for (id, why) in stored.unusable.iter().filter(|(id, _)| is_requested(id)) {
        skip(id, why);
    }
    let absent = listed.titles.iter().filter(matches).filter(|it| !stored.titles.contains(*it));
    let requested = trial.request.cases.iter().flatten();
    let requested = requested
        .filter(|id| !stored.cases.contains_key(*id) && !stored.unusable.contains_key(*id));
    for id in absent.chain(requested) {
        skip(id, "it left no samples in Criterion's store (CRITERION_HOME)");
    }
    let mut records = BTreeMap::new();
    for (id, case) in stored.cases.iter().filter(|(id, _)| is_requested(id)) {
        if listed.duplicates.contains(id) {
            skip(id, "more than one case of its bench has this id");
        } else if let Err(why) = check_plain_text(id) {
            skip(id, &why);
        } else {
            let added_ns = trial.injection.delays_ns.get(id).copied().unwrap_or(0.0);
            let mut record = criterion_record(case, added_ns, contention);
            let of_gpu = own.as_ref().and_then(|own| own.cases.get(id));
            record.samples.conditions.host_bound =
                of_gpu.is_some_and(|of_gpu| of_gpu.samples.conditions.host_bound);
            records.insert(id, record);
        }
    }
    for (id, record) in records {
        add_case_or_reason(&mut run, id, record);
    }
    Ok(run)
}

/// Adds a case to a run; one that no run may hold is skipped with the reason, and the other cases
/// of its bench keep their times.
fn add_case_or_reason(run: &mut ProcessRun, id: &str, record: CaseRecord) {
    match record.validate() {
        Ok(()) => drop(run.cases.insert(id.to_owned(), record)),
        Err(why) => {
            let why = format!("its samples cannot be recorded: {why}");
            run.skipped.insert(on_one_line(id), on_one_line(&why));
        }
    }
}

fn criterion_record(
    case: &StoredCriterionCase,
    added_ns: f64,
    contention: Option<f64>,
) -> CaseRecord {
    let pairs = case.times.iter().zip(&case.iterations);
    let elapsed_ns = pairs.map(|(time, iterations)| time + added_ns * *iterations as f64);
    case.record(CaseSamples {
        elapsed_ns: elapsed_ns.collect(),
        launches: case.iterations.clone(),
        conditions: SampleConditions { contention, ..SampleConditions::default() },
        ..CaseSamples::default()
    })
}

fn fresh_criterion_folder(setup: &TrialSetup<'_>, name: &str) -> Result<PathBuf, String> {
    let store = setup.work.join(name);
    leftover_files::remove_path(&store)
        .and_then(|()| std::fs::create_dir_all(&store))
        .map_err(|cause| format!("failed to make {}: {cause}", store.display()))?;
    Ok(store)
}

/// Cases whose source overrides the sampling that the flags set, each with the settings of the
/// source: more samples, or samples that together take much longer than requested although shorter
/// ones would have been possible.
pub fn overridden_sampling(
    run: &ProcessRun,
    sampling: &TrialSampling,
) -> BTreeMap<String, Vec<String>> {
    /// Smallest ratio of measured to requested time that counts as much longer. Criterion plans
    /// with its time from the warm-up, which may be a guess.
    const MUCH_LONGER_RATIO: f64 = 3.0;
    let mut settings: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (id, case) in &run.cases {
        let samples = &case.samples;
        let count = samples.launches.len();
        let measured_s = 1e-9 * samples.elapsed_ns.iter().sum::<f64>();
        let shortened = samples.launches.iter().min().is_some_and(|least| *least > 1);
        let mut set = Vec::new();
        if count != CRITERION_SAMPLES {
            set.push(format!("{count} samples"));
        }
        let possible =
            run.spent_s.get(WHOLE_PROCESS_TIME).is_some_and(|whole_s| measured_s <= *whole_s);
        if shortened && possible && measured_s > MUCH_LONGER_RATIO * sampling.measurement_s {
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
    use kernelgate::record::Environment;

    #[test]
    fn a_case_with_too_many_launches_is_skipped_and_the_others_stay() {
        let stored = |iterations: &[u64]| StoredCriterionCase {
            group: "simulated clock".to_owned(),
            iterations: iterations.to_vec(),
            times: vec![1e6; iterations.len()],
            written: None,
        };
        let environment = Environment::cpu();
        let provenance = Provenance { commit: None, dirty: false };
        let mut run = ProcessRun::start_now("ops", "session", environment, provenance);
        for (id, iterations) in [("endless", [u64::MAX, 2]), ("plain", [10, 20])] {
            add_case_or_reason(&mut run, id, criterion_record(&stored(&iterations), 0.0, None));
        }
        assert_eq!(run.cases.keys().collect::<Vec<_>>(), ["plain"]);
        assert_eq!(
            run.skipped["endless"],
            "its samples cannot be recorded: more launches than can be counted"
        );
    }
}
