//! Finds the bench executables that a command runs: those that cargo builds in the current folder,
//! or those in a given folder.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use kernelgate::protocol;

use super::cargo::{self, BenchExecutable, BuildError, BuildTargets, CargoBuildOutput};
use super::child_process::ChildProcess;
use super::harness_kind::{self, BenchHarnessKind};
use super::prebuilt::prebuilt_benches;
use super::{package, versions};

/// The bench executables that a verb uses, by the flags of its command line.
#[derive(Debug, Clone, Copy)]
pub struct BenchChoice<'a> {
    /// Bench targets to build, or to select in a folder.
    pub targets: BuildTargets<'a>,
    /// Folder with bench executables, in place of a build.
    pub folder: Option<&'a Path>,
}

/// The bench executables that were found, and those that cannot be used.
#[derive(Debug, Clone, Default)]
pub struct FoundBenches {
    /// Executables that can be asked, by name of the bench.
    pub executables: Vec<BenchExecutable>,
    /// Names of executables that are not run, with the reasons.
    pub left_alone: Vec<(String, String)>,
}

impl BenchChoice<'_> {
    /// Builds the benches, or lists the folder, and asks each executable for its versions.
    /// Executables of a folder run in `root`; an interrupt ends the build through `running`, and an
    /// executable that gives no answer within `timeout` counts as hung.
    pub fn find_benches(
        self,
        root: &Path,
        timeout: Duration,
        running: &ChildProcess,
    ) -> anyhow::Result<FoundBenches> {
        let mut candidates = match self.folder {
            Some(folder) => self.find_in_folder(folder, root)?,
            None => self.build_benches(running)?,
        };
        anyhow::ensure!(
            !candidates.is_empty(),
            "there is no bench: `[[bench]]` with `harness = false` in Cargo.toml makes one"
        );
        // The candidates are sorted, because cargo reports executables in the order in which they
        // were ready.
        candidates.sort_by(|a, b| (&a.root, &a.bench).cmp(&(&b.root, &b.bench)));
        let mut found = FoundBenches::default();
        for executable in candidates {
            match check_bench_mark(&executable, running, timeout) {
                Ok(()) => found.executables.push(executable),
                Err(why) => found.left_alone.push((executable.bench, why)),
            }
        }
        found
            .left_alone
            .iter()
            .for_each(|(bench, why)| eprintln!("left alone: bench `{bench}`: {why}"));
        let is_left_alone = |name: &&String| found.left_alone.iter().any(|(it, _)| it == *name);
        let named = self.targets.benches.iter().find(is_left_alone);
        anyhow::ensure!(
            named.is_none() && !found.executables.is_empty(),
            "no bench here can be asked: the lines above say why"
        );
        Ok(found)
    }

    #[expect(clippy::disallowed_methods, reason = "cargo builds in the working folder")]
    fn build_benches(self, running: &ChildProcess) -> anyhow::Result<Vec<BenchExecutable>> {
        let here = std::env::current_dir().context("failed to find the working folder")?;
        anyhow::ensure!(
            package::has_manifest(&here),
            "{}; --dir names a folder of bench executables",
            package::no_package_message(&here)
        );
        let mut command = cargo::cargo_bench_command(self.targets);
        let show = |line: CargoBuildOutput<'_>| {
            if let CargoBuildOutput::Message(text) = line {
                eprintln!("{}", kernelgate::record::text::printable_on_terminal(text));
            }
        };
        cargo::run_cargo_build(&mut command, (running, cargo::BUILD_TIMEOUT), show)
            .map(|built| built.benches)
            .map_err(|error| {
                match error {
                    // The error does not repeat cargo's messages, which were printed while cargo
                    // ran.
                    BuildError::Failed(_) => anyhow::anyhow!("the package does not build"),
                    other => anyhow::anyhow!("the package {other}"),
                }
            })
    }

    fn find_in_folder(self, folder: &Path, root: &Path) -> anyhow::Result<Vec<BenchExecutable>> {
        let named = self.targets.benches;
        let folder = folder
            .canonicalize()
            .with_context(|| format!("failed to read {}", folder.display()))?;
        let found = prebuilt_benches(&folder)
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
            bench,
            path,
            root: root.to_owned(),
        };
        Ok(found.into_iter().filter(|(name, _)| is_selected(name)).map(executable).collect())
    }
}

/// Checks by its mark that an executable is a bench of kernelgate, which may be started with a
/// request. The check runs the executable, so only a file with a harness's mark is checked.
fn check_bench_mark(
    executable: &BenchExecutable,
    running: &ChildProcess,
    timeout: Duration,
) -> Result<(), String> {
    match harness_kind::harness_kind_of_file(&executable.path) {
        Ok(BenchHarnessKind::Ours) => {}
        Ok(BenchHarnessKind::Criterion) => {
            let so = "it does not use kernelgate, but Criterion alone: `compare` and \
                          `calibrate` measure it";
            return Err(so.to_owned());
        }
        Ok(_) => return Err("it does not use kernelgate".to_owned()),
        Err(cause) => return Err(format!("its file cannot be read ({cause})")),
    }
    let (oldest, newest) = versions::ask_version_range(&executable.path, timeout, running)
        .map_err(|why| why.to_string())?;
    match protocol::newest_common_version((oldest, newest)) {
        Some(_) => Ok(()),
        None => Err(format!(
            "it speaks versions {oldest} to {newest} of the protocol, this program {} to {}: \
                 update the program",
            protocol::SUPPORTED_VERSIONS.0,
            protocol::SUPPORTED_VERSIONS.1
        )),
    }
}
