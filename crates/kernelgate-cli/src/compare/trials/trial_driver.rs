//! Runs a trial with the driver of its bench: by the protocol for benches of this harness, by
//! Criterion's flags for others.

use std::process::Stdio;

use super::process::{TrialProcess, TrialSetup};
use super::{by_criterion, by_protocol};
use crate::benches::child_process::ChildProcess;
use crate::compare::sides::copy_benches::BenchDriver;
use kernelgate::record::ProcessRun;

/// Runs a trial and returns its run; `None` if it has no requested case.
pub fn run(setup: &TrialSetup<'_>, trial: &TrialProcess<'_>) -> Result<Option<ProcessRun>, String> {
    match trial.driver {
        BenchDriver::Protocol(_) => by_protocol::measure_by_protocol(setup, trial),
        BenchDriver::Criterion => by_criterion::measure_criterion_trial(setup, trial).map(Some),
    }
}

/// Starts a trial as background load, without waiting for its end; `co_running` ends it.
pub fn start_co_running(
    setup: &TrialSetup<'_>,
    trial: &TrialProcess<'_>,
    co_running: &ChildProcess,
) -> Result<(), String> {
    let mut command = match trial.driver {
        BenchDriver::Protocol(_) => by_protocol::trial_command(setup, trial, "co-running.json")?,
        BenchDriver::Criterion => {
            by_criterion::measuring_command(setup, trial, "co-running-criterion")?
        }
    };
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    co_running
        .start_process(&mut command)
        .map(drop)
        .map_err(|cause| format!("failed to start: {cause}"))
}
