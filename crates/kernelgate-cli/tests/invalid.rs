//! Invalid files and flags: each is a file of `invalid/` whose name states the fault. The messages are
//! snapshots.

use std::path::{Path, PathBuf};

use crate::outputs::{both_streams, snapshot};
use crate::package::Package;

/// The corpus.
fn corpus(below: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/invalid").join(below)
}

/// A package with a valid record and a valid baseline `main`.
fn package() -> Package {
    let package = Package::new();
    place(&corpus("baseline.json"), &baseline(&package));
    place(&corpus("record.json"), &package.record("s2"));
    package
}

fn baseline(package: &Package) -> PathBuf {
    package.path("baselines/amd-epyc/main.json")
}

fn place(file: &Path, at: &Path) {
    std::fs::create_dir_all(at.parent().unwrap()).unwrap();
    std::fs::copy(file, at).unwrap();
}

/// Runs the program for each file of a folder of the corpus. Each is refused with exit code 2 and
/// stays as it is.
fn refuse_each(kind: &str, outcome: impl Fn(&Package, &Path) -> crate::package::Outcome) {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(corpus(kind)).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() > 10, "{files:?}");
    let mut messages = String::new();
    for file in files {
        let package = package();
        let outcome = outcome(&package, &file);
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(outcome.code, Some(2), "{name}: {}", outcome.all());
        assert_eq!(outcome.stdout, "", "{name}");
        messages += &format!("{name}: {}\n", both_streams(&outcome));
    }
    let messages = messages.replace("exit 2\n-- stdout\n\n-- stderr\n", "");
    snapshot("invalid", kind, &messages);
}

#[test]
fn the_files_without_a_fault_are_accepted() {
    let gate = package().gate("main --relative 10");
    assert_eq!(gate.exits(3).verdicts(), ["inconclusive"]);
}

#[test]
fn invalid_baselines_are_refused_by_file_and_field() {
    refuse_each("baseline", |package, file| {
        place(file, &baseline(package));
        let outcome = package.kernelgate("gate --baseline main");
        let same = std::fs::read(baseline(package)).unwrap() == std::fs::read(file).unwrap();
        assert!(same, "{} was changed", file.display());
        outcome
    });
}

#[test]
fn invalid_records_are_refused_by_file_and_field() {
    refuse_each("record", |package, file| {
        place(file, &package.record("s2"));
        package.kernelgate("gate --baseline main")
    });
}

#[test]
fn invalid_rules_are_refused_by_line_and_key() {
    refuse_each("rules", |package, file| {
        place(file, &package.path("kernelgate.toml"));
        package.kernelgate("gate --baseline main")
    });
}

#[test]
fn invalid_flags_are_refused_by_name() {
    refuse_each("flags", |package, file| {
        package.kernelgate(&std::fs::read_to_string(file).unwrap())
    });
}
