//! `cargo bench`: every selected case verified, timed and recorded.

use std::path::Path;
use std::time::Instant;

use super::case_error::CaseError;
use super::deadline::{self, Deadline};
use super::estimate;
use super::execution::{Execution, Timer};
use super::problem::Ready;
use super::progress::BenchProgress;
use super::sampling::Sampler;
use super::session::Session;
use super::terse;
use super::trial;
use crate::backend::{BackendKind, Target};
use crate::display::{self, terminal};
use crate::exit::Exit;
use crate::harness::auditing::after_timing;
use crate::harness::error::HarnessError;
use crate::harness::recording::invocation::Invocation;
use crate::harness::recording::recorder::{Event, Recorder};
use crate::harness::recording::references::References;
use crate::harness::recording::saving;
use crate::harness::selection::cases::{Group, Selection};
use crate::harness::selection::place::Place;
use crate::harness::settings::Settings;
use crate::harness::spent;
use crate::measure::limits::Limits;
use crate::record::run::process_name;
use crate::record::{Environment, FileError, Lock, ProcessRun, Provenance, Store, file};
use crate::workload::{Effort, Work};
use kernelgate_cuda::observe::telemetry::Telemetry;

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
    fn prepare(&self, group: &Group<'_>, target: &Target) -> Result<Ready, CaseError> {
        let mut ready = Ready::inputs(group, self.settings.seed, None, target)?;
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
    let opening = spent::on("open");
    let (target, effort) = (settings.device.open(place)?, settings.effort);
    let environment = Environment::of(&target);
    let (provenance, stated_commit) =
        Provenance::of_process(&store.root).map_err(HarnessError::Usage)?;
    let progress = BenchProgress::new(settings.quiet, selection.count());
    let not_elsewhere = (place.kind == BackendKind::Cpu).then_some(place.otherwise.as_str());
    let part = settings.shard.map_or(String::new(), |shard| format!(", shard {shard}"));
    progress.start(
        &format!("{name}{part}"),
        &environment,
        effort,
        selection.count(),
        not_elsewhere,
    );
    let invocation = Invocation::new(settings.process.session.clone());
    if effort == Effort::Thorough {
        let known = estimate::last_times(store, &environment);
        progress.estimate(&estimate::text(selection, effort, settings, &known));
    }
    let process = process_name(name, settings.shard);
    let path = store.run_path(&invocation.session, &process);
    let folder = path.parent().unwrap_or(&path);
    let deadline = settings
        .budget
        .map(|budget| Deadline::after(budget, deadline::used_by(&invocation.id, folder)));
    let mut run = ProcessRun {
        effort: effort.name().to_owned(),
        seed: settings.seed,
        shard: settings.shard,
        delays: trial::delays(settings, selection),
        skipped: selection.skipped.iter().cloned().collect(),
        unsupported: selection.unsupported.clone(),
        executable: executable_hash(settings.process.executable.as_deref()),
        package: store.package.clone(),
        invocation: Some(invocation.id.clone()),
        stated_commit,
        ..ProcessRun::start(name, &invocation.session, environment, provenance)
    };
    let baseline = settings
        .baselines
        .save
        .as_deref()
        .map(|baseline| saving::open(store, baseline, &run, selection))
        .transpose()?;
    if run.provenance.commit.is_none() {
        progress.no_commit();
    }
    // Before the limits: a folder that cannot be written should not cost two seconds.
    let path = invocation.record(store, &process, |_| run.clone())?;
    drop(opening);
    let ceilings = spent::on("ceilings");
    let works: Vec<Work> =
        selection.groups.iter().map(|group| group.bound.problem().work()).collect();
    let mut timer = Timer::new(&target)?;
    run.limits = match &mut timer {
        Timer::Wall(_) => Limits::measure_cpu(&works),
        Timer::Events(events) => Limits::measure_cuda(events, &works)?,
    };
    drop(ceilings);
    progress.limits(&run.limits);
    trial::warn_of_delays(&run);
    // After the limits: a card that has just worked shows the clock it works at.
    let telemetry = target.telemetry();
    run.telemetry.extend(telemetry.as_ref().map(Telemetry::read));
    progress.telemetry(&run.telemetry);
    let limits = run.limits.clone();
    let references = References::at(store.references.clone(), run.executable.clone());
    let recorder = Recorder::start(run, path, settings.baselines.save.clone())?;
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
        true => terse::without_output(run_all)?,
        false => run_all()?,
    };
    let checks = spent::whole(after_timing::ACTIVITY);
    let spent_s = spent::take();
    let progress = BenchProgress::new(settings.quiet, 0);
    progress.spent(&spent_s, checks, started.elapsed());
    recorder.add_spent(spent_s, checks, started.elapsed());
    recorder.finish(telemetry.as_ref().map(Telemetry::read))?;
    let saved = settings.baselines.save.as_deref().filter(|_| !recorder.run().cases.is_empty());
    if settings.table {
        let text = display::runs::text(&[recorder.run()], terminal::columns());
        terminal::print(&text);
    }
    if let Some((path, baseline)) = baseline.zip(saved) {
        let unsaved = |cause| HarnessError::Unsaved {
            cause: Box::new(cause),
            name: baseline.to_owned(),
            session: recorder.path().parent().unwrap_or(&path).display().to_string(),
        };
        // Waited for outside of the recorder: an interrupt need not wait.
        let _lock = Lock::of(&path).map_err(unsaved)?;
        recorder.save_baseline(|run| saving::save(&path, baseline, run)).map_err(unsaved)?;
    }
    progress.end(&recorder.path(), &store.page(), saved);
    Ok((exit, recorder.run()))
}

/// Content hash of a program's file.
pub fn executable_hash(program: Option<&Path>) -> Option<String> {
    file::content_hash(program?).ok()
}
