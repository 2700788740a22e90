//! Tests of `kernelgate history` as a process: stores that are moved, merged and pruned, that two
//! programs write at once, and that a killed program left.

#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::package::{ProcessOutcome, TempPackage};
use kernelgate::record::{
    BenchProcessRun, CaseRecordWithSamples, CommitAndChanges, RunEnvironment, file,
};

const TEST_CASE_ID: &str = "w/f/n1/cpu/hot";

/// Writes a run record that started `number` minutes after midnight; of its device only the name is
/// known.
fn write_numbered_run_record(folder: &Path, number: usize, commit: Option<String>) -> PathBuf {
    let time_ns = if number >= 12 { 1.1e6 } else { 1e6 };
    let run = BenchProcessRun {
        start_time: format!("2026-01-01T{:02}:{:02}:00.000Z", number / 60, number % 60),
        cases: [(
            TEST_CASE_ID.to_owned(),
            CaseRecordWithSamples::example_with_sample_times(vec![time_ns; 10]),
        )]
        .into(),
        ended_normally: true,
        ..BenchProcessRun::empty_run_starting_now(
            "bench",
            &format!("s{number}"),
            RunEnvironment {
                machine_hash: Some("host".to_owned()),
                ..RunEnvironment::environment_of_process_on_cpu()
            },
            CommitAndChanges { commit, dirty: false },
        )
    };
    let path = folder.join(&run.session_name).join("bench.json");
    file::write_record_atomically(&path, &run).unwrap();
    path
}

fn number_of_runs_in_history(package: &TempPackage, line: &str) -> usize {
    let outcome = package.run_kernelgate(&format!("history --format json {line}"));
    let json: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    let histories = json["histories"].as_array().unwrap().iter();
    let points = histories.flat_map(|history| history["points"].as_array().unwrap());
    points.map(|point| point["runs_ns"].as_array().unwrap().len()).sum()
}

