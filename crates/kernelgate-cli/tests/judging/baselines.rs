//! Baselines and the output of the gate, from outside: several runs, levels of sameness, formats.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::package::{CASE, Outcome, Package, fixture_path, lines_with};

/// A package with a baseline `a` of 200 µs from two runs of its own and a last run of `time_ns`.
fn package(time_ns: f64) -> Package {
    let package = Package::new();
    package.bench("b1", "--save-baseline a").expect(0, &[]);
    package.bench("b2", "").expect(0, &[]);
    package.kernelgate("baseline add a").expect(0, &["up to 2 runs each"]);
    package.set_times(&package.baseline("a"), 200_000.0);
    package.bench("head", "").expect(0, &[]);
    package.set_times(&package.record("head"), time_ns);
    package
}

#[test]
fn the_gate_speaks_to_reviewers_and_programs() {
    let package = package(300_000.0);
    let out = |format: &str| {
        let outcome = package.kernelgate(&format!("gate --baseline a --format {format}"));
        assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
        outcome.stdout
    };
    let comment = out("markdown");
    for words in [
        "**2 regressed",
        "- base: baseline `a` of",
        "0 days ago",
        "noise floor",
        &format!("| {CASE}"),
        "kernelgate gate",
    ] {
        assert!(comment.contains(words), "`{words}` is not in:\n{comment}");
    }
    let junit = out("junit");
    assert!(junit.contains("failures=\"2\"") && junit.contains("type=\"regressed\""), "{junit}");
    assert_eq!(junit, out("junit"));
    let bmf: serde_json::Value = serde_json::from_str(&out("bmf")).unwrap();
    let value = bmf[CASE]["latency"]["value"].as_f64().unwrap();
    assert!((value / 300_000.0 - 1.0).abs() < 1e-3, "{bmf}");
    let runs = package.kernelgate("runs --format smaller-is-better");
    runs.expect(0, &["\"unit\": \"ns\"", CASE]);
    let (problem, row) = CASE.split_at(CASE.find("/cpu").unwrap());
    let table = [problem, &row[1..], "spread"];
    package.kernelgate("runs").expect(0, &table);
    package.kernelgate("runs --out kept").expect(0, &table);
    let kept = std::fs::read_to_string(package.path("kept/smaller-is-better.json")).unwrap();
    assert_eq!(kept, runs.stdout);
    assert_eq!(std::fs::read_dir(package.path("kept")).unwrap().count(), 4);
    package.kernelgate("gate --baseline a --out out").expect(1, &["2 regressed"]);
    for (name, text) in [("comment.md", &comment), ("junit.xml", &junit)] {
        assert_eq!(&std::fs::read_to_string(package.path("out").join(name)).unwrap(), text);
    }
    let files = std::fs::read_dir(package.path("out")).unwrap().count();
    assert_eq!(files, 7, "with the page and the picture");
    std::fs::write(package.path("blocked"), "in the way").unwrap();
    package
        .kernelgate("gate --baseline a --out blocked")
        .expect(2, &["2 regressed", "--out: failed to write", "blocked"]);
    // Before anything is built or measured where that would take time.
    package
        .kernelgate("compare --base-dir none --head-dir none --out blocked")
        .expect(2, &["--out: failed to write", "blocked"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_gate_whose_reports_do_not_fit_on_the_disk_leaves_the_earlier_set() {
    let package = package(200_000.0);
    package.kernelgate("gate --baseline a --out reports").expect(0, &["2 unchanged"]);
    let files = || -> std::collections::BTreeMap<_, _> {
        let entries = std::fs::read_dir(package.path("reports")).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
    };
    let earlier = files();
    package.set_times(&package.record("head"), 300_000.0);
    // The comment fits, the page does not.
    let program = env!("CARGO_BIN_EXE_kernelgate");
    let mut shell = package.command(Path::new("sh"), "-c");
    let gate = format!("exec {program} gate --baseline a --out reports");
    let line = format!("trap '' XFSZ; ulimit -f 16; {gate}");
    let full: Outcome = shell.arg(line).output().unwrap().into();
    full.expect(2, &["2 regressed", "--out: failed to write", "File too large"]);
    assert_eq!(files(), earlier);
}

#[test]
fn a_baseline_that_is_a_link_to_nothing_is_named() {
    let package = package(200_000.0);
    let baseline = package.baseline("a");
    std::fs::remove_file(&baseline).unwrap();
    std::os::unix::fs::symlink("nowhere.json", &baseline).unwrap();
    for line in ["gate --baseline a", "baseline show a", "baseline add a"] {
        package.kernelgate(line).expect(2, &["a.json: a link to nothing (nowhere.json)"]);
    }
}

/// A release may read files of the next one, but not rewrite them, and the reverse.
#[test]
fn a_file_of_a_newer_version_is_refused_and_not_rewritten_without_what_is_new() {
    let package = package(230_000.0);
    let path = package.baseline("a");
    let before: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let with = |field: &str, value: serde_json::Value| {
        let mut changed = before.clone();
        changed[field] = value;
        changed
    };
    let mut newer = with("schema_version", 4.into());
    newer["clock_domain"] = "new in version 4".into();
    let newer = newer.to_string();
    std::fs::write(&path, &newer).unwrap();
    let words = "written by a newer kernelgate (schema 4, this one reads up to 3)";
    let seal = format!("baseline seal {}", path.display());
    for line in ["gate --baseline a", "baseline add a", "baseline show a", &seal] {
        package.kernelgate(line).expect(2, &[words]);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), newer, "{line}");
    }
    // Version 3 reads version 2: a field that others may ignore keeps the version.
    std::fs::write(&path, with("remark", "ignored by version 2".into()).to_string()).unwrap();
    let judged = package.kernelgate("gate --baseline a");
    judged.expect(judged.code.unwrap(), &["has no checksum", "of 2 (threshold"]);
    // No file of before the first release passes as one of it.
    std::fs::write(&path, with("schema", "kernelgate.baseline".into()).to_string()).unwrap();
    package.kernelgate("gate --baseline a").expect(2, &["not a kernelgate baseline"]);
}

#[test]
fn another_machine_of_the_same_model_is_tolerated_more() {
    let package = package(240_000.0);
    package.kernelgate("gate --baseline a").expect(1, &["2 regressed"]);
    let record = package.record("head");
    let text = std::fs::read_to_string(&record).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    value["environment"]["machine"] = "another".into();
    std::fs::write(&record, value.to_string()).unwrap();
    let words =
        ["2 unchanged", "host another in the run", "differ by 22%", "28.1% in place of 5.0%"];
    package.kernelgate("gate --baseline a").expect(0, &words);
    package
        .kernelgate("gate --baseline a --other-device 0.01")
        .expect(1, &["2 regressed", "6.1% in place of 5.0%"]);
    package.kernelgate("gate --baseline a --other-device x").expect(2, &["--other-device"]);
}

#[test]
fn saving_over_a_baseline_of_several_runs_does_not_weaken_the_gate() {
    let package = Package::new();
    let bench = |session: &str, commit: &str| -> Outcome {
        let mut command = package.bench_command(session, "n64 --save-baseline a");
        command.env("KERNELGATE_COMMIT", commit).output().unwrap().into()
    };
    bench("s1", "aaaa1111").expect(0, &["saved as baseline `a`"]);
    let second = bench("s2", "aaaa1111");
    second.expect(0, &["baseline `a`: this run adds to others of the same build, now 2"]);
    package.set_times(&package.baseline("a"), 200_000.0);
    package.bench("head", "n64").expect(0, &[]);
    package.set_times(&package.record("head"), 240_000.0);
    package.kernelgate("gate --baseline a").expect(1, &["1 regressed", "2:1"]);
    bench("s3", "bbbb2222").expect(
        0,
        &[
            "this run will replace 2 runs of aaaa1111 in 1 case; the gate keeps how they differed",
            "this run replaced 2 runs of aaaa1111 in 1 case",
        ],
    );
    package.set_times(&package.baseline("a"), 200_000.0);
    let head = package.record("head").parent().unwrap().display().to_string();
    package
        .kernelgate(&format!("gate --baseline a --session {head}"))
        .expect(1, &["1 regressed", "1:1", "as the several runs differed that it replaced"]);
    // Adding by hand does not evade the check.
    package
        .kernelgate(&format!("baseline add a --session {head}"))
        .expect(4, &["refused: commit is `bbbb2222` in the baseline and `no commit` in the run"]);
}

/// Waits for processes that were started together, and checks that all succeeded.
#[track_caller]
fn expect_success(processes: Vec<std::process::Child>) {
    for process in processes {
        Outcome::from(process.wait_with_output().unwrap()).expect(0, &[]);
    }
}

#[test]
fn runs_that_are_added_at_once_are_all_kept() {
    let package = Package::new();
    package.bench("s0", "n64").expect(0, &[]);
    let record = std::fs::read_to_string(package.record("s0")).unwrap();
    let sessions: Vec<String> = (0..12).map(|number| format!("s{number}")).collect();
    for session in &sessions {
        std::fs::create_dir_all(package.record(session).parent().unwrap()).unwrap();
        std::fs::write(
            package.record(session),
            record.replace("\"s0\"", &format!("\"{session}\"")),
        )
        .unwrap();
    }
    // The checkouts have target folders of their own and share the folder of baselines.
    let add = |session: &String| {
        let folder = package.record(session).parent().unwrap().display().to_string();
        let line = format!("--baselines shared baseline add a --session {folder}");
        let mut command = package.command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), &line);
        command.env("CARGO_TARGET_DIR", package.path(&format!("target-{session}")));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    expect_success(sessions.iter().map(add).collect());
    let device = std::fs::read_dir(package.path("shared")).unwrap().next().unwrap().unwrap().path();
    let files: Vec<_> =
        std::fs::read_dir(&device).unwrap().flatten().map(|file| file.file_name()).collect();
    assert_eq!(files, ["a.json"], "no lock is left for git to see");
    let baseline: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(device.join("a.json")).unwrap()).unwrap();
    let kept: Vec<&String> = baseline["runs"].as_object().unwrap().keys().collect();
    let mut wanted: Vec<String> =
        sessions.iter().map(|session| format!("{session}/fixture")).collect();
    wanted.sort();
    assert_eq!(kept, wanted.iter().collect::<Vec<_>>());
}

