//! Runs benches of this harness: a process reads its request from one file, and its run record is
//! read from another file.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use super::expected_record::{
    check_plausible_times, check_record_matches_request, check_requested_field,
};
use super::process::{TrialProcess, TrialSetup, command_in_package, run_to_end};
use crate::benches::bench_requests::check_file_size;
use crate::compare::sides::leftover_files;
use kernelgate::protocol::{self, BenchRequest, BenchResponse, BenchResponseBody, RequestedAction};
use kernelgate::record::{ProcessRun, file};

/// Runs a trial and returns its run; `None` if it has no requested case.
pub fn measure_by_protocol(
    setup: &TrialSetup<'_>,
    trial: &TrialProcess<'_>,
) -> Result<Option<ProcessRun>, String> {
    const TRIAL_REQUEST_FILE: &str = "trial.json";
    let mut command = trial_command(setup, trial, TRIAL_REQUEST_FILE)?;
    command.stdout(Stdio::null());
    let started = Instant::now();
    let ended = run_to_end(setup, &mut command, trial.timeout)?;
    let (took, status) = (started.elapsed(), ended.status);
    check_file_size(&trial.request.record)?;
    let run = match file::read::<ProcessRun>(&trial.request.record) {
        // A failed case makes the exit code 1, and is in the run.
        Ok(run) if run.complete && status.success() => Some(run),
        Ok(run) if run.complete && status.code() == Some(1) && !run.failed.is_empty() => Some(run),
        Err(error) if error.is_not_found() && status.success() => None,
        Err(error) if !error.is_not_found() => return Err(error.to_string()),
        _ => return Err(ended.process_failure()),
    };
    match read_response(&response_path(setup, TRIAL_REQUEST_FILE), trial)? {
        BenchResponseBody::Trial => {}
        BenchResponseBody::Refused(why) => return Err(why),
        _ => return Err("its response answers another request".to_owned()),
    }
    if let Some(run) = &run {
        check_record_matches_request(run, trial, setup.settings)?;
        check_plausible_times(run, took, setup.environment)?;
    }
    Ok(run)
}

/// Path of the response that belongs to a request.
fn response_path(setup: &TrialSetup<'_>, request: &str) -> PathBuf {
    setup.work.join(format!("response-to-{request}"))
}

/// Reads the response that a bench wrote.
fn read_response(path: &Path, trial: &TrialProcess<'_>) -> Result<BenchResponseBody, String> {
    check_file_size(path)?;
    let response =
        file::read::<BenchResponse>(path).map_err(|error| match error.is_not_found() {
            true => "ended without a response".to_owned(),
            false => error.to_string(),
        })?;
    check_requested_field("response", "bench", &response.bench, trial.bench())?;
    Ok(response.answer)
}

/// The command of a trial; its request goes into a file of that name.
pub fn trial_command(
    setup: &TrialSetup<'_>,
    trial: &TrialProcess<'_>,
    name: &str,
) -> Result<Command, String> {
    let path = setup.work.join(name);
    let response = response_path(setup, name);
    leftover_files::remove_path(&response).map_err(cannot_remove_record)?;
    let request =
        BenchRequest { response, action: RequestedAction::Trial(Box::new(trial.request.clone())) };
    file::write_unsynced(&path, &request).map_err(|error| error.to_string())?;
    leftover_files::remove_path(&trial.request.record).map_err(cannot_remove_record)?;
    let mut command = command_with_request(setup, trial, &path);
    let injection = &trial.injection;
    command
        .envs(injection.delays().map(|delays| ("KERNELGATE_DELAY", delays)))
        .envs(injection.layout.map(|layout| ("KERNELGATE_LAYOUT", layout.to_string())));
    Ok(command)
}

/// The reason why a command cannot be started, as a fragment of a sentence.
pub fn cannot_remove_record(cause: std::io::Error) -> String {
    format!("an earlier record or response cannot be removed: {cause}")
}

/// The command of an executable with a request in a file.
fn command_with_request(
    setup: &TrialSetup<'_>,
    trial: &TrialProcess<'_>,
    request: &Path,
) -> Command {
    let mut command = command_in_package(&trial.program, &trial.package);
    command.args(["--bench", "--quiet", "--noplot", "--discard-baseline"]);
    if let Some(filter) = setup.filter {
        command.arg("--").arg(filter);
    }
    // The shard of a comparison is passed in the settings; the variable in this process's
    // environment does not apply to the bench.
    command.env_remove("KERNELGATE_SHARD").envs(setup.settings);
    command.env(protocol::REQUEST_VARIABLE, request);
    command.env("KERNELGATE_COMMIT", &trial.commit);
    command.env("CARGO_TARGET_DIR", setup.work.join("target"));
    command.env("CRITERION_HOME", setup.work.join("criterion")).env_remove("KERNELGATE_SESSION");
    command.env_remove("KERNELGATE_DELAY").env_remove("KERNELGATE_LAYOUT");
    command
}

/// Asks an executable for something else than a trial, for the cases that match the filter of
/// `setup` and without delays.
pub fn ask_executable(
    setup: &TrialSetup<'_>,
    trial: &TrialProcess<'_>,
    action: RequestedAction,
) -> Result<BenchResponseBody, String> {
    let [path, answer_path] = ["request.json", "response.json"].map(|name| setup.work.join(name));
    leftover_files::remove_path(&answer_path).map_err(cannot_remove_record)?;
    let request = BenchRequest { response: answer_path.clone(), action };
    file::write_unsynced(&path, &request).map_err(|error| error.to_string())?;
    let mut command = command_with_request(setup, trial, &path);
    command.stdout(Stdio::null());
    let ended = run_to_end(setup, &mut command, trial.timeout)?;
    if !answer_path.exists() {
        return Err(ended.process_failure());
    }
    match read_response(&answer_path, trial)? {
        BenchResponseBody::Refused(why) | BenchResponseBody::NoMatch { reason: why, .. } => {
            Err(why)
        }
        _ if !ended.status.success() => {
            Err(format!("answered, then ended: {}", ended.process_failure()))
        }
        answer => Ok(answer),
    }
}
