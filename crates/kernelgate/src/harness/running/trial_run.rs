//! Carrying out the trial request of a comparison.

use std::time::Instant;

use super::execution::{Execution, Timer, run_cases};
use super::progress::BenchProgress;
use super::trial::{BuildOutputs, TrialState, delays, warn_of_delays};
use crate::backend::BackendKind;
use crate::exit::Exit;
use crate::harness::auditing::after_timing;
use crate::harness::error::HarnessError;
use crate::harness::recording::recorder::Recorder;
use crate::harness::recording::references::References;
use crate::harness::selection::cases::Selection;
use crate::harness::selection::place::Place;
use crate::harness::settings::args::Flags;
use crate::harness::spent;
use crate::record::{Environment, ProcessRun, Provenance, Store, TrialRequest, file};
use crate::workload::Effort;
use kernelgate_cuda::observe::telemetry::Telemetry;

/// Verifies and times the cases of a trial request, and records the run where it says.
///
/// # Errors
/// When a record cannot be read or written, or the device fails before any case.
pub fn carry_out(
    bench: &str,
    flags: &Flags,
    request: TrialRequest,
    place: &Place,
    (selection, effort): (&Selection<'_>, Effort),
    store: &Store,
) -> Result<Exit, HarnessError> {
    let started = Instant::now();
    let opening = spent::on("open");
    let executable =
        std::env::current_exe().ok().map(|path| file::content_hash(&path)).transpose()?;
    let target = flags.wanted().open(place)?;
    let environment = Environment::of(&target);
    drop(opening);
    let mut trial = TrialState {
        sampling: request.pace,
        verified: None,
        inputs: request.inputs,
        outputs: BuildOutputs {
            keep: request.keep_outputs,
            base: request.base_outputs,
            keep_verified: request.keep_verified,
        },
    };
    let mut run = ProcessRun {
        effort: effort.name().to_owned(),
        seed: flags.seed,
        delays: delays(flags, selection),
        executable,
        skipped: selection.skipped.iter().cloned().collect(),
        unsupported: selection.unsupported.clone(),
        ..ProcessRun::start(bench, &request.session, environment, Provenance::of(&store.root))
    };
    if let Some(path) = &request.verified {
        let earlier: ProcessRun = file::read(path)?;
        // Another executable's bits, or another device's, say nothing about this one.
        let same = earlier.executable.is_some()
            && earlier.executable == run.executable
            && earlier.seed == run.seed
            && earlier.environment.same_place(&run.environment);
        trial.verified = same.then_some(earlier);
    }
    let timer = {
        let _activity = spent::on("timer");
        Timer::new(&target)?
    };
    let telemetry = {
        let _activity = spent::on("telemetry");
        let telemetry = target.telemetry();
        run.telemetry.extend(telemetry.as_ref().map(Telemetry::read));
        telemetry
    };
    warn_of_delays(&run);
    let references = References::at(store.references.clone(), run.executable.clone());
    let recorder = Recorder::start(run, request.record, None)?;
    recorder.exit_on_interrupt()?;
    if target.kind() == BackendKind::Cpu {
        recorder.exit_on_endless_launch(flags.host_timeout());
    }
    let execution = Execution {
        flags,
        effort,
        target,
        timer,
        limits: None,
        recorder: Some(recorder.clone()),
        progress: BenchProgress::new(flags, selection.count()),
        lost: None,
        references: Some(references),
        trial: Some(trial),
        deadline: None,
    };
    let exit = run_cases(execution, selection, store)?;
    let checks = spent::whole(after_timing::ACTIVITY);
    recorder.add_spent(spent::take(), checks, started.elapsed());
    recorder.finish(telemetry.as_ref().map(Telemetry::read))?;
    Ok(exit)
}
