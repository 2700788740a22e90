//! From a side's sources, or a folder of executables, to bench executables that take orders.

use kernelgate::record::text;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::Deserialize;

use super::CompareError;
use super::mark;
use super::process::{self, Ended, Running};
use kernelgate::record::file::{Record as _, content_hash};
use kernelgate::record::{Order, order};

/// Lines of cargo that an error shows.
const SHOWN_LINES: usize = 30;
/// An executable that does not answer by then takes no orders.
const PATIENCE: Duration = Duration::from_secs(20);
/// A build that takes longer is stuck.
const BUILD_PATIENCE: Duration = Duration::from_secs(4 * 3600);

/// What cargo says of an executable that it built; other messages lack the fields.
#[derive(Deserialize)]
struct Message {
    reason: String,
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// A bench executable in its side's folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Executable {
    /// File name below `bin/`: the bench's name.
    pub bench: String,
    /// Content hash.
    pub hash: String,
}

/// The executables of a side.
#[derive(Debug, Clone, Default)]
pub struct Executables {
    /// Those that take orders, by name.
    pub ours: BTreeMap<String, Executable>,
    /// Executables without this harness, by name, with the reason for leaving them alone.
    pub foreign: BTreeMap<String, String>,
    /// Every name that was found, wanted or not.
    pub names: Vec<String>,
}

/// What to build.
pub struct Build<'a> {
    /// Folder of the side's manifest below `src/`.
    pub package: &'a Path,
    /// Only these bench targets; all where there are none.
    pub benches: &'a [String],
    /// Cargo's profile.
    pub profile: &'a str,
    /// "base main (1a2b3c4d)", for messages.
    pub label: &'a str,
}

/// Builds the benches of `side/src` into `side/target`; returns their paths by name.
///
/// # Errors
/// When cargo fails: the error holds what it said last.
pub fn build(
    side: &Path,
    what: &Build<'_>,
    running: &Running,
    said: impl Fn(&str) + Send,
) -> Result<BTreeMap<String, PathBuf>, CompareError> {
    let manifest = side.join("src").join(what.package).join("Cargo.toml");
    if !manifest.is_file() {
        let name = what.package.join("Cargo.toml");
        return Err(CompareError::Usage(format!("{} has no {}", what.label, name.display())));
    }
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["bench", "--no-run", "--message-format=json-render-diagnostics", "--profile", what.profile]);
    command.arg("--manifest-path").arg(&manifest);
    if what.benches.is_empty() {
        command.arg("--benches");
    }
    what.benches.iter().for_each(|bench| {
        command.args(["--bench", bench]);
    });
    command.current_dir(manifest.parent().unwrap_or(side)).env("CARGO_TARGET_DIR", side.join("target"));
    command.env_remove("CARGO_MANIFEST_DIR").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let start = |cause| CompareError::Usage(format!("failed to run cargo: {cause}"));
    let (stdout, stderr) = running.start(&mut command).map_err(start)?;
    let (built, lines) = std::thread::scope(|scope| {
        let lines = scope.spawn(move || {
            let mut lines = Vec::new();
            for line in stderr.into_iter().flat_map(|stderr| BufReader::new(stderr).lines().map_while(Result::ok)) {
                said(line.trim());
                lines.push(line);
            }
            lines
        });
        let mut built = BTreeMap::new();
        for line in stdout.into_iter().flat_map(|stdout| BufReader::new(stdout).lines().map_while(Result::ok)) {
            built.extend(bench_of(&line));
        }
        (built, lines.join().unwrap_or_default())
    });
    let ended = running.finish(BUILD_PATIENCE).map_err(start)?;
    if matches!(ended, Ended::Exited(status) if status.success()) {
        return Ok(built);
    }
    // Warnings come first and often; what matters is at the end.
    let last = &lines[lines.len().saturating_sub(SHOWN_LINES)..];
    Err(CompareError::Usage(format!("{} does not build; cargo's last lines:\n{}", what.label, last.join("\n"))))
}

