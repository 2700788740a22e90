//! Judgements of the gate besides times, and limits and acceptances of a package in
//! `kernelgate.toml`, from outside.

use crate::package::{CASE, Package};

/// A package whose baseline `a` has 200 µs from two runs of commit aaaa1111, and whose last run has
/// 260 µs.
fn slower() -> Package {
    let package = Package::new();
    for session in ["b1", "b2"] {
        let mut bench = package.bench_command(session, "");
        assert!(bench.env("KERNELGATE_COMMIT", "aaaa1111").output().unwrap().status.success());
        package.kernelgate("baseline add a").expect(0, &[]);
    }
    package.set_times(&package.baseline("a"), 200_000.0);
    package.bench("head", "").expect(0, &[]);
    package.set_times(&package.record("head"), 260_000.0);
    package
}

/// Rules with an acceptance of all cases, and a threshold for the smaller case.
fn accept(bound: &str, commit: &str) -> String {
    format!(
        "[[accept]]\ncases = \"spin/\"\nslower = {bound}\nreason = \"exact <sums>\"\n\
         baseline = \"{commit}\"\n"
    )
}

#[test]
fn an_accepted_slow_down_is_within_its_bound_and_ends_with_the_baseline() {
    let package = slower();
    let gate = |rules: &str, code: i32, words: &[&str]| {
        std::fs::write(package.path("kernelgate.toml"), rules).unwrap();
        package.kernelgate("gate --baseline a").expect(code, words);
    };
    gate("", 1, &["2 regressed"]);
    let accepted = format!("accepted in kernelgate.toml: {CASE}: up to 50% slower: exact <sums>");
    gate(&accept("0.5", "aaaa1111"), 0, &["2 accepted, 0 improved, 0 unchanged", &accepted]);
    let markdown = package.kernelgate("gate --baseline a --format markdown");
    markdown.expect(
        0,
        &["**0 regressed, 2 accepted", "| accepted |", "up to 50% slower: exact &lt;sums>"],
    );
    let junit = package.kernelgate("gate --baseline a --format junit");
    junit.expect(0, &["up to 50% slower: exact", "slower by +"]);
    // The whole interval is beyond the bound.
    gate(&accept("0.1", "aaaa1111"), 1, &["2 regressed", "up to 10% slower"]);
    let expired = "no longer of bbbb2222 but of aaaa1111: expired";
    gate(&accept("0.5", "bbbb2222"), 1, &["2 regressed", expired]);
    let undated = accept("0.5", "").replace("baseline = \"\"\n", "");
    gate(&undated, 1, &["2 regressed", "`baseline = \"aaaa1111\"` makes it hold"]);
    // The last of several patterns that set a limit counts; one that matches nothing is reported.
    let thresholds = "[[threshold]]\ncases = \"n64_\"\nrelative = 0.5\n[[threshold]]\n\
                      cases = \"n65_\"\nabsolute-ns = 1e6\n";
    let words = [
        "1 regressed",
        "1 unchanged",
        "threshold in kernelgate.toml: `n64_`: 50% (1 case)",
        "kernelgate.toml: [[threshold]] `n65_` matches no case",
    ];
    gate(thresholds, 1, &words);
    gate(
        "[[threshold]]\ncases = \"n64\"\nrelativ = 1\n",
        2,
        &["kernelgate.toml, line 3 (`relativ"],
    );
}

#[test]
fn an_acceptance_ends_with_a_baseline_that_has_changes() {
    let package = slower();
    package.write_rules(&accept("0.5", "aaaa1111"));
    package.kernelgate("gate --baseline a").expect(0, &["2 accepted"]);
    // The next baseline is of the same commit, with uncommitted changes.
    let mut bench = package.bench_command("b3", "--save-baseline a");
    bench.env("KERNELGATE_COMMIT", "aaaa1111+changes");
    assert!(bench.output().unwrap().status.success());
    package.set_times(&package.baseline("a"), 200_000.0);
    package.bench("again", "").expect(0, &[]);
    package.set_times(&package.record("again"), 290_000.0);
    let words = ["2 regressed", "no longer of aaaa1111 but of aaaa1111+changes: expired"];
    package.kernelgate("gate --baseline a").expect(1, &words);
}

#[test]
fn a_bound_that_no_case_can_judge_does_not_pass() {
    let package = Package::new();
    let set = |session: &str, memory: bool| {
        package.bench(session, "").expect(0, &[]);
        package.set_times(&package.record(session), 200_000.0);
        if memory {
            let mut run = package.run(session);
            run["cases"][CASE]["samples"]["costs"]["device_bytes"] = 1000.into();
            std::fs::write(package.record(session), run.to_string()).unwrap();
        }
    };
    set("b1", false);
    package.kernelgate("baseline add a").expect(0, &[]);
    set("head", false);
    let gate = |code: i32, words: &[&str]| {
        package.kernelgate("gate --baseline a").expect(code, words);
    };
    package.write_rules("[[threshold]]\ncases = \".\"\nlaunches = 0\nhost-time = 0.1\n");
    let none = "could not be judged for 2 of 2 cases: there is no such cost on the CPU";
    gate(0, &["2 unchanged", &format!("launches {none}"), &format!("host-time {none}")]);
    // Now the head records it, and the baseline is older.
    set("later", true);
    package.write_rules("[[threshold]]\ncases = \"n64\"\ndevice-memory = 0.1\n");
    let why = "device-memory could not be judged for 1 of 1 cases: the base did not record it";
    gate(
        3,
        &["2 unchanged", &format!("inconclusive: kernelgate.toml: [[threshold]] `n64`: {why}")],
    );
    package.kernelgate("gate --baseline a --format junit").expect(3, &["<skipped message=\"", why]);
    package.kernelgate("gate --baseline a --format markdown").expect(3, &[why]);
}

