//! Tests of baselines and of the gate's output: several runs, equal or similar machines, output
//! formats.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::package::outcome::redact_varying_parts;
use crate::package::{
    FIXTURE_CASE_ID, ProcessOutcome, TempPackage, fixture_path, html_elements_with_words,
    lines_with_word,
};

fn read_json_file(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Verdicts of a gate against the baseline `a`, which ends with this code.
#[track_caller]
fn gate_verdicts_with_exit_code(package: &TempPackage, code: i32, flags: &str) -> Vec<String> {
    let gate = package.run_kernelgate(&format!("gate --baseline a --format json {flags}"));
    gate.assert_exit(code).json_verdicts()
}

/// A package with a baseline `a` of 200 µs from two runs of its own and a last run of `time_ns`.
fn package_with_baseline_and_run(time_ns: f64) -> TempPackage {
    let package = TempPackage::new();
    package.run_fixture_bench("b1", "--save-baseline a").assert_exit(0);
    package.run_fixture_bench("b2", "").assert_exit(0);
    package.run_kernelgate("baseline add a").assert_exit(0);
    package.set_record_times(&package.baseline_path("a"), 200_000.0);
    package.run_fixture_bench("head", "").assert_exit(0);
    package.set_record_times(&package.run_record_path("head"), time_ns);
    package
}

#[test]
fn the_formats_of_a_gate_and_of_runs_are_also_files_of_a_folder() {
    let package = package_with_baseline_and_run(300_000.0);
    let out = |format: &str| {
        let outcome = package.run_kernelgate(&format!("gate --baseline a --format {format}"));
        outcome.assert_exit(1);
        outcome.stdout
    };
    let (comment, junit) = (out("markdown"), out("junit"));
    let bmf: serde_json::Value = serde_json::from_str(&out("bmf")).unwrap();
    let value = bmf[FIXTURE_CASE_ID]["latency"]["value"].as_f64().unwrap();
    assert!((value / 300_000.0 - 1.0).abs() < 1e-3, "{bmf}");
    let runs = package.run_kernelgate("runs --format smaller-is-better");
    let cases = runs.assert_exit(0).stdout_as_json();
    assert_eq!(
        (&cases[1]["name"], &cases[1]["unit"]),
        (&FIXTURE_CASE_ID.into(), &"ns".into()),
        "{cases}"
    );
    let table = package.run_kernelgate("runs --out kept");
    assert_eq!(table.assert_exit(0).stdout, package.run_kernelgate("runs").stdout);
    let kept =
        std::fs::read_to_string(package.package_path("kept/smaller-is-better.json")).unwrap();
    assert_eq!(kept, runs.stdout);
    assert_eq!(std::fs::read_dir(package.package_path("kept")).unwrap().count(), 4);
    package.run_kernelgate("gate --baseline a --out out").assert_exit(1);
    for (name, text) in [("comment.md", &comment), ("junit.xml", &junit)] {
        assert_eq!(&std::fs::read_to_string(package.package_path("out").join(name)).unwrap(), text);
    }
    let files = std::fs::read_dir(package.package_path("out")).unwrap().count();
    assert_eq!(files, 7, "with the page and the picture");
}

#[test]
fn a_folder_of_reports_that_cannot_be_written_never_hides_the_verdicts() {
    let package = package_with_baseline_and_run(300_000.0);
    std::fs::write(package.package_path("blocked"), "in the way").unwrap();
    let blocked = package.run_kernelgate("gate --baseline a --out blocked --format json");
    assert_eq!(blocked.assert_exit(2).json_verdicts(), ["regressed", "regressed"]);
    insta::assert_snapshot!(redact_varying_parts(&blocked.stderr), @"error: --out: failed to write blocked: File exists (os error 17)");
    // The unwritable output folder is reported before anything is built or measured.
    let compare = package.run_kernelgate("compare --base-dir none --head-dir none --out blocked");
    insta::assert_snapshot!(compare.refusal_message(2), @"error: --out: failed to write blocked/result.json: File exists (os error 17)");
}

#[cfg(target_os = "linux")]
#[test]
fn a_gate_whose_reports_do_not_fit_on_the_disk_leaves_the_earlier_set() {
    let package = package_with_baseline_and_run(200_000.0);
    assert_eq!(
        gate_verdicts_with_exit_code(&package, 0, "--out reports"),
        ["unchanged", "unchanged"]
    );
    let files = || -> std::collections::BTreeMap<_, _> {
        let entries = std::fs::read_dir(package.package_path("reports")).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
    };
    let earlier = files();
    package.set_record_times(&package.run_record_path("head"), 300_000.0);
    // The limit on file size lets the comment file be written, but not the larger HTML page.
    let program = env!("CARGO_BIN_EXE_kernelgate");
    let mut shell = package.package_command(Path::new("sh"), "-c");
    let gate = format!("exec {program} gate --baseline a --out reports --format json");
    let line = format!("trap '' XFSZ; ulimit -f 16; {gate}");
    let full: ProcessOutcome = shell.arg(line).output().unwrap().into();
    assert_eq!(full.assert_exit(2).json_verdicts(), ["regressed", "regressed"]);
    insta::assert_snapshot!(redact_varying_parts(&full.stderr), @"error: --out: failed to write FOLDER/reports/report.html: File too large (os error 27)");
    assert_eq!(files(), earlier);
}

#[test]
fn a_baseline_that_is_a_link_to_nothing_is_named() {
    let package = package_with_baseline_and_run(200_000.0);
    let baseline = package.baseline_path("a");
    std::fs::remove_file(&baseline).unwrap();
    std::os::unix::fs::symlink("nowhere.json", &baseline).unwrap();
    for line in ["gate --baseline a", "baseline show a", "baseline add a"] {
        insta::allow_duplicates! {
            insta::assert_snapshot!(package.run_kernelgate(line).refusal_message(2), @"error: failed to read FOLDER/baselines/DEVICE/a.json: a link to nothing (nowhere.json)");
        }
    }
}

/// A release may read files of a newer release only if they have the same format version, and
/// rewrites none that it cannot read.
#[test]
fn a_file_of_a_newer_version_is_refused_and_not_rewritten_without_what_is_new() {
    let package = package_with_baseline_and_run(230_000.0);
    let path = package.baseline_path("a");
    let before = read_json_file(&path);
    let with = |field: &str, value: serde_json::Value| {
        let mut changed = before.clone();
        changed[field] = value;
        changed
    };
    let mut newer = with("schema_version", 4.into());
    newer["clock_domain"] = "new in version 4".into();
    let newer = newer.to_string();
    std::fs::write(&path, &newer).unwrap();
    let seal = format!("baseline seal {}", path.display());
    for line in ["gate --baseline a", "baseline add a", "baseline show a", &seal] {
        insta::allow_duplicates! {
            insta::assert_snapshot!(package.run_kernelgate(line).refusal_message(2), @"error: failed to read FOLDER/baselines/DEVICE/a.json: written by a newer kernelgate (schema 4, this one reads up to 3)");
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), newer, "{line}");
    }
    // A field that older programs may ignore does not raise the version of the baseline format; a
    // file with such a field is read.
    std::fs::write(&path, with("remark", "ignored by version 2".into()).to_string()).unwrap();
    let judged =
        package.run_kernelgate("gate --baseline a --format json").assert_exit(3).stdout_as_json();
    assert_eq!(
        (&judged["unsealed"], judged["judged"].as_array().unwrap().len()),
        (&true.into(), 2)
    );
    // A baseline file in a schema from before the first release is not accepted as a released one.
    std::fs::write(&path, with("schema", "kernelgate.baseline".into()).to_string()).unwrap();
    insta::assert_snapshot!(package.run_kernelgate("gate --baseline a").refusal_message(2), @"error: failed to read FOLDER/baselines/DEVICE/a.json: not a kernelgate baseline");
}

