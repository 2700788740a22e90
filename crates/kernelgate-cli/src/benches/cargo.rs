//! Builds bench executables with `cargo bench --no-run`, and reads cargo's messages and progress.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::Deserialize;

use super::child_process::{ChildProcessEnd, SharedChildProcess, memory_kill_reason_text};

/// Number of the last lines of cargo's standard error that the error about a failed build shows.
const SHOWN_CARGO_ERROR_LINES: usize = 30;
/// Longest duration of a cargo build of benches, unless the caller sets a shorter timeout.
pub const MAX_CARGO_BUILD_DURATION: Duration = Duration::from_secs(4 * 3600);

/// Error: a cargo build of bench executables failed.
#[derive(Debug, thiserror::Error)]
pub enum CargoBuildError {
    /// Error: the process cargo cannot be started, or waiting for it failed.
    #[error("cannot be built: failed to run cargo: {0}")]
    CannotRunCargo(std::io::Error),
    /// Error: the cargo build did not end within its timeout.
    #[error("was not built within {} s", .0.as_secs_f64())]
    BuildTimedOut(Duration),
    /// Error: cargo's build failed; the text holds the last lines of cargo's standard error.
    #[error("does not build; cargo's last lines:\n{0}")]
    BuildFailed(String),
}

/// One JSON message that cargo prints during a build; only messages about built executables have
/// all optional fields.
#[derive(Deserialize)]
struct CargoJsonMessage {
    #[serde(rename = "reason")]
    message_kind: String,
    manifest_path: Option<PathBuf>,
    target: Option<CargoMessageTarget>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct CargoMessageTarget {
    #[serde(rename = "name")]
    target_name: String,
    #[serde(rename = "kind")]
    target_kinds: Vec<String>,
}

/// A bench executable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BenchExecutable {
    /// Name of the executable's bench target, as in `Cargo.toml`.
    pub bench_name: String,
    /// Path of the bench executable.
    pub executable_path: PathBuf,
    /// Root folder of the executable's Cargo package, which is the bench process's working folder.
    pub package_root: PathBuf,
}

#[derive(Debug, Default)]
pub struct BuiltBenchExecutables {
    /// Bench executables.
    pub benches: Vec<BenchExecutable>,
    /// Paths of the `Cargo.toml` files of all packages that cargo compiled, dependencies included.
    pub compiled_package_manifests: BTreeSet<PathBuf>,
}

impl BuiltBenchExecutables {
    /// Reads one line of cargo's JSON output, and stores the manifest path and the bench executable
    /// that the line names.
    fn add_cargo_json_line(&mut self, line: &str) {
        let Ok(message) = serde_json::from_str::<CargoJsonMessage>(line) else { return };
        if message.message_kind != "compiler-artifact" {
            return;
        }
        let manifest = message.manifest_path.unwrap_or_default();
        self.compiled_package_manifests.insert(manifest.clone());
        let target =
            message.target.filter(|target| target.target_kinds.iter().any(|kind| kind == "bench"));
        if let (Some(target), Some(path)) = (target, message.executable) {
            let root = manifest.parent().map(Path::to_owned).unwrap_or_default();
            self.benches.push(BenchExecutable {
                bench_name: target.target_name,
                executable_path: path,
                package_root: root,
            });
        }
    }
}

/// The bench targets, the package, the Cargo profile and the features of a build.
#[derive(Debug, Clone, Copy)]
pub struct BenchBuildTargets<'a> {
    /// Names of the bench targets to build; if the list is empty, cargo builds all bench targets.
    pub bench_names: &'a [String],
    /// Package to which the build is restricted; `None` builds cargo's default packages.
    pub only_package: Option<&'a str>,
    /// Cargo's profile.
    pub cargo_profile: &'a str,
    /// Cargo features that the build enables.
    pub cargo_features: &'a [String],
}

