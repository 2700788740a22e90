//! Tests of `kernelgate bisect` as a process, in a scratch repository in which one commit made the
//! bench slower.
//!
//! The head is several times slower than the base: the tests check the named commit and the
//! messages, not the resolution of the measurement.

#![cfg(unix)]

use std::cell::Cell;
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::error_message;
use crate::package::outcome::redact_varying_parts;
use crate::package::scratch::{SCRATCH_CASE_ID, TempRepository, run_until_load_allows_verdict};
use crate::package::{ProcessOutcome, lines_with_word};

/// Replaces the hashes of the repository's commits in a text by the commit subjects.
fn replace_commits_by_subjects(scratch: &TempRepository, text: &str) -> String {
    let commits = scratch.run_git("log --all --format=%H:%s");
    let text = commits.lines().fold(text.to_owned(), |text, commit| {
        let (hash, subject) = commit.split_once(':').unwrap();
        text.replace(hash, subject).replace(&hash[..8], subject)
    });
    let number = regex::Regex::new(r"[+-]?\d+\.\d+(?: ?%)?").unwrap();
    let comparisons = regex::Regex::new(r"after \d+ comparisons").unwrap();
    let text = comparisons.replace_all(text.trim_end(), "after COUNT comparisons").into_owned();
    redact_varying_parts(number.replace_all(&text, "N").as_ref())
}

/// Result of a search as JSON, without times and the number of comparisons, which depends on the
/// load.
fn bisection_result_without_times(scratch: &TempRepository, outcome: &ProcessOutcome) -> String {
    let mut json = outcome.stdout_as_json();
    let range = json["ended"]["found"].as_object_mut().unwrap();
    range.retain(|field, _| !["ends", "confirmation", "asked"].contains(&field.as_str()));
    replace_commits_by_subjects(scratch, &serde_json::to_string_pretty(&json).unwrap())
}

/// A repository with eight commits: the third does not build, the fourth changes no code, the sixth
/// is a merge that brings the slow commit.
fn repository_with_slow_commit() -> TempRepository {
    let scratch = TempRepository::new();
    scratch.run_git("tag good");
    let faster = "// A remark.\nfn main() -> ExitCode {";
    scratch.replace_text_in_bench("fn main() -> ExitCode {", faster);
    scratch.commit_sources("remark");
    scratch.replace_text_in_bench("fn main() -> ExitCode {", "fn main() -> ExitCode { mistake");
    scratch.commit_sources("mistake");
    scratch.replace_text_in_bench("fn main() -> ExitCode {", faster);
    scratch.commit_sources("mended");
    scratch.run_git("checkout --quiet -b side");
    scratch.replace_text_in_bench("SLEEP_US: u64 = 50", "SLEEP_US: u64 = 6400");
    scratch.commit_sources("slow");
    scratch.run_git("checkout --quiet main");
    scratch.run_git("merge --quiet --no-ff -m merged side");
    scratch.run_git("commit --quiet --allow-empty -m later");
    scratch
}

fn bisect_command(scratch: &TempRepository, flags: &str) -> std::process::Command {
    let usual = "--relative 2 --tolerated 4 --max-blocks 24 --case-time 0.01s --backend cpu";
    scratch.kernelgate_command(&format!("bisect {SCRATCH_CASE_ID} --good good {usual} {flags}"))
}

