//! Finds the bench executables that a kernelgate command uses: cargo builds them in the current
//! folder, or they lie prebuilt in a given folder.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use kernelgate::protocol;

use super::cargo::{self, BenchBuildTargets, BenchExecutable, CargoBuildError, CargoStderrLine};
use super::child_process::SharedChildProcess;
use super::harness_kind::{self, BenchHarnessKind};
use super::prebuilt::prebuilt_benches_in_folder;
use super::{package, versions};

/// The user's choice of bench executables on the command line of kernelgate: bench targets to
/// build, or a folder of prebuilt executables.
#[derive(Debug, Clone, Copy)]
pub struct BenchTargetsOrFolder<'a> {
    /// Bench targets that cargo builds, or whose executables are selected in the folder.
    pub targets: BenchBuildTargets<'a>,
    /// Folder with prebuilt bench executables; `None` makes cargo build them.
    pub prebuilt_folder: Option<&'a Path>,
}

/// The bench executables that kernelgate can use, and those that it cannot use, with the reasons.
#[derive(Debug, Clone, Default)]
pub struct UsableAndUnusableBenches {
    /// Bench executables that speak kernelgate's bench protocol, sorted by package folder and bench
    /// name.
    pub usable_executables: Vec<BenchExecutable>,
    /// Names of bench executables that kernelgate does not run, with the reasons.
    pub unusable_benches_with_reason: Vec<(String, String)>,
}

impl BenchTargetsOrFolder<'_> {
    /// Builds the benches with cargo, or lists the prebuilt ones, and asks each executable which
    /// versions of kernelgate's bench protocol it speaks. Prebuilt executables run in the folder
    /// `root`; Ctrl-C ends the build through `running`; an executable that does not answer within
    /// `timeout` counts as hung.
    pub fn find_kernelgate_benches(
        self,
        root: &Path,
        timeout: Duration,
        running: &SharedChildProcess,
    ) -> anyhow::Result<UsableAndUnusableBenches> {
        let mut candidates = match self.prebuilt_folder {
            Some(folder) => self.find_prebuilt_benches(folder, root)?,
            None => self.build_benches_with_cargo(running)?,
        };
        anyhow::ensure!(
            !candidates.is_empty(),
            "there is no bench: `[[bench]]` with `harness = false` in Cargo.toml makes one"
        );
        // The bench executables are sorted, because cargo reports them in the order in which their
        // builds finished.
        candidates.sort_by(|a, b| {
            (&a.package_root, &a.bench_name).cmp(&(&b.package_root, &b.bench_name))
        });
        let mut found = UsableAndUnusableBenches::default();
        for executable in candidates {
            match check_kernelgate_bench(&executable, running, timeout) {
                Ok(()) => found.usable_executables.push(executable),
                Err(why) => found.unusable_benches_with_reason.push((executable.bench_name, why)),
            }
        }
        found
            .unusable_benches_with_reason
            .iter()
            .for_each(|(bench, why)| eprintln!("left alone: bench `{bench}`: {why}"));
        let is_left_alone =
            |name: &&String| found.unusable_benches_with_reason.iter().any(|(it, _)| it == *name);
        let named = self.targets.bench_names.iter().find(is_left_alone);
        anyhow::ensure!(
            named.is_none() && !found.usable_executables.is_empty(),
            "no bench here can be asked: the lines above say why"
        );
        Ok(found)
    }

    #[expect(clippy::disallowed_methods, reason = "cargo builds in the working folder")]
    fn build_benches_with_cargo(
        self,
        running: &SharedChildProcess,
    ) -> anyhow::Result<Vec<BenchExecutable>> {
        let here = std::env::current_dir().context("failed to find the working folder")?;
        anyhow::ensure!(
            package::is_in_a_cargo_package(&here),
            "{}; --dir names a folder of bench executables",
            package::not_in_a_package_message(&here)
        );
        let mut command = cargo::cargo_bench_build_command(self.targets);
        let show = |line: CargoStderrLine<'_>| {
            if let CargoStderrLine::MessageForUser(text) = line {
                eprintln!("{}", kernelgate::record::text::clean_message_for_terminal(text));
            }
        };
        cargo::run_cargo_bench_build(&mut command, (running, cargo::MAX_CARGO_BUILD_DURATION), show)
            .map(|built| built.benches)
            .map_err(|error| {
                match error {
                    // The error about a failed build does not repeat cargo's messages, because
                    // kernelgate already printed these while cargo ran.
                    CargoBuildError::BuildFailed(_) => {
                        anyhow::anyhow!("the package does not build")
                    }
                    other => anyhow::anyhow!("the package {other}"),
                }
            })
    }

    fn find_prebuilt_benches(
        self,
        folder: &Path,
        root: &Path,
    ) -> anyhow::Result<Vec<BenchExecutable>> {
        let named = self.targets.bench_names;
        let folder = folder
            .canonicalize()
            .with_context(|| format!("failed to read {}", folder.display()))?;
        let found = prebuilt_benches_in_folder(&folder)
            .with_context(|| format!("failed to read {}", folder.display()))?;
        for name in named {
            anyhow::ensure!(
                found.contains_key(name),
                "--bench {name}: {} has no such executable",
                folder.display()
            );
        }
        let is_selected = |name: &String| named.is_empty() || named.contains(name);
        let executable = |(bench, path): (String, PathBuf)| BenchExecutable {
            bench_name: bench,
            executable_path: path,
            package_root: root.to_owned(),
        };
        Ok(found.into_iter().filter(|(name, _)| is_selected(name)).map(executable).collect())
    }
}

/// Checks that an executable uses kernelgate's harness and speaks a version of kernelgate's bench
/// protocol that this program knows. The check runs the executable only if its file contains the
/// mark of kernelgate's harness.
fn check_kernelgate_bench(
    executable: &BenchExecutable,
    running: &SharedChildProcess,
    timeout: Duration,
) -> Result<(), String> {
    match harness_kind::harness_kind_of_file(&executable.executable_path) {
        Ok(BenchHarnessKind::Kernelgate) => {}
        Ok(BenchHarnessKind::CriterionOnly) => {
            let so = "it does not use kernelgate, but Criterion alone: `compare` and \
                          `calibrate` measure it";
            return Err(so.to_owned());
        }
        Ok(_) => return Err("it does not use kernelgate".to_owned()),
        Err(cause) => return Err(format!("its file cannot be read ({cause})")),
    }
    let (oldest, newest) =
        versions::query_bench_protocol_versions(&executable.executable_path, timeout, running)
            .map_err(|why| why.to_string())?;
    match protocol::newest_common_protocol_version((oldest, newest)) {
        Some(_) => Ok(()),
        None => Err(format!(
            "it speaks versions {oldest} to {newest} of the protocol, this program {} to {}: \
                 update the program",
            protocol::SUPPORTED_PROTOCOL_VERSIONS.0,
            protocol::SUPPORTED_PROTOCOL_VERSIONS.1
        )),
    }
}
