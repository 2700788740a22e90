//! `kernelgate baseline save`: makes a baseline of several runs of `cargo bench`, each with new
//! processes.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::benches::cargo;
use crate::benches::child_process::{ChildProcess, ProcessEnd, memory_kill_reason, start_and_wait};
use crate::verbs::correct::numerics;
use crate::verbs::shared::interrupt;
use crate::verbs::shared::sessions;
use kernelgate::exit::ExitReason;
use kernelgate::record::environment::EnvironmentMismatch;
use kernelgate::record::store::check_path_component;
use kernelgate::record::text::{printable_on_terminal, printable_path};
use kernelgate::record::{Baseline, BaselineStore, FileLock, Measurement, Session, file};

/// Time after which a `cargo bench` is treated as hung.
const SAVE_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug, clap::Args)]
pub struct SaveArguments {
    /// Name of the baseline
    name: String,
    /// Number of runs of the benches; five show how runs differ, one does not
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 5,
        value_parser = clap::value_parser!(u16).range(1..=100)
    )]
    runs: u16,
    /// Arguments of `cargo bench`, for example: -- --bench st_bif -- --quick forward
    #[arg(last = true, value_name = "CARGO BENCH ARGUMENTS")]
    arguments: Vec<String>,
}

/// Folders of the finished runs, kept for the advice after an interrupt.
type FinishedRunFolders = Arc<Mutex<Vec<PathBuf>>>;

/// Runs the benches and writes the baseline at the end. After an error or an interrupt the baseline
/// is unchanged, and the finished runs are kept.
pub fn run(arguments: &SaveArguments, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    check_path_component(&arguments.name)?;
    check_baselines_writable(store, &arguments.name)?;
    let finished = FinishedRunFolders::default();
    let (held, name) = (Arc::clone(&finished), arguments.name.clone());
    let running = interrupt::watch_interrupts_printing(move || {
        format!(": baseline `{name}` is as it was{}", advice_on_finished_runs(&held, &name))
    })?;
    let outcome = measure_sessions(arguments, store, &running, &finished)
        .and_then(|sessions| sessions::without_other_packages(sessions, store))
        .and_then(|sessions| write_baseline(arguments, store, sessions));
    match outcome {
        Ok(ExitReason::Fine) => Ok(ExitReason::Fine),
        Ok(other) => {
            eprintln!(
                "the baseline is as it was{}",
                advice_on_finished_runs(&finished, &arguments.name)
            );
            Ok(other)
        }
        Err(error) => anyhow::bail!(
            "{error:#}: the baseline is as it was{}",
            advice_on_finished_runs(&finished, &arguments.name)
        ),
    }
}

/// Checks before anything is measured that baselines of that name can be read, and their folder
/// written.
fn check_baselines_writable(store: &BaselineStore, name: &str) -> anyhow::Result<()> {
    for (.., path) in store.baseline_files()?.iter().filter(|(_, there, _)| there == name) {
        file::read::<Baseline>(path)?;
        file::check_writable(path)?;
    }
    Ok(file::check_writable(&store.baselines.join(name))?)
}

