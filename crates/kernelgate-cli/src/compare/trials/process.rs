//! One process: started, and waited for no longer than is sensible. What it is told to do, and what
//! is read of it, is up to its driver (`driver`).

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::benches::ask::MAX_SAID_BYTES;
use crate::benches::child::{Ended, Running, over_memory};
use crate::benches::output::{Captured, FailureLines, Kept, captured, drain};
use crate::compare::Planted;
use crate::compare::progress::ComparisonProgress;
use crate::compare::sides::install::Driver;
use kernelgate::record::text::{printable, quoted};
use kernelgate::record::{Environment, TrialRequest};

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
    /// The host, as this program sees it.
    pub environment: &'a Environment,
    /// Where limits are said that are reached.
    pub progress: &'a ComparisonProgress,
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
    /// What is done to it on purpose.
    pub planted: Planted,
    /// How it is told what to do.
    pub driver: Driver,
    /// What it is to do.
    pub request: &'a TrialRequest,
    /// Timeout of the process.
    pub timeout: Duration,
}

impl TrialProcess<'_> {
    /// Name of the bench: that of its executable.
    pub fn bench(&self) -> &str {
        self.program.file_name().and_then(OsStr::to_str).unwrap_or_default()
    }
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

/// How a process ended, and what is kept of what it said.
pub struct Finished {
    /// How it ended.
    pub status: ExitStatus,
    /// What it printed, where its output is piped.
    pub printed: Captured,
    /// The end of what it said on standard error.
    said: Vec<u8>,
}

impl Finished {
    /// The end of its standard error.
    pub fn messages(&self) -> String {
        String::from_utf8_lossy(&self.said).into_owned()
    }

    /// How it failed: its status and the message of its panic, or its last lines.
    pub fn failure(&self) -> String {
        let mut lines = FailureLines::default();
        self.messages().lines().for_each(|line| lines.push(line));
        let lines: Vec<_> = lines.into_lines().iter().map(|it| quoted(it).into_owned()).collect();
        let text = lines.join("; ");
        format!("{}{}{}", self.status, if lines.is_empty() { "" } else { ": " }, printable(&text))
    }
}

/// Runs a command to its end. What it says is read to its end too, and a part of it is kept:
/// however much it is, it takes neither memory nor disk.
pub fn finish(
    setup: &TrialSetup<'_>,
    command: &mut Command,
    timeout: Duration,
) -> Result<Finished, String> {
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    let (stdout, stderr) =
        setup.running.start(command).map_err(|cause| format!("failed to start: {cause}"))?;
    let (printed, said) =
        (stdout.map(|it| drain(it, Kept::Start)), stderr.map(|it| drain(it, Kept::End)));
    let ended = setup.running.finish(timeout).map_err(|cause| format!("was lost: {cause}"))?;
    let (printed, said) = (captured(printed), captured(said));
    if said.bytes > MAX_SAID_BYTES {
        let bench = Path::new(command.get_program()).file_name().unwrap_or_default();
        setup.progress.say_once(&format!(
            "bench `{}` says more than {MAX_SAID_BYTES} bytes in a process: all but the end is \
             left out, here and where it does so again",
            bench.display(),
        ));
    }
    let said = said.kept;
    match ended {
        Ended::Exited(status) => Ok(Finished { status, printed, said }),
        Ended::TimedOut => Err(format!(
            "treated as hung: killed after {} s (--wait sets this)",
            timeout.as_secs_f64().round()
        )),
        Ended::OverMemory(limit) => Err(over_memory(limit)),
    }
}
