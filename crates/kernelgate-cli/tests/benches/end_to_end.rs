//! The harness and the program from outside: bench processes of the fixture, their records,
//! baselines and the gate.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::package::{CASE, Outcome, Package, fixture_path};

#[test]
fn bench_baseline_and_gate() {
    let package = Package::new();
    let first = package.bench("s1", "--save-baseline a");
    first.expect(
        0,
        &[
            CASE,
            "fixture/spin/n128_none/cpu/hot",
            "2 unsupported combinations of problem and implementation skipped",
            "saved as baseline `a`",
        ],
    );
    let run = package.run("s1");
    assert_eq!(run["complete"], true);
    assert_eq!(run["cases"][CASE]["samples"]["launches"].as_array().unwrap().len(), 10);
    assert_eq!(run["cases"][CASE]["verification"]["checked"], 64);
    package.bench("s2", "--save-baseline b").expect(0, &[]);
    package.kernelgate("baseline list").expect(0, &["/a", "/b"]);
    package.kernelgate("baseline show b").expect(0, &[CASE, "±"]);

    package.set_times(&package.baseline("a"), 200_000.0);
    package.set_times(&package.record("s2"), 204_000.0);
    package
        .kernelgate("gate --baseline a")
        .expect(0, &["unchanged", "+2.0%", "2 unchanged, 0 inconclusive of 2"]);

    package.bench("s3", "").expect(0, &[]);
    package.set_times(&package.record("s3"), 200_000.0);
    package.set_case_times(&package.record("s3"), "n64", 240_000.0);
    let one_run = [
        "inconclusive",
        "+20.0%",
        "the baseline has one process run",
        "kernelgate baseline save a --runs 5",
    ];
    package.kernelgate("gate --baseline a").expect(3, &one_run);
    package.set_case_times(&package.record("s3"), "n64", 300_000.0);
    package
        .kernelgate("gate --baseline a")
        .expect(1, &["regressed", CASE, "+50.0%", "1 regressed, 0 improved, 1 unchanged"]);
    let session = package.path("target/kernelgate/runs/s2");
    package
        .kernelgate(&format!("baseline add a --session {}", session.display()))
        .expect(0, &["up to 2 runs"]);
    package
        .kernelgate("gate --baseline a")
        .expect(1, &["regressed", CASE, "+48.5%", "1 regressed, 0 improved, 1 unchanged"]);
    let json = package.kernelgate("gate --baseline a --format json");
    let report: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(
        (&report["judged"][0]["verdict"], &report["judged"][0]["case"]),
        (&"regressed".into(), &CASE.into())
    );
    assert_eq!(report["judged"][1]["verdict"], "unchanged");
    package
        .kernelgate("gate --baseline a --format markdown")
        .expect(1, &["**1 regressed", "| fixture/spin/n64_none/cpu/hot"]);
    package
        .kernelgate(&format!("gate --baseline a --session {}", session.display()))
        .expect(0, &["unchanged"]);

    // Saving fewer cases keeps the others.
    package.bench("s4", "n64 --save-baseline a").expect(0, &[]);
    let text = std::fs::read_to_string(package.baseline("a")).unwrap();
    assert!(
        text.contains(CASE)
            && text.contains("n128_none")
            && text.contains("s1/fixture")
            && text.contains("s4/fixture")
    );
}

