//! The process itself: its arguments, its variables, its file, and its start anew with Criterion's
//! flags alone.
#![allow(
    clippy::disallowed_methods,
    reason = "the boundary: arguments and variables are read here"
)]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use super::args::{self, BackendFlagValue, BenchProcessFlags, ProcessMode};
use super::flag_variables::{FlagVariables, split_own_flags};
use super::parsed::{BenchSettings, ProcessFacts};
use super::variables;
use crate::exit::ExitReason;
use crate::harness::error::HarnessError;
use crate::harness::panic_guard;
use crate::harness::recording::invocation;
use crate::harness::running::silence_criterion;
use crate::harness::selection::backend_choice::DEFAULT_GPU_TIMEOUT_S;
use crate::protocol;
use crate::record::store::check_path_component;
use crate::record::text::printable_on_terminal;

/// Variable set for the restarted process, which then has Criterion's flag for the briefest output
/// format.
const SILENT_VARIABLE: &str = "KERNELGATE_TERSE";

/// Variable that names the file of the record, instead of the session's file; set by `kernelgate`,
/// which reads that file.
pub const RECORD_VARIABLE: &str = "KERNELGATE_RECORD";

fn process_variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn process_arguments() -> Vec<OsString> {
    std::env::args_os().skip(1).collect()
}

/// Settings of this process, after it replaced itself where Criterion could not take its flags.
///
/// # Errors
/// The exit code: it answered which protocols it speaks, printed the help or an error, or was
/// replaced.
pub fn process_settings() -> Result<BenchSettings, ExitCode> {
    if process_variable(protocol::REQUEST_VARIABLE)
        .is_some_and(|value| value == protocol::VERSION_QUESTION)
    {
        println!("{}", protocol::version_answer());
        return Err(ExitReason::Fine.into());
    }
    let arguments = process_arguments();
    let flags = match args::parse(&arguments) {
        Ok(flags) => flags,
        Err(error) if error.use_stderr() => {
            let text = variables::explain_command_line_error(
                &error,
                &args::bench_command_line(),
                &arguments,
            );
            eprint!("{}", printable_on_terminal(&text));
            return Err(ExitReason::Usage.into());
        }
        Err(help) => help.exit(),
    };
    let own = split_own_flags(&arguments);
    let silent = should_silence_criterion(&flags, &arguments);
    let large_pages = large_page_variable(&flags);
    if own.is_some() || silent || large_pages.is_some() {
        let (mut rest, mut own) = own.unwrap_or((arguments, Vec::new()));
        own.extend(large_pages);
        if silent {
            rest.splice(0..0, silence_criterion::BRIEFEST_FORMAT_FLAG.map(OsString::from));
            own.push((SILENT_VARIABLE.to_owned(), "yes".to_owned()));
        }
        return Err(restart_with_flag_variables(&rest, &own));
    }
    if !matches!(flags.process_mode(), ProcessMode::Respond(_)) {
        variables::unread_variable_warnings()
            .iter()
            .for_each(|warning| eprintln!("{}", printable_on_terminal(warning)));
    }
    panic_guard::keep_panic_messages(variables::wants_backtrace());
    let process = || {
        let silent_criterion = process_variable(SILENT_VARIABLE).is_some();
        // Only a bench run is recorded in a session of its own.
        let session =
            if flags.process_mode() == ProcessMode::Bench { chosen_session()? } else { None };
        let executable = own_executable();
        let has_other_benches = has_other_benches();
        Ok(ProcessFacts { silent_criterion, session, executable, has_other_benches })
    };
    process()
        .and_then(|process| BenchSettings::new(&flags, process))
        .map_err(|error| print_failure(&error))
}

/// Whether the package that cargo runs has several benches, by its manifest and its folder.
fn has_other_benches() -> bool {
    let Some(package) = process_variable("CARGO_MANIFEST_DIR").map(PathBuf::from) else {
        return false;
    };
    let manifest = std::fs::read_to_string(package.join("Cargo.toml")).unwrap_or_default();
    let declared = manifest.lines().filter(|line| line.trim() == "[[bench]]").count();
    let entries = std::fs::read_dir(package.join("benches")).into_iter().flatten().flatten();
    let benches = entries.map(|entry| entry.path()).filter(|path| {
        path.extension().is_some_and(|it| it == "rs") || path.join("main.rs").is_file()
    });
    declared.max(benches.count()) > 1
}

