//! Two packages that share a target folder, and with it the folder of runs. Both have the fixture's
//! bench, with the same cases.

#![cfg(unix)]

use std::path::Path;
use std::process::Command;

use crate::package::{Outcome, Package, lines_with};
use serde_json::Value;

/// The packages `one` and `two`.
struct Shared {
    package: Package,
}

impl Shared {
    fn new() -> Self {
        let package = Package::new();
        for name in ["one", "two"] {
            let manifest =
                format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n");
            std::fs::create_dir_all(package.path(name).join("src")).unwrap();
            std::fs::write(package.path(name).join("Cargo.toml"), manifest).unwrap();
            std::fs::write(package.path(name).join("src/lib.rs"), "").unwrap();
        }
        Self { package }
    }

    fn run_in(&self, name: &str, mut command: Command) -> Outcome {
        let folder = self.package.path(name);
        command.current_dir(&folder).env("CARGO_MANIFEST_DIR", &folder);
        command.output().unwrap().into()
    }

    /// Runs the bench of a package, and sets its times in the record.
    fn bench(&self, name: &str, session: &str, time_ns: f64) {
        let command = self.package.bench_command(session, "n64");
        self.run_in(name, command).exits(0);
        self.package.set_times(&self.package.record(session), time_ns);
    }

    fn kernelgate(&self, name: &str, line: &str) -> Outcome {
        let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
        self.run_in(name, self.package.command(program, line))
    }

    /// Judges the last run of a package by its baseline `main`.
    fn gate(&self, name: &str, flags: &str) -> Outcome {
        self.kernelgate(name, &format!("gate --baseline main {flags}"))
    }

    fn edit(&self, session: &str, change: impl FnOnce(&mut Value)) -> Value {
        let mut run = self.package.run(session);
        change(&mut run);
        std::fs::write(self.package.record(session), run.to_string()).unwrap();
        run
    }
}

#[test]
fn the_last_session_is_that_of_the_package() {
    let shared = Shared::new();
    shared.bench("one", "s1", 1e6);
    shared.kernelgate("one", "baseline add main").exits(0);
    shared.bench("one", "s2", 1e6);
    // A later and slower run.
    shared.bench("two", "s3", 9e6);
    assert_eq!(shared.package.run("s3")["package"]["name"], "two");
    assert_eq!(shared.gate("one", "--format json").exits(0).verdicts(), ["unchanged"]);
    let runs =
        |name: &str| shared.kernelgate(name, "runs --format json").json()[0]["session"].take();
    assert_eq!((runs("one"), runs("two")), ("s2".into(), "s3".into()));
    let folder = shared.package.record("s3").parent().unwrap().display().to_string();
    insta::assert_snapshot!(shared.gate("two", "").refusal(2), @"error: no baseline `main` for DEVICE in FOLDER/two/baselines (found none)");
    insta::assert_snapshot!(shared.gate("one", "--last 3").refusal(2), @"error: 2 sessions in FOLDER/target/kernelgate/runs, not 3: run `cargo bench` again");
    let named = shared.gate("one", &format!("--session {folder}"));
    insta::assert_snapshot!(named.refusal(2), @"error: no run of package one (Cargo.toml) in FOLDER/target/kernelgate/runs/s3, only of two (Cargo.toml): run `cargo bench` in the package first, or call the program where the other package lies");
}

#[test]
fn a_session_of_both_packages_gives_each_its_own_runs() {
    let shared = Shared::new();
    shared.bench("one", "s1", 1e6);
    shared.kernelgate("one", "baseline add main").exits(0);
    shared.bench("one", "both", 1e6);
    shared.bench("two", "s3", 9e6);
    // A session as `cargo bench --workspace` writes it.
    let other = shared.edit("s3", |run| run["session"] = "both".into());
    let both = shared.package.record("both").with_file_name("fixture-2.json");
    std::fs::write(both, other.to_string()).unwrap();
    std::fs::remove_dir_all(shared.package.record("s3").parent().unwrap()).unwrap();
    let gate = shared.gate("one", "--format json");
    assert_eq!(gate.exits(0).verdicts(), ["unchanged"]);
    let apart = lines_with(&gate.stderr, "package two");
    insta::assert_snapshot!(apart, @"1 run of package two (Cargo.toml) not used: this is package one (Cargo.toml)");
    let report = shared.kernelgate("one", "report");
    assert_eq!(lines_with(&report.exits(0).all(), "package two"), apart);
    let outcome = shared.kernelgate("one", "history --format json");
    assert_eq!(lines_with(&outcome.exits(0).stderr, "package two"), apart);
    let history = outcome.json();
    let times = |history: &Value| history["points"][0]["runs_ns"].as_array().unwrap().len();
    let series = history["histories"].as_array().unwrap();
    assert!(!series.is_empty());
    assert!(series.iter().all(|it| times(it) == 2 && it["package"] == "one (Cargo.toml)"));
}

#[test]
fn a_run_without_a_recorded_package_counts_with_a_note() {
    let shared = Shared::new();
    shared.bench("one", "s1", 1e6);
    shared.kernelgate("one", "baseline add main").exits(0);
    shared.bench("two", "s2", 1e6);
    shared.edit("s2", |run| drop(run.as_object_mut().unwrap().remove("package")));
    let gate = shared.gate("one", "--format json");
    assert_eq!(gate.exits(0).verdicts(), ["unchanged"]);
    insta::assert_snapshot!(lines_with(&gate.stderr, "package one"), @"1 run without a recorded package counted as of package one (Cargo.toml)");
}