#[test]
fn the_first_slower_commit_is_found_also_after_an_interruption() {
    let scratch = repository_with_slow_commit();
    let of_user = ["branch --list", "stash list", "worktree list", "log -1 --format=%H"];
    let before = of_user.map(|line| scratch.run_git(line));
    // The bisection is killed after it has answered its first comparisons.
    let start = || {
        bisect_command(&scratch, "").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    let mut killed = start();
    let state = scratch.folder.path().join("target/kernelgate/bisect/state.json");
    let started = Instant::now();
    let answered = || std::fs::read_to_string(&state).is_ok_and(|text| text.contains("\"slower\""));
    while !answered() {
        assert!(started.elapsed() < Duration::from_secs(300), "nothing was answered");
        if let Some(ended) = killed.try_wait().unwrap() {
            // The bisection ended as inconclusive, because other processes loaded the machine while
            // its end commits were compared.
            assert_eq!(ended.code(), Some(3), "it ended");
            killed = start();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    let other: ProcessOutcome =
        bisect_command(&scratch, "--resume --bad HEAD~1").output().unwrap().into();
    insta::assert_snapshot!(error_message(&other, 2), @"error: --resume: the interrupted search was another: the bad commit differs; repeat its command to go on, or leave --resume out to start anew");
    let resumed = Cell::new(false);
    let outcome = run_until_load_allows_verdict(|| {
        let flags = if resumed.replace(true) { "--format json" } else { "--resume --format json" };
        bisect_command(&scratch, flags)
    });
    insta::assert_snapshot!(bisection_result_without_times(&scratch, outcome.assert_exit(0)), @r#"
    {
      "bad": "HEAD (later)",
      "case": "scratch/sum/n1024/cpu/hot",
      "commits": 5,
      "ended": {
        "found": {
          "confidence": N,
          "first_bad": 4,
          "last_good": 3,
          "left_out": [
            [
              2,
              "head mistake (mistake) does not build; cargo's last lines:; error: expected `;`, found `Harness`; error: could not compile `scratch` (bench \"spin\") due to 1 previous error"
            ]
          ]
        }
      },
      "found": {
        "diff_stat": "benches/spin.rs | 3 +--\n 1 file changed, 1 insertion(+), 2 deletions(-)",
        "executables": [
          "FOLDER/target/kernelgate/bisect/base/bin/spin",
          "FOLDER/target/kernelgate/bisect/head/bin/spin"
        ],
        "last_good": "mended",
        "left_out": {
          "mistake": "head mistake (mistake) does not build; cargo's last lines:; error: expected `;`, found `Harness`; error: could not compile `scratch` (bench \"spin\") due to 1 previous error"
        },
        "suspects": [
          {
            "commit": "merged",
            "merged": 1,
            "subject": "merged"
          }
        ]
      },
      "good": "good (first)"
    }
    "#);
    assert_eq!(of_user.map(|line| scratch.run_git(line)), before);
    // The recorded comparisons answer all questions of the bisection: nothing is built or measured
    // again.
    let text: ProcessOutcome = bisect_command(&scratch, "--resume").output().unwrap().into();
    insta::assert_snapshot!(replace_commits_by_subjects(&scratch, &text.assert_exit(0).stdout), @r#"
    scratch/sum/n1024/cpu/hot: HEAD (later) against good (first), 5 commits later: slower, N (N to N)
    first slower commit: merged merged (a merge of 1 commits; `--good merged^1 --bad merged^2` searches them where the branch itself is slower)
    against mended, the one before: slower, N (N to N)
    confidence N after COUNT comparisons
    skipped mistake: head mistake (mistake) does not build; cargo's last lines:; error: expected `;`, found `Harness`; error: could not compile `scratch` (bench "spin") due to 1 previous error
    benches/spin.rs | 3 +--
     1 file changed, 1 insertion(+), 2 deletions(-)
    "#);
    assert_eq!(lines_with_word(&text.stderr, "built"), "");
}

#[test]
fn a_range_that_does_not_build_is_found_as_a_range() {
    let scratch = TempRepository::new();
    scratch.run_git("tag good");
    scratch.replace_text_in_bench("fn main() -> ExitCode {", "fn main() -> ExitCode { mistake");
    scratch.commit_sources("mistake");
    scratch.replace_text_in_bench("SLEEP_US: u64 = 50", "SLEEP_US: u64 = 6400");
    scratch.commit_sources("slow");
    let outcome = run_until_load_allows_verdict(|| bisect_command(&scratch, "--format json"));
    insta::assert_snapshot!(bisection_result_without_times(&scratch, outcome.assert_exit(3)), @r#"
    {
      "bad": "HEAD (slow)",
      "case": "scratch/sum/n1024/cpu/hot",
      "commits": 2,
      "ended": {
        "found": {
          "confidence": N,
          "first_bad": 2,
          "last_good": 0,
          "left_out": [
            [
              1,
              "head mistake (mistake) does not build; cargo's last lines:; error: expected `;`, found `Harness`; error: could not compile `scratch` (bench \"spin\") due to 1 previous error"
            ]
          ]
        }
      },
      "found": {
        "diff_stat": "benches/spin.rs | 2 +-\n 1 file changed, 1 insertion(+), 1 deletion(-)",
        "executables": [
          "FOLDER/target/kernelgate/bisect/base/bin/spin",
          "FOLDER/target/kernelgate/bisect/head/bin/spin"
        ],
        "last_good": "first",
        "left_out": {
          "mistake": "head mistake (mistake) does not build; cargo's last lines:; error: expected `;`, found `Harness`; error: could not compile `scratch` (bench \"spin\") due to 1 previous error"
        },
        "suspects": [
          {
            "commit": "mistake",
            "merged": 0,
            "subject": "mistake"
          },
          {
            "commit": "slow",
            "merged": 0,
            "subject": "slow"
          }
        ]
      },
      "good": "good (first)"
    }
    "#);
}

#[test]
fn ends_that_do_not_differ_are_refused() {
    let scratch = TempRepository::new();
    scratch.run_git("commit --quiet --allow-empty -m good");
    scratch.run_git("tag good");
    scratch.run_git("commit --quiet --allow-empty -m same");
    let mut refusals = String::new();
    let outcome: ProcessOutcome = bisect_command(&scratch, "").output().unwrap().into();
    insta::assert_snapshot!(replace_commits_by_subjects(&scratch, &outcome.assert_exit(4).stdout), @"scratch/sum/n1024/cpu/hot: HEAD (same) against good (good), 1 commits later: not slower (N (N to N)), so there is no first slower commit between them");
    for bad in ["good", "good~1", "mian"] {
        let outcome: ProcessOutcome =
            bisect_command(&scratch, &format!("--bad {bad}")).output().unwrap().into();
        refusals +=
            &format!("{}\n", replace_commits_by_subjects(&scratch, &error_message(&outcome, 2)));
    }
    insta::assert_snapshot!(refusals, @r"
    error: good and good are one commit
    error: good~1 (COMMIT) does not descend from good (COMMIT): a search needs the good commit before the bad one
    error: no revision `mian` in FOLDER; did you mean main?
    ");
}

/// Runs whole searches over 64 commits, one of which makes the case a tenth slower, with the
/// command's own thresholds: each takes minutes on a quiet machine. `KERNELGATE_BISECTIONS` sets
/// the number of bisections.
#[test]
fn a_commit_that_costs_a_tenth_is_found_among_64() {
    let count = std::env::var("KERNELGATE_BISECTIONS").ok().and_then(|it| it.parse().ok());
    let Some(count): Option<usize> = count else {
        eprintln!("skipped: KERNELGATE_BISECTIONS, the number of searches, is not set");
        return;
    };
    for first_slow in [23, 41, 58, 7, 64].into_iter().cycle().take(count) {
        let scratch = TempRepository::new();
        let mut slow = String::new();
        for number in 0..=64 {
            let time = if number >= first_slow { 4400 } else { 4000 };
            // Each commit of the test repository gives another executable, as if it changed code
            // elsewhere.
            let line = format!("const SLEEP_US: u64 = {time};\n#[used]\nstatic N: u32 = {number};");
            scratch.replace_text_in_bench("const SLEEP_US: u64 = 50;", &line);
            scratch.commit_sources(&format!("number-{number}"));
            if number == 0 {
                scratch.run_git("tag good");
            }
            if number == first_slow {
                slow = scratch.run_git("rev-parse --short=8 HEAD").trim().to_owned();
            }
        }
        let started = Instant::now();
        let line = format!("bisect {SCRATCH_CASE_ID} --good good --case-time 0.1s --backend cpu");
        let outcome: ProcessOutcome = scratch.kernelgate_command(&line).output().unwrap().into();
        println!(
            "number {first_slow}, {:.0} s:\n{}\n{}",
            started.elapsed().as_secs_f64(),
            outcome.stderr,
            outcome.stdout
        );
        let found = lines_with_word(&outcome.assert_exit(0).stdout, "first slower commit: ");
        assert!(found.starts_with(&format!("first slower commit: {slow} number-{first_slow}")));
    }
}
