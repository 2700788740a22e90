//! Tests of the harness and the program as processes: bench processes of the fixture, their
//! records, baselines and the gate.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::outputs::{assert_text_snapshot, exit_code_and_both_streams};
use crate::package::outcome::redact_varying_parts;
use crate::package::{FIXTURE_CASE_ID, ProcessOutcome, TempPackage, fixture_path, lines_with_word};

#[test]
fn bench_baseline_and_gate() {
    let package = TempPackage::new();
    let first = package.run_fixture_bench("s1", "--save-baseline a");
    assert_text_snapshot("correct", "bench", &exit_code_and_both_streams(&first));
    let run = package.read_run_record("s1");
    assert_eq!(run["complete"], true);
    assert_eq!(run["cases"][FIXTURE_CASE_ID]["samples"]["launches"].as_array().unwrap().len(), 10);
    assert_eq!(run["cases"][FIXTURE_CASE_ID]["verification"]["checked"], 64);
    package.run_fixture_bench("s2", "").assert_exit(0);
    package.set_record_times(&package.baseline_path("a"), 200_000.0);
    package.set_record_times(&package.run_record_path("s2"), 204_000.0);
    assert_eq!(
        package.gate_last_run("a").assert_exit(0).json_verdicts(),
        ["unchanged", "unchanged"]
    );

    package.run_fixture_bench("s3", "").assert_exit(0);
    package.set_record_times(&package.run_record_path("s3"), 200_000.0);
    package.set_case_times(&package.run_record_path("s3"), "n64", 240_000.0);
    // The report advises to record more runs, because the baseline has only one process run.
    insta::assert_snapshot!(package.run_kernelgate("gate --baseline a").text_for_snapshot(), @r"
    exit 3
    baseline `a` of no commit, recorded DAY, 0 days ago,DEVICE

    case  verdict  baseline  now  change  interval  detectable  runs
    fixture/spin/n64_none/cpu/hot  inconclusive  N µs  N µs  +20.0%  -1.8% … +46.7%  28.3%  1:1
    fixture/spin/n128_none/cpu/hot  unchanged  N µs  N µs  +0.0%  -18.2% … +22.2%  28.3%  1:1
    interval: the worst that the ranges of the runs allow; runs: of the baseline, and judged

    the file of the baseline `a` has no checksum: an edit of it is not noticed; `kernelgate baseline seal FILE` takes it as it is
    the baseline has one process run of a case: how its runs differ is unknown, and a difference of more than 5.0% that the allowance for that could explain is inconclusive: `kernelgate baseline save a --runs 5` on the old code records enough, `kernelgate baseline add` adds the last run
    one process run is judged: ±N% is assumed for the difference between runs; after more of `cargo bench`, `kernelgate gate --last COUNT` shows it

    0 regressed, 0 improved, 1 unchanged, 1 inconclusive of 2 (threshold 5%)
    ");
    package.set_case_times(&package.run_record_path("s3"), "n64", 300_000.0);
    assert_eq!(
        package.gate_last_run("a").assert_exit(1).json_verdicts(),
        ["regressed", "unchanged"]
    );
    let session = package.package_path("target/kernelgate/runs/s2").display().to_string();
    package.run_kernelgate(&format!("baseline add a --session {session}")).assert_exit(0);
    let gate = package.gate_last_run("a").assert_exit(1).stdout_as_json();
    let judged = &gate["judged"][0];
    assert_eq!((&judged["case"], &judged["base_runs"]), (&FIXTURE_CASE_ID.into(), &2.into()));
    let ratio = judged["ratio"]["center"].as_f64().unwrap();
    assert!((ratio - 1.485).abs() < 0.001, "300 µs by a median of 200 and 204 µs: {ratio}");
    let named = package.gate_last_run(&format!("a --session {session}"));
    assert_eq!(named.assert_exit(0).json_verdicts(), ["unchanged", "unchanged"]);

    // Saving a run with fewer cases keeps the baseline's other cases.
    package.run_fixture_bench("s4", "n64 --save-baseline a").assert_exit(0);
    let text = std::fs::read_to_string(package.baseline_path("a")).unwrap();
    for kept in [FIXTURE_CASE_ID, "n128_none", "s1/fixture", "s4/fixture"] {
        assert!(text.contains(kept), "{kept}: {text}");
    }
}

#[test]
fn several_runs_on_a_side_find_a_smaller_slow_down() {
    let package = TempPackage::new();
    package.run_fixture_bench("b1", "--save-baseline a").assert_exit(0);
    for (session, time_ns) in
        [("b2", 201_000.0), ("b3", 199_000.0), ("h1", 220_000.0), ("h2", 221_000.0)]
    {
        package.run_fixture_bench(session, "").assert_exit(0);
        package.set_record_times(&package.run_record_path(session), time_ns);
    }
    package.set_record_times(&package.baseline_path("a"), 200_000.0);
    let folder =
        |session: &str| package.run_record_path(session).parent().unwrap().display().to_string();
    let (two, three) = (folder("b2"), folder("b3"));
    let runs = |gate: &ProcessOutcome| {
        let judged = &gate.stdout_as_json()["judged"][0];
        (judged["base_runs"].as_u64().unwrap(), judged["head_runs"].as_u64().unwrap())
    };
    let gate = package.gate_last_run("a --last 2");
    assert_eq!(gate.assert_exit(3).json_verdicts(), ["inconclusive", "inconclusive"]);
    assert_eq!(runs(&gate), (1, 2));
    let added =
        package.run_kernelgate(&format!("baseline add a --session {two} --session {three}"));
    insta::assert_snapshot!(added.text_for_snapshot(), @r"
    exit 0
    2 cases, up to 3 runs each, in FOLDER/baselines/DEVICE/a.json
    ");
    let gate = package.gate_last_run("a --last 2");
    assert_eq!(gate.assert_exit(1).json_verdicts(), ["regressed", "regressed"]);
    assert_eq!(runs(&gate), (3, 2));
    let last = |count: &str| package.gate_last_run(&format!("a --last {count}")).refusal_message(2);
    insta::assert_snapshot!(last("99"), @"error: 5 sessions in FOLDER/target/kernelgate/runs, not 99: run `cargo bench` again");
    insta::assert_snapshot!(last("0"), @r"
    error: invalid value '0' for '--last <COUNT>': 0 is not in 1..=65535

    For more information, try '--help'.
    ");
    let twice = package.gate_last_run(&format!("a --session {two} --session {two}"));
    insta::assert_snapshot!(twice.refusal_message(2), @"error: FOLDER/target/kernelgate/runs/b2/fixture.json and FOLDER/target/kernelgate/runs/b2/fixture.json hold the same run, which counts once: remove one");
    let itself = package.run_kernelgate(&format!("gate --baseline a --session {two}"));
    insta::assert_snapshot!(lines_with_word(&itself.assert_exit(0).stdout, "itself"), @"compared with itself, the baseline was saved from it: b2/fixture");
}

#[test]
fn a_run_with_another_seed_is_neither_judged_nor_kept() {
    let package = TempPackage::new();
    package.run_fixture_bench("b1", "--save-baseline a").assert_exit(0);
    package.set_record_times(&package.baseline_path("a"), 200_000.0);
    let before = std::fs::read_to_string(package.baseline_path("a")).unwrap();
    package.run_fixture_bench("seed", "--seed 2").assert_exit(0);
    insta::assert_snapshot!(package.run_kernelgate("baseline add a").text_for_snapshot(), @r"
    exit 4
    refused: seed is `1` in the baseline and `2` in the run seed/fixture
    ");
    insta::assert_snapshot!(package.run_kernelgate("gate --baseline a").text_for_snapshot(), @r"
    exit 4
    baseline `a`,DEVICE

    refused: seed is `1` in the baseline and `2` in the run: fixture/spin/n128_none/cpu/hot and 1 more
    the file of the baseline `a` has no checksum: an edit of it is not noticed; `kernelgate baseline seal FILE` takes it as it is

    Refused: not comparable with the baseline (differing: seed)
    ");
    assert_eq!(std::fs::read_to_string(package.baseline_path("a")).unwrap(), before);
    // The last recorded session is the one that started last, whatever its name and the
    // modification times of its files.
    package.run_fixture_bench("0", "").assert_exit(0);
    package.set_record_times(&package.run_record_path("0"), 200_000.0);
    let before = std::fs::read_to_string(package.run_record_path("seed")).unwrap();
    std::fs::write(package.run_record_path("seed"), &before).unwrap();
    assert_eq!(
        package.gate_last_run("a").assert_exit(0).json_verdicts(),
        ["unchanged", "unchanged"]
    );
    // The name of an existing run is refused before anything is measured.
    insta::assert_snapshot!(package.run_fixture_bench("seed", "").error_message(2), @"error: KERNELGATE_SESSION=seed: an earlier run of that name is in FOLDER/target/kernelgate/runs/seed/fixture.json: choose another name, or remove it");
    assert_eq!(std::fs::read_to_string(package.run_record_path("seed")).unwrap(), before);
}

#[test]
fn a_delayed_run_is_marked_and_neither_judged_nor_kept() {
    let package = TempPackage::new();
    package.run_fixture_bench("s1", "n64 --save-baseline a").assert_exit(0);
    let delay = format!("n64 --delay {FIXTURE_CASE_ID}=3000000");
    let delayed = package.run_fixture_bench("s2", &delay);
    insta::assert_snapshot!(lines_with_word(&delayed.assert_exit(0).stdout_and_stderr(), "on purpose"), @r"
    DELAYED on purpose, nanoseconds a launch: fixture/spin/n64_none/cpu/hot=3000000
    warning: launches are delayed on purpose (KERNELGATE_DELAY), nanoseconds: fixture/spin/n64_none/cpu/hot=3000000
    ");
    let run = package.read_run_record("s2");
    assert_eq!(run["delays"].as_object().unwrap().keys().collect::<Vec<_>>(), [FIXTURE_CASE_ID]);
    let samples = &run["cases"][FIXTURE_CASE_ID]["samples"];
    let first =
        samples["elapsed_ns"][0].as_f64().unwrap() / samples["launches"][0].as_f64().unwrap();
    assert!(first >= 3e6, "{first}");
    insta::assert_snapshot!(package.run_kernelgate("gate --baseline a").text_for_snapshot(), @r"
    exit 4
    baseline `a`,DEVICE

    refused: delays is `none` in the baseline and `fixture/spin/n64_none/cpu/hot=3000000` in the run: fixture/spin/n64_none/cpu/hot

    Refused: not comparable with the baseline (differing: delays)
    ");
    insta::assert_snapshot!(package.run_kernelgate("baseline add a").text_for_snapshot(), @r"
    exit 4
    refused: delays is `none` in the baseline and `fixture/spin/n64_none/cpu/hot=3000000` in the run s2/fixture
    ");
    insta::assert_snapshot!(package.run_kernelgate("baseline add fresh").text_for_snapshot(), @r"
    exit 4
    refused: delays is `none` in the baseline and `fixture/spin/n64_none/cpu/hot=3000000` in the run s2/fixture
    ");
    let saved = package.run_fixture_bench("s3", &format!("{delay} --save-baseline b"));
    insta::assert_snapshot!(saved.error_message(2), @"error: --save-baseline takes no run with --delay (KERNELGATE_DELAY)");
    insta::assert_snapshot!(package.run_fixture_bench("s4", "--delay nonsense").error_message(2), @r"
    error: invalid value 'nonsense' for '--delay <CASE=NS[:work][@SIZE][,CASE=NS]>': `nonsense`: a delay is CASE=NANOSECONDS or CASE=NANOSECONDS:work, with 1 to 1000000000 of them, and @SIZE behind it where it was fitted before

    For more information, try '--help'.
    ");
}

#[test]
fn bench_binaries_of_one_session_share_a_baseline_and_a_gate() {
    let package = TempPackage::new();
    let saxpy = fixture_path().with_file_name(format!("saxpy{}", std::env::consts::EXE_SUFFIX));
    let line = "--bench --quick --noplot --axis n=4096 --save-baseline a";
    let other =
        package.package_command(&saxpy, line).env("KERNELGATE_SESSION", "s1").output().unwrap();
    ProcessOutcome::from(other).assert_exit(0);
    package.run_fixture_bench("s1", "n64 --save-baseline a").assert_exit(0);
    package.set_record_times(&package.baseline_path("a"), 200_000.0);
    for bench in ["fixture", "saxpy"] {
        package.set_record_times(
            &package.run_record_path("s1").with_file_name(format!("{bench}.json")),
            200_000.0,
        );
    }
    let gate = package.gate_last_run("a").assert_exit(0).stdout_as_json();
    let judged = gate["judged"].as_array().unwrap();
    let cases = judged.iter().map(|row| (row["case"].as_str(), row["verdict"].as_str()));
    assert_eq!(
        cases.collect::<Vec<_>>(),
        [
            (Some("example/saxpy/n4096/cpu/hot"), Some("unchanged")),
            (Some(FIXTURE_CASE_ID), Some("unchanged"))
        ]
    );
}

#[test]
fn a_run_records_how_much_of_the_processor_others_took() {
    let package = TempPackage::new();
    let mut command = package.bench_command("s1", "n64 --save-baseline a");
    ProcessOutcome::from(command.env("FIXTURE_NS", "20000000").output().unwrap()).assert_exit(0);
    // The contention is absent where the system does not report it (some sandboxes).
    if let Some(share) =
        package.read_run_record("s1")["cases"][FIXTURE_CASE_ID]["samples"]["conditions"]["contention"].as_f64()
    {
        assert!((0.0..=1.0).contains(&share), "{share}");
    }
    package.set_record_times(&package.baseline_path("a"), 200_000.0);
    package.set_record_times(&package.run_record_path("s1"), 300_000.0);
    let mut run = package.read_run_record("s1");
    for case in run["cases"].as_object_mut().unwrap().values_mut() {
        case["samples"]["conditions"]["contention"] = 0.4.into();
    }
    std::fs::write(package.run_record_path("s1"), run.to_string()).unwrap();
    let judged = package.gate_last_run("a").assert_exit(3).stdout_as_json()["judged"].take();
    assert_eq!(judged[0]["verdict"], "inconclusive");
    assert_eq!(judged[0]["head_contention"], 0.4);
}

#[test]
fn broken_baselines_are_refused_before_anything_is_measured() {
    let package = TempPackage::new();
    package.run_fixture_bench("s1", "n64 --save-baseline a").assert_exit(0);
    let path = package.baseline_path("a");
    let sealed = std::fs::read_to_string(&path).unwrap();
    for text in [
        sealed.replace("\"revision\": 1", "\"revision\": 2"),
        sealed[..sealed.len() / 2].to_owned(),
    ] {
        assert_ne!(text, sealed);
        std::fs::write(&path, &text).unwrap();
        let bench = package.run_fixture_bench("s2", "--save-baseline a");
        assert_eq!(
            bench.error_message(2),
            package.run_kernelgate("gate --baseline a").refusal_message(2)
        );
        assert!(!package.run_record_path("s2").exists(), "{}", bench.stdout_and_stderr());
        let list = package.run_kernelgate("baseline list");
        assert_eq!(list.assert_exit(2).stdout.matches("broken: ").count(), 1, "{}", list.stdout);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text, "it is never overwritten");
    }
}

#[test]
fn a_baseline_of_another_revision_or_device_is_refused() {
    let package = TempPackage::new();
    package.run_fixture_bench("s1", "n64 --save-baseline a").assert_exit(0);
    let path = package.baseline_path("a");
    let sealed = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, sealed.replace("\"revision\": 1", "\"revision\": 2")).unwrap();
    let seal = package.run_kernelgate(&format!("baseline seal {}", path.display()));
    insta::assert_snapshot!(seal.text_for_snapshot(), @r"
    exit 0
    sealed without change: 1 case in FOLDER/baselines/DEVICE/a.json
    ");
    insta::assert_snapshot!(package.run_kernelgate("gate --baseline a").text_for_snapshot(), @r"
    exit 4
    baseline `a`,DEVICE

    refused: revision is `2` in the baseline and `1` in the run: fixture/spin/n64_none/cpu/hot
    compared with itself, the baseline was saved from it: s1/fixture

    Refused: not comparable with the baseline (differing: revision)
    ");
    let device = &sealed[sealed.find("\"device_name\":").unwrap()..];
    let device = &device[..device.find("\",").unwrap() + 2];
    let checksum = sealed.lines().find(|line| line.contains("\"checksum\"")).unwrap();
    let foreign = sealed.replace(device, "\"device_name\":\"Another CPU\",");
    let elsewhere = package.package_path("baselines/another-cpu");
    std::fs::rename(path.parent().unwrap(), &elsewhere).unwrap();
    std::fs::write(elsewhere.join("a.json"), foreign.replace(checksum, "")).unwrap();
    insta::assert_snapshot!(package.run_kernelgate("gate --baseline a").text_for_snapshot(), @r"
    exit 4
    baseline `a`,DEVICE

    refused: device_name is `Another CPU` in the baseline and `AMD EPYC` in the run: fixture/spin/n64_none/cpu/hot
    compared with itself, the baseline was saved from it: s1/fixture

    Refused: not comparable with the baseline (differing: device_name)
    ");
    insta::assert_snapshot!(package.run_kernelgate("gate --baseline none").refusal_message(2), @"error: no baseline `none` for DEVICE in FOLDER/baselines (found: DEVICE/a)");
    insta::assert_snapshot!(package.run_fixture_bench("s3", "--save-baseline ../../evil").error_message(2), @"error: baseline name `../../evil`: use letters, digits, `.`, `_` and `-`, starting with a letter or digit, at most 64 of them");
}

#[test]
fn wrong_cases_have_no_time_and_do_not_stop_the_others() {
    let package = TempPackage::new();
    let outcome = package.run_fixture_bench("s1", "--effort thorough --axis n=64");
    outcome.assert_exit(1);
    let run = package.read_run_record("s1");
    assert_eq!(run["cases"].as_object().unwrap().keys().collect::<Vec<_>>(), [FIXTURE_CASE_ID]);
    let failed = run["failed"].as_object().unwrap().iter();
    let reasons = failed.map(|(case, why)| format!("{case}: {}: {}\n", why["kind"], why["text"]));
    insta::assert_snapshot!(redact_varying_parts(&reasons.collect::<String>()), @r#"
    fixture/spin/n64_empty/cpu/hot: "nothing_compared": "the reference holds no element: nothing was compared"
    fixture/spin/n64_idle/cpu/hot: "not_finite": "output `out`: 64 of 64 elements are not finite, first at 0: not written, or overflowed"
    fixture/spin/n64_late/cpu/hot: "panicked": "panicked: the kernel is broken (crates/kernelgate-cli/tests/fixture/spin.rs:LINE)"
    fixture/spin/n64_nan/cpu/hot: "not_finite": "output `out`: 1 of 64 elements are not finite, first at 5: not written, or overflowed"
    fixture/spin/n64_panic/cpu/hot: "panicked": "panicked: the kernel is broken (crates/kernelgate-cli/tests/fixture/spin.rs:LINE)"
    fixture/spin/n64_reference/cpu/hot: "panicked": "inputs or reference: panicked: assertion `left != right` failed: the reference is broken\n  left: \"reference\"\n right: \"reference\" (crates/kernelgate-cli/tests/fixture/spin.rs:LINE)"
    fixture/spin/n64_wrong/cpu/hot: "too_far": "output `out`: max error N (allowed 1e-6), relative L2 N (allowed 1e-6); worst at PLACE"
    "#);
    package
        .run_fixture_bench("s3", "--effort thorough --save-baseline none n64_idle")
        .assert_exit(1);
    let mut devices = std::fs::read_dir(package.package_path("baselines")).unwrap();
    assert!(devices.all(|device| !device.unwrap().path().join("none.json").exists()));
    package.run_fixture_bench("s2", "--save-baseline a").assert_exit(0);
    let session = package.package_path("target/kernelgate/runs/s1");
    let gate = package
        .gate_last_run(&format!("a --session {}", session.display()))
        .assert_exit(1)
        .stdout_as_json();
    assert_eq!(gate["failed"].as_object().unwrap().len(), 7);
    assert_eq!(gate["not_run"], serde_json::json!([FIXTURE_CASE_ID.replace("n64", "n128")]));
}

fn run_fixture_bench(package: &TempPackage, line: &str) -> ProcessOutcome {
    package.package_command(&fixture_path(), line).output().unwrap().into()
}

#[test]
fn axes_and_filters_select_cases() {
    let package = TempPackage::new();
    let listed = |variables: &[(&str, &str)], line: &str| {
        let mut command = package.package_command(&fixture_path(), &format!("--list {line}"));
        let outcome =
            ProcessOutcome::from(command.envs(variables.iter().copied()).output().unwrap());
        let lines = outcome.assert_exit(0).stdout.lines().filter(|line| !line.is_empty());
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let case = |name: &str| format!("fixture/spin/{name}/cpu/hot: benchmark");
    assert_eq!(listed(&[], ""), [case("n64_none"), case("n128_none")]);
    assert_eq!(listed(&[], "--axis n=7"), [case("n7_none")]);
    let both = [case("n7_none"), case("n9_none")];
    assert_eq!(listed(&[], "--axis n=7 --axis n=9"), both, "values of one axis add up");
    assert_eq!(listed(&[], &format!("--exact {FIXTURE_CASE_ID}")), [case("n64_none")]);
    let named = listed(&[("KERNELGATE_AXIS", "n=7 fault=wrong")], "");
    assert_eq!(named, [case("n7_wrong")]);
}

#[test]
fn without_bench_every_case_is_verified_alone() {
    let package = TempPackage::new();
    let tested = run_fixture_bench(&package, "--test");
    insta::assert_snapshot!(tested.assert_exit(0).stdout.trim(), @r"
    Testing fixture/spin/n64_none/cpu/hot
    Success

    Testing fixture/spin/n128_none/cpu/hot
    Success
    ");
    assert_eq!(run_fixture_bench(&package, "").assert_exit(0).stdout, tested.stdout);
}

#[test]
fn mistakes_in_flags_and_variables_name_the_flag() {
    let package = TempPackage::new();
    let mut messages = String::new();
    for line in [
        "fixtur/spin",
        "zzzzzzzzzzzzz",
        "a(",
        "--axis fault=odd",
        "--axis depth=3",
        "--axis fault=work",
        "--axis n",
        "--sample-size 3",
        "--baseline none",
        "--load-baseline none --baseline none",
        "--load-baseline none",
        "--frobnicate",
        "--effort",
        "--effort=slow",
        "cpu/never",
        "--axis n=18446744073709551615",
        "--axis n=99999999999",
    ] {
        let error = run_fixture_bench(&package, &format!("--bench {line}")).error_message(2);
        messages += &format!("{line}: {error}\n");
    }
    for (name, value) in [
        ("KERNELGATE_EFFORT", "slow"),
        ("KERNELGATE_AXIS", "n"),
        ("KERNELGATE_SEED", "one"),
        ("KERNELGATE_SESSION", "../x"),
    ] {
        let mut bench = package.bench_command("s", "");
        let error = ProcessOutcome::from(bench.env(name, value).output().unwrap()).error_message(2);
        messages += &format!("{name}={value}: {error}\n");
    }
    assert_text_snapshot("mistakes", "bench", &messages);
}

#[test]
fn lines_of_criterion_are_printed_on_request() {
    let package = TempPackage::new();
    let ours = package.run_fixture_bench("s2", "n64");
    let prints = |outcome: &ProcessOutcome, word: &str| {
        outcome.assert_exit(0).stdout_and_stderr().contains(word)
    };
    for word in ["time:", "Benchmarking", "Gnuplot", "bench:"] {
        assert!(!prints(&ours, word), "{}", ours.stdout_and_stderr());
    }
    assert!(prints(&package.run_fixture_bench("s2v", "n64 --verbose"), "time:"));
    // The sampling time is so short that a launch takes as long as a sample should: Criterion then
    // warns that the measurement time is too short.
    let briefly =
        "--bench --noplot --sample-size 10 --warm-up-time 0.01 --measurement-time 0.000001 n64";
    assert!(!prints(&run_fixture_bench(&package, briefly), "Unable"));
    assert!(prints(&run_fixture_bench(&package, &format!("{briefly} --verbose")), "Unable"));
    let bencher = package.run_fixture_bench("s6", "n64 --output-format bencher");
    let stdout = &bencher.assert_exit(0).stdout;
    assert!(stdout.starts_with(&format!("test {FIXTURE_CASE_ID} ... bench:")), "{stdout}");
    assert_eq!(stdout.lines().filter(|line| !line.is_empty()).count(), 1, "{stdout}");
}

#[test]
fn baselines_of_criterion_are_saved_and_compared() {
    let package = TempPackage::new();
    let bench = |line: &str| {
        let session: String = line.chars().filter(|c| c.is_alphanumeric()).collect();
        package.run_fixture_bench(&session, &format!("n64 {line}"))
    };
    for line in ["--save-baseline x", "-s y", "--save-baseline=y"] {
        bench(line).assert_exit(0);
    }
    for (line, has_change) in [
        ("--baseline x", true),
        ("--load-baseline x --baseline x", true),
        ("-b y", true),
        ("--baseline=y", true),
        ("--baseline-lenient=y", true),
        ("--load-baseline=y --baseline=x", true),
        ("--baseline-lenient=absent", false),
    ] {
        let outcome = bench(line);
        let stdout = &outcome.assert_exit(0).stdout;
        assert_eq!(stdout.contains(" change:"), has_change, "{line}: {stdout}");
        assert!(stdout.contains(" time:"), "{line}: {stdout}");
    }
}

#[test]
fn profiling_by_criterion_records_nothing() {
    let package = TempPackage::new();
    package.run_fixture_bench("s7", "n64 --profile-time 1").assert_exit(0);
    assert!(!package.package_path("target/kernelgate/runs/s7").exists());
}

#[test]
fn a_blocked_folder_is_found_before_measuring() {
    let package = TempPackage::new();
    std::fs::write(package.package_path("baselines"), "in the way").unwrap();
    insta::assert_snapshot!(package.run_fixture_bench("s1", "--save-baseline a").error_message(2), @"error: failed to read FOLDER/baselines/DEVICE/a.json: Not a directory (os error 20)");
    std::fs::create_dir_all(package.package_path("target")).unwrap();
    std::fs::write(package.package_path("target/kernelgate"), "in the way").unwrap();
    insta::assert_snapshot!(package.run_fixture_bench("s2", "").error_message(2), @"error: failed to write FOLDER/target/kernelgate/runs/s2/fixture.json: Not a directory (os error 20)");
}

#[cfg(unix)]
#[test]
fn a_broken_pipe_is_not_an_error() {
    let package = TempPackage::new();
    let list = format!("list {}", package.bench_folder_flags());
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let mut commands = [package.package_command(program, &list), package.bench_command("s1", "")];
    for command in &mut commands {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let outcome =
            ProcessOutcome::from(command.stdout(writer).stderr(Stdio::piped()).output().unwrap());
        outcome.assert_exit(141);
        assert!(!outcome.stderr.contains("error:"), "{}", outcome.stderr);
    }
}

#[cfg(unix)]
#[test]
fn an_interrupt_keeps_finished_cases_and_the_baseline() {
    let package = TempPackage::new();
    package.run_fixture_bench("s1", "--save-baseline a").assert_exit(0);
    let before = std::fs::read_to_string(package.baseline_path("a")).unwrap();
    let mut command = package.bench_command("s2", "--save-baseline a");
    command.args(["--axis", "n=64,96,128"]).env("FIXTURE_NS", "20000000");
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let record = package.run_record_path("s2");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !std::fs::read_to_string(&record).is_ok_and(|text| text.contains(FIXTURE_CASE_ID)) {
        assert!(Instant::now() < deadline, "the first case never finished");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(
        Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success()
    );
    let interrupted = ProcessOutcome::from(child.wait_with_output().unwrap());
    let message = redact_varying_parts(interrupted.assert_exit(130).stderr.lines().last().unwrap());
    insta::assert_snapshot!(message, @"interrupted: 1 finished cases are in FOLDER/target/kernelgate/runs/s2/fixture.json; baseline `a` is as it was");
    let run = package.read_run_record("s2");
    assert_eq!(run["complete"], false);
    assert!(run["cases"][FIXTURE_CASE_ID].is_object());
    assert_eq!(std::fs::read_to_string(package.baseline_path("a")).unwrap(), before);
    assert_eq!(
        std::fs::read_dir(record.parent().unwrap()).unwrap().count(),
        1,
        "no temporary file is left"
    );
    package.set_record_times(&package.baseline_path("a"), 200_000.0);
    package.set_record_times(&record, 200_000.0);
    assert_eq!(
        package.gate_last_run("a").assert_exit(3).stdout_as_json()["interrupted"],
        serde_json::json!(["fixture"])
    );
}

#[test]
fn baselines_are_exported_and_imported() {
    let package = TempPackage::new();
    package.run_fixture_bench("s1", "--save-baseline a").assert_exit(0);
    let original = std::fs::read_to_string(package.baseline_path("a")).unwrap();
    insta::assert_snapshot!(package.run_kernelgate("baseline export a out.json").text_for_snapshot(), @r"
    exit 0
    2 cases to out.json
    ");
    assert_eq!(std::fs::read_to_string(package.package_path("out.json")).unwrap(), original);
    package.run_kernelgate("baseline export a out.csv").assert_exit(0);
    assert_eq!(
        std::fs::read_to_string(package.package_path("out.csv")).unwrap().lines().count(),
        1 + 2
    );
    let onto = format!("baseline export a {}", package.baseline_path("a").display());
    let mut refusals = String::new();
    for line in [
        &*onto,
        "baseline export a out.txt",
        "baseline import out.json",
        "baseline import out.csv",
        "baseline import missing.json",
    ] {
        refusals += &format!("{}\n", package.run_kernelgate(line).refusal_message(2));
    }
    insta::assert_snapshot!(refusals, @r"
    error: the export FOLDER/baselines/DEVICE/a.json: it is FOLDER/baselines/DEVICE/a.json, which is read: give it another name
    error: out.txt: the ending says the format: .json or .csv
    error: FOLDER/baselines/DEVICE/a.json exists: --force replaces it
    error: failed to read out.csv: broken or cut short (expected value at line 1 column 1)
    error: failed to read missing.json: No such file or directory (os error 2)
    ");
    package.run_kernelgate("baseline import out.json --name c").assert_exit(0);
    for record in [package.baseline_path("c"), package.run_record_path("s1")] {
        package.set_record_times(&record, 200_000.0);
    }
    assert_eq!(
        package.gate_last_run("c").assert_exit(0).json_verdicts(),
        ["unchanged", "unchanged"]
    );
}
