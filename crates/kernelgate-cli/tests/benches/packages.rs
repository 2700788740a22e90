//! The verbs in packages of others: one with workloads of its own, workspaces, and benches that do
//! everything wrong.
//!
//! Benches are linked with the library that `cargo test` built, so that a build takes seconds.

#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::package::{Outcome, copy_executable, lines_with, rustflags};
use tempfile::TempDir;

const MANIFEST: &str =
    "[package]\nname = \"NAME\"\nversion = \"0.1.0\"\nedition = \"2024\"\n[lib]\nbench = false\n";

/// A bench with a workload of that name, whose cases take microseconds.
const BENCH: &str = r#"
use std::process::ExitCode;
use kernelgate::prelude::*;

struct Double { n: usize }

impl Problem for Double {
    fn inputs(&self, seed: u64) -> Tensors {
        Tensors::new().with("x", [1, self.n], random::normal_values(seed, "x", self.n))
    }
    fn reference(&self, inputs: &Tensors) -> Vec<Expected> {
        let y: Vec<f64> = inputs.f32("x").iter().map(|&x| 2.0 * f64::from(x)).collect();
        vec![Expected::all("y", [1, self.n], y)]
    }
    fn work(&self) -> Work { Work::bytes(4 * self.n as u64, 4 * self.n as u64) }
    fn tolerance(&self) -> Tolerance { Tolerance { max_error: 1e-6, relative_l2: 1e-6 } }
    fn host_bytes(&self) -> u64 { self.n as u64 * 16 }
}

const DOUBLE: Workload<Double> = Workload {
    name: "WORKLOAD", about: "y = 2 x", revision: 1,
    axes: &[Axis::number("n", "elements")],
    default: &["n=1024"], accelerator: &[], thorough: &["n=512"],
    bind: |point| Ok(Double { n: point.number("n")? }),
};

const ROWS: &[Implementation<Double>] = &[Implementation {
    name: "cpu", about: "doubles", supports: |_| Ok(()),
    prepare: Prepare::Cpu(|problem, inputs| {
        let outputs = Tensors::new().with_output("y", [1, problem.n], Dtype::F32);
        CpuTask::new(inputs, outputs, |inputs, outputs| {
            outputs.f32_mut("y").iter_mut().zip(inputs.f32("x")).for_each(|(y, x)| *y = FACTOR * x);
        })
    }),
}];

fn main() -> ExitCode { Harness::new("BENCH", vec![join_rows(&DOUBLE, ROWS)]).main() }
"#;

