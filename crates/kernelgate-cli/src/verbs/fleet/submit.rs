//! `kernelgate submit`: runs shards as jobs of a scheduler.

use kernelgate::exit::Exit;
use kernelgate::record::Store;

use super::{kubernetes, slurm};

#[derive(Debug, clap::Subcommand)]
pub enum Scheduler {
    /// Submit a job array to Slurm, one shard a task, and follow it to the verdict
    Slurm(slurm::Arguments),
    /// Print an Indexed Job and a Job that merges, for `kubectl apply`
    Kubernetes(kubernetes::Arguments),
}

/// Submits the work, or prints what would be submitted.
///
/// # Errors
/// Fails if nothing can be built, or the scheduler refuses.
pub fn run(scheduler: &Scheduler, store: &Store) -> anyhow::Result<Exit> {
    match scheduler {
        Scheduler::Slurm(arguments) => slurm::run(arguments, store),
        Scheduler::Kubernetes(arguments) => {
            kubernetes::run(arguments)?;
            Ok(Exit::Fine)
        }
    }
}
