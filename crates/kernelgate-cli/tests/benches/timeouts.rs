//! Tests with a process that hangs in a stage of a comparison, or in a bench alone: it and its
//! children are killed after a reported time limit.

#![cfg(unix)]

use std::process::Command;

use crate::package::outcome::redact_varying_parts;
use crate::package::outside::{TempCargoPackage, is_hostile_process_alive};
use crate::package::{FIXTURE_CASE_ID, ProcessOutcome, TempPackage, lines_with_word};

/// A bench that looks like one of this harness, and hangs or fails in the head if the variable
/// HOSTILE says so.
const HANGING_OR_FAILING_BENCH_SOURCE: &str = r#"
use std::io::Write;

fn main() {
    kernelgate::protocol::keep_bench_mark_in_executable();
    let how = std::env::var("HOSTILE").unwrap_or_default();
    let in_head = std::env::args().next().unwrap().contains("/head/")
        || std::env::current_exe().unwrap().to_string_lossy().contains("/head/");
    let asks = std::env::var("KERNELGATE_REQUEST").is_ok_and(|request| request == "protocol");
    let stage = if asks { "asked" } else { "running" };
    if in_head && how == format!("hangs when {stage}") {
        let mut sleep = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        std::fs::write(std::env::var("HOSTILE_PID").unwrap(), sleep.id().to_string()).unwrap();
        let _ = sleep.wait();
    }
    if in_head && how == format!("floods when {stage}") {
        (0..40_000).for_each(|_| eprintln!("a line of some thirty characters"));
        std::process::exit(127);
    }
    if in_head && how == format!("breaks when {stage}") {
        eprintln!("a library is missing");
        std::process::exit(127);
    }
    if asks {
        println!("kernelgate-protocol 1-2");
        let _ = std::io::stdout().flush();
    } else {
        eprintln!("error: no case matches what was asked for");
        std::process::exit(2);
    }
}
"#;

