//! Common parts of the tests that run the program as a process: a package folder, its bench
//! processes and its records.

#![allow(dead_code)]

pub mod outcome;
pub mod outside;
pub mod scratch;
#[cfg(unix)]
pub mod toy;

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

pub use outcome::ProcessOutcome;

/// A package folder of its own, with its target folder inside.
pub struct TempPackage {
    pub folder: TempDir,
}

/// Copies an executable that a test starts. The copy is made by another process: while a thread of
/// this process writes a file, a process that another thread starts inherits the open file, and the
/// copy cannot be executed until that process has replaced itself ("Text file busy").
pub fn copy_executable(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let status = Command::new("cp").arg(from.as_ref()).arg(to.as_ref()).status();
    assert!(status.unwrap().success());
}

/// Lines of a text that hold a word, without the spaces around them.
pub fn lines_with_word(text: &str, word: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|it| it.contains(word)).map(str::trim).collect();
    lines.join("\n")
}

/// Texts of the elements of a page that hold these words.
pub fn html_elements_with_words(page: &str, words: &str) -> String {
    let texts = page.split('<').filter_map(|tag| tag.split_once('>')).map(|(_, text)| text.trim());
    texts.filter(|text| text.contains(words)).collect::<Vec<_>>().join("\n")
}

/// The fixture's bench binary; `cargo test` builds it as an example.
pub fn fixture_path() -> PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_kernelgate"));
    let path = program
        .parent()
        .unwrap()
        .join("examples")
        .join(format!("fixture{}", std::env::consts::EXE_SUFFIX));
    assert!(
        path.is_file(),
        "{} is missing: run the whole `cargo test`, or `cargo build --example fixture` first",
        path.display()
    );
    path
}

/// Flags of rustc, as `CARGO_ENCODED_RUSTFLAGS` takes them, that link a package with the library
/// that `cargo test` built.
pub fn rustc_flags_linking_kernelgate() -> String {
    rustc_flags_linking_libraries(&["kernelgate"])
}

/// Flags as [`rustc_flags_linking_kernelgate`] gives them, for libraries that `cargo test` built.
/// These flags make builds quick: rustc optimises little, in one thread, so that the other core is
/// free for concurrent tests.
pub fn rustc_flags_linking_libraries(libraries: &[&str]) -> String {
    let deps = Path::new(env!("CARGO_BIN_EXE_kernelgate")).parent().unwrap().join("deps");
    let mut flags = vec!["-L".to_owned(), format!("dependency={}", deps.display())];
    flags.extend(["-Copt-level=1", "-Ccodegen-units=1", "-Cstrip=symbols"].map(str::to_owned));
    for name in libraries {
        let prefix = format!("lib{name}-");
        let built =
            std::fs::read_dir(&deps).unwrap().flatten().map(|entry| entry.path()).filter(|path| {
                let file = path.file_name().unwrap().to_string_lossy().into_owned();
                file.starts_with(&prefix) && file.ends_with(".rlib")
            });
        let library =
            built.max_by_key(|path| path.metadata().unwrap().modified().unwrap()).unwrap();
        flags.extend(["--extern".to_owned(), format!("{name}={}", library.display())]);
    }
    flags.join("\u{1f}")
}

impl TempPackage {
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    pub fn package_path(&self, relative: &str) -> PathBuf {
        self.folder.path().join(relative)
    }

    pub fn package_command(&self, program: &Path, line: &str) -> Command {
        let mut command = Command::new(program);
        command
            .args(line.split_whitespace())
            .current_dir(self.folder.path())
            .env("CARGO_MANIFEST_DIR", self.folder.path())
            .env("CARGO_TARGET_DIR", self.package_path("target"))
            .env_remove("RUST_BACKTRACE")
            .env_remove("CRITERION_HOME");
        command
    }

    pub fn bench_command(&self, session: &str, line: &str) -> Command {
        let mut command = self
            .package_command(&fixture_path(), &format!("--bench {BRIEF_CRITERION_FLAGS} {line}"));
        command.env("KERNELGATE_SESSION", session);
        command
    }

    pub fn run_fixture_bench(&self, session: &str, line: &str) -> ProcessOutcome {
        self.bench_command(session, line).output().unwrap().into()
    }

