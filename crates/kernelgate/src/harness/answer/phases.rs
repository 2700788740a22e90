//! Measures the phases of a case (preparation, launches, reading outputs) with the host's clock, on
//! any backend.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::{BackendError, BenchDevices, LaunchableProblem};
use crate::harness::running::case_error::{WhyCaseHasNoResult, run_with_panics_as_case_failures};
use crate::harness::running::problem::PreparedProblem;
use crate::harness::selection::cases::{SelectedCase, SelectedProblem};
use crate::measure::wall_time::cpu_time_of_this_process;
use crate::protocol::LaunchesToRecord;
use crate::trace::HostTimeOfPhase;
use crate::verify::OutputVerificationError;

/// Number of unmeasured launches before the measured launches of a case.
const WARM_UP_LAUNCHES_BEFORE_PHASES: u32 = 3;
/// Minimum number of measured launches per case.
const MIN_MEASURED_LAUNCHES: usize = 3;
/// Maximum number of measured launches per case.
const MAX_PHASE_LAUNCHES: usize = 1000;
/// After this time, no further launch is started.
const MAX_PHASE_MEASURING_TIME: Duration = Duration::from_millis(300);

/// Measures with the host's clock how long preparation, first launch, launches and reading of
/// outputs take. The time of a launch is from the call until the launched work is finished. If the
/// argument `repetitions` sets no number of launches, launches are repeated for 300 ms, between 3
/// and 1000 times.
///
/// # Errors
/// Fails if the implementation panics, or a launch fails.
pub fn measure_phases_by_host_clock(
    group: &SelectedProblem<'_>,
    case: &SelectedCase,
    ready: &PreparedProblem,
    target: &BenchDevices,
    repetitions: LaunchesToRecord,
) -> Result<Vec<HostTimeOfPhase>, WhyCaseHasNoResult> {
    let steps = repetitions.recorded_launches.map(|steps| steps as usize);
    let counts = steps.map_or(MIN_MEASURED_LAUNCHES..=MAX_PHASE_LAUNCHES, |steps| steps..=steps);
    let warm_up = repetitions.warm_up_launches.unwrap_or(WARM_UP_LAUNCHES_BEFORE_PHASES);
    run_with_panics_as_case_failures(|| {
        let mut executable = None;
        let prepare = time_repetitions_of_phase("prepare", 1..=1, || {
            executable = Some(group.problem.prepare_implementation(
                case.implementation_index,
                Arc::clone(&ready.inputs),
                target,
            )?);
            Ok(())
        })?;
        let mut executable: Box<dyn LaunchableProblem> = executable
            .ok_or_else(|| BackendError::ComputationFailed("nothing was prepared".to_owned()))?;
        let phases = (|| {
            let mut launch = || {
                // If launches carry state, each needs a reset, so the reset is part of the measured
                // phase.
                executable.reset_state()?;
                executable.launch_once()?;
                executable.wait_for_launches()
            };
            let first = time_repetitions_of_phase("first launch", 1..=1, &mut launch)?;
            (0..warm_up).try_for_each(|_| launch())?;
            let launches = time_repetitions_of_phase("launch", counts, &mut launch)?;
            let outputs = time_repetitions_of_phase("outputs", 1..=1, || {
                executable.outputs_on_host().map(drop)
            })?;
            Ok(vec![prepare, first, launches, outputs])
        })();
        if matches!(phases, Err(BackendError::DeviceLost(_))) {
            // The task is leaked, because freeing memory that a hung kernel uses would wait for the
            // kernel forever.
            std::mem::forget(executable);
        }
        phases.map_err(OutputVerificationError::from)
    })
}

fn time_repetitions_of_phase(
    name: &str,
    counts: std::ops::RangeInclusive<usize>,
    mut once: impl FnMut() -> Result<(), BackendError>,
) -> Result<HostTimeOfPhase, BackendError> {
    let (mut elapsed_ns, before, started) =
        (Vec::new(), cpu_time_of_this_process(), Instant::now());
    while elapsed_ns.len() < *counts.start()
        || (elapsed_ns.len() < *counts.end() && started.elapsed() < MAX_PHASE_MEASURING_TIME)
    {
        let clock = Instant::now();
        once()?;
        elapsed_ns.push(clock.elapsed().as_nanos() as f64);
    }
    // Below 1 ms, reading the process's CPU clock would dominate the measurement, so no CPU time is
    // reported.
    let enough = started.elapsed() > Duration::from_millis(1);
    let cpu = cpu_time_of_this_process().zip(before).filter(|_| enough);
    let cpu = cpu.map(|(after, before)| after.saturating_sub(before));
    Ok(HostTimeOfPhase::summarize_durations_of_phase(
        name,
        &elapsed_ns,
        cpu.map(|cpu| cpu.as_nanos() as f64),
    ))
}
