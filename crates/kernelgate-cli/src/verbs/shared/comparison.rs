//! Command-line flags of the verbs that compare builds, and the comparison request made from these
//! flags.

use std::path::PathBuf;
use std::time::Duration;

use super::settings::{BenchSettingsFlags, ProcessTimeoutFlags, ThresholdFlags};
use crate::compare::{BuildComparisonRequest, ComparedSideSource, InjectedChanges, TestPlanBasis};
use kernelgate::record::RecordFoldersOfPackage;

#[derive(Debug, clap::Args)]
pub struct ComparisonCommandFlags {
    /// Use only this bench binary (repeatable)
    #[arg(long, value_name = "NAME")]
    bench: Vec<String>,
    /// Use only benches of this package of the workspace
    #[arg(short, long, value_name = "NAME")]
    pub package: Option<String>,
    #[command(flatten)]
    pub limits: ThresholdFlags,
    #[command(flatten)]
    timeouts: ProcessTimeoutFlags,
    /// Cargo profile with which both sides are built
    #[arg(long, value_name = "NAME", default_value = "bench")]
    profile: String,
    /// Cargo features with which both sides are built (repeatable)
    #[arg(long, value_name = "NAMES")]
    features: Vec<String>,
    #[command(flatten)]
    pub settings: BenchSettingsFlags,
}

impl ComparisonCommandFlags {
    /// Makes a request to compare the working tree with itself, for every case of the selected
    /// benches, even if this process has a shard.
    pub fn working_tree_against_itself(
        &self,
        store: &RecordFoldersOfPackage,
        basis: TestPlanBasis,
        budget: Duration,
        folder: PathBuf,
    ) -> anyhow::Result<BuildComparisonRequest> {
        Ok(BuildComparisonRequest {
            base: ComparedSideSource::WorkTree,
            head: ComparedSideSource::WorkTree,
            benches: self.bench.clone(),
            workspace_member: self.package.clone(),
            shard: None,
            filter: None,
            bench_variables: self.settings.bench_variables_without_shard(),
            injection: InjectedChanges::default(),
            times_identical_executables: false,
            only_affected_cases: false,
            profiles_slower_cases: false,
            process_timeout: self.timeouts.wait,
            build_timeout: self.timeouts.build_wait,
            plan: self.limits.plan_over_basis(basis)?,
            sampling: self.limits.warm_up_and_timing_durations(),
            budget,
            build_profile: self.profile.clone(),
            features: self.features.clone(),
            resume: false,
            package: store.root.clone(),
            excluded_paths: Vec::new(),
            target: store.work.parent().map(PathBuf::from).unwrap_or_default(),
            folder,
        })
    }
}
