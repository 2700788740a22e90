//! Tests with untrusted text: values in files, names, and messages of benches. No text from a
//! record reaches a command line, a path or a terminal without escaping.

#![cfg(unix)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::outputs::assert_text_snapshot;
use crate::package::outcome::redact_varying_parts;
use crate::package::{
    FIXTURE_CASE_ID, ProcessOutcome, TempPackage, copy_executable, fixture_path, lines_with_word,
};

/// The character with which every terminal sequence begins.
const ESCAPE_CHARACTER: char = '\u{1b}';

#[track_caller]
fn assert_no_control_characters(outcome: &ProcessOutcome) {
    let all = outcome.stdout_and_stderr();
    let acts = all.chars().find(|c| c.is_control() && !['\n', '\t'].contains(c));
    assert_eq!(acts, None, "{all:?}");
}

/// A package whose baseline `a` and last run have the same cases; the baseline is not sealed.
fn package_with_unsealed_baseline() -> (TempPackage, String) {
    let package = TempPackage::new();
    package.run_fixture_bench("s1", "n64 --save-baseline a").assert_exit(0);
    package.run_fixture_bench("s2", "n64").assert_exit(0);
    package.set_record_times(&package.baseline_path("a"), 200_000.0);
    package.set_record_times(&package.run_record_path("s2"), 200_000.0);
    let text = std::fs::read_to_string(package.baseline_path("a")).unwrap();
    (package, text)
}

#[test]
fn the_commit_of_a_baseline_is_no_option_of_git() {
    let (package, text) = package_with_unsealed_baseline();
    let git = |line: &str| {
        let mut git = Command::new("git");
        git.arg("-C").arg(package.folder.path()).args([
            "-c",
            "user.name=a",
            "-c",
            "user.email=a@b",
        ]);
        assert!(git.args(line.split(' ')).output().unwrap().status.success());
    };
    git("init --quiet");
    git("commit --quiet --allow-empty -m first");
    let victim = package.package_path("victim..HEAD");
    std::fs::write(&victim, "precious").unwrap();
    let mut baseline: serde_json::Value = serde_json::from_str(&text).unwrap();
    let runs = baseline["runs"].as_object_mut().unwrap();
    let option = format!("--output={}", package.package_path("victim").display());
    runs.values_mut().for_each(|run| run["provenance"]["commit"] = option.clone().into());
    std::fs::write(package.baseline_path("a"), baseline.to_string()).unwrap();
    let outcome = package.run_kernelgate("gate --baseline a");
    assert!(outcome.exit_code < Some(4), "{}", outcome.stdout_and_stderr());
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
}