/// A bench that looks like one of this harness, and behaves as the variable HOSTILE says.
const HOSTILE: &str = r#"
fn main() {
    kernelgate::protocol::keep_executable_mark();
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

struct Outside {
    folder: TempDir,
}

impl Outside {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().canonicalize().unwrap()
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// Makes a package in a folder with these benches, given as names and sources.
    fn package(&self, folder: &str, name: &str, benches: &[(&str, &str)]) {
        let mut manifest = MANIFEST.replace("NAME", name);
        for (bench, source) in benches {
            manifest += &format!("[[bench]]\nname = \"{bench}\"\nharness = false\n");
            self.write(&format!("{folder}/benches/{bench}.rs"), source);
        }
        self.write(&format!("{folder}/Cargo.toml"), &manifest);
        self.write(&format!("{folder}/src/lib.rs"), "");
    }

    fn command(&self, folder: &str, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kernelgate"));
        command
            .args(line.split_whitespace())
            .current_dir(self.path().join(folder))
            .env("CARGO_ENCODED_RUSTFLAGS", rustflags())
            .env("RAYON_NUM_THREADS", "1")
            .env("KERNELGATE_BACKEND", "cpu")
            .env_remove("CARGO_MANIFEST_DIR")
            .env_remove("CARGO_TARGET_DIR")
            .env_remove("CRITERION_HOME")
            .env_remove("RUST_BACKTRACE");
        command
    }

    fn run(&self, folder: &str, line: &str) -> Outcome {
        self.command(folder, line).output().unwrap().into()
    }
}

/// The source of a bench with a workload of that name.
fn bench(name: &str, workload: &str) -> String {
    BENCH.replace("BENCH", name).replace("WORKLOAD", workload).replace("FACTOR", "2.0")
}

#[test]
fn every_verb_works_on_somebody_elses_workload() {
    let outside = Outside::new();
    let plain = "fn main() { println!(\"a bench of another kind\"); }";
    let (one, two) = (bench("one", "mine/double"), bench("two", "mine/other"));
    outside.package(".", "mine", &[("one", &one), ("two", &two), ("plain", plain)]);
    let run = |line: &str| outside.run(".", line);

    let alone = "left alone: bench `plain`: it does not use kernelgate";
    run("list").expect(
        0,
        &[
            "mine/double: y = 2 x",
            "mine/double/n1024/cpu/hot",
            "mine/other/n1024/cpu/hot",
            "2 cases run here",
            alone,
        ],
    );
    let list = run("list double --format json");
    list.expect(0, &["\"bench\": \"one\"", "\"status\": \"runs here\""]);
    assert!(!list.stdout.contains("mine/other"), "{}", list.stdout);
    // This case is not among the defaults.
    run("list n512").expect(0, &["mine/double/n512/cpu/hot"]);
    run("list doubel").expect(2, &["no case matches `doubel`", "double"]);
    run("list (").expect(2, &["not a regular expression"]);
    run("list --axis zz=1").expect(2, &["no workload has an axis `zz`"]);
    run("list --bench nosuch").expect(2, &["nosuch"]);
    run("list --bench plain").expect(2, &["does not use kernelgate", "no bench here can be asked"]);

    run("verify").expect(0, &["mine/double/n1024/cpu/hot", "2 ok, 0 failed, 0 skipped", "yes"]);
    run("verify double --bench one --dump dumped").expect(0, &["1 ok"]);
    let dump = outside.path().join("dumped");
    assert!(dump.join("mine_double_n1024_cpu_hot.safetensors").is_file());
    assert_eq!(std::fs::read_dir(&dump).unwrap().count(), 1, "nothing else is left there");
    let profile = run("profile --format json");
    profile.expect(0, &[]);
    let json: serde_json::Value = serde_json::from_str(&profile.stdout).unwrap();
    let phases = json[0]["phases"].as_array().unwrap();
    let names: Vec<&str> = phases.iter().map(|phase| phase["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["prepare", "first launch", "launch", "outputs"]);
    assert!(phases[2]["count"].as_u64().unwrap() >= 3 && json[0]["summary"].is_null());
    run("profile").expect(0, &["first launch", "threads busy", "wall time of the host"]);
    if kernelgate_cuda::driver::device::gpu_count().is_err() {
        run("timing").expect(2, &["GPU"]);
    }
    run("resources").expect(2, &["no bench lists a kernel"]);
    let none = run("resources --arch sm_9999");
    none.expect(2, &["such as sm_90a, not `sm_9999`"]);
    assert!(!none.stderr.contains("Finished"), "nothing is built for it: {}", none.stderr);

    let quick = "-- --bench one -- --quick --noplot";
    run(&format!("baseline save main --runs 2 {quick}")).expect(0, &["1 case, 2 runs each"]);
    run("baseline find main").expect(0, &["main.json"]);
    assert!(outside.path().join("baselines").is_dir(), "baselines are the package's");
    run("baseline find other").expect(2, &["no baseline `other`"]);
    let wrong = run("baseline find ../main");
    wrong.expect(2, &["`../main`"]);
    assert!(!wrong.stderr.contains("Finished"), "nothing is built for it: {}", wrong.stderr);
    let gate = run("gate --baseline main");
    gate.expect(gate.code.unwrap(), &["mine/double/n1024/cpu/hot"]);
    run("runs").expect(0, &["mine/double/n1024\n", "cpu/hot"]);
    run("peers").expect(2, &["no hot GPU case"]);
    let mut cargo = Command::new(env!("CARGO_BIN_EXE_cargo-kernelgate"));
    let environment = outside.command(".", "");
    cargo.args(["kernelgate", "list", "--bench", "one"]).current_dir(outside.path());
    cargo.envs(environment.get_envs().filter_map(|(name, value)| Some((name, value?))));
    Outcome::from(cargo.output().unwrap()).expect(0, &["mine/double/n1024/cpu/hot"]);

    // The outputs are wrong and the case is slower: the verdict is that of verification.
    outside.write("benches/two.rs", &two.replace("2.0 * x", "2.5 * x"));
    run("verify --format markdown")
        .expect(1, &["1 ok, 1 failed", "FAILED mine/other/n1024/cpu/hot"]);
    outside.write("benches/two.rs", "fn main() { mistake");
    run("list").expect(2, &["error: the package does not build", "mistake"]);
}

#[test]
fn a_workspace_has_its_members_verbs_and_one_target_folder() {
    let outside = Outside::new();
    outside.write(
        "Cargo.toml",
        "[workspace]\nmembers = [\"a\", \"b\", \"empty\"]\nresolver = \"3\"\n",
    );
    outside.package("a", "a", &[("double", &bench("double", "a/double"))]);
    outside.package("b", "b", &[("double", &bench("double", "b/double"))]);
    outside.package("empty", "empty", &[]);
    outside.run(".", "list").expect(0, &["a/double/n1024/cpu/hot", "b/double/n1024/cpu/hot"]);
    let one = outside.run(".", "list --package b");
    one.expect(0, &["b/double/n1024/cpu/hot"]);
    assert!(!one.stdout.contains("a/double"), "{}", one.stdout);
    outside.run("a/src", "verify").expect(0, &["a/double/n1024/cpu/hot", "1 ok"]);
    outside.run("empty", "list").expect(2, &["there is no bench"]);
    outside.run(".", "list --package nosuch").expect(2, &["nosuch"]);
    // Run in the member, with the workspace's target folder.
    outside
        .run("a", "baseline save main --runs 1 -- --bench double -- --quick --noplot")
        .expect(0, &["1 case"]);
    assert!(
        outside.path().join("a/baselines").is_dir()
            && outside.path().join("target/kernelgate/runs").is_dir()
    );
    outside.run("a", "runs").expect(0, &["a/double/n1024\n", "cpu/hot"]);
    // Run in the root: the baseline is the member's.
    outside.run(".", "gate --baseline main").expect(
        2,
        &["no baseline `main`", "another package of the workspace has one", "a/baselines"],
    );
    // A relative target folder is relative to the current folder.
    let mut save =
        outside.command("a/src", "baseline save main --runs 1 -- --bench double -- --quick");
    let saved: Outcome = save.env("CARGO_TARGET_DIR", "../odd").output().unwrap().into();
    saved.expect(0, &["1 case"]);
    assert!(outside.path().join("a/odd/kernelgate/runs").is_dir());
    assert!(!outside.path().join("a/target").exists());
    // Both members have a bench of that name: neither record replaces the other.
    outside
        .run(".", "baseline save both --runs 1 -- --bench double -- --quick --noplot")
        .expect(0, &["2 cases, 1 runs each"]);
    outside.run(".", "runs").expect(0, &["a/double/n1024\n", "b/double/n1024\n", "cpu/hot"]);
}

#[test]
fn a_bench_that_misbehaves_is_named_and_ended() {
    let outside = Outside::new();
    outside.package(".", "hostile", &[("evil", HOSTILE)]);
    let run = |how: &str, line: &str| -> Outcome {
        outside.command(".", line).env("HOSTILE", how).output().unwrap().into()
    };
    let other = "left alone: bench `evil`: it does not speak the kernelgate protocol";
    run("garbage", "list").expect(2, &[other]);
    run("old", "list").expect(2, &[other]);
    run("new", "list")
        .expect(2, &["speaks versions 40 to 41", "this program 1 to 1", "update the program"]);
    let started = std::time::Instant::now();
    run("hang", "list --wait 1s")
        .expect(2, &["bench `evil` gave no response within 1 s", "--wait"]);
    assert!(started.elapsed().as_secs() < 60);
    let flood = run("flood", "list");
    flood.expect(
        2,
        &["bench `evil` ended with exit status: 0 and no response", "the rest is dropped"],
    );
    assert!(flood.stderr.len() < 2 << 20, "{} bytes", flood.stderr.len());
    let exit = run("exit", "verify");
    exit.expect(
        2,
        &["bench `evil` ended with exit status: 7 and no response; it said last: I give", "up"],
    );
    assert!(!exit.stderr.contains('\u{1b}'), "an escape code reached the terminal");
    let panic: Outcome =
        outside.command(".", "verify").env("HOSTILE", "panic").output().unwrap().into();
    assert_eq!(panic.code, Some(2));
    assert!(panic.stderr.contains("on purpose"), "{}", panic.stderr);
    let line = lines_with(&panic.stderr, "`evil`");
    let (ended, _) = line.split_once("; it said last: ").unwrap();
    assert_eq!(ended, "error: bench `evil` ended with exit status: 101 and no response");
    let started = std::time::Instant::now();
    run("orphan", "list").expect(2, &["ended with exit status: 0 and no response"]);
    assert!(started.elapsed().as_secs() < 25, "what the bench left behind is not waited for");
    run("broken", "list").expect(2, &["bench `evil`: failed to read", "broken or cut short"]);
    run("", "list").expect(2, &["no response"]);
}

#[test]
fn a_folder_of_executables_is_asked_without_a_build() {
    let outside = Outside::new();
    let folder = crate::package::Package::new();
    let dir = folder.dir();
    let run = |line: &str| outside.run(".", &format!("{line} {dir}"));
    let list = run("list");
    list.expect(0, &["fixture/spin/n64_none/cpu/hot", "2 more combinations"]);
    // A combination that no machine can run is not listed as a skip, and every line fits.
    assert!(!list.stdout.contains("cpu/never/hot"), "{}", list.stdout);
    assert!(list.stdout.lines().all(|line| line.chars().count() <= 100), "{}", list.stdout);
    run("list --format json").expect(0, &["fixture/spin/n64_none/cpu/never/hot"]);
    run("verify --axis fault=wrong --axis n=64").expect(1, &["1 failed"]);
    run("list --bench other").expect(2, &["--bench other", "no such executable"]);
    // The program itself may lie beside the benches, but it is not a bench.
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    copy_executable(program, folder.path("executables/kernelgate"));
    run("list").expect(0, &["left alone: bench `kernelgate`: it is the kernelgate program"]);
    outside.run(".", "list").expect(2, &["no package here", "--dir names"]);
    outside.run(".", "compare --base main").expect(2, &["no package here", "Cargo.toml"]);
    let doctor = outside.run(".", "doctor");
    doctor.expect(0, &["baselines  no package here", "runs       no package here"]);
    outside.run(".", "list --dir nowhere").expect(2, &["failed to read nowhere"]);
}