/// Prints an error.
pub fn print_failure(error: &HarnessError) -> ExitCode {
    eprintln!("error: {}", printable_on_terminal(&error.to_string()));
    ExitReason::Usage.into()
}

/// File of this program.
fn own_executable() -> Option<PathBuf> {
    std::env::current_exe().ok()
}

/// Session name that the user chose.
///
/// # Errors
/// Fails if the session name is not a plain file name.
fn chosen_session() -> Result<Option<String>, HarnessError> {
    let Some(given) = process_variable(invocation::SESSION_VARIABLE) else { return Ok(None) };
    let session = given.to_string_lossy().into_owned();
    match check_path_component(&session) {
        Ok(()) => Ok(Some(session)),
        Err(_) => Err(HarnessError::SessionName { session }),
    }
}

/// Settings of a bench with Criterion's own `main`, whose flags Criterion reads.
pub struct CriterionProcessSettings {
    /// Time after which work on the stream is treated as hung.
    pub timeout: Duration,
    /// Name of the baseline to which the results of this run are added.
    pub save_baseline: Option<String>,
    /// Name of the session, if one was given.
    pub session: Result<Option<String>, String>,
    /// File to which the run record is written, instead of the session's file.
    pub record: Option<PathBuf>,
    /// File of this program.
    pub executable: Option<PathBuf>,
}

impl CriterionProcessSettings {
    /// Settings of this process.
    pub fn new() -> Self {
        let timeout = process_variable("KERNELGATE_TIMEOUT");
        let seconds = timeout.and_then(|text| text.to_str()?.parse().ok());
        let flags = args::parse(&process_arguments()).ok();
        Self {
            timeout: Duration::from_secs(seconds.unwrap_or(DEFAULT_GPU_TIMEOUT_S)),
            save_baseline: flags.and_then(|flags| flags.save_baseline),
            session: chosen_session().map_err(|error| error.to_string()),
            record: process_variable(RECORD_VARIABLE).map(PathBuf::from),
            executable: own_executable(),
        }
    }
}

/// Whether Criterion's lines should stay out of the output, and do not yet: the user asked neither
/// for them nor for comparisons that only they show.
fn should_silence_criterion(flags: &BenchProcessFlags, arguments: &[OsString]) -> bool {
    let format = |argument: &OsString| {
        argument.to_string_lossy().starts_with(silence_criterion::BRIEFEST_FORMAT_FLAG[0])
    };
    let compares = [&flags.baseline, &flags.baseline_lenient, &flags.load_baseline];
    flags.process_mode() == ProcessMode::Bench
        && !flags.verbose
        && compares.iter().all(|name| name.is_none())
        && !arguments.iter().any(format)
}

/// Variable that makes the C library back the memory of a GPU process by pages of 2 MiB. Every case
/// allocates and frees hundreds of megabytes of inputs and outputs; in pages of 4 KiB the system
/// needs longer to map them than the GPU to fill them. Rows on the host are timed without this
/// variable, as they would run elsewhere.
fn large_page_variable(flags: &BenchProcessFlags) -> Option<(String, String)> {
    const GLIBC_TUNABLES_VARIABLE: &str = "GLIBC_TUNABLES";
    let driver = ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| Path::new(path).exists());
    let on_gpu = driver
        && flags.backend != BackendFlagValue::Cpu
        && flags.process_mode() == ProcessMode::Bench;
    (on_gpu && std::env::var_os(GLIBC_TUNABLES_VARIABLE).is_none())
        .then(|| (GLIBC_TUNABLES_VARIABLE.to_owned(), "glibc.malloc.hugetlb=1".to_owned()))
}

/// Restarts this program with only Criterion's flags on the command line and kernelgate's flags in
/// the environment.
fn restart_with_flag_variables(arguments: &[OsString], own: &FlagVariables) -> ExitCode {
    let program = own_executable()
        .unwrap_or_else(|| PathBuf::from(std::env::args_os().next().unwrap_or_default()));
    let mut command = Command::new(&program);
    command.args(arguments).envs(own.iter().cloned());
    let error = std::os::unix::process::CommandExt::exec(&mut command);
    eprintln!("error: failed to start {}: {error}", program.display());
    ExitReason::Usage.into()
}