#[test]
fn several_runs_on_a_side_find_a_smaller_slow_down() {
    let package = Package::new();
    package.bench("b1", "--save-baseline a").expect(0, &[]);
    for (session, time_ns) in
        [("b2", 201_000.0), ("b3", 199_000.0), ("h1", 220_000.0), ("h2", 221_000.0)]
    {
        package.bench(session, "").expect(0, &[]);
        package.set_times(&package.record(session), time_ns);
    }
    package.set_times(&package.baseline("a"), 200_000.0);
    let folder = |session: &str| package.record(session).parent().unwrap().display().to_string();
    let (two, three) = (folder("b2"), folder("b3"));
    package
        .kernelgate("gate --baseline a --last 2")
        .expect(3, &["2 inconclusive", "1:2", "kernelgate baseline save a --runs 5"]);
    package
        .kernelgate(&format!("baseline add a --session {two} --session {three}"))
        .expect(0, &["2 cases, up to 3 runs each"]);
    package.kernelgate("gate --baseline a --last 2").expect(1, &["2 regressed", "3:2", "+10.3%"]);
    package.kernelgate("gate --baseline a --last 99").expect(2, &["5 sessions in", "not 99"]);
    package.kernelgate("gate --baseline a --last 0").expect(2, &["--last"]);
    package
        .kernelgate(&format!("gate --baseline a --session {two} --session {two}"))
        .expect(2, &["hold the same run, which counts once"]);
    package
        .kernelgate(&format!("gate --baseline a --session {two}"))
        .expect(0, &["compared with itself"]);
    let before = std::fs::read_to_string(package.baseline("a")).unwrap();
    package.bench("seed", "--seed 2").expect(0, &[]);
    package
        .kernelgate("baseline add a")
        .expect(4, &["refused: seed is `1` in the baseline and `2` in the run"]);
    package.kernelgate("gate --baseline a").expect(4, &["refused: seed is `1`"]);
    assert_eq!(std::fs::read_to_string(package.baseline("a")).unwrap(), before);
    // The last session is the one that started last, whatever its name and the times of files.
    package.bench("0", "").expect(0, &[]);
    package.set_times(&package.record("0"), 200_000.0);
    let before = std::fs::read_to_string(package.record("seed")).unwrap();
    std::fs::write(package.record("seed"), &before).unwrap();
    package.kernelgate("gate --baseline a").expect(0, &["2 unchanged", "3:1"]);
    // The name of an existing run is refused before anything is measured.
    package
        .bench("seed", "")
        .expect(2, &["KERNELGATE_SESSION=seed: an earlier run of that name is in", "seed/fixture"]);
    assert_eq!(std::fs::read_to_string(package.record("seed")).unwrap(), before);
}

#[test]
fn a_delayed_run_says_so_and_is_neither_judged_nor_kept() {
    let package = Package::new();
    package.bench("s1", "--save-baseline a").expect(0, &[]);
    let delay = format!("--delay {CASE}=3000000");
    package
        .bench("s2", &delay)
        .expect(0, &["delayed on purpose", "DELAYED on purpose", &format!("{CASE}=3000000")]);
    let run = package.run("s2");
    assert_eq!(run["delays"].as_object().unwrap().keys().collect::<Vec<_>>(), [CASE]);
    let samples = &run["cases"][CASE]["samples"];
    let first =
        samples["elapsed_ns"][0].as_f64().unwrap() / samples["launches"][0].as_f64().unwrap();
    assert!(first >= 3e6, "{first}");
    package.kernelgate("gate --baseline a").expect(4, &["refused: delays is `none`"]);
    package.kernelgate("baseline add a").expect(4, &["refused: delays is `none`"]);
    package.kernelgate("baseline add fresh").expect(4, &["refused: delays is `none`"]);
    package
        .bench("s3", &format!("{delay} --save-baseline b"))
        .expect(2, &["--save-baseline takes no run with --delay"]);
    package.bench("s4", "--delay nonsense").expect(2, &["CASE=NANOSECONDS"]);
}

#[test]
fn bench_binaries_of_one_session_share_a_baseline_and_a_gate() {
    let package = Package::new();
    let saxpy = fixture_path().with_file_name(format!("saxpy{}", std::env::consts::EXE_SUFFIX));
    let line = "--bench --quick --noplot --axis n=4096 --save-baseline a";
    let other = package.command(&saxpy, line).env("KERNELGATE_SESSION", "s1").output().unwrap();
    Outcome::from(other).expect(0, &["example/saxpy/n4096/cpu/hot"]);
    package.bench("s1", "n64 --save-baseline a").expect(0, &[]);
    package.kernelgate("baseline list").expect(0, &["/a", "  2     2  "]);
    package.set_times(&package.baseline("a"), 200_000.0);
    for bench in ["fixture", "saxpy"] {
        package.set_times(&package.record("s1").with_file_name(format!("{bench}.json")), 200_000.0);
    }
    package
        .kernelgate("gate --baseline a")
        .expect(0, &["example/saxpy/n4096/cpu/hot", CASE, "2 unchanged"]);
}

