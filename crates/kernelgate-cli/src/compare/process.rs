//! One process: started, and waited for no longer than is sensible. What it is told to do, and what
//! is read of it, is up to its driver (`driver`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use super::install::Driver;
use crate::benches::child::{Ended, Running, wait};
use kernelgate::record::text::printable;
use kernelgate::record::{Environment, TrialRequest};

/// Lines of a failed process that are shown.
const SHOWN_LINES: usize = 4;
/// Bytes at the end of what a failed process said in which they are looked for.
const SHOWN_BYTES: u64 = 1 << 16;

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
    /// What benches run in that do not tell it themselves.
    pub environment: &'a Environment,
}

/// A process to run.
#[derive(Clone)]
pub struct TrialProcess<'a> {
    /// The executable.
    pub program: PathBuf,
    /// Its content hash.
    pub hash: &'a str,
    /// Folder of its package's sources.
    pub package: PathBuf,
    /// Commit of its sources.
    pub commit: String,
    /// Nanoseconds by case that are added on purpose.
    pub delays_ns: BTreeMap<String, f64>,
    /// How it is told what to do.
    pub driver: Driver,
    /// What it is to do.
    pub request: &'a TrialRequest,
    /// Timeout of the process.
    pub timeout: Duration,
}

/// A command that runs an executable where cargo would.
pub fn of_package(program: &Path, package: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("CARGO_MANIFEST_DIR", package);
    if package.is_dir() {
        command.current_dir(package);
    }
    command
}

/// Runs a command to its end; what it says on standard error goes to a file, for [`failure`].
///
/// # Errors
/// A fragment: it does not start, or does not end.
pub fn finish(
    setup: &TrialSetup<'_>,
    command: &mut Command,
    timeout: Duration,
) -> Result<ExitStatus, String> {
    let messages = messages(setup);
    let sink = std::fs::File::create(&messages)
        .map_err(|cause| format!("failed to write {}: {cause}", messages.display()))?;
    command.stdin(Stdio::null()).stderr(sink);
    let ended = wait(command, timeout, setup.running)
        .map_err(|cause| format!("failed to start: {cause}"))?;
    match ended {
        Ended::Exited(status) => Ok(status),
        Ended::TimedOut => Err(format!(
            "treated as hung: killed after {} s (--wait sets this)",
            timeout.as_secs_f64().round()
        )),
    }
}

/// How a process failed that [`finish`] ran: its status and what it said last.
pub fn failure(setup: &TrialSetup<'_>, status: ExitStatus) -> String {
    let last = last_lines(&messages(setup)).unwrap_or_default();
    format!("{status}{}{last}", if last.is_empty() { "" } else { ": " })
}

fn messages(setup: &TrialSetup<'_>) -> PathBuf {
    setup.work.join("messages.txt")
}

fn last_lines(path: &Path) -> std::io::Result<String> {
    use std::io::{Read as _, Seek as _, SeekFrom};
    let mut file = std::fs::File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(SHOWN_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(SHOWN_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    Ok(printable(&lines[lines.len().saturating_sub(SHOWN_LINES)..].join("; ")).into_owned())
}