#[test]
fn a_bench_that_hangs_is_ended_and_named_at_every_stage() {
    let outside = TempCargoPackage::new(&[("evil", HANGING_OR_FAILING_BENCH_SOURCE)]);
    outside.build_and_copy_as_base_and_head("evil");
    let command = |how: &str, wait: &str| -> Command {
        let line = format!("compare --base-dir base --head-dir head {wait}");
        let mut command = outside.package_command(env!("CARGO_BIN_EXE_kernelgate"), &line);
        command.env("HOSTILE", how);
        command
    };
    let run =
        |how: &str, wait: &str| -> ProcessOutcome { command(how, wait).output().unwrap().into() };
    insta::assert_snapshot!(run("hangs when asked", "--wait 1s").refusal_message(2), @"error: head: bench `evil` cannot be asked for the protocol that it speaks: no answer within 1 s (--wait sets this)");
    assert!(!is_hostile_process_alive(&outside), "what it started still runs");
    insta::assert_snapshot!(run("breaks when asked", "").refusal_message(2), @"error: head: bench `evil` cannot be asked for the protocol that it speaks: asked for its version it ended with exit status: 127");
    insta::assert_snapshot!(run("", "--wait never").refusal_message(2), @r"
    error: invalid value 'never' for '--wait <TIME>': `never`: a time is 500ms, 90s, 5m or 1h

    For more information, try '--help'.
    ");
    // If the head breaks, the error names the head as the reason, instead of a case that both sides
    // lack.
    let mut broken = String::new();
    for (how, wait) in [
        ("hangs when running", "--wait 1s"),
        ("breaks when running", ""),
        ("floods when running", ""),
    ] {
        let outcome = run(how, &format!("{wait} --format json"));
        broken += &format!("{how}: {:#}\n", outcome.assert_exit(1).stdout_as_json()["broken"]);
        broken += &format!("{}\n", lines_with_word(&outcome.stderr, "prints"));
    }
    insta::assert_snapshot!(broken, @r#"
    hangs when running: [
      {
        "abandoned": true,
        "bench": "evil",
        "reason": "treated as hung: killed after 1 s (--wait sets this)",
        "side": "head"
      }
    ]

    breaks when running: [
      {
        "abandoned": true,
        "bench": "evil",
        "reason": "exit status: 127: a library is missing",
        "side": "head"
      }
    ]

    floods when running: [
      {
        "abandoned": true,
        "bench": "evil",
        "reason": "exit status: 127: a line of some thirty characters; a line of some thirty characters; a line of some thirty characters; a line of some thirty characters",
        "side": "head"
      }
    ]
    bench `evil` prints more than 1048576 bytes in a process: only the end is kept, here and where it does so again
    "#);
    assert!(!is_hostile_process_alive(&outside), "what it started still runs");
}

#[test]
fn a_termination_signal_ends_what_runs_at_every_stage() {
    let outside = TempCargoPackage::new(&[("evil", HANGING_OR_FAILING_BENCH_SOURCE)]);
    outside.build_and_copy_as_base_and_head("evil");
    let pid = outside.package_path("pid");
    for (line, how) in [
        ("compare --base-dir base --head-dir head", "hangs when asked"),
        ("compare --base-dir base --head-dir head", "hangs when running"),
        ("list --dir head", "hangs when asked"),
        ("verify --dir head", "hangs when running"),
    ] {
        let _ = std::fs::remove_file(&pid);
        let mut command = outside.package_command(env!("CARGO_BIN_EXE_kernelgate"), line);
        let mut program = command.env("HOSTILE", how).spawn().unwrap();
        let started = std::time::Instant::now();
        let written = || std::fs::read_to_string(&pid).is_ok_and(|text| !text.is_empty());
        while !written() {
            assert!(started.elapsed().as_secs() < 60, "{line}: it does not start");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let term = Command::new("kill").args(["-TERM", &program.id().to_string()]).status();
        assert!(term.unwrap().success());
        assert_eq!(program.wait().unwrap().code(), Some(130), "{line}, {how}");
        assert!(!is_hostile_process_alive(&outside), "{line}, {how}: what it started still runs");
    }
}

#[test]
fn a_hanging_build_is_killed_with_its_children() {
    let outside = TempCargoPackage::new(&[("evil", HANGING_OR_FAILING_BENCH_SOURCE)]);
    let script = "fn main() {
        let mut sleep = std::process::Command::new(\"sleep\").arg(\"600\").spawn().unwrap();
        std::fs::write(std::env::var(\"HOSTILE_PID\").unwrap(), sleep.id().to_string()).unwrap();
        let _ = sleep.wait();
    }";
    outside.write_file("build.rs", script);
    outside.write_file(".gitignore", "target\npid\n");
    outside.commit_all_files();
    let program = env!("CARGO_BIN_EXE_kernelgate");
    let mut compare = outside.package_command(program, "compare --base HEAD --build-wait 8s");
    let started = std::time::Instant::now();
    let outcome = ProcessOutcome::from(compare.output().unwrap());
    insta::assert_snapshot!(outcome.error_message(2), @"error: base HEAD (COMMIT) was not built within 8 s (--build-wait sets this)");
    assert!(started.elapsed().as_secs() < 300);
    assert!(!is_hostile_process_alive(&outside), "what the build started still runs");
}

#[test]
fn a_launch_on_the_host_without_end_ends_the_process_and_is_named() {
    let package = TempPackage::new();
    let mut command = package.bench_command("s1", "--timeout 2");
    command.args(["--axis", "n=64", "--axis", "fault=none,endless"]);
    let endless = FIXTURE_CASE_ID.replace("none", "endless");
    let outcome = ProcessOutcome::from(command.output().unwrap());
    let message =
        redact_varying_parts(outcome.assert_exit(1).stderr.trim().lines().last().unwrap());
    insta::assert_snapshot!(message, @"failed: fixture/spin/n64_endless/cpu/hot: a launch had not ended after 2 s (--timeout sets this): nothing ends it but the end of the process; 1 finished cases are in FOLDER/target/kernelgate/runs/s1/fixture.json");
    let run = package.read_run_record("s1");
    assert!(run["cases"][FIXTURE_CASE_ID].is_object() && run["complete"] == false);
    insta::assert_snapshot!(run["failed"][&endless]["text"].as_str().unwrap(), @"a launch had not ended after 2 s (--timeout sets this): nothing ends it but the end of the process");
}
