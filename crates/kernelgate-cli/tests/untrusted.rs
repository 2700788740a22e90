//! Text of others, from outside: values of files, names and messages of benches. None of it reaches
//! a command line, a path or a terminal as it is.

#![cfg(unix)]

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::package::{CASE, Outcome, Package, copy_executable, fixture_path, lines_with};

/// The character with which every terminal sequence begins.
const ESCAPE: char = '\u{1b}';

#[track_caller]
fn harmless(outcome: &Outcome) {
    let all = outcome.all();
    let acts = all.chars().find(|c| c.is_control() && !['\n', '\t'].contains(c));
    assert_eq!(acts, None, "{all:?}");
}

/// A package whose baseline `a` and last run have the same cases; the baseline is not sealed.
fn package() -> (Package, String) {
    let package = Package::new();
    package.bench("s1", "n64 --save-baseline a").expect(0, &[]);
    package.bench("s2", "n64").expect(0, &[]);
    package.set_times(&package.baseline("a"), 200_000.0);
    package.set_times(&package.record("s2"), 200_000.0);
    let text = std::fs::read_to_string(package.baseline("a")).unwrap();
    (package, text)
}

#[test]
fn the_commit_of_a_baseline_is_no_option_of_git() {
    let (package, text) = package();
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
    let victim = package.path("victim..HEAD");
    std::fs::write(&victim, "precious").unwrap();
    let mut baseline: serde_json::Value = serde_json::from_str(&text).unwrap();
    let runs = baseline["runs"].as_object_mut().unwrap();
    let option = format!("--output={}", package.path("victim").display());
    runs.values_mut().for_each(|run| run["provenance"]["commit"] = option.clone().into());
    std::fs::write(package.baseline("a"), baseline.to_string()).unwrap();
    let outcome = package.kernelgate("gate --baseline a");
    outcome.expect(outcome.code.unwrap(), &[CASE, "recorded 20"]);
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
}

#[test]
fn names_in_files_are_refused_when_they_are_read() {
    let (package, text) = package();
    let path = package.baseline("a");
    for (from, to) in [
        (CASE, "fixture/spin/n64\\n=cmd/cpu/hot"),
        ("\"device_name\": \"", "\"device_name\": \"\\u001b[2J"),
        ("s1/fixture", "s1\\u009b31m/fixture"),
        ("\"workload\":\"", "\"workload\":\"\\r"),
        ("\"commit\":null", "\"commit\":\"\\u202e\""),
    ] {
        let (from, text) = (from.replace(": ", ":"), text.replace(": ", ":"));
        let edited = text.replace(&from, &to.replace(": ", ":"));
        assert_ne!(edited, text, "{from}");
        std::fs::write(&path, edited).unwrap();
        for (line, code) in [
            ("gate --baseline a", 2),
            ("baseline list", 2),
            ("baseline show a", 2),
            ("baseline export a a.csv", 2),
            ("baseline add a", 2),
        ] {
            let outcome = package.kernelgate(line);
            outcome.expect(code, &["a.json: invalid baseline: ", "holds a control character"]);
            harmless(&outcome);
        }
        package
            .kernelgate(&format!("baseline seal {}", path.display()))
            .expect(2, &["holds a control character"]);
        assert!(!package.path("a.csv").exists());
    }
}

#[test]
fn messages_of_benches_are_cleaned_where_they_are_printed() {
    let package = Package::new();
    package.bench("s1", "--save-baseline a").expect(0, &[]);
    let loud = package.bench("s2", "--axis n=64 --axis fault=none,loud");
    let words = ["loud\\u{1b}]0;title\\u{7} [link](http://x)", "second line"];
    loud.expect(1, &words);
    assert!(!loud.stderr.contains(ESCAPE) && !loud.stdout.contains('\u{7}'), "{:?}", loud.all());
    let record = std::fs::read_to_string(package.record("s2")).unwrap();
    assert!(record.contains("\\u001b[31mloud"), "the record has the message as it was: {record}");
    for line in ["runs", "gate --baseline a"] {
        let outcome = package.kernelgate(line);
        outcome.expect(outcome.code.unwrap(), &words);
        harmless(&outcome);
    }
    let comment = package.kernelgate("gate --baseline a --format markdown");
    comment.expect(1, &["loud\\\\u{1b}]0;title\\\\u{7} \\[link](http:&#8203;//x) second line"]);
    harmless(&comment);
    let junit = package.kernelgate("gate --baseline a --format junit");
    harmless(junit.expect(1, &["second line"]));
}

