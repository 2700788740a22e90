//! Runs a trial as its bench requires: by kernelgate's bench protocol, or by Criterion's flags.

use std::process::Stdio;

use super::process::{SharedTrialSettings, TrialProcessToRun};
use super::{by_criterion, by_protocol};
use crate::benches::child_process::SharedChildProcess;
use crate::compare::sides::copy_benches::BenchControlMethod;
use kernelgate::record::BenchProcessRun;

/// Runs a trial and returns its run record; `None` if the bench has none of the requested cases.
pub fn run_trial(
    setup: &SharedTrialSettings<'_>,
    trial: &TrialProcessToRun<'_>,
) -> Result<Option<BenchProcessRun>, String> {
    match trial.control_method {
        BenchControlMethod::ProtocolVersion(_) => {
            by_protocol::measure_by_kernelgate_protocol(setup, trial)
        }
        BenchControlMethod::CriterionFlags => {
            by_criterion::measure_requested_criterion_cases(setup, trial).map(Some)
        }
    }
}

/// Starts a trial's process as artificial load without waiting for it; the caller kills it through
/// the handle `co_running`.
pub fn start_trial_as_background_load(
    setup: &SharedTrialSettings<'_>,
    trial: &TrialProcessToRun<'_>,
    co_running: &SharedChildProcess,
) -> Result<(), String> {
    let mut command = match trial.control_method {
        BenchControlMethod::ProtocolVersion(_) => {
            by_protocol::write_request_and_make_trial_command(setup, trial, "co-running.json")?
        }
        BenchControlMethod::CriterionFlags => {
            by_criterion::criterion_measuring_command(setup, trial, "co-running-criterion")?
        }
    };
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    co_running
        .start_child_process(&mut command)
        .map(drop)
        .map_err(|cause| format!("failed to start: {cause}"))
}
