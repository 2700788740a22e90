//! Tests with two packages that share a target folder, and with it the folder of runs. Both
//! packages of these tests have the fixture's bench, with equal case ids.

#![cfg(unix)]

use std::path::Path;
use std::process::Command;

use crate::package::{ProcessOutcome, TempPackage, lines_with_word};
use serde_json::Value;

/// A workspace target folder that is shared by the packages `one` and `two`.
struct PackagesWithSharedTarget {
    package: TempPackage,
}

impl PackagesWithSharedTarget {
    fn new() -> Self {
        let package = TempPackage::new();
        for name in ["one", "two"] {
            let manifest =
                format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n");
            std::fs::create_dir_all(package.package_path(name).join("src")).unwrap();
            std::fs::write(package.package_path(name).join("Cargo.toml"), manifest).unwrap();
            std::fs::write(package.package_path(name).join("src/lib.rs"), "").unwrap();
        }
        Self { package }
    }

    fn run_in_package(&self, name: &str, mut command: Command) -> ProcessOutcome {
        let folder = self.package.package_path(name);
        command.current_dir(&folder).env("CARGO_MANIFEST_DIR", &folder);
        command.output().unwrap().into()
    }

    /// Runs the bench of a package, and sets its times in the record.
    fn run_bench_and_set_times(&self, name: &str, session: &str, time_ns: f64) {
        let command = self.package.bench_command(session, "n64");
        self.run_in_package(name, command).assert_exit(0);
        self.package.set_record_times(&self.package.run_record_path(session), time_ns);
    }

    fn run_kernelgate(&self, name: &str, line: &str) -> ProcessOutcome {
        let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
        self.run_in_package(name, self.package.package_command(program, line))
    }

    /// Judges the last run of a package by its baseline `main`.
    fn judge_against_main_baseline(&self, name: &str, flags: &str) -> ProcessOutcome {
        self.run_kernelgate(name, &format!("gate --baseline main {flags}"))
    }

    fn edit_run_record(&self, session: &str, change: impl FnOnce(&mut Value)) -> Value {
        let mut run = self.package.read_run_record(session);
        change(&mut run);
        std::fs::write(self.package.run_record_path(session), run.to_string()).unwrap();
        run
    }
}

#[test]
fn the_last_session_is_that_of_the_package() {
    let shared = PackagesWithSharedTarget::new();
    shared.run_bench_and_set_times("one", "s1", 1e6);
    shared.run_kernelgate("one", "baseline add main").assert_exit(0);
    shared.run_bench_and_set_times("one", "s2", 1e6);
    // A later, slower run of the package `two`, which must not be judged for the package `one`.
    shared.run_bench_and_set_times("two", "s3", 9e6);
    assert_eq!(shared.package.read_run_record("s3")["package"]["name"], "two");
    assert_eq!(
        shared.judge_against_main_baseline("one", "--format json").assert_exit(0).json_verdicts(),
        ["unchanged"]
    );
    let runs = |name: &str| {
        shared.run_kernelgate(name, "runs --format json").stdout_as_json()[0]["session"].take()
    };
    assert_eq!((runs("one"), runs("two")), ("s2".into(), "s3".into()));
    let folder = shared.package.run_record_path("s3").parent().unwrap().display().to_string();
    insta::assert_snapshot!(shared.judge_against_main_baseline("two", "").refusal_message(2), @"error: no baseline `main` for DEVICE in FOLDER/two/baselines (found none)");
    insta::assert_snapshot!(shared.judge_against_main_baseline("one", "--last 3").refusal_message(2), @"error: 2 sessions in FOLDER/target/kernelgate/runs, not 3: run `cargo bench` again");
    let named = shared.judge_against_main_baseline("one", &format!("--session {folder}"));
    insta::assert_snapshot!(named.refusal_message(2), @"error: no run of package one (Cargo.toml) in FOLDER/target/kernelgate/runs/s3, only of two (Cargo.toml): run `cargo bench` in the package first, or call the program where the other package lies");
}

#[test]
fn a_session_of_both_packages_gives_each_its_own_runs() {
    let shared = PackagesWithSharedTarget::new();
    shared.run_bench_and_set_times("one", "s1", 1e6);
    shared.run_kernelgate("one", "baseline add main").assert_exit(0);
    shared.run_bench_and_set_times("one", "both", 1e6);
    shared.run_bench_and_set_times("two", "s3", 9e6);
    // Makes a session with runs of two packages, as `cargo bench --workspace` writes it.
    let other = shared.edit_run_record("s3", |run| run["session"] = "both".into());
    let both = shared.package.run_record_path("both").with_file_name("fixture-2.json");
    std::fs::write(both, other.to_string()).unwrap();
    std::fs::remove_dir_all(shared.package.run_record_path("s3").parent().unwrap()).unwrap();
    let gate = shared.judge_against_main_baseline("one", "--format json");
    assert_eq!(gate.assert_exit(0).json_verdicts(), ["unchanged"]);
    let apart = lines_with_word(&gate.stderr, "package two");
    insta::assert_snapshot!(apart, @"1 run of package two (Cargo.toml) not used: this is package one (Cargo.toml)");
    let report = shared.run_kernelgate("one", "report");
    assert_eq!(lines_with_word(&report.assert_exit(0).stdout_and_stderr(), "package two"), apart);
    let outcome = shared.run_kernelgate("one", "history --format json");
    assert_eq!(lines_with_word(&outcome.assert_exit(0).stderr, "package two"), apart);
    let history = outcome.stdout_as_json();
    let times = |history: &Value| history["points"][0]["runs_ns"].as_array().unwrap().len();
    let series = history["histories"].as_array().unwrap();
    assert!(!series.is_empty());
    assert!(series.iter().all(|it| times(it) == 2 && it["package"] == "one (Cargo.toml)"));
}

#[test]
fn a_run_without_a_recorded_package_counts_with_a_note() {
    let shared = PackagesWithSharedTarget::new();
    shared.run_bench_and_set_times("one", "s1", 1e6);
    shared.run_kernelgate("one", "baseline add main").assert_exit(0);
    shared.run_bench_and_set_times("two", "s2", 1e6);
    shared.edit_run_record("s2", |run| drop(run.as_object_mut().unwrap().remove("package")));
    let gate = shared.judge_against_main_baseline("one", "--format json");
    assert_eq!(gate.assert_exit(0).json_verdicts(), ["unchanged"]);
    insta::assert_snapshot!(lines_with_word(&gate.stderr, "package one"), @"1 run without a recorded package counted as of package one (Cargo.toml)");
}
