//! Starts one bench process of a comparison, and waits until it ends or kernelgate kills it at its
//! timeout or memory limit. The modules `by_protocol` and `by_criterion` write the request of a
//! bench process and read its result.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::benches::bench_requests::MAX_PRINTED_STDERR_BYTES;
use crate::benches::child_process::{ChildProcessEnd, SharedChildProcess, memory_kill_reason_text};
use crate::benches::process_output::{
    CapturedOutput, FailureLineCollector, KeptPartOfOutput, capture_stream_on_thread,
    wait_for_captured_output,
};
use crate::compare::InjectedHeadChanges;
use crate::compare::progress::ComparisonProgressDisplay;
use crate::compare::sides::copy_benches::BenchControlMethod;
use kernelgate::record::text::{clean_message_for_terminal, shortened_quotation};
use kernelgate::record::{RunEnvironment, TrialRequestToBench};

/// Settings that all bench processes (trials) of a comparison share.
pub struct SharedTrialSettings<'a> {
    /// Environment variables that kernelgate sets for the bench executables.
    pub bench_variables: &'a BTreeMap<String, String>,
    /// Criterion's filter.
    pub criterion_filter: Option<&'a str>,
    /// Folder for the request, the run record and Criterion's results of a trial.
    pub trial_files_folder: &'a Path,
    /// Handle of the bench process, which Ctrl-C kills.
    pub running_child: &'a SharedChildProcess,
    /// Environment of the host, against which the record's environment is checked.
    pub environment: &'a RunEnvironment,
    /// Progress display, for messages about processes that print too much.
    pub progress: &'a ComparisonProgressDisplay,
}

/// A bench process that is to be run as one trial.
#[derive(Clone)]
pub struct TrialProcessToRun<'a> {
    /// The bench executable of the trial.
    pub bench_executable: PathBuf,
    /// Content hash of the bench executable.
    pub executable_hash: &'a str,
    /// Folder of the bench executable's package, in which the trial's process runs.
    pub package_folder: PathBuf,
    /// Commit of the sources from which the trial's executable was built.
    pub source_commit: String,
    /// Artificial changes, such as delays, that a calibration injects into the process.
    pub injection: InjectedHeadChanges,
    /// How the process gets its request: by kernelgate's bench protocol or by Criterion's flags.
    pub control_method: BenchControlMethod,
    pub request: &'a TrialRequestToBench,
    pub process_timeout: Duration,
}

impl TrialProcessToRun<'_> {
    /// Returns the name of the bench, which is the file name of its executable.
    pub fn bench_name(&self) -> &str {
        self.bench_executable.file_name().and_then(OsStr::to_str).unwrap_or_default()
    }
}

/// Makes a command that runs an executable in its package's folder with `CARGO_MANIFEST_DIR` set,
/// as cargo does.
pub fn command_in_package_folder(program: &Path, package: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("CARGO_MANIFEST_DIR", package);
    if package.is_dir() {
        command.current_dir(package);
    }
    command
}

/// Exit status of a trial's process, and the captured part of its output.
pub struct FinishedTrialProcess {
    pub exit_status: ExitStatus,
    /// Captured standard output of the process; empty if the command does not pipe it.
    pub captured_stdout: CapturedOutput,
    /// The last bytes of the process's standard error.
    stderr_tail: Vec<u8>,
}

impl FinishedTrialProcess {
    /// Returns the last part of the process's standard error as text.
    pub fn end_of_stderr(&self) -> String {
        String::from_utf8_lossy(&self.stderr_tail).into_owned()
    }

    /// Describes a failed process: its exit status and the message of its last panic, or else its
    /// last lines.
    pub fn process_failure_text(&self) -> String {
        let mut lines = FailureLineCollector::default();
        self.end_of_stderr().lines().for_each(|line| lines.add_process_output_line(line));
        let lines: Vec<_> = lines
            .into_failure_lines()
            .iter()
            .map(|it| shortened_quotation(it).into_owned())
            .collect();
        let text = lines.join("; ");
        format!(
            "{}{}{}",
            self.exit_status,
            if lines.is_empty() { "" } else { ": " },
            clean_message_for_terminal(&text)
        )
    }
}

/// Runs a bench command until it ends; kills it at the timeout or if it takes too much memory. All
/// output of the bench is read but only a limited part is kept, so that a large output takes
/// neither memory nor disk.
pub fn run_to_end_or_timeout(
    setup: &SharedTrialSettings<'_>,
    command: &mut Command,
    timeout: Duration,
) -> Result<FinishedTrialProcess, String> {
    command.stdin(Stdio::null()).stderr(Stdio::piped());
    let (stdout, stderr) = setup
        .running_child
        .start_child_process(command)
        .map_err(|cause| format!("failed to start: {cause}"))?;
    let (printed, stderr) = (
        stdout.map(|it| capture_stream_on_thread(it, KeptPartOfOutput::KeepStreamStart)),
        stderr.map(|it| capture_stream_on_thread(it, KeptPartOfOutput::KeepStreamEnd)),
    );
    let ended = setup
        .running_child
        .wait_or_kill_at_timeout(timeout)
        .map_err(|cause| format!("was lost: {cause}"))?;
    let (printed, stderr) = (wait_for_captured_output(printed), wait_for_captured_output(stderr));
    if stderr.stream_total_bytes > MAX_PRINTED_STDERR_BYTES {
        let bench = Path::new(command.get_program()).file_name().unwrap_or_default();
        setup.progress.print_line_once(&format!(
            "bench `{}` prints more than {MAX_PRINTED_STDERR_BYTES} bytes in a process: only the end is \
             kept, here and where it does so again",
            bench.display(),
        ));
    }
    let stderr = stderr.kept_bytes;
    match ended {
        ChildProcessEnd::Exited(status) => Ok(FinishedTrialProcess {
            exit_status: status,
            captured_stdout: printed,
            stderr_tail: stderr,
        }),
        ChildProcessEnd::KilledAtTimeout => Err(format!(
            "treated as hung: killed after {} s (--wait sets this)",
            timeout.as_secs_f64().round()
        )),
        ChildProcessEnd::KilledAboveMemoryBytes(limit) => Err(memory_kill_reason_text(limit)),
    }
}
