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

use super::args::{self, BackendName, Flags, Mode};
use super::flag_variables::{OwnFlags, take_own_flags};
use super::parsed::{ProcessFacts, Settings};
use super::variables;
use crate::exit::Exit;
use crate::harness::error::HarnessError;
use crate::harness::guard;
use crate::harness::recording::invocation;
use crate::harness::running::quiet;
use crate::harness::selection::place::DEFAULT_TIMEOUT_S;
use crate::protocol;
use crate::record::store::check_name;
use crate::record::text::printable;

/// Set for the process that this one becomes, which has Criterion's flag for its briefest format.
const SILENT: &str = "KERNELGATE_TERSE";

/// Variable that names the file of the record, instead of the session's file; set by `kernelgate`,
/// which reads that file.
pub const RECORD: &str = "KERNELGATE_RECORD";

fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

fn arguments() -> Vec<OsString> {
    std::env::args_os().skip(1).collect()
}

/// Settings of this process, after it replaced itself where Criterion could not take its flags.
///
/// # Errors
/// The exit code: it answered which protocols it speaks, printed the help or an error, or was
/// replaced.
pub fn settings() -> Result<Settings, ExitCode> {
    if variable(protocol::VARIABLE).is_some_and(|value| value == protocol::QUESTION) {
        println!("{}", protocol::answer());
        return Err(Exit::Fine.into());
    }
    let arguments = arguments();
    let flags = match args::parse(&arguments) {
        Ok(flags) => flags,
        Err(error) if error.use_stderr() => {
            let text = variables::explain(&error, &args::command(), &arguments);
            eprint!("{}", printable(&text));
            return Err(Exit::Usage.into());
        }
        Err(help) => help.exit(),
    };
    let own = take_own_flags(&arguments);
    let silent = should_silence(&flags, &arguments);
    let large_pages = large_pages(&flags);
    if own.is_some() || silent || large_pages.is_some() {
        let (mut rest, mut own) = own.unwrap_or((arguments, Vec::new()));
        own.extend(large_pages);
        if silent {
            rest.splice(0..0, quiet::FLAG.map(OsString::from));
            own.push((SILENT.to_owned(), "yes".to_owned()));
        }
        return Err(replace_process(&rest, &own));
    }
    if !is_ordered(&flags) {
        variables::warnings().iter().for_each(|warning| eprintln!("{}", printable(warning)));
    }
    guard::keep_panics(variables::has_backtrace());
    let process = || {
        let silent_criterion = variable(SILENT).is_some();
        // Only a bench run is recorded in a session of its own.
        let session = if flags.mode() == Mode::Bench { session()? } else { None };
        let executable = executable();
        let has_other_benches = has_other_benches();
        Ok(ProcessFacts { silent_criterion, session, executable, has_other_benches })
    };
    process().and_then(|process| Settings::new(&flags, process)).map_err(|error| fail(&error))
}

/// Whether the package that cargo runs has several benches, by its manifest and its folder.
fn has_other_benches() -> bool {
    let Some(package) = variable("CARGO_MANIFEST_DIR").map(PathBuf::from) else { return false };
    let manifest = std::fs::read_to_string(package.join("Cargo.toml")).unwrap_or_default();
    let declared = manifest.lines().filter(|line| line.trim() == "[[bench]]").count();
    let entries = std::fs::read_dir(package.join("benches")).into_iter().flatten().flatten();
    let benches = entries.map(|entry| entry.path()).filter(|path| {
        path.extension().is_some_and(|it| it == "rs") || path.join("main.rs").is_file()
    });
    declared.max(benches.count()) > 1
}

/// Prints an error.
pub fn fail(error: &HarnessError) -> ExitCode {
    eprintln!("error: {}", printable(&error.to_string()));
    Exit::Usage.into()
}

/// File of this program.
fn executable() -> Option<PathBuf> {
    std::env::current_exe().ok()
}