#[test]
fn a_baseline_that_another_process_changes_is_waited_for() {
    let package = package(200_000.0);
    let path = package.baseline("a");
    let before = std::fs::read_to_string(&path).unwrap();
    let session = |number: usize| format!("at-once-{number}");
    let lock = kernelgate::record::FileLock::acquire_for_file(&path).unwrap();
    let bench = |number: usize| {
        let line = format!("--axis n={} --save-baseline a", 2 + number);
        let mut command = package.bench_command(&session(number), &line);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut processes: Vec<_> = (0..4).map(bench).collect();
    for flags in [
        format!("baseline add a --session {}", package.record("b2").parent().unwrap().display()),
        format!("baseline seal {}", path.display()),
    ] {
        let mut command = package.command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), &flags);
        processes.push(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    }
    let complete = |number| {
        std::fs::read_to_string(package.record(&session(number)))
            .is_ok_and(|text| text.contains("\"complete\": true"))
    };
    let started = Instant::now();
    while !(0..4).all(complete) {
        assert!(started.elapsed() < Duration::from_secs(50), "the runs do not end");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(200));
    assert!(
        std::fs::read_to_string(&path).unwrap() == before,
        "written while another held the lock"
    );
    for process in &mut processes {
        assert_eq!(process.try_wait().unwrap(), None, "it did not wait");
    }
    drop(lock);
    expect_success(processes);
    let after = std::fs::read_to_string(&path).unwrap();
    for number in 0..4 {
        assert!(
            after.contains(&format!("\"fixture/spin/n{}_none/cpu/hot\"", 2 + number)),
            "{number}"
        );
    }
}

