//! `kernelgate history` from outside: stores that are moved, merged and pruned, that two programs
//! write at once, and that a killed program left.

#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::package::Package;
use kernelgate::record::{CaseRecord, Environment, ProcessRun, Provenance, file};

const CASE: &str = "w/f/n1/cpu/hot";

/// Writes a run record, `number` minutes after the first; only the name of the device is known.
fn write(folder: &Path, number: usize, commit: Option<String>) -> PathBuf {
    let time_ns = if number >= 12 { 1.1e6 } else { 1e6 };
    let run = ProcessRun {
        started: format!("2026-01-01T{:02}:{:02}:00.000Z", number / 60, number % 60),
        cases: [(CASE.to_owned(), CaseRecord::untimed_samples(vec![time_ns; 10]))].into(),
        complete: true,
        ..ProcessRun::start_now(
            "bench",
            &format!("s{number}"),
            Environment { machine: Some("host".to_owned()), ..Environment::cpu() },
            Provenance { commit, dirty: false },
        )
    };
    let path = folder.join(&run.session).join("bench.json");
    file::write(&path, &run).unwrap();
    path
}

fn runs_in(package: &Package, line: &str) -> usize {
    let outcome = package.kernelgate(&format!("history --format json {line}"));
    let json: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    let histories = json["histories"].as_array().unwrap().iter();
    let points = histories.flat_map(|history| history["points"].as_array().unwrap());
    points.map(|point| point["runs_ns"].as_array().unwrap().len()).sum()
}

