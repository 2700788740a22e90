//! A trial: one of the many short processes of a comparison. It verifies and times as a bench process does, but measures no ceilings,
//! prints no table and leaves Criterion's store alone; what it is to do stands in its [`Order`], where it went wrong in its run.
//!
//! Verified, then timed: the first process of an executable compares every case with the reference and records the bits of its
//! outputs. A later process of the same executable launches once on poisoned outputs; where the bits are the same they are verified, and
//! where they are not (sums in no fixed order) it compares with the reference itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::args::{Filter, Flags};
use super::cases::{Place, Selection};
use super::execution::{Execution, Timer};
use super::progress::Progress;
use super::session::Recorder;
use super::{Harness, HarnessError};
use crate::backend::cuda::telemetry::Telemetry;
use crate::exit::Exit;
use crate::measure::delay::Delay;
use crate::record::run::VerificationRecord;
use crate::record::{Environment, Order, Pace, Provenance, Run, Store, file};
use crate::workload::Effort;

/// What a process that carries out an order knows besides its flags.
pub struct Trial {
    /// How long to time.
    pub pace: Pace,
    /// The run that verified this executable.
    verified: Option<Run>,
    /// Folder of inputs drawn earlier.
    pub inputs: Option<PathBuf>,
    /// Where the wall time went, seconds.
    pub spent_s: BTreeMap<&'static str, f64>,
}

impl Trial {
    /// What an earlier process found of a case, if it was compared with the reference there.
    pub fn known(&self, id: &str) -> Option<VerificationRecord> {
        let run = self.verified.as_ref()?;
        let found = &run.cases.get(id)?.verification;
        Some(VerificationRecord { by: Some(found.by.clone().unwrap_or_else(|| run.key())), ..found.clone() })
    }

    /// Adds to an activity what has passed since `started`.
    pub fn spend(&mut self, activity: &'static str, started: Instant) {
        *self.spent_s.entry(activity).or_default() += started.elapsed().as_secs_f64();
    }
}

/// The order in that file.
///
/// # Errors
/// When it is missing, broken, or of a newer protocol.
pub fn read_order(path: &Path) -> Result<Order, HarnessError> {
    Ok(file::read(path)?)
}

/// The filter of an order; the flags' where the order names no cases.
///
/// # Errors
/// When the flags' filter is no regular expression.
pub fn filter(order: Option<&Order>, flags: &Flags) -> Result<Filter, HarnessError> {
    match order.and_then(|order| order.cases.clone()) {
        Some(cases) => Ok(Filter::OneOf(cases)),
        None => flags.filter(),
    }
}

impl Harness {
    pub(super) fn trial(
        &self,
        flags: &Flags,
        order: Order,
        place: &Place,
        (selection, effort): (Selection<'_>, Effort),
        store: &Store,
    ) -> Result<Exit, HarnessError> {
        let started = Instant::now();
        let executable = std::env::current_exe().ok().map(|path| file::content_hash(&path)).transpose()?;
        let target = flags.wanted().open(place)?;
        let environment = Environment::of(&target);
        let mut trial = Trial { pace: order.pace, verified: None, inputs: order.inputs, spent_s: BTreeMap::new() };
        trial.spend("open", started);
        let mut run = Run {
            effort: effort.name().to_owned(),
            seed: flags.seed,
            delays: delays(flags, &selection),
            executable,
            skipped: selection.skipped.iter().cloned().collect(),
            ..Run::start(self.name, &order.session, environment, Provenance::of(&store.root))
        };
        if let Some(path) = &order.verified {
            let earlier: Run = file::read(path)?;
            // Another executable's bits, or another device's, say nothing about this one.
            let same = earlier.executable.is_some()
                && earlier.executable == run.executable
                && earlier.seed == run.seed
                && earlier.environment == run.environment;
            trial.verified = same.then_some(earlier);
        }
        let clock = Instant::now();
        let timer = Timer::new(&target)?;
        trial.spend("timer", clock);
        let clock = Instant::now();
        let telemetry = target.telemetry();
        run.telemetry.extend(telemetry.as_ref().map(Telemetry::read));
        trial.spend("telemetry", clock);
        warn_of_delays(&run);
        let recorder = Recorder::start(run, order.record, None)?;
        recorder.exit_on_interrupt()?;
        let execution = Execution {
            flags,
            effort,
            target,
            timer,
            limits: None,
            recorder: Some(recorder.clone()),
            progress: Progress::new(flags, selection.count()),
            lost: None,
            trial: Some(trial),
        };
        let (exit, spent_s) = super::run_cases(execution, &selection, store)?;
        recorder.add_spent(spent_s.into_iter().chain([("whole", started.elapsed().as_secs_f64())]));
        recorder.finish(telemetry.as_ref().map(Telemetry::read))?;
        Ok(exit)
    }
}

/// The delays of the selected cases.
pub fn delays(flags: &Flags, selection: &Selection<'_>) -> BTreeMap<String, u64> {
    let ids = selection.groups.iter().flat_map(|group| &group.cases).map(|case| &case.id);
    ids.filter_map(|id| Some((id.clone(), Delay::of(&flags.delay, id)?))).collect()
}

/// Says that launches are delayed.
pub fn warn_of_delays(run: &Run) {
    if !run.delays.is_empty() {
        eprintln!("warning: launches are delayed on purpose (KERNELGATE_DELAY), nanoseconds: {}", run.delays_text());
    }
}
