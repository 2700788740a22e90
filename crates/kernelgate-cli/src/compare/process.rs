//! One process: started, waited for no longer than is sensible, its run read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::benches::child::{Ended, Running, wait};
use kernelgate::protocol::{self, Action, Request};
use kernelgate::record::{Order, Run, file};

/// Lines of a broken process that are shown.
const SHOWN_LINES: usize = 4;

/// What every trial of a comparison has in common.
pub struct TrialSetup<'a> {
    /// Our flags, as environment variables.
    pub settings: &'a BTreeMap<String, String>,
    /// Criterion's filter.
    pub filter: Option<&'a str>,
    /// Where order, run and messages go.
    pub work: &'a Path,
    /// Who may end it.
    pub running: &'a Running,
}

/// A process to run.
pub struct TrialProcess<'a> {
    /// The executable.
    pub program: PathBuf,
    /// Folder of its package's sources.
    pub package: PathBuf,
    /// Commit of its sources.
    pub commit: String,
    /// Delays added to its launches on purpose.
    pub delays: Option<&'a str>,
    /// Newest version of the protocol that it speaks.
    pub version: u64,
    /// What it is to do.
    pub order: &'a Order,
    /// When to give it up.
    pub patience: Duration,
}

/// Starts a trial that nobody waits for, to be ended by `beside`.
///
/// # Errors
/// A fragment that says why it does not start.
pub fn start_beside(launch: &TrialSetup<'_>, trial: &TrialProcess<'_>, beside: &Running) -> Result<(), String> {
    let mut command = command(launch, trial, "beside.json")?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    beside.start(&mut command).map(drop).map_err(|cause| format!("failed to start: {cause}"))
}

/// The command of a trial, whose order goes into a file of that name.
fn command(launch: &TrialSetup<'_>, trial: &TrialProcess<'_>, order: &str) -> Result<Command, String> {
    let path = launch.work.join(order);
    let response = launch.work.join(format!("response-to-{order}"));
    // Version 1 knew orders only, and takes them under a name of their own.
    let (variable, written) = match trial.version {
        1 => ("KERNELGATE_TRIAL", file::write(&path, trial.order)),
        _ => {
            let _ = std::fs::remove_file(&response);
            (protocol::VARIABLE, file::write(&path, &Request { response, action: Action::Trial(trial.order.clone()) }))
        }
    };
    written.map_err(|error| format!("failed to {error}"))?;
    let _ = std::fs::remove_file(&trial.order.record);
    let mut command = Command::new(&trial.program);
    command.args(["--bench", "--quiet", "--noplot", "--discard-baseline"]);
    if let Some(filter) = launch.filter {
        command.arg("--").arg(filter);
    }
    command.envs(launch.settings).env(variable, &path).env("KERNELGATE_COMMIT", &trial.commit);
    command.env("CARGO_MANIFEST_DIR", &trial.package).env("CARGO_TARGET_DIR", launch.work.join("target"));
    command.env("CRITERION_HOME", launch.work.join("criterion")).env_remove("KERNELGATE_SESSION");
    command.env_remove("KERNELGATE_DELAY").envs(trial.delays.map(|delays| ("KERNELGATE_DELAY", delays)));
    if trial.package.is_dir() {
        command.current_dir(&trial.package);
    }
    Ok(command)
}

/// Runs a trial; its run, or none where it has no case that was asked for.
///
/// # Errors
/// A fragment that says how it broke.
pub fn run(launch: &TrialSetup<'_>, trial: &TrialProcess<'_>) -> Result<Option<Run>, String> {
    let messages = launch.work.join("messages.txt");
    let sink = std::fs::File::create(&messages).map_err(|cause| format!("failed to write {}: {cause}", messages.display()))?;
    let mut command = command(launch, trial, "order.json")?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(sink);
    let ended = wait(&mut command, trial.patience, launch.running).map_err(|cause| format!("failed to start: {cause}"))?;
    let status = match ended {
        Ended::Exited(status) => status,
        Ended::TimedOut => return Err(format!("killed after {} s", trial.patience.as_secs())),
    };
    match file::read::<Run>(&trial.order.record) {
        // A case that fails makes the exit code 1, and is in the run.
        Ok(run) if run.complete && matches!(status.code(), Some(0 | 1)) => Ok(Some(run)),
        Err(error) if error.is_not_found() && status.success() => Ok(None),
        Err(error) if !error.is_not_found() => Err(format!("failed to {error}")),
        _ => {
            let text = std::fs::read_to_string(&messages).unwrap_or_default();
            let lines: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
            let last = lines[lines.len().saturating_sub(SHOWN_LINES)..].join("; ");
            Err(format!("{status}{}{last}", if last.is_empty() { "" } else { ": " }))
        }
    }
}
