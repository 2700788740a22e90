//! Energy of a launch, by NVML's counter of the card's energy.
//!
//! The energy counter of a card advances in steps, on an H100 every 100 ms. A thread reads the
//! counter each millisecond while launches run back to back, so a measurement begins and ends at a
//! counter step, at least 1 s apart; the energy between both steps over the launches between them
//! is the energy of a launch. The measured energy includes the idle power of the card. Deliberately
//! absent: the energy of the host, and passes whose launches read memory that is not in the caches
//! (filling them would be in the energy).

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Stopwatch, plausibility};
use crate::backend::{BackendError, Executable};
use crate::stats::median;

/// Shortest time between the first and the last counter step of a measurement.
const ENERGY_WINDOW: Duration = Duration::from_secs(1);
/// Time after which a counter without a step is not waited for.
const MAX_COUNTER_STEP_TIME: Duration = Duration::from_millis(500);
/// Pause between two readings of the energy counter.
const COUNTER_READ_INTERVAL: Duration = Duration::from_millis(1);
/// Time of the launches that are enqueued together, nanoseconds: the device is idle for some 20 µs
/// after each group.
const LAUNCH_GROUP_NS: f64 = 25e6;
/// Smallest number of counter steps in the energy window.
const MIN_COUNTER_STEPS: usize = 8;
/// Smallest share of the energy window in which launches must run.
const MIN_BUSY_SHARE_FOR_ENERGY: f64 = 0.9;

/// Energy of a launch, or the reason why it was not measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaunchEnergy {
    /// The energy was measured.
    Measured(EnergyMeasurement),
    /// The energy was not measured; a fragment gives the reason: "NVML has no energy counter for
    /// this card".
    NotResolved(String),
}

/// Energy of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EnergyMeasurement {
    /// Energy of one launch, joules.
    pub launch_j: f64,
    /// Relative precision of the energy: the length of one counter step over that of the
    /// measurement.
    pub relative: f64,
    /// Mean power of the card in the window, watts.
    pub power_w: f64,
    /// Length of the energy measurement, seconds.
    pub window_s: f64,
}

impl LaunchEnergy {
    /// The energy measurement, if the energy was measured.
    pub const fn measured_energy(&self) -> Option<&EnergyMeasurement> {
        match self {
            Self::Measured(measured) => Some(measured),
            Self::NotResolved(_) => None,
        }
    }

    /// Checks that the numbers of an energy record are plausible.
    pub fn validate(&self) -> Result<(), String> {
        let Self::Measured(EnergyMeasurement { launch_j, relative, power_w, window_s }) = self
        else {
            return Ok(());
        };
        plausibility::check_seconds("window_s", *window_s)?;
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

/// A step of the energy counter: time and value.
#[derive(Debug, Clone, Copy)]
struct CounterStep {
    at: Duration,
    energy_mj: u64,
}

/// Number of launches that had ended at a point in time.
#[derive(Debug, Clone, Copy)]
struct EndedLaunchesMark {
    at: Duration,
    launches: u64,
}

/// Measures the energy of a launch that takes `launch_ns`: about 1.2 s of launches.
pub fn measure_launch_energy(
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
    launch_ns: f64,
) -> Result<LaunchEnergy, BackendError> {
    let Some(meter) = stopwatch.power().filter(|meter| meter.energy_mj().is_some()).cloned() else {
        return Ok(LaunchEnergy::NotResolved(
            "NVML has no energy counter for this device alone".to_owned(),
        ));
    };
    let group = (LAUNCH_GROUP_NS / launch_ns.max(1.0)).ceil() as u64;
    let (started, done) = (Instant::now(), AtomicBool::new(false));
    let (marks, steps) = thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let steps = watch_energy_counter(|| meter.energy_mj(), started, &done);
            done.store(true, Ordering::Relaxed);
            steps
        });
        let marks = launch_groups_until(&done, executable, stopwatch, group, started);
        done.store(true, Ordering::Relaxed);
        (marks, watch.join().unwrap_or_default())
    });
    Ok(launch_energy(&steps, &marks?, launch_ns))
}

/// Enqueues groups of launches until `done`; when each group had ended.
fn launch_groups_until(
    done: &AtomicBool,
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
    group: u64,
    started: Instant,
) -> Result<Vec<EndedLaunchesMark>, BackendError> {
    let mut marks = vec![EndedLaunchesMark { at: started.elapsed(), launches: 0 }];
    let mut launches = 0;
    while !done.load(Ordering::Relaxed) {
        launches += stopwatch.enqueue_launches(executable, group)?;
        executable.synchronize()?;
        marks.push(EndedLaunchesMark { at: started.elapsed(), launches });
    }
    Ok(marks)
}

/// Reads the counter until its steps fill a window, it stops, or `done`.
fn watch_energy_counter(
    counter: impl Fn() -> Option<u64>,
    started: Instant,
    done: &AtomicBool,
) -> Vec<CounterStep> {
    let (mut steps, mut before) = (Vec::<CounterStep>::new(), counter());
    while !done.load(Ordering::Relaxed) {
        thread::sleep(COUNTER_READ_INTERVAL);
        let (at, now) = (started.elapsed(), counter());
        let (Some(energy_mj), Some(last)) = (now, before) else { break };
        if energy_mj > last {
            steps.push(CounterStep { at, energy_mj });
            before = now;
        }
        let waited = at.saturating_sub(steps.last().map_or(Duration::ZERO, |step| step.at));
        if spans_enough_steps(&steps) || waited > MAX_COUNTER_STEP_TIME {
            break;
        }
    }
    steps
}

