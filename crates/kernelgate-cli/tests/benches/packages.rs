//! Tests of the verbs in Cargo packages outside this repository: packages with own workloads,
//! workspaces, and misbehaving benches.
//!
//! Benches are linked with the library that `cargo test` built, so that a build takes seconds.

#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::package::{
    ProcessOutcome, copy_executable, lines_with_word, rustc_flags_linking_kernelgate,
};
use tempfile::TempDir;

const CARGO_TOML_TEMPLATE: &str =
    "[package]\nname = \"NAME\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[lib]\nbench = false\n";

/// Source of a test bench whose workload is named by a placeholder, and whose cases take
/// microseconds.
const BENCH_SOURCE_TEMPLATE: &str = r#"
use std::process::ExitCode;
use kernelgate::prelude::*;

struct Double { n: usize }

impl Problem for Double {
    fn inputs(&self, seed: u64) -> Tensors {
        Tensors::new().with_tensor("x", [1, self.n], random::normal_values(seed, "x", self.n))
    }
    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let y: Vec<f64> = inputs.f32_elements("x").iter().map(|&x| 2.0 * f64::from(x)).collect();
        vec![Expected::all("y", [1, self.n], y)]
    }
    fn work(&self) -> Work { Work::bytes(4 * self.n as u64, 4 * self.n as u64) }
    fn tolerance(&self) -> Tolerance { Tolerance { max_error: 1e-6, relative_l2: 1e-6 } }
    fn host_memory_bytes(&self) -> u64 { self.n as u64 * 16 }
}

const DOUBLE: Workload<Double> = Workload {
    name: "WORKLOAD", about: "y = 2 x", revision: 1,
    axes: &[Axis::number("n", "elements")],
    default_selection_lines: &["n=1024"], accelerator_selection_lines: &[], thorough_selection_lines: &["n=512"],
    bind: |point| Ok(Double { n: point.number("n")? }),
};

const ROWS: &[Implementation<Double>] = &[Implementation {
    implementation_name: "cpu", description: "doubles", supports: |_| Ok(()),
    prepare: PrepareFunction::Cpu(|problem, inputs| {
        let outputs = Tensors::new().with_output("y", [1, problem.n], Dtype::F32);
        CpuTask::new(inputs, outputs, |inputs, outputs| {
            outputs.f32_mut("y").iter_mut().zip(inputs.f32_elements("x")).for_each(|(y, x)| *y = FACTOR * x);
        })
    }),
}];

fn main() -> ExitCode { Harness::new("BENCH", vec![join_workload_with_implementations(&DOUBLE, ROWS)]).main() }
"#;

/// A bench that looks like one of this harness, and behaves as the variable HOSTILE says.
const HOSTILE_BENCH_SOURCE: &str = r#"
fn main() {
    kernelgate::protocol::keep_bench_mark_in_executable();
    let ask = std::env::var("KERNELGATE_REQUEST").unwrap_or_default();
    let how = std::env::var("HOSTILE").unwrap_or_default();
    if ask == "protocol" {
        match how.as_str() {
            "garbage" => println!("\u{1b}[31m{{\"kernelgate\": \"protocol"),
            "old" => println!("kernelgate protocol 1-3\nkernelgate trial protocol 1"),
            "new" => println!("kernelgate-protocol 40-41"),
            "mute" => std::thread::sleep(std::time::Duration::from_secs(600)),
            _ => println!("kernelgate-protocol 1-2"),
        }
        return;
    }
    match how.as_str() {
        "flood" => (0..300_000).for_each(|i| eprintln!("line {i} of what nobody wants to read")),
        "hang" => std::thread::sleep(std::time::Duration::from_secs(600)),
        "exit" => { eprintln!("I give \u{1b}[2J up"); std::process::exit(7) }
        "panic" => panic!("on purpose"),
        // A child process that outlives the bench and holds its streams open.
        "orphan" => drop(std::process::Command::new("sleep").arg("30").spawn()),
        "broken" => {
            let text = std::fs::read_to_string(&ask).unwrap();
            let from = text.find("\"response\": \"").unwrap() + 13;
            let path = &text[from..from + text[from..].find('"').unwrap()];
            std::fs::write(path, "{\"schema\": \"kernelgate-resp").unwrap();
        }
        _ => {}
    }
}
"#;

struct FolderOfPackages {
    folder: TempDir,
}

impl FolderOfPackages {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn folder_path(&self) -> PathBuf {
        self.folder.path().canonicalize().unwrap()
    }