#[test]
fn names_in_files_are_refused_when_they_are_read() {
    let (package, text) = package_with_unsealed_baseline();
    let path = package.baseline_path("a");
    let mut refusals = String::new();
    for (from, to) in [
        (FIXTURE_CASE_ID, "fixture/spin/n64\\n=cmd/cpu/hot"),
        ("\"device_name\": \"", "\"device_name\": \"\\u001b[2J"),
        ("s1/fixture", "s1\\u009b31m/fixture"),
        ("\"workload\":\"", "\"workload\":\"\\r"),
        ("\"commit\":null", "\"commit\":\"\\u202e\""),
    ] {
        let (from, text) = (from.replace(": ", ":"), text.replace(": ", ":"));
        let edited = text.replace(&from, &to.replace(": ", ":"));
        assert_ne!(edited, text, "{from}");
        std::fs::write(&path, edited).unwrap();
        let outcome = package.run_kernelgate("gate --baseline a");
        assert_no_control_characters(&outcome);
        let refusal = outcome.refusal_message(2);
        let seal = format!("baseline seal {}", path.display());
        for line in ["baseline show a", "baseline export a a.csv", "baseline add a", &seal] {
            let outcome = package.run_kernelgate(line);
            assert_no_control_characters(&outcome);
            assert_eq!(outcome.refusal_message(2), refusal, "{line}");
        }
        assert_no_control_characters(package.run_kernelgate("baseline list").assert_exit(2));
        assert!(!package.package_path("a.csv").exists());
        refusals += &format!("{refusal}\n");
    }
    insta::assert_snapshot!(refusals, @r"
    error: failed to read FOLDER/baselines/DEVICE/a.json: invalid baseline: the name `fixture/spin/n64\n=cmd/cpu/hot` holds a control character
    error: failed to read FOLDER/baselines/DEVICE/a.json: invalid baseline: device_name: `\u{1b}[2JAMD EPYC` holds a control character
    error: failed to read FOLDER/baselines/DEVICE/a.json: invalid baseline: keys: `s1\u{9b}31m/fixture` holds a control character
    error: failed to read FOLDER/baselines/DEVICE/a.json: invalid baseline: workload: `\rfixture/spin` holds a control character
    error: failed to read FOLDER/baselines/DEVICE/a.json: invalid baseline: commit: `\u{202e}` holds a control character
    ");
}

#[test]
fn messages_of_benches_are_cleaned_where_they_are_printed() {
    let package = TempPackage::new();
    package.run_fixture_bench("s1", "--save-baseline a").assert_exit(0);
    let loud = package.run_fixture_bench("s2", "--axis n=64 --axis fault=none,loud");
    insta::assert_snapshot!(loud.error_message(1), @r#"
    error: fixture/spin/n64_loud/cpu/hot: panicked: assertion `left != right` failed: loud\u{1b}]0;title\u{7} [link](http://x)
    second line
      left: "loud"
     right: "loud" (crates/kernelgate-cli/tests/fixture/spin.rs:LINE)
    recorded in FOLDER/target/kernelgate/runs/s2/fixture.json
    `kernelgate report` draws it in FOLDER/target/kernelgate/report/index.html
    "#);
    assert!(
        !loud.stderr.contains(ESCAPE_CHARACTER) && !loud.stdout.contains('\u{7}'),
        "{:?}",
        loud.stdout_and_stderr()
    );
    let record = std::fs::read_to_string(package.run_record_path("s2")).unwrap();
    assert!(record.contains("\\u001b[31mloud"), "the record has the message as it was: {record}");
    let mut texts = String::new();
    for line in ["runs", "gate --baseline a", "gate --baseline a --format markdown"] {
        let outcome = package.run_kernelgate(line);
        assert_no_control_characters(&outcome);
        let (before, message) = outcome.stdout.split_at(outcome.stdout.find("loud").unwrap());
        let start = before.rfind('\n').map_or(0, |at| at + 1);
        // The Markdown output has the failure message in one line.
        let count = if line.ends_with("markdown") { 1 } else { 2 };
        let lines = message.lines().take(count).collect::<Vec<_>>().join("\n");
        texts += &format!("{line}:\n{}{lines}\n", &before[start..]);
    }
    insta::assert_snapshot!(redact_varying_parts(texts.trim()), @r#"
    runs:
    FAILED fixture/spin/n64_loud/cpu/hot: panicked: assertion `left != right` failed: loud\u{1b}]0;title\u{7} [link](http://x)
        second line
    gate --baseline a:
    failed: fixture/spin/n64_loud/cpu/hot: panicked: assertion `left != right` failed: loud\u{1b}]0;title\u{7} [link](http://x)
        second line
    gate --baseline a --format markdown:
    - failed: fixture/spin/n64_loud/cpu/hot: panicked: assertion `left != right` failed: loud\\u{1b}]0;title\\u{7} \[link](http:&#8203;//x) second line left: "loud" right: "loud" (crates/kernelgate-cli/tests/fixture/spin.rs:LINE)
    "#);
    assert_no_control_characters(
        package.run_kernelgate("gate --baseline a --format junit").assert_exit(1),
    );
}

#[test]
fn a_tensor_without_a_plain_name_fails_its_case() {
    let package = TempPackage::new();
    let outcome = package.run_fixture_bench("s1", "--axis n=64 --axis fault=none,input,output");
    insta::assert_snapshot!(lines_with_word(&outcome.assert_exit(1).stderr, "error: "), @r"
    error: fixture/spin/n64_input/cpu/hot: the input `\u{1b}` holds a control character
    error: fixture/spin/n64_output/cpu/hot: the output `out\u{1b}` holds a control character
    ");
    let run = package.read_run_record("s1");
    assert_eq!(run["failed"].as_object().unwrap().len(), 2);
    assert_eq!(run["cases"].as_object().unwrap().keys().collect::<Vec<_>>(), [FIXTURE_CASE_ID]);
}

#[test]
fn messages_of_a_broken_bench_process_are_cleaned() {
    let package = TempPackage::new();
    std::fs::create_dir(package.package_path("bin")).unwrap();
    copy_executable(fixture_path(), package.package_path("bin/fixture"));
    let line = "compare --base-dir bin --head-dir bin --time-identical --backend cpu --axis n=64 \
                --axis fault=crash --max-blocks 1";
    let outcome = package.run_kernelgate(&format!("{line} --format json"));
    assert_no_control_characters(&outcome);
    insta::assert_snapshot!(outcome.stdout_as_json()["broken"][0]["reason"].as_str().unwrap(), @r#"exit status: 7: \u{1b}]0;title\u{7}crashed"#);
}

/// The name of a committed folder, or of an artifact of CI, can be anything.
#[test]
fn names_of_files_are_cleaned_where_they_are_printed() {
    let package = TempPackage::new();
    let folder = package.package_path("baselines/a\u{1b}[31m");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("b.json"), "{").unwrap();
    std::fs::write(package.package_path("kept\u{7}.json"), "{").unwrap();
    let mut messages = String::new();
    for verb in ["baseline list", "history import . --store s\u{1b}[2J"] {
        let outcome = package.run_kernelgate(verb);
        assert_no_control_characters(outcome.assert_exit(2));
        messages += &format!("{}\n", outcome.text_for_snapshot());
    }
    insta::assert_snapshot!(messages, @r"
    exit 2
    baseline  cases  runs  newest  commit
    broken: failed to read FOLDER/baselines/DEVICE/b.json: broken or cut short (EOF while parsing an object at line 1 column 1)
    exit 2
    0 new records, 0 known, in s
    -- stderr
    skipped ./baselines/DEVICE/b.json: failed to read ./baselines/DEVICE/b.json: broken or cut short (EOF while parsing an object at line 1 column 1)
    skipped ./kept\u{7}.json: failed to read ./kept\u{7}.json: broken or cut short (EOF while parsing an object at line 1 column 1)
    ");
    let trace = r#"{"traceEvents": [{"ph": "X", "cat": "kernel", "name": 1, "ts": 1}]}"#;
    std::fs::write(package.package_path("t\u{1b}[2J.json"), trace).unwrap();
    let mut stats = package.package_command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), "stats");
    let outcome: ProcessOutcome = stats.arg("t\u{1b}[2J.json").output().unwrap().into();
    assert_no_control_characters(&outcome);
}

/// Reading a pipe without a writer, or a device, would not end.
#[test]
fn a_device_or_a_pipe_is_refused_by_name() {
    let package = TempPackage::new();
    let fifo = Command::new("mkfifo").arg(package.package_path("pipe.json")).status();
    assert!(fifo.unwrap().success());
    std::os::unix::fs::symlink("/dev/zero", package.package_path("zero.json")).unwrap();
    let mut refusals = String::new();
    for name in ["pipe.json", "zero.json"] {
        for line in [
            format!("stats {name}"),
            format!("diagnose {name}"),
            format!("export {name}"),
            format!("history import {name} --store s"),
            format!("report --runs {name} --peers {name}"),
        ] {
            refusals += &format!("{line}: {}\n", package.run_kernelgate(&line).text_for_snapshot());
        }
    }
    insta::assert_snapshot!(refusals, @r"
    stats pipe.json: exit 2

    -- stderr
    error: failed to read pipe.json: it is no file but a device, a pipe or a socket
    diagnose pipe.json: exit 2

    -- stderr
    error: failed to read pipe.json: it is no file but a device, a pipe or a socket
    export pipe.json: exit 2

    -- stderr
    error: failed to read pipe.json: it is no file but a device, a pipe or a socket
    history import pipe.json --store s: exit 2
    0 new records, 0 known, in s
    -- stderr
    skipped pipe.json: failed to read pipe.json: it is no file but a device, a pipe or a socket
    report --runs pipe.json --peers pipe.json: exit 2

    -- stderr
    error: --runs: failed to read pipe.json: it is no file but a device, a pipe or a socket
    stats zero.json: exit 2

    -- stderr
    error: failed to read zero.json: it is no file but a device, a pipe or a socket
    diagnose zero.json: exit 2

    -- stderr
    error: failed to read zero.json: it is no file but a device, a pipe or a socket
    export zero.json: exit 2

    -- stderr
    error: failed to read zero.json: it is no file but a device, a pipe or a socket
    history import zero.json --store s: exit 2
    0 new records, 0 known, in s
    -- stderr
    skipped zero.json: failed to read zero.json: it is no file but a device, a pipe or a socket
    report --runs zero.json --peers zero.json: exit 2

    -- stderr
    error: --runs: failed to read zero.json: it is no file but a device, a pipe or a socket
    ");
}

// The program reports a full disk as an error, neither as a broken pipe nor as a failing case.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_reported_as_an_error() {
    let (package, _) = package_with_unsealed_baseline();
    for line in ["doctor", "runs", "gate --baseline a", "baseline list"] {
        let mut command =
            package.package_command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), line);
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let outcome = ProcessOutcome::from(command.stdout(full).output().unwrap());
        let errors = lines_with_word(&outcome.assert_exit(2).stderr, "error: ");
        insta::allow_duplicates!(
            insta::assert_snapshot!(errors, @"error: failed to write to standard output: No space left on device (os error 28)")
        );
    }
    let program = env!("CARGO_BIN_EXE_kernelgate");
    let dir = package.bench_folder_flags();
    let line = format!(
        "trap '' XFSZ; ulimit -f 64; exec {program} verify --axis n=65536 --axis fault=none \
         --dump dumped {dir}"
    );
    let mut shell = package.package_command(Path::new("sh"), "-c");
    let outcome = ProcessOutcome::from(shell.arg(line).output().unwrap());
    insta::assert_snapshot!(outcome.assert_exit(2).text_for_snapshot(), @r#"
    exit 2
    case  status  checked  max error  relative L2  same bits again
    fixture/spin/n65536_none/cpu/hot  ok  100.0000%  N  N  yes
    skipped 1: cpu/never supports nothing: fixture/spin/n65536_none/cpu/never/hot
    1 ok, 0 failed, 1 skipped
    -- stderr
    verifying fixture/spin/n65536_none/cpu/hot
    failed to write FOLDER/dumped/.kernelgate-TEMPORARY/fixture_spin_n65536_none_cpu_hot.tensors: File too large (os error 27) at path "FOLDER/dumped/.kernelgate-TEMPORARY/.kernelgate-TEMPORARY"
    error: --dump: the tensors of fixture/spin/n65536_none/cpu/hot were not written to dumped
    "#);
}

/// Commands that write into the folder OUT, each with a file that it writes.
const COMMANDS_WITH_OUTPUT_FILE: [(&str, &str); 3] = [
    ("export t.json --out OUT/x.json", "x.json"),
    ("verify n64_none --backend cpu DIR --dump OUT", "fixture_spin_n64_none_cpu_hot.safetensors"),
    ("profile n64_none --backend cpu DIR --out OUT", "profile.txt"),
];
const CHROME_TRACE_JSON: &str = r#"{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7,
    "ts": 1, "dur": 5, "args": {"correlation": 1, "device": 0, "stream": 7}}]}"#;

