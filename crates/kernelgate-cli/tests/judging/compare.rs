//! `kernelgate compare` from outside: a scratch repository with one bench, its builds compared.
//!
//! The bench is linked with the library that `cargo test` built, so that a build takes seconds.
//! Thresholds are wide and slow-downs sixteenfold: the tests check the messages, not the resolution
//! of the measurement.

#![cfg(unix)]

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::package::scratch::{BENCH, CASE, MANIFEST, Scratch};
use crate::package::{Outcome, lines_with};

#[test]
fn unchanged_code_is_fine_and_slower_code_is_not() {
    let scratch = Scratch::new();
    let status = scratch.git("status --porcelain");
    let same = "the same executable on both sides, byte by byte: spin";
    scratch
        .compare("--base main --head HEAD")
        .expect(0, &[CASE, "unchanged", "1 unchanged, 0 inconclusive of 1", same]);
    // By default one file is not compared with itself.
    let mut plainly = Command::new(env!("CARGO_BIN_EXE_kernelgate"));
    let environment = scratch.compare_with("");
    plainly
        .args(["compare", "--base", "main", "--head", "HEAD", "--backend", "cpu"])
        .current_dir(scratch.folder.path())
        .envs(environment.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let plainly: Outcome = plainly.output().unwrap().into();
    let first = "the two builds are the same file, byte by byte: 1 case was not timed";
    plainly.expect(0, &["1 identical of 1", same]);
    assert!(plainly.stdout.starts_with(first), "{}", plainly.stdout);
    scratch.bench("ROUNDS: usize = 100", "ROUNDS: usize = 1600");
    // A change that is not committed, and a new file.
    scratch.write("notes.txt", "new");
    let before = (
        scratch.git("status --porcelain"),
        scratch.git("stash list"),
        scratch.git("branch --list"),
    );
    let ran = plant_hooks(&scratch);
    let outcome = scratch.compare("--base main --format json");
    outcome.expect(1, &["round 2"]);
    assert!(!ran.exists(), "{:?}", std::fs::read_to_string(ran));
    std::fs::remove_dir_all(scratch.folder.path().join(".git/hooks")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(
        (&json["judged"][0]["verdict"], &json["judged"][0]["decision"]["case"]),
        (&"regressed".into(), &CASE.into())
    );
    assert_eq!(json["judged"][0]["confirmation"]["verdict"], "regressed");
    let why = &json["explanations"][CASE];
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
            scratch.git("status --porcelain"),
            scratch.git("stash list"),
            scratch.git("branch --list")
        ),
        before
    );
    assert!(status.is_empty() || status.contains("target"), "{status}");
    // The last comparison was finished: resuming it measures nothing again.
    scratch
        .compare("--base main --resume --format markdown")
        .expect(1, &["resuming with", "**1 regressed", "| scratch/sum"]);
    scratch.commit("slower");
    // The recorded trials stay when another command runs.
    let trials = scratch.folder.path().join("target/kernelgate/compare/trials.json");
    let before = std::fs::read(&trials).unwrap();
    let anew = "leave --resume out to start anew";
    for (flags, words) in [
        ("--base main~1 --case-time 0.2s", "--case-time differs"),
        ("--base main~1 --axis n=1024", "--axis (KERNELGATE_AXIS) differs"),
        ("--base main~1 --absolute 5", "--absolute, --tolerated, --max-blocks or the device's"),
        ("--base main~1 n1024", "the filter differs"),
        ("--base HEAD --head main~1", "the executable of bench `spin` in the base differs"),
    ] {
        scratch.compare(&format!("{flags} --resume")).expect(2, &[words, anew]);
    }
    assert_eq!(std::fs::read(&trials).unwrap(), before);
    scratch.compare("--base main~1 --resume").expect(1, &["resuming with", "1 regressed"]);
    scratch.compare("--base HEAD --head main~1").expect(0, &["1 improved"]);
}