#[test]
fn a_tensor_without_a_plain_name_fails_its_case() {
    let package = Package::new();
    let outcome = package.bench("s1", "--axis n=64 --axis fault=none,input,output");
    let input =
        "error: fixture/spin/n64_input/cpu/hot: the input `\\u{1b}` holds a control character";
    outcome
        .expect(1, &[CASE, input, "n64_output/cpu/hot: the output `out\\u{1b}` holds a control"]);
    assert_eq!(package.run("s1")["failed"].as_object().unwrap().len(), 2);
}

#[test]
fn messages_of_a_broken_bench_process_are_cleaned() {
    let package = Package::new();
    std::fs::create_dir(package.path("bin")).unwrap();
    copy_executable(fixture_path(), package.path("bin/fixture"));
    let line = "compare --base-dir bin --head-dir bin --time-identical --backend cpu --axis n=64 \
                --axis fault=crash --max-blocks 1";
    let outcome = package.kernelgate(line);
    harmless(
        outcome.expect(outcome.code.unwrap(), &["exit status: 7: \\u{1b}]0;title\\u{7}crashed"]),
    );
}

/// The name of a committed folder, or of an artifact of CI, can be anything.
#[test]
fn names_of_files_are_cleaned_where_they_are_printed() {
    let package = Package::new();
    let folder = package.path("baselines/a\u{1b}[31m");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("b.json"), "{").unwrap();
    std::fs::write(package.path("kept\u{7}.json"), "{").unwrap();
    let messages = [
        ("baseline list", "baselines/a/b.json: broken or cut short"),
        ("history import . --store s\u{1b}[2J", "kept\\u{7}.json: failed to read ./kept"),
    ];
    for (verb, message) in messages {
        let outcome = package.kernelgate(verb);
        outcome.expect(2, &[message]);
        harmless(&outcome);
    }
    let trace = r#"{"traceEvents": [{"ph": "X", "cat": "kernel", "name": 1, "ts": 1}]}"#;
    std::fs::write(package.path("t\u{1b}[2J.json"), trace).unwrap();
    let mut stats = package.command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), "stats");
    let outcome: Outcome = stats.arg("t\u{1b}[2J.json").output().unwrap().into();
    harmless(&outcome);
}

/// Reading a pipe without a writer, or a device, would not end.
#[test]
fn a_device_or_a_pipe_is_refused_by_name() {
    let package = Package::new();
    let fifo = Command::new("mkfifo").arg(package.path("pipe.json")).status();
    assert!(fifo.unwrap().success());
    std::os::unix::fs::symlink("/dev/zero", package.path("zero.json")).unwrap();
    for name in ["pipe.json", "zero.json"] {
        let expected = format!("{name}: it is no file but a device, a pipe or a socket");
        for verb in ["stats", "diagnose", "export"] {
            package.kernelgate(&format!("{verb} {name}")).expect(2, &[&expected]);
        }
        package.kernelgate(&format!("history import {name} --store s")).expect(2, &[&expected]);
        package
            .kernelgate(&format!("report --runs {name} --peers {name}"))
            .expect(2, &[name, "it is no file"]);
    }
}

// Neither a broken pipe nor a failing case.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_reported_as_an_error() {
    let (package, _) = package();
    for line in ["doctor", "runs", "gate --baseline a", "baseline list"] {
        let mut command = package.command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), line);
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let outcome = Outcome::from(command.stdout(full).output().unwrap());
        outcome.expect(2, &["error: failed to write to standard output: No space left"]);
    }
    let program = env!("CARGO_BIN_EXE_kernelgate");
    let dir = package.dir();
    let line = format!(
        "trap '' XFSZ; ulimit -f 64; exec {program} verify --axis n=65536 --axis fault=none \
         --dump dumped {dir}"
    );
    let mut shell = package.command(Path::new("sh"), "-c");
    let words = ["1 ok, 0 failed", "File too large", "--dump: the tensors of fixture/spin/n65536"];
    Outcome::from(shell.arg(line).output().unwrap()).expect(2, &words);
}

/// Commands that write into the folder OUT, each with a file that it writes.
const OUTPUTS: [(&str, &str); 3] = [
    ("export t.json --out OUT/x.json", "x.json"),
    ("verify n64_none --backend cpu DIR --dump OUT", "fixture_spin_n64_none_cpu_hot.safetensors"),
    ("profile n64_none --backend cpu DIR --out OUT", "profile.txt"),
];
const TRACE: &str = r#"{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7,
    "ts": 1, "dur": 5, "args": {"correlation": 1, "device": 0, "stream": 7}}]}"#;