fn spans_enough_steps(steps: &[CounterStep]) -> bool {
    steps.len() > MIN_COUNTER_STEPS
        && steps
            .first()
            .zip(steps.last())
            .is_some_and(|(first, last)| last.at - first.at >= ENERGY_WINDOW)
}

/// Launches that had ended at a moment between two marks, evenly spread between both.
fn launches_ended_at(marks: &[EndedLaunchesMark], at: Duration) -> Option<f64> {
    let behind = marks.partition_point(|mark| mark.at < at);
    let (left, right) = (marks.get(behind.checked_sub(1)?)?, marks.get(behind)?);
    let share = (at - left.at).as_secs_f64() / (right.at - left.at).as_secs_f64().max(1e-9);
    Some(share.mul_add((right.launches - left.launches) as f64, left.launches as f64))
}

/// Computes the energy of one launch from the steps of the card's counter and the number of
/// launches between the steps.
fn launch_energy(
    steps: &[CounterStep],
    marks: &[EndedLaunchesMark],
    launch_ns: f64,
) -> LaunchEnergy {
    let not_resolved = |why: String| LaunchEnergy::NotResolved(why);
    // Only launches between the first mark and the last counter step are counted.
    let covered: Vec<(CounterStep, f64)> =
        steps.iter().filter_map(|step| Some((*step, launches_ended_at(marks, step.at)?))).collect();
    let (Some((first, from)), Some((last, to))) = (covered.first(), covered.last()) else {
        return not_resolved("NVML's energy counter did not step".to_owned());
    };
    let window_s = (last.at - first.at).as_secs_f64();
    if covered.len() <= MIN_COUNTER_STEPS {
        return not_resolved(format!("NVML's energy counter stepped {} times", covered.len()));
    }
    let busy = (to - from) * launch_ns * 1e-9 / window_s;
    if busy < MIN_BUSY_SHARE_FOR_ENERGY {
        return not_resolved(format!(
            "launches kept the device busy for {:.0} % of the time",
            100.0 * busy
        ));
    }
    let lengths: Vec<f64> =
        covered.windows(2).map(|pair| (pair[1].0.at - pair[0].0.at).as_secs_f64()).collect();
    let energy_j = (last.energy_mj - first.energy_mj) as f64 * 1e-3;
    LaunchEnergy::Measured(EnergyMeasurement {
        launch_j: energy_j / (to - from),
        relative: (median(&lengths) / window_s).min(1.0),
        power_w: energy_j / window_s,
        window_s,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A card of 500 W whose counter steps each 100 ms.
    fn counter_steps(count: u64) -> Vec<CounterStep> {
        (1..=count)
            .map(|step| CounterStep {
                at: Duration::from_millis(100 * step),
                energy_mj: 50_000 * step,
            })
            .collect()
    }

    /// Groups of 30 ms with `launches` launches each, for 2 s.
    fn regular_marks(launches: u64) -> Vec<EndedLaunchesMark> {
        (0..67)
            .map(|group| EndedLaunchesMark {
                at: Duration::from_millis(30 * group),
                launches: launches * group,
            })
            .collect()
    }

    #[test]
    fn the_energy_window_begins_and_ends_with_a_counter_step() {
        assert!(!spans_enough_steps(&counter_steps(10)), "from 0.1 s to 1.0 s");
        assert!(spans_enough_steps(&counter_steps(11)));
        let energy = launch_energy(&counter_steps(11), &regular_marks(300), 99e3);
        let EnergyMeasurement { launch_j, relative, power_w, window_s } =
            *energy.measured_energy().unwrap();
        assert!((window_s - 1.0).abs() < 1e-9 && (power_w - 500.0).abs() < 1e-9, "{energy:?}");
        assert!((launch_j - 0.05).abs() < 1e-9 && (relative - 0.1).abs() < 1e-9, "{energy:?}");
        energy.validate().unwrap();
    }

    #[test]
    fn counter_steps_without_running_launches_are_excluded() {
        let energy = launch_energy(&counter_steps(40), &regular_marks(300), 99e3);
        assert!((energy.measured_energy().unwrap().window_s - 1.8).abs() < 1e-9, "{energy:?}");
        assert!(
            energy.measured_energy().is_some_and(|energy| (energy.launch_j - 0.05).abs() < 1e-9)
        );
    }

    #[test]
    fn an_idle_device_or_a_counter_without_steps_gives_no_energy() {
        assert!(
            launch_energy(&counter_steps(11), &regular_marks(150), 99e3)
                .measured_energy()
                .is_none()
        );
        assert!(
            launch_energy(&counter_steps(4), &regular_marks(300), 99e3).measured_energy().is_none()
        );
        assert!(launch_energy(&[], &regular_marks(300), 99e3).measured_energy().is_none());
        let wrong =
            EnergyMeasurement { launch_j: -1.0, relative: 0.1, power_w: 1.0, window_s: 1.0 };
        let why = LaunchEnergy::Measured(wrong).validate().unwrap_err();
        assert_eq!(why, "an energy with launch_j of -1");
    }

    #[test]
    fn a_counter_without_new_steps_ends_the_energy_measurement() {
        let done = AtomicBool::new(false);
        assert!(watch_energy_counter(|| None, Instant::now(), &done).is_empty());
        assert!(watch_energy_counter(|| Some(7), Instant::now(), &done).is_empty());
    }
}