/// Adds hooks to the user's repository, and returns the file to which they would write.
fn plant_hooks(scratch: &Scratch) -> PathBuf {
    use std::os::unix::fs::PermissionsExt as _;
    let ran = scratch.folder.path().join("target/hooks");
    for name in ["post-index-change", "post-checkout", "pre-commit", "reference-transaction"] {
        let text = format!("#!/bin/sh\necho {name} >> '{}'\n", ran.display());
        scratch.write(&format!(".git/hooks/{name}"), &text);
        let hook = scratch.folder.path().join(".git/hooks").join(name);
        std::fs::set_permissions(hook, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    ran
}

/// A case that is wrong by changed golden tensors fails, though its executable is the old one.
#[test]
fn files_that_the_same_executable_reads_are_verified_on_both_sides() {
    let scratch = Scratch::new();
    let read = "let factor: f64 = std::fs::read_to_string(\"src/factor.txt\").unwrap().parse()";
    scratch.bench("let y: Vec<f64>", &format!("{read}.unwrap();\n        let y: Vec<f64>"));
    let bench = std::fs::read_to_string(scratch.folder.path().join("benches/spin.rs")).unwrap();
    let scaled =
        bench.replace("f64::from(x) * f64::from(x)", "factor * f64::from(x) * f64::from(x)");
    scratch.write("benches/spin.rs", &scaled);
    scratch.write("src/factor.txt", "1");
    scratch.commit("reads");
    let same = "the same executable on both sides, byte by byte: spin";
    scratch.compare("--base main --max-blocks 1").expect(3, &[same, "1 inconclusive"]);
    // The earlier verification of the executable does not hold for other files.
    scratch.write("src/factor.txt", "2");
    for resume in ["--resume", ""] {
        let outcome = scratch.compare(&format!("--base main --max-blocks 1 {resume}"));
        outcome.expect(1, &[same, "failed in the head", CASE, "max error 5.00e-1"]);
    }
}

#[test]
fn an_edit_inside_a_submodule_is_compared() {
    let (scratch, other) = (Scratch::new(), tempfile::tempdir().unwrap());
    let inside = |line: &str| {
        scratch.git(&format!("-c protocol.file.allow=always -C {} {line}", other.path().display()))
    };
    std::fs::write(other.path().join("rounds.in"), "100").unwrap();
    let _ = ["init --quiet", "add rounds.in", "commit --quiet -m rounds"].map(inside);
    let path = other.path().display();
    scratch.git(&format!("-c protocol.file.allow=always submodule --quiet add {path} parts"));
    scratch.bench("usize = 100", "usize = include!(\"../parts/rounds.in\")");
    scratch.commit("submodule");
    scratch.write("parts/rounds.in", "1600");
    // The build is another executable; its slow-down takes more processes, which would show nothing
    // new.
    let edited = scratch.compare("--base main --max-blocks 1");
    edited.expect(3, &["working tree, with changes in submodule parts (", "too few pairs"]);
    assert_eq!(lines_with(&edited.all(), "same executable"), "");
    for gone in ["parts", ".git/modules"] {
        std::fs::remove_dir_all(scratch.folder.path().join(gone)).unwrap();
    }
    std::fs::create_dir(scratch.folder.path().join("parts")).unwrap();
    let get = "`git submodule update --init --recursive -- parts` gets it";
    scratch.compare("--base main").expect(2, &["does not build", "parts/rounds.in", get]);
}

#[test]
fn lost_accuracy_is_found_and_what_the_package_accepts_lasts_until_the_base_has_it() {
    let scratch = Scratch::new();
    scratch.bench("*y = x * x", "*y = x * x * 1.000_000_4");
    let less = scratch.compare("--base main --max-blocks 1");
    less.expect(1, &["1 less accurate", "for each of 8 seeds"]);
    // Inputs that do not depend on the seed are one data set, and so are those that declare it.
    for (from, to) in [
        ("random::normal_values(seed,", "random::normal_values(1,"),
        ("fn work(&self)", "fn reads_files(&self) -> bool { true }\n    fn work(&self)"),
    ] {
        let less = BENCH.replace("*y = x * x", "*y = x * x * 1.000_000_4");
        scratch.write("benches/spin.rs", &less.replace(from, to));
        let one = scratch.compare("--base main --max-blocks 1");
        let remedy = "for the only data set; other seeds have no data of their own: accept it";
        one.expect(3, &["1 maybe less accurate", remedy]);
    }
    scratch.write("kernelgate.toml", "[[accept]]\ncases = 'sum'\nslower = 'x'\nreason = 'why'");
    scratch.compare("--base main").expect(2, &["kernelgate.toml of the head, line 3 (`slower"]);
    scratch.write("kernelgate.toml", "[[accept]]\ncases = 'sum'\nslower = 199\nreason = 'why'");
    scratch.bench("ROUNDS: usize = 100", "ROUNDS: usize = 1600");
    let accepted = format!("accepted in kernelgate.toml: {CASE}: up to 19900% slower: why");
    scratch.compare("--base main").expect(0, &["1 accepted, 0 improved, 0 unchanged", &accepted]);
    scratch.git("add kernelgate.toml");
    scratch.git("commit --quiet -m accepted");
    let expired = "kernelgate.toml: [[accept]] `sum` is accepted in the base already: expired";
    scratch.compare("--base main").expect(1, &["1 regressed", expired]);
}

#[test]
fn lost_accuracy_of_one_output_is_found_below_the_error_of_another() {
    let scratch = Scratch::new();
    // A second output keeps 8 bits of the significand.
    let declared = "vec![Expected::all(\"y\", [1, self.n], y)]";
    let both = "vec![Expected::all(\"y\", [1, self.n], y.clone()), \
                Expected::all(\"short\", [1, self.n], y)]";
    let stored = "std::hint::black_box(outputs.f32_mut(\"y\"));";
    let shortened = "let short = |x: &f32| f32::from_bits((x * x).to_bits() & 0xffff_0000);
                     let values: Vec<f32> = inputs.f32(\"x\").iter().map(short).collect();
                     outputs.f32_mut(\"short\").copy_from_slice(&values);";
    let output = ".with_output(\"y\", [1, problem.n], Dtype::F32)";
    let outputs = format!("{output}.with_output(\"short\", [1, problem.n], Dtype::F32)");
    let bench = BENCH
        .replace(declared, both)
        .replace(stored, &format!("{stored}{shortened}"))
        .replace(output, &outputs)
        .replace("max_error: 1e-6, relative_l2: 1e-6", "max_error: 1e-2, relative_l2: 1e-2");
    scratch.write("benches/spin.rs", &bench);
    scratch.commit("outputs");
    let less = bench.replace("*y = x * x", "*y = x * x * 1.000_04");
    scratch.write("benches/spin.rs", &less);
    let found = scratch.compare("--base main --max-blocks 1");
    found.expect(1, &["1 less accurate", "relative L2 error of `y` ", "for each of 8 seeds"]);
    // An output has a tolerance of its own.
    let own = "fn tolerances(&self) -> std::collections::BTreeMap<String, Tolerance> {
                   let tight = Tolerance { max_error: 1e-6, relative_l2: 1e-6 };
                   [(\"y\".to_owned(), tight)].into()
               }
               fn work(&self)";
    scratch.write("benches/spin.rs", &less.replace("fn work(&self)", own));
    let wrong = scratch.compare("--base main --max-blocks 1");
    wrong.expect(1, &["failed in the head", "output `y`: max error 4.01e-5 (allowed 1e-6)"]);
    let unknown = own.replace("\"y\"", "\"z\"");
    scratch.write("benches/spin.rs", &bench.replace("fn work(&self)", &unknown));
    let refused = scratch.compare("--base main --max-blocks 1");
    refused.expect(1, &["a tolerance for output `z`, which the reference lacks"]);
}

#[test]
fn a_removed_case_is_named_in_every_output_and_can_be_accepted() {
    let scratch = Scratch::new();
    scratch.bench("default: &[\"n=1024\"]", "default: &[\"n=2048\"]");
    let line = "--base main --max-blocks 1 --out out";
    scratch.compare(line).expect(3, &[&format!("removed: {CASE}"), "; 1 removed"]);
    for name in ["comment.md", "junit.xml", "report.html", "result.json"] {
        let text = std::fs::read_to_string(scratch.folder.path().join("out").join(name)).unwrap();
        assert!(text.contains("removed") && text.contains(CASE), "{name}: {text}");
    }
    scratch.write("kernelgate.toml", "removed-cases = \"fail\"\n");
    scratch.compare(line).expect(1, &[&format!("removed: {CASE}")]);
    let accepted = "removed-cases = \"fail\"\n[[accept]]\ncases = \"n1024\"\nremoved = true\n\
                    reason = \"n2048 replaces it\"\n";
    scratch.write("kernelgate.toml", accepted);
    let words = format!("accepted in kernelgate.toml: {CASE}: removed: n2048 replaces it");
    // No case remains to be judged.
    scratch.compare(line).expect(3, &[&words]);
}

#[test]
fn sides_that_cannot_be_compared_are_named() {
    let scratch = Scratch::new();
    scratch.compare("--base mian").expect(2, &["no revision `mian`", "did you mean main"]);
    scratch.compare("--base main --head --budget").expect(2, &[]);
    // The error comes before anything is built.
    scratch.write("baselines/amd/calibration.json", "[");
    let broken = scratch.compare("--base main");
    broken.expect(2, &["failed to read", "calibration.json"]);
    assert!(!broken.all().contains("building"), "{}", broken.all());
    std::fs::remove_dir_all(scratch.folder.path().join("baselines")).unwrap();
    scratch.compare("").expect(2, &["--base"]);
    scratch
        .compare("--base main --bench none")
        .expect(2, &["--bench none: neither side has it; there are spin"]);
    let typo = scratch.compare("--base main nothing");
    typo.expect(2, &["error: no case matches `nothing`"]);
    let (warned, head) = (typo.all().find("in the base no case"), typo.all().find("building head"));
    assert!(warned.is_some() && warned < head, "{}", typo.all());
    scratch.bench("fn main() -> ExitCode {", "fn main() -> ExitCode { mistake");
    scratch.compare("--base main").expect(2, &["head working tree", "does not build", "mistake"]);
    // New and removed cases are listed; a changed definition is refused.
    scratch.bench("default: &[\"n=1024\"]", "default: &[\"n=2048\"]");
    scratch
        .compare("--base main")
        .expect(3, &["new, not judged: scratch/sum/n2048/cpu/hot", &format!("removed: {CASE}")]);
    scratch.bench("revision: 1", "revision: 2");
    scratch
        .compare("--base main")
        .expect(4, &["refused: revision is `1` in the base and `2` in the head", CASE]);
    scratch.bench("*y = x * x", "*y = x + x");
    scratch.compare("--base main").expect(1, &[&format!("failed in the head: {CASE}"), "1 failed"]);
    scratch.bench(
        "for _ in 0..ROUNDS {",
        "std::process::exit(7);\n#[allow(unreachable_code)]\nfor _ in 0..ROUNDS {",
    );
    scratch.compare("--base main").expect(1, &["broke: spin of the head", "exit status: 7"]);
    // One bench uses another harness, and one exists only in the head.
    scratch.write("benches/spin.rs", BENCH);
    scratch.write("benches/other.rs", "fn main() { println!(\"done\"); }");
    scratch.write(
        "Cargo.toml",
        &format!("{MANIFEST}\n[[bench]]\nname = \"other\"\nharness = false\n"),
    );
    scratch.compare("--base main").expect(
        0,
        &[
            "bench left alone: other",
            "left alone: other of the head: its file has no mark",
            "1 unchanged",
        ],
    );
    assert!(scratch.compare("--base main --bench spin --budget 0.1s").all().contains("of 1"));
}

/// A bench of two cases. The environment selects a fault of the larger case: `SCRATCH_FAULT`, in
/// the trials whose session contains `SCRATCH_WHEN`.
const FAULT: &str = r#"
fn fault(kind: &str) -> bool {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let order = std::fs::read_to_string(variable("KERNELGATE_REQUEST")).unwrap_or_default();
    variable("SCRATCH_FAULT") == kind && order.contains(&variable("SCRATCH_WHEN"))
}
"#;

#[test]
fn a_case_that_was_asked_for_ends_in_the_table_with_a_reason() {
    let scratch = Scratch::new();
    let bench = [
        ("default: &[\"n=1024\"]", "default: &[\"n=1024,2048\"]"),
        (
            "self.n as u64 * 16",
            "if self.n == 2048 && fault(\"skip\") { 1 << 60 } else { self.n as u64 * 16 }",
        ),
        (
            "    Harness::new(\"spin\", vec![join_rows(&SUM, ROWS)])",
            "    if fault(\"exit\") { std::process::exit(7) }
    const FEWER: Workload<Sum> = Workload { default: &[\"n=1024\"], ..SUM };
    Harness::new(\"spin\", vec![join_rows(if fault(\"absent\") { &FEWER } else { &SUM }, ROWS)])",
        ),
    ];
    let text = bench.iter().fold(format!("{BENCH}{FAULT}"), |text, (from, to)| {
        assert!(text.contains(from));
        text.replace(from, to)
    });
    scratch.write("benches/spin.rs", &text);
    scratch.commit("two");
    let compare = |fault: &str, when: &str, flags: &str| -> (Outcome, Vec<String>) {
        let mut command =
            scratch.compare_with(&format!("--base main --head main --case-time 0.05s {flags}"));
        let outcome: Outcome =
            command.env("SCRATCH_FAULT", fault).env("SCRATCH_WHEN", when).output().unwrap().into();
        let row =
            outcome.stdout.lines().find(|line| line.starts_with(&CASE.replace("1024", "2048")));
        let words = row.unwrap_or_default().split_whitespace().map(str::to_owned).collect();
        (outcome, words)
    };
    let unmeasured = [&*CASE.replace("1024", "2048"), "inconclusive", "-", "-", "-", "-", "-", "0"];
    // The fault is in every process except the one that verified.
    let (outcome, row) = compare("skip", "\"r1-", "");
    outcome.expect(
        3,
        &[
            "inconclusive: skipped in the base: needs 1152921505 GB of memory",
            "1 unchanged, 1 inconclusive of 2",
        ],
    );
    assert_eq!(row, unmeasured);
    // After the first block: the measurements of that block are shown, and decide nothing.
    let (outcome, row) = compare("skip", "\"r1-b1-p0\"", "--max-blocks 2");
    outcome.expect(
        3,
        &["inconclusive: too few pairs; skipped in the head: needs 1152921505 GB of memory"],
    );
    assert_eq!((&*row[1], &**row.last().unwrap()), ("inconclusive", "2"));
    let (outcome, row) = compare("absent", "\"r1-b0-p1\"", "--max-blocks 1");
    outcome.expect(3, &["inconclusive: skipped in the head: the bench did not list it"]);
    assert_eq!(row, unmeasured);
    // The interrupted comparison still knows it, and requests nothing again.
    compare("", "", "--max-blocks 1 --resume")
        .0
        .expect(3, &["resuming with", "skipped in the head: the bench did not list it"]);
    let (outcome, row) = compare("exit", "\"r1-", "");
    outcome.expect(
        1,
        &["2 inconclusive of 2", "inconclusive: its bench broke in the head: exit status: 7"],
    );
    assert_eq!(row, unmeasured);
    let (outcome, row) = compare("exit", "\"r1-b0-p3\"", "--budget 0.1s");
    outcome.expect(3, &["inconclusive: no block of it ended within 0 s and 24 blocks"]);
    assert_eq!(row, unmeasured);
    // The fault is in the base's verification: the head is verified, but has nothing to compare
    // with.
    scratch.write("benches/spin.rs", &text.replace("ROUNDS: usize = 100", "ROUNDS: usize = 99"));
    let mut command = scratch.compare_with("--base main --case-time 0.05s");
    command.env("SCRATCH_FAULT", "skip").env("SCRATCH_WHEN", "base/verified");
    Outcome::from(command.output().unwrap())
        .expect(3, &["inconclusive: skipped in the base: needs 1152921505 GB of memory"]);
}

#[test]
fn an_interrupted_comparison_goes_on_where_it_was() {
    let scratch = Scratch::new();
    let mut first = scratch
        .compare_with("--base main --head main")
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
    let resumed = format!("resuming with {saved} processes");
    scratch.compare("--base main --head main --resume").expect(0, &[&resumed, "1 unchanged"]);
}

#[test]
fn two_comparisons_do_not_run_at_once() {
    let scratch = Scratch::new();
    let first =
        scratch.compare_with("--base main --head main --format json").stderr(Stdio::null()).spawn();
    let mut first = first.unwrap();
    let lock = scratch.folder.path().join("target/kernelgate/compare/base/side");
    while !lock.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    scratch.compare("--base main").expect(2, &["another comparison runs"]);
    first.kill().unwrap();
    first.wait().unwrap();
}
