//! Processes of benches of this harness: told by a request in a file what to do, their run read
//! from another.

use std::path::Path;
use std::process::{Command, Stdio};

use super::expected::check_answers;
use super::process::{TrialProcess, TrialSetup, finish, of_package};
use crate::benches::ask::within_limit;
use crate::compare::sides::leftovers;
use kernelgate::protocol::{self, Action, Request, Response, ResponseBody};
use kernelgate::record::{ProcessRun, file};

/// Runs a trial; its run, or none where it has no case that was asked for.
pub fn measure(
    setup: &TrialSetup<'_>,
    trial: &TrialProcess<'_>,
) -> Result<Option<ProcessRun>, String> {
    let mut command = command(setup, trial, "trial.json")?;
    command.stdout(Stdio::null());
    let ended = finish(setup, &mut command, trial.timeout)?;
    let status = ended.status;
    within_limit(&trial.request.record)?;
    match file::read::<ProcessRun>(&trial.request.record) {
        // A case that fails makes the exit code 1, and is in the run.
        Ok(run) if run.complete && matches!(status.code(), Some(0 | 1)) => {
            check_answers(&run, trial).map(|()| Some(run))
        }
        Err(error) if error.is_not_found() && status.success() => Ok(None),
        Err(error) if !error.is_not_found() => Err(format!("failed to {error}")),
        _ => Err(ended.failure()),
    }
}

/// The command of a trial, whose request goes into a file of that name.
pub fn command(
    setup: &TrialSetup<'_>,
    trial: &TrialProcess<'_>,
    name: &str,
) -> Result<Command, String> {
    let path = setup.work.join(name);
    let response = setup.work.join(format!("response-to-{name}"));
    leftovers::remove(&response).map_err(cannot_clear)?;
    let request = Request { response, action: Action::Trial(Box::new(trial.request.clone())) };
    file::write(&path, &request).map_err(|error| format!("failed to {error}"))?;
    leftovers::remove(&trial.request.record).map_err(cannot_clear)?;
    let mut command = of_request(setup, trial, &path);
    let planted = &trial.planted;
    command
        .envs(planted.delays().map(|delays| ("KERNELGATE_DELAY", delays)))
        .envs(planted.layout.map(|layout| ("KERNELGATE_LAYOUT", layout.to_string())));
    Ok(command)
}

/// Why a command cannot be started, a fragment.
pub fn cannot_clear(cause: std::io::Error) -> String {
    format!("an earlier record or response cannot be removed: {cause}")
}

/// The command of an executable with a request in a file.
fn of_request(setup: &TrialSetup<'_>, trial: &TrialProcess<'_>, request: &Path) -> Command {
    let mut command = of_package(&trial.program, &trial.package);
    command.args(["--bench", "--quiet", "--noplot", "--discard-baseline"]);
    if let Some(filter) = setup.filter {
        command.arg("--").arg(filter);
    }
    // A shard of the comparison is among the settings; that of this process is not the bench's.
    command.env_remove("KERNELGATE_SHARD").envs(setup.settings);
    command.env(protocol::VARIABLE, request);
    command.env("KERNELGATE_COMMIT", &trial.commit);
    command.env("CARGO_TARGET_DIR", setup.work.join("target"));
    command.env("CRITERION_HOME", setup.work.join("criterion")).env_remove("KERNELGATE_SESSION");
    command.env_remove("KERNELGATE_DELAY").env_remove("KERNELGATE_LAYOUT");
    command
}

/// Has an executable do something else than a trial, for the cases that the filter of `setup`
/// names and without delays.
pub fn ask(
    setup: &TrialSetup<'_>,
    trial: &TrialProcess<'_>,
    action: Action,
) -> Result<ResponseBody, String> {
    let [path, response] = ["request.json", "response.json"].map(|name| setup.work.join(name));
    leftovers::remove(&response).map_err(cannot_clear)?;
    let request = Request { response: response.clone(), action };
    file::write(&path, &request).map_err(|error| format!("failed to {error}"))?;
    let mut command = of_request(setup, trial, &path);
    command.stdout(Stdio::null());
    let ended = finish(setup, &mut command, trial.timeout)?;
    within_limit(&response)?;
    match file::read::<Response>(&response).map(|response| response.answer) {
        Ok(ResponseBody::Refused(why) | ResponseBody::NoMatch { reason: why, .. }) => Err(why),
        Ok(answer) => Ok(answer),
        Err(error) if error.is_not_found() => Err(ended.failure()),
        Err(error) => Err(format!("failed to {error}")),
    }
}
