//! Flags that select bench executables, for every verb that runs them.

use std::path::{Path, PathBuf};

use crate::benches::cargo::BuildTargets;
use crate::benches::child_process::ChildProcess;
use crate::benches::find::{BenchChoice, FoundBenches};
use crate::benches::versions;

/// Flags that choose benches.
#[derive(Debug, Clone, clap::Args)]
pub struct BenchFlags {
    /// Use only this bench binary (repeatable)
    #[arg(long, value_name = "NAME")]
    bench: Vec<String>,
    /// Use only benches of this package of the workspace
    #[arg(short, long, value_name = "NAME", conflicts_with = "dir")]
    package: Option<String>,
    /// Cargo profile of the build
    #[arg(long, value_name = "NAME", default_value = "bench", conflicts_with = "dir")]
    profile: String,
    /// Cargo features of the build (repeatable)
    #[arg(long, value_name = "NAMES", conflicts_with = "dir")]
    features: Vec<String>,
    /// Folder with bench executables, in place of a build
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
}

impl BenchFlags {
    pub fn choice(&self) -> BenchChoice<'_> {
        let Self { bench, package, profile, features, dir } = self;
        let package = package.as_deref();
        let targets = BuildTargets { benches: bench, package, profile, features };
        BenchChoice { targets, folder: dir.as_deref() }
    }

    /// Whether the flags name some benches, so that other benches may be skipped.
    pub const fn names_some(&self) -> bool {
        !self.bench.is_empty() || self.package.is_some()
    }

    /// Finds the selected benches, as [`BenchChoice::find_benches`] does.
    pub fn find(&self, root: &Path, running: &ChildProcess) -> anyhow::Result<FoundBenches> {
        self.choice().find_benches(root, versions::VERSION_TIMEOUT, running)
    }
}
