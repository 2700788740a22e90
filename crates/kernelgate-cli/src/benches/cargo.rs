//! Builds bench executables with cargo.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::Deserialize;

use super::child_process::{ChildProcess, ProcessEnd, memory_kill_reason};

/// Number of the last lines of cargo's output that an error shows.
const SHOWN_LINES: usize = 30;
/// Timeout of a build, unless the caller sets a shorter one.
pub const BUILD_TIMEOUT: Duration = Duration::from_secs(4 * 3600);

/// Error: a build produced no executables.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// Error: cargo cannot be started, or its process was lost.
    #[error("cannot be built: failed to run cargo: {0}")]
    Cargo(std::io::Error),
    /// Cargo's build takes longer than its timeout.
    #[error("was not built within {} s", .0.as_secs_f64())]
    TimedOut(Duration),
    /// Cargo failed; the text has the last lines of its output.
    #[error("does not build; cargo's last lines:\n{0}")]
    Failed(String),
}

/// Cargo's message about an executable that it built; other messages lack the fields.
#[derive(Deserialize)]
struct CargoMessage {
    reason: String,
    manifest_path: Option<PathBuf>,
    target: Option<CargoTarget>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct CargoTarget {
    name: String,
    kind: Vec<String>,
}

/// A bench executable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BenchExecutable {
    /// Name of the bench target in `Cargo.toml`.
    pub bench: String,
    /// The file.
    pub path: PathBuf,
    /// Folder of the executable's package, in which it runs.
    pub root: PathBuf,
}

#[derive(Debug, Default)]
pub struct BuildOutput {
    /// Bench executables.
    pub benches: Vec<BenchExecutable>,
    /// Paths of the manifests of all packages, dependencies included.
    pub manifests: BTreeSet<PathBuf>,
}

impl BuildOutput {
    /// Takes one line of the JSON messages that cargo prints.
    fn note_cargo_message(&mut self, line: &str) {
        let Ok(message) = serde_json::from_str::<CargoMessage>(line) else { return };
        if message.reason != "compiler-artifact" {
            return;
        }
        let manifest = message.manifest_path.unwrap_or_default();
        self.manifests.insert(manifest.clone());
        let target = message.target.filter(|target| target.kind.iter().any(|kind| kind == "bench"));
        if let (Some(target), Some(path)) = (target, message.executable) {
            let root = manifest.parent().map(Path::to_owned).unwrap_or_default();
            self.benches.push(BenchExecutable { bench: target.name, path, root });
        }
    }
}

/// The bench targets and the profile of a build.
#[derive(Debug, Clone, Copy)]
pub struct BuildTargets<'a> {
    /// Names of the bench targets to build; all targets if it is empty.
    pub benches: &'a [String],
    /// Package to which the build is restricted.
    pub package: Option<&'a str>,
    /// Cargo's profile.
    pub profile: &'a str,
    /// Cargo features of the package.
    pub features: &'a [String],
}

/// Path of the cargo program, which the variable `CARGO` may name.
#[expect(clippy::disallowed_methods, reason = "cargo names itself to the programs it starts")]
pub fn cargo_program() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// The command `cargo bench --no-run`; the caller adds the folder.
pub fn cargo_bench_command(wanted: BuildTargets<'_>) -> Command {
    let mut command = Command::new(cargo_program());
    command.args([
        "bench",
        "--no-run",
        "--message-format=json-render-diagnostics",
        "--profile",
        wanted.profile,
    ]);
    if let Some(package) = wanted.package {
        command.args(["--package", package]);
    }
    wanted.features.iter().for_each(|features| {
        command.args(["--features", features]);
    });
    if wanted.benches.is_empty() {
        command.arg("--benches");
    }
    wanted.benches.iter().for_each(|bench| {
        command.args(["--bench", bench]);
    });
    command.env_remove("CARGO_MANIFEST_DIR");
    command
}