/// Output is not written through a link or into a pipe.
#[test]
fn leftovers_at_output_paths_are_replaced_or_named() {
    let package = Package::new();
    std::fs::write(package.path("t.json"), TRACE).unwrap();
    let (dir, victim) = (package.dir(), package.path("victim"));
    let run = |verb: &str, folder: &str| {
        package.kernelgate(&verb.replace("DIR", &dir).replace("OUT", folder))
    };
    let plant_link = |path: &Path| std::os::unix::fs::symlink("../victim", path).unwrap();
    let plant_pipe =
        |path: &Path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    std::fs::write(&victim, "precious").unwrap();
    std::fs::create_dir(package.path("out")).unwrap();
    for (verb, file) in OUTPUTS {
        let at = package.path("out").join(file);
        for plant in [&plant_link as &dyn Fn(&Path), &plant_pipe] {
            plant(&at);
            run(verb, "out").expect(0, &[]);
            assert!(std::fs::symlink_metadata(&at).unwrap().is_file(), "{verb}");
            std::fs::remove_file(&at).unwrap();
        }
        std::fs::create_dir(&at).unwrap();
        run(verb, "out").expect(2, &[file, "irectory"]);
        std::fs::remove_dir(&at).unwrap();
    }
    plant_pipe(&package.path("pipe"));
    std::os::unix::fs::symlink("nowhere", package.path("dangling")).unwrap();
    for folder in ["victim", "pipe", "dangling"] {
        for verb in OUTPUTS.map(|(verb, _)| verb).into_iter().chain(["check --mode gate --out OUT"])
        {
            run(verb, folder).expect(2, &[folder]);
        }
    }
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
}

#[cfg(target_os = "linux")]
#[test]
fn a_timeline_that_does_not_fit_on_the_disk_leaves_the_earlier_one() {
    let package = Package::new();
    std::fs::write(package.path("t.json"), TRACE).unwrap();
    std::fs::create_dir(package.path("out")).unwrap();
    std::fs::write(package.path("out/x.json"), "earlier").unwrap();
    let program = env!("CARGO_BIN_EXE_kernelgate");
    let mut shell = package.command(Path::new("sh"), "-c");
    let line = format!("trap '' XFSZ; ulimit -f 0; exec {program} export t.json --out out/x.json");
    Outcome::from(shell.arg(line).output().unwrap()).expect(2, &["File too large"]);
    assert_eq!(std::fs::read_to_string(package.path("out/x.json")).unwrap(), "earlier");
    assert_eq!(std::fs::read_dir(package.path("out")).unwrap().count(), 1);
}

/// Git can commit a link, and reading a pipe would not end.
#[test]
fn a_wrong_lock_file_is_named_at_once() {
    let (package, _) = package();
    let baseline = package.baseline("a");
    let lock = baseline.with_file_name(".a.json.lock");
    let victim = package.path("victim");
    let seal = format!("baseline seal {}", baseline.display());
    let refused = |what: &str| {
        let expected = format!(".a.json.lock is no lock file but {what}: remove it");
        for line in ["baseline add a", &seal] {
            package.kernelgate(line).expect(2, &["failed to lock", &expected]);
        }
        package.bench("s3", "n64 --save-baseline a").expect(2, &[&expected]);
        std::fs::remove_dir_all(package.path("target/kernelgate/runs/s3")).unwrap();
        std::fs::remove_file(&lock).unwrap();
    };
    assert!(Command::new("mkfifo").arg(&lock).status().unwrap().success());
    refused("a device, a pipe or a socket");
    std::os::unix::fs::symlink(&victim, &lock).unwrap();
    refused("a link");
    assert!(!victim.exists());
    package.kernelgate("baseline add a").expect(0, &[]);
    let folder = package.path("target/kernelgate/compare");
    std::fs::create_dir_all(&folder).unwrap();
    std::os::unix::fs::symlink(&victim, folder.join("lock")).unwrap();
    package.dir();
    let line = "compare --base-dir executables --head-dir executables";
    package.kernelgate(line).expect(2, &["compare/lock is no lock file but a link"]);
    assert!(!victim.exists());
}

