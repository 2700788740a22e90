//! Runs benches with kernelgate's harness: a process reads its request from a JSON file and writes
//! its run record and response to other files.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use super::expected_record::{
    check_field_equals_request, check_record_answers_request, check_times_and_machine_of_record,
};
use super::process::{
    SharedTrialSettings, TrialProcessToRun, command_in_package_folder, run_to_end_or_timeout,
};
use crate::benches::bench_requests::check_bench_file_size;
use crate::compare::sides::leftover_files;
use kernelgate::protocol::{
    self, BenchRequestFile, BenchResponseFile, RequestedBenchAction, ResponseToBenchAction,
};
use kernelgate::record::{BenchProcessRun, file};

/// Runs one trial of a bench by kernelgate's bench protocol, and returns its run record; `None` if
/// the bench has none of the requested cases.
pub fn measure_by_kernelgate_protocol(
    setup: &SharedTrialSettings<'_>,
    trial: &TrialProcessToRun<'_>,
) -> Result<Option<BenchProcessRun>, String> {
    const TRIAL_REQUEST_FILE: &str = "trial.json";
    let mut command = write_request_and_make_trial_command(setup, trial, TRIAL_REQUEST_FILE)?;
    command.stdout(Stdio::null());
    let started = Instant::now();
    let ended = run_to_end_or_timeout(setup, &mut command, trial.process_timeout)?;
    let (took, status) = (started.elapsed(), ended.exit_status);
    check_bench_file_size(&trial.request.run_record_path)?;
    let run = match file::read_record::<BenchProcessRun>(&trial.request.run_record_path) {
        // If a case fails, the bench process exits with code 1, and the run record lists the failed
        // case.
        Ok(run) if run.ended_normally && status.success() => Some(run),
        Ok(run) if run.ended_normally && status.code() == Some(1) && !run.failed.is_empty() => {
            Some(run)
        }
        Err(error) if error.is_because_file_is_missing() && status.success() => None,
        Err(error) if !error.is_because_file_is_missing() => return Err(error.to_string()),
        _ => return Err(ended.process_failure_text()),
    };
    match read_bench_response(&response_file_path(setup, TRIAL_REQUEST_FILE), trial)? {
        ResponseToBenchAction::TrialEnded => {}
        ResponseToBenchAction::ActionImpossible(why) => return Err(why),
        _ => return Err("its response answers another request".to_owned()),
    }
    if let Some(run) = &run {
        check_record_answers_request(run, trial, setup.bench_variables)?;
        check_times_and_machine_of_record(run, took, setup.environment)?;
    }
    Ok(run)
}

/// Returns the path of the response file that belongs to a request file in a trial's work folder.
fn response_file_path(setup: &SharedTrialSettings<'_>, request: &str) -> PathBuf {
    setup.trial_files_folder.join(format!("response-to-{request}"))
}

/// Reads the response file that a bench wrote, and checks that it names this bench.
fn read_bench_response(
    path: &Path,
    trial: &TrialProcessToRun<'_>,
) -> Result<ResponseToBenchAction, String> {
    check_bench_file_size(path)?;
    let response = file::read_record::<BenchResponseFile>(path).map_err(|error| {
        match error.is_because_file_is_missing() {
            true => "ended without a response".to_owned(),
            false => error.to_string(),
        }
    })?;
    check_field_equals_request("response", "bench", &response.bench_name, trial.bench_name())?;
    Ok(response.answer)
}

/// Writes a trial's request to a file with this name, and returns the command that runs the bench
/// with the request.
pub fn write_request_and_make_trial_command(
    setup: &SharedTrialSettings<'_>,
    trial: &TrialProcessToRun<'_>,
    name: &str,
) -> Result<Command, String> {
    let path = setup.trial_files_folder.join(name);
    let response = response_file_path(setup, name);
    leftover_files::remove_file_or_folder_if_present(&response)
        .map_err(record_removal_failure_text)?;
    let request = BenchRequestFile {
        response_path: response,
        action: RequestedBenchAction::RunTrial(Box::new(trial.request.clone())),
    };
    file::write_record_without_sync(&path, &request).map_err(|error| error.to_string())?;
    leftover_files::remove_file_or_folder_if_present(&trial.request.run_record_path)
        .map_err(record_removal_failure_text)?;
    let mut command = bench_command_with_request(setup, trial, &path);
    let injection = &trial.injection;
    command
        .envs(injection.delay_variable_value().map(|delays| ("KERNELGATE_DELAY", delays)))
        .envs(injection.code_layout_number.map(|layout| ("KERNELGATE_LAYOUT", layout.to_string())));
    Ok(command)
}

/// Reason, as a fragment of a sentence, why a trial is not started: an earlier record or response
/// file cannot be removed.
pub fn record_removal_failure_text(cause: std::io::Error) -> String {
    format!("an earlier record or response cannot be removed: {cause}")
}

/// Returns the command that runs a bench executable with a request file.
fn bench_command_with_request(
    setup: &SharedTrialSettings<'_>,
    trial: &TrialProcessToRun<'_>,
    request: &Path,
) -> Command {
    let mut command = command_in_package_folder(&trial.bench_executable, &trial.package_folder);
    command.args(["--bench", "--quiet", "--noplot", "--discard-baseline"]);
    if let Some(filter) = setup.criterion_filter {
        command.arg("--").arg(filter);
    }
    // The bench gets the comparison's shard from the settings, so the variable `KERNELGATE_SHARD`
    // of this process is removed.
    command.env_remove("KERNELGATE_SHARD").envs(setup.bench_variables);
    command.env(protocol::REQUEST_PATH_VARIABLE, request);
    command.env("KERNELGATE_COMMIT", &trial.source_commit);
    command.env("CARGO_TARGET_DIR", setup.trial_files_folder.join("target"));
    command
        .env("CRITERION_HOME", setup.trial_files_folder.join("criterion"))
        .env_remove("KERNELGATE_SESSION");
    command.env_remove("KERNELGATE_DELAY").env_remove("KERNELGATE_LAYOUT");
    command
}

/// Sends a bench executable a request other than a trial, without injected delays, for the cases
/// that the filter of `setup` matches.
pub fn send_request_other_than_trial(
    setup: &SharedTrialSettings<'_>,
    trial: &TrialProcessToRun<'_>,
    action: RequestedBenchAction,
) -> Result<ResponseToBenchAction, String> {
    let [path, answer_path] =
        ["request.json", "response.json"].map(|name| setup.trial_files_folder.join(name));
    leftover_files::remove_file_or_folder_if_present(&answer_path)
        .map_err(record_removal_failure_text)?;
    let request = BenchRequestFile { response_path: answer_path.clone(), action };
    file::write_record_without_sync(&path, &request).map_err(|error| error.to_string())?;
    let mut command = bench_command_with_request(setup, trial, &path);
    command.stdout(Stdio::null());
    let ended = run_to_end_or_timeout(setup, &mut command, trial.process_timeout)?;
    if !answer_path.exists() {
        return Err(ended.process_failure_text());
    }
    match read_bench_response(&answer_path, trial)? {
        ResponseToBenchAction::ActionImpossible(why)
        | ResponseToBenchAction::NoMatchingCase { no_match_reason: why, .. } => Err(why),
        _ if !ended.exit_status.success() => {
            Err(format!("answered, then ended: {}", ended.process_failure_text()))
        }
        answer => Ok(answer),
    }
}
