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
    #[arg(id = "bench", long = "bench", value_name = "NAME")]
    bench_names: Vec<String>,
    /// Use only benches of this package of the workspace
    #[arg(
        id = "package",
        short = 'p',
        long = "package",
        value_name = "NAME",
        conflicts_with = "dir"
    )]
    package_name: Option<String>,
    /// Cargo profile with which the benches are built
    #[arg(
        id = "profile",
        long = "profile",
        value_name = "NAME",
        default_value = "bench",
        conflicts_with = "dir"
    )]
    cargo_profile: String,
    /// Cargo features with which the benches are built (repeatable)
    #[arg(long = "features", value_name = "NAMES", conflicts_with = "dir")]
    cargo_features: Vec<String>,
    /// Folder with bench executables, in place of a build of the benches
    #[arg(id = "dir", long = "dir", value_name = "DIR")]
    bench_executables_folder: Option<PathBuf>,
}

impl BenchExecutableFlags {
    pub fn bench_choice(&self) -> BenchTargetsOrFolder<'_> {
        let Self {
            bench_names,
            package_name: package,
            cargo_profile,
            cargo_features,
            bench_executables_folder: dir,
        } = self;
        let package = package.as_deref();
        let targets =
            BenchBuildTargets { bench_names, only_package: package, cargo_profile, cargo_features };
        BenchTargetsOrFolder { targets, prebuilt_folder: dir.as_deref() }
    }

    /// Whether `--bench` or `--package` selects some benches, so that other benches may be skipped.
    pub const fn selects_some_benches(&self) -> bool {
        !self.bench_names.is_empty() || self.package_name.is_some()
    }

    /// Builds or finds the selected bench executables, as
    /// [`BenchTargetsOrFolder::find_kernelgate_benches`] does.
    pub fn find_selected_benches(
        &self,
        root: &Path,
        running: &SharedChildProcess,
    ) -> anyhow::Result<UsableAndUnusableBenches> {
        self.bench_choice().find_kernelgate_benches(
            root,
            versions::PROTOCOL_VERSION_QUERY_TIMEOUT,
            running,
        )
    }
}