/// Multiplies the errors of a record by a factor.
fn worsen(path: &std::path::Path, factor: f64) {
    fn set(value: &mut serde_json::Value, factor: f64) {
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
            fields.values_mut().for_each(|field| set(field, factor));
        }
    }
    let text = std::fs::read_to_string(path).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    set(&mut value["cases"], factor);
    std::fs::write(path, value.to_string()).unwrap();
}

#[test]
fn lost_accuracy_is_a_finding_once_there_are_enough_seeds() {
    let package = Package::new();
    // Two cases change below, which takes nine seeds.
    let verify = format!("verify --seeds 9 {}", package.dir());
    let recorded = package.path("target/kernelgate/numerics/fixture.json");
    package
        .kernelgate(&verify)
        .expect(0, &["errors of 9 seeds and 2 cases are in", "2 ok, 0 failed"]);
    package.bench("b1", "").expect(0, &[]);
    package
        .kernelgate("baseline add a")
        .expect(0, &["errors of 9 seeds for 2 cases of bench `fixture`"]);
    package.bench("head", "").expect(0, &[]);
    for record in [package.baseline("a"), package.record("head")] {
        package.set_times(&record, 200_000.0);
    }
    let gate = |flags: &str| package.kernelgate(&format!("gate --baseline a {flags}"));
    gate("").expect(0, &["2 unchanged"]);
    worsen(&recorded, 3.0);
    worsen(&package.record("head"), 3.0);
    let finding = "relative L2 error 3.0 times as large";
    gate("").expect(1, &["2 less accurate", CASE, finding, "for each of 9 seeds"]);
    gate("--format junit").expect(1, &["less accurate: relative L2 error"]);
    gate("--growth 4").expect(0, &["2 unchanged"]);
    let rules = package.path("kernelgate.toml");
    std::fs::write(&rules, "[[threshold]]\ncases = \"n64_\"\ngrowth = 4").unwrap();
    gate("").expect(1, &["1 less accurate"]);
    std::fs::remove_file(&rules).unwrap();
    // One seed shows nothing, and the gate does not pass.
    std::fs::remove_file(&recorded).unwrap();
    gate("").expect(3, &["2 maybe less accurate", "for the only seed", "verify --seeds 9"]);
    // The record is of another executable and does not count for this one.
    package.kernelgate(&verify).expect(0, &[]);
    let text = std::fs::read_to_string(&recorded).unwrap();
    let hash = package.run("head")["executable"].as_str().unwrap().to_owned();
    std::fs::write(&recorded, text.replace(&hash, "0")).unwrap();
    gate("").expect(3, &["for the only seed"]);
    package.kernelgate(&format!("verify --seeds 0 {}", package.dir())).expect(2, &["--seeds"]);
}

/// Seeds by case in a record of errors.
fn seeds(record: &std::path::Path) -> std::collections::BTreeMap<String, Vec<u64>> {
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
    let package = Package::new();
    let dir = package.dir();
    let recorded = package.path("target/kernelgate/numerics/fixture.json");
    let other = CASE.replace("n64", "n128");
    let line = |flags: &str| format!("verify {flags} {dir}");
    let verify = |flags: &str| package.kernelgate(&line(flags));
    verify("--seeds 3").expect(0, &["errors of 3 seeds and 2 cases are in"]);
    // One case, with other seeds.
    let more = "errors of 2 seeds and 1 case are in";
    verify("n64 --seeds 2 --seed 3")
        .expect(0, &[more, "with earlier errors: 2 cases, up to 4 seeds"]);
    let kept = seeds(&recorded);
    assert_eq!((&*kept[CASE], &*kept[&other]), (&[1, 2, 3, 4][..], &[1, 2, 3][..]));
    // A failed case keeps its recorded errors.
    verify("--axis n=64 --axis fault=wrong --seeds 2")
        .expect(1, &["FAILED", "no case was right: nothing is recorded in"]);
    assert_eq!(seeds(&recorded), kept);
    // Two processes record at once.
    std::fs::remove_file(&recorded).unwrap();
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let start = |flags: &str| package.command(program, &line(flags)).spawn().unwrap();
    for mut one in [start("n64 --seeds 8"), start("n128 --seeds 8")] {
        assert!(one.wait().unwrap().success());
    }
    let both = seeds(&recorded);
    assert!(both.len() == 2 && both.values().all(|seeds| seeds.len() == 8), "{both:?}");
    // Errors of another executable do not count.
    let executable = package.path("executables/fixture");
    let mut bytes = std::fs::read(&executable).unwrap();
    bytes.push(0);
    // The executable is copied to a new file, because a process that was just started may still
    // hold the old one.
    let changed = package.path("changed");
    std::fs::write(&changed, bytes).unwrap();
    std::fs::set_permissions(&changed, executable.metadata().unwrap().permissions()).unwrap();
    std::fs::rename(changed, &executable).unwrap();
    let replaced = "are of another executable: they will be replaced";
    verify("n64 --seeds 2").expect(0, &[replaced, more]);
    assert_eq!(seeds(&recorded).into_values().collect::<Vec<_>>(), [[1, 2]]);
}

