//! Reads the process's arguments, environment variables and executable, and restarts the process
//! with only Criterion's flags.
#![allow(
    clippy::disallowed_methods,
    reason = "the boundary: arguments and variables are read here"
)]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use super::args::{self, BackendFlagValue, BenchProcessFlags, BenchProcessTask};
use super::flag_variables::{VariablesForFlags, split_criterion_and_kernelgate_flags};
use super::parsed::{BenchProcessFacts, BenchSettings};
use super::variables;
use crate::exit::ProcessExitReason;
use crate::harness::error::HarnessError;
use crate::harness::panic_guard;
use crate::harness::recording::invocation;
use crate::harness::running::silence_criterion;
use crate::harness::selection::backend_choice::DEFAULT_GPU_TIMEOUT_S;
use crate::protocol;
use crate::record::store::check_baseline_file_name;
use crate::record::text::clean_message_for_terminal;

/// Environment variable that is set for the restarted process if Criterion's output is suppressed.
const SILENT_CRITERION_VARIABLE: &str = "KERNELGATE_TERSE";

/// Environment variable with the path for the run record; `kernelgate` sets it and reads the file.
pub const RECORD_PATH_VARIABLE: &str = "KERNELGATE_RECORD";

fn non_empty_environment_variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn arguments_without_program_name() -> Vec<OsString> {
    std::env::args_os().skip(1).collect()
}

/// Returns the settings of this process, or restarts the process without the flags that Criterion
/// rejects.
///
/// # Errors
/// The exit code, if the process answered with its protocol version, printed help or an error, or
/// could not be restarted.
pub fn settings_of_this_process_or_restart() -> Result<BenchSettings, ExitCode> {
    if non_empty_environment_variable(protocol::REQUEST_PATH_VARIABLE)
        .is_some_and(|value| value == protocol::PROTOCOL_VERSION_QUESTION)
    {
        println!("{}", protocol::protocol_version_answer_line());
        return Err(ProcessExitReason::Success.into());
    }
    let arguments = arguments_without_program_name();
    let flags = match args::parse_bench_arguments(&arguments) {
        Ok(flags) => flags,
        Err(error) if error.use_stderr() => {
            let text = variables::command_line_error_naming_the_variable(
                &error,
                &args::command_line_of_bench_executables(),
                &arguments,
            );
            eprint!("{}", clean_message_for_terminal(&text));
            return Err(ProcessExitReason::InvalidUsageOrInput.into());
        }
        Err(help) => help.exit(),
    };
    let own = split_criterion_and_kernelgate_flags(&arguments);
    let silent = should_suppress_criterion_output(&flags, &arguments);
    let large_pages = glibc_large_page_variable_for_gpu(&flags);
    if own.is_some() || silent || large_pages.is_some() {
        let (mut rest, mut own) = own.unwrap_or((arguments, Vec::new()));
        own.extend(large_pages);
        if silent {
            rest.splice(0..0, silence_criterion::CRITERION_BRIEF_OUTPUT_FLAGS.map(OsString::from));
            own.push((SILENT_CRITERION_VARIABLE.to_owned(), "yes".to_owned()));
        }
        return Err(restart_with_kernelgate_flags_as_variables(&rest, &own));
    }
    if !matches!(flags.process_mode(), BenchProcessTask::RespondToRequestFile(_)) {
        variables::warnings_of_unread_kernelgate_variables()
            .iter()
            .for_each(|warning| eprintln!("{}", clean_message_for_terminal(warning)));
    }
    panic_guard::install_hook_that_stores_panic_messages(variables::is_rust_backtrace_enabled());
    let process = || {
        let silent_criterion = non_empty_environment_variable(SILENT_CRITERION_VARIABLE).is_some();
        // Only a bench run writes a record into a session folder.
        let session = if flags.process_mode() == BenchProcessTask::TimeCases {
            session_name_from_environment()?
        } else {
            None
        };
        let executable = path_of_this_executable();
        let has_other_benches = package_has_several_benches();
        Ok(BenchProcessFacts {
            silent_criterion,
            session_name: session,
            executable,
            has_other_benches,
        })
    };
    process()
        .and_then(|process| BenchSettings::from_checked_flags(&flags, process))
        .map_err(|error| print_error_and_return_exit_code(&error))
}

