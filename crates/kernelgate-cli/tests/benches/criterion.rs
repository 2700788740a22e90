//! Tests of `kernelgate compare` and `calibrate` in a package that does not use kernelgate: its
//! benches use Criterion, or another harness that cannot be driven.
//!
//! Benches are linked with the Criterion that `cargo test` built, so that a build takes seconds.
//! Thresholds are wide and the head is much slower: the tests check the messages, not the
//! resolution of the measurement.

#![cfg(unix)]

use std::process::Command;

use crate::package::outcome::redact_varying_parts;
use crate::package::outside::{TempCargoPackage, is_hostile_process_alive};
use crate::package::{ProcessOutcome, lines_with_word};

/// Source of a Criterion bench with unusual case ids; the constant ROUNDS sets the time of one
/// case.
const CRITERION_BENCH_SOURCE: &str = r#"
use std::hint::black_box;
use std::time::Duration;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

const ROUNDS: u64 = 100;

// Not inlined, so that both builds differ only in the number of rounds.
#[inline(never)]
fn work(rounds: u64) -> u64 {
    (0..rounds).fold(1, |sum, x| black_box(sum.wrapping_mul(3) ^ x))
}

fn all(criterion: &mut Criterion) {
    println!("a line of the bench's own");
    criterion.bench_function("a few", |bencher| bencher.iter(|| work(ROUNDS)));
    let mut group = criterion.benchmark_group("grüppe/β ?*");
    group.throughput(Throughput::Elements(50));
    group.bench_with_input(BenchmarkId::new("with/slash", 50), &50, |bencher, rounds| {
        bencher.iter(|| work(*rounds));
    });
    let long = "x".repeat(80);
    group.bench_function(format!("{long}1"), |bencher| bencher.iter(|| work(50)));
    group.bench_function(format!("{long}2"), |bencher| bencher.iter(|| work(50)));
    group.finish();
    let mut group = criterion.benchmark_group("fixed");
    group.sample_size(12).measurement_time(Duration::from_millis(180));
    group.bench_function("long", |bencher| bencher.iter(|| work(50)));
    group.finish();
    for _ in 0..2 {
        criterion.bench_function("twice", |bencher| bencher.iter(|| work(50)));
    }
    again(criterion);
}

fn again(criterion: &mut Criterion) {
    criterion.bench_function("again", |bencher| bencher.iter(|| work(50)));
}

criterion_group!(benches, all);
criterion_group!(others, again);
criterion_main!(benches, others);
"#;

/// Source of a kernelgate bench that stands beside the Criterion bench.
const KERNELGATE_BENCH_SOURCE: &str = r#"
use std::process::ExitCode;
use kernelgate::prelude::*;

struct Copy { n: usize }

impl Problem for Copy {
    fn inputs(&self, seed: u64) -> Tensors {
        Tensors::new().with_tensor("x", [1, self.n], random::normal_values(seed, "x", self.n))
    }
    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let x = inputs.f32_elements("x").iter().map(|&x| f64::from(x));
        vec![Expected::all("y", [1, self.n], x.collect::<Vec<f64>>())]
    }
    fn work(&self) -> Work { Work::default() }
    fn tolerance(&self) -> Tolerance { Tolerance { max_error: 1e-6, relative_l2: 1e-6 } }
    fn host_memory_bytes(&self) -> u64 { self.n as u64 * 16 }
}

const COPY: Workload<Copy> = Workload {
    name: "outside/copy", about: "y = x", revision: 1,
    axes: &[Axis::number("n", "elements")],
    default_selection_lines: &["n=65536"], accelerator_selection_lines: &[], thorough_selection_lines: &[],
    bind: |point| Ok(Copy { n: point.number("n")? }),
};

const ROWS: &[Implementation<Copy>] = &[Implementation {
    implementation_name: "cpu", description: "copies", supports: |_| Ok(()),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let outputs = Tensors::new().with_output("y", [1, problem.n], Dtype::F32);
        CpuTask::new(inputs, outputs, |inputs, outputs| {
            outputs.f32_mut("y").copy_from_slice(inputs.f32_elements("x"));
        })
    }),
}];

