//! Command-line flags that select bench executables, for every kernelgate verb that starts bench
//! processes.

use std::path::{Path, PathBuf};

use crate::benches::cargo::BenchBuildTargets;
use crate::benches::child_process::SharedChildProcess;
use crate::benches::find::{BenchTargetsOrFolder, UsableAndUnusableBenches};
use crate::benches::versions;

/// Flags that choose benches.
#[derive(Debug, Clone, clap::Args)]
pub struct BenchExecutableFlags {
    /// Use only this bench binary (repeatable)
    #[arg(long, value_name = "NAME")]
    bench: Vec<String>,
    /// Use only benches of this package of the workspace
    #[arg(short, long, value_name = "NAME", conflicts_with = "dir")]
    package: Option<String>,
    /// Cargo profile with which the benches are built
    #[arg(long, value_name = "NAME", default_value = "bench", conflicts_with = "dir")]
    profile: String,
    /// Cargo features with which the benches are built (repeatable)
    #[arg(long, value_name = "NAMES", conflicts_with = "dir")]
    features: Vec<String>,
    /// Folder with bench executables, in place of a build of the benches
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl BenchExecutableFlags {
    pub fn bench_choice(&self) -> BenchTargetsOrFolder<'_> {
        let Self { bench, package, profile, features, dir } = self;
        let package = package.as_deref();
        let targets = BenchBuildTargets { benches: bench, package, profile, features };
        BenchTargetsOrFolder { targets, folder: dir.as_deref() }
    }

    /// Whether `--bench` or `--package` selects some benches, so that other benches may be skipped.
    pub const fn selects_some_benches(&self) -> bool {
        !self.bench.is_empty() || self.package.is_some()
    }

    /// Builds or finds the selected bench executables, as
    /// [`BenchTargetsOrFolder::find_kernelgate_benches`] does.
    pub fn find_selected_benches(
        &self,
        root: &Path,
        running: &SharedChildProcess,
    ) -> anyhow::Result<UsableAndUnusableBenches> {
        self.bench_choice().find_kernelgate_benches(root, versions::VERSION_QUERY_TIMEOUT, running)
    }
}
