//! Measures the energy of one launch with NVML's energy counter of the card.
//!
//! The energy counter of a card advances in steps, on an H100 every 100 ms. A host thread reads
//! NVML's energy counter each millisecond while launches run back to back. The energy of a launch
//! is the energy between two counter steps, at least 1 s apart, divided by the launches between
//! them. The measured energy of a launch includes the idle power of the card. The energy of the
//! host and of launches with cold caches is not measured, because the energy to flush the caches
//! would be included.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{LaunchStopwatch, plausibility};
use crate::backend::{BackendError, LaunchableProblem};
use crate::stats::median;

/// Shortest time between the first and the last counter step of an energy measurement.
const MIN_ENERGY_MEASUREMENT_TIME: Duration = Duration::from_secs(1);
/// If NVML's energy counter does not advance for this long, the measurement ends.
const MAX_WAIT_FOR_ENERGY_COUNTER_STEP: Duration = Duration::from_millis(500);
/// Pause of the host thread between two readings of NVML's energy counter.
const ENERGY_COUNTER_READ_INTERVAL: Duration = Duration::from_millis(1);
/// Target time of the launches that are enqueued as one group, nanoseconds; the GPU is idle for
/// some 20 µs after each group.
const ENERGY_LAUNCH_GROUP_NS: f64 = 25e6;
/// Smallest number of steps of NVML's energy counter in an energy measurement.
const MIN_ENERGY_COUNTER_STEPS: usize = 8;
/// Smallest share of the energy measurement's time during which launches must run on the GPU.
const MIN_BUSY_SHARE_FOR_ENERGY: f64 = 0.9;

/// Measured energy of one launch, or the reason why it was not measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaunchEnergyOrReason {
    /// The energy was measured.
    Measured(LaunchEnergyMeasurement),
    /// The energy was not measured; the text gives the reason, for example that NVML has no energy
    /// counter for the card.
    #[serde(rename = "not_resolved")]
    NotMeasured(String),
}

/// Measured energy of one launch, with its resolution.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LaunchEnergyMeasurement {
    /// Energy of one launch, joules.
    #[serde(rename = "launch_j")]
    pub energy_per_launch_j: f64,
    /// Relative resolution of the energy: the time between two counter steps divided by the time of
    /// the whole measurement.
    #[serde(rename = "relative")]
    pub relative_resolution: f64,
    /// Mean power of the card during the energy measurement, watts.
    #[serde(rename = "power_w")]
    pub mean_card_power_w: f64,
    /// Time from the first to the last counter step of the energy measurement, seconds.
    #[serde(rename = "window_s")]
    pub measurement_s: f64,
}

impl LaunchEnergyOrReason {
    /// Returns the measured energy, or `None` if it was not measured.
    pub const fn measured_launch_energy(&self) -> Option<&LaunchEnergyMeasurement> {
        match self {
            Self::Measured(measured) => Some(measured),
            Self::NotMeasured(_) => None,
        }
    }

    /// Fails if energy, power, time or resolution in this energy record is implausible.
    pub fn check_energy_plausible(&self) -> Result<(), String> {
        let Self::Measured(LaunchEnergyMeasurement {
            energy_per_launch_j: launch_j,
            relative_resolution: relative,
            mean_card_power_w: power_w,
            measurement_s: window_s,
        }) = self
        else {
            return Ok(());
        };
        plausibility::check_wall_seconds_plausible("window_s", *window_s)?;
        for (name, value, most) in
            [("launch_j", launch_j, 1e6), ("relative", relative, 1.0), ("power_w", power_w, 1e5)]
        {
            if !(*value > 0.0 && *value <= most) {
                return Err(format!("an energy with {name} of {value}"));
            }
        }
        Ok(())
    }
}

/// A moment at which NVML's energy counter advanced, with its new value in millijoules.
#[derive(Debug, Clone, Copy)]
struct EnergyCounterStep {
    time_of_step: Duration,
    energy_mj: u64,
}

/// Number of launches that had ended at a moment of the energy measurement.
#[derive(Debug, Clone, Copy)]
struct EndedLaunchesAtMoment {
    moment_since_start: Duration,
    ended_launches: u64,
}