fn main() -> ExitCode { Harness::new("ours", vec![join_workload_with_implementations(&COPY, ROWS)]).main() }
"#;

/// A bench of Criterion that behaves as the variable HOSTILE says; only in the head, if the value
/// ends in `!`.
const HOSTILE_CRITERION_BENCH_SOURCE: &str = r#"
use std::time::Duration;
use criterion::Criterion;

fn hang() {
    // The bench starts a child process, which kernelgate must kill too.
    let mut sleep = std::process::Command::new("sleep").arg("600").spawn().unwrap();
    std::fs::write(std::env::var("HOSTILE_PID").unwrap(), sleep.id().to_string()).unwrap();
    let _ = sleep.wait();
}

fn main() {
    let how = std::env::var("HOSTILE").unwrap_or_default();
    let in_head = std::env::current_exe().unwrap().to_string_lossy().contains("/head/");
    let how = match how.strip_suffix('!') {
        Some(how) if in_head => how,
        Some(_) => "",
        None => &how,
    };
    let lists = std::env::args().any(|argument| argument == "--list");
    match how {
        "hangs when listing" if lists => hang(),
        "panics when listing" if lists => panic!("no data"),
        "has flags of its own" if lists => {
            eprintln!("unexpected argument --list");
            std::process::exit(2);
        }
        "floods when listing" if lists => {
            let line = "no case, but a line that nobody wants to read\n".repeat(1000);
            (0..2000).for_each(|_| print!("{line}"));
        }
        "hangs" if !lists => hang(),
        _ => {}
    }
    let short = Duration::from_millis(10);
    let criterion = Criterion::default().sample_size(10).nresamples(10);
    let mut criterion = criterion.warm_up_time(short).measurement_time(short);
    if how != "ignores flags" {
        criterion = criterion.configure_from_args();
    }
    if how == "stores elsewhere" {
        criterion = criterion.output_directory(&std::env::temp_dir().join("elsewhere"));
    }
    criterion.bench_function("sound", |bencher| bencher.iter(|| std::hint::black_box(7)));
    criterion.bench_function("second", |bencher| {
        assert!(how != "panics", "on purpose");
        // Every bench process reports the same time per iteration, however long it really took.
        bencher.iter_custom(|rounds| {
            std::thread::sleep(Duration::from_micros(20 * rounds));
            Duration::from_nanos(if how == "takes no time" { 0 } else { 100 * rounds })
        });
    });
}
"#;

/// Messages of a comparison, without those about its progress.
fn messages_without_progress(outcome: &ProcessOutcome) -> String {
    const PROGRESS_LINE_STARTS: [&str; 5] =
        ["building ", "built ", "verifying ", "trying ", "round "];
    let is_progress = |line: &str| PROGRESS_LINE_STARTS.iter().any(|word| line.starts_with(word));
    let lines: Vec<&str> = outcome.stderr.lines().filter(|line| !is_progress(line)).collect();
    // On a loaded machine, the message may also count other cases, or name a measurement as long;
    // both remarks are removed.
    let loaded = r", and the like in \d+ more cases?| and a measurement of about \d\S* s\b";
    let further = regex::Regex::new(loaded).unwrap();
    redact_varying_parts(&further.replace_all(lines.join("\n").trim(), ""))
}

const COMPARE_COMMAND_LINE: &str =
    "compare --relative 2 --tolerated 4 --case-time 0.06s --backend cpu";

