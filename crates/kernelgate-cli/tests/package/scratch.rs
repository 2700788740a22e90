//! A temporary git repository with one bench that builds in seconds, because it is linked with the
//! library that `cargo test` built.

use std::process::Command;

use tempfile::TempDir;

use super::{ProcessOutcome, rustc_flags_linking_libraries};

/// Cargo.toml of the scratch package.
pub const SCRATCH_CARGO_TOML: &str = r#"
[package]
name = "scratch"
version = "0.1.0"
edition = "2024"
[lib]
bench = false
[[bench]]
name = "spin"
harness = false
[profile.bench]
debug = false
"#;

/// Source of a test bench with one case for each value of `n`; the constant SLEEP_US sets its time.
pub const SCRATCH_BENCH_SOURCE: &str = include_str!("../fixture/scratch_bench.rs");

/// Id of the case.
pub const SCRATCH_CASE_ID: &str = "scratch/sum/n1024/cpu/hot";

/// A temporary git repository with its target folder inside.
pub struct TempRepository {
    pub folder: TempDir,
}

impl TempRepository {
    pub fn new() -> Self {
        let scratch = Self { folder: tempfile::tempdir().unwrap() };
        scratch.write_file("Cargo.toml", SCRATCH_CARGO_TOML);
        scratch.write_file("src/lib.rs", "");
        scratch.write_file("benches/spin.rs", SCRATCH_BENCH_SOURCE);
        scratch.run_git("init --quiet --initial-branch=main");
        scratch.commit_sources("first");
        scratch
    }

    pub fn write_file(&self, name: &str, text: &str) {
        let path = self.folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    pub fn replace_text_in_bench(&self, from: &str, to: &str) {
        assert!(SCRATCH_BENCH_SOURCE.contains(from));
        self.write_file("benches/spin.rs", &SCRATCH_BENCH_SOURCE.replace(from, to));
    }

    pub fn run_git(&self, line: &str) -> String {
        let mut git = Command::new("git");
        git.arg("-C")
            .arg(self.folder.path())
            .args(["-c", "user.name=a", "-c", "user.email=a@b"])
            .args(line.split(' '));
        let output = git.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    pub fn commit_sources(&self, message: &str) {
        self.run_git("add benches src Cargo.toml");
        self.run_git(&format!("commit --quiet -m {message}"));
    }

    /// The kernelgate program, to be run in the test repository.
    pub fn kernelgate_command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kernelgate"));
        command
            .args(line.split_whitespace())
            .current_dir(self.folder.path())
            .env("CARGO_MANIFEST_DIR", self.folder.path())
            .env("CARGO_TARGET_DIR", self.folder.path().join("target"))
            .env(
                "CARGO_ENCODED_RUSTFLAGS",
                rustc_flags_linking_libraries(&["kernelgate", "kernelgate_cuda"]),
            )
            // Each thread allows a launch with new inputs 0.2 ms more processor time than the next.
            .env("RAYON_NUM_THREADS", "8")
            .env_remove("RUST_BACKTRACE");
        command
    }

    /// A comparison with thresholds far above the noise. The bench processes sleep and are too
    /// short for a measurement of CPU contention, which would ask for more processes while other
    /// tests run.
    pub fn compare_command_above_noise(&self, flags: &str) -> Command {
        let usual = "compare --relative 2 --tolerated 4 --backend cpu --time-identical";
        let time = if flags.contains("--case-time") { "" } else { "--case-time 0.01s" };
        let blocks = if flags.contains("--max-blocks") { "" } else { "--max-blocks 24" };
        self.kernelgate_command(&format!("{usual} {time} {blocks} {flags}"))
    }

    /// Runs a comparison with thresholds far above the noise.
    pub fn run_comparison(&self, flags: &str) -> ProcessOutcome {
        run_until_load_allows_verdict(|| self.compare_command_above_noise(flags))
    }
}

/// Outcome of a command that judges by measured times. If other load leaves the command's verdict
/// open, the command runs again, up to four times in all.
pub fn run_until_load_allows_verdict(command: impl Fn() -> Command) -> ProcessOutcome {
    let by_load = regex::Regex::new(
        r#""kind": ?"(wide|contention|not_confirmed)"|"(no_difference|ends_undecided)"|not confirmed by a second|co-running processes took more"#,
    )
    .unwrap();
    let run = || ProcessOutcome::from(command().output().unwrap());
    let is_decided =
        |it: &ProcessOutcome| it.exit_code != Some(3) || !by_load.is_match(&it.stdout_and_stderr());
    (1..4).map(|_| run()).find(is_decided).unwrap_or_else(run)
}