/// Measures the energy of a launch that takes `launch_ns` nanoseconds, with about 1.2 s of
/// launches.
pub fn measure_launch_energy(
    executable: &mut dyn LaunchableProblem,
    stopwatch: &mut dyn LaunchStopwatch,
    launch_ns: f64,
) -> Result<LaunchEnergyOrReason, BackendError> {
    let Some(meter) =
        stopwatch.power_meter().filter(|meter| meter.energy_counter_mj().is_some()).cloned()
    else {
        return Ok(LaunchEnergyOrReason::NotMeasured(
            "NVML has no energy counter for this device alone".to_owned(),
        ));
    };
    let group = (ENERGY_LAUNCH_GROUP_NS / launch_ns.max(1.0)).ceil() as u64;
    let (started, done) = (Instant::now(), AtomicBool::new(false));
    let (marks, steps) = thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let steps = record_energy_counter_steps(|| meter.energy_counter_mj(), started, &done);
            done.store(true, Ordering::Relaxed);
            steps
        });
        let marks = run_launch_groups_until_done(&done, executable, stopwatch, group, started);
        done.store(true, Ordering::Relaxed);
        (marks, watch.join().unwrap_or_default())
    });
    Ok(launch_energy_from_counter_steps(&steps, &marks?, launch_ns))
}

/// Enqueues groups of launches until the flag `done` is set; returns when each group had ended.
fn run_launch_groups_until_done(
    done: &AtomicBool,
    executable: &mut dyn LaunchableProblem,
    stopwatch: &mut dyn LaunchStopwatch,
    group: u64,
    started: Instant,
) -> Result<Vec<EndedLaunchesAtMoment>, BackendError> {
    let mut marks =
        vec![EndedLaunchesAtMoment { moment_since_start: started.elapsed(), ended_launches: 0 }];
    let mut launches = 0;
    while !done.load(Ordering::Relaxed) {
        launches += stopwatch.enqueue_launches_without_waiting(executable, group)?;
        executable.wait_for_launches()?;
        marks.push(EndedLaunchesAtMoment {
            moment_since_start: started.elapsed(),
            ended_launches: launches,
        });
    }
    Ok(marks)
}

/// Reads NVML's energy counter until enough steps are seen, the counter stops to advance, or the
/// flag `done` is set; returns the steps.
fn record_energy_counter_steps(
    counter: impl Fn() -> Option<u64>,
    started: Instant,
    done: &AtomicBool,
) -> Vec<EnergyCounterStep> {
    let (mut steps, mut before) = (Vec::<EnergyCounterStep>::new(), counter());
    while !done.load(Ordering::Relaxed) {
        thread::sleep(ENERGY_COUNTER_READ_INTERVAL);
        let (at, now) = (started.elapsed(), counter());
        let (Some(energy_mj), Some(last)) = (now, before) else { break };
        if energy_mj > last {
            steps.push(EnergyCounterStep { time_of_step: at, energy_mj });
            before = now;
        }
        let waited =
            at.saturating_sub(steps.last().map_or(Duration::ZERO, |step| step.time_of_step));
        if are_energy_counter_steps_sufficient(&steps) || waited > MAX_WAIT_FOR_ENERGY_COUNTER_STEP
        {
            break;
        }
    }
    steps
}

fn are_energy_counter_steps_sufficient(steps: &[EnergyCounterStep]) -> bool {
    steps.len() > MIN_ENERGY_COUNTER_STEPS
        && steps.first().zip(steps.last()).is_some_and(|(first, last)| {
            last.time_of_step - first.time_of_step >= MIN_ENERGY_MEASUREMENT_TIME
        })
}

/// Returns the number of launches that had ended at a moment, interpolated linearly between the
/// marks before and after the moment.
fn interpolated_ended_launches(marks: &[EndedLaunchesAtMoment], at: Duration) -> Option<f64> {
    let behind = marks.partition_point(|mark| mark.moment_since_start < at);
    let (left, right) = (marks.get(behind.checked_sub(1)?)?, marks.get(behind)?);
    let share = (at - left.moment_since_start).as_secs_f64()
        / (right.moment_since_start - left.moment_since_start).as_secs_f64().max(1e-9);
    Some(
        share.mul_add(
            (right.ended_launches - left.ended_launches) as f64,
            left.ended_launches as f64,
        ),
    )
}

