//! `kernelgate bisect` from outside: a scratch repository in which one commit made the bench slower.
//!
//! The slow-down is sixteenfold: the tests check which commit is named and the messages, not the
//! resolution of the measurement.

#![cfg(unix)]

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::package::Outcome;
use crate::package::scratch::{CASE, Scratch};

/// A repository with eight commits: the third does not build, the fourth changes no code, the sixth
/// is a merge that brings the slow commit.
fn history() -> Scratch {
    let scratch = Scratch::new();
    scratch.git("tag good");
    let faster = "// A remark.\nfn main() -> ExitCode {";
    scratch.bench("fn main() -> ExitCode {", faster);
    scratch.commit("remark");
    scratch.bench("fn main() -> ExitCode {", "fn main() -> ExitCode { mistake");
    scratch.commit("mistake");
    scratch.bench("fn main() -> ExitCode {", faster);
    scratch.commit("mended");
    scratch.git("checkout --quiet -b side");
    scratch.bench("ROUNDS: usize = 100", "ROUNDS: usize = 1600");
    scratch.commit("slow");
    scratch.git("checkout --quiet main");
    scratch.git("merge --quiet --no-ff -m merged side");
    scratch.git("commit --quiet --allow-empty -m later");
    scratch
}

fn bisect(scratch: &Scratch, flags: &str) -> std::process::Command {
    let usual = "--relative 1 --tolerated 2 --max-blocks 24 --case-time 0.08s --backend cpu";
    scratch.kernelgate(&format!("bisect {CASE} --good good {usual} {flags}"))
}

#[test]
fn the_first_slower_commit_is_found_also_after_an_interruption() {
    let scratch = history();
    let of_user = ["branch --list", "stash list", "worktree list", "log -1 --format=%H"];
    let before = of_user.map(|line| scratch.git(line));
    // The search is killed after its first answers.
    let mut killed = bisect(&scratch, "");
    let mut killed = killed.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let state = scratch.folder.path().join("target/kernelgate/bisect/state.json");
    let started = Instant::now();
    let answered = || std::fs::read_to_string(&state).is_ok_and(|text| text.contains("\"slower\""));
    while !answered() {
        assert!(started.elapsed() < Duration::from_secs(300), "nothing was answered");
        assert!(killed.try_wait().unwrap().is_none(), "it ended");
        std::thread::sleep(Duration::from_millis(20));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    let other: Outcome = bisect(&scratch, "--resume --bad HEAD~1").output().unwrap().into();
    other.expect(2, &["the interrupted search was another: the bad commit differs"]);
    let outcome: Outcome = bisect(&scratch, "--resume").output().unwrap().into();
    let merged = scratch.git("log -1 --format=%h --abbrev=8 HEAD~1");
    let found = format!("first slower commit: {} merged (a merge of 1 commits", merged.trim());
    let mistake = scratch.git("log -1 --format=%h --abbrev=8 HEAD~3");
    let skipped = format!("skipped {}: head", mistake.trim());
    let stat = "benches/spin.rs |";
    let words = ["resuming with", &found, "confidence 9", stat, "executables: ", &skipped];
    outcome.expect(0, &words);
    assert_eq!(of_user.map(|line| scratch.git(line)), before);
    // All questions are answered already: nothing is built or measured again.
    let started = Instant::now();
    let again: Outcome = bisect(&scratch, "--resume --format json").output().unwrap().into();
    again.expect(0, &["\"left_out\"", "\"subject\": \"merged\""]);
    assert!(started.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_range_that_does_not_build_is_a_range_and_ends_that_do_not_differ_are_refused() {
    let scratch = Scratch::new();
    scratch.git("tag good");
    scratch.bench("fn main() -> ExitCode {", "fn main() -> ExitCode { mistake");
    scratch.commit("mistake");
    scratch.bench("ROUNDS: usize = 100", "ROUNDS: usize = 1600");
    scratch.commit("slow");
    let outcome: Outcome = bisect(&scratch, "").output().unwrap().into();
    outcome.expect(3, &["one of 2 commits made it slower", "mistake", "slow", "does not build"]);
    let same = scratch.git("rev-parse HEAD");
    scratch.git("tag --force good");
    scratch.git("commit --quiet --allow-empty -m same");
    let outcome: Outcome = bisect(&scratch, "").output().unwrap().into();
    outcome.expect(4, &["not slower (+0.0% (+0.0% to +0.0%))", "no first slower commit"]);
    let line = format!("--bad {}", same.trim());
    let outcome: Outcome = bisect(&scratch, &line).output().unwrap().into();
    outcome.expect(2, &["are one commit"]);
    let outcome: Outcome = bisect(&scratch, "--bad good~1").output().unwrap().into();
    outcome.expect(2, &["does not descend from good"]);
    let outcome: Outcome = bisect(&scratch, "--bad mian").output().unwrap().into();
    outcome.expect(2, &["no revision `mian`"]);
}

/// Runs whole searches over 64 commits, one of which makes the case a tenth slower, with the
/// command's own thresholds: each takes minutes on a quiet machine. `KERNELGATE_BISECTIONS` sets
/// the number of searches.
#[test]
fn a_commit_that_costs_a_tenth_is_found_among_64() {
    let count = std::env::var("KERNELGATE_BISECTIONS").ok().and_then(|it| it.parse().ok());
    let Some(count): Option<usize> = count else {
        eprintln!("skipped: KERNELGATE_BISECTIONS, the number of searches, is not set");
        return;
    };
    for first_slow in [23, 41, 58, 7, 64].into_iter().cycle().take(count) {
        let scratch = Scratch::new();
        let mut slow = String::new();
        for number in 0..=64 {
            let rounds = if number >= first_slow { 4400 } else { 4000 };
            // Each commit gives another executable, as if it changed code elsewhere.
            let line =
                format!("const ROUNDS: usize = {rounds};\n#[used]\nstatic N: u32 = {number};");
            scratch.bench("const ROUNDS: usize = 100;", &line);
            scratch.commit(&format!("number-{number}"));
            if number == 0 {
                scratch.git("tag good");
            }
            if number == first_slow {
                slow = scratch.git("rev-parse --short=8 HEAD");
            }
        }
        let started = Instant::now();
        let line = format!("bisect {CASE} --good good --case-time 0.1s --backend cpu");
        let outcome: Outcome = scratch.kernelgate(&line).output().unwrap().into();
        println!(
            "number {first_slow}, {:.0} s:\n{}\n{}",
            started.elapsed().as_secs_f64(),
            outcome.stderr,
            outcome.stdout
        );
        outcome.expect(0, &[&format!("first slower commit: {} number-{first_slow}", slow.trim())]);
    }
}