#[cfg(unix)]
#[test]
fn a_record_that_cannot_be_written_is_found_before_and_never_hides_the_verdict() {
    let package = Package::new();
    let verify = format!("verify n64 --seeds 2 {}", package.dir());
    let recorded = package.path("target/kernelgate/numerics/fixture.json");
    std::fs::create_dir_all(&recorded).unwrap();
    let refused = package.kernelgate(&verify);
    refused.expect(2, &["failed to write", "numerics/fixture.json", "irectory"]);
    assert!(!refused.stderr.contains("seed 1"), "{}", refused.stderr);
    std::fs::remove_dir(&recorded).unwrap();
    std::fs::write(&recorded, "{").unwrap();
    package.kernelgate(&verify).expect(2, &["fixture.json: broken or cut short", "remove it"]);
    std::fs::remove_file(&recorded).unwrap();
    // The record cannot be written at the end.
    std::fs::create_dir(recorded.with_file_name(".fixture.json.lock")).unwrap();
    let words = ["is no lock file but a folder: remove it", "1 ok, 0 failed", CASE];
    package.kernelgate(&verify).expect(2, &words);
}

#[test]
fn one_data_set_is_verified_and_compared_once() {
    let package = Package::new();
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let mut verify = package.command(program, &format!("verify --seeds 9 {}", package.dir()));
    verify.env("FIXTURE_ONE_DATA_SET", "1");
    // The case fails with any other seed.
    let verified: crate::package::Outcome = verify.output().unwrap().into();
    verified.expect(0, &["2 ok, 0 failed", "with 1 data set, whatever the seed: 2 cases"]);
    let recorded = package.path("target/kernelgate/numerics/fixture.json");
    let text = std::fs::read_to_string(&recorded).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["cases"][CASE]["seeds"], serde_json::json!([1]), "{json}");
    assert_eq!(json["cases"][CASE]["one_data_set"], true);
}

#[test]
fn a_case_fails_if_it_fails_with_inputs_that_were_right_before() {
    let package = Package::new();
    let verify = |seeds| {
        format!("verify --seeds {seeds} --axis n=64 --axis fault=unlucky {}", package.dir())
    };
    let one = "with 1 data set, whatever the seed: 1 case";
    package.kernelgate(&verify(2)).expect(0, &["1 ok, 0 failed", one]);
    package.kernelgate(&verify(4)).expect(1, &["0 ok, 1 failed", "with seed 3: "]);
    // Golden inputs are one data set too.
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let mut golden = package.command(program, &verify(4));
    golden.env("FIXTURE_ONE_DATA_SET", "1");
    let golden: crate::package::Outcome = golden.output().unwrap().into();
    golden.expect(1, &["0 ok, 1 failed", "with seed 3: "]);
}

#[test]
fn costs_are_judged_where_the_package_asks_for_it() {
    let package = Package::new();
    let set = |session: &str, bytes: u64| {
        package.bench(session, "").expect(0, &[]);
        package.set_times(&package.record(session), 200_000.0);
        let mut run = package.run(session);
        run["cases"][CASE]["samples"]["costs"]["device_bytes"] = bytes.into();
        run["cases"][CASE]["samples"]["costs"]["commands"] = 7.into();
        std::fs::write(package.record(session), run.to_string()).unwrap();
    };
    set("b1", 1000);
    package.kernelgate("baseline add a").expect(0, &[]);
    set("head", 2000);
    package.kernelgate("gate --baseline a").expect(0, &["2 unchanged"]);
    let rules = "[[threshold]]\ncases = \".\"\ndevice-memory = 0.5\nlaunches = 0\n";
    std::fs::write(package.path("kernelgate.toml"), rules).unwrap();
    let words =
        ["1 of higher cost", "device memory 2.00 kB, was 1.00 kB (+100.0%, 50% are allowed)"];
    package.kernelgate("gate --baseline a").expect(1, &words);
    // One of the two cases does not record its memory.
    let words = ["`.`: device-memory could not be judged for 1 of 2 cases: there is no such cost"];
    package.kernelgate("gate --baseline a").expect(1, &words);
    package.kernelgate("runs --costs").expect(0, &["device memory", "2.00 kB", "  7  "]);
    package
        .kernelgate("runs --format json")
        .expect(0, &["\"device_bytes\": 2000", "\"commands\": 7"]);
}