#[test]
fn times_are_shown_over_commits_with_the_change() {
    let package = TempPackage::new();
    insta::assert_snapshot!(package.run_kernelgate("history").refusal_message(2), @"error: no run in FOLDER/target/kernelgate: run `cargo bench` first, or `kernelgate history import`");
    let git = |line: &str| {
        let line = format!("-c user.name=a -c user.email=a@b {line}");
        let output = package.package_command(Path::new("git"), &line).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    git("init --quiet --initial-branch=main");
    for number in 0..20 {
        git(&format!("commit --quiet --allow-empty -m {number}"));
        let commit = git("rev-parse HEAD");
        write_numbered_run_record(
            &package.package_path("target/kernelgate/runs"),
            number,
            Some(commit),
        );
    }
    let (after, first) = (git("rev-parse --short=8 HEAD~8"), git("rev-parse --short=8 HEAD~7"));
    let outcome = package.run_kernelgate("history");
    // The test removes the rows of commits, which begin with a hash, so that only the hashes of the
    // level change remain.
    let row = regex::Regex::new(r"(?m)^[0-9a-f]{8} .*\n").unwrap();
    let shown = |outcome: &ProcessOutcome| {
        let text = outcome.text_for_snapshot().replace(&after, "BEFORE").replace(&first, "FIRST");
        row.replace_all(&text, "").into_owned()
    };
    insta::assert_snapshot!(shown(&outcome), @r"
    exit 0
    w/f/n1/cpu/hot
    DEVICE; host HOST
    ▁▁▁▁▁▁▁▁▁▁▁▁████████
    commit  first run  runs  time  from  to  change
    BEFORE  DAY  1  N ms  N ms  N ms
    FIRST  DAY  1  N ms  N ms  N ms  +10.0%
    +10.0% (+10.0% to +10.0%), confidence 99.6 %: after BEFORE, up to FIRST (that commit)
    in the order of the commits' history
    ");
    assert!(outcome.stdout.lines().all(|line| line.chars().count() <= 100), "{}", outcome.stdout);
    let earlier = package
        .run_kernelgate("history --branch HEAD~9 --format json")
        .assert_exit(0)
        .stdout_as_json();
    assert_eq!(earlier["histories"][0]["changes"], serde_json::json!([]), "{earlier}");
    let mut refusals = String::new();
    for flags in ["--branch nowhere", "(", "other"] {
        refusals += &format!(
            "{}\n",
            package.run_kernelgate(&format!("history {flags}")).refusal_message(2)
        );
    }
    insta::assert_snapshot!(refusals, @r"
    error: no revision `nowhere` in FOLDER; its branches are main
    error: filter `(` is not a regular expression: unclosed group
    error: no run of a case `other` in FOLDER/target/kernelgate: `kernelgate history` lists all cases
    ");
    package.write_rules_file("[renamed]\n\"w/f/n1/cpu/hot\" = \"w/f/new\"\n");
    let renamed = package.run_kernelgate("history w/f/new");
    insta::assert_snapshot!(shown(&renamed), @r"
    exit 0
    w/f/new
    DEVICE; host HOST
    ▁▁▁▁▁▁▁▁▁▁▁▁████████
    formerly w/f/n1/cpu/hot
    commit  first run  runs  time  from  to  change
    BEFORE  DAY  1  N ms  N ms  N ms
    FIRST  DAY  1  N ms  N ms  N ms  +10.0%
    +10.0% (+10.0% to +10.0%), confidence 99.6 %: after BEFORE, up to FIRST (that commit)
    in the order of the commits' history
    ");
    let circle = package.run_kernelgate(&format!("history --as w/f/new={TEST_CASE_ID}"));
    insta::assert_snapshot!(circle.refusal_message(2), @"error: case w/f/n1/cpu/hot: its renames go in a circle");
}

/// A file with the name of a record that is not one is reported, and an import without records is
/// an error with a reason.
#[test]
fn an_import_reports_skipped_files() {
    let package = TempPackage::new();
    let from = package.package_path("from");
    std::fs::create_dir_all(from.join("empty")).unwrap();
    let import =
        |from: &str| package.run_kernelgate(&format!("history import {from} --store kept"));
    insta::assert_snapshot!(import("from").text_for_snapshot(), @r"
    exit 2
    0 new records, 0 known, in kept
    -- stderr
    error: no record in what was named: runs and baselines are files ending in .json
    ");
    let fifo = std::process::Command::new("mkfifo").arg(from.join("pipe.json")).status();
    assert!(fifo.unwrap().success());
    let record = write_numbered_run_record(&package.package_path("elsewhere"), 0, None);
    std::os::unix::fs::symlink(&record, from.join("link.json")).unwrap();
    std::os::unix::fs::symlink("loop.json", from.join("loop.json")).unwrap();
    insta::assert_snapshot!(import("from").text_for_snapshot(), @r"
    exit 2
    0 new records, 0 known, in kept
    -- stderr
    skipped from/link.json: links are not followed: name the file itself
    skipped from/loop.json: links are not followed: name the file itself
    skipped from/pipe.json: failed to read from/pipe.json: it is no file but a device, a pipe or a socket
    ");
    insta::assert_snapshot!(import("from/link.json").text_for_snapshot(), @r"
    exit 0
    1 new records, 0 known, in kept
    ");
}

#[test]
fn a_missing_store_is_not_made_and_a_read_only_store_is_read() {
    let package = TempPackage::new();
    for verb in ["history --store typo", "history prune --keep 1 --store typo"] {
        insta::allow_duplicates! { insta::assert_snapshot!(package.run_kernelgate(verb).refusal_message(2), @"error: typo is not a store: it has neither runs/ nor imported/") };
        assert!(!package.package_path("typo").exists());
    }
    (0..3).for_each(|number| {
        drop(write_numbered_run_record(&package.package_path("kept/runs"), number, None))
    });
    assert_eq!(number_of_runs_in_history(&package, "--store kept"), 3);
    // A file of another program lies at the path of the history index, and later a folder does.
    let index = package.package_path("kept/history.index");
    std::fs::write(&index, "SQLite format 3").unwrap();
    assert_eq!(number_of_runs_in_history(&package, "--store kept"), 3);
    assert!(std::fs::read_to_string(&index).unwrap().starts_with('{'));
    std::fs::remove_file(&index).unwrap();
    std::fs::create_dir(&index).unwrap();
    assert_eq!(number_of_runs_in_history(&package, "--store kept"), 3);
    insta::assert_snapshot!(package.run_kernelgate("history --store kept").assert_exit(0).stderr, @"no index can be written in kept: its records are read each time");
    // An import into a store that cannot be written reports the error once.
    std::fs::write(package.package_path("kept/imported"), "").unwrap();
    let failed = package.run_kernelgate("history import kept/runs --store kept");
    insta::assert_snapshot!(failed.refusal_message(2), @"error: failed to write kept/imported/s0-COMMIT/bench.json: Not a directory (os error 20)");
}

#[test]
fn stores_are_moved_merged_and_pruned() {
    let package = TempPackage::new();
    let [one, two] = ["one", "two"].map(|name| package.package_path(name));
    (0..20).for_each(|number| drop(write_numbered_run_record(&one.join("runs"), number, None)));
    (15..30)
        .for_each(|number| drop(write_numbered_run_record(&two.join("imported"), number, None)));
    std::fs::write(two.join("imported/s15/notes.json"), "{}").unwrap();
    std::os::unix::fs::symlink(&two, two.join("imported/circle")).unwrap();
    let history = |line: &str| package.run_kernelgate(&format!("history {line}"));
    insta::assert_snapshot!(history("merge one two --store all").text_for_snapshot(), @r"
    exit 0
    30 new records, 5 known, in all
    -- stderr
    skipped two/imported/s15/notes.json: neither a run nor a baseline of kernelgate
    ");
    assert_eq!(number_of_runs_in_history(&package, "--store all"), 30);
    insta::assert_snapshot!(history("merge all --store all").text_for_snapshot(), @r"
    exit 0
    0 new records, 30 known, in all
    ");
    std::fs::rename(package.package_path("all"), package.package_path("moved")).unwrap();
    let pruned = history("prune --keep 4 --dry-run --store moved");
    insta::assert_snapshot!(pruned.text_for_snapshot(), @r"
    exit 0
    26 sessions would be removed in moved
    ");
    assert_eq!(number_of_runs_in_history(&package, "--store moved"), 30);
    insta::assert_snapshot!(history("prune --keep 4 --store moved").text_for_snapshot(), @r"
    exit 0
    26 sessions removed in moved
    ");
    assert_eq!(number_of_runs_in_history(&package, "--store moved"), 4);
    let mut refusals = String::new();
    for line in
        ["import nowhere --store x", "merge moved/imported --store x", "prune --keep 0 --store x"]
    {
        refusals += &format!("{}\n", history(line).refusal_message(2));
    }
    insta::assert_snapshot!(refusals, @r"
    error: failed to read nowhere: No such file or directory (os error 2)
    error: moved/imported is not a store: it has neither runs/ nor imported/
    error: invalid value '0' for '--keep <COUNT>': 0 is not in 1..=4294967295

    For more information, try '--help'.
    ");
}

#[test]
fn a_folder_outside_of_the_target_keeps_the_runs_of_benches() {
    let package = TempPackage::new();
    let kept = package.package_path("kept");
    let mut bench = package.bench_command("mine", "n64");
    bench.env("KERNELGATE_HISTORY", &kept);
    let output = bench.output().unwrap();
    let messages = String::from_utf8_lossy(&output.stderr);
    // The report page is that of this package, even if several packages share the folder of runs.
    let page = "draws it in ";
    let page = messages.lines().find_map(|line| line.split_once(page)).unwrap_or_default().1;
    assert!(output.status.success() && !page.starts_with(kept.to_str().unwrap()), "{messages}");
    assert!(page.ends_with("target/kernelgate/report/index.html"), "{messages}");
    assert!(kept.join("runs/mine/fixture.json").is_file());
    let mut history =
        package.package_command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), "history");
    history.arg("--format").arg("json").env("KERNELGATE_HISTORY", &kept);
    let outcome: ProcessOutcome = history.output().unwrap().into();
    assert_eq!(outcome.assert_exit(0).json_case_ids(), [crate::package::FIXTURE_CASE_ID]);
}

#[test]
fn two_programs_at_once_and_one_that_is_killed_lose_nothing() {
    let package = TempPackage::new();
    let from = package.package_path("from");
    std::fs::create_dir_all(package.package_path("to/imported")).unwrap();
    (0..300).for_each(|number| drop(write_numbered_run_record(&from, number, None)));
    let start = |line: &str| -> Child {
        let mut command =
            package.package_command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), line);
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
    assert_eq!(number_of_runs_in_history(&package, "--store to"), 300);
    insta::assert_snapshot!(package.run_kernelgate(line).text_for_snapshot(), @r"
    exit 0
    0 new records, 300 known, in to
    ");
    assert_eq!(package.run_kernelgate("history --store to").assert_exit(0).stderr, "");
}