/// A record names files by plain names, never by paths.
#[test]
fn a_run_that_names_a_path_is_refused() {
    let (package, _) = package();
    let run = package.run("s2");
    for (field, value, said) in [
        ("bench", "../../../x".into(), "bench `../../../x` holds `/`"),
        ("bench", "".into(), "bench `` is empty"),
        ("session", "../../q".into(), "session `../../q` is no plain name"),
        ("started", "yesterday".into(), "started: `yesterday` is no time"),
        ("seed", serde_json::Value::from("9".repeat(100_000)), "invalid type: string \"999"),
    ] {
        let mut run = run.clone();
        run[field] = value;
        std::fs::write(package.record("s2"), run.to_string()).unwrap();
        let outcome = package.kernelgate("gate --baseline a");
        outcome.expect(2, &["fixture.json: invalid run: ", said]);
        assert!(outcome.stderr.len() < 1000, "{}", outcome.stderr.len());
    }
    let mut run = run;
    run["cases"][CASE]["verification"]["max_error"] = (-1).into();
    std::fs::write(package.record("s2"), run.to_string()).unwrap();
    package.kernelgate("gate --baseline a").expect(2, &[CASE, "an error of -1"]);
}

#[test]
fn other_files_beside_the_benches_are_not_run() {
    let package = Package::new();
    std::fs::create_dir(package.path("bin")).unwrap();
    copy_executable(fixture_path(), package.path("bin/fixture"));
    let script = package.path("bin/script");
    std::fs::write(&script, format!("#!/bin/sh\necho > {}\n", package.path("ran").display()))
        .unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let fifo = Command::new("mkfifo").arg("-m").arg("755").arg(package.path("bin/fifo")).status();
    assert!(fifo.unwrap().success());
    let compare = |flags: &str| {
        let line = format!(
            "compare --base-dir bin --head-dir bin --time-identical --backend cpu --max-blocks 1 \
             --case-time 0.03s {flags}"
        );
        package.kernelgate(&line)
    };
    let outcome = compare("n64");
    let why =
        "left alone: script of the base: its file has no mark of this harness, so it was not run";
    outcome.expect(outcome.code.unwrap(), &[CASE, why, "`--bench script`", "of 1 (threshold"]);
    insta::assert_snapshot!(lines_with(&outcome.stdout, "script"), @"bench left alone: script: its file has no mark of this harness, so it was not run; `--bench script` runs it all the same");
    assert!(!package.path("ran").exists());
    compare("--bench script").expect(2, &["left alone: script of the base: asked by --bench"]);
    assert!(package.path("ran").exists());
    let mark = kernelgate::protocol::BENCH_MARK.as_bytes();
    let fixture = std::fs::read(fixture_path()).unwrap();
    assert!(fixture.windows(mark.len()).any(|bytes| bytes == mark));
}

#[test]
fn a_commit_that_is_given_is_one_and_is_recorded_as_stated() {
    let package = Package::new();
    let bench = |commit: &str, line: &str| -> Outcome {
        let mut bench = package.bench_command("s1", line);
        bench.env("KERNELGATE_COMMIT", commit).output().unwrap().into()
    };
    for bad in ["v1\u{1b}[31m\n", "main", "--output=x", "1a2b3c", "1a2b+changes+changes"] {
        let refused = bench(bad, "n64 --save-baseline a");
        harmless(refused.expect(2, &["KERNELGATE_COMMIT=`", "is no commit: 7 to 64 hexadecimal"]));
    }
    bench("1a2b3c4d5e+changes", "n64").expect(0, &[]);
    assert_eq!(package.run("s1")["stated_commit"], true);
    let expected =
        "the commit 1a2b3c4d+changes of the run s1/fixture is as KERNELGATE_COMMIT stated";
    package.kernelgate("baseline add a").expect(0, &[expected]);
    package.kernelgate("baseline show a").expect(0, &["1a2b3c4d+changes (as stated)"]);
}

#[test]
fn an_executable_that_was_copied_here_is_not_of_this_checkout() {
    let package = Package::new();
    for line in ["init -q", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m x"] {
        let git =
            Command::new("git").arg("-C").arg(package.folder.path()).args(line.split(' ')).status();
        assert!(git.unwrap().success());
    }
    package.bench("cargo", "n64").expect(0, &[]);
    assert!(package.run("cargo")["provenance"]["commit"].is_string());
    let folder = package.dir();
    let copied = Path::new(folder.strip_prefix("--dir ").unwrap()).join("fixture");
    let mut bench = package.command(&copied, "--bench --noplot --sample-size 10 n64");
    bench.env_remove("CARGO_MANIFEST_DIR").env("KERNELGATE_SESSION", "copied");
    Outcome::from(bench.output().unwrap()).expect(0, &["no commit is recorded"]);
    assert!(package.run("copied")["provenance"]["commit"].is_null());
}

