//! Tests of `ci/sanitizer/coverage`, which finds kernels that no run of compute-sanitizer reached,
//! from its logs.

#![cfg(unix)]

use std::path::Path;
use std::process::Command;

use crate::package::ProcessOutcome;

fn repository_root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Runs `ci/sanitizer/coverage` on a record of three kernels and one exception, with logs of these
/// cases.
fn run_sanitizer_coverage_script(launched: &[&str], tests_passed: bool) -> ProcessOutcome {
    let folder = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    };
    let script = std::fs::read_to_string(repository_root().join("ci/sanitizer/coverage")).unwrap();
    write("ci/sanitizer/coverage", &script);
    write("ci/sanitizer/exceptions.tsv", "# why\na/c X=[0-9]\tmemcheck\tneeds another card\n");
    let names = ["a/b X=1", "a/b X=1: a_b_finish", "a/c X=2", "measure/spin"];
    let kernels = names.map(|name| format!("    \"{name}\": {{\"block\":256}}")).join(",\n");
    let left_out = "  \"left_out\": {\n    \"a/d\": \"needs sm_100a\"\n  }";
    let record = format!("{{\n  \"kernels\": {{\n{kernels}\n  }},\n{left_out}\n}}\n");
    write("baselines/resources/sm_90a.json", &record);
    for (i, kernels) in launched.iter().enumerate() {
        let kernels: Vec<&str> = kernels.split(';').filter(|name| !name.is_empty()).collect();
        let rows = serde_json::json!([
            {"case": "x", "status": "ok", "kernels": kernels},
            {"case": "y", "status": "skipped", "kernels": []},
        ]);
        let text = serde_json::to_string_pretty(&rows).unwrap();
        write(&format!("logs/run{i}.memcheck.log.json"), &text);
    }
    // Writes the empty log of a compute-sanitizer run that was cut off.
    write("logs/cut.memcheck.log.json", "");
    if tests_passed {
        write("logs/measure.memcheck.log.out", "test result: ok. 1 passed; 0 failed\n");
    }
    let mut command = Command::new("bash");
    command.arg(folder.path().join("ci/sanitizer/coverage"));
    command.args(["--out", "logs", "--arch", "sm_90a", "--tools", "memcheck"]);
    command.output().unwrap().into()
}

#[test]
fn a_kernel_that_no_run_reached_fails_unless_it_is_an_exception() {
    let all = ["a/b X=1", "a/b X=1: a_b_finish"];
    insta::assert_snapshot!(run_sanitizer_coverage_script(&all, true).text_for_snapshot(), @r"
    exit 0
    memcheck  3 of 4 kernels of sm_90a reached, 1 excepted, 0 not reached
    ");
    insta::assert_snapshot!(run_sanitizer_coverage_script(&all[..1], true).text_for_snapshot(), @r"
    exit 1
    memcheck  2 of 4 kernels of sm_90a reached, 1 excepted, 1 not reached
        not reached: a/b X=1: a_b_finish
    ");
    insta::assert_snapshot!(run_sanitizer_coverage_script(&all, false).text_for_snapshot(), @r"
    exit 1
    memcheck  2 of 4 kernels of sm_90a reached, 1 excepted, 1 not reached
        not reached: measure/spin
    ");
    let excepted = run_sanitizer_coverage_script(&["a/b X=1;a/b X=1: a_b_finish;a/c X=2"], true);
    insta::assert_snapshot!(excepted.text_for_snapshot(), @r"
    exit 1
    memcheck  4 of 4 kernels of sm_90a reached, 1 excepted, 0 not reached
        an exception, and reached: a/c X=2
    ");
    insta::assert_snapshot!(run_sanitizer_coverage_script(&[], true).text_for_snapshot(), @r"
    exit 1
    memcheck  1 of 4 kernels of sm_90a reached, 1 excepted, 2 not reached
        not reached: a/b X=1
        not reached: a/b X=1: a_b_finish
    ");
}

#[test]
fn every_exception_names_a_recorded_kernel_and_a_reason() {
    let exceptions =
        std::fs::read_to_string(repository_root().join("ci/sanitizer/exceptions.tsv")).unwrap();
    let recorded =
        std::fs::read_to_string(repository_root().join("baselines/resources/sm_90a.json")).unwrap();
    let recorded: serde_json::Value = serde_json::from_str(&recorded).unwrap();
    let names = recorded["kernels"].as_object().unwrap();
    for line in exceptions.lines().filter(|line| !line.starts_with('#')) {
        let [pattern, tools, reason] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("not three fields: {line}");
        };
        let pattern = regex::Regex::new(&format!("^({pattern})$")).unwrap();
        assert!(names.keys().any(|name| pattern.is_match(name)), "no kernel: {line}");
        let allowed = ["all", "one_gpu", "memcheck", "racecheck", "synccheck", "initcheck"];
        assert!(tools.split(',').all(|tool| allowed.contains(&tool)), "{line}");
        assert!(reason.len() > 20, "{line}");
    }
}

/// An entry of the list of known sanitizer reports that belongs to no run any more could hide a new
/// report of another run.
#[test]
fn every_known_report_is_of_a_run_and_has_a_reason() {
    let read = |name: &str| std::fs::read_to_string(repository_root().join(name)).unwrap();
    let reports = read("ci/sanitizer/known.tsv");
    let families = std::fs::read_dir(repository_root().join("src")).unwrap();
    let runs = families.filter_map(|family| {
        std::fs::read_to_string(family.unwrap().path().join("sanitize.txt")).ok()
    });
    let runs = runs.collect::<String>();
    let names: Vec<&str> = runs.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(names.contains(&"persistent"), "{names:?}");
    let tools = ["memcheck", "racecheck", "synccheck", "initcheck"];
    for line in reports.lines().filter(|line| !line.starts_with('#')) {
        let [of, report, reason] = line.split('\t').collect::<Vec<_>>()[..] else {
            panic!("not three fields: {line}");
        };
        let pattern = regex::Regex::new(&format!("^{of}$")).unwrap();
        let mut all = names.iter().flat_map(|name| tools.map(|tool| format!("{name}.{tool}")));
        assert!(tools.contains(&of) || all.any(|run| pattern.is_match(&run)), "no run: {line}");
        assert!(regex::Regex::new(report).is_ok() && reason.len() > 20, "{line}");
    }
}