#[test]
fn a_run_records_how_much_of_the_processor_others_took() {
    let package = Package::new();
    let mut command = package.bench_command("s1", "--save-baseline a");
    Outcome::from(command.env("FIXTURE_NS", "20000000").output().unwrap()).expect(0, &[]);
    // Absent where the system does not report it (some sandboxes).
    if let Some(share) =
        package.run("s1")["cases"][CASE]["samples"]["conditions"]["contention"].as_f64()
    {
        assert!((0.0..=1.0).contains(&share), "{share}");
    }
    package.set_times(&package.baseline("a"), 200_000.0);
    package.set_times(&package.record("s1"), 300_000.0);
    let mut run = package.run("s1");
    for case in run["cases"].as_object_mut().unwrap().values_mut() {
        case["samples"]["conditions"]["contention"] = 0.4.into();
    }
    std::fs::write(package.record("s1"), run.to_string()).unwrap();
    package
        .kernelgate("gate --baseline a")
        .expect(3, &["2 inconclusive", "co-running processes took up to 40% of the CPU time"]);
}

#[test]
fn broken_and_foreign_baselines_are_refused_and_kept() {
    let package = Package::new();
    package.bench("s1", "--save-baseline a").expect(0, &[]);
    let path = package.baseline("a");
    let sealed = std::fs::read_to_string(&path).unwrap();
    let whole: String = sealed
        .lines()
        .filter(|line| !line.contains("\"checksum\""))
        .map(|line| format!("{line}\n"))
        .collect();
    let device = &whole[whole.find("\"device_name\":").unwrap()..];
    let device = &device[..device.find("\",").unwrap() + 2];
    let edits = [
        (sealed.replace("\"revision\": 1", "\"revision\": 2"), 2, "kernelgate baseline seal"),
        (whole[..whole.len() / 2].to_owned(), 2, "broken or cut short"),
        ("{}".to_owned(), 2, "not a kernelgate baseline"),
        (
            whole.replace("\"schema_version\": 3", "\"schema_version\": 7"),
            2,
            "newer kernelgate (schema 7",
        ),
        (
            whole.replace(device, "\"device_name\":\"Another CPU\","),
            4,
            "device_name is `Another CPU`",
        ),
        (whole.replace("\"revision\": 1", "\"revision\": 2"), 4, "revision is `2`"),
        (whole.replace("\"samples\":10", "\"samples\":0"), 2, "0 samples of"),
    ];
    for (text, code, words) in edits {
        assert_ne!(text, whole);
        std::fs::write(&path, &text).unwrap();
        package.kernelgate("gate --baseline a").expect(code, &[words]);
        if code == 2 {
            let outcome = package.bench("s2", "--save-baseline a");
            outcome.expect(2, &[words, "a.json"]);
            assert!(
                !outcome.stderr.contains("verified"),
                "found before anything was measured: {}",
                outcome.stderr
            );
            package.kernelgate("baseline list").expect(2, &["broken: failed to read"]);
        }
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            text,
            "a broken file is never overwritten"
        );
    }
    std::fs::write(&path, sealed.replace("\"revision\": 1", "\"revision\": 2")).unwrap();
    package
        .kernelgate(&format!("baseline seal {}", path.display()))
        .expect(0, &["sealed without change"]);
    package.kernelgate("gate --baseline a").expect(4, &["revision is `2`"]);
    let elsewhere = package.path("baselines/another-cpu");
    std::fs::rename(path.parent().unwrap(), &elsewhere).unwrap();
    std::fs::write(
        elsewhere.join("a.json"),
        whole.replace(device, "\"device_name\":\"Another CPU\","),
    )
    .unwrap();
    package.kernelgate("gate --baseline a").expect(4, &["device_name is `Another CPU`"]);
    package.kernelgate("gate --baseline none").expect(2, &["no baseline `none`", "another-cpu/a"]);
    package.kernelgate("gate --baseline ../a").expect(2, &["baseline name `../a`"]);
    package.bench("s3", "--save-baseline ../../evil").expect(2, &["baseline name `../../evil`"]);
    Package::new().kernelgate("gate --baseline a").expect(2, &["no run in", "cargo bench"]);
}

