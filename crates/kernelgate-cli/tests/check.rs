//! Tests of `kernelgate check` as a process: in a scratch repository as in any CI, with an
//! installed program and no script.

#![cfg(unix)]

use regex::Regex;

use crate::outputs::assert_text_snapshot;
use crate::package::outcome::redact_varying_parts;
use crate::package::scratch::{SCRATCH_CASE_ID, TempRepository, run_until_load_allows_verdict};
use crate::package::{ProcessOutcome, lines_with_word};

/// Runs the check in the scratch repository, with the environment of a comparison.
fn run_check_verb(scratch: &TempRepository, flags: &str) -> ProcessOutcome {
    run_until_load_allows_verdict(|| {
        let mut command = scratch.kernelgate_command(&format!("check {flags}"));
        command.env("KERNELGATE_BACKEND", "cpu").env_remove("KERNELGATE_CUDA_LIBS");
        command
    })
}

/// Saves a baseline `main` of two runs, with thresholds that noise does not reach.
fn save_baseline_of_two_runs(scratch: &TempRepository) {
    let mut save = scratch.kernelgate_command("baseline save main --runs 2 -- -- --quick --noplot");
    let saved: ProcessOutcome = save.env("KERNELGATE_BACKEND", "cpu").output().unwrap().into();
    saved.assert_exit(0);
    scratch.write_file("kernelgate.toml", "[[threshold]]\ncases = 'sum'\nrelative = 100");
}

/// The comment of a check without its table, its plot, explanations and measured numbers.
fn comment_without_measured_values(outcome: &ProcessOutcome) -> String {
    let measured = Regex::new(r"^(\||\s|-?\d|<-+o|.*: changed: )").unwrap();
    let lines = outcome.stdout.lines().filter(|line| !measured.is_match(line));
    let text = redact_varying_parts(lines.collect::<Vec<_>>().join("\n").trim());
    Regex::new(r"\b\d+(\.\d+)?%?").unwrap().replace_all(&text, "N").into_owned()
}

/// Number of cases in the result file of a check.
fn number_of_judged_cases(scratch: &TempRepository) -> usize {
    let text = std::fs::read_to_string(scratch.folder.path().join("out/result.json")).unwrap();
    let result: serde_json::Value = serde_json::from_str(&text).unwrap();
    result["judged"].as_array().unwrap().len()
}