    pub fn run_kernelgate(&self, line: &str) -> ProcessOutcome {
        self.package_command(Path::new(env!("CARGO_BIN_EXE_kernelgate")), line)
            .output()
            .unwrap()
            .into()
    }

    /// Judges the last run by the baseline that the line begins with. The gate's report is printed
    /// as JSON.
    pub fn gate_last_run(&self, line: &str) -> ProcessOutcome {
        self.run_kernelgate(&format!("gate --format json --baseline {line}"))
    }

    /// Flags that name a folder with the fixture's bench binary alone.
    pub fn bench_folder_flags(&self) -> String {
        let folder = self.package_path("executables");
        std::fs::create_dir_all(&folder).unwrap();
        let at = folder.join(format!("fixture{}", std::env::consts::EXE_SUFFIX));
        if !at.exists() {
            copy_executable(fixture_path(), &at);
        }
        format!("--dir {}", folder.display())
    }

    /// Writes the package's `kernelgate.toml`.
    pub fn write_rules_file(&self, text: &str) {
        std::fs::write(self.package_path("kernelgate.toml"), text).unwrap();
    }

    /// Path of the only baseline file of this name in the test package.
    pub fn baseline_path(&self, name: &str) -> PathBuf {
        let mut devices = std::fs::read_dir(self.package_path("baselines")).unwrap();
        let path = devices.next().unwrap().unwrap().path().join(format!("{name}.json"));
        assert!(devices.next().is_none() && path.is_file());
        path
    }

    /// Sets all times in a record to `time_ns`, so that the gate's output does not depend on the
    /// load of the machine.
    pub fn set_record_times(&self, record: &Path, time_ns: f64) {
        self.set_case_times(record, "", time_ns);
    }

    /// Replaces the times of the cases whose id contains a text.
    pub fn set_case_times(&self, record: &Path, case: &str, time_ns: f64) {
        fn set_times_in_json(value: &mut serde_json::Value, time_ns: f64) {
            if let Some(samples) =
                value.get("launches").and_then(|launches| launches.as_array()).cloned()
            {
                let times = samples.iter().enumerate().map(|(i, launches)| {
                    let wobble = 1.0 + 0.001 * (i as f64 - 4.5);
                    (launches.as_f64().unwrap() * time_ns * wobble).into()
                });
                value["elapsed_ns"] = times.collect::<Vec<serde_json::Value>>().into();
                if let Some(conditions) = value.get_mut("conditions") {
                    conditions.as_object_mut().unwrap().remove("contention");
                }
            } else if value.get("same").is_some() {
                // A baseline file has no samples, and stores the runs of a case as columns.
                for name in ["median_ns", "spread", "conditions.contention"] {
                    value["each"].as_object_mut().unwrap().remove(name);
                }
                let same = value["same"].as_object_mut().unwrap();
                same.remove("conditions.contention");
                same.insert("median_ns".to_owned(), time_ns.into());
                same.insert("spread".to_owned(), 0.002.into());
            } else if let Some(fields) = value.as_object_mut() {
                fields.values_mut().for_each(|field| set_times_in_json(field, time_ns));
            }
        }
        let mut record_value: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(record).unwrap()).unwrap();
        let cases = record_value["cases"].as_object_mut().unwrap().iter_mut();
        cases
            .filter(|(id, _)| id.contains(case))
            .for_each(|(_, value)| set_times_in_json(value, time_ns));
        record_value.as_object_mut().unwrap().remove("checksum");
        std::fs::write(record, record_value.to_string()).unwrap();
    }

    pub fn run_record_path(&self, session: &str) -> PathBuf {
        self.package_path(&format!("target/kernelgate/runs/{session}/fixture.json"))
    }

    pub fn read_run_record(&self, session: &str) -> serde_json::Value {
        let text = std::fs::read_to_string(self.run_record_path(session)).unwrap();
        serde_json::from_str(&text).unwrap()
    }
}

/// Flags of a run that spends as little time as possible on each case. A development build takes
/// longer for Criterion's usual number of resamples than for the samples.
pub const BRIEF_CRITERION_FLAGS: &str = "--noplot --warm-up-time 0.005 --measurement-time 0.01 --sample-size 10 \
                         --nresamples 100";

/// A case that the fixture measures by default.
pub const FIXTURE_CASE_ID: &str = "fixture/spin/n64_none/cpu/hot";
