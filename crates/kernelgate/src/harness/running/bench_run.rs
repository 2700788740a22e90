//! `cargo bench`: every selected case verified, timed and recorded.

use std::path::Path;
use std::time::Instant;

use super::case_error::CaseError;
use super::deadline::{self, Deadline};
use super::estimate;
use super::execution::{Execution, Timer};
use super::problem::PreparedProblem;
use super::progress::BenchProgress;
use super::quiet;
use super::sampling::Sampler;
use super::session::Session;
use super::trial;
use crate::backend::{BackendKind, Target};
use crate::display::{self, terminal};
use crate::exit::Exit;
use crate::harness::auditing::after_timing;
use crate::harness::error::HarnessError;
use crate::harness::phase_timer;
use crate::harness::recording::invocation::Invocation;
use crate::harness::recording::recorder::{Event, Recorder, Saving};
use crate::harness::recording::references::References;
use crate::harness::recording::saving;
use crate::harness::selection::cases::{Group, Selection};
use crate::harness::selection::place::Place;
use crate::harness::settings::Settings;
use crate::measure::limits::{CaseWork, Limits};
use crate::record::run::process_name;
use crate::record::{Environment, FileError, Lock, Machine, ProcessRun, Provenance, Store, file};
use crate::workload::Effort;
use kernelgate_cuda::observe::telemetry::CardTelemetry;

/// A process of `cargo bench`.
struct BenchSession<'a> {
    settings: &'a Settings,
    store: &'a Store,
    limits: Limits,
    references: References,
    recorder: Recorder,
    deadline: Option<Deadline>,
}

impl Session for BenchSession<'_> {
    fn prepare(&self, group: &Group<'_>, target: &Target) -> Result<PreparedProblem, CaseError> {
        let mut ready = PreparedProblem::inputs(group, self.settings.seed, None, target)?;
        ready.references = Some(self.references.clone());
        ready.compute_reference(group)?;
        Ok(ready)
    }

    fn sampler(&self) -> Sampler<'_> {
        Sampler::under_criterion(self.settings, self.store)
    }

    fn record(&self, event: Event<'_>) -> Result<(), FileError> {
        self.recorder.add(event)
    }

    fn limits(&self) -> Option<&Limits> {
        Some(&self.limits)
    }

    fn out_of_time(&self) -> Option<String> {
        self.deadline.as_ref().and_then(Deadline::passed)
    }
}

/// Verifies, times and records the selected cases. Returns the exit code and the run.
///
/// # Errors
/// When the device fails before any case, or a file cannot be read or written.
pub fn bench(
    name: &str,
    settings: &Settings,
    place: &Place,
    selection: &Selection<'_>,
    store: &Store,
) -> Result<(Exit, ProcessRun), HarnessError> {
    let started = Instant::now();
    let opening = phase_timer::start("open");
    let target = settings.device.open(place)?;
    let progress = BenchProgress::new(settings.quiet, selection.count());
    let invocation = Invocation::new(settings.process.session.clone());
    let mut run = start(name, settings, selection, store, &invocation, Environment::on(&target))?;
    announce(&progress, &run, place, selection, settings, store);
    let process = process_name(name, settings.shard);
    let path = store.run_path(&invocation.session, &process);
    let used = deadline::used_by(&invocation.id, path.parent().unwrap_or(&path));
    let deadline = settings.budget.map(|budget| Deadline::after(budget, used));
    let baseline = settings
        .baselines
        .save
        .as_deref()
        .map(|baseline| saving::open(store, baseline, &run, selection))
        .transpose()?;
    if run.provenance.commit.is_none() {
        progress.no_commit();
    }
    // The folder is opened before the ceilings are measured, so that an error comes at once.
    let path = invocation.record(store, &process, |_| run.clone())?;
    drop(opening);
    let mut timer = Timer::new(&target)?;
    run.anchors = run.plan.as_ref().map(|_| timer.anchors(settings.power));
    run.limits = ceilings(&mut timer, selection)?;
    progress.limits(&run.limits);
    trial::warn_of_delays(&run);
    // The card is read after the ceilings were measured, when it still has its clock under load.
    let telemetry = target.telemetry();
    run.telemetry.extend(telemetry.as_ref().map(CardTelemetry::read));
    progress.telemetry(&run.telemetry);
    progress.others_computing(&target.others_computing());
    let limits = run.limits.clone();
    let references = References::at(store.references.clone(), run.executable.clone());
    let recorder =
        Recorder::start(run, path, Saving::AfterEachCase, settings.baselines.save.clone())?;
    recorder.exit_on_interrupt()?;
    if target.kind() == BackendKind::Cpu {
        recorder.exit_on_endless_launch(settings.host_timeout);
    }
    let recorded = recorder.clone();
    let session =
        BenchSession { settings, store, limits, references, recorder: recorded, deadline };
    let execution = Execution::new(&session, settings, target, timer, progress);
    let run_all = || execution.run(selection);
    let exit = match settings.process.silent_criterion {
        true => quiet::without_output(run_all)?,
        false => run_all()?,
    };
    let checks = phase_timer::whole(after_timing::ACTIVITY);
    let spent_s = phase_timer::take();
    let progress = BenchProgress::new(settings.quiet, 0);
    progress.spent(&spent_s, checks, started.elapsed());
    recorder.add_spent(spent_s, checks, started.elapsed());
    recorder.finish(telemetry.as_ref().map(CardTelemetry::read))?;
    let saved = settings.baselines.save.as_deref().filter(|_| !recorder.run().cases.is_empty());
    if settings.table {
        let text = display::runs::text(&[recorder.run()], terminal::columns());
        terminal::print(&text);
    }
    if let Some((path, baseline)) = baseline.zip(saved) {
        save(&recorder, &path, baseline)?;
    }
    progress.end(&recorder.path(), &store.page(), saved);
    Ok((exit, recorder.run()))
}