/// Name of the session that the user chose.
///
/// # Errors
/// When it is not a plain file name.
fn session() -> Result<Option<String>, HarnessError> {
    let Some(given) = variable(invocation::VARIABLE) else { return Ok(None) };
    let session = given.to_string_lossy().into_owned();
    match check_name(&session) {
        Ok(()) => Ok(Some(session)),
        Err(_) => Err(HarnessError::SessionName { session }),
    }
}

/// Settings of a bench with Criterion's own `main`, whose flags Criterion reads.
pub struct CriterionProcess {
    /// Time after which work on the stream is treated as hung.
    pub timeout: Duration,
    /// Name of the baseline to which this run is added.
    pub save_baseline: Option<String>,
    /// Name of the session, if one was given.
    pub session: Result<Option<String>, String>,
    /// File of the record, instead of the session's file.
    pub record: Option<PathBuf>,
    /// File of this program.
    pub executable: Option<PathBuf>,
}

impl CriterionProcess {
    /// Settings of this process.
    pub fn new() -> Self {
        let timeout = variable("KERNELGATE_TIMEOUT");
        let seconds = timeout.and_then(|text| text.to_str()?.parse().ok());
        let flags = args::parse(&arguments()).ok();
        Self {
            timeout: Duration::from_secs(seconds.unwrap_or(DEFAULT_TIMEOUT_S)),
            save_baseline: flags.and_then(|flags| flags.save_baseline),
            session: session().map_err(|error| error.to_string()),
            record: variable(RECORD).map(PathBuf::from),
            executable: executable(),
        }
    }
}

fn is_ordered(flags: &Flags) -> bool {
    matches!(flags.mode(), Mode::Respond(_))
}

/// Whether Criterion's lines should stay out of the output, and do not yet: the user asked neither
/// for them nor for comparisons that only they show.
fn should_silence(flags: &Flags, arguments: &[OsString]) -> bool {
    let format = |argument: &OsString| argument.to_string_lossy().starts_with(quiet::FLAG[0]);
    let compares = [&flags.baseline, &flags.baseline_lenient, &flags.load_baseline];
    cfg!(unix)
        && flags.mode() == Mode::Bench
        && !flags.verbose
        && compares.iter().all(|name| name.is_none())
        && !arguments.iter().any(format)
}

/// Variable that makes the C library back the memory of a GPU process by pages of 2 MiB. Hundreds
/// of megabytes of inputs and outputs are allocated and freed with every case, and in pages of 4
/// KiB the system needs longer to map them than the GPU to fill them. Rows on the host are timed
/// without it, as they would run elsewhere.
fn large_pages(flags: &Flags) -> Option<(String, String)> {
    const VARIABLE: &str = "GLIBC_TUNABLES";
    let driver = ["/dev/nvidiactl", "/dev/dxg"].iter().any(|path| Path::new(path).exists());
    let on_gpu = driver && flags.backend != BackendName::Cpu && flags.mode() == Mode::Bench;
    (on_gpu && std::env::var_os(VARIABLE).is_none())
        .then(|| (VARIABLE.to_owned(), "glibc.malloc.hugetlb=1".to_owned()))
}

/// Starts this program anew with Criterion's flags alone and ours in the environment.
fn replace_process(arguments: &[OsString], own: &OwnFlags) -> ExitCode {
    let program = executable()
        .unwrap_or_else(|| PathBuf::from(std::env::args_os().next().unwrap_or_default()));
    let mut command = Command::new(&program);
    command.args(arguments).envs(own.iter().cloned());
    #[cfg(unix)]
    let error = {
        use std::os::unix::process::CommandExt;
        command.exec()
    };
    #[cfg(not(unix))]
    // Without exec the program's parent would be this process, not cargo: the session is settled
    // here.
    let error = match command
        .env(
            invocation::VARIABLE,
            session().map(|given| invocation::Invocation::new(given).session).unwrap_or_default(),
        )
        .status()
    {
        Ok(status) => return ExitCode::from(u8::try_from(status.code().unwrap_or(2)).unwrap_or(2)),
        Err(error) => error,
    };
    eprintln!("error: failed to start {}: {error}", program.display());
    Exit::Usage.into()
}