#[test]
fn benches_of_criterion_are_compared_beside_ours_and_others_are_named() {
    let custom = "fn main() { println!(\"a bench of another kind\"); }";
    let outside = TempCargoPackage::new(&[
        ("plain", CRITERION_BENCH_SOURCE),
        ("ours", KERNELGATE_BENCH_SOURCE),
        ("libtest", "#[test]\nfn nothing() {}"),
        ("custom", custom),
    ]);
    outside.write_file(".gitignore", "target\n");
    outside.commit_all_files();
    outside.write_file(
        "benches/plain.rs",
        &CRITERION_BENCH_SOURCE
            .replace("ROUNDS: u64 = 100", "ROUNDS: u64 = 2000")
            .replace("{long}2", "{long}3"),
    );
    let compare = format!("{COMPARE_COMMAND_LINE} --base HEAD");
    let outcome = outside.run_kernelgate(&format!("{compare} --max-blocks 16 --format json"));
    let json = outcome.assert_exit(1).stdout_as_json();
    insta::assert_snapshot!(messages_without_progress(&outcome), @r"
    left alone: custom of the base: its file has no mark of this harness, so it was not run; `--bench custom` runs it all the same
    left alone: libtest of the base: it uses libtest, neither kernelgate nor Criterion, so it cannot be driven; if it is one of Criterion, `harness = false` is missing under its [[bench]]
    left alone: custom of the head: its file has no mark of this harness, so it was not run; `--bench custom` runs it all the same
    left alone: libtest of the head: it uses libtest, neither kernelgate nor Criterion, so it cannot be driven; if it is one of Criterion, `harness = false` is missing under its [[bench]]
    bench plain: Criterion alone, 6 unverified cases; a process takes N s, a block of four N s; its source sets 12 samples for fixed/long
    without effect on benches that use Criterion alone (plain): --backend (KERNELGATE_BACKEND)
    ");
    let verdict = |case: &str| {
        let judged = json["judged"].as_array().unwrap().iter();
        let found = judged.filter(|row| row["decision"]["case"] == case).collect::<Vec<_>>();
        assert_eq!(found.len(), 1, "{case}: {json}");
        found[0]["verdict"].as_str().unwrap().to_owned()
    };
    // A threshold in nanoseconds does not apply to means over iterations, as here.
    assert_eq!(verdict("a few"), "regressed");
    assert_ne!(verdict("grüppe/β ?*/with/slash/50"), "regressed");
    assert_ne!(verdict("fixed/long"), "regressed");
    assert_ne!(verdict("twice #2"), "regressed");
    assert_eq!(verdict("again"), "inconclusive");
    let untimed = json["untimed"].as_array().unwrap();
    assert_eq!(*untimed, ["outside/copy/n65536/cpu/hot"], "the same file on both sides");
    let long = |end: &str| format!("grüppe/β ?*/{}{end}", "x".repeat(80));
    assert_ne!(verdict(&long("1")), "regressed");
    let list = |name: &str| json[name].as_array().unwrap().clone();
    assert_eq!((list("removed"), list("new")), (vec![long("2").into()], vec![long("3").into()]));
    let unverified = list("unverified");
    assert!(unverified.contains(&"a few".into()) && unverified.len() == 6, "{unverified:?}");
    assert_eq!(list("foreign"), ["custom", "libtest"]);
    assert_eq!(json["criterion"][0]["bench"], "plain");

    // The same comparison with `--resume` continues; a case filter is passed to Criterion and
    // applies to all benches.
    let again =
        outside.run_kernelgate(&format!("{compare} --max-blocks 16 --resume --format markdown"));
    assert_eq!(lines_with_word(&again.assert_exit(1).stderr, "resuming with").lines().count(), 1);
    insta::assert_snapshot!(lines_with_word(&again.stdout, "- inconclusive: skipped"), @"- inconclusive: skipped in the head: more than one case of its bench has this id: again");
    assert!(
        !outside.package_path("target/criterion").exists(),
        "the user's own store is left alone"
    );
    let narrow = format!("{compare} --max-blocks 1 --bench plain ^a.few$ --format json");
    let narrow = outside.run_kernelgate(&narrow).stdout_as_json();
    assert_eq!(narrow["unverified"], serde_json::json!(["a few"]));
    assert_eq!(narrow["judged"].as_array().unwrap().len(), 1, "{narrow}");
    let custom = outside.run_kernelgate(&format!("{compare} --bench custom"));
    insta::assert_snapshot!(messages_without_progress(custom.assert_exit(2)), @r"
    left alone: custom of the base: asked by --bench, it did not answer as a bench of this harness does
    left alone: custom of the head: asked by --bench, it did not answer as a bench of this harness does
    error: no bench that can be driven has a case that was asked for
    ");
}

/// Checks that a case which the base can measure and the head cannot is still listed in the report.
fn check_benches_that_cannot_be_driven(run: &dyn Fn(&str, &str) -> ProcessOutcome) {
    let mut reasons = String::new();
    for how in ["ignores flags", "has flags of its own", "floods when listing", "stores elsewhere"]
    {
        let both = run(how, "");
        reasons += &format!("{how}:\n{}\n", messages_without_progress(both.assert_exit(2)));
        let head = run(&format!("{how}!"), "--format json");
        assert_eq!(head.assert_exit(3).json_verdicts(), ["inconclusive"; 2], "{how}");
        reasons +=
            &format!("{how} in the head: {}\n", head.stdout_as_json()["judged"][0]["reasons"]);
    }
    insta::assert_snapshot!(reasons, @r#"
    ignores flags:
    left alone: evil of the base: it ignores Criterion's flags: asked to list its cases it measured them
    left alone: evil of the head: it ignores Criterion's flags: asked to list its cases it measured them
    error: bench `evil`: it ignores Criterion's flags: asked to list its cases it measured them
    ignores flags in the head: [{"kind":"undrivable","side":"head","why":"it ignores Criterion's flags: asked to list its cases it measured them"}]
    has flags of its own:
    left alone: evil of the base: asked to list its cases it ended with exit status: 2: unexpected argument --list
    left alone: evil of the head: asked to list its cases it ended with exit status: 2: unexpected argument --list
    error: bench `evil`: asked to list its cases it ended with exit status: 2: unexpected argument --list
    has flags of its own in the head: [{"kind":"undrivable","side":"head","why":"asked to list its cases it ended with exit status: 2: unexpected argument --list"}]
    floods when listing:
    left alone: evil of the base: asked to list its cases it printed more than 8388608 bytes, the limit
    left alone: evil of the head: asked to list its cases it printed more than 8388608 bytes, the limit
    error: bench `evil`: asked to list its cases it printed more than 8388608 bytes, the limit
    floods when listing in the head: [{"kind":"undrivable","side":"head","why":"asked to list its cases it printed more than 8388608 bytes, the limit"}]
    stores elsewhere:
    left alone: evil of the base: asked to measure, it left no samples in Criterion's store (CRITERION_HOME)
    left alone: evil of the head: asked to measure, it left no samples in Criterion's store (CRITERION_HOME)
    error: bench `evil`: asked to measure, it left no samples in Criterion's store (CRITERION_HOME)
    stores elsewhere in the head: [{"kind":"undrivable","side":"head","why":"asked to measure, it left no samples in Criterion's store (CRITERION_HOME)"}]
    "#);
}

#[test]
fn a_bench_that_cannot_be_driven_or_breaks_is_named_with_the_reason() {
    let outside = TempCargoPackage::new(&[("evil", HOSTILE_CRITERION_BENCH_SOURCE)]);
    outside.build_and_copy_as_base_and_head("evil");
    let command = |how: &str, flags: &str| -> Command {
        let folders = "--base-dir base --head-dir head";
        let line = format!("{COMPARE_COMMAND_LINE} --max-blocks 1 {folders} {flags}");
        let mut command = outside.package_command(env!("CARGO_BIN_EXE_kernelgate"), &line);
        command.env("HOSTILE", how);
        command
    };
    let run = |how: &str, flags: &str| -> ProcessOutcome {
        command(how, &format!("--bench evil {flags}")).output().unwrap().into()
    };
    // The bench executable was not built by this cargo call, so kernelgate runs it only if
    // `--bench` names it.
    let unnamed = ProcessOutcome::from(command("", "").output().unwrap());
    insta::assert_snapshot!(messages_without_progress(unnamed.assert_exit(2)), @r"
    left alone: evil of the base: it uses Criterion alone and was not built here, so it was not run; `--bench evil` runs it all the same
    left alone: evil of the head: it uses Criterion alone and was not built here, so it was not run; `--bench evil` runs it all the same
    error: no bench that can be driven has a case that was asked for
    ");
    let nothing = run("", "nothing");
    insta::assert_snapshot!(nothing.error_message(2), @"error: no case matches `nothing`");
    let sound = run("", "--effort quick --axis n=5 --format json");
    assert_eq!(sound.json_verdicts().len(), 2);
    insta::assert_snapshot!(lines_with_word(&sound.stderr, "effect"), @"without effect on benches that use Criterion alone (evil): --axis (KERNELGATE_AXIS), --backend (KERNELGATE_BACKEND), --effort (KERNELGATE_EFFORT)");

    check_benches_that_cannot_be_driven(&run);
    let mut broke = String::new();
    for (how, flags) in [
        ("panics when listing!", ""),
        ("panics!", ""),
        ("hangs when listing!", "--wait 1s"),
        ("hangs!", "--wait 1s"),
    ] {
        let outcome = run(how, &format!("{flags} --format json"));
        assert_eq!(outcome.exit_code, Some(1), "{how}: {}", outcome.stdout_and_stderr());
        assert_eq!(outcome.json_verdicts(), ["inconclusive"; 2], "{how}");
        broke += &format!("{how}: {:#}\n", outcome.stdout_as_json()["broken"]);
        if !flags.is_empty() {
            assert!(!is_hostile_process_alive(&outside), "what it started still runs");
        }
    }
    insta::assert_snapshot!(redact_varying_parts(&broke), @r#"
    panics when listing!: [
      {
        "abandoned": true,
        "bench": "evil",
        "reason": "asked to list its cases it ended with exit status: 101: thread 'main' panicked at benches/evil.rs:LINE:; no data",
        "side": "head"
      }
    ]
    panics!: [
      {
        "abandoned": true,
        "bench": "evil",
        "reason": "measuring `second`, exit status: 101: thread 'main' panicked at benches/evil.rs:LINE:; on purpose",
        "side": "head"
      }
    ]
    hangs when listing!: [
      {
        "abandoned": true,
        "bench": "evil",
        "reason": "asked to list its cases it was treated as hung: killed after 1 s (--wait sets this)",
        "side": "head"
      }
    ]
    hangs!: [
      {
        "abandoned": true,
        "bench": "evil",
        "reason": "treated as hung: killed after 1 s (--wait sets this)",
        "side": "head"
      }
    ]
    "#);
    let timeless = run("takes no time!", "--format json").assert_exit(3).stdout_as_json();
    assert_eq!(timeless["judged"].as_array().unwrap().len(), 1, "{timeless}");
    insta::assert_snapshot!(format!("{:#}", timeless["skipped"]), @r#"
    {
      "second": "it left no samples in Criterion's store (CRITERION_HOME)"
    }
    "#);
}

#[test]
fn slow_downs_that_a_bench_of_criterion_cannot_make_are_added_to_its_times() {
    let outside = TempCargoPackage::new(&[("evil", HOSTILE_CRITERION_BENCH_SOURCE)]);
    outside.build_and_copy_as_base_and_head("evil");
    let line = "calibrate --dir base --bench evil second --relative 0.3 --tolerated 0.6 \
                --case-time 0.1s --comparisons 1 --inject 100 --power-comparisons 1 --sham 0 \
                --max-blocks 32 --output calibration.json";
    outside.run_kernelgate(line).assert_exit(0);
    let text = std::fs::read_to_string(outside.package_path("calibration.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["simulated"], serde_json::json!(["second"]));
    let comparisons = json["comparisons"].as_array().unwrap();
    let verdicts: Vec<&str> = comparisons
        .iter()
        .map(|comparison| comparison["verdicts"]["#0"].as_str().unwrap())
        .collect();
    assert!(verdicts.contains(&"regressed") && verdicts.contains(&"unchanged"), "{verdicts:?}");
}