/// Name and path of the bench executable that a line of cargo is about.
fn bench_of(line: &str) -> Option<(String, PathBuf)> {
    let message: Message = serde_json::from_str(line).ok()?;
    let target = message.target?;
    let bench = message.reason == "compiler-artifact" && target.kind.iter().any(|kind| kind == "bench");
    message.executable.filter(|_| bench).map(|path| (target.name, path))
}

/// The executables in a folder, and in its `deps/`, by name without cargo's hash; of several the newest.
///
/// # Errors
/// When it cannot be read.
pub fn prebuilt(folder: &Path) -> Result<BTreeMap<String, PathBuf>, CompareError> {
    let mut newest: BTreeMap<String, (std::time::SystemTime, PathBuf)> = BTreeMap::new();
    let entries = std::fs::read_dir(folder).map_err(|cause| CompareError::io("read", folder, &cause))?;
    let below = std::fs::read_dir(folder.join("deps")).into_iter().flatten();
    for entry in entries.chain(below).flatten() {
        let (path, Ok(facts)) = (entry.path(), entry.metadata()) else { continue };
        if let (Some(name), Ok(modified)) = (executable_name(&path, &facts), facts.modified())
            && newest.get(&name).is_none_or(|(earlier, _)| *earlier < modified)
        {
            newest.insert(name, (modified, path));
        }
    }
    Ok(newest.into_iter().map(|(name, (_, path))| (name, path)).collect())
}

fn executable_name(path: &Path, facts: &std::fs::Metadata) -> Option<String> {
    let name = path.file_name()?.to_str().filter(|name| text::check_name(name).is_ok())?;
    #[cfg(unix)]
    let runs = std::os::unix::fs::PermissionsExt::mode(&facts.permissions()) & 0o111 != 0 && !name.contains('.');
    #[cfg(not(unix))]
    let runs = name.ends_with(".exe");
    if !runs || !facts.is_file() {
        return None;
    }
    let name = name.trim_end_matches(".exe");
    let hashed = name.rsplit_once('-').filter(|(_, hash)| hash.len() == 16 && hash.chars().all(|c| c.is_ascii_hexdigit()));
    Some(hashed.map_or(name, |(stem, _)| stem).to_owned())
}

/// Puts executables into `side/bin` and asks each whether it takes orders. To ask is to run it, so
/// only those are asked whose file holds the mark of this harness, and those wanted by name.
///
/// # Errors
/// When one of this harness knows no trials ([`CompareError::Refused`]) or cannot be copied.
pub fn install(
    side: &Path,
    found: &BTreeMap<String, PathBuf>,
    label: &str,
    wanted: &[String],
) -> Result<Executables, CompareError> {
    let bin = side.join("bin");
    let io = |path: &Path, cause: std::io::Error| CompareError::io("write", path, &cause);
    std::fs::create_dir_all(&bin).map_err(|cause| io(&bin, cause))?;
    let mut executables = Executables { names: found.keys().cloned().collect(), ..Executables::default() };
    for (bench, path) in found.iter().filter(|(bench, _)| wanted.is_empty() || wanted.contains(bench)) {
        let marked = mark::is_in(path);
        if let Some(reason) = unmarked(&marked, bench).filter(|_| wanted.is_empty()) {
            executables.foreign.insert(bench.clone(), reason);
            continue;
        }
        match protocol(path) {
            Some(version) if version >= Order::VERSION => {}
            None if !matches!(marked, Ok(true)) => {
                let reason = "asked by --bench, it did not answer as a bench of this harness does";
                executables.foreign.insert(bench.clone(), reason.to_owned());
                continue;
            }
            version => {
                return Err(CompareError::Refused {
                    field: "trial protocol".to_owned(),
                    side: format!("{label}, bench `{bench}`"),
                    found: version.map_or_else(|| "none".to_owned(), |version| version.to_string()),
                    wanted: Order::VERSION.to_string(),
                });
            }
        }
        let at = bin.join(bench);
        // A link where the file system allows, so that a later build does not change what is compared.
        let _ = std::fs::remove_file(&at);
        if std::fs::hard_link(path, &at).is_err() {
            std::fs::copy(path, &at).map_err(|cause| io(&at, cause))?;
        }
        let hash = content_hash(&at).map_err(|error| CompareError::Usage(format!("failed to {error}")))?;
        executables.ours.insert(bench.clone(), Executable { bench: bench.clone(), hash });
    }
    Ok(executables)
}