/// Puts a script in cargo's place for `baseline save`.
#[cfg(unix)]
fn set_cargo(package: &Package, body: &str) {
    use std::os::unix::fs::PermissionsExt;
    let cargo = package.path("cargo");
    std::fs::write(&cargo, format!("#!/bin/sh\nshift\n{body}\n")).unwrap();
    std::fs::set_permissions(&cargo, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// A script that runs the fixture for a short time.
#[cfg(unix)]
fn run_fixture() -> String {
    let brief = "--noplot --warm-up-time 0.01 --measurement-time 0.05 --sample-size 10";
    format!("exec {} --bench {brief} \"$@\"", fixture_path().display())
}

/// A baseline with the name of a link is the file to which the link leads.
#[cfg(unix)]
#[test]
fn a_baseline_behind_a_link_is_written_where_it_lies() {
    let package = package(200_000.0);
    let (link, file) = (package.baseline("a"), package.path("shared.json"));
    std::fs::rename(&link, &file).unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let runs = || {
        let value: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        value["runs"].as_object().unwrap().len()
    };
    let before = runs();
    package.bench("more", "n64 --save-baseline a").expect(0, &[]);
    package.bench("last", "n64").expect(0, &[]);
    package.kernelgate("baseline add a").expect(0, &["shared.json"]);
    package.kernelgate(&format!("baseline seal {}", link.display())).expect(0, &["shared.json"]);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(runs() > before, "{} of {before}", runs());
}

#[cfg(unix)]
fn save_command(package: &Package, line: &str) -> std::process::Command {
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let mut command = package.command(program, &format!("baseline save {line}"));
    command.env("CARGO", package.path("cargo"));
    command
}

#[cfg(unix)]
#[test]
fn a_baseline_that_cannot_be_saved_is_found_before_measuring_and_runs_are_kept() {
    let package = package(200_000.0);
    let save = |line: &str| -> Outcome { save_command(&package, line).output().unwrap().into() };
    let path = package.baseline("a");
    let before = std::fs::read_to_string(&path).unwrap();
    set_cargo(&package, &run_fixture());
    std::fs::write(&path, "{").unwrap();
    let broken = save("a --runs 2 -- n64");
    broken.expect(2, &["a.json: broken or cut short"]);
    assert!(!broken.stderr.contains("run 1 of"), "{}", broken.stderr);
    std::fs::write(&path, &before).unwrap();
    // A later run fails: the runs until then are kept.
    set_cargo(&package, &format!("[ -e second ] && exit 3; touch second\n{}", run_fixture()));
    let failed = save("a --runs 3 -- n64");
    failed.expect(2, &["cargo bench ended with exit status: 3: the baseline is as it was"]);
    assert_eq!(std::fs::read_to_string(&path).unwrap(), before);
    let add = failed.stderr.split('`').find_map(|it| it.strip_prefix("kernelgate baseline add a "));
    package
        .kernelgate(&format!("baseline add a {}", add.unwrap()))
        .expect(0, &["2 cases, up to 3 runs each"]);
}

#[cfg(unix)]
#[test]
fn an_interrupted_save_ends_what_it_started() {
    let package = Package::new();
    // The process that cargo starts, and its own child.
    set_cargo(&package, "sleep 600 &\necho $! > pid.new; mv pid.new pid; wait");
    let mut save = save_command(&package, "a --runs 2");
    let mut save = save.stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let pid = wait_for(|| std::fs::read_to_string(package.path("pid")).ok());
    let running = || {
        let state = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
        state.is_ok_and(|state| !state.contains(") Z "))
    };
    let term = std::process::Command::new("kill").arg(save.id().to_string()).status();
    assert!(term.unwrap().success());
    let code = wait_for(|| save.try_wait().unwrap());
    let outcome = Outcome::from(save.wait_with_output().unwrap());
    assert_eq!(code.code(), Some(130), "{}", outcome.all());
    insta::assert_snapshot!(lines_with(&outcome.stderr, "interrupted"), @"interrupted: baseline `a` is as it was");
    wait_for(|| (!running()).then_some(()));
}

/// Waits for a condition and returns its value.
#[cfg(unix)]
#[track_caller]
fn wait_for<T>(mut condition: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(started.elapsed() < Duration::from_secs(50), "it does not happen");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_interrupted_run_is_added_with_a_warning_and_an_empty_one_is_not() {
    let package = package(200_000.0);
    let path = package.record("head");
    let mut run: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    run["complete"] = false.into();
    std::fs::write(&path, run.to_string()).unwrap();
    package.kernelgate("baseline add a").expect(
        0,
        &["up to 3 runs each", "head/fixture did not get to its end: only its 2 finished cases"],
    );
    let interrupted = "interrupted: bench `fixture` did not get to its end";
    for flags in ["", "--costs"] {
        package.kernelgate(&format!("runs {flags}")).expect(0, &["n64_none", interrupted]);
    }
    let page = package.path("page");
    package.kernelgate(&format!("report --out {}", page.display())).expect(0, &[]);
    let html = std::fs::read_to_string(page.join("index.html")).unwrap();
    assert!(html.contains("interrupted") && html.contains("fixture"));
    let before = std::fs::read_to_string(package.baseline("a")).unwrap();
    run["cases"] = serde_json::json!({});
    std::fs::write(&path, run.to_string()).unwrap();
    package.kernelgate("baseline add a").expect(2, &["no case was measured: there is nothing"]);
    assert_eq!(std::fs::read_to_string(package.baseline("a")).unwrap(), before);
}

#[cfg(unix)]
#[test]
fn several_runs_are_saved_in_one_go() {
    let package = Package::new();
    let script = |body: &str| set_cargo(&package, body);
    let run = run_fixture();
    let save = |line: &str| -> Outcome { save_command(&package, line).output().unwrap().into() };
    script(&run);
    save("a --runs 3 -- n64").expect(0, &["run 3 of 3", "1 case, 3 runs each"]);
    package.kernelgate("baseline list").expect(0, &["/a", "  1     3  "]);
    package
        .kernelgate(&format!("baseline find a --backend cpu {}", package.dir()))
        .expect(0, &["a.json"]);
    package
        .kernelgate(&format!("baseline find b --backend cpu {}", package.dir()))
        .expect(2, &["no baseline `b` for", "/a"]);
    let before = std::fs::read_to_string(package.baseline("a")).unwrap();
    script(&format!("[ -e second ] && exit 3; touch second\n{run}"));
    save("a --runs 2")
        .expect(2, &["cargo bench ended with exit status: 3: the baseline is as it was"]);
    assert_eq!(std::fs::read_to_string(package.baseline("a")).unwrap(), before);
    // Saving replaces the measured cases, and keeps the rest.
    script(&run);
    save("a --runs 2 -- n128").expect(0, &["1 case, 2 runs each"]);
    package.kernelgate("baseline show a").expect(0, &["n64_none", "n128_none"]);
    save("../a").expect(2, &["baseline name `../a`"]);
    save("a --runs 0").expect(2, &["--runs"]);
}

#[cfg(unix)]
#[test]
fn a_folder_of_baselines_that_cannot_be_read_is_not_an_empty_one() {
    let package = Package::new();
    package.kernelgate("baseline list").expect(0, &["no baselines in"]);
    std::os::unix::fs::symlink("baselines", package.path("baselines")).unwrap();
    package.kernelgate("baseline list").expect(2, &["failed to read", "baselines"]);
    std::fs::remove_file(package.path("baselines")).unwrap();
    std::fs::create_dir(package.path("baselines")).unwrap();
    std::os::unix::fs::symlink("circle", package.path("baselines/circle")).unwrap();
    package.kernelgate("baseline list").expect(2, &["failed to read", "circle"]);
}

#[test]
fn an_imported_baseline_has_cases_and_a_checksum_or_a_warning() {
    let package = package(200_000.0);
    package.kernelgate("baseline export a out.json").expect(0, &[]);
    let sealed = package.kernelgate("baseline import out.json --name b");
    sealed.expect(0, &["2 cases to"]);
    assert!(!sealed.stderr.contains("no checksum"), "{}", sealed.stderr);
    let text = std::fs::read_to_string(package.path("out.json")).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    value.as_object_mut().unwrap().remove("checksum");
    std::fs::write(package.path("out.json"), value.to_string()).unwrap();
    package
        .kernelgate("baseline import out.json --name c")
        .expect(0, &["2 cases to", "warning: out.json has no checksum"]);
    value["cases"] = serde_json::json!({});
    std::fs::write(package.path("out.json"), value.to_string()).unwrap();
    package.kernelgate("baseline import out.json --name d").expect(2, &["holds no case"]);
    package.kernelgate("baseline import out.json --name nul").expect(2, &["holds no case"]);
    package.bench("x", "--save-baseline aux.txt").expect(2, &["Windows has a device of that name"]);
}

/// The data that the gate needs of a case and run take less than a kilobyte; samples stay in the
/// runs.
#[test]
fn committed_baselines_are_compact() {
    let baselines = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../baselines");
    let mut seen = 0;
    for entry in std::fs::read_dir(baselines).unwrap() {
        let path = entry.unwrap().path().join("main.json");
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let baseline: kernelgate::record::Baseline = kernelgate::record::read(&path).unwrap();
        let runs: usize = baseline.cases.values().map(|case| case.runs.len()).sum();
        assert!(runs > 0 && text.len() < 1000 * runs, "{}: {} B", path.display(), text.len());
        seen += 1;
    }
    assert!(seen > 0);
}
