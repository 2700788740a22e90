//! Tests of the gate as a process: its judgements besides times, and limits and acceptances in
//! `kernelgate.toml`.

use super::report_without_times;
use crate::package::outcome::redact_varying_parts;
use crate::package::{FIXTURE_CASE_ID, ProcessOutcome, TempPackage, lines_with_word};

/// A package whose baseline `a` has 200 µs from two runs of commit aaaa1111, and whose last run has
/// 260 µs.
fn package_with_slower_last_run() -> TempPackage {
    let package = TempPackage::new();
    for session in ["b1", "b2"] {
        let mut bench = package.bench_command(session, "");
        assert!(bench.env("KERNELGATE_COMMIT", "aaaa1111").output().unwrap().status.success());
        package.run_kernelgate("baseline add a").assert_exit(0);
    }
    package.set_record_times(&package.baseline_path("a"), 200_000.0);
    package.run_fixture_bench("head", "").assert_exit(0);
    package.set_record_times(&package.run_record_path("head"), 260_000.0);
    package
}

/// Findings that `kernelgate gate` prints when it ends with this exit code.
#[track_caller]
fn gate_findings_with_exit_code(package: &TempPackage, code: i32, flags: &str) -> String {
    let outcome = package.run_kernelgate(&format!("gate --baseline a --format json {flags}"));
    report_without_times(outcome.assert_exit(code))
}

/// A `kernelgate.toml` that accepts a slow-down of all cases, and has a threshold for the smaller
/// case.
fn rules_that_accept_slowdown(bound: &str, commit: &str) -> String {
    format!(
        "[[accept]]\ncases = \"spin/\"\nslower = {bound}\nreason = \"exact <sums>\"\n\
         baseline = \"{commit}\"\n"
    )
}