#[test]
fn usage_errors_of_a_check_name_the_flag() {
    let scratch = TempRepository::new();
    let refusals = ["--mode never", "--base", "--runs 0", "--arch x"]
        .map(|flags| format!("{}\n", run_check_verb(&scratch, flags).refusal_message(2)));
    insta::assert_snapshot!(refusals.concat(), @r"
    error: invalid value 'never' for '--mode <MODE>'
      [possible values: auto, compare, gate]

    For more information, try '--help'.
    error: a value is required for '--base <REV>' but none was supplied

    For more information, try '--help'.
    error: invalid value '0' for '--runs <COUNT>': 0 is not in 1..=100

    For more information, try '--help'.
    error: --arch takes a real architecture such as sm_90a, not `x`
    ");
}

#[test]
fn a_check_without_a_way_to_judge_names_what_is_missing() {
    let scratch = TempRepository::new();
    let compare = run_check_verb(&scratch, "--base nowhere --mode compare");
    insta::assert_snapshot!(compare.refusal_message(2), @"error: compare is not possible: no revision `nowhere` in FOLDER; its branches are main");
    insta::assert_snapshot!(run_check_verb(&scratch, "--base nowhere").error_message(2), @"error: nothing to judge by. No comparison: no revision `nowhere` in FOLDER; its branches are main. No gate:error: no baseline `main` for DEVICE in FOLDER/baselines (found none); record a baseline on this machine (kernelgate baseline save main --runs 5) and commit baselines/, or fetch the whole history");
}

#[test]
fn a_dry_run_prints_commands_without_running_them() {
    let scratch = TempRepository::new();
    let commit = scratch.run_git("rev-parse --short=12 main");
    let shown = |flags: &str| {
        let outcome = run_check_verb(&scratch, &format!("--dry-run {flags}"));
        outcome.assert_exit(0);
        let folder = scratch.folder.path().canonicalize().unwrap();
        let text = outcome.stderr.replace(&folder.display().to_string(), "FOLDER");
        let text = text.replace(&scratch.folder.path().display().to_string(), "FOLDER");
        let text = text.replace(commit.trim(), "COMMIT");
        Regex::new(r"check-\d+T\d+Z-\d+").unwrap().replace_all(&text, "check-TIME").into_owned()
    };
    let compared = shown("--base main --case-time 0.1s --bench spin --filter n");
    assert_text_snapshot("slower", "check_compare", &compared);
    assert_text_snapshot("slower", "check_gate", &shown("--mode gate --runs 2 --filter sum"));
    assert!(!scratch.folder.path().join("target/perf-check").exists());
}

#[test]
fn a_verbose_check_prints_each_command_once() {
    let scratch = TempRepository::new();
    for flags in ["--mode gate", "--mode gate --verbose"] {
        let outcome = run_check_verb(&scratch, flags);
        outcome.assert_exit(2);
        let finds = |line: &&str| line.contains("baseline") && line.contains("find");
        assert_eq!(outcome.stderr.lines().filter(finds).count(), 1, "{}", outcome.stderr);
    }
}

#[test]
fn a_slower_head_fails_the_check_with_a_comment_and_files() {
    let scratch = TempRepository::new();
    // The head's bench is many times slower, so that noise cannot hide the difference.
    scratch.replace_text_in_bench("SLEEP_US: u64 = 50", "SLEEP_US: u64 = 6400");
    let outcome = run_check_verb(&scratch, "--base main --out out --budget 5m --case-time 0.01s");
    insta::assert_snapshot!(comment_without_measured_values(outcome.assert_exit(1)), @r#"
    **N regressed, N improved, N unchanged, N inconclusive of N (threshold N)**

    - base: COMMIT (COMMIT)
    - head: working tree (COMMIT)
    - on:DEVICE
    - noise floor: a build against itself is within ±N% in the median case, ±N% in the worst (scratch/sum/n1024/cpu/hot)
    - took: N blocks of four processes, N s of N s a round


    ```
    ```

    - warning: built without optimisation; times mean nothing

    <details><summary>Details, and how to repeat this</summary>

    - change: of the time, above N is slower; detectable: the smallest slow-down that would have been found
    - interval: N %; p: of "not slower than the threshold", over all cases and interim analyses; pairs: of the first round + of the second, which must agree before anything is called slower
    - change: the median over pairs of processes that ran one after the other, not of the two times; a block is four processes, two pairs
    - round N: N blocks, N processes, N s
    - round N: N blocks, N processes, N s

    ```
    kernelgate compare --base COMMIT --budget Nm --case-time Ns
    ```

    </details>

    <details><summary>Kernel resources (sm_90a)</summary>

    ```
    not checked: nothing is recorded for sm_90a
    ```

    </details>
    "#);
    let read =
        |name: &str| std::fs::read_to_string(scratch.folder.path().join("out").join(name)).unwrap();
    assert_eq!(read("comment.md"), outcome.stdout);
    assert!(read("report.html").contains("<svg") && read("change.svg").starts_with("<svg"));
    assert!(
        read("junit.xml").contains("type=\"regressed\"")
            && read("bmf.json").contains(SCRATCH_CASE_ID)
    );
    let result: serde_json::Value = serde_json::from_str(&read("result.json")).unwrap();
    assert_eq!(result["judged"][0]["decision"]["case"], SCRATCH_CASE_ID);
    assert_eq!(result["judged"][0]["verdict"], "regressed");
}

#[test]
fn a_base_that_does_not_build_leaves_the_committed_baseline() {
    let scratch = TempRepository::new();
    scratch.replace_text_in_bench("fn main() -> ExitCode {", "fn main() -> ExitCode { mistake");
    scratch.commit_sources("broken");
    scratch.replace_text_in_bench("fn main()", "fn main()");
    let broken = run_check_verb(&scratch, "--base main --out out");
    insta::assert_snapshot!(comment_without_measured_values(broken.assert_exit(2)), @r"
    **check: nothing was judged** (exit N of `compare`): the log says why.

    <details><summary>Kernel resources (sm_90a)</summary>

    ```
    not checked: nothing is recorded for sm_90a
    ```

    </details>
    ");
    save_baseline_of_two_runs(&scratch);
    let outcome = run_check_verb(&scratch, "--base main --out out --runs 2 --allow-inconclusive");
    let steps = lines_with_word(&outcome.assert_exit(0).stderr, "check: ");
    let steps = steps.lines().filter(|line| !line.starts_with("check: inconclusive"));
    insta::assert_snapshot!(redact_varying_parts(&steps.collect::<Vec<_>>().join("\n")), @r"
    check: kernelgate compare --base COMMIT --budget 10m --out out
    check: kernelgate baseline find main
    check: compare was not possible (above): the committed baseline is the second best
    check: cargo bench --no-fail-fast -- --quick --noplot (run 1 of 2)
    check: cargo bench --no-fail-fast -- --quick --noplot (run 2 of 2)
    check: kernelgate report --session FOLDER/target/kernelgate/runs/check-SESSION-1 --session FOLDER/target/kernelgate/runs/check-SESSION-2 --out out/report
    check: kernelgate gate --baseline main --session FOLDER/target/kernelgate/runs/check-SESSION-1 --session FOLDER/target/kernelgate/runs/check-SESSION-2 --out out
    ");
    assert_eq!(number_of_judged_cases(&scratch), 1);
    assert!(scratch.folder.path().join("out/report/index.html").is_file());
}

#[test]
fn a_bench_that_dies_is_not_judged() {
    let scratch = TempRepository::new();
    save_baseline_of_two_runs(&scratch);
    let manifest = std::fs::read_to_string(scratch.folder.path().join("Cargo.toml")).unwrap();
    let dies = "\n[[bench]]\nname = \"dies\"\nharness = false\n";
    scratch.write_file("Cargo.toml", &format!("{manifest}{dies}"));
    scratch.write_file("benches/dies.rs", "fn main() { std::process::abort() }");
    let outcome = run_check_verb(&scratch, "--mode gate --out out --runs 1 --allow-inconclusive");
    insta::assert_snapshot!(lines_with_word(&outcome.assert_exit(2).stdout, "died"), @"**`cargo bench` ended with 101 (run 1 of 1)**: a bench that died is not judged; the log has more.");
    assert_eq!(number_of_judged_cases(&scratch), 1);
}
