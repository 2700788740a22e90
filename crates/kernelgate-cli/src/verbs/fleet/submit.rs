//! `kernelgate submit`: runs shards as jobs of a scheduler.

use kernelgate::exit::ExitReason;
use kernelgate::record::BaselineStore;

use super::{kubernetes, slurm};

#[derive(Debug, clap::Subcommand)]
pub enum ClusterScheduler {
    /// Submit a job array to Slurm, one shard a task, and follow it to the verdict
    Slurm(slurm::SlurmArguments),
    /// Print an Indexed Job and a Job that merges, for `kubectl apply`
    Kubernetes(kubernetes::KubernetesArguments),
}

/// Submits the work, or prints what would be submitted.
///
/// # Errors
/// Fails if nothing can be built, or the scheduler refuses.
pub fn run(scheduler: &ClusterScheduler, store: &BaselineStore) -> anyhow::Result<ExitReason> {
    match scheduler {
        ClusterScheduler::Slurm(arguments) => slurm::run(arguments, store),
        ClusterScheduler::Kubernetes(arguments) => {
            kubernetes::run(arguments)?;
            Ok(ExitReason::Fine)
        }
    }
}