#[test]
fn times_are_shown_over_commits_with_the_change() {
    let package = Package::new();
    package.kernelgate("history").expect(2, &["no run in ", "run `cargo bench` first"]);
    let git = |line: &str| {
        let line = format!("-c user.name=a -c user.email=a@b {line}");
        let output = package.command(Path::new("git"), &line).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    git("init --quiet --initial-branch=main");
    for number in 0..20 {
        git(&format!("commit --quiet --allow-empty -m {number}"));
        let commit = git("rev-parse HEAD");
        write(&package.path("target/kernelgate/runs"), number, Some(commit));
    }
    let (after, first) = (git("rev-parse --short=8 HEAD~8"), git("rev-parse --short=8 HEAD~7"));
    let outcome = package.kernelgate("history");
    let change = format!("after {after}, up to {first} (that commit)");
    outcome.expect(0, &[CASE, "+10.0%", &change, "in the order of the commits' history", "▁", "█"]);
    assert!(outcome.stdout.lines().all(|line| line.chars().count() <= 100), "{}", outcome.stdout);
    package.kernelgate("history --branch HEAD~9").expect(0, &["no change of the level"]);
    package.kernelgate("history --branch nowhere").expect(2, &["no revision `nowhere`"]);
    package.kernelgate("history (").expect(2, &["is not a regular expression"]);
    let missing = package.kernelgate("history other");
    missing.expect(2, &["error: no run of a case `other` in ", "lists all cases"]);
    assert_eq!(missing.stdout, "");
    package.write_rules("[renamed]\n\"w/f/n1/cpu/hot\" = \"w/f/new\"\n");
    package.kernelgate("history w/f/new").expect(0, &["formerly w/f/n1/cpu/hot", "+10.0%"]);
    package.kernelgate(&format!("history --as w/f/new={CASE}")).expect(2, &["in a circle"]);
}

/// A file with the name of a record that is not one is reported, and an import without records is
/// an error with a reason.
#[test]
fn an_import_reports_skipped_files() {
    let package = Package::new();
    let from = package.path("from");
    std::fs::create_dir_all(from.join("empty")).unwrap();
    package
        .kernelgate("history import from --store kept")
        .expect(2, &["0 new records", "error: no record in what was named"]);
    let fifo = std::process::Command::new("mkfifo").arg(from.join("pipe.json")).status();
    assert!(fifo.unwrap().success());
    let record = write(&package.path("elsewhere"), 0, None);
    std::os::unix::fs::symlink(&record, from.join("link.json")).unwrap();
    std::os::unix::fs::symlink("loop.json", from.join("loop.json")).unwrap();
    let expected = [
        "link.json: links are not followed: name the file itself",
        "loop.json: links are not followed",
        "pipe.json: it is no file but a device, a pipe or a socket",
    ];
    package.kernelgate("history import from --store kept").expect(2, &expected);
    let line = "history import from/link.json --store kept";
    package.kernelgate(line).expect(0, &["1 new records, 0 known"]);
}

#[test]
fn a_missing_store_is_not_made_and_a_read_only_store_is_read() {
    let package = Package::new();
    for verb in ["history --store typo", "history prune --keep 1 --store typo"] {
        package.kernelgate(verb).expect(2, &["typo is not a store"]);
        assert!(!package.path("typo").exists());
    }
    (0..3).for_each(|number| drop(write(&package.path("kept/runs"), number, None)));
    assert_eq!(runs_in(&package, "--store kept"), 3);
    // A file of another program takes the index's name, then a folder.
    let index = package.path("kept/history.index");
    std::fs::write(&index, "SQLite format 3").unwrap();
    assert_eq!(runs_in(&package, "--store kept"), 3);
    assert!(std::fs::read_to_string(&index).unwrap().starts_with('{'));
    std::fs::remove_file(&index).unwrap();
    std::fs::create_dir(&index).unwrap();
    assert_eq!(runs_in(&package, "--store kept"), 3);
    package.kernelgate("history --store kept").expect(0, &["no index can be written in kept"]);
    // The error is reported once.
    std::fs::write(package.path("kept/imported"), "").unwrap();
    let failed = package.kernelgate("history import kept/runs --store kept");
    let errors = failed.expect(2, &["failed to write"]).stderr.matches("os error").count();
    assert_eq!(errors, 1, "{}", failed.stderr);
}

#[test]
fn stores_are_moved_merged_and_pruned() {
    let package = Package::new();
    let [one, two] = ["one", "two"].map(|name| package.path(name));
    (0..20).for_each(|number| drop(write(&one.join("runs"), number, None)));
    (15..30).for_each(|number| drop(write(&two.join("imported"), number, None)));
    std::fs::write(two.join("imported/s15/notes.json"), "{}").unwrap();
    std::os::unix::fs::symlink(&two, two.join("imported/circle")).unwrap();
    package
        .kernelgate("history merge one two --store all")
        .expect(0, &["30 new records, 5 known", "notes.json: neither a run nor a baseline"]);
    assert_eq!(runs_in(&package, "--store all"), 30);
    package.kernelgate("history merge all --store all").expect(0, &["0 new records, 30 known"]);
    std::fs::rename(package.path("all"), package.path("moved")).unwrap();
    package.kernelgate("history --store moved").expect(0, &["in the order of recorded times"]);
    package
        .kernelgate("history prune --keep 4 --dry-run --store moved")
        .expect(0, &["26 sessions"]);
    assert_eq!(runs_in(&package, "--store moved"), 30);
    package.kernelgate("history prune --keep 4 --store moved").expect(0, &["26 sessions removed"]);
    assert_eq!(runs_in(&package, "--store moved"), 4);
    package.kernelgate("history import nowhere --store x").expect(2, &["failed to read nowhere"]);
    package.kernelgate("history merge moved/imported --store x").expect(2, &["is not a store"]);
    package.kernelgate("history prune --keep 0 --store x").expect(2, &["--keep"]);
}

#[test]
fn a_folder_outside_of_the_target_keeps_the_runs_of_benches() {
    let package = Package::new();
    let kept = package.path("kept");
    let mut bench = package.bench_command("mine", "n64");
    bench.env("KERNELGATE_HISTORY", &kept);
    let output = bench.output().unwrap();
    let messages = String::from_utf8_lossy(&output.stderr);
    // The page is of this package, even if several packages share the runs.
    let page = "draws it in ";
    let page = messages.lines().find_map(|line| line.split_once(page)).unwrap_or_default().1;
    assert!(output.status.success() && !page.starts_with(kept.to_str().unwrap()), "{messages}");
    assert!(page.ends_with("target/kernelgate/report/index.html"), "{messages}");
    assert!(kept.join("runs/mine/fixture.json").is_file());
    let mut history = package.command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), "history");
    let outcome: crate::package::Outcome =
        history.env("KERNELGATE_HISTORY", &kept).output().unwrap().into();
    outcome.expect(0, &[crate::package::CASE]);
}

#[test]
fn two_programs_at_once_and_one_that_is_killed_lose_nothing() {
    let package = Package::new();
    let from = package.path("from");
    std::fs::create_dir_all(package.path("to/imported")).unwrap();
    (0..300).for_each(|number| drop(write(&from, number, None)));
    let start = |line: &str| -> Child {
        let mut command = package.command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), line);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let line = "history import from --store to";
    for after_ms in [20, 60, 120] {
        let mut killed = [start(line), start("history --store to")];
        std::thread::sleep(Duration::from_millis(after_ms));
        for child in &mut killed {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
    let mut both = [start(line), start(line), start("history --store to")];
    assert!(both[..2].iter_mut().all(|child| child.wait().unwrap().success()));
    both[2].wait().unwrap();
    assert_eq!(runs_in(&package, "--store to"), 300);
    package.kernelgate(line).expect(0, &["0 new records, 300 known"]);
    assert!(!package.kernelgate("history --store to").stderr.contains("skipped"));
}
