//! `cargo bench`: every selected case verified, timed and recorded.

use std::time::Instant;

use super::deadline::{self, Deadline};
use super::estimate;
use super::execution::{Execution, Timer, run_cases};
use super::progress::BenchProgress;
use super::terse;
use super::trial;
use crate::backend::BackendKind;
use crate::display::{self, terminal};
use crate::exit::Exit;
use crate::harness::auditing::after_timing;
use crate::harness::error::HarnessError;
use crate::harness::recording::invocation::Invocation;
use crate::harness::recording::recorder::Recorder;
use crate::harness::recording::references::References;
use crate::harness::recording::saving;
use crate::harness::selection::cases::Selection;
use crate::harness::selection::place::Place;
use crate::harness::settings::args::Flags;
use crate::harness::spent;
use crate::measure::limits::Limits;
use crate::record::run::process_name;
use crate::record::{Environment, Lock, ProcessRun, Provenance, Store, file};
use crate::workload::{Effort, Work};
use kernelgate_cuda::observe::telemetry::Telemetry;

/// Verifies, times and records what was selected; the run, and how it ended.
///
/// # Errors
/// When the device fails before any case, or a file cannot be read or written.
pub fn bench(
    name: &str,
    flags: &Flags,
    place: &Place,
    (selection, effort): (&Selection<'_>, Effort),
    store: &Store,
) -> Result<(Exit, ProcessRun), HarnessError> {
    let started = Instant::now();
    let opening = spent::on("open");
    let target = flags.wanted().open(place)?;
    let environment = Environment::of(&target);
    let (provenance, stated_commit) =
        Provenance::of_process(&store.root).map_err(HarnessError::Usage)?;
    let progress = BenchProgress::new(flags, selection.count());
    let not_elsewhere = (place.kind == BackendKind::Cpu).then_some(place.otherwise.as_str());
    let part = flags.shard.map_or(String::new(), |shard| format!(", shard {shard}"));
    progress.start(
        &format!("{name}{part}"),
        &environment,
        effort,
        selection.count(),
        not_elsewhere,
    );
    let invocation = Invocation::of_process()?;
    if effort == Effort::Thorough {
        let known = estimate::last_times(store, &environment);
        progress.estimate(&estimate::text(selection, (effort, flags), &known));
    }
    let process = process_name(name, flags.shard);
    let path = store.run_path(&invocation.session, &process);
    let folder = path.parent().unwrap_or(&path);
    let deadline = flags
        .budget
        .map(|budget| Deadline::after(budget, deadline::used_by(&invocation.id, folder)));
    let mut run = ProcessRun {
        effort: effort.name().to_owned(),
        seed: flags.seed,
        shard: flags.shard,
        delays: trial::delays(flags, selection),
        skipped: selection.skipped.iter().cloned().collect(),
        unsupported: selection.unsupported.clone(),
        executable: executable_hash(),
        package: store.package.clone(),
        invocation: Some(invocation.id.clone()),
        stated_commit,
        ..ProcessRun::start(name, &invocation.session, environment, provenance)
    };
    let baseline = flags
        .save_baseline
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
    let recorder = Recorder::start(run, path, flags.save_baseline.clone())?;
    recorder.exit_on_interrupt()?;
    if target.kind() == BackendKind::Cpu {
        recorder.exit_on_endless_launch(flags.host_timeout());
    }
    let execution = Execution {
        flags,
        effort,
        target,
        timer,
        limits: Some(limits),
        recorder: Some(recorder.clone()),
        progress,
        lost: None,
        references: Some(references),
        trial: None,
        deadline,
    };
    let run_all = || run_cases(execution, selection, store);
    let exit = if terse::is_set() { terse::without_output(run_all)? } else { run_all()? };
    let checks = spent::whole(after_timing::ACTIVITY);
    let spent_s = spent::take();
    let progress = BenchProgress::new(flags, 0);
    progress.spent(&spent_s, checks, started.elapsed());
    recorder.add_spent(spent_s, checks, started.elapsed());
    recorder.finish(telemetry.as_ref().map(Telemetry::read))?;
    let saved = flags.save_baseline.as_deref().filter(|_| !recorder.run().cases.is_empty());
    if flags.output_format == "criterion" || terse::is_set() {
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

/// Content hash of this program's file.
pub fn executable_hash() -> Option<String> {
    file::content_hash(&std::env::current_exe().ok()?).ok()
}
