//! Tests of `kernelgate compare` as a process, on builds of a scratch repository with one bench.
//!
//! The scratch bench is linked with the library that `cargo test` built, so that a build takes
//! seconds. Thresholds are wide and the head is many times slower: the tests check the messages,
//! not the resolution of the measurement.

#![cfg(unix)]

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::{error_message, report_without_times};
use crate::package::outcome::redact_varying_parts;
use crate::package::scratch::{
    SCRATCH_BENCH_SOURCE, SCRATCH_CARGO_TOML, SCRATCH_CASE_ID, TempRepository,
    run_until_load_allows_verdict,
};
use crate::package::{ProcessOutcome, lines_with_word};
use serde_json::Value;

#[test]
fn unchanged_code_is_fine_and_slower_code_is_not() {
    let scratch = TempRepository::new();
    let status = scratch.run_git("status --porcelain");
    let same = scratch.run_comparison("--base main --head HEAD --format json");
    insta::assert_snapshot!(report_without_times(same.assert_exit(0)), @r#"
    scratch/sum/n1024/cpu/hot unchanged
    identical: "spin"
    "#);
    // Without `--time-identical`, byte-for-byte equal executables are not timed.
    let mut plainly = Command::new(env!("CARGO_BIN_EXE_kernelgate"));
    let environment = scratch.compare_command_above_noise("");
    plainly
        .args(["compare", "--base", "main", "--head", "HEAD", "--backend", "cpu"])
        .current_dir(scratch.folder.path())
        .envs(environment.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let plainly: ProcessOutcome = plainly.output().unwrap().into();
    let commit = scratch.run_git("rev-parse --short=8 HEAD");
    let text = plainly.assert_exit(0).stdout.replace(commit.trim(), "COMMIT");
    insta::assert_snapshot!(redact_varying_parts(&text), @r"
    the two builds are the same file, byte by byte: 1 case was not timed (--time-identical times all the same)
    base main (COMMIT), head HEAD (COMMIT),DEVICE

    warning: built without optimisation; times mean nothing
    the same executable on both sides, byte by byte: spin

    1 identical of 1 (threshold 1%)
    ");
    scratch.replace_text_in_bench("SLEEP_US: u64 = 50", "SLEEP_US: u64 = 6400");
    // The working tree has an uncommitted change and a new file.
    scratch.write_file("notes.txt", "new");
    let before = (
        scratch.run_git("status --porcelain"),
        scratch.run_git("stash list"),
        scratch.run_git("branch --list"),
    );
    let ran = install_git_hooks(&scratch);
    let outcome = scratch.run_comparison("--base main --format json");
    insta::assert_snapshot!(report_without_times(outcome.assert_exit(1)), @"scratch/sum/n1024/cpu/hot regressed");
    assert!(!ran.exists(), "{:?}", std::fs::read_to_string(ran));
    std::fs::remove_dir_all(scratch.folder.path().join(".git/hooks")).unwrap();
    let json = outcome.stdout_as_json();
    assert_eq!(json["judged"][0]["confirmation"]["verdict"], "regressed");
    let why = &json["explanations"][SCRATCH_CASE_ID];
    assert_eq!(
        (&why["causes"][0], &why["identical_code"]),
        (&"host".into(), &false.into()),
        "{why}"
    );
    let words = why["evidence"][0].as_str().unwrap();
    assert!(words.starts_with("a launch ") && words.contains(" -> "), "{words}");
    let head = json["head"].as_str().unwrap();
    let commit = head.strip_prefix("working tree (").and_then(|end| end.strip_suffix(')'));
    assert!(commit.is_some_and(|it| it.chars().all(|c| c.is_ascii_hexdigit())), "{head}");
    assert_eq!(
        (
            scratch.run_git("status --porcelain"),
            scratch.run_git("stash list"),
            scratch.run_git("branch --list")
        ),
        before
    );
    assert!(status.is_empty() || status.contains("target"), "{status}");
    // The last comparison was finished, so resuming it measures nothing again.
    let resumed = scratch.run_comparison("--base main --resume --format json");
    assert_eq!(resumed.assert_exit(1).stdout_as_json()["judged"], json["judged"]);
    scratch.commit_sources("slower");
    scratch.run_comparison("--base main~1 --resume").assert_exit(1);
    let faster = scratch.run_comparison("--base HEAD --head main~1 --format json");
    assert_eq!(faster.assert_exit(0).json_verdicts(), ["improved"]);
}

/// The recorded trials of a comparison stay when a different comparison runs.
#[test]
fn a_comparison_of_something_else_is_not_resumed() {
    let scratch = TempRepository::new();
    scratch.replace_text_in_bench("SLEEP_US: u64 = 50", "SLEEP_US: u64 = 6400");
    scratch.commit_sources("slower");
    scratch.run_comparison("--base main~1 --max-blocks 1").assert_exit(3);
    let trials = scratch.folder.path().join("target/kernelgate/compare/trials.json");
    let before = std::fs::read(&trials).unwrap();
    let mut refusals = String::new();
    for flags in [
        "--base main~1 --case-time 0.2s",
        "--base main~1 --axis n=1024",
        "--base main~1 --absolute 5",
        "--base main~1 n1024",
        "--base HEAD --head main~1",
    ] {
        let outcome = scratch.run_comparison(&format!("{flags} --max-blocks 1 --resume"));
        refusals += &format!("{flags}: {}\n", error_message(&outcome, 2));
    }
    insta::assert_snapshot!(refusals, @r"
    --base main~1 --case-time 0.2s: error: --resume: the interrupted comparison was another: --case-time differs; repeat its command to go on, or leave --resume out to start anew
    --base main~1 --axis n=1024: error: --resume: the interrupted comparison was another: --axis (KERNELGATE_AXIS) differs; repeat its command to go on, or leave --resume out to start anew
    --base main~1 --absolute 5: error: --resume: the interrupted comparison was another: --relative, --absolute, --tolerated, --max-blocks or the device's calibration differs; repeat its command to go on, or leave --resume out to start anew
    --base main~1 n1024: error: --resume: the interrupted comparison was another: the filter differs; repeat its command to go on, or leave --resume out to start anew
    --base HEAD --head main~1: error: --resume: the interrupted comparison was another: the executable of bench `spin` in the base differs; repeat its command to go on, or leave --resume out to start anew
    ");
    assert_eq!(std::fs::read(&trials).unwrap(), before);
}

/// Adds hooks to the user's repository, and returns the file to which they would write.
fn install_git_hooks(scratch: &TempRepository) -> PathBuf {
    use std::os::unix::fs::PermissionsExt as _;
    let ran = scratch.folder.path().join("target/hooks");
    for name in ["post-index-change", "post-checkout", "pre-commit", "reference-transaction"] {
        let text = format!("#!/bin/sh\necho {name} >> '{}'\n", ran.display());
        scratch.write_file(&format!(".git/hooks/{name}"), &text);
        let hook = scratch.folder.path().join(".git/hooks").join(name);
        std::fs::set_permissions(hook, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    ran
}

/// A case whose golden tensors changed fails its verification, although its executable is the same.
#[test]
fn files_that_the_same_executable_reads_are_verified_on_both_sides() {
    let scratch = TempRepository::new();
    let read = "let factor: f64 = std::fs::read_to_string(\"src/factor.txt\").unwrap().parse()";
    scratch.replace_text_in_bench(
        "let y: Vec<f64>",
        &format!("{read}.unwrap();\n        let y: Vec<f64>"),
    );
    let bench = std::fs::read_to_string(scratch.folder.path().join("benches/spin.rs")).unwrap();
    let scaled =
        bench.replace("f64::from(x) * f64::from(x)", "factor * f64::from(x) * f64::from(x)");
    scratch.write_file("benches/spin.rs", &scaled);
    scratch.write_file("src/factor.txt", "1");
    scratch.commit_sources("reads");
    let same = scratch.run_comparison("--base main --max-blocks 1 --format json");
    insta::assert_snapshot!(report_without_times(same.assert_exit(3)), @r#"
    scratch/sum/n1024/cpu/hot inconclusive {"kind":"too_few_pairs","pairs":2}
    identical: "spin"
    "#);
    // The executable was verified with other file contents, so it is verified again.
    scratch.write_file("src/factor.txt", "2");
    for resume in ["--resume", ""] {
        let wrong =
            scratch.run_comparison(&format!("--base main --max-blocks 1 --format json {resume}"));
        insta::allow_duplicates! { insta::assert_snapshot!(report_without_times(wrong.assert_exit(1)), @r#"
        identical: "spin"
        failed: scratch/sum/n1024/cpu/hot: {"kind":"too_far","names":{"output":"y"},"numbers":{"actual":N,"expected":N,"max_error":N,"max_error_allowed":1e-6,"relative_l2":N,"relative_l2_allowed":1e-6,"worst":58.0},"text":"output `y`: max error N (allowed 1e-6), relative L2 N (allowed 1e-6); worst at PLACE"}
        "#) };
    }
}

#[test]
fn an_edit_inside_a_submodule_is_compared() {
    let (scratch, other) = (TempRepository::new(), tempfile::tempdir().unwrap());
    let inside = |line: &str| {
        scratch
            .run_git(&format!("-c protocol.file.allow=always -C {} {line}", other.path().display()))
    };
    std::fs::write(other.path().join("sleep.in"), "50").unwrap();
    let _ = ["init --quiet", "add sleep.in", "commit --quiet -m sleep"].map(inside);
    let path = other.path().display();
    scratch.run_git(&format!("-c protocol.file.allow=always submodule --quiet add {path} parts"));
    scratch.replace_text_in_bench(
        "SLEEP_US: u64 = 50",
        "SLEEP_US: u64 = include!(\"../parts/sleep.in\")",
    );
    scratch.commit_sources("submodule");
    scratch.write_file("parts/sleep.in", "1600");
    // The edited file gives another executable; showing its slow-down would take more processes,
    // and would test nothing new.
    let edited = scratch.run_comparison("--base main --max-blocks 1 --format json");
    insta::assert_snapshot!(report_without_times(edited.assert_exit(3)), @r#"scratch/sum/n1024/cpu/hot inconclusive {"kind":"too_few_pairs","pairs":2}"#);
    let head = edited.stdout_as_json()["head"].as_str().unwrap().to_owned();
    insta::assert_snapshot!(head.split(" (").next().unwrap(), @"working tree, with changes in submodule parts");
    for gone in ["parts", ".git/modules"] {
        std::fs::remove_dir_all(scratch.folder.path().join(gone)).unwrap();
    }
    std::fs::create_dir(scratch.folder.path().join("parts")).unwrap();
    let lost = scratch.run_comparison("--base main");
    insta::assert_snapshot!(error_message(&lost, 2), @r#"
    error: base main (COMMIT) does not build; cargo's last lines:
    error: couldn't read `benches/../parts/sleep.in`: No such file or directory (os error 2)
    error: could not compile `scratch` (bench "spin") due to 1 previous error
    submodule parts of main (COMMIT) stays empty, as it is in the working tree; `git submodule update --init --recursive -- parts` gets it
    note: sides are built from copies of the repository; relative paths that lead out of it by more than two folders, and untracked files that git ignores, are not found there. An absolute path works
    "#);
}

#[test]
fn lost_accuracy_is_found_with_the_number_of_its_data_sets() {
    let scratch = TempRepository::new();
    scratch.replace_text_in_bench("*y = x * x", "*y = x * x * 1.000_000_4");
    let brief = "--base main --max-blocks 1 --format json";
    insta::assert_snapshot!(report_without_times(scratch.run_comparison(brief).assert_exit(1)), @r#"
    scratch/sum/n1024/cpu/hot inconclusive {"kind":"too_few_pairs","pairs":2}
    numerics/grown: {"allowed":1.5,"base":N,"case":"scratch/sum/n1024/cpu/hot","figure":"relative_l2","head":N,"needed":8,"one_data_set":false,"ratio":N,"seeds":8}
    "#);
    // Inputs that do not depend on the seed count as one data set, and so do inputs that a workload
    // declares to read from files.
    for (from, to) in [
        ("random::normal_values(seed,", "random::normal_values(1,"),
        ("fn work(&self)", "fn reads_files(&self) -> bool { true }\n    fn work(&self)"),
    ] {
        let less = SCRATCH_BENCH_SOURCE.replace("*y = x * x", "*y = x * x * 1.000_000_4");
        scratch.write_file("benches/spin.rs", &less.replace(from, to));
        let one = report_without_times(scratch.run_comparison(brief).assert_exit(3));
        insta::allow_duplicates! { insta::assert_snapshot!(one, @r#"
        scratch/sum/n1024/cpu/hot inconclusive {"kind":"too_few_pairs","pairs":2}
        numerics/grown: {"allowed":1.5,"base":N,"case":"scratch/sum/n1024/cpu/hot","figure":"relative_l2","head":N,"needed":8,"one_data_set":true,"ratio":N,"seeds":1}
        "#) };
    }
}

#[test]
fn an_accepted_slow_down_lasts_until_the_base_contains_it() {
    let scratch = TempRepository::new();
    scratch
        .write_file("kernelgate.toml", "[[accept]]\ncases = 'sum'\nslower = 'x'\nreason = 'why'");
    insta::assert_snapshot!(error_message(&scratch.run_comparison("--base main"), 2), @r#"error: kernelgate.toml of the head, line 3 (`slower = 'x'`): invalid type: string "x", expected f64"#);
    scratch
        .write_file("kernelgate.toml", "[[accept]]\ncases = 'sum'\nslower = 199\nreason = 'why'");
    scratch.replace_text_in_bench("SLEEP_US: u64 = 50", "SLEEP_US: u64 = 6400");
    let accepted = scratch.run_comparison("--base main --format json");
    insta::assert_snapshot!(report_without_times(accepted.assert_exit(0)), @r#"
    scratch/sum/n1024/cpu/hot accepted
    rules/accepted: {"case":"scratch/sum/n1024/cpu/hot","growth":null,"less_verified":false,"reason":"why","removed":false,"slower":199.0}
    "#);
    scratch.run_git("add kernelgate.toml");
    scratch.run_git("commit --quiet -m accepted");
    let expired = scratch.run_comparison("--base main --max-blocks 1 --format json");
    insta::assert_snapshot!(report_without_times(expired.assert_exit(3)), @r#"
    scratch/sum/n1024/cpu/hot inconclusive {"kind":"too_few_pairs","pairs":2}
    rules/notes: "[[accept]] `sum` is accepted in the base already: expired, remove it"
    "#);
}

#[test]
fn lost_accuracy_of_one_output_is_found_below_the_error_of_another() {
    let scratch = TempRepository::new();
    // The bench of this test gets a second output, of which only 8 bits of the significand are
    // kept.
    let declared = "vec![Expected::all(\"y\", [1, self.n], y)]";
    let both = "vec![Expected::all(\"y\", [1, self.n], y.clone()), \
                Expected::all(\"short\", [1, self.n], y)]";
    let stored = "std::hint::black_box(outputs.f32_mut(\"y\"));";
    let shortened = "let short = |x: &f32| f32::from_bits((x * x).to_bits() & 0xffff_0000);
                     let values: Vec<f32> = inputs.f32_elements(\"x\").iter().map(short).collect();
                     outputs.f32_mut(\"short\").copy_from_slice(&values);";
    let output = ".with_output(\"y\", [1, problem.n], Dtype::F32)";
    let outputs = format!("{output}.with_output(\"short\", [1, problem.n], Dtype::F32)");
    let bench = SCRATCH_BENCH_SOURCE
        .replace(declared, both)
        .replace(stored, &format!("{stored}{shortened}"))
        .replace(output, &outputs)
        .replace("max_error: 1e-6, relative_l2: 1e-6", "max_error: 1e-2, relative_l2: 1e-2");
    scratch.write_file("benches/spin.rs", &bench);
    scratch.commit_sources("outputs");
    let less = bench.replace("*y = x * x", "*y = x * x * 1.000_04");
    scratch.write_file("benches/spin.rs", &less);
    let brief = "--base main --max-blocks 1 --format json";
    insta::assert_snapshot!(report_without_times(scratch.run_comparison(brief).assert_exit(1)), @r#"
    scratch/sum/n1024/cpu/hot inconclusive {"kind":"too_few_pairs","pairs":2}
    numerics/grown: {"allowed":1.5,"base":N,"case":"scratch/sum/n1024/cpu/hot","figure":"relative_l2","head":N,"needed":8,"one_data_set":false,"output":"y","ratio":N,"seeds":8}
    "#);
    // One output of the case has a tolerance of its own.
    let own = "fn tolerances(&self) -> std::collections::BTreeMap<String, Tolerance> {
                   let tight = Tolerance { max_error: 1e-6, relative_l2: 1e-6 };
                   [(\"y\".to_owned(), tight)].into()
               }
               fn work(&self)";
    scratch.write_file("benches/spin.rs", &less.replace("fn work(&self)", own));
    insta::assert_snapshot!(report_without_times(scratch.run_comparison(brief).assert_exit(1)), @r#"failed: scratch/sum/n1024/cpu/hot: {"kind":"too_far","names":{"output":"y"},"numbers":{"actual":N,"expected":N,"max_error":N,"max_error_allowed":1e-6,"relative_l2":N,"relative_l2_allowed":1e-6,"worst":58.0},"text":"output `y`: max error N (allowed 1e-6), relative L2 N (allowed 1e-6); worst at PLACE"}"#);
    let unknown = own.replace("\"y\"", "\"z\"");
    scratch.write_file("benches/spin.rs", &bench.replace("fn work(&self)", &unknown));
    insta::assert_snapshot!(report_without_times(scratch.run_comparison(brief).assert_exit(1)), @r#"failed: scratch/sum/n1024/cpu/hot: {"text":"a tolerance for output `z`, which the reference lacks"}"#);
}

#[test]
fn a_removed_case_is_named_in_every_output_and_can_be_accepted() {
    let scratch = TempRepository::new();
    scratch.replace_text_in_bench(
        "default_selection_lines: &[\"n=1024\"]",
        "default_selection_lines: &[\"n=2048\"]",
    );
    let line = "--base main --max-blocks 1 --out out --format json";
    insta::assert_snapshot!(report_without_times(scratch.run_comparison(line).assert_exit(3)), @r#"
    new: "scratch/sum/n2048/cpu/hot"
    removed: "scratch/sum/n1024/cpu/hot"
    "#);
    let removed = |name: &str| {
        let text = std::fs::read_to_string(scratch.folder.path().join("out").join(name)).unwrap();
        lines_with_word(&text, SCRATCH_CASE_ID)
    };
    insta::assert_snapshot!(removed("comment.md"), @"- removed: scratch/sum/n1024/cpu/hot");
    insta::assert_snapshot!(removed("junit.xml"), @r#"<testcase name="scratch/sum/n1024/cpu/hot" classname="scratch.sum">"#);
    assert_ne!(removed("report.html"), "");
    scratch.write_file("kernelgate.toml", "removed-cases = \"fail\"\n");
    insta::assert_snapshot!(report_without_times(scratch.run_comparison(line).assert_exit(1)), @r#"
    new: "scratch/sum/n2048/cpu/hot"
    removed: "scratch/sum/n1024/cpu/hot"
    "#);
    let accepted = "removed-cases = \"fail\"\n[[accept]]\ncases = \"n1024\"\nremoved = true\n\
                    reason = \"n2048 replaces it\"\n";
    scratch.write_file("kernelgate.toml", accepted);
    // After these changes of the bench, no case is left to be judged.
    insta::assert_snapshot!(report_without_times(scratch.run_comparison(line).assert_exit(3)), @r#"
    new: "scratch/sum/n2048/cpu/hot"
    removed: "scratch/sum/n1024/cpu/hot"
    rules/accepted: {"case":"scratch/sum/n1024/cpu/hot","growth":null,"less_verified":false,"reason":"n2048 replaces it","removed":true,"slower":null}
    "#);
}

#[test]
fn sides_that_cannot_be_compared_are_named() {
    let scratch = TempRepository::new();
    insta::assert_snapshot!(error_message(&scratch.run_comparison("--base mian"), 2), @"error: no revision `mian` in FOLDER; did you mean main?");
    scratch.run_comparison("--base main --head --budget").assert_exit(2);
    // The broken calibration file is reported before anything is built.
    scratch.write_file("baselines/amd/calibration.json", "[");
    insta::assert_snapshot!(scratch.run_comparison("--base main").refusal_message(2), @"error: failed to read FOLDER/baselines/DEVICE/calibration.json: broken or cut short (EOF while parsing a list at line 1 column 1)");
    std::fs::remove_dir_all(scratch.folder.path().join("baselines")).unwrap();
    insta::assert_snapshot!(scratch.run_comparison("").refusal_message(2), @r"
    error: the following required arguments were not provided:
      --base <REV>

    Usage: kernelgate compare --relative <FRACTION> --tolerated <FRACTION> --backend <BACKEND> --time-identical --case-time <TIME> --max-blocks <COUNT> --base <REV> [FILTER]

    For more information, try '--help'.
    ");
    insta::assert_snapshot!(error_message(&scratch.run_comparison("--base main --bench none"), 2), @"error: --bench none: neither side has it; there are spin");
    // No bench of the base has such a case, which the error reports before the head is built.
    let typo = scratch.run_comparison("--base main nothing");
    let progress = regex::Regex::new(r"built \w+ in .*\n| \([0-9a-f]{8}\)").unwrap();
    let typo = progress.replace_all(&typo.assert_exit(2).stderr, "").into_owned();
    insta::assert_snapshot!(typo, @r"
    building base: main
    in the base no case matches `nothing`; `kernelgate list` shows the cases
    building head: working tree, no changes
    verifying base spin
    verifying head spin
    error: no case matches `nothing`; `--list` shows the cases
    ");
    scratch.replace_text_in_bench("fn main() -> ExitCode {", "fn main() -> ExitCode { mistake");
    insta::assert_snapshot!(error_message(&scratch.run_comparison("--base main"), 2), @r#"
    error: head working tree (COMMIT) does not build; cargo's last lines:
    error: expected `;`, found `Harness`
    error: could not compile `scratch` (bench "spin") due to 1 previous error
    "#);
}

#[test]
fn cases_that_cannot_be_compared_are_named() {
    let scratch = TempRepository::new();
    let compare = |code| {
        report_without_times(scratch.run_comparison("--base main --format json").assert_exit(code))
    };
    // The comparison refuses a case whose workload definition has another revision in the head.
    scratch.replace_text_in_bench("revision: 1", "revision: 2");
    insta::assert_snapshot!(compare(4), @r#"refused: {"base":"1","cases":["scratch/sum/n1024/cpu/hot"],"field":"revision","head":"2"}"#);
    scratch.replace_text_in_bench("*y = x * x", "*y = x + x");
    insta::assert_snapshot!(compare(1), @r#"failed: scratch/sum/n1024/cpu/hot: {"kind":"too_far","names":{"output":"y"},"numbers":{"actual":-N,"expected":N,"max_error":N,"max_error_allowed":1e-6,"relative_l2":N,"relative_l2_allowed":1e-6,"worst":561.0},"text":"output `y`: max error N (allowed 1e-6), relative L2 N (allowed 1e-6); worst at PLACE"}"#);
    scratch.replace_text_in_bench(
        "let x = inputs.f32_elements(\"x\");",
        "std::process::exit(7);\n#[allow(unreachable_code)]\nlet x = inputs.f32_elements(\"x\");",
    );
    insta::assert_snapshot!(compare(1), @r#"
    scratch/sum/n1024/cpu/hot inconclusive {"kind":"bench_broke","side":"head","why":"exit status: 7"}
    broken: {"abandoned":true,"bench":"spin","reason":"exit status: 7","side":"head"}
    "#);
    // One bench of the repository uses another harness, and another bench exists only in the head.
    scratch.write_file("benches/spin.rs", SCRATCH_BENCH_SOURCE);
    scratch.write_file("benches/other.rs", "fn main() { println!(\"done\"); }");
    scratch.write_file(
        "Cargo.toml",
        &format!("{SCRATCH_CARGO_TOML}\n[[bench]]\nname = \"other\"\nharness = false\n"),
    );
    insta::assert_snapshot!(compare(0), @r#"
    scratch/sum/n1024/cpu/hot unchanged
    identical: "spin"
    foreign: "other"
    left_alone: other: "its file has no mark of this harness, so it was not run; `--bench other` runs it all the same"
    "#);
}

/// Code for a bench of two cases. Environment variables select a fault of the larger case:
/// `SCRATCH_FAULT` selects a fault in the trials whose session name contains `SCRATCH_WHEN`.
const FAULT_SELECTED_BY_VARIABLE_SOURCE: &str = r#"
fn fault(kind: &str) -> bool {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let order = std::fs::read_to_string(variable("KERNELGATE_REQUEST")).unwrap_or_default();
    variable("SCRATCH_FAULT") == kind && order.contains(&variable("SCRATCH_WHEN"))
}
"#;

/// Source of the scratch bench with a second, larger case and a fault that a variable selects.
fn scratch_bench_with_two_cases_and_faults() -> String {
    let bench = [
        ("default_selection_lines: &[\"n=1024\"]", "default_selection_lines: &[\"n=1024,2048\"]"),
        (
            "self.n as u64 * 16",
            "if self.n == 2048 && fault(\"skip\") { 1 << 60 } else { self.n as u64 * 16 }",
        ),
        (
            "    Harness::new(\"spin\", vec![join_workload_with_implementations(&SUM, ROWS)])",
            "    if fault(\"exit\") { std::process::exit(7) }
    const FEWER: Workload<Sum> = Workload { default_selection_lines: &[\"n=1024\"], ..SUM };
    Harness::new(\"spin\", vec![join_workload_with_implementations(if fault(\"absent\") { &FEWER } else { &SUM }, ROWS)])",
        ),
    ];
    let mut text = format!("{SCRATCH_BENCH_SOURCE}{FAULT_SELECTED_BY_VARIABLE_SOURCE}");
    for (from, to) in bench {
        assert!(text.contains(from));
        text = text.replace(from, to);
    }
    text
}

#[test]
fn a_case_that_was_asked_for_ends_in_the_table_with_a_reason() {
    let scratch = TempRepository::new();
    let text = scratch_bench_with_two_cases_and_faults();
    scratch.write_file("benches/spin.rs", &text);
    scratch.commit_sources("two");
    let compare = |code: i32, fault: &str, when: &str, flags: &str| {
        let flags = format!("--base main --head main --case-time 0.01s --format json {flags}");
        let outcome = run_until_load_allows_verdict(|| {
            let mut command = scratch.compare_command_above_noise(&flags);
            command.env("SCRATCH_FAULT", fault).env("SCRATCH_WHEN", when);
            command
        });
        let json = outcome.assert_exit(code).stdout_as_json();
        let cases = json["judged"].as_array().unwrap();
        let larger = SCRATCH_CASE_ID.replace("1024", "2048");
        let larger = cases.iter().find(|case| case["case"] == *larger);
        let pairs = larger.map_or(Value::Null, |case| case["decision"]["pairs"].clone());
        format!("{}\npairs of the larger case: {pairs}", report_without_times(&outcome))
    };
    // The fault occurs in every bench process except the one that verified.
    insta::assert_snapshot!(compare(3, "skip", "\"r1-", ""), @r#"
    scratch/sum/n2048/cpu/hot inconclusive {"kind":"skipped","side":"base","why":"needs N GB of memory, N GB are free"}
    scratch/sum/n1024/cpu/hot unchanged
    identical: "spin"
    pairs of the larger case: 0
    "#);
    // The skip begins after the first block of trials: the block's measurements are shown, but
    // decide nothing.
    insta::assert_snapshot!(compare(3, "skip", "\"r1-b1-p0\"", "--max-blocks 2"), @r#"
    scratch/sum/n1024/cpu/hot inconclusive {"kind":"too_few_pairs","pairs":4}
    scratch/sum/n2048/cpu/hot inconclusive {"kind":"too_few_pairs","pairs":2} {"kind":"skipped","side":"head","why":"needs N GB of memory, N GB are free"}
    identical: "spin"
    pairs of the larger case: 2
    "#);
    let absent = compare(3, "absent", "\"r1-b0-p1\"", "--max-blocks 1");
    insta::assert_snapshot!(absent, @r#"
    scratch/sum/n1024/cpu/hot inconclusive {"kind":"too_few_pairs","pairs":2}
    scratch/sum/n2048/cpu/hot inconclusive {"kind":"skipped","side":"head","why":"the bench did not list it"}
    identical: "spin"
    pairs of the larger case: 0
    "#);
    // The interrupted comparison recorded that the case is absent, and requests nothing again.
    assert_eq!(compare(3, "", "", "--max-blocks 1 --resume"), absent);
    insta::assert_snapshot!(compare(1, "exit", "\"r1-", ""), @r#"
    scratch/sum/n1024/cpu/hot inconclusive {"kind":"bench_broke","side":"head","why":"exit status: 7"}
    scratch/sum/n2048/cpu/hot inconclusive {"kind":"bench_broke","side":"head","why":"exit status: 7"}
    identical: "spin"
    broken: {"abandoned":false,"bench":"spin","reason":"exit status: 7","side":"base"}
    broken: {"abandoned":true,"bench":"spin","reason":"exit status: 7","side":"head"}
    pairs of the larger case: 0
    "#);
    insta::assert_snapshot!(compare(3, "exit", "\"r1-b0-p3\"", "--budget 0.1s"), @r#"
    scratch/sum/n1024/cpu/hot inconclusive {"budget_s":0.1,"kind":"no_block","max_blocks":24}
    scratch/sum/n2048/cpu/hot inconclusive {"budget_s":0.1,"kind":"no_block","max_blocks":24}
    identical: "spin"
    broken: {"abandoned":false,"bench":"spin","reason":"exit status: 7","side":"base"}
    pairs of the larger case: 0
    "#);
    // The fault is in the base's verification, so the head has nothing to be compared with although
    // it is verified.
    scratch
        .write_file("benches/spin.rs", &text.replace("SLEEP_US: u64 = 50", "SLEEP_US: u64 = 51"));
    let outcome = run_until_load_allows_verdict(|| {
        let mut command =
            scratch.compare_command_above_noise("--base main --case-time 0.01s --format json");
        command.env("SCRATCH_FAULT", "skip").env("SCRATCH_WHEN", "base/verified");
        command
    });
    insta::assert_snapshot!(report_without_times(outcome.assert_exit(3)), @r#"
    scratch/sum/n2048/cpu/hot inconclusive {"kind":"skipped","side":"base","why":"needs N GB of memory, N GB are free"}
    scratch/sum/n1024/cpu/hot unchanged
    "#);
}

#[test]
fn an_interrupted_comparison_resumes_with_its_saved_trials() {
    let scratch = TempRepository::new();
    let mut first = scratch
        .compare_command_above_noise("--base main --head main")
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let trials = scratch.folder.path().join("target/kernelgate/compare/trials.json");
    let count =
        || std::fs::read_to_string(&trials).map_or(0, |text| text.matches("\"place\"").count());
    while count() == 0 {
        assert!(first.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(
        Command::new("kill").args(["-INT", &first.id().to_string()]).status().unwrap().success()
    );
    assert_eq!(first.wait().unwrap().code(), Some(130));
    let saved = count();
    assert!(saved.is_multiple_of(4), "{saved} processes: half a block");
    let resumed = scratch.run_comparison("--base main --head main --resume --format json");
    assert_eq!(resumed.assert_exit(0).json_verdicts(), ["unchanged"]);
    let lines = lines_with_word(&resumed.stderr, "resuming").replace(&saved.to_string(), "COUNT");
    insta::assert_snapshot!(lines, @"resuming with COUNT processes");
}

#[test]
fn two_comparisons_do_not_run_at_once() {
    let scratch = TempRepository::new();
    let first = scratch
        .compare_command_above_noise("--base main --head main --format json")
        .stderr(Stdio::null())
        .spawn();
    let mut first = first.unwrap();
    let lock = scratch.folder.path().join("target/kernelgate/compare/base/side");
    while !lock.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    insta::assert_snapshot!(error_message(&scratch.run_comparison("--base main"), 2), @"error: another comparison runs in FOLDER/target/kernelgate/compare: wait for it");
    first.kill().unwrap();
    first.wait().unwrap();
}