/// Computes the energy of one launch from the steps of the card's energy counter and the number of
/// launches between the steps.
fn launch_energy_from_counter_steps(
    steps: &[EnergyCounterStep],
    marks: &[EndedLaunchesAtMoment],
    launch_ns: f64,
) -> LaunchEnergyOrReason {
    let not_resolved = |why: String| LaunchEnergyOrReason::NotMeasured(why);
    // Only counter steps at which the number of ended launches is known are used.
    let covered: Vec<(EnergyCounterStep, f64)> = steps
        .iter()
        .filter_map(|step| Some((*step, interpolated_ended_launches(marks, step.time_of_step)?)))
        .collect();
    let (Some((first, from)), Some((last, to))) = (covered.first(), covered.last()) else {
        return not_resolved("NVML's energy counter did not step".to_owned());
    };
    let window_s = (last.time_of_step - first.time_of_step).as_secs_f64();
    if covered.len() <= MIN_ENERGY_COUNTER_STEPS {
        return not_resolved(format!("NVML's energy counter stepped {} times", covered.len()));
    }
    let busy = (to - from) * launch_ns * 1e-9 / window_s;
    if busy < MIN_BUSY_SHARE_FOR_ENERGY {
        return not_resolved(format!(
            "launches kept the device busy for {:.0} % of the time",
            100.0 * busy
        ));
    }
    let lengths: Vec<f64> = covered
        .windows(2)
        .map(|pair| (pair[1].0.time_of_step - pair[0].0.time_of_step).as_secs_f64())
        .collect();
    let energy_j = (last.energy_mj - first.energy_mj) as f64 * 1e-3;
    LaunchEnergyOrReason::Measured(LaunchEnergyMeasurement {
        energy_per_launch_j: energy_j / (to - from),
        relative_resolution: (median(&lengths) / window_s).min(1.0),
        mean_card_power_w: energy_j / window_s,
        measurement_s: window_s,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates the energy counter of a card that draws 500 W and whose counter steps every 100
    /// ms.
    fn energy_counter_steps_of_500_w_card(count: u64) -> Vec<EnergyCounterStep> {
        (1..=count)
            .map(|step| EnergyCounterStep {
                time_of_step: Duration::from_millis(100 * step),
                energy_mj: 50_000 * step,
            })
            .collect()
    }

    /// Simulates 2 s of launch groups of 30 ms with `launches` launches each.
    fn ended_launches_of_30_ms_groups(launches: u64) -> Vec<EndedLaunchesAtMoment> {
        (0..67)
            .map(|group| EndedLaunchesAtMoment {
                moment_since_start: Duration::from_millis(30 * group),
                ended_launches: launches * group,
            })
            .collect()
    }

    #[test]
    fn the_energy_measurement_is_bounded_by_counter_steps() {
        assert!(
            !are_energy_counter_steps_sufficient(&energy_counter_steps_of_500_w_card(10)),
            "from 0.1 s to 1.0 s"
        );
        assert!(are_energy_counter_steps_sufficient(&energy_counter_steps_of_500_w_card(11)));
        let energy = launch_energy_from_counter_steps(
            &energy_counter_steps_of_500_w_card(11),
            &ended_launches_of_30_ms_groups(300),
            99e3,
        );
        let LaunchEnergyMeasurement {
            energy_per_launch_j: launch_j,
            relative_resolution: relative,
            mean_card_power_w: power_w,
            measurement_s: window_s,
        } = *energy.measured_launch_energy().unwrap();
        assert!((window_s - 1.0).abs() < 1e-9 && (power_w - 500.0).abs() < 1e-9, "{energy:?}");
        assert!((launch_j - 0.05).abs() < 1e-9 && (relative - 0.1).abs() < 1e-9, "{energy:?}");
        energy.check_energy_plausible().unwrap();
    }

    #[test]
    fn energy_counter_steps_without_launches_are_excluded() {
        let energy = launch_energy_from_counter_steps(
            &energy_counter_steps_of_500_w_card(40),
            &ended_launches_of_30_ms_groups(300),
            99e3,
        );
        assert!(
            (energy.measured_launch_energy().unwrap().measurement_s - 1.8).abs() < 1e-9,
            "{energy:?}"
        );
        assert!(
            energy
                .measured_launch_energy()
                .is_some_and(|energy| (energy.energy_per_launch_j - 0.05).abs() < 1e-9)
        );
    }

    #[test]
    fn an_idle_gpu_or_a_counter_without_steps_gives_no_energy() {
        assert!(
            launch_energy_from_counter_steps(
                &energy_counter_steps_of_500_w_card(11),
                &ended_launches_of_30_ms_groups(150),
                99e3
            )
            .measured_launch_energy()
            .is_none()
        );
        assert!(
            launch_energy_from_counter_steps(
                &energy_counter_steps_of_500_w_card(4),
                &ended_launches_of_30_ms_groups(300),
                99e3
            )
            .measured_launch_energy()
            .is_none()
        );
        assert!(
            launch_energy_from_counter_steps(&[], &ended_launches_of_30_ms_groups(300), 99e3)
                .measured_launch_energy()
                .is_none()
        );
        let wrong = LaunchEnergyMeasurement {
            energy_per_launch_j: -1.0,
            relative_resolution: 0.1,
            mean_card_power_w: 1.0,
            measurement_s: 1.0,
        };
        let why = LaunchEnergyOrReason::Measured(wrong).check_energy_plausible().unwrap_err();
        assert_eq!(why, "an energy with launch_j of -1");
    }

    #[test]
    fn an_energy_counter_without_new_steps_ends_the_reading() {
        let done = AtomicBool::new(false);
        assert!(record_energy_counter_steps(|| None, Instant::now(), &done).is_empty());
        assert!(record_energy_counter_steps(|| Some(7), Instant::now(), &done).is_empty());
    }
}