/// Path of the cargo program: the value of the environment variable `CARGO`, else `cargo`.
#[expect(clippy::disallowed_methods, reason = "cargo names itself to the programs it starts")]
pub fn cargo_program_path() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Returns the command `cargo bench --no-run` for these targets; the caller sets the command's
/// working folder.
pub fn cargo_bench_build_command(wanted: BenchBuildTargets<'_>) -> Command {
    let mut command = Command::new(cargo_program_path());
    command.args([
        "bench",
        "--no-run",
        "--message-format=json-render-diagnostics",
        "--profile",
        wanted.cargo_profile,
    ]);
    if let Some(package) = wanted.only_package {
        command.args(["--package", package]);
    }
    wanted.cargo_features.iter().for_each(|features| {
        command.args(["--features", features]);
    });
    if wanted.bench_names.is_empty() {
        command.arg("--benches");
    }
    wanted.bench_names.iter().for_each(|bench| {
        command.args(["--bench", bench]);
    });
    command.env_remove("CARGO_MANIFEST_DIR");
    command
}

/// Environment variables that make cargo print its progress to a pipe as on a terminal: uncoloured
/// lines that end with a carriage return.
pub const CARGO_PROGRESS_VARIABLES: [(&str, &str); 3] = [
    ("CARGO_TERM_PROGRESS_WHEN", "always"),
    ("CARGO_TERM_PROGRESS_WIDTH", "80"),
    ("CARGO_TERM_COLOR", "never"),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CargoBuildProgress {
    /// Number of crates and build scripts that cargo has compiled so far in this build.
    pub built_crates: usize,
    /// Number of all crates and build scripts that cargo compiles in this build.
    pub total_crates: usize,
}

impl CargoBuildProgress {
    /// Parses cargo's progress line, such as "Building [=> ] 3/83: syn"; returns `None` for any
    /// other line.
    fn parse_cargo_progress_line(line: &str) -> Option<CargoBuildProgress> {
        let (_, counts) = line.trim_start().strip_prefix("Building [")?.split_once(']')?;
        let (done, all) = counts.split(':').next()?.trim().split_once('/')?;
        Some(Self { built_crates: done.parse().ok()?, total_crates: all.parse().ok()? })
    }
}

/// Splits a stream into lines that end with a line feed or a carriage return, because cargo ends
/// its progress lines with a carriage return.
fn lines_split_at_newline_or_return(stream: impl Read) -> impl Iterator<Item = String> {
    let mut reader = BufReader::new(stream);
    std::iter::from_fn(move || {
        let mut piece = Vec::new();
        loop {
            let read = reader.fill_buf().ok()?;
            let end = read.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            let ended = end.is_some() || read.is_empty();
            piece.extend(&read[..end.unwrap_or(read.len())]);
            let count = end.map_or(read.len(), |end| end + 1);
            if count == 0 && piece.is_empty() {
                return None;
            }
            reader.consume(count);
            if ended {
                return Some(String::from_utf8_lossy(&piece).trim_end().to_owned());
            }
        }
    })
}

/// One line that cargo prints on standard error while it builds: a message for the user, or
/// progress.
pub enum CargoStderrLine<'a> {
    MessageForUser(&'a str),
    /// Progress of a build; cargo prints it because the environment variables
    /// [`CARGO_PROGRESS_VARIABLES`] are set.
    Progress(CargoBuildProgress),
}

/// Runs a cargo build, passes each line of cargo's standard error to `show`, and returns the built
/// bench executables, or the build's error.
pub fn run_cargo_bench_build(
    command: &mut Command,
    (running, timeout): (&SharedChildProcess, Duration),
    show: impl Fn(CargoStderrLine<'_>) + Send,
) -> Result<BuiltBenchExecutables, CargoBuildError> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let (stdout, stderr) =
        running.start_child_process(command).map_err(CargoBuildError::CannotRunCargo)?;
    let (messages, ended, lines) = std::thread::scope(|scope| {
        let lines = scope.spawn(move || {
            let progress_lines = stderr.into_iter().flat_map(lines_split_at_newline_or_return);
            let mut messages = Vec::new();
            for line in progress_lines {
                match CargoBuildProgress::parse_cargo_progress_line(&line) {
                    Some(progress) => show(CargoStderrLine::Progress(progress)),
                    None => {
                        show(CargoStderrLine::MessageForUser(line.trim()));
                        messages.push(line);
                    }
                }
            }
            messages
        });
        let built = scope.spawn(move || {
            let mut built = BuiltBenchExecutables::default();
            stdout
                .into_iter()
                .flat_map(lines_split_at_newline_or_return)
                .for_each(|line| built.add_cargo_json_line(&line));
            built
        });
        // Waiting for cargo runs concurrently with the threads that read its output, because a hung
        // build never closes its output streams.
        let ended = running.wait_or_kill_at_timeout(timeout);
        (built.join().unwrap_or_default(), ended, lines.join().unwrap_or_default())
    });
    match ended.map_err(CargoBuildError::CannotRunCargo)? {
        ChildProcessEnd::Exited(status) if status.success() => Ok(messages),
        ChildProcessEnd::KilledAtTimeout => Err(CargoBuildError::BuildTimedOut(timeout)),
        ChildProcessEnd::KilledAboveMemoryBytes(limit) => {
            Err(CargoBuildError::BuildFailed(memory_kill_reason_text(limit)))
        }
        ChildProcessEnd::Exited(_) => {
            // Only the last lines of cargo's output are shown, because many warnings may come
            // before the error at the end.
            let last = &lines[lines.len().saturating_sub(SHOWN_CARGO_ERROR_LINES)..];
            Err(CargoBuildError::BuildFailed(last.join("\n")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bench_executables_are_read_from_cargos_json_messages() {
        let line = |reason: &str, kind: &str, executable: &str| {
            let target = format!(r#"{{"name":"a","kind":["{kind}"]}}"#);
            let manifest = r#""manifest_path":"/p/Cargo.toml""#;
            format!(
                r#"{{"reason":"{reason}","target":{target},"executable":{executable},{manifest}}}"#
            )
        };
        let noted = |line: &str| {
            let mut built = BuiltBenchExecutables::default();
            built.add_cargo_json_line(line);
            built
        };
        let built = noted(&line("compiler-artifact", "bench", r#""/t/a-1""#));
        assert_eq!(built.compiled_package_manifests, [PathBuf::from("/p/Cargo.toml")].into());
        let expected = BenchExecutable {
            bench_name: "a".to_owned(),
            executable_path: PathBuf::from("/t/a-1"),
            package_root: PathBuf::from("/p"),
        };
        assert_eq!(built.benches, [expected]);
        for other in [
            line("compiler-artifact", "lib", r#""/t/a-1""#),
            line("compiler-artifact", "bench", "null"),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
            "not json".to_owned(),
        ] {
            assert_eq!(noted(&other).benches, []);
        }
    }

    #[test]
    fn requested_features_are_passed_to_cargo() {
        let (benches, features) = (["a".to_owned()], ["x".to_owned(), "y,z".to_owned()]);
        let targets = BenchBuildTargets {
            bench_names: &benches,
            only_package: None,
            cargo_profile: "dev",
            cargo_features: &features,
        };
        let command = cargo_bench_build_command(targets);
        let arguments: Vec<_> = command.get_args().filter_map(|it| it.to_str()).collect();
        let line = "bench --no-run --message-format=json-render-diagnostics --profile dev \
                    --features x --features y,z --bench a";
        assert_eq!(arguments.join(" "), line);
    }

    #[test]
    fn build_progress_is_parsed_from_cargos_stderr() {
        let text = "   Compiling syn v2.0.119\n    Building [=> ] 3/83: syn, quote   \r    Building \
                    [==>] 10/83: syn\rerror: no\n\nlast";
        let progress_lines: Vec<String> =
            lines_split_at_newline_or_return(text.as_bytes()).collect();
        let progress: Vec<_> = progress_lines
            .iter()
            .filter_map(|it| CargoBuildProgress::parse_cargo_progress_line(it))
            .collect();
        assert_eq!(
            progress,
            [3, 10].map(|built_crates| CargoBuildProgress { built_crates, total_crates: 83 })
        );
        let rest: Vec<&str> = progress_lines
            .iter()
            .map(String::as_str)
            .filter(|it| CargoBuildProgress::parse_cargo_progress_line(it).is_none())
            .collect();
        assert_eq!(rest, ["   Compiling syn v2.0.119", "error: no", "", "last"]);
        for other in ["Building x", "Building [=> ]", "Building [=> ] 1 of 2: x", ""] {
            assert_eq!(CargoBuildProgress::parse_cargo_progress_line(other), None);
        }
    }
}