/// Variables that make cargo print progress without a terminal: lines that end with a carriage
/// return, without colours.
pub const CARGO_PROGRESS_VARIABLES: [(&str, &str); 3] = [
    ("CARGO_TERM_PROGRESS_WHEN", "always"),
    ("CARGO_TERM_PROGRESS_WIDTH", "80"),
    ("CARGO_TERM_COLOR", "never"),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BuildProgress {
    /// Number of crates and build scripts that were compiled so far.
    pub done: usize,
    /// Number of all crates and build scripts of the build.
    pub all: usize,
}

impl BuildProgress {
    /// Reads a line such as "Building [=> ] 3/83: syn".
    fn parse(line: &str) -> Option<BuildProgress> {
        let (_, counts) = line.trim_start().strip_prefix("Building [")?.split_once(']')?;
        let (done, all) = counts.split(':').next()?.trim().split_once('/')?;
        Some(Self { done: done.parse().ok()?, all: all.parse().ok()? })
    }
}

/// Parts of a text that end with a line feed or a carriage return.
fn progress_lines(stream: impl Read) -> impl Iterator<Item = String> {
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

/// One line that cargo prints while it builds: a message or progress.
pub enum CargoBuildOutput<'a> {
    Message(&'a str),
    /// Progress of a build, which cargo prints because of the variables in
    /// [`CARGO_PROGRESS_VARIABLES`].
    Progress(BuildProgress),
}

/// Runs a build and returns the executables, or cargo's last lines.
pub fn run_cargo_build(
    command: &mut Command,
    (running, timeout): (&ChildProcess, Duration),
    show: impl Fn(CargoBuildOutput<'_>) + Send,
) -> Result<BuildOutput, BuildError> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let (stdout, stderr) = running.start_process(command).map_err(BuildError::Cargo)?;
    let (messages, ended, lines) = std::thread::scope(|scope| {
        let lines = scope.spawn(move || {
            let progress_lines = stderr.into_iter().flat_map(progress_lines);
            let mut messages = Vec::new();
            for line in progress_lines {
                match BuildProgress::parse(&line) {
                    Some(progress) => show(CargoBuildOutput::Progress(progress)),
                    None => {
                        show(CargoBuildOutput::Message(line.trim()));
                        messages.push(line);
                    }
                }
            }
            messages
        });
        let built = scope.spawn(move || {
            let mut built = BuildOutput::default();
            stdout
                .into_iter()
                .flat_map(progress_lines)
                .for_each(|line| built.note_cargo_message(&line));
            built
        });
        // The wait runs concurrently with the readers: a build that hangs holds its streams open.
        let ended = running.wait_for_end(timeout);
        (built.join().unwrap_or_default(), ended, lines.join().unwrap_or_default())
    });
    match ended.map_err(BuildError::Cargo)? {
        ProcessEnd::Exited(status) if status.success() => Ok(messages),
        ProcessEnd::TimedOut => Err(BuildError::TimedOut(timeout)),
        ProcessEnd::OverMemory(limit) => Err(BuildError::Failed(memory_kill_reason(limit))),
        ProcessEnd::Exited(_) => {
            // Warnings come first and are frequent; the error is at the end.
            let last = &lines[lines.len().saturating_sub(SHOWN_LINES)..];
            Err(BuildError::Failed(last.join("\n")))
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
            let mut built = BuildOutput::default();
            built.note_cargo_message(line);
            built
        };
        let built = noted(&line("compiler-artifact", "bench", r#""/t/a-1""#));
        assert_eq!(built.manifests, [PathBuf::from("/p/Cargo.toml")].into());
        let expected = BenchExecutable {
            bench: "a".to_owned(),
            path: PathBuf::from("/t/a-1"),
            root: PathBuf::from("/p"),
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
    fn features_reach_cargo() {
        let (benches, features) = (["a".to_owned()], ["x".to_owned(), "y,z".to_owned()]);
        let targets =
            BuildTargets { benches: &benches, package: None, profile: "dev", features: &features };
        let command = cargo_bench_command(targets);
        let arguments: Vec<_> = command.get_args().filter_map(|it| it.to_str()).collect();
        let line = "bench --no-run --message-format=json-render-diagnostics --profile dev \
                    --features x --features y,z --bench a";
        assert_eq!(arguments.join(" "), line);
    }

    #[test]
    fn progress_is_read_between_the_lines_of_cargo() {
        let text = "   Compiling syn v2.0.119\n    Building [=> ] 3/83: syn, quote   \r    Building \
                    [==>] 10/83: syn\rerror: no\n\nlast";
        let progress_lines: Vec<String> = progress_lines(text.as_bytes()).collect();
        let progress: Vec<_> =
            progress_lines.iter().filter_map(|it| BuildProgress::parse(it)).collect();
        assert_eq!(progress, [3, 10].map(|done| BuildProgress { done, all: 83 }));
        let rest: Vec<&str> = progress_lines
            .iter()
            .map(String::as_str)
            .filter(|it| BuildProgress::parse(it).is_none())
            .collect();
        assert_eq!(rest, ["   Compiling syn v2.0.119", "error: no", "", "last"]);
        for other in ["Building x", "Building [=> ]", "Building [=> ] 1 of 2: x", ""] {
            assert_eq!(BuildProgress::parse(other), None);
        }
    }
}