/// Why an executable is not run to ask it; none where its file holds the mark.
fn unmarked(marked: &std::io::Result<bool>, bench: &str) -> Option<String> {
    let why = match marked {
        Ok(true) => return None,
        Ok(false) => "its file has no mark of this harness".to_owned(),
        Err(cause) => format!("its file cannot be read ({cause})"),
    };
    Some(format!("{why}, so it was not run; `--bench {bench}` runs it all the same"))
}

/// What an executable answers when asked for its protocol.
fn protocol(path: &Path) -> Option<u64> {
    let output = tempfile::NamedTempFile::new().ok()?;
    let mut command = Command::new(path);
    // A bench of another kind lists its cases, or ends at a flag that it does not know; it measures nothing.
    command.arg("--list").env("KERNELGATE_TRIAL", order::QUESTION).stdin(Stdio::null()).stderr(Stdio::null());
    command.stdout(output.reopen().ok()?);
    match process::wait(&mut command, PATIENCE, &Running::default()).ok()? {
        Ended::Exited(status) if status.success() => order::parse_answer(&std::fs::read_to_string(output.path()).ok()?),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bench_executables_are_found_among_cargos_messages() {
        let line = |reason: &str, kind: &str, executable: &str| {
            format!(r#"{{"reason":"{reason}","target":{{"name":"a","kind":["{kind}"]}},"executable":{executable},"fresh":true}}"#)
        };
        let found = bench_of(&line("compiler-artifact", "bench", r#""/t/a-1""#)).unwrap();
        assert_eq!(found, ("a".to_owned(), PathBuf::from("/t/a-1")));
        for other in [
            line("compiler-artifact", "lib", r#""/t/a-1""#),
            line("compiler-artifact", "bench", "null"),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
            "not json".to_owned(),
        ] {
            assert_eq!(bench_of(&other), None);
        }
    }

    #[cfg(unix)]
    #[test]
    fn what_has_no_mark_is_run_only_where_it_is_named() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (side, ran) = (folder.path().join("side"), folder.path().join("ran"));
        let script = folder.path().join("innocent");
        // It mentions the variable that executables of an earlier version are known by.
        let text = format!("#!/bin/sh\n: KERNELGATE_SESSION\necho > {}\n", ran.display());
        std::fs::write(&script, text).unwrap();
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        let found = prebuilt(folder.path()).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["innocent"]);
        let installed = install(&side, &found, "base", &[]).unwrap();
        assert!(!ran.exists() && installed.ours.is_empty());
        let why = &installed.foreign["innocent"];
        assert!(why.contains("no mark") && why.contains("`--bench innocent`"), "{why}");
        let installed = install(&side, &found, "base", &["innocent".to_owned()]).unwrap();
        assert!(ran.exists() && installed.ours.is_empty());
        assert!(installed.foreign["innocent"].contains("did not answer"));
    }

    #[cfg(unix)]
    #[test]
    fn prebuilt_executables_lose_their_hash() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("deps")).unwrap();
        for (name, mode) in [("attention-0123456789abcdef", 0o755), ("deps/two", 0o755), ("three.d", 0o755), ("four", 0o644)] {
            let path = folder.path().join(name);
            std::fs::write(&path, "x").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        assert_eq!(prebuilt(folder.path()).unwrap().into_keys().collect::<Vec<_>>(), ["attention", "two"]);
    }
}
