//! `kernelgate baseline save`: runs `cargo bench` several times, each time with new processes, and
//! makes a baseline of all the runs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::benches::cargo;
use crate::benches::child_process::{
    ChildProcessEnd, SharedChildProcess, memory_kill_reason_text, run_child_process_to_end,
};
use crate::verbs::correct::numerics;
use crate::verbs::shared::interrupt;
use crate::verbs::shared::sessions;
use kernelgate::exit::ProcessExitReason;
use kernelgate::record::environment::IncomparableEnvironmentField;
use kernelgate::record::store::check_baseline_file_name;
use kernelgate::record::text::{clean_message_for_terminal, path_for_terminal};
use kernelgate::record::{
    BaselineFile, ExclusiveFileLock, MeasurementOfRuns, RecordFoldersOfPackage, SessionOfRuns, file,
};

/// Time after which a run of `cargo bench` is treated as hung.
const CARGO_BENCH_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug, clap::Args)]
pub struct SaveBaselineArguments {
    /// Name of the baseline
    #[arg(id = "name", value_name = "NAME")]
    baseline_name: String,
    /// Number of runs of `cargo bench`; five runs show how much runs differ, one run does not
    #[arg(id = "runs",
        long = "runs",
        value_name = "COUNT",
        default_value_t = 5,
        value_parser = clap::value_parser!(u16).range(1..=100)
    )]
    cargo_bench_run_count: u16,
    /// Arguments of `cargo bench`, for example: -- --bench st_bif -- --quick forward
    #[arg(id = "arguments", last = true, value_name = "CARGO BENCH ARGUMENTS")]
    cargo_bench_arguments: Vec<String>,
}

/// Folders of the finished runs of `cargo bench`, shared with the interrupt handler, which prints
/// them.
type SharedFoldersOfFinishedRuns = Arc<Mutex<Vec<PathBuf>>>;

/// Runs `cargo bench` the requested number of times, and writes the baseline after the last run.
/// After an error or an interrupt, the baseline file is unchanged, and the records of finished runs
/// are kept.
pub fn run_baseline_save_command(
    arguments: &SaveBaselineArguments,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    check_baseline_file_name(&arguments.baseline_name)?;
    check_baselines_before_measuring(store, &arguments.baseline_name)?;
    let finished = SharedFoldersOfFinishedRuns::default();
    let (held, name) = (Arc::clone(&finished), arguments.baseline_name.clone());
    let running = interrupt::print_and_exit_on_interrupt(move || {
        format!(": baseline `{name}` is as it was{}", advice_after_interrupt(&held, &name))
    })?;
    let outcome = measure_sessions_with_cargo_bench(arguments, store, &running, &finished)
        .and_then(|sessions| sessions::without_runs_of_other_packages(sessions, store))
        .and_then(|sessions| write_baseline_from_sessions(arguments, store, sessions));
    match outcome {
        Ok(ProcessExitReason::Success) => Ok(ProcessExitReason::Success),
        Ok(other) => {
            eprintln!(
                "the baseline is as it was{}",
                advice_after_interrupt(&finished, &arguments.baseline_name)
            );
            Ok(other)
        }
        Err(error) => anyhow::bail!(
            "{error:#}: the baseline is as it was{}",
            advice_after_interrupt(&finished, &arguments.baseline_name)
        ),
    }
}

/// Checks, before anything is measured, that existing baselines of that name can be read and
/// replaced.
fn check_baselines_before_measuring(
    store: &RecordFoldersOfPackage,
    name: &str,
) -> anyhow::Result<()> {
    for (.., path) in store.list_baseline_files()?.iter().filter(|(_, there, _)| there == name) {
        file::read_record::<BaselineFile>(path)?;
        file::check_file_is_writable(path)?;
    }
    Ok(file::check_file_is_writable(&store.baselines_folder.join(name))?)
}

/// Advice on how to add the finished runs to the baseline after an interrupt; empty if no run has
/// finished.
fn advice_after_interrupt(finished: &SharedFoldersOfFinishedRuns, name: &str) -> String {
    let folders = finished.lock().unwrap_or_else(PoisonError::into_inner);
    if folders.is_empty() {
        return String::new();
    }
    let sessions: Vec<String> =
        folders.iter().map(|folder| format!(" --session {}", folder.display())).collect();
    format!(
        "; its finished runs are kept, and `kernelgate baseline add {name}{}` adds them",
        sessions.concat()
    )
}

/// Runs `cargo bench` the requested number of times, one run after the other, and reads the
/// recorded session of each run.
fn measure_sessions_with_cargo_bench(
    arguments: &SaveBaselineArguments,
    store: &RecordFoldersOfPackage,
    running: &SharedChildProcess,
    finished: &SharedFoldersOfFinishedRuns,
) -> anyhow::Result<Vec<SessionOfRuns>> {
    let started = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
    let mut sessions: Vec<SessionOfRuns> = Vec::new();
    for number in 1..=arguments.cargo_bench_run_count {
        eprintln!("run {number} of {}", arguments.cargo_bench_run_count);
        let name = format!("{started}-{}-{number}", std::process::id());
        run_cargo_bench_once(store, &name, &arguments.cargo_bench_arguments, running)?;
        let folder = store.runs_folder.join(&name);
        let session = store.read_session_in_folder(&folder)?;
        if let Some(interrupted) = session.runs.iter().find(|run| !run.ended_normally) {
            anyhow::bail!("bench `{}` did not get to its end in run {number}", interrupted.bench);
        }
        finished.lock().unwrap_or_else(PoisonError::into_inner).push(folder);
        if number == 1 {
            // The device, which decides the file of the baseline, is known only after the first
            // run.
            let device = session.runs[0].environment.baseline_folder_of_device_and_count();
            check_baseline_file_is_writable(
                &store.path_of_baseline(&device, &arguments.baseline_name)?,
                &arguments.baseline_name,
            )?;
        }
        sessions.push(session);
    }
    Ok(sessions)
}