/// Text on how to use the finished runs; empty if no run was finished.
fn advice_on_finished_runs(finished: &FinishedRunFolders, name: &str) -> String {
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

/// Measures the requested number of sessions, one after the other.
fn measure_sessions(
    arguments: &SaveArguments,
    store: &BaselineStore,
    running: &ChildProcess,
    finished: &FinishedRunFolders,
) -> anyhow::Result<Vec<Session>> {
    let started = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
    let mut sessions: Vec<Session> = Vec::new();
    for number in 1..=arguments.runs {
        eprintln!("run {number} of {}", arguments.runs);
        let name = format!("{started}-{}-{number}", std::process::id());
        run_cargo_bench(store, &name, &arguments.arguments, running)?;
        let folder = store.runs.join(&name);
        let session = store.open_session(&folder)?;
        if let Some(interrupted) = session.runs.iter().find(|run| !run.complete) {
            anyhow::bail!("bench `{}` did not get to its end in run {number}", interrupted.bench);
        }
        finished.lock().unwrap_or_else(PoisonError::into_inner).push(folder);
        if number == 1 {
            // The device is known only after a run.
            let device = session.runs[0].environment.baseline_folder_name();
            check_baseline_writable(
                &store.baseline_path(&device, &arguments.name)?,
                &arguments.name,
            )?;
        }
        sessions.push(session);
    }
    Ok(sessions)
}

fn check_baseline_writable(path: &Path, name: &str) -> anyhow::Result<()> {
    Baseline::open_or_empty(path, name)?;
    Ok(file::check_writable(path)?)
}

/// Makes the baseline from the sessions: the first session replaces other runs of its cases, later
/// sessions add to it.
fn write_baseline(
    arguments: &SaveArguments,
    store: &BaselineStore,
    sessions: Vec<Session>,
) -> anyhow::Result<ExitReason> {
    let of_first_session = sessions.first().map_or(0, |session| session.runs.len());
    let runs = sessions.into_iter().flat_map(|session| session.runs).collect();
    let measurement = match Measurement::from_runs(runs) {
        Ok(measurement) => measurement,
        Err(differing) => {
            println!("refused: {}", printable_on_terminal(&differing.to_string()));
            return Ok(ExitReason::Refused);
        }
    };
    let path = store.baseline_path(&measurement.device_folder(), &arguments.name)?;
    let _lock = FileLock::acquire_for_file(&path)?;
    let mut baseline = Baseline::open_or_empty(&path, &arguments.name)?;
    let (first, others) = measurement.process_runs().split_at(of_first_session);
    for run in first {
        for replaced in baseline.runs_replaced_by(run, run.cases.keys().map(String::as_str)) {
            eprintln!("replaced {replaced}");
        }
        baseline.merge_run(run);
    }
    for run in others {
        let Err(differing) = baseline.add(run) else { continue };
        for EnvironmentMismatch { field, base, head } in differing {
            println!(
                "refused: {field} is `{base}` in the first run and `{head}` in the run {}",
                run.baseline_key()
            );
        }
        return Ok(ExitReason::Refused);
    }
    anyhow::ensure!(!baseline.cases.is_empty(), "no case was measured: there is nothing to save");
    for record in store.numerics(measurement.process_runs())? {
        numerics::print_saved_errors(&record, baseline.add_seed_errors(&record));
    }
    file::write(&path, &baseline)?;
    let cases: Vec<usize> = first
        .iter()
        .flat_map(|run| run.cases.keys())
        .filter_map(|id| Some(baseline.cases.get(id)?.runs.len()))
        .collect();
    // Runs of the same build that the baseline already has count as well.
    let fewest = cases.iter().min().copied().unwrap_or_default();
    let runs = match cases.iter().max() {
        Some(&most) if most > fewest => format!("{fewest} to {most}"),
        _ => fewest.to_string(),
    };
    let cases = kernelgate::display::counted_noun(cases.len(), "case");
    println!("{cases}, {runs} runs each, in {}", printable_path(&path));
    Ok(ExitReason::Fine)
}

/// Runs `cargo bench` once. Cargo's output goes to standard error, because standard output holds
/// the verb's result.
fn run_cargo_bench(
    store: &BaselineStore,
    session: &str,
    arguments: &[String],
    running: &ChildProcess,
) -> anyhow::Result<()> {
    let cargo = cargo::cargo_program();
    let mut command = Command::new(&cargo);
    command
        .arg("bench")
        .args(arguments)
        .current_dir(&store.root)
        .env("KERNELGATE_SESSION", session)
        .stdin(Stdio::null());
    command.stdout(std::io::stderr());
    // Relative to where the program was called, as for cargo, and not to the package.
    if let (Some(target), Ok(here)) =
        (std::env::var_os("CARGO_TARGET_DIR"), std::env::current_dir())
    {
        command.env("CARGO_TARGET_DIR", here.join(target));
    }
    let ended = start_and_wait(&mut command, SAVE_TIMEOUT, running)
        .map_err(|error| anyhow::anyhow!("failed to start {}: {error}", cargo.display()))?;
    match ended {
        ProcessEnd::Exited(status) if status.success() => Ok(()),
        ProcessEnd::Exited(status) => anyhow::bail!("cargo bench ended with {status}"),
        ProcessEnd::OverMemory(limit) => {
            anyhow::bail!("cargo bench was {}", memory_kill_reason(limit))
        }
        ProcessEnd::TimedOut => {
            anyhow::bail!("cargo bench took more than {} s", SAVE_TIMEOUT.as_secs())
        }
    }
}