#[test]
fn wrong_cases_have_no_time_and_do_not_stop_the_others() {
    let package = Package::new();
    let outcome = package.bench("s1", "--effort thorough --axis n=64");
    outcome.expect(
        1,
        &[
            "n64_wrong/cpu/hot: output `out`: max error",
            "n64_nan/cpu/hot: output `out`: 1 of 64 elements are not finite, first at 5",
            "n64_panic/cpu/hot: panicked: the kernel is broken",
            "n64_reference/cpu/hot: inputs or reference: panicked",
            "n64_late/cpu/hot: panicked: the kernel is broken",
            "n64_idle/cpu/hot: output `out`: 64 of 64 elements are not finite",
            "n64_empty/cpu/hot: the reference holds no element",
        ],
    );
    let run = package.run("s1");
    assert_eq!(run["cases"].as_object().unwrap().keys().collect::<Vec<_>>(), [CASE]);
    assert_eq!(run["failed"].as_object().unwrap().len(), 7);
    package.bench("s2", "--save-baseline a").expect(0, &[]);
    let session = package.path("target/kernelgate/runs/s1");
    package.kernelgate(&format!("gate --baseline a --session {}", session.display())).expect(
        1,
        &["failed: fixture/spin/n64_wrong", "in the baseline, not run: fixture/spin/n128_none"],
    );
    package.bench("s3", "--effort thorough --save-baseline none n64_idle").expect(1, &[]);
    assert!(
        std::fs::read_dir(package.path("baselines")).unwrap().all(|device| !device
            .unwrap()
            .path()
            .join("none.json")
            .exists())
    );
}

fn fixture(package: &Package, line: &str) -> Outcome {
    package.command(&fixture_path(), line).output().unwrap().into()
}

