//! The phases of a case by the host's clock, on any backend.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{BackendError, BenchTarget, Executable};
use crate::harness::running::case_error::{CaseError, guard_panics};
use crate::harness::running::problem::PreparedProblem;
use crate::harness::selection::cases::{ProblemGroup, SelectedCase};
use crate::measure::wall_time::process_cpu_time;
use crate::protocol::RecordedLaunches;
use crate::trace::HostPhaseTime;
use crate::verify::VerifyError;

/// Number of unmeasured launches before the measured ones.
const WARM_UP_REPEATS: u32 = 3;
/// Minimum number of measured launches of a phase.
const MIN_MEASURED_LAUNCHES: usize = 3;
/// Maximum number of measured launches of a phase.
const MAX_PHASE_LAUNCHES: usize = 1000;
/// Time after which no further launch is measured.
const MAX_PHASE_MEASURING_TIME: Duration = Duration::from_millis(300);

/// Measures the preparation, the launches and the reading of outputs. The time of a launch lasts
/// from the call to the end of the launched work. If `repetitions` names no number, launches repeat
/// until a time has passed.
///
/// # Errors
/// Fails if the row panics, or a launch fails.
pub fn measure_case_phases(
    group: &ProblemGroup<'_>,
    case: &SelectedCase,
    ready: &PreparedProblem,
    target: &BenchTarget,
    repetitions: RecordedLaunches,
) -> Result<Vec<HostPhaseTime>, CaseError> {
    let steps = repetitions.steps.map(|steps| steps as usize);
    let counts = steps.map_or(MIN_MEASURED_LAUNCHES..=MAX_PHASE_LAUNCHES, |steps| steps..=steps);
    let warm_up = repetitions.warm_up.unwrap_or(WARM_UP_REPEATS);
    guard_panics(|| {
        let mut executable = None;
        let prepare = measure_phase("prepare", 1..=1, || {
            executable = Some(group.bound.prepare_implementation(
                case.index,
                Arc::clone(&ready.inputs),
                target,
            )?);
            Ok(())
        })?;
        let mut executable: Box<dyn Executable> =
            executable.ok_or_else(|| BackendError::Launch("nothing was prepared".to_owned()))?;
        let phases = (|| {
            let mut launch = || {
                // Launches that carry state on need the reset, so it belongs to the phase.
                executable.reset()?;
                executable.launch()?;
                executable.synchronize()
            };
            let first = measure_phase("first launch", 1..=1, &mut launch)?;
            (0..warm_up).try_for_each(|_| launch())?;
            let launches = measure_phase("launch", counts, &mut launch)?;
            let outputs = measure_phase("outputs", 1..=1, || executable.outputs().map(drop))?;
            Ok(vec![prepare, first, launches, outputs])
        })();
        if matches!(phases, Err(BackendError::Lost(_))) {
            // Freeing memory that a hung kernel uses would wait for the kernel.
            std::mem::forget(executable);
        }
        phases.map_err(VerifyError::from)
    })
}

fn measure_phase(
    name: &str,
    counts: std::ops::RangeInclusive<usize>,
    mut once: impl FnMut() -> Result<(), BackendError>,
) -> Result<HostPhaseTime, BackendError> {
    let (mut elapsed_ns, before, started) = (Vec::new(), process_cpu_time(), Instant::now());
    while elapsed_ns.len() < *counts.start()
        || (elapsed_ns.len() < *counts.end() && started.elapsed() < MAX_PHASE_MEASURING_TIME)
    {
        let clock = Instant::now();
        once()?;
        elapsed_ns.push(clock.elapsed().as_nanos() as f64);
    }
    // Below 1 ms, reading the clocks is a large part of the time.
    let enough = started.elapsed() > Duration::from_millis(1);
    let cpu = process_cpu_time().zip(before).filter(|_| enough);
    let cpu = cpu.map(|(after, before)| after.saturating_sub(before));
    Ok(HostPhaseTime::from_durations(name, &elapsed_ns, cpu.map(|cpu| cpu.as_nanos() as f64)))
}
