//! Flags of the verbs that compare builds, and the comparison that they ask for.

use std::path::PathBuf;
use std::time::Duration;

use super::settings::{BenchProcessSettings, ProcessTimeouts, ThresholdFlags};
use crate::compare::{ComparisonRequest, PlanBasis, SideInjection, SideSource};
use kernelgate::record::BaselineStore;

#[derive(Debug, clap::Args)]
pub struct ComparisonFlags {
    /// Use only this bench binary (repeatable)
    #[arg(long, value_name = "NAME")]
    bench: Vec<String>,
    /// Use only benches of this package of the workspace
    #[arg(short, long, value_name = "NAME")]
    pub package: Option<String>,
    #[command(flatten)]
    pub limits: ThresholdFlags,
    #[command(flatten)]
    timeouts: ProcessTimeouts,
    /// Cargo profile of the builds
    #[arg(long, value_name = "NAME", default_value = "bench")]
    profile: String,
    /// Cargo features of the builds (repeatable)
    #[arg(long, value_name = "NAMES")]
    features: Vec<String>,
    #[command(flatten)]
    pub settings: BenchProcessSettings,
}

impl ComparisonFlags {
    /// Makes a request to compare the working tree with itself, for every case of the chosen
    /// benches, whatever shard this process has.
    pub fn request(
        &self,
        store: &BaselineStore,
        basis: PlanBasis,
        budget: Duration,
        folder: PathBuf,
    ) -> anyhow::Result<ComparisonRequest> {
        Ok(ComparisonRequest {
            base: SideSource::WorkTree,
            head: SideSource::WorkTree,
            benches: self.bench.clone(),
            member: self.package.clone(),
            shard: None,
            filter: None,
            settings: self.settings.variables_without_shard(),
            injection: SideInjection::default(),
            time_identical: false,
            affected: false,
            profile_slower: false,
            wait: self.timeouts.wait,
            build_wait: self.timeouts.build_wait,
            plan: self.limits.plan(basis)?,
            sampling: self.limits.sampling(),
            budget,
            profile: self.profile.clone(),
            features: self.features.clone(),
            resume: false,
            package: store.root.clone(),
            leave_out: Vec::new(),
            target: store.work.parent().map(PathBuf::from).unwrap_or_default(),
            folder,
        })
    }
}