/// The run before its first case.
fn start(
    name: &str,
    settings: &Settings,
    selection: &Selection<'_>,
    store: &Store,
    invocation: &Invocation,
    environment: Environment,
) -> Result<ProcessRun, HarnessError> {
    let (provenance, stated_commit) = Provenance::detect_for_process(&store.root)?;
    Ok(ProcessRun {
        effort: settings.effort.name().to_owned(),
        seed: settings.seed,
        shard: settings.shard,
        plan: selection.plan.clone(),
        machine: Some(Machine::here().digest()),
        delays: trial::delays(settings, selection),
        skipped: selection.skipped.iter().cloned().collect(),
        unsupported: selection.unsupported.clone(),
        executable: executable_hash(settings.process.executable.as_deref()),
        package: store.package.clone(),
        invocation: Some(invocation.id.clone()),
        stated_commit,
        ..ProcessRun::start(name, &invocation.session, environment, provenance)
    })
}

/// Prints the device, the work of the process and its least duration.
fn announce(
    progress: &BenchProgress,
    run: &ProcessRun,
    place: &Place,
    selection: &Selection<'_>,
    settings: &Settings,
    store: &Store,
) {
    let not_elsewhere = (place.kind == BackendKind::Cpu).then_some(place.otherwise.as_str());
    let part = settings.shard.map_or(String::new(), |shard| format!(", shard {shard}"));
    let (bench, cases) = (format!("{}{part}", run.bench), selection.count());
    progress.start(&bench, &run.environment, settings.effort, cases, not_elsewhere);
    if settings.effort == Effort::Thorough {
        let last_times = estimate::last_times(store, &run.environment);
        progress.estimate(&estimate::text(selection, settings.effort, settings, &last_times));
    }
}

/// Measures the ceilings that bound the selected work.
fn ceilings(timer: &mut Timer, selection: &Selection<'_>) -> Result<Limits, HarnessError> {
    let _activity = phase_timer::start("ceilings");
    let works: Vec<CaseWork> = selection.groups.iter().flat_map(Group::works).collect();
    Ok(match timer {
        Timer::Wall(_) => Limits::measure_cpu(&works),
        Timer::Events(events) => Limits::measure_cuda(events, &works)?,
    })
}

/// Merges the run into a baseline.
fn save(recorder: &Recorder, path: &Path, baseline: &str) -> Result<(), HarnessError> {
    let unsaved = |cause| HarnessError::Unsaved {
        cause: Box::new(cause),
        name: baseline.to_owned(),
        session: recorder.path().parent().unwrap_or(path).display().to_string(),
    };
    // Waited for outside of the recorder: an interrupt need not wait.
    let _lock = Lock::acquire(path).map_err(unsaved)?;
    recorder.save_baseline(|run| saving::save(path, baseline, run)).map_err(unsaved)
}

/// Content hash of a program's file.
pub fn executable_hash(program: Option<&Path>) -> Option<String> {
    file::content_hash(program?).ok()
}
