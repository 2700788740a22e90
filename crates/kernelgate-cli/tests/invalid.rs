//! Tests of invalid files and flags: each case is a file in `invalid/` whose name states the fault.
//! Snapshots store the error messages of the invalid inputs.

use std::path::{Path, PathBuf};

use crate::outputs::{assert_text_snapshot, exit_code_and_both_streams};
use crate::package::TempPackage;

/// The corpus.
fn path_in_invalid_corpus(below: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/invalid").join(below)
}

/// A package with a valid record and a valid baseline `main`.
fn package_with_valid_records() -> TempPackage {
    let package = TempPackage::new();
    copy_file_creating_folders(
        &path_in_invalid_corpus("baseline.json"),
        &path_of_main_baseline(&package),
    );
    copy_file_creating_folders(
        &path_in_invalid_corpus("record.json"),
        &package.run_record_path("s2"),
    );
    package
}

fn path_of_main_baseline(package: &TempPackage) -> PathBuf {
    package.package_path("baselines/amd-epyc/main.json")
}

fn copy_file_creating_folders(file: &Path, at: &Path) {
    std::fs::create_dir_all(at.parent().unwrap()).unwrap();
    std::fs::copy(file, at).unwrap();
}

/// Runs kernelgate on each file of a folder of invalid inputs. kernelgate must refuse each file
/// with exit code 2 and leave it unchanged.
fn assert_each_file_is_refused(
    kind: &str,
    outcome: impl Fn(&TempPackage, &Path) -> crate::package::ProcessOutcome,
) {
    let mut files: Vec<PathBuf> = std::fs::read_dir(path_in_invalid_corpus(kind))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() > 10, "{files:?}");
    let mut messages = String::new();
    for file in files {
        let package = package_with_valid_records();
        let outcome = outcome(&package, &file);
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(outcome.exit_code, Some(2), "{name}: {}", outcome.stdout_and_stderr());
        assert_eq!(outcome.stdout, "", "{name}");
        messages += &format!("{name}: {}\n", exit_code_and_both_streams(&outcome));
    }
    let messages = messages.replace("exit 2\n-- stdout\n\n-- stderr\n", "");
    assert_text_snapshot("invalid", kind, &messages);
}

#[test]
fn the_files_without_a_fault_are_accepted() {
    let gate = package_with_valid_records().gate_last_run("main --relative 10");
    assert_eq!(gate.assert_exit(3).json_verdicts(), ["inconclusive"]);
}

#[test]
fn invalid_baselines_are_refused_by_file_and_field() {
    assert_each_file_is_refused("baseline", |package, file| {
        copy_file_creating_folders(file, &path_of_main_baseline(package));
        let outcome = package.run_kernelgate("gate --baseline main");
        let same =
            std::fs::read(path_of_main_baseline(package)).unwrap() == std::fs::read(file).unwrap();
        assert!(same, "{} was changed", file.display());
        outcome
    });
}

#[test]
fn invalid_records_are_refused_by_file_and_field() {
    assert_each_file_is_refused("record", |package, file| {
        copy_file_creating_folders(file, &package.run_record_path("s2"));
        package.run_kernelgate("gate --baseline main")
    });
}

#[test]
fn invalid_rules_are_refused_by_line_and_key() {
    assert_each_file_is_refused("rules", |package, file| {
        copy_file_creating_folders(file, &package.package_path("kernelgate.toml"));
        package.run_kernelgate("gate --baseline main")
    });
}

#[test]
fn invalid_flags_are_refused_by_name() {
    assert_each_file_is_refused("flags", |package, file| {
        package.run_kernelgate(&std::fs::read_to_string(file).unwrap())
    });
}
