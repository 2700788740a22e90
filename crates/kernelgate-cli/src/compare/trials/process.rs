//! Starts a process of a trial and waits until it ends or times out. The request and the reading of
//! its result are up to its driver (`driver`).

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::benches::bench_requests::MAX_MESSAGE_BYTES;
use crate::benches::child_process::{ChildProcess, ProcessEnd, memory_kill_reason};
use crate::benches::process_output::{
    CapturedText, FailureLines, KeptOutput, drain_on_thread, wait_for_captured_text,
};
use crate::compare::SideInjection;
use crate::compare::progress::ComparisonProgress;
use crate::compare::sides::copy_benches::BenchDriver;
use kernelgate::record::text::{printable_on_terminal, start_of_quotation};
use kernelgate::record::{Environment, TrialRequest};

/// Settings that all trials of a comparison share.
pub struct TrialSetup<'a> {
    /// Settings of the bench executables, as environment variables.
    pub settings: &'a BTreeMap<String, String>,
    /// Criterion's filter.
    pub filter: Option<&'a str>,
    /// Folder for the request, the run record and the messages of a trial.
    pub work: &'a Path,
    /// Handle by which an interrupt ends the process.
    pub running: &'a ChildProcess,
    /// Description of the host.
    pub environment: &'a Environment,
    /// Output for messages about processes that reach a limit of time or memory.
    pub progress: &'a ComparisonProgress,
}

/// A process to run.
#[derive(Clone)]
pub struct TrialProcess<'a> {
    /// The executable.
    pub program: PathBuf,
    /// Hash of the executable's content.
    pub hash: &'a str,
    /// Folder with the sources of the executable's package.
    pub package: PathBuf,
    /// Commit of the sources.
    pub commit: String,
    /// Changes that are made to the process on purpose.
    pub injection: SideInjection,
    /// How the process gets its request.
    pub driver: BenchDriver,
    pub request: &'a TrialRequest,
    pub timeout: Duration,
}

impl TrialProcess<'_> {
    /// Name of the bench, which is the name of its executable.
    pub fn bench(&self) -> &str {
        self.program.file_name().and_then(OsStr::to_str).unwrap_or_default()
    }
}

/// Makes a command that runs an executable in the folder of its package, as cargo does.
pub fn command_in_package(program: &Path, package: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("CARGO_MANIFEST_DIR", package);
    if package.is_dir() {
        command.current_dir(package);
    }
    command
}

/// How a process ended, and the part of its output that is kept.
pub struct FinishedProcess {
    pub status: ExitStatus,
    /// Standard output of the process, if it is piped.
    pub printed: CapturedText,
    /// The last part of the process's standard error.
    stderr: Vec<u8>,
}

impl FinishedProcess {
    /// Returns the last part of the process's standard error as text.
    pub fn messages(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    /// The failure in words: the exit status and the message of the panic, or the last lines.
    pub fn process_failure(&self) -> String {
        let mut lines = FailureLines::default();
        self.messages().lines().for_each(|line| lines.push(line));
        let lines: Vec<_> =
            lines.into_lines().iter().map(|it| start_of_quotation(it).into_owned()).collect();
        let text = lines.join("; ");
        format!(
            "{}{}{}",
            self.status,
            if lines.is_empty() { "" } else { ": " },
            printable_on_terminal(&text)
        )
    }
}

/// Runs a command to its end, or until its timeout. All of the command's output is read but only a
/// part is kept, so that a large output takes neither memory nor disk.
pub fn run_to_end(
    setup: &TrialSetup<'_>,
    command: &mut Command,
    timeout: Duration,
) -> Result<FinishedProcess, String> {
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    let (stdout, stderr) = setup
        .running
        .start_process(command)
        .map_err(|cause| format!("failed to start: {cause}"))?;
    let (printed, stderr) = (
        stdout.map(|it| drain_on_thread(it, KeptOutput::Start)),
        stderr.map(|it| drain_on_thread(it, KeptOutput::End)),
    );
    let ended =
        setup.running.wait_for_end(timeout).map_err(|cause| format!("was lost: {cause}"))?;
    let (printed, stderr) = (wait_for_captured_text(printed), wait_for_captured_text(stderr));
    if stderr.bytes > MAX_MESSAGE_BYTES {
        let bench = Path::new(command.get_program()).file_name().unwrap_or_default();
        setup.progress.print_once(&format!(
            "bench `{}` prints more than {MAX_MESSAGE_BYTES} bytes in a process: only the end is \
             kept, here and where it does so again",
            bench.display(),
        ));
    }
    let stderr = stderr.kept;
    match ended {
        ProcessEnd::Exited(status) => Ok(FinishedProcess { status, printed, stderr }),
        ProcessEnd::TimedOut => Err(format!(
            "treated as hung: killed after {} s (--wait sets this)",
            timeout.as_secs_f64().round()
        )),
        ProcessEnd::OverMemory(limit) => Err(memory_kill_reason(limit)),
    }
}
