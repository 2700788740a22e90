//! Command-line flags of the verbs that compare builds, and the comparison request made from these
//! flags.

use std::path::PathBuf;
use std::time::Duration;

use super::settings::{BenchSettingsFlags, ProcessTimeoutFlags, ThresholdFlags};
use crate::compare::{
    BuildComparisonRequest, ComparedSideSource, InjectedHeadChanges, TestPlanBasis,
};
use kernelgate::record::RecordFoldersOfPackage;

#[derive(Debug, clap::Args)]
pub struct ComparisonCommandFlags {
    /// Use only this bench binary (repeatable)
    #[arg(id = "bench", long = "bench", value_name = "NAME")]
    bench_names: Vec<String>,
    /// Use only benches of this package of the workspace
    #[arg(id = "package", short = 'p', long = "package", value_name = "NAME")]
    pub package_name: Option<String>,
    #[command(flatten)]
    pub limits: ThresholdFlags,
    #[command(flatten)]
    timeouts: ProcessTimeoutFlags,
    /// Cargo profile with which both sides are built
    #[arg(id = "profile", long = "profile", value_name = "NAME", default_value = "bench")]
    cargo_profile: String,
    /// Cargo features with which both sides are built (repeatable)
    #[arg(id = "features", long = "features", value_name = "NAMES")]
    cargo_features: Vec<String>,
    #[command(flatten)]
    pub settings: BenchSettingsFlags,
}

impl ComparisonCommandFlags {
    /// Makes a request to compare the working tree with itself, for every case of the selected
    /// benches, even if this process has a shard.
    pub fn self_comparison_request(
        &self,
        store: &RecordFoldersOfPackage,
        basis: TestPlanBasis,
        budget: Duration,
        folder: PathBuf,
    ) -> anyhow::Result<BuildComparisonRequest> {
        Ok(BuildComparisonRequest {
            base: ComparedSideSource::WorkTree,
            head: ComparedSideSource::WorkTree,
            bench_names: self.bench_names.clone(),
            workspace_member: self.package_name.clone(),
            shard: None,
            criterion_filter: None,
            bench_variables: self.settings.bench_environment_variables_without_shard(),
            injection: InjectedHeadChanges::default(),
            times_identical_executables: false,
            only_affected_cases: false,
            profiles_slower_cases: false,
            process_timeout: self.timeouts.bench_process_timeout,
            build_timeout: self.timeouts.build_timeout,
            plan: self.limits.test_plan_overriding_basis(basis)?,
            sampling: self.limits.warm_up_and_timing_durations(),
            round_time_budget: budget,
            build_profile: self.cargo_profile.clone(),
            cargo_features: self.cargo_features.clone(),
            resume_interrupted_comparison: false,
            package_root: store.package_root.clone(),
            paths_excluded_from_snapshot: Vec::new(),
            cargo_target_folder: store
                .generated_files_folder
                .parent()
                .map(PathBuf::from)
                .unwrap_or_default(),
            comparison_folder: folder,
        })
    }
}