/// The program does not write output files through a symbolic link or into a pipe.
#[test]
fn leftovers_at_output_paths_are_replaced_or_named() {
    let package = TempPackage::new();
    std::fs::write(package.package_path("t.json"), CHROME_TRACE_JSON).unwrap();
    let (dir, victim) = (package.bench_folder_flags(), package.package_path("victim"));
    let run = |verb: &str, folder: &str| {
        package.run_kernelgate(&verb.replace("DIR", &dir).replace("OUT", folder))
    };
    let plant_link = |path: &Path| std::os::unix::fs::symlink("../victim", path).unwrap();
    let plant_pipe =
        |path: &Path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    std::fs::write(&victim, "precious").unwrap();
    std::fs::create_dir(package.package_path("out")).unwrap();
    let mut refusals = String::new();
    for (verb, file) in COMMANDS_WITH_OUTPUT_FILE {
        let at = package.package_path("out").join(file);
        for plant in [&plant_link as &dyn Fn(&Path), &plant_pipe] {
            plant(&at);
            run(verb, "out").assert_exit(0);
            assert!(std::fs::symlink_metadata(&at).unwrap().is_file(), "{verb}");
            std::fs::remove_file(&at).unwrap();
        }
        std::fs::create_dir(&at).unwrap();
        refusals += &format!("{verb}: {}\n", run(verb, "out").error_message(2));
        std::fs::remove_dir(&at).unwrap();
    }
    plant_pipe(&package.package_path("pipe"));
    std::os::unix::fs::symlink("nowhere", package.package_path("dangling")).unwrap();
    for folder in ["victim", "pipe", "dangling"] {
        for verb in COMMANDS_WITH_OUTPUT_FILE
            .map(|(verb, _)| verb)
            .into_iter()
            .chain(["check --mode gate --out OUT"])
        {
            let refusal = run(verb, folder).error_message(2);
            refusals += &format!("{verb}, to {folder}: {refusal}\n");
        }
    }
    assert_text_snapshot("mistakes", "output_paths", &refusals);
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
}

