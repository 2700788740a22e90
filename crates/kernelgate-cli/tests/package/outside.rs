//! A temporary Cargo package outside this workspace, whose benches take seconds to build.

use std::path::PathBuf;
use std::process::Command;

use tempfile::TempDir;

use super::{ProcessOutcome, copy_executable, rustc_flags_linking_libraries};

/// A temporary Cargo package with its own benches and its own target folder.
pub struct TempCargoPackage {
    folder: TempDir,
}

impl TempCargoPackage {
    /// Makes a temporary package with these benches, each given as name and source.
    pub fn new(benches: &[(&str, &str)]) -> Self {
        let outside = Self { folder: tempfile::tempdir().unwrap() };
        let mut manifest = "[package]\nname = \"outside\"\nversion = \"0.1.0\"\nedition = \
                            \"2024\"\n[lib]\nbench = false\n[profile.bench]\ndebug = false\n"
            .to_owned();
        for (bench, source) in benches {
            manifest += &format!("[[bench]]\nname = \"{bench}\"\n");
            manifest += if *bench == "libtest" { "" } else { "harness = false\n" };
            outside.write_file(&format!("benches/{bench}.rs"), source);
        }
        outside.write_file("Cargo.toml", &manifest);
        outside.write_file("src/lib.rs", "");
        outside
    }

    /// Path of a file or folder of the package.
    pub fn package_path(&self, name: &str) -> PathBuf {
        self.folder.path().canonicalize().unwrap().join(name)
    }

    pub fn write_file(&self, name: &str, text: &str) {
        let path = self.package_path(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// A command in the package, whose builds link the libraries that `cargo test` built.
    pub fn package_command(&self, program: &str, line: &str) -> Command {
        let mut command = Command::new(program);
        command
            .args(line.split_whitespace())
            .current_dir(self.package_path(""))
            .env("CARGO_MANIFEST_DIR", self.package_path(""))
            .env("CARGO_TARGET_DIR", self.package_path("target"))
            .env(
                "CARGO_ENCODED_RUSTFLAGS",
                rustc_flags_linking_libraries(&["criterion", "kernelgate"]),
            )
            .env("RAYON_NUM_THREADS", "1")
            .env("HOSTILE_PID", self.package_path("pid"))
            .env_remove("CRITERION_HOME")
            .env_remove("RUST_BACKTRACE");
        command
    }

    pub fn run_kernelgate(&self, line: &str) -> ProcessOutcome {
        self.package_command(env!("CARGO_BIN_EXE_kernelgate"), line).output().unwrap().into()
    }

    pub fn commit_all_files(&self) {
        for line in ["init --quiet", "add .", "-c user.name=a -c user.email=a@b commit -qm first"] {
            assert!(self.package_command("git", line).status().unwrap().success());
        }
    }

    /// Builds the executable of a bench, and copies it to folders `base` and `head` with a
    /// difference of one byte.
    pub fn build_and_copy_as_base_and_head(&self, bench: &str) {
        let line = format!("bench --no-run --bench {bench} --message-format=json");
        let output = self.package_command(env!("CARGO"), &line).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let from = text.find("\"executable\":\"").unwrap() + 14;
        let built = &text[from..from + text[from..].find('"').unwrap()];
        for side in ["base", "head"] {
            std::fs::create_dir(self.package_path(side)).unwrap();
            copy_executable(built, self.package_path(side).join(bench));
        }
        let head = self.package_path("head").join(bench);
        let longer = [std::fs::read(&head).unwrap(), vec![0]].concat();
        std::fs::write(head, longer).unwrap();
    }
}

/// Whether a process still runs after at most four seconds; its id is in the file `pid`, which a
/// hostile bench wrote. A killed process takes a moment to disappear; a zombie process counts as
/// ended.
pub fn is_hostile_process_alive(outside: &TempCargoPackage) -> bool {
    let pid = std::fs::read_to_string(outside.package_path("pid")).unwrap();
    let runs = || {
        let status = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
        status.is_ok_and(|status| !status.contains(") Z ") && !status.contains(") X "))
    };
    (0..400).all(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        runs()
    })
}