    fn write_file(&self, name: &str, text: &str) {
        let path = self.folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// Makes a package in a folder with these benches, given as names and sources.
    fn add_package(&self, folder: &str, name: &str, benches: &[(&str, &str)]) {
        let mut manifest = CARGO_TOML_TEMPLATE.replace("NAME", name);
        for (bench, source) in benches {
            manifest += &format!("[[bench]]\nname = \"{bench}\"\nharness = false\n");
            self.write_file(&format!("{folder}/benches/{bench}.rs"), source);
        }
        self.write_file(&format!("{folder}/Cargo.toml"), &manifest);
        self.write_file(&format!("{folder}/src/lib.rs"), "");
    }

    fn kernelgate_command(&self, folder: &str, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kernelgate"));
        command
            .args(line.split_whitespace())
            .current_dir(self.folder_path().join(folder))
            .env("CARGO_ENCODED_RUSTFLAGS", rustc_flags_linking_kernelgate())
            .env("RAYON_NUM_THREADS", "1")
            .env("KERNELGATE_BACKEND", "cpu")
            .env_remove("CARGO_MANIFEST_DIR")
            .env_remove("CARGO_TARGET_DIR")
            .env_remove("CRITERION_HOME")
            .env_remove("RUST_BACKTRACE");
        command
    }

    fn run_kernelgate(&self, folder: &str, line: &str) -> ProcessOutcome {
        self.kernelgate_command(folder, line).output().unwrap().into()
    }
}

/// Source of a test bench with this name, whose workload has the given name.
fn bench_source_with_workload(name: &str, workload: &str) -> String {
    BENCH_SOURCE_TEMPLATE
        .replace("BENCH", name)
        .replace("WORKLOAD", workload)
        .replace("FACTOR", "2.0")
}

/// Checks `list` and error messages in a package with kernelgate benches `one` and `two` and a
/// bench `plain` of another harness.
fn check_lists_and_refusals(run: &dyn Fn(&str) -> ProcessOutcome) {
    insta::assert_snapshot!(run("list").text_for_snapshot(), @r"
    exit 0
    mine/double: y = 2 x
        axis n  a number: elements
        cpu  doubles
    mine/other: y = 2 x
        axis n  a number: elements
        cpu  doubles

    case  work  memory
    mine/double/n1024/cpu/hot  N kB  N kB
    mine/other/n1024/cpu/hot  N kB  N kB

    work: of GEMMs, else fewest bytes moved; memory: of the host at the peak;
    GPU memory: as the implementation declares it
    2 cases run here
    -- stderr
    left alone: bench `plain`: it does not use kernelgate
    ");
    let list = run("list double --format json").assert_exit(0).stdout_as_json();
    insta::assert_snapshot!(format!("{list:#}"), @r#"
    [
      {
        "bench": "one",
        "bytes": 8192,
        "case": "mine/double/n1024/cpu/hot",
        "device_bytes": null,
        "host_bytes": 16384,
        "matmul_flops": 0,
        "status": "runs here"
      }
    ]
    "#);
    // The filter selects cases that are not among the default cases.
    let thorough = ["mine/double/n512/cpu/hot", "mine/other/n512/cpu/hot"];
    assert_eq!(run("list n512 --format json").assert_exit(0).json_case_ids(), thorough);
    let mut refusals = String::new();
    for line in [
        "list doubel",
        "list (",
        "list --axis zz=1",
        "list --bench plain",
        "resources",
        "resources --arch sm_9999",
        "peers",
        "baseline find other",
        "baseline find ../main",
    ] {
        refusals += &format!("{line}: {}\n", run(line).error_message(2));
    }
    insta::assert_snapshot!(refusals, @r"
    list doubel: error: no case matches `doubel`; did you mean double?
    list (: error: filter `(` is not a regular expression: unclosed group
    list --axis zz=1: error: no workload has an axis `zz`; axes are n; `kernelgate list` shows the cases
    list --bench plain: error: no bench here can be asked: the lines above say why
    resources: error: no bench lists a kernel (`Harness::kernels`); `kernelgate list` shows the cases
    resources --arch sm_9999: error: --arch takes a real architecture such as sm_90a, not `sm_9999`
    peers: error: no run in FOLDER/target/kernelgate/runs: run `cargo bench` first
    baseline find other: error: no baseline `other` for DEVICE in FOLDER/baselines (found none)
    baseline find ../main: error: baseline name `DEVICE/main`: use letters, digits, `.`, `_` and `-`, starting with a letter or digit, at most 64 of them
    ");
}

#[test]
fn every_verb_works_on_somebody_elses_workload() {
    let outside = FolderOfPackages::new();
    let plain = "fn main() { println!(\"a bench of another kind\"); }";
    let (one, two) = (
        bench_source_with_workload("one", "mine/double"),
        bench_source_with_workload("two", "mine/other"),
    );
    outside.add_package(".", "mine", &[("one", &one), ("two", &two), ("plain", plain)]);
    let run = |line: &str| outside.run_kernelgate(".", line);

    check_lists_and_refusals(&run);
    run("list --bench nosuch").assert_exit(2);
    insta::assert_snapshot!(run("verify").text_for_snapshot(), @r"
    exit 0
    case  status  checked  max error  relative L2  same bits again
    mine/double/n1024/cpu/hot  ok  100.0000%  exact  exact  yes
    mine/other/n1024/cpu/hot  ok  100.0000%  exact  exact  yes
    2 ok, 0 failed, 0 skipped
    -- stderr
    left alone: bench `plain`: it does not use kernelgate
    verifying mine/double/n1024/cpu/hot
    verifying mine/other/n1024/cpu/hot
    ");
    run("verify double --bench one --dump dumped").assert_exit(0);
    let dump = outside.folder_path().join("dumped");
    assert!(dump.join("mine_double_n1024_cpu_hot.safetensors").is_file());
    assert_eq!(std::fs::read_dir(&dump).unwrap().count(), 1, "nothing else is left there");
    let profile = run("profile --format json").assert_exit(0).stdout_as_json();
    let phases = profile[0]["phases"].as_array().unwrap();
    let names: Vec<&str> = phases.iter().map(|phase| phase["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["prepare", "first launch", "launch", "outputs"]);
    assert!(phases[2]["count"].as_u64().unwrap() >= 3 && profile[0]["summary"].is_null());
    if kernelgate_cuda::driver::device::count_gpus().is_err() {
        run("timing").assert_exit(2);
    }
    let mut cargo = Command::new(env!("CARGO_BIN_EXE_cargo-kernelgate"));
    let environment = outside.kernelgate_command(".", "");
    let line = ["kernelgate", "list", "--bench", "one", "--format", "json"];
    cargo.args(line).current_dir(outside.folder_path());
    cargo.envs(environment.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let listed = ProcessOutcome::from(cargo.output().unwrap());
    assert_eq!(listed.assert_exit(0).json_case_ids(), ["mine/double/n1024/cpu/hot"]);

    // The outputs are wrong and the case is slower: the reported verdict is the failed
    // verification.
    outside.write_file("benches/two.rs", &two.replace("2.0 * x", "2.5 * x"));
    insta::assert_snapshot!(run("verify --format markdown").text_for_snapshot(), @r"
    exit 1
    | case  | status |  checked | max error | relative L2 | same bits again |
    | -- | --: | --: | --: | --: | --: |
    | mine/double/n1024/cpu/hot |  ok | 100.0000% |  exact |  exact |  yes |
    | mine/other/n1024/cpu/hot  | failed |  - |  - |  - |  - |

    FAILED mine/other/n1024/cpu/hot: output `y`: max error N (allowed 1e-6), relative L2 N (allowed 1e-6); worst at PLACE
    1 ok, 1 failed, 0 skipped
    -- stderr
    left alone: bench `plain`: it does not use kernelgate
    verifying mine/double/n1024/cpu/hot
    verifying mine/other/n1024/cpu/hot
    ");
    outside.write_file("benches/two.rs", "fn main() { mistake");
    let broken = run("list");
    insta::assert_snapshot!(broken.assert_exit(2).stderr.lines().last().unwrap(), @"error: the package does not build");
}

#[test]
fn a_baseline_of_somebody_elses_workload_is_saved_found_and_gated() {
    let outside = FolderOfPackages::new();
    outside.add_package(".", "mine", &[("one", &bench_source_with_workload("one", "mine/double"))]);
    let run = |line: &str| outside.run_kernelgate(".", line);
    run("baseline save main --runs 2 -- --bench one -- --quick --noplot").assert_exit(0);
    insta::assert_snapshot!(run("baseline find main").text_for_snapshot(), @r"
    exit 0
    FOLDER/baselines/DEVICE/main.json
    -- stderr
    ");
    assert!(outside.folder_path().join("baselines").is_dir(), "baselines are the package's");
    let gate = run("gate --baseline main --format json").stdout_as_json();
    assert_eq!(gate["judged"][0]["case"], "mine/double/n1024/cpu/hot");
    assert_eq!(gate["judged"][0]["base_runs"], 2);
    assert_eq!(
        run("runs --format json").assert_exit(0).json_case_ids(),
        ["mine/double/n1024/cpu/hot"]
    );
}

#[test]
fn a_workspace_has_its_members_verbs_and_one_target_folder() {
    let outside = FolderOfPackages::new();
    outside.write_file(
        "Cargo.toml",
        "[workspace]\nmembers = [\"a\", \"b\", \"empty\"]\nresolver = \"3\"\n",
    );
    outside.add_package("a", "a", &[("double", &bench_source_with_workload("double", "a/double"))]);
    outside.add_package("b", "b", &[("double", &bench_source_with_workload("double", "b/double"))]);
    outside.add_package("empty", "empty", &[]);
    let run = |folder: &str, line: &str| outside.run_kernelgate(folder, line);
    let (in_a, in_b) = ("a/double/n1024/cpu/hot", "b/double/n1024/cpu/hot");
    assert_eq!(run(".", "list --format json").assert_exit(0).json_case_ids(), [in_a, in_b]);
    assert_eq!(run(".", "list --package b --format json").assert_exit(0).json_case_ids(), [in_b]);
    assert_eq!(run("a/src", "verify --format json").assert_exit(0).json_case_ids(), [in_a]);
    insta::assert_snapshot!(run("empty", "list").error_message(2), @"error: there is no bench: `[[bench]]` with `harness = false` in Cargo.toml makes one");
    run(".", "list --package nosuch").assert_exit(2);
    // The baseline is saved by a call in the member's folder, while the target folder is that of
    // the workspace.
    let save = "-- --bench double -- --quick --noplot";
    run("a", &format!("baseline save main --runs 1 {save}")).assert_exit(0);
    assert!(
        outside.folder_path().join("a/baselines").is_dir()
            && outside.folder_path().join("target/kernelgate/runs").is_dir()
    );
    assert_eq!(run("a", "runs --format json").assert_exit(0).json_case_ids(), [in_a]);
    // Run in the workspace root, `gate` finds no baseline, because the baseline belongs to the
    // member package.
    insta::assert_snapshot!(run(".", "gate --baseline main").refusal_message(2), @"error: no baseline `main` for DEVICE in FOLDER/baselines (found none); another package of the workspace has one: call the program there, or name it with --baselines DEVICE/a/baselines");
    // Both workspace members have a bench of the same name, and neither run record replaces the
    // other.
    run(".", &format!("baseline save both --runs 1 {save}")).assert_exit(0);
    let mut recorded = run(".", "runs --format json").assert_exit(0).json_case_ids();
    recorded.sort();
    assert_eq!(recorded, [in_a, in_b]);
    // A relative `CARGO_TARGET_DIR` is relative to the current folder.
    let mut saved =
        outside.kernelgate_command("a/src", &format!("baseline save main --runs 1 {save}"));
    ProcessOutcome::from(saved.env("CARGO_TARGET_DIR", "../odd").output().unwrap()).assert_exit(0);
    assert!(outside.folder_path().join("a/odd/kernelgate/runs").is_dir());
    assert!(!outside.folder_path().join("a/target").exists());
}

#[test]
fn a_bench_that_misbehaves_is_named_and_ended() {
    let outside = FolderOfPackages::new();
    outside.add_package(".", "hostile", &[("evil", HOSTILE_BENCH_SOURCE)]);
    let run = |how: &str, line: &str| -> ProcessOutcome {
        outside.kernelgate_command(".", line).env("HOSTILE", how).output().unwrap().into()
    };
    let mut refusals = String::new();
    for (how, line) in [
        ("garbage", "list"),
        ("old", "list"),
        ("new", "list"),
        ("hang", "list --wait 1s"),
        ("exit", "verify"),
        ("orphan", "list"),
        ("broken", "list"),
        ("", "list"),
    ] {
        let started = std::time::Instant::now();
        let outcome = run(how, line);
        assert!(
            !outcome.stdout_and_stderr().contains('\u{1b}'),
            "an escape code reached the terminal"
        );
        let message = outcome.refusal_message(2);
        refusals += &format!("{how}: {message}\n");
        // kernelgate does not wait for child processes that outlive the bench.
        assert!(started.elapsed().as_secs() < 25, "{how}");
    }
    insta::assert_snapshot!(refusals, @r"
    garbage: left alone: bench `evil`: it does not speak the kernelgate protocol
    error: no bench here can be asked: the lines above say why
    old: left alone: bench `evil`: it does not speak the kernelgate protocol
    error: no bench here can be asked: the lines above say why
    new: left alone: bench `evil`: it speaks versions 40 to 41 of the protocol, this program 1 to 1: update the program
    error: no bench here can be asked: the lines above say why
    hang: error: bench `evil` gave no response within 1 s (--wait sets this)
    exit: I give  up
    error: bench `evil` ended with exit status: 7 and no response; it said last: I give  up
    orphan: error: bench `evil` ended with exit status: 0 and no response
    broken: error: bench `evil`: failed to read FOLDER/response.json: broken or cut short (EOF while parsing a string at line 1 column 27)
    : error: bench `evil` ended with exit status: 0 and no response
    ");
    let flood = run("flood", "list");
    assert!(flood.stderr.len() < 2 << 20, "{} bytes", flood.stderr.len());
    let lines: Vec<&str> = flood.stderr.lines().collect();
    let (ended, _) = lines.last().unwrap().split_once("; it said last: ").unwrap();
    assert_eq!(ended, "error: bench `evil` ended with exit status: 0 and no response");
    let dropped = flood.stderr.lines().filter(|line| line.starts_with('('));
    insta::assert_snapshot!(dropped.collect::<String>(), @"(it prints more than 1048576 bytes: the rest is dropped)");
    let panic = run("panic", "verify");
    assert_eq!(panic.exit_code, Some(2));
    let line = lines_with_word(&panic.stderr, "`evil`");
    let (ended, message) = line.split_once("; it said last: ").unwrap();
    assert_eq!(ended, "error: bench `evil` ended with exit status: 101 and no response");
    assert!(message.contains("panicked"), "{message}");
}

#[test]
fn a_folder_of_executables_is_asked_without_a_build() {
    let outside = FolderOfPackages::new();
    let folder = crate::package::TempPackage::new();
    let dir = folder.bench_folder_flags();
    let run = |line: &str| outside.run_kernelgate(".", &format!("{line} {dir}"));
    let list = run("list");
    // The list does not name combinations of axes and implementations that no machine can run, and
    // every line fits into 100 columns.
    assert!(
        list.assert_exit(0).stdout.lines().all(|line| line.chars().count() <= 100),
        "{}",
        list.stdout
    );
    assert_eq!(run("list --format json").assert_exit(0).json_case_ids().len(), 4);
    // The program itself may lie beside the benches, but it is not a bench.
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    copy_executable(program, folder.package_path("executables/kernelgate"));
    insta::assert_snapshot!(run("list").text_for_snapshot(), @r"
    exit 0
    fixture/spin: squares, then spins for FIXTURE_NS
        axis n  a number: elements
        axis fault  none wrong nan panic reference late idle empty work loud crash input output
                       unlucky endless: what is wrong
        cpu  spins
        cpu/never  supports nothing

    case  work  memory
    fixture/spin/n64_none/cpu/hot  -  N kB
    fixture/spin/n128_none/cpu/hot  -  N kB

    work: of GEMMs, else fewest bytes moved; memory: of the host at the peak;
    GPU memory: as the implementation declares it
    2 cases run here
    2 more combinations are not supported by their implementation: --format json has them
    -- stderr
    left alone: bench `kernelgate`: it is the kernelgate program
    ");
    let mut refusals = String::new();
    for line in [&*format!("list --bench other {dir}"), "list", "compare --base main"] {
        refusals += &format!("{}\n", outside.run_kernelgate(".", line).refusal_message(2));
    }
    insta::assert_snapshot!(refusals, @r"
    error: --bench other: FOLDER/executables has no such executable
    error: no package here: neither FOLDER nor a folder above it has a Cargo.toml; --dir names a folder of bench executables
    error: no package here: neither FOLDER nor a folder above it has a Cargo.toml
    ");
    // Once `cargo bench` has recorded a run beside the program, runs are found there too.
    let doctor = outside.run_kernelgate(".", "doctor");
    insta::assert_snapshot!(lines_with_word(&doctor.assert_exit(0).stdout, "baselines  "), @"baselines  no package here");
}