#[cfg(target_os = "linux")]
#[test]
fn a_timeline_that_does_not_fit_on_the_disk_leaves_the_earlier_one() {
    let package = TempPackage::new();
    std::fs::write(package.package_path("t.json"), CHROME_TRACE_JSON).unwrap();
    std::fs::create_dir(package.package_path("out")).unwrap();
    std::fs::write(package.package_path("out/x.json"), "earlier").unwrap();
    let program = env!("CARGO_BIN_EXE_kernelgate");
    let mut shell = package.package_command(Path::new("sh"), "-c");
    let line = format!("trap '' XFSZ; ulimit -f 0; exec {program} export t.json --out out/x.json");
    let outcome = ProcessOutcome::from(shell.arg(line).output().unwrap());
    insta::assert_snapshot!(outcome.refusal_message(2), @r#"error: --out: failed to write out/x.json: File too large (os error 27) at path "FOLDER/out/.kernelgate-TEMPORARY""#);
    assert_eq!(std::fs::read_to_string(package.package_path("out/x.json")).unwrap(), "earlier");
    assert_eq!(std::fs::read_dir(package.package_path("out")).unwrap().count(), 1);
}

/// A lock file may be a symbolic link, which git can commit, or a pipe, from which reading would
/// not end.
#[test]
fn a_wrong_lock_file_is_named_at_once() {
    let (package, _) = package_with_unsealed_baseline();
    let baseline = package.baseline_path("a");
    let lock = baseline.with_file_name(".a.json.lock");
    let victim = package.package_path("victim");
    let seal = format!("baseline seal {}", baseline.display());
    let refusal = || {
        let refusal = package.run_kernelgate("baseline add a").refusal_message(2);
        assert_eq!(package.run_kernelgate(&seal).refusal_message(2), refusal);
        let bench = package.run_fixture_bench("s3", "n64 --save-baseline a");
        let error = bench.error_message(2);
        std::fs::remove_dir_all(package.package_path("target/kernelgate/runs/s3")).unwrap();
        std::fs::remove_file(&lock).unwrap();
        format!("{refusal}\n{error}")
    };
    assert!(Command::new("mkfifo").arg(&lock).status().unwrap().success());
    insta::assert_snapshot!(refusal(), @r"
    error: failed to lock FOLDER/baselines/DEVICE/a.json: FOLDER/baselines/DEVICE/.a.json.lock is no lock file but a device, a pipe or a socket: remove it
    error: failed to lock FOLDER/baselines/DEVICE/a.json: FOLDER/baselines/DEVICE/.a.json.lock is no lock file but a device, a pipe or a socket: remove it: the run is kept, and `kernelgate baseline add a --session FOLDER/target/kernelgate/runs/s3` adds it
    ");
    std::os::unix::fs::symlink(&victim, &lock).unwrap();
    insta::assert_snapshot!(refusal(), @r"
    error: failed to lock FOLDER/baselines/DEVICE/a.json: FOLDER/baselines/DEVICE/.a.json.lock is no lock file but a link: remove it
    error: failed to lock FOLDER/baselines/DEVICE/a.json: FOLDER/baselines/DEVICE/.a.json.lock is no lock file but a link: remove it: the run is kept, and `kernelgate baseline add a --session FOLDER/target/kernelgate/runs/s3` adds it
    ");
    assert!(!victim.exists());
    package.run_kernelgate("baseline add a").assert_exit(0);
    let folder = package.package_path("target/kernelgate/compare");
    std::fs::create_dir_all(&folder).unwrap();
    std::os::unix::fs::symlink(&victim, folder.join("lock")).unwrap();
    package.bench_folder_flags();
    let line = "compare --base-dir executables --head-dir executables";
    insta::assert_snapshot!(package.run_kernelgate(line).refusal_message(2), @"error: failed to open FOLDER/target/kernelgate/compare/lock: FOLDER/target/kernelgate/compare/lock is no lock file but a link: remove it");
    assert!(!victim.exists());
}

/// A record file refers to other files by plain names, never by paths.
#[test]
fn a_run_record_with_a_path_as_name_is_refused() {
    let (package, _) = package_with_unsealed_baseline();
    let run = package.read_run_record("s2");
    let mut refusals = String::new();
    for (field, value) in [
        ("bench", "../../../x".into()),
        ("bench", "".into()),
        ("session", "../../q".into()),
        ("started", "yesterday".into()),
        ("seed", serde_json::Value::from("9".repeat(100_000))),
    ] {
        let mut run = run.clone();
        run[field] = value;
        std::fs::write(package.run_record_path("s2"), run.to_string()).unwrap();
        let refusal = package.run_kernelgate("gate --baseline a").refusal_message(2);
        // The column in the JSON error depends on measured times, so the end of the error line is
        // removed.
        let refusal = refusal.split(" at line").next().unwrap();
        refusals += &format!("{field}: {refusal}\n");
    }
    let mut run = run;
    run["cases"][FIXTURE_CASE_ID]["verification"]["max_error"] = (-1).into();
    std::fs::write(package.run_record_path("s2"), run.to_string()).unwrap();
    refusals +=
        &format!("max_error: {}\n", package.run_kernelgate("gate --baseline a").refusal_message(2));
    insta::assert_snapshot!(refusals, @r#"
    bench: error: failed to read FOLDER/target/kernelgate/runs/s2/fixture.json: invalid run: bench `../../../x` holds `/`, which separates the parts of an id
    bench: error: failed to read FOLDER/target/kernelgate/runs/s2/fixture.json: invalid run: bench `` is empty
    session: error: failed to read FOLDER/target/kernelgate/runs/s2/fixture.json: invalid run: session `../../q` is no plain name
    started: error: failed to read FOLDER/target/kernelgate/runs/s2/fixture.json: invalid run: started: `yesterday` is no time
    seed: error: failed to read FOLDER/target/kernelgate/runs/s2/fixture.json: invalid run: invalid type: string "9999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999999… HASH", expected u64
    max_error: error: failed to read FOLDER/target/kernelgate/runs/s2/fixture.json: invalid run: case fixture/spin/n64_none/cpu/hot: an error of -1
    "#);
}

#[test]
fn other_files_beside_the_benches_are_not_run() {
    let package = TempPackage::new();
    std::fs::create_dir(package.package_path("bin")).unwrap();
    copy_executable(fixture_path(), package.package_path("bin/fixture"));
    let script = package.package_path("bin/script");
    std::fs::write(
        &script,
        format!("#!/bin/sh\necho > {}\n", package.package_path("ran").display()),
    )
    .unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let fifo =
        Command::new("mkfifo").arg("-m").arg("755").arg(package.package_path("bin/fifo")).status();
    assert!(fifo.unwrap().success());
    let compare = |flags: &str| {
        let line = format!(
            "compare --base-dir bin --head-dir bin --time-identical --backend cpu --max-blocks 1 \
             --case-time 0.03s --format json {flags}"
        );
        package.run_kernelgate(&line)
    };
    let outcome = compare("n64");
    assert_eq!(outcome.json_verdicts().len(), 1, "{}", outcome.stdout_and_stderr());
    insta::assert_snapshot!(lines_with_word(&outcome.stderr, "script"), @r"
    left alone: script of the base: its file has no mark of this harness, so it was not run; `--bench script` runs it all the same
    left alone: script of the head: its file has no mark of this harness, so it was not run; `--bench script` runs it all the same
    ");
    assert!(!package.package_path("ran").exists());
    let script = compare("--bench script");
    insta::assert_snapshot!(script.refusal_message(2), @r"
    left alone: script of the base: asked by --bench, it did not answer as a bench of this harness does
    left alone: script of the head: asked by --bench, it did not answer as a bench of this harness does
    error: no bench that can be driven has a case that was asked for
    ");
    assert!(package.package_path("ran").exists());
    let mark = kernelgate::protocol::BENCH_EXECUTABLE_MARK.as_bytes();
    let fixture = std::fs::read(fixture_path()).unwrap();
    assert!(fixture.windows(mark.len()).any(|bytes| bytes == mark));
}

#[test]
fn a_commit_that_is_given_is_one_and_is_recorded_as_stated() {
    let package = TempPackage::new();
    let bench = |commit: &str, line: &str| -> ProcessOutcome {
        let mut bench = package.bench_command("s1", line);
        bench.env("KERNELGATE_COMMIT", commit).output().unwrap().into()
    };
    let mut refusals = String::new();
    for bad in ["v1\u{1b}[31m\n", "main", "--output=x", "1a2b3c", "1a2b+changes+changes"] {
        let refused = bench(bad, "n64 --save-baseline a");
        assert_no_control_characters(&refused);
        refusals += &format!("{}\n", refused.error_message(2));
    }
    insta::assert_snapshot!(refusals, @r"
    error: KERNELGATE_COMMIT=`v1` is no commit: 7 to 64 hexadecimal digits, and +changes where tracked files differed from it
    error: KERNELGATE_COMMIT=`main` is no commit: 7 to 64 hexadecimal digits, and +changes where tracked files differed from it
    error: KERNELGATE_COMMIT=`--output=x` is no commit: 7 to 64 hexadecimal digits, and +changes where tracked files differed from it
    error: KERNELGATE_COMMIT=`1a2b3c` is no commit: 7 to 64 hexadecimal digits, and +changes where tracked files differed from it
    error: KERNELGATE_COMMIT=`1a2b+changes+changes` is no commit: 7 to 64 hexadecimal digits, and +changes where tracked files differed from it
    ");
    bench("1a2b3c4d5e+changes", "n64").assert_exit(0);
    assert_eq!(package.read_run_record("s1")["stated_commit"], true);
    let added = package.run_kernelgate("baseline add a");
    insta::assert_snapshot!(lines_with_word(&added.assert_exit(0).stdout_and_stderr(), "1a2b3c4d"), @"the commit 1a2b3c4d+changes of the run s1/fixture is as KERNELGATE_COMMIT stated it");
    let shown = package.run_kernelgate("baseline show a");
    insta::assert_snapshot!(redact_varying_parts(&lines_with_word(&shown.assert_exit(0).stdout_and_stderr(), "1a2b3c4d")), @"run s1/fixture: INSTANT, DEVICE, COMMIT+changes (as stated)");
}

#[test]
fn an_executable_that_was_copied_here_is_not_of_this_checkout() {
    let package = TempPackage::new();
    for line in ["init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m x"] {
        let git =
            Command::new("git").arg("-C").arg(package.folder.path()).args(line.split(' ')).status();
        assert!(git.unwrap().success());
    }
    package.run_fixture_bench("cargo", "n64").assert_exit(0);
    assert!(package.read_run_record("cargo")["provenance"]["commit"].is_string());
    let folder = package.bench_folder_flags();
    let copied = Path::new(folder.strip_prefix("--dir ").unwrap()).join("fixture");
    let mut bench = package.package_command(&copied, "--bench --noplot --sample-size 10 n64");
    bench.env_remove("CARGO_MANIFEST_DIR").env("KERNELGATE_SESSION", "copied");
    let outcome = ProcessOutcome::from(bench.output().unwrap());
    insta::assert_snapshot!(redact_varying_parts(&lines_with_word(&outcome.assert_exit(0).stdout_and_stderr(), "commit")), @"no commit is recorded: there is no git checkout, or this executable neither was started by cargo nor lies where cargo built it; KERNELGATE_COMMIT=HEX states one");
    assert!(package.read_run_record("copied")["provenance"]["commit"].is_null());
}

#[test]
fn a_revision_that_looks_like_an_option_is_not_found() {
    let package = TempPackage::new();
    let git =
        Command::new("git").arg("-C").arg(package.folder.path()).args(["init", "--quiet"]).status();
    assert!(git.unwrap().success());
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let mut refusals = String::new();
    for revision in ["--output=victim", "--all", "-n1"] {
        let mut compare = package.package_command(program, "compare");
        let outcome =
            ProcessOutcome::from(compare.arg(format!("--base={revision}")).output().unwrap());
        refusals += &format!("{}\n", outcome.refusal_message(2));
    }
    insta::assert_snapshot!(refusals, @r"
    error: no revision `--output=victim` in FOLDER
    error: no revision `--all` in FOLDER
    error: no revision `-n1` in FOLDER
    ");
    assert!(!package.package_path("victim").exists());
}

#[test]
fn paths_that_are_not_utf8_are_errors() {
    use std::os::unix::ffi::OsStrExt;
    let package = TempPackage::new();
    let odd = package.folder.path().join(std::ffi::OsStr::from_bytes(b"odd\xff"));
    std::fs::create_dir(&odd).unwrap();
    let dir = package.bench_folder_flags();
    let run = |line: &str, temporary: &Path| -> ProcessOutcome {
        let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
        let mut command = package.package_command(program, &format!("{line} {dir}"));
        command.current_dir(&odd).env("TMPDIR", temporary).env("KERNELGATE_BACKEND", "cpu");
        command.output().unwrap().into()
    };
    assert_eq!(
        run("list n64 --format json", &std::env::temp_dir()).assert_exit(0).json_case_ids()[0],
        FIXTURE_CASE_ID
    );
    let dumped = run("verify n64 --dump dumped", &std::env::temp_dir());
    insta::assert_snapshot!(dumped.refusal_message(2), @"error: --dump: FOLDER/odd�/dumped/.kernelgate-TEMPORARY is not UTF-8, which a request cannot name");
    insta::assert_snapshot!(run("list", &odd).refusal_message(2), @"error: failed to write FOLDER/request.json: invalid request: path contains invalid UTF-8 characters");
    let mut compare =
        package.package_command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), "compare");
    let compare = compare.arg("--base-dir").arg(&odd).arg("--head-dir").arg(&odd);
    let outcome = ProcessOutcome::from(compare.output().unwrap());
    assert!(
        outcome.exit_code == Some(2) && !outcome.stdout_and_stderr().contains("panicked"),
        "{}",
        outcome.stdout_and_stderr()
    );
}

#[test]
fn broken_results_of_criterion_are_named() {
    let package = TempPackage::new();
    package.run_fixture_bench("s1", "n64 --save-baseline x").assert_exit(0);
    let folder = package.package_path("target/criterion/fixture_spin_n64_none/cpu_hot/x");
    let mut refusals = std::collections::BTreeSet::new();
    for (name, text) in [
        ("sample.json", "{"),
        ("sample.json", r#"{"sampling_mode":"Flat","iters":[1],"times":[1]}"#),
        ("estimates.json", "{}"),
    ] {
        let before = std::fs::read(folder.join(name)).unwrap();
        std::fs::write(folder.join(name), text).unwrap();
        for line in ["--load-baseline x --baseline x", "--baseline x", "--baseline-lenient x"] {
            let refusal = package.run_fixture_bench("s2", &format!("n64 {line}")).error_message(2);
            refusals.insert(refusal);
        }
        std::fs::write(folder.join(name), before).unwrap();
    }
    insta::assert_snapshot!(refusals.into_iter().collect::<Vec<_>>().join("\n"), @r"
    error: Criterion's baseline `x` of fixture/spin/n64_none/cpu/hot is broken (FOLDER/target/criterion/fixture_spin_n64_none/cpu_hot/x/estimates.json: no estimate `mean`): remove it, or save it again
    error: Criterion's baseline `x` of fixture/spin/n64_none/cpu/hot is broken (FOLDER/target/criterion/fixture_spin_n64_none/cpu_hot/x/sample.json: 1 iteration counts and 1 times): remove it, or save it again
    error: Criterion's baseline `x` of fixture/spin/n64_none/cpu/hot is broken (FOLDER/target/criterion/fixture_spin_n64_none/cpu_hot/x/sample.json: EOF while parsing an object at line 1 column 1): remove it, or save it again
    ");
    package.run_fixture_bench("s2", "n64 --baseline-lenient absent").assert_exit(0);
}

#[test]
fn wrong_variables_are_named_and_empty_ones_count_as_unset() {
    let package = TempPackage::new();
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let dir = package.bench_folder_flags();
    let both = |set: &[(&str, &str)], flags: &str| -> [ProcessOutcome; 2] {
        let list = package.package_command(program, &format!("list {flags} {dir}"));
        let bench = package.package_command(&fixture_path(), &format!("--bench --list {flags}"));
        [list, bench].map(|mut command| {
            command.env("KERNELGATE_BACKEND", "cpu").envs(set.iter().copied());
            command.output().unwrap().into()
        })
    };
    let empty = [
        ("KERNELGATE_EFFORT", ""),
        ("KERNELGATE_AXIS", ""),
        ("KERNELGATE_DEVICE", ""),
        ("KERNELGATE_SEED", ""),
        ("KERNELGATE_TIMEOUT", ""),
        ("KERNELGATE_DELAY", ""),
        ("KERNELGATE_SESSION", ""),
        ("KERNELGATE_CUDA_LIBS", ""),
        ("CRITERION_HOME", ""),
    ];
    for outcome in both(&empty, "n64") {
        assert_eq!(redact_varying_parts(&outcome.assert_exit(0).stderr), "");
    }
    let errors = |set: &[(&str, &str)], flags: &str, code: i32| {
        let [list, bench] = both(set, flags)
            .map(|it| redact_varying_parts(&it.assert_exit(code).stderr).trim().to_owned());
        assert_eq!(list, bench);
        bench
    };
    insta::assert_snapshot!(errors(&[("KERNELGATE_EFFORT", "much")], "n64", 2), @r"
    error: invalid value 'much' in the variable KERNELGATE_EFFORT
      [possible values: quick, default, thorough]

    For more information, try '--help'.
    ");
    let flag = errors(&[("KERNELGATE_EFFORT", "much")], "--effort more", 2);
    insta::assert_snapshot!(flag, @r"
    error: invalid value 'more' for '--effort <EFFORT>'
      [possible values: quick, default, thorough]

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(errors(&[("KERNELGATE_EFORT", "quick")], "n64", 0), @"warning: nothing reads the variable KERNELGATE_EFORT: did you mean KERNELGATE_EFFORT?");
}