fn check_baseline_file_is_writable(path: &Path, name: &str) -> anyhow::Result<()> {
    BaselineFile::read_or_create_empty(path, name)?;
    Ok(file::check_file_is_writable(path)?)
}

/// Writes the baseline: the first session replaces older runs of its cases (unless of the same
/// build), and later sessions are added.
fn write_baseline_from_sessions(
    arguments: &SaveBaselineArguments,
    store: &RecordFoldersOfPackage,
    sessions: Vec<SessionOfRuns>,
) -> anyhow::Result<ProcessExitReason> {
    let of_first_session = sessions.first().map_or(0, |session| session.runs.len());
    let runs = sessions.into_iter().flat_map(|session| session.runs).collect();
    let measurement = match MeasurementOfRuns::from_matching_runs(runs) {
        Ok(measurement) => measurement,
        Err(differing) => {
            println!("refused: {}", clean_message_for_terminal(&differing.to_string()));
            return Ok(ProcessExitReason::ResultsNotComparable);
        }
    };
    let path = store
        .path_of_baseline(&measurement.baseline_folder_of_device(), &arguments.baseline_name)?;
    let _lock = ExclusiveFileLock::acquire_lock_for_file(&path)?;
    let mut baseline = BaselineFile::read_or_create_empty(&path, &arguments.baseline_name)?;
    let (first, others) = measurement.process_runs_of_measurement().split_at(of_first_session);
    for run in first {
        for replaced in
            baseline.runs_that_merge_would_replace(run, run.cases.keys().map(String::as_str))
        {
            eprintln!("replaced {replaced}");
        }
        baseline.merge_run_replacing_other_code(run);
    }
    for run in others {
        let Err(differing) = baseline.add_comparable_run(run) else { continue };
        for IncomparableEnvironmentField {
            field_name: field,
            base_value: base,
            head_value: head,
        } in differing
        {
            println!(
                "refused: {field} is `{base}` in the first run and `{head}` in the run {}",
                run.key_in_baseline()
            );
        }
        return Ok(ProcessExitReason::ResultsNotComparable);
    }
    anyhow::ensure!(!baseline.cases.is_empty(), "no case was measured: there is nothing to save");
    for record in
        store.read_output_errors_of_executables(measurement.process_runs_of_measurement())?
    {
        numerics::print_errors_saved_in_baseline(
            &record,
            baseline.add_output_errors_by_seed(&record),
        );
    }
    file::write_record_atomically(&path, &baseline)?;
    let cases: Vec<usize> = first
        .iter()
        .flat_map(|run| run.cases.keys())
        .filter_map(|id| Some(baseline.cases.get(id)?.runs.len()))
        .collect();
    // The printed number of runs includes older runs of the same build, which the baseline keeps.
    let fewest = cases.iter().min().copied().unwrap_or_default();
    let runs = match cases.iter().max() {
        Some(&most) if most > fewest => format!("{fewest} to {most}"),
        _ => fewest.to_string(),
    };
    let cases = kernelgate::display::counted_noun(cases.len(), "case");
    println!("{cases}, {runs} runs each, in {}", path_for_terminal(&path));
    Ok(ProcessExitReason::Success)
}

/// Runs `cargo bench` once; cargo's output goes to standard error, because
/// standard output holds the result of the verb.
fn run_cargo_bench_once(
    store: &RecordFoldersOfPackage,
    session: &str,
    arguments: &[String],
    running: &SharedChildProcess,
) -> anyhow::Result<()> {
    let cargo = cargo::cargo_program_path();
    let mut command = Command::new(&cargo);
    command
        .arg("bench")
        .args(arguments)
        .current_dir(&store.package_root)
        .env("KERNELGATE_SESSION", session)
        .stdin(Stdio::null());
    command.stdout(std::io::stderr());
    // A relative `CARGO_TARGET_DIR` refers to the folder where kernelgate was called, as in cargo,
    // not to the package's folder.
    if let (Some(target), Ok(here)) =
        (std::env::var_os("CARGO_TARGET_DIR"), std::env::current_dir())
    {
        command.env("CARGO_TARGET_DIR", here.join(target));
    }
    let ended = run_child_process_to_end(&mut command, CARGO_BENCH_TIMEOUT, running)
        .map_err(|error| anyhow::anyhow!("failed to start {}: {error}", cargo.display()))?;
    match ended {
        ChildProcessEnd::Exited(status) if status.success() => Ok(()),
        ChildProcessEnd::Exited(status) => anyhow::bail!("cargo bench ended with {status}"),
        ChildProcessEnd::KilledAboveMemoryBytes(limit) => {
            anyhow::bail!("cargo bench was {}", memory_kill_reason_text(limit))
        }
        ChildProcessEnd::KilledAtTimeout => {
            anyhow::bail!("cargo bench took more than {} s", CARGO_BENCH_TIMEOUT.as_secs())
        }
    }
}