#[test]
fn an_accepted_slow_down_is_within_its_bound_and_ends_with_the_baseline() {
    let package = package_with_slower_last_run();
    let gate = |rules: &str, code: i32| {
        package.write_rules_file(rules);
        gate_findings_with_exit_code(&package, code, "")
    };
    insta::assert_snapshot!(gate("", 1), @r"
    fixture/spin/n128_none/cpu/hot regressed
    fixture/spin/n64_none/cpu/hot regressed
    ");
    insta::assert_snapshot!(gate(&rules_that_accept_slowdown("0.5", "aaaa1111"), 0), @r#"
    fixture/spin/n128_none/cpu/hot accepted
    fixture/spin/n64_none/cpu/hot accepted
    rules/accepted: {"case":"fixture/spin/n128_none/cpu/hot","growth":null,"less_verified":false,"reason":"exact <sums>","removed":false,"slower":0.5}
    rules/accepted: {"case":"fixture/spin/n64_none/cpu/hot","growth":null,"less_verified":false,"reason":"exact <sums>","removed":false,"slower":0.5}
    "#);
    // The reason of an accepted change is escaped as text in every output format.
    let format = |format: &str| {
        let outcome = package.run_kernelgate(&format!("gate --baseline a --format {format}"));
        lines_with_word(&outcome.assert_exit(0).stdout, FIXTURE_CASE_ID)
    };
    insta::assert_snapshot!(format("markdown"), @r"
    - noise floor: runs of one side are within ±0.00% in the median case, ±0.00% in the worst (fixture/spin/n64_none/cpu/hot)
    | fixture/spin/n64_none/cpu/hot  | +30.0% | +17.0% … +43.0% |      66.7% | 200.0 µs | 260.0 µs |  2:1 | accepted |
    |       -----o------    +30.0%  fixture/spin/n64_none/cpu/hot
    - accepted in kernelgate.toml: fixture/spin/n64_none/cpu/hot: up to 50% slower: exact &lt;sums>
    ");
    insta::assert_snapshot!(format("junit"), @r#"
    <property name="noise floor" value="runs of one side are within ±0.00% in the median case, ±0.00% in the worst (fixture/spin/n64_none/cpu/hot)"/>
    <property name="kernelgate.toml" value="accepted in kernelgate.toml: fixture/spin/n64_none/cpu/hot: up to 50% slower: exact &lt;sums&gt;"/>
    <testcase name="fixture/spin/n64_none/cpu/hot" classname="fixture.spin">
    "#);
    // The whole confidence interval of the slow-down lies beyond the accepted bound.
    insta::assert_snapshot!(gate(&rules_that_accept_slowdown("0.1", "aaaa1111"), 1), @r#"
    fixture/spin/n128_none/cpu/hot regressed
    fixture/spin/n64_none/cpu/hot regressed
    rules/accepted: {"case":"fixture/spin/n128_none/cpu/hot","growth":null,"less_verified":false,"reason":"exact <sums>","removed":false,"slower":0.1}
    rules/accepted: {"case":"fixture/spin/n64_none/cpu/hot","growth":null,"less_verified":false,"reason":"exact <sums>","removed":false,"slower":0.1}
    "#);
    insta::assert_snapshot!(gate(&rules_that_accept_slowdown("0.5", "bbbb2222"), 1), @r#"
    fixture/spin/n128_none/cpu/hot regressed
    fixture/spin/n64_none/cpu/hot regressed
    rules/notes: "[[accept]] `spin/`: the baseline is no longer of bbbb2222 but of aaaa1111: expired, remove it"
    "#);
    let undated = rules_that_accept_slowdown("0.5", "").replace("baseline = \"\"\n", "");
    insta::assert_snapshot!(gate(&undated, 1), @r#"
    fixture/spin/n128_none/cpu/hot regressed
    fixture/spin/n64_none/cpu/hot regressed
    rules/notes: "[[accept]] `spin/`: without `baseline` it holds for `kernelgate compare` only: `baseline = \"aaaa1111\"` makes it hold until the next baseline"
    "#);
}

/// If several `[[threshold]]` patterns set a limit of a case, the last one counts; a pattern that
/// matches nothing is reported.
#[test]
fn a_threshold_of_the_package_holds_for_the_cases_that_it_names() {
    let package = package_with_slower_last_run();
    package.write_rules_file(
        "[[threshold]]\ncases = \"n64_\"\nrelative = 0.5\n[[threshold]]\ncases = \"n65_\"\n\
         absolute-ns = 1e6\n",
    );
    insta::assert_snapshot!(gate_findings_with_exit_code(&package, 1, ""), @r#"
    fixture/spin/n128_none/cpu/hot regressed
    fixture/spin/n64_none/cpu/hot unchanged
    rules/thresholds: ["`n64_`: 50%",1]
    rules/thresholds: ["`n65_`: N ns",0]
    rules/notes: "[[threshold]] `n65_` matches no case"
    "#);
}

#[test]
fn an_acceptance_ends_with_a_baseline_that_has_changes() {
    let package = package_with_slower_last_run();
    package.write_rules_file(&rules_that_accept_slowdown("0.5", "aaaa1111"));
    package.run_kernelgate("gate --baseline a").assert_exit(0);
    // The baseline recorded next has the same commit, but with uncommitted changes.
    let mut bench = package.bench_command("b3", "--save-baseline a");
    bench.env("KERNELGATE_COMMIT", "aaaa1111+changes");
    assert!(bench.output().unwrap().status.success());
    package.set_record_times(&package.baseline_path("a"), 200_000.0);
    package.run_fixture_bench("again", "").assert_exit(0);
    package.set_record_times(&package.run_record_path("again"), 290_000.0);
    insta::assert_snapshot!(gate_findings_with_exit_code(&package, 1, ""), @r#"
    fixture/spin/n128_none/cpu/hot regressed
    fixture/spin/n64_none/cpu/hot regressed
    rules/notes: "[[accept]] `spin/`: the baseline is no longer of aaaa1111 but of COMMIT+changes: expired, remove it"
    "#);
}

#[test]
fn a_bound_that_no_case_can_judge_does_not_pass() {
    let package = TempPackage::new();
    let set = |session: &str, memory: bool| {
        package.run_fixture_bench(session, "").assert_exit(0);
        package.set_record_times(&package.run_record_path(session), 200_000.0);
        if memory {
            let mut run = package.read_run_record(session);
            run["cases"][FIXTURE_CASE_ID]["samples"]["costs"]["device_bytes"] = 1000.into();
            std::fs::write(package.run_record_path(session), run.to_string()).unwrap();
        }
    };
    set("b1", false);
    package.run_kernelgate("baseline add a").assert_exit(0);
    set("head", false);
    package.write_rules_file("[[threshold]]\ncases = \".\"\nlaunches = 0\nhost-time = 0.1\n");
    insta::assert_snapshot!(gate_findings_with_exit_code(&package, 0, ""), @r#"
    fixture/spin/n128_none/cpu/hot unchanged
    fixture/spin/n64_none/cpu/hot unchanged
    rules/thresholds: ["`.`: launches 0%, host time 10%",2]
    rules/notes: "[[threshold]] `.`: launches could not be judged for 2 of 2 cases: there is no such cost on the CPU"
    rules/notes: "[[threshold]] `.`: host-time could not be judged for 2 of 2 cases: there is no such cost on the CPU"
    "#);
    // The head now records its device memory, and the older baseline has none.
    set("later", true);
    package.write_rules_file("[[threshold]]\ncases = \"n64\"\ndevice-memory = 0.1\n");
    insta::assert_snapshot!(gate_findings_with_exit_code(&package, 3, ""), @r#"
    fixture/spin/n128_none/cpu/hot unchanged
    fixture/spin/n64_none/cpu/hot unchanged
    rules/thresholds: ["`n64`: device memory 10%",1]
    rules/undecided: "[[threshold]] `n64`: device-memory could not be judged for 1 of 1 cases: the base did not record it"
    "#);
    let format = |format: &str, word: &str| {
        let outcome = package.run_kernelgate(&format!("gate --baseline a --format {format}"));
        lines_with_word(&outcome.assert_exit(3).stdout, word)
    };
    insta::assert_snapshot!(format("text", "device-memory"), @"inconclusive: kernelgate.toml: [[threshold]] `n64`: device-memory could not be judged for 1 of 1 cases: the base did not record it");
    insta::assert_snapshot!(format("junit", "<skipped"), @r#"<skipped message="[[threshold]] `n64`: device-memory could not be judged for 1 of 1 cases: the base did not record it"/>"#);
    insta::assert_snapshot!(format("markdown", "device-memory"), @r#"- inconclusive: kernelgate.toml: \[\[threshold]] `n64`: device-memory could not be judged for 1 of 1 cases: the base did not record it"#);
}

/// Multiplies the errors of a record by a factor.
fn multiply_errors_in_record(path: &std::path::Path, factor: f64) {
    fn multiply_errors_in_json(value: &mut serde_json::Value, factor: f64) {
        for field in ["max_error", "relative_l2"] {
            match value.get_mut(field) {
                Some(serde_json::Value::Array(errors)) => errors
                    .iter_mut()
                    .for_each(|error| *error = (error.as_f64().unwrap() * factor).into()),
                Some(error) => *error = (error.as_f64().unwrap() * factor).into(),
                None => {}
            }
        }
        if let Some(fields) = value.as_object_mut() {
            fields.values_mut().for_each(|field| multiply_errors_in_json(field, factor));
        }
    }
    let text = std::fs::read_to_string(path).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    multiply_errors_in_json(&mut value["cases"], factor);
    std::fs::write(path, value.to_string()).unwrap();
}

#[test]
fn lost_accuracy_is_a_finding_once_there_are_enough_seeds() {
    let package = TempPackage::new();
    // The output errors of two cases get worse below; with two cases, nine seeds are needed to show
    // it.
    let verify = format!("verify --seeds 9 {}", package.bench_folder_flags());
    let recorded = package.package_path("target/kernelgate/numerics/fixture.json");
    package.run_kernelgate(&verify).assert_exit(0);
    package.run_fixture_bench("b1", "").assert_exit(0);
    insta::assert_snapshot!(package.run_kernelgate("baseline add a").text_for_snapshot(), @r"
    exit 0
    errors of 9 seeds for 2 cases of bench `fixture`
    2 cases, up to 1 runs each, in FOLDER/baselines/DEVICE/a.json
    ");
    package.run_fixture_bench("head", "").assert_exit(0);
    for record in [package.baseline_path("a"), package.run_record_path("head")] {
        package.set_record_times(&record, 200_000.0);
    }
    let gate = |code: i32, flags: &str| gate_findings_with_exit_code(&package, code, flags);
    gate(0, "");
    multiply_errors_in_record(&recorded, 3.0);
    multiply_errors_in_record(&package.run_record_path("head"), 3.0);
    insta::assert_snapshot!(gate(1, ""), @r#"
    fixture/spin/n128_none/cpu/hot unchanged
    fixture/spin/n64_none/cpu/hot unchanged
    numerics/grown: {"allowed":1.5,"base":N,"case":"fixture/spin/n128_none/cpu/hot","figure":"relative_l2","head":N,"needed":9,"one_data_set":false,"ratio":3.0,"seeds":9}
    numerics/grown: {"allowed":1.5,"base":N,"case":"fixture/spin/n64_none/cpu/hot","figure":"relative_l2","head":N,"needed":9,"one_data_set":false,"ratio":3.0,"seeds":9}
    "#);
    let junit = package.run_kernelgate("gate --baseline a --format junit");
    insta::assert_snapshot!(redact_varying_parts(&lines_with_word(&junit.assert_exit(1).stdout, "<error")), @r#"
    <error message="less accurate: relative L2 error 3.0 times as large (N, was N) for each of 9 seeds" type="failed"/>
    <error message="less accurate: relative L2 error 3.0 times as large (N, was N) for each of 9 seeds" type="failed"/>
    "#);
    insta::assert_snapshot!(gate(0, "--growth 4"), @r"
    fixture/spin/n128_none/cpu/hot unchanged
    fixture/spin/n64_none/cpu/hot unchanged
    ");
    let rules = package.package_path("kernelgate.toml");
    std::fs::write(&rules, "[[threshold]]\ncases = \"n64_\"\ngrowth = 4").unwrap();
    insta::assert_snapshot!(gate(1, ""), @r#"
    fixture/spin/n128_none/cpu/hot unchanged
    fixture/spin/n64_none/cpu/hot unchanged
    numerics/grown: {"allowed":1.5,"base":N,"case":"fixture/spin/n128_none/cpu/hot","figure":"relative_l2","head":N,"needed":9,"one_data_set":false,"ratio":3.0,"seeds":9}
    rules/thresholds: ["`n64_`: errors 4 times as large",1]
    "#);
    std::fs::remove_file(&rules).unwrap();
    // With errors of one seed, lost accuracy cannot be shown, and the gate does not pass.
    std::fs::remove_file(&recorded).unwrap();
    let only_seed = gate(3, "");
    insta::assert_snapshot!(only_seed, @r#"
    fixture/spin/n128_none/cpu/hot unchanged
    fixture/spin/n64_none/cpu/hot unchanged
    numerics/grown: {"allowed":1.5,"base":N,"case":"fixture/spin/n128_none/cpu/hot","figure":"relative_l2","head":N,"needed":9,"one_data_set":false,"ratio":N,"seeds":1}
    numerics/grown: {"allowed":1.5,"base":N,"case":"fixture/spin/n64_none/cpu/hot","figure":"relative_l2","head":N,"needed":9,"one_data_set":false,"ratio":N,"seeds":1}
    "#);
    let text = package.run_kernelgate("gate --baseline a").assert_exit(3).stdout.clone();
    insta::assert_snapshot!(redact_varying_parts(&lines_with_word(&text, "the only seed")), @r"
    inconclusive: fixture/spin/n128_none/cpu/hot: may be less accurate: relative L2 error 3.0 times as large (N, was N) for the only seed; 9 seeds would decide: `kernelgate verify --seeds 9` with this code, and with the baseline's before `kernelgate baseline add a`
    inconclusive: fixture/spin/n64_none/cpu/hot: may be less accurate: relative L2 error 3.0 times as large (N, was N) for the only seed; 9 seeds would decide: `kernelgate verify --seeds 9` with this code, and with the baseline's before `kernelgate baseline add a`
    ");
    // Recorded output errors of another executable do not count for this executable.
    package.run_kernelgate(&verify).assert_exit(0);
    let text = std::fs::read_to_string(&recorded).unwrap();
    let hash = package.read_run_record("head")["executable"].as_str().unwrap().to_owned();
    std::fs::write(&recorded, text.replace(&hash, "0")).unwrap();
    assert_eq!(gate(3, ""), only_seed);
    let none =
        package.run_kernelgate(&format!("verify --seeds 0 {}", package.bench_folder_flags()));
    insta::assert_snapshot!(none.refusal_message(2), @r"
    error: invalid value '0' for '--seeds <COUNT>': 0 is not in 1..=64

    For more information, try '--help'.
    ");
}

/// The seeds of each case in a file of recorded output errors.
fn seeds_by_case_in_record(
    record: &std::path::Path,
) -> std::collections::BTreeMap<String, Vec<u64>> {
    let value: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(record).unwrap()).unwrap();
    let seeds = |case: &serde_json::Value| {
        case["seeds"].as_array().unwrap().iter().map(|seed| seed.as_u64().unwrap()).collect()
    };
    let cases = value["cases"].as_object().unwrap().iter();
    cases.map(|(id, case)| (id.clone(), seeds(case))).collect()
}

#[test]
fn errors_of_several_verifications_are_kept_together() {
    let package = TempPackage::new();
    let dir = package.bench_folder_flags();
    let recorded = package.package_path("target/kernelgate/numerics/fixture.json");
    let other = FIXTURE_CASE_ID.replace("n64", "n128");
    let line = |flags: &str| format!("verify {flags} {dir}");
    let verify = |flags: &str| package.run_kernelgate(&line(flags));
    let messages = |outcome: &ProcessOutcome| {
        let lines = outcome.stderr.lines().filter(|line| !line.starts_with("verifying "));
        redact_varying_parts(&lines.collect::<Vec<_>>().join("\n"))
    };
    insta::assert_snapshot!(messages(verify("--seeds 3").assert_exit(0)), @r"
    seed 1, 3 in all
    seed 2, 3 in all
    seed 3, 3 in all
    errors of 3 seeds and 2 cases are in FOLDER/target/kernelgate/numerics/fixture.json
    ");
    // Verifies one case with other seeds.
    insta::assert_snapshot!(messages(verify("n64 --seeds 2 --seed 3").assert_exit(0)), @r"
    seed 3, 2 in all
    seed 4, 2 in all
    errors of 2 seeds and 1 case are in FOLDER/target/kernelgate/numerics/fixture.json; with earlier errors: 2 cases, up to 4 seeds
    ");
    let kept = seeds_by_case_in_record(&recorded);
    assert_eq!((&*kept[FIXTURE_CASE_ID], &*kept[&other]), (&[1, 2, 3, 4][..], &[1, 2, 3][..]));
    // A case that fails keeps the output errors recorded for it before.
    let failed = verify("--axis n=64 --axis fault=wrong --seeds 2");
    insta::assert_snapshot!(messages(failed.assert_exit(1)), @r"
    seed 1, 2 in all
    seed 2, 2 in all
    no case was right: nothing is recorded in FOLDER/target/kernelgate/numerics/fixture.json
    ");
    assert_eq!(seeds_by_case_in_record(&recorded), kept);
    // Two processes record output errors at the same time.
    std::fs::remove_file(&recorded).unwrap();
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let start = |flags: &str| package.package_command(program, &line(flags)).spawn().unwrap();
    for mut one in [start("n64 --seeds 8"), start("n128 --seeds 8")] {
        assert!(one.wait().unwrap().success());
    }
    let both = seeds_by_case_in_record(&recorded);
    assert!(both.len() == 2 && both.values().all(|seeds| seeds.len() == 8), "{both:?}");
    // Recorded output errors of another executable do not count for this one.
    let executable = package.package_path("executables/fixture");
    let mut bytes = std::fs::read(&executable).unwrap();
    bytes.push(0);
    // The executable is copied to a new file, because a process that was just started may still
    // hold the old one.
    let changed = package.package_path("changed");
    std::fs::write(&changed, bytes).unwrap();
    std::fs::set_permissions(&changed, executable.metadata().unwrap().permissions()).unwrap();
    std::fs::rename(changed, &executable).unwrap();
    insta::assert_snapshot!(messages(verify("n64 --seeds 2").assert_exit(0)), @r"
    the errors in FOLDER/target/kernelgate/numerics/fixture.json are of another executable: they will be replaced
    seed 1, 2 in all
    seed 2, 2 in all
    errors of 2 seeds and 1 case are in FOLDER/target/kernelgate/numerics/fixture.json
    ");
    assert_eq!(seeds_by_case_in_record(&recorded).into_values().collect::<Vec<_>>(), [[1, 2]]);
}

#[cfg(unix)]
#[test]
fn a_record_that_cannot_be_written_is_found_before_and_never_hides_the_verdict() {
    let package = TempPackage::new();
    let verify = format!("verify n64 --seeds 2 {}", package.bench_folder_flags());
    let recorded = package.package_path("target/kernelgate/numerics/fixture.json");
    std::fs::create_dir_all(&recorded).unwrap();
    insta::assert_snapshot!(package.run_kernelgate(&verify).refusal_message(2), @"error: failed to write FOLDER/target/kernelgate/numerics/fixture.json: is a directory");
    std::fs::remove_dir(&recorded).unwrap();
    std::fs::write(&recorded, "{").unwrap();
    insta::assert_snapshot!(package.run_kernelgate(&verify).refusal_message(2), @"error: remove it, and verify again: failed to read FOLDER/target/kernelgate/numerics/fixture.json: broken or cut short (EOF while parsing an object at line 1 column 1)");
    std::fs::remove_file(&recorded).unwrap();
    // The file of recorded errors cannot be locked when the verification ends, so the errors are
    // not recorded.
    std::fs::create_dir(recorded.with_file_name(".fixture.json.lock")).unwrap();
    insta::assert_snapshot!(package.run_kernelgate(&verify).text_for_snapshot(), @r"
    exit 2
    case  status  checked  max error  relative L2  same bits again
    fixture/spin/n64_none/cpu/hot  ok  100.0000%  N  N  yes
    skipped 1: cpu/never supports nothing: fixture/spin/n64_none/cpu/never/hot
    1 ok, 0 failed, 1 skipped
    -- stderr
    seed 1, 2 in all
    verifying fixture/spin/n64_none/cpu/hot
    no case was right: nothing is recorded in FOLDER/target/kernelgate/numerics/fixture.json
    error: failed to lock FOLDER/target/kernelgate/numerics/fixture.json: FOLDER/target/kernelgate/numerics/.fixture.json.lock is no lock file but a folder: remove it
    ");
}

#[test]
fn one_data_set_is_verified_and_compared_once() {
    let package = TempPackage::new();
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let mut verify = package
        .package_command(program, &format!("verify --seeds 9 {}", package.bench_folder_flags()));
    verify.env("FIXTURE_ONE_DATA_SET", "1");
    // In this mode of the fixture, the case fails for every seed other than 1.
    let verified: ProcessOutcome = verify.output().unwrap().into();
    insta::assert_snapshot!(redact_varying_parts(&verified.assert_exit(0).stdout), @r"
    case  status  checked  max error  relative L2  same bits again
    fixture/spin/n128_none/cpu/hot  ok  100.0000%  N  N  yes
    fixture/spin/n64_none/cpu/hot  ok  100.0000%  N  N  yes
    skipped 2: cpu/never supports nothing: fixture/spin/n128_none/cpu/never/hot, and 1 more
    2 ok, 0 failed, 2 skipped
    ");
    insta::assert_snapshot!(lines_with_word(&verified.stderr, "data set"), @"with 1 data set, whatever the seed: 2 cases");
    let recorded = package.package_path("target/kernelgate/numerics/fixture.json");
    let text = std::fs::read_to_string(&recorded).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["cases"][FIXTURE_CASE_ID]["seeds"], serde_json::json!([1]), "{json}");
    assert_eq!(json["cases"][FIXTURE_CASE_ID]["one_data_set"], true);
}

#[test]
fn a_case_that_fails_with_earlier_correct_inputs_fails() {
    let package = TempPackage::new();
    let verify = |seeds| {
        format!(
            "verify --seeds {seeds} --axis n=64 --axis fault=unlucky {}",
            package.bench_folder_flags()
        )
    };
    package.run_kernelgate(&verify(2)).assert_exit(0);
    let failed = package.run_kernelgate(&verify(4));
    insta::assert_snapshot!(redact_varying_parts(&failed.assert_exit(1).stdout), @r"
    case  status  checked  max error  relative L2  same bits again
    fixture/spin/n64_unlucky/cpu/hot  failed  -  -  -  -
    skipped 1: cpu/never supports nothing: fixture/spin/n64_unlucky/cpu/never/hot
    FAILED fixture/spin/n64_unlucky/cpu/hot: with seed 3: output `out`: max error N (allowed 1e-6), relative L2 N (allowed 1e-6); worst at PLACE
    0 ok, 1 failed, 1 skipped
    ");
    // The fixture's golden inputs are the same for every seed, so they count as one data set too.
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let mut golden = package.package_command(program, &verify(4));
    golden.env("FIXTURE_ONE_DATA_SET", "1");
    let golden: ProcessOutcome = golden.output().unwrap().into();
    assert_eq!(golden.assert_exit(1).stdout, failed.stdout);
}

#[test]
fn costs_are_judged_if_the_rules_file_limits_them() {
    let package = TempPackage::new();
    let set = |session: &str, bytes: u64| {
        package.run_fixture_bench(session, "").assert_exit(0);
        package.set_record_times(&package.run_record_path(session), 200_000.0);
        let mut run = package.read_run_record(session);
        run["cases"][FIXTURE_CASE_ID]["samples"]["costs"]["device_bytes"] = bytes.into();
        run["cases"][FIXTURE_CASE_ID]["samples"]["costs"]["commands"] = 7.into();
        std::fs::write(package.run_record_path(session), run.to_string()).unwrap();
    };
    set("b1", 1000);
    package.run_kernelgate("baseline add a").assert_exit(0);
    set("head", 2000);
    insta::assert_snapshot!(gate_findings_with_exit_code(&package, 0, ""), @r"
    fixture/spin/n128_none/cpu/hot unchanged
    fixture/spin/n64_none/cpu/hot unchanged
    ");
    let rules = "[[threshold]]\ncases = \".\"\ndevice-memory = 0.5\nlaunches = 0\n";
    std::fs::write(package.package_path("kernelgate.toml"), rules).unwrap();
    // One of the two cases has no recorded device memory.
    insta::assert_snapshot!(gate_findings_with_exit_code(&package, 1, ""), @r#"
    fixture/spin/n128_none/cpu/hot unchanged
    fixture/spin/n64_none/cpu/hot unchanged
    costs: {"allowed":0.5,"base":1000.0,"case":"fixture/spin/n64_none/cpu/hot","cost":"device_memory","head":2000.0}
    rules/thresholds: ["`.`: device memory 50%, launches 0%",2]
    rules/notes: "[[threshold]] `.`: device-memory could not be judged for 1 of 2 cases: there is no such cost on the CPU"
    rules/notes: "[[threshold]] `.`: launches could not be judged for 1 of 2 cases: there is no such cost on the CPU"
    "#);
    let text = package.run_kernelgate("gate --baseline a").assert_exit(1).stdout.clone();
    insta::assert_snapshot!(lines_with_word(&text, "device memory"), @r"
    fixture/spin/n64_none/cpu/hot: device memory 2.00 kB, was 1.00 kB (+100.0%, 50% are allowed)
    threshold in kernelgate.toml: `.`: device memory 50%, launches 0% (2 cases)
    ");
    insta::assert_snapshot!(package.run_kernelgate("runs --costs").assert_exit(0).stdout, @r"
    case                                 device memory  commands  host time  energy  max error  relative L2
    fixture/spin/n128_none/cpu/hot                   -         -          -       -     2.4e-8       2.1e-8
    fixture/spin/n64_none/cpu/hot   2.00 kB (declared)         7          -       -     2.4e-8       2.2e-8
    ");
    let runs = package.run_kernelgate("runs --format json").assert_exit(0).stdout_as_json();
    let costs = &runs[0]["cases"][FIXTURE_CASE_ID]["samples"]["costs"];
    assert_eq!((&costs["device_bytes"], &costs["commands"]), (&2000.into(), &7.into()), "{runs}");
}