#[test]
fn axes_and_filters_select_cases() {
    let package = Package::new();
    let listed = |line: &str| {
        let outcome = fixture(&package, line);
        let lines = outcome.expect(0, &[]).stdout.lines().filter(|line| !line.is_empty());
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(
        listed("--list"),
        ["fixture/spin/n64_none/cpu/hot: benchmark", "fixture/spin/n128_none/cpu/hot: benchmark"]
    );
    let seven = "fixture/spin/n7_none/cpu/hot: benchmark";
    assert_eq!(listed("--list --axis n=7"), [seven]);
    let both = [seven, "fixture/spin/n9_none/cpu/hot: benchmark"];
    assert_eq!(listed("--list --axis n=7 --axis n=9"), both, "values of one axis add up");
    let mut named = package.command(&fixture_path(), "--list");
    let named = Outcome::from(named.env("KERNELGATE_AXIS", "n=7 fault=wrong").output().unwrap());
    named.expect(0, &["fixture/spin/n7_wrong/cpu/hot"]);
    fixture(&package, "--bench --exact fixture/spin/n64_none/cpu/hot --quick --noplot")
        .expect(0, &["of limit", "quick effort"]);
}

#[test]
fn without_bench_every_case_is_verified_alone() {
    let package = Package::new();
    let tested = fixture(&package, "--test");
    tested.expect(0, &["Testing fixture/spin/n64_none/cpu/hot", "Success"]);
    fixture(&package, "").expect(0, &["Success"]);
}

#[test]
fn mistakes_in_flags_and_variables_name_the_flag() {
    let package = Package::new();
    for (line, words) in [
        ("fixtur/spin", "no case matches `fixtur/spin`; did you mean fixture/spin"),
        ("zzzzzzzzzzzzz", "no case matches"),
        ("a(", "filter `a(` is not a regular expression: unclosed group"),
        ("--axis fault=odd", "axis `fault` takes one of none, wrong"),
        ("--axis depth=3", "no workload has an axis `depth`; axes are fault, n"),
        ("--axis fault=work", "fixture/spin/n64_work: declared work: panicked"),
        ("--axis n", "`n` is not of the form axis=value"),
        ("--sample-size 3", "--sample-size takes a number from 10"),
        ("--baseline none", "Criterion has no baseline `none`"),
        ("--load-baseline none --baseline none", "Criterion has no baseline `none`"),
        ("--load-baseline none", "--baseline"),
        ("--frobnicate", "--frobnicate"),
        ("--effort", "a value is required for '--effort"),
        ("--effort=slow", "invalid value 'slow' for '--effort"),
        ("cpu/never", "nothing of what was asked for can run here"),
        ("--axis n=18446744073709551615", "nothing of what was asked for can run here"),
        ("--axis n=99999999999", "needs 1600 GB of memory"),
    ] {
        fixture(&package, &format!("--bench {line}")).expect(2, &[words]);
    }
    for (name, value, words) in [
        ("KERNELGATE_EFFORT", "slow", "invalid value 'slow' in the variable KERNELGATE_EFFORT"),
        ("KERNELGATE_AXIS", "n", "`n` is not of the form axis=value"),
        ("KERNELGATE_SEED", "one", "invalid value 'one' in the variable KERNELGATE_SEED"),
        ("KERNELGATE_SESSION", "../x", "KERNELGATE_SESSION=`../x` is no plain file name"),
    ] {
        let mut bench = package.bench_command("s", "");
        Outcome::from(bench.env(name, value).output().unwrap()).expect(2, &[words]);
    }
}

#[test]
fn lines_of_criterion_are_printed_on_request() {
    let package = Package::new();
    let ours = package.bench("s2", "n64");
    ours.expect(0, &[CASE, "of limit"]);
    for words in ["time:", "Benchmarking", "Gnuplot", "bench:"] {
        assert!(!ours.all().contains(words), "{}", ours.all());
    }
    package.bench("s2v", "n64 --verbose").expect(0, &["time:", "of limit"]);
    // A launch takes as long as a sample should: Criterion then advises a longer time.
    let briefly =
        "--bench --noplot --sample-size 10 --warm-up-time 0.01 --measurement-time 0.000001 n64";
    let quiet = fixture(&package, briefly);
    quiet.expect(0, &["of limit"]);
    assert!(!quiet.all().contains("Unable"), "{}", quiet.all());
    fixture(&package, &format!("{briefly} --verbose")).expect(0, &["Unable to complete"]);
    let bencher = package.bench("s6", "n64 --output-format bencher");
    let stdout = &bencher.expect(0, &[]).stdout;
    assert!(stdout.starts_with(&format!("test {CASE} ... bench:")), "{stdout}");
    assert_eq!(stdout.lines().filter(|line| !line.is_empty()).count(), 1, "{stdout}");
}

#[test]
fn baselines_of_criterion_are_saved_and_compared() {
    let package = Package::new();
    package.bench("s2", "n64 --save-baseline x").expect(0, &["of limit"]);
    package.bench("s3", "n64 --baseline x").expect(0, &["change:"]);
    package.bench("s4", "n64 --load-baseline x --baseline x").expect(0, &["time:", "change:"]);
    for line in ["-s y", "--save-baseline=y"] {
        let session = line.replace(['=', ' '], "");
        let saved = package.bench(session.trim_matches('-'), &format!("n64 {line}"));
        saved.expect(0, &["saved as baseline `y`"]);
    }
    for line in [
        "-b y",
        "--baseline=y",
        "--baseline-lenient=y",
        "--load-baseline=y --baseline=x",
        "--baseline-lenient=absent",
    ] {
        let session = line.replace(['=', ' '], "");
        package.bench(session.trim_matches('-'), &format!("n64 {line}")).expect(0, &["time:"]);
    }
}

#[test]
fn profiling_by_criterion_records_nothing() {
    let package = Package::new();
    package.bench("s7", "n64 --profile-time 1").expect(0, &[]);
    assert!(!package.path("target/kernelgate/runs/s7").exists());
}

#[test]
fn a_blocked_folder_is_found_before_measuring() {
    let package = Package::new();
    std::fs::write(package.path("baselines"), "in the way").unwrap();
    let outcome = package.bench("s1", "--save-baseline a");
    outcome.expect(2, &["failed to ", "baselines"]);
    assert!(!outcome.stderr.contains("verified"));
    std::fs::create_dir_all(package.path("target")).unwrap();
    std::fs::write(package.path("target/kernelgate"), "in the way").unwrap();
    package.bench("s2", "").expect(2, &["failed to write", "kernelgate"]);
}

#[cfg(unix)]
#[test]
fn a_broken_pipe_is_not_an_error() {
    let package = Package::new();
    let list = format!("list {}", package.dir());
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let mut commands = [package.command(program, &list), package.bench_command("s1", "")];
    for command in &mut commands {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let outcome =
            Outcome::from(command.stdout(writer).stderr(Stdio::piped()).output().unwrap());
        outcome.expect(141, &[]);
        assert!(!outcome.stderr.contains("error:"), "{}", outcome.stderr);
    }
}

#[cfg(unix)]
#[test]
fn an_interrupt_keeps_finished_cases_and_the_baseline() {
    let package = Package::new();
    package.bench("s1", "--save-baseline a").expect(0, &[]);
    let before = std::fs::read_to_string(package.baseline("a")).unwrap();
    let mut command = package.bench_command("s2", "--save-baseline a");
    command.args(["--axis", "n=64,96,128"]).env("FIXTURE_NS", "20000000");
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let record = package.record("s2");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !std::fs::read_to_string(&record).is_ok_and(|text| text.contains(CASE)) {
        assert!(Instant::now() < deadline, "the first case never finished");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success()
    );
    Outcome::from(child.wait_with_output().unwrap())
        .expect(130, &["interrupted: ", "baseline `a` is as it was"]);
    let run = package.run("s2");
    assert_eq!(run["complete"], false);
    assert!(run["cases"][CASE].is_object());
    assert_eq!(std::fs::read_to_string(package.baseline("a")).unwrap(), before);
    assert_eq!(
        std::fs::read_dir(record.parent().unwrap()).unwrap().count(),
        1,
        "no temporary file is left"
    );
    package.set_times(&package.baseline("a"), 200_000.0);
    package.set_times(&record, 200_000.0);
    package
        .kernelgate("gate --baseline a")
        .expect(3, &["interrupted: bench `fixture`", "; the run was interrupted"]);
}

#[test]
fn baselines_are_exported_and_imported() {
    let package = Package::new();
    package.bench("s1", "--save-baseline a").expect(0, &[]);
    let original = std::fs::read_to_string(package.baseline("a")).unwrap();
    package.kernelgate("baseline export a out.json").expect(0, &["2 cases"]);
    assert_eq!(std::fs::read_to_string(package.path("out.json")).unwrap(), original);
    package.kernelgate("baseline export a out.csv").expect(0, &[]);
    assert_eq!(std::fs::read_to_string(package.path("out.csv")).unwrap().lines().count(), 1 + 2);
    let onto = format!("baseline export a {}", package.baseline("a").display());
    package.kernelgate(&onto).expect(2, &["the export ", "a.json, which is read"]);
    package.kernelgate("baseline export a out.txt").expect(2, &[".json or .csv"]);
    package.kernelgate("baseline import out.json").expect(2, &["exists", "--force"]);
    package.kernelgate("baseline import out.json --name c").expect(0, &[]);
    package.kernelgate("baseline import out.csv").expect(2, &["broken or cut short"]);
    package.kernelgate("baseline import missing.json").expect(2, &["missing.json"]);
    for record in [package.baseline("c"), package.record("s1")] {
        package.set_times(&record, 200_000.0);
    }
    package.kernelgate("gate --baseline c").expect(0, &["2 unchanged"]);
}