#[test]
fn another_machine_of_the_same_model_is_tolerated_more() {
    let package = package_with_baseline_and_run(240_000.0);
    assert_eq!(gate_verdicts_with_exit_code(&package, 1, ""), ["regressed", "regressed"]);
    let record = package.run_record_path("head");
    let mut value = read_json_file(&record);
    value["environment"]["machine"] = "another".into();
    std::fs::write(&record, value.to_string()).unwrap();
    insta::assert_snapshot!(package.run_kernelgate("gate --baseline a").text_for_snapshot(), @r"
    exit 0
    baseline `a` of no commit, recorded DAY, 0 days ago,DEVICE

    case  verdict  baseline  now  change  interval  detectable  runs
    fixture/spin/n128_none/cpu/hot  unchanged  N µs  N µs  +20.0%  +8.0% … +32.0%  42.3%  2:1
    fixture/spin/n64_none/cpu/hot  unchanged  N µs  N µs  +20.0%  +8.0% … +32.0%  42.3%  2:1
    interval: the worst that the ranges of the runs allow; runs: of the baseline, and judged

    the file of the baseline `a` has no checksum: an edit of it is not noticed; `kernelgate baseline seal FILE` takes it as it is
    one process run is judged: ±N% is assumed for the difference between runs; after more of `cargo bench`, `kernelgate gate --last COUNT` shows it
    not known to be the same device (host HASH in the baseline, host another in the run): two of one model may differ by 22%, so that the threshold is 28.1% in place of 5.0%

    0 regressed, 0 improved, 2 unchanged, 0 inconclusive of 2 (threshold 28.1%)
    ");
    let judged = package.run_kernelgate("gate --baseline a --other-device 0.01 --format json");
    assert_eq!(judged.assert_exit(1).json_verdicts(), ["regressed", "regressed"]);
    let threshold = judged.stdout_as_json()["judged"][0]["threshold"].as_f64().unwrap();
    assert_eq!(format!("{threshold:.4}"), "0.0605");
}

#[test]
fn saving_over_a_baseline_of_several_runs_does_not_weaken_the_gate() {
    let package = TempPackage::new();
    let bench = |session: &str, commit: &str| -> ProcessOutcome {
        let mut command = package.bench_command(session, "n64 --save-baseline a");
        command.env("KERNELGATE_COMMIT", commit).output().unwrap().into()
    };
    let messages =
        |outcome: &ProcessOutcome| lines_with_word(&outcome.assert_exit(0).stderr, "baseline `a`");
    insta::assert_snapshot!(messages(&bench("s1", "aaaa1111")), @"saved as baseline `a`");
    insta::assert_snapshot!(messages(&bench("s2", "aaaa1111")), @r"
    baseline `a`: this run adds to others of the same build, now 2
    saved as baseline `a`
    ");
    package.set_record_times(&package.baseline_path("a"), 200_000.0);
    package.run_fixture_bench("head", "n64").assert_exit(0);
    package.set_record_times(&package.run_record_path("head"), 240_000.0);
    let judged = package.run_kernelgate("gate --baseline a --format json");
    assert_eq!(judged.assert_exit(1).json_verdicts(), ["regressed"]);
    assert_eq!(judged.stdout_as_json()["judged"][0]["base_runs"], 2);
    insta::assert_snapshot!(messages(&bench("s3", "bbbb2222")), @r"
    baseline `a`: this run will replace 2 runs of aaaa1111 in 1 case; the gate keeps how they differed
    baseline `a`: this run replaced 2 runs of aaaa1111 in 1 case; the gate keeps how they differed
    saved as baseline `a`
    ");
    package.set_record_times(&package.baseline_path("a"), 200_000.0);
    let head = package.run_record_path("head").parent().unwrap().display().to_string();
    let judged = package.run_kernelgate(&format!("gate --baseline a --session {head}"));
    insta::assert_snapshot!(judged.text_for_snapshot(), @r"
    exit 1
    baseline `a` of bbbb2222, recorded DAY, 0 days ago,DEVICE

    case  verdict  baseline  now  change  interval  detectable  runs
    fixture/spin/n64_none/cpu/hot  regressed  N µs  N µs  +20.0%  +7.8% … +32.3%  16.9%  1:1
    interval: the worst that the ranges of the runs allow; runs: of the baseline, and judged

    the file of the baseline `a` has no checksum: an edit of it is not noticed; `kernelgate baseline seal FILE` takes it as it is
    one process run in the baseline: given up to ±N%, as the several runs differed that it replaced
    one process run is judged: ±N% is assumed for the difference between runs; after more of `cargo bench`, `kernelgate gate --last COUNT` shows it

    1 regressed, 0 improved, 0 unchanged, 0 inconclusive of 1 (threshold 5%)
    ");
    // `baseline add` also refuses a run of another commit, so it cannot hide the slow-down either.
    let added = package.run_kernelgate(&format!("baseline add a --session {head}"));
    insta::assert_snapshot!(added.text_for_snapshot(), @r"
    exit 4
    refused: commit is `bbbb2222` in the baseline and `no commit` in the run head/fixture
    ");
}

/// Waits for processes that were started together, and checks that all succeeded.
#[track_caller]
fn wait_for_successful_processes(processes: Vec<std::process::Child>) {
    for process in processes {
        ProcessOutcome::from(process.wait_with_output().unwrap()).assert_exit(0);
    }
}

#[test]
fn runs_that_are_added_at_once_are_all_kept() {
    let package = TempPackage::new();
    package.run_fixture_bench("s0", "n64").assert_exit(0);
    let record = std::fs::read_to_string(package.run_record_path("s0")).unwrap();
    let sessions: Vec<String> = (0..12).map(|number| format!("s{number}")).collect();
    for session in &sessions {
        std::fs::create_dir_all(package.run_record_path(session).parent().unwrap()).unwrap();
        std::fs::write(
            package.run_record_path(session),
            record.replace("\"s0\"", &format!("\"{session}\"")),
        )
        .unwrap();
    }
    // The processes use different target folders, but share one folder of baselines.
    let add = |session: &String| {
        let folder = package.run_record_path(session).parent().unwrap().display().to_string();
        let line = format!("--baselines shared baseline add a --session {folder}");
        let mut command =
            package.package_command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), &line);
        command.env("CARGO_TARGET_DIR", package.package_path(&format!("target-{session}")));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    wait_for_successful_processes(sessions.iter().map(add).collect());
    let device =
        std::fs::read_dir(package.package_path("shared")).unwrap().next().unwrap().unwrap().path();
    let files: Vec<_> =
        std::fs::read_dir(&device).unwrap().flatten().map(|file| file.file_name()).collect();
    assert_eq!(files, ["a.json"], "no lock is left for git to see");
    let baseline = read_json_file(&device.join("a.json"));
    let kept: Vec<&String> = baseline["runs"].as_object().unwrap().keys().collect();
    let mut wanted: Vec<String> =
        sessions.iter().map(|session| format!("{session}/fixture")).collect();
    wanted.sort();
    assert_eq!(kept, wanted.iter().collect::<Vec<_>>());
}

#[test]
fn a_baseline_that_another_process_changes_is_waited_for() {
    let package = package_with_baseline_and_run(200_000.0);
    let path = package.baseline_path("a");
    let before = std::fs::read_to_string(&path).unwrap();
    let session = |number: usize| format!("at-once-{number}");
    let lock = kernelgate::record::ExclusiveFileLock::acquire_lock_for_file(&path).unwrap();
    let bench = |number: usize| {
        let line = format!("--axis n={} --save-baseline a", 2 + number);
        let mut command = package.bench_command(&session(number), &line);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut processes: Vec<_> = (0..4).map(bench).collect();
    for flags in [
        format!(
            "baseline add a --session {}",
            package.run_record_path("b2").parent().unwrap().display()
        ),
        format!("baseline seal {}", path.display()),
    ] {
        let mut command =
            package.package_command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), &flags);
        processes.push(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    }
    let complete = |number| {
        std::fs::read_to_string(package.run_record_path(&session(number)))
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
    wait_for_successful_processes(processes);
    let after = std::fs::read_to_string(&path).unwrap();
    for number in 0..4 {
        assert!(
            after.contains(&format!("\"fixture/spin/n{}_none/cpu/hot\"", 2 + number)),
            "{number}"
        );
    }
}

/// Replaces cargo by a script for `baseline save`.
#[cfg(unix)]
fn replace_cargo_by_script(package: &TempPackage, body: &str) {
    use std::os::unix::fs::PermissionsExt;
    let cargo = package.package_path("cargo");
    std::fs::write(&cargo, format!("#!/bin/sh\nshift\n{body}\n")).unwrap();
    std::fs::set_permissions(&cargo, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// A script that runs the fixture for a short time.
#[cfg(unix)]
fn script_that_runs_fixture() -> String {
    let brief = "--noplot --warm-up-time 0.01 --measurement-time 0.05 --sample-size 10";
    format!("exec {} --bench {brief} \"$@\"", fixture_path().display())
}

/// A baseline whose file is a symbolic link is read from the link's target and written to it.
#[cfg(unix)]
#[test]
fn a_baseline_behind_a_link_is_written_to_the_link_target() {
    let package = package_with_baseline_and_run(200_000.0);
    let (link, file) = (package.baseline_path("a"), package.package_path("shared.json"));
    std::fs::rename(&link, &file).unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    let runs = || read_json_file(&file)["runs"].as_object().unwrap().len();
    let before = runs();
    package.run_fixture_bench("more", "n64 --save-baseline a").assert_exit(0);
    package.run_fixture_bench("last", "n64").assert_exit(0);
    insta::assert_snapshot!(package.run_kernelgate("baseline add a").text_for_snapshot(), @r"
    exit 0
    2 cases, up to 2 runs each, in FOLDER/shared.json
    ");
    let sealed = package.run_kernelgate(&format!("baseline seal {}", link.display()));
    insta::assert_snapshot!(sealed.text_for_snapshot(), @r"
    exit 0
    sealed without change: 2 cases in FOLDER/shared.json
    ");
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(runs() > before, "{} of {before}", runs());
}

#[cfg(unix)]
fn baseline_save_command(package: &TempPackage, line: &str) -> std::process::Command {
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let mut command = package.package_command(program, &format!("baseline save {line}"));
    command.env("CARGO", package.package_path("cargo"));
    command
}

#[cfg(unix)]
#[test]
fn a_baseline_that_cannot_be_saved_is_found_before_measuring_and_runs_are_kept() {
    let package = package_with_baseline_and_run(200_000.0);
    let save = |line: &str| -> ProcessOutcome {
        baseline_save_command(&package, line).output().unwrap().into()
    };
    let path = package.baseline_path("a");
    let before = std::fs::read_to_string(&path).unwrap();
    replace_cargo_by_script(&package, &script_that_runs_fixture());
    std::fs::write(&path, "{").unwrap();
    insta::assert_snapshot!(save("a --runs 2 -- n64").refusal_message(2), @"error: failed to read FOLDER/baselines/DEVICE/a.json: broken or cut short (EOF while parsing an object at line 1 column 1)");
    std::fs::write(&path, &before).unwrap();
    // If a later run of `baseline save` fails, the records of the runs before it are kept.
    replace_cargo_by_script(
        &package,
        &format!("[ -e second ] && exit 3; touch second\n{}", script_that_runs_fixture()),
    );
    let failed = save("a --runs 3 -- n64");
    let error = lines_with_word(&failed.assert_exit(2).stderr, "error:");
    let session = regex::Regex::new(r"runs/[\w-]+").unwrap();
    insta::assert_snapshot!(session.replace(&redact_varying_parts(&error), "runs/SESSION"), @"error: cargo bench ended with exit status: 3: the baseline is as it was; its finished runs are kept, and `kernelgate baseline add a --session FOLDER/target/kernelgate/runs/SESSION` adds them");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), before);
    let add = error.split('`').find_map(|it| it.strip_prefix("kernelgate baseline add a "));
    let added = package.run_kernelgate(&format!("baseline add a {}", add.unwrap()));
    insta::assert_snapshot!(added.text_for_snapshot(), @r"
    exit 0
    2 cases, up to 3 runs each, in FOLDER/baselines/DEVICE/a.json
    ");
}

#[cfg(unix)]
#[test]
fn an_interrupted_save_kills_its_children() {
    let package = TempPackage::new();
    // The script in place of cargo starts a child process of its own.
    replace_cargo_by_script(&package, "sleep 600 &\necho $! > pid.new; mv pid.new pid; wait");
    let mut save = baseline_save_command(&package, "a --runs 2");
    let mut save = save.stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let pid = poll_until_some(|| std::fs::read_to_string(package.package_path("pid")).ok());
    let running = || {
        let state = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
        state.is_ok_and(|state| !state.contains(") Z "))
    };
    let term = std::process::Command::new("kill").arg(save.id().to_string()).status();
    assert!(term.unwrap().success());
    let code = poll_until_some(|| save.try_wait().unwrap());
    let outcome = ProcessOutcome::from(save.wait_with_output().unwrap());
    assert_eq!(code.code(), Some(130), "{}", outcome.stdout_and_stderr());
    insta::assert_snapshot!(lines_with_word(&outcome.stderr, "interrupted"), @"interrupted: baseline `a` is as it was");
    poll_until_some(|| (!running()).then_some(()));
}

/// Polls a condition until it returns a value, and returns the value.
#[cfg(unix)]
#[track_caller]
fn poll_until_some<T>(mut condition: impl FnMut() -> Option<T>) -> T {
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
    let package = package_with_baseline_and_run(200_000.0);
    let path = package.run_record_path("head");
    let mut run = read_json_file(&path);
    run["complete"] = false.into();
    std::fs::write(&path, run.to_string()).unwrap();
    insta::assert_snapshot!(package.run_kernelgate("baseline add a").text_for_snapshot(), @r"
    exit 0
    2 cases, up to 3 runs each, in FOLDER/baselines/DEVICE/a.json
    -- stderr
    warning: the run head/fixture did not get to its end: only its 2 finished cases are added
    ");
    insta::assert_snapshot!(package.run_kernelgate("runs").text_for_snapshot(), @r"
    exit 0
    case  time  spread  rate  limit  of limit  limited by
    fixture/spin/n64_none
    - cpu/hot  N µs  ±N%  -  -  -  -
    fixture/spin/n128_none
    - cpu/hot  N µs  ±N%  -  -  -  -
    2 unsupported combinations of problem and implementation skipped
    interrupted: bench `fixture` did not get to its end
    ");
    let costs = package.run_kernelgate("runs --costs");
    insta::assert_snapshot!(lines_with_word(&costs.assert_exit(0).stdout, "interrupted"), @"interrupted: bench `fixture` did not get to its end");
    package.run_kernelgate("report --out page").assert_exit(0);
    let html = std::fs::read_to_string(package.package_path("page/index.html")).unwrap();
    insta::assert_snapshot!(html_elements_with_words(&html, "interrupted"), @"interrupted");
    let before = std::fs::read_to_string(package.baseline_path("a")).unwrap();
    run["cases"] = serde_json::json!({});
    std::fs::write(&path, run.to_string()).unwrap();
    insta::assert_snapshot!(package.run_kernelgate("baseline add a").refusal_message(2), @"error: no case was measured: there is nothing to add");
    assert_eq!(std::fs::read_to_string(package.baseline_path("a")).unwrap(), before);
}

#[cfg(unix)]
#[test]
fn several_runs_are_saved_in_one_go() {
    let package = TempPackage::new();
    let save = |line: &str| -> ProcessOutcome {
        baseline_save_command(&package, line).output().unwrap().into()
    };
    replace_cargo_by_script(&package, &script_that_runs_fixture());
    let runs = || {
        let baseline = read_json_file(&package.baseline_path("a"));
        let cases = baseline["cases"].as_object().unwrap().iter();
        let runs = |case: &serde_json::Value| case["runs"]["keys"].as_array().unwrap().len();
        cases.map(|(id, case)| (id.clone(), runs(case))).collect::<Vec<_>>()
    };
    let saved = save("a --runs 3 -- n64");
    insta::assert_snapshot!(redact_varying_parts(&saved.assert_exit(0).stdout), @"1 case, 3 runs each, in FOLDER/baselines/DEVICE/a.json");
    insta::assert_snapshot!(lines_with_word(&saved.stderr, " of 3"), @r"
    run 1 of 3
    run 2 of 3
    run 3 of 3
    ");
    insta::assert_debug_snapshot!(runs(), @r#"
    [
        (
            "fixture/spin/n64_none/cpu/hot",
            3,
        ),
    ]
    "#);
    insta::assert_snapshot!(package.run_kernelgate("baseline list").text_for_snapshot(), @r"
    exit 0
    baseline  cases  runs  newest  commit
    DEVICE/a  1  3  INSTANT  no commit
    ");
    let find = |name: &str| {
        package.run_kernelgate(&format!(
            "baseline find {name} --backend cpu {}",
            package.bench_folder_flags()
        ))
    };
    insta::assert_snapshot!(find("a").text_for_snapshot(), @r"
    exit 0
    FOLDER/baselines/DEVICE/a.json
    ");
    insta::assert_snapshot!(find("b").refusal_message(2), @"error: no baseline `b` for DEVICE in FOLDER/baselines (found: DEVICE/a)");
    // `baseline save` replaces the measured cases of an existing baseline, and keeps the other
    // cases.
    save("a --runs 2 -- n128").assert_exit(0);
    insta::assert_debug_snapshot!(runs(), @r#"
    [
        (
            "fixture/spin/n128_none/cpu/hot",
            2,
        ),
        (
            "fixture/spin/n64_none/cpu/hot",
            3,
        ),
    ]
    "#);
    insta::assert_snapshot!(save("../a").refusal_message(2), @"error: baseline name `DEVICE/a`: use letters, digits, `.`, `_` and `-`, starting with a letter or digit, at most 64 of them");
    insta::assert_snapshot!(save("a --runs 0").refusal_message(2), @r"
    error: invalid value '0' for '--runs <COUNT>': 0 is not in 1..=100

    For more information, try '--help'.
    ");
}

#[cfg(unix)]
#[test]
fn a_folder_of_baselines_that_cannot_be_read_is_not_an_empty_one() {
    let package = TempPackage::new();
    insta::assert_snapshot!(package.run_kernelgate("baseline list").text_for_snapshot(), @r"
    exit 0
    no baselines in FOLDER/baselines: `cargo bench -- --save-baseline NAME` makes one
    ");
    std::os::unix::fs::symlink("baselines", package.package_path("baselines")).unwrap();
    insta::assert_snapshot!(package.run_kernelgate("baseline list").refusal_message(2), @"error: failed to read FOLDER/baselines: Too many levels of symbolic links (os error 40)");
    std::fs::remove_file(package.package_path("baselines")).unwrap();
    std::fs::create_dir(package.package_path("baselines")).unwrap();
    std::os::unix::fs::symlink("circle", package.package_path("baselines/circle")).unwrap();
    insta::assert_snapshot!(package.run_kernelgate("baseline list").refusal_message(2), @"error: failed to read FOLDER/baselines/circle: Too many levels of symbolic links (os error 40)");
}

#[test]
fn an_imported_baseline_has_cases_and_a_checksum_or_a_warning() {
    let package = package_with_baseline_and_run(200_000.0);
    package.run_kernelgate("baseline export a out.json").assert_exit(0);
    let import =
        |name: &str| package.run_kernelgate(&format!("baseline import out.json --name {name}"));
    insta::assert_snapshot!(import("b").text_for_snapshot(), @r"
    exit 0
    2 cases to FOLDER/baselines/DEVICE/b.json
    ");
    let mut value = read_json_file(&package.package_path("out.json"));
    value.as_object_mut().unwrap().remove("checksum");
    std::fs::write(package.package_path("out.json"), value.to_string()).unwrap();
    insta::assert_snapshot!(import("c").text_for_snapshot(), @r"
    exit 0
    2 cases to FOLDER/baselines/DEVICE/c.json
    -- stderr
    warning: out.json has no checksum, so that nobody knows whether it was edited: it is taken as it is
    ");
    value["cases"] = serde_json::json!({});
    std::fs::write(package.package_path("out.json"), value.to_string()).unwrap();
    insta::assert_snapshot!(import("d").refusal_message(2), @"error: out.json holds no case");
    let named = package.run_fixture_bench("x", "--save-baseline aux.txt");
    insta::assert_snapshot!(named.refusal_message(2), @"error: baseline name `aux.txt`: Windows has a device of that name, so that it is no file there");
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
        let baseline: kernelgate::record::BaselineFile =
            kernelgate::record::read_record(&path).unwrap();
        let runs: usize = baseline.cases.values().map(|case| case.runs.len()).sum();
        assert!(runs > 0 && text.len() < 1000 * runs, "{}: {} B", path.display(), text.len());
        seen += 1;
    }
    assert!(seen > 0);
}
