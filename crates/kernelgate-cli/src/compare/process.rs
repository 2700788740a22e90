//! One process: started, waited for no longer than is sensible, its run read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::benches::child::{Ended, Running, wait};
use kernelgate::protocol::{self, Action, Request};
use kernelgate::record::{Run, TrialRequest, file};

/// Lines of a failed process that are shown.
const SHOWN_LINES: usize = 4;

/// What every trial of a comparison has in common.
pub struct TrialSetup<'a> {
    /// Our flags, as environment variables.
    pub settings: &'a BTreeMap<String, String>,
    /// Criterion's filter.
    pub filter: Option<&'a str>,
    /// Where request, run and messages go.
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
    pub request: &'a TrialRequest,
    /// Timeout of the process.
    pub timeout: Duration,
}

/// Starts a trial that is not waited for, to be ended through `co_running`.
///
/// # Errors
/// A fragment that says why it does not start.
pub fn start_co_running(
    setup: &TrialSetup<'_>,
    trial: &TrialProcess<'_>,
    co_running: &Running,
) -> Result<(), String> {
    let mut command = command(setup, trial, "beside.json")?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    co_running.start(&mut command).map(drop).map_err(|cause| format!("failed to start: {cause}"))
}

/// The command of a trial, whose request goes into a file of that name.
fn command(
    setup: &TrialSetup<'_>,
    trial: &TrialProcess<'_>,
    name: &str,
) -> Result<Command, String> {
    let path = setup.work.join(name);
    let response = setup.work.join(format!("response-to-{name}"));
    // Version 1 knew trial requests only, and takes them under a name of their own.
    let (variable, written) = match trial.version {
        1 => ("KERNELGATE_TRIAL", file::write(&path, trial.request)),
        _ => {
            let _ = std::fs::remove_file(&response);
            (
                protocol::VARIABLE,
                file::write(
                    &path,
                    &Request { response, action: Action::Trial(trial.request.clone()) },
                ),
            )
        }
    };
    written.map_err(|error| format!("failed to {error}"))?;
    let _ = std::fs::remove_file(&trial.request.record);
    let mut command = Command::new(&trial.program);
    command.args(["--bench", "--quiet", "--noplot", "--discard-baseline"]);
    if let Some(filter) = setup.filter {
        command.arg("--").arg(filter);
    }
    command.envs(setup.settings).env(variable, &path).env("KERNELGATE_COMMIT", &trial.commit);
    command
        .env("CARGO_MANIFEST_DIR", &trial.package)
        .env("CARGO_TARGET_DIR", setup.work.join("target"));
    command.env("CRITERION_HOME", setup.work.join("criterion")).env_remove("KERNELGATE_SESSION");
    command
        .env_remove("KERNELGATE_DELAY")
        .envs(trial.delays.map(|delays| ("KERNELGATE_DELAY", delays)));
    if trial.package.is_dir() {
        command.current_dir(&trial.package);
    }
    Ok(command)
}

/// Runs a trial; its run, or none where it has no case that was asked for.
///
/// # Errors
/// A fragment that says how it failed.
pub fn run(setup: &TrialSetup<'_>, trial: &TrialProcess<'_>) -> Result<Option<Run>, String> {
    let messages = setup.work.join("messages.txt");
    let sink = std::fs::File::create(&messages)
        .map_err(|cause| format!("failed to write {}: {cause}", messages.display()))?;
    let mut command = command(setup, trial, "order.json")?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(sink);
    let ended = wait(&mut command, trial.timeout, setup.running)
        .map_err(|cause| format!("failed to start: {cause}"))?;
    let status = match ended {
        Ended::Exited(status) => status,
        Ended::TimedOut => return Err(format!("killed after {} s", trial.timeout.as_secs())),
    };
    match file::read::<Run>(&trial.request.record) {
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