/// Whether the package that cargo runs has several bench executables, according to its manifest and
/// its folder `benches`.
fn package_has_several_benches() -> bool {
    let Some(package) = non_empty_environment_variable("CARGO_MANIFEST_DIR").map(PathBuf::from)
    else {
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
pub fn print_error_and_return_exit_code(error: &HarnessError) -> ExitCode {
    eprintln!("error: {}", clean_message_for_terminal(&error.to_string()));
    ProcessExitReason::InvalidUsageOrInput.into()
}

/// Path of this program's executable file.
fn path_of_this_executable() -> Option<PathBuf> {
    std::env::current_exe().ok()
}

/// Returns the session name that the user chose by an environment variable, if any.
///
/// # Errors
/// Fails if the session name is not a plain file name.
fn session_name_from_environment() -> Result<Option<String>, HarnessError> {
    let Some(given) = non_empty_environment_variable(invocation::SESSION_NAME_VARIABLE) else {
        return Ok(None);
    };
    let session = given.to_string_lossy().into_owned();
    match check_baseline_file_name(&session) {
        Ok(()) => Ok(Some(session)),
        Err(_) => Err(HarnessError::InvalidSessionName { session_name: session }),
    }
}

/// Settings of a bench with Criterion's own `main` function, in which Criterion parses the flags.
pub struct SettingsOfCriterionBench {
    /// Time after which work on the timed stream counts as hung.
    pub stream_timeout: Duration,
    /// Name of the baseline to which the run is added, if requested.
    pub save_baseline: Option<String>,
    /// The session name, if the user chose one.
    pub session_name: Result<Option<String>, String>,
    /// Path for the run record instead of the session folder, if `kernelgate` requested the record.
    pub requested_record_path: Option<PathBuf>,
    /// Path of this program's executable file.
    pub executable: Option<PathBuf>,
}

impl SettingsOfCriterionBench {
    /// Reads the settings of this bench process from its flags and environment variables.
    pub fn from_flags_and_environment() -> Self {
        let timeout = non_empty_environment_variable("KERNELGATE_TIMEOUT");
        let seconds = timeout.and_then(|text| text.to_str()?.parse().ok());
        let flags = args::parse_bench_arguments(&arguments_without_program_name()).ok();
        Self {
            stream_timeout: Duration::from_secs(seconds.unwrap_or(DEFAULT_GPU_TIMEOUT_S)),
            save_baseline: flags.and_then(|flags| flags.save_baseline),
            session_name: session_name_from_environment().map_err(|error| error.to_string()),
            requested_record_path: non_empty_environment_variable(RECORD_PATH_VARIABLE)
                .map(PathBuf::from),
            executable: path_of_this_executable(),
        }
    }
}

/// Whether Criterion's output must still be suppressed: the user requested neither that output nor
/// a comparison that only Criterion prints.
fn should_suppress_criterion_output(flags: &BenchProcessFlags, arguments: &[OsString]) -> bool {
    let format = |argument: &OsString| {
        argument.to_string_lossy().starts_with(silence_criterion::CRITERION_BRIEF_OUTPUT_FLAGS[0])
    };
    let compares =
        [&flags.compared_criterion_baseline, &flags.baseline_lenient, &flags.load_baseline];
    flags.process_mode() == BenchProcessTask::TimeCases
        && !flags.verbose
        && compares.iter().all(|name| name.is_none())
        && !arguments.iter().any(format)
}

/// Environment variable with which glibc uses pages of 2 MiB for the memory of a process that uses
/// the GPU. Each case allocates hundreds of megabytes of host memory; with pages of 4 KiB, mapping
/// them would take longer than the GPU needs for its work. Implementations on the host are timed
/// without this glibc variable, as they would run in other programs.
fn glibc_large_page_variable_for_gpu(flags: &BenchProcessFlags) -> Option<(String, String)> {
    const GLIBC_TUNABLES_VARIABLE: &str = "GLIBC_TUNABLES";
    let driver = ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| Path::new(path).exists());
    let on_gpu = driver
        && flags.backend != BackendFlagValue::Cpu
        && flags.process_mode() == BenchProcessTask::TimeCases;
    (on_gpu && std::env::var_os(GLIBC_TUNABLES_VARIABLE).is_none())
        .then(|| (GLIBC_TUNABLES_VARIABLE.to_owned(), "glibc.malloc.hugetlb=1".to_owned()))
}

/// Restarts this executable with only Criterion's flags on the command line and kernelgate's flags
/// in environment variables.
fn restart_with_kernelgate_flags_as_variables(
    arguments: &[OsString],
    own: &VariablesForFlags,
) -> ExitCode {
    let program = path_of_this_executable()
        .unwrap_or_else(|| PathBuf::from(std::env::args_os().next().unwrap_or_default()));
    let mut command = Command::new(&program);
    command.args(arguments).envs(own.iter().cloned());
    let error = std::os::unix::process::CommandExt::exec(&mut command);
    eprintln!("error: failed to start {}: {error}", program.display());
    ProcessExitReason::InvalidUsageOrInput.into()
}
