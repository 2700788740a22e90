//! `kernelgate check` from outside: in a scratch repository as any CI would check it, with an
//! installed program and no script.

#![cfg(unix)]

use crate::outputs::snapshot;
use crate::package::Outcome;
use crate::package::scratch::{CASE, Scratch};

/// Runs the check in the scratch repository, with the environment of a comparison.
fn check(scratch: &Scratch, flags: &str) -> Outcome {
    let mut command = scratch.kernelgate(&format!("check {flags}"));
    command.env("KERNELGATE_BACKEND", "cpu").env_remove("KERNELGATE_CUDA_LIBS");
    command.output().unwrap().into()
}

/// Saves a baseline `main` of two runs, with thresholds that noise does not reach.
fn save_baseline(scratch: &Scratch) {
    let mut save = scratch.kernelgate("baseline save main --runs 2 -- -- --quick --noplot");
    let saved: Outcome = save.env("KERNELGATE_BACKEND", "cpu").output().unwrap().into();
    saved.expect(0, &["1 case, 2 runs each"]);
    scratch.write("kernelgate.toml", "[[threshold]]\ncases = 'sum'\nrelative = 100");
}

#[test]
fn usage_errors_of_a_check_name_the_flag() {
    let scratch = Scratch::new();
    check(&scratch, "--mode never").expect(2, &["invalid value 'never' for '--mode"]);
    check(&scratch, "--base").expect(2, &["a value is required for '--base"]);
    check(&scratch, "--runs 0").expect(2, &["--runs"]);
    check(&scratch, "--arch x").expect(2, &["--arch takes a real architecture"]);
}

#[test]
fn a_check_that_can_judge_by_nothing_says_what_is_missing() {
    let scratch = Scratch::new();
    check(&scratch, "--base nowhere --mode compare")
        .expect(2, &["compare is not possible: no revision `nowhere`"]);
    let words = ["No comparison: no revision", "No gate: ", "no baseline `main` for"];
    check(&scratch, "--base nowhere").expect(2, &words).expect(2, &["baseline save main"]);
}

#[test]
fn a_dry_run_prints_its_commands_and_runs_none() {
    let scratch = Scratch::new();
    let commit = scratch.git("rev-parse --short=12 main");
    let shown = |flags: &str| {
        let outcome = check(&scratch, &format!("--dry-run {flags}"));
        outcome.expect(0, &[]);
        let folder = scratch.folder.path().canonicalize().unwrap();
        let text = outcome.stderr.replace(&folder.display().to_string(), "FOLDER");
        let text = text.replace(&scratch.folder.path().display().to_string(), "FOLDER");
        let text = text.replace(commit.trim(), "COMMIT");
        regex::Regex::new(r"check-\d+T\d+Z-\d+")
            .unwrap()
            .replace_all(&text, "check-TIME")
            .into_owned()
    };
    let compared = shown("--base main --case-time 0.1s --bench spin --filter n");
    snapshot("slower", "check_compare", &compared);
    snapshot("slower", "check_gate", &shown("--mode gate --runs 2 --filter sum"));
    assert!(!scratch.folder.path().join("target/perf-check").exists());
}

#[test]
fn a_verbose_check_prints_each_command_once() {
    let scratch = Scratch::new();
    for flags in ["--mode gate", "--mode gate --verbose"] {
        let outcome = check(&scratch, flags);
        outcome.expect(2, &["No gate: "]);
        let finds = |line: &&str| line.contains("baseline") && line.contains("find");
        assert_eq!(outcome.stderr.lines().filter(finds).count(), 1, "{}", outcome.stderr);
    }
}

#[test]
fn a_slower_head_fails_the_check_with_a_comment_and_files() {
    let scratch = Scratch::new();
    // The head is sixteen times as slow, which noise cannot hide.
    scratch.bench("ROUNDS: usize = 100", "ROUNDS: usize = 1600");
    let outcome = check(&scratch, "--base main --out out --budget 5m --case-time 0.1s");
    let words = ["**1 regressed", "- base: ", "noise floor", "Kernel resources"];
    outcome.expect(1, &words).expect(1, &["kernelgate compare --base", "nothing is recorded for"]);
    let read =
        |name: &str| std::fs::read_to_string(scratch.folder.path().join("out").join(name)).unwrap();
    assert_eq!(read("comment.md"), outcome.stdout);
    assert!(read("report.html").contains("<svg") && read("change.svg").starts_with("<svg"));
    assert!(read("junit.xml").contains("type=\"regressed\"") && read("bmf.json").contains(CASE));
    assert!(read("result.json").contains(CASE));
}

#[test]
fn a_base_that_does_not_build_leaves_the_committed_baseline() {
    let scratch = Scratch::new();
    scratch.bench("fn main() -> ExitCode {", "fn main() -> ExitCode { mistake");
    scratch.commit("broken");
    scratch.bench("fn main()", "fn main()");
    check(&scratch, "--base main --out out").expect(2, &["does not build", "nothing was judged"]);
    save_baseline(&scratch);
    let outcome = check(&scratch, "--base main --out out --runs 2 --allow-inconclusive");
    let words = ["the committed baseline is the second best", "- base: baseline `main` of"];
    outcome.expect(0, &words).expect(0, &["run 2 of 2", "of 1 (threshold 5%)"]);
    assert!(scratch.folder.path().join("out/report/index.html").is_file());
}

#[test]
fn a_bench_that_dies_is_not_judged() {
    let scratch = Scratch::new();
    save_baseline(&scratch);
    let manifest = std::fs::read_to_string(scratch.folder.path().join("Cargo.toml")).unwrap();
    let dies = "\n[[bench]]\nname = \"dies\"\nharness = false\n";
    scratch.write("Cargo.toml", &format!("{manifest}{dies}"));
    scratch.write("benches/dies.rs", "fn main() { std::process::abort() }");
    let outcome = check(&scratch, "--mode gate --out out --runs 1 --allow-inconclusive");
    let died = "**`cargo bench` ended with 101 (run 1 of 1)**: a bench that died is not judged";
    outcome.expect(2, &["of 1 (threshold", died]);
}