#[test]
fn a_revision_that_looks_like_an_option_is_not_found() {
    let package = Package::new();
    let git =
        Command::new("git").arg("-C").arg(package.folder.path()).args(["init", "--quiet"]).status();
    assert!(git.unwrap().success());
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    for revision in ["--output=victim", "--all", "-n1"] {
        let mut compare = package.command(program, "compare");
        let outcome = Outcome::from(compare.arg(format!("--base={revision}")).output().unwrap());
        outcome.expect(2, &[&format!("no revision `{revision}`")]);
    }
    assert!(!package.path("victim").exists());
}

#[test]
fn paths_that_are_not_utf8_are_errors() {
    use std::os::unix::ffi::OsStrExt;
    let package = Package::new();
    let odd = package.folder.path().join(std::ffi::OsStr::from_bytes(b"odd\xff"));
    std::fs::create_dir(&odd).unwrap();
    let dir = package.dir();
    let run = |line: &str, temporary: &Path| -> Outcome {
        let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
        let mut command = package.command(program, &format!("{line} {dir}"));
        command.current_dir(&odd).env("TMPDIR", temporary).env("KERNELGATE_BACKEND", "cpu");
        command.output().unwrap().into()
    };
    run("list", &std::env::temp_dir()).expect(0, &[CASE]);
    run("verify n64 --dump dumped", &std::env::temp_dir()).expect(2, &["--dump: ", "is not UTF-8"]);
    run("list", &odd).expect(2, &["request.json: invalid request: path contains invalid UTF-8"]);
    let mut compare = package.command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), "compare");
    let compare = compare.arg("--base-dir").arg(&odd).arg("--head-dir").arg(&odd);
    let outcome = Outcome::from(compare.output().unwrap());
    assert!(outcome.code == Some(2) && !outcome.all().contains("panicked"), "{}", outcome.all());
}

#[test]
fn broken_results_of_criterion_are_named() {
    let package = Package::new();
    package.bench("s1", "n64 --save-baseline x").expect(0, &[]);
    let folder = package.path("target/criterion/fixture_spin_n64_none/cpu_hot/x");
    for (name, text) in [
        ("sample.json", "{"),
        ("sample.json", r#"{"sampling_mode":"Flat","iters":[1],"times":[1]}"#),
        ("estimates.json", "{}"),
    ] {
        let before = std::fs::read(folder.join(name)).unwrap();
        std::fs::write(folder.join(name), text).unwrap();
        for line in ["--load-baseline x --baseline x", "--baseline x", "--baseline-lenient x"] {
            package.bench("s2", &format!("n64 {line}")).expect(
                2,
                &["Criterion's baseline `x` of fixture/spin/n64_none/cpu/hot is broken"],
            );
        }
        std::fs::write(folder.join(name), before).unwrap();
    }
    package.bench("s2", "n64 --baseline-lenient absent").expect(0, &[]);
}

#[test]
fn wrong_variables_are_named_and_empty_ones_count_as_unset() {
    let package = Package::new();
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let dir = package.dir();
    let both = |set: &[(&str, &str)], flags: &str| -> [Outcome; 2] {
        let list = package.command(program, &format!("list {flags} {dir}"));
        let bench = package.command(&fixture_path(), &format!("--bench --list {flags}"));
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
        outcome.expect(0, &[CASE]);
        assert!(!outcome.stderr.contains("nothing reads"), "{}", outcome.stderr);
    }
    for outcome in both(&[("KERNELGATE_EFFORT", "much")], "n64") {
        outcome.expect(2, &["invalid value 'much' in the variable KERNELGATE_EFFORT"]);
    }
    for outcome in both(&[("KERNELGATE_EFFORT", "much")], "--effort more") {
        outcome.expect(2, &["invalid value 'more' for '--effort <EFFORT>'"]);
    }
    for outcome in both(&[("KERNELGATE_EFORT", "quick")], "n64") {
        let words = "nothing reads the variable KERNELGATE_EFORT: did you mean KERNELGATE_EFFORT?";
        outcome.expect(0, &[words]);
        assert_eq!(outcome.stderr.matches("nothing reads").count(), 1, "{}", outcome.stderr);
    }
}
