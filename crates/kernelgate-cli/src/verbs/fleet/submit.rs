//! `kernelgate submit`: runs the shards of a measurement as jobs of a cluster scheduler.

use kernelgate::exit::ProcessExitReason;
use kernelgate::record::RecordFoldersOfPackage;

use super::{kubernetes, slurm};

#[derive(Debug, clap::Subcommand)]
pub enum ClusterScheduler {
    /// Submit a Slurm job array, one task for each shard, and follow it to the verdict
    Slurm(slurm::SlurmSubmitArguments),
    /// Print an Indexed Job for the shards and a Job that merges, for `kubectl apply`
    Kubernetes(kubernetes::KubernetesSubmitArguments),
}

/// Submits the shards to the cluster scheduler, or prints what would be submitted.
///
/// # Errors
/// Fails if the benches cannot be built, or the scheduler refuses a job.
pub fn submit_shards_to_scheduler(
    scheduler: &ClusterScheduler,
    store: &RecordFoldersOfPackage,
) -> anyhow::Result<ProcessExitReason> {
    match scheduler {
        ClusterScheduler::Slurm(arguments) => slurm::submit_to_slurm(arguments, store),
        ClusterScheduler::Kubernetes(arguments) => {
            kubernetes::print_manifests(arguments)?;
            Ok(ProcessExitReason::Success)
        }
    }
}
