//! Energy of a launch, by NVML's counter of the card's energy.
//!
//! The counter steps (each 100 ms on an H100), so a pass of launches back to back begins and ends on
//! a step, at least 1 s apart; the energy between both, over the launches between both, is that
//! of a launch. What the card draws without work is part of it, and so are the pauses of the host
//! between two groups of launches. Deliberately absent: the energy of the host, and passes whose
//! launches read memory that is not in the caches (filling them would be in the energy).

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::power::PowerMeter;
use super::{Stopwatch, possible};
use crate::backend::{BackendError, Executable};
use crate::stats::median;

/// Shortest time between the first and the last step.
const WINDOW: Duration = Duration::from_secs(1);
/// Time after which a counter without a step is not waited for.
const LONGEST_STEP: Duration = Duration::from_millis(500);
/// Length of a group of launches, after each of which the counter is read: half a step, so that the
/// host's pauses between groups take a small share of the time.
const GROUP_S: f64 = 0.05;
/// Smallest number of steps in the window.
const FEWEST_STEPS: usize = 8;
/// Smallest share of the time in which launches run.
const LEAST_BUSY: f64 = 0.9;

/// Energy of a launch, or why there is none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Energy {
    /// It was measured.
    Measured(MeasuredEnergy),
    /// It was not; a fragment that says why: "NVML has no energy counter for this card".
    NotResolved(String),
}

/// Energy of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MeasuredEnergy {
    /// Energy of a launch, joules.
    pub launch_j: f64,
    /// Length of a step of the counter over that of the window: the energy is that exact, relative.
    pub relative: f64,
    /// Mean power of the card in the window, watts.
    pub power_w: f64,
    /// Length of the window, seconds.
    pub window_s: f64,
}

impl Energy {
    /// The measurement, where there is one.
    pub const fn measured(&self) -> Option<&MeasuredEnergy> {
        match self {
            Self::Measured(measured) => Some(measured),
            Self::NotResolved(_) => None,
        }
    }

    /// Checks the numbers of a record.
    ///
    /// # Errors
    /// A fragment that names the number.
    pub fn validate(&self) -> Result<(), String> {
        let Self::Measured(MeasuredEnergy { launch_j, relative, power_w, window_s }) = self else {
            return Ok(());
        };
        possible::check_seconds("window_s", *window_s)?;
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

/// A reading of the counter behind a group of launches.
#[derive(Debug, Clone, Copy)]
struct CounterReading {
    at: Duration,
    /// Launches so far.
    launches: u64,
    energy_mj: u64,
}

/// Measures the energy of a launch: about 1.2 s of launches, more where one is longer than a step.
///
/// # Errors
/// When a launch fails.
pub fn measure(
    executable: &mut dyn Executable,
    stopwatch: &mut dyn Stopwatch,
) -> Result<Energy, BackendError> {
    let counter = |stopwatch: &dyn Stopwatch| stopwatch.power().and_then(PowerMeter::energy_mj);
    if counter(stopwatch).is_none() {
        return Ok(Energy::NotResolved("NVML has no energy counter for this device".to_owned()));
    }
    let (started, mut busy_ns, mut launches, mut group) = (Instant::now(), 0.0, 0, 1);
    let mut readings = Steps::default();
    loop {
        let begun = Instant::now();
        let sample = stopwatch.time(executable, group)?;
        launches += sample.launches;
        busy_ns += sample.elapsed_ns;
        let launch_s = begun.elapsed().as_secs_f64() / sample.launches as f64;
        group = ((GROUP_S / launch_s.max(1e-9)).ceil() as u64).clamp(1, 2 * sample.launches);
        let at = started.elapsed();
        let Some(energy_mj) = counter(stopwatch) else {
            return Ok(Energy::NotResolved("NVML's energy counter failed".to_owned()));
        };
        readings.add(CounterReading { at, launches, energy_mj });
        let waited = readings.steps.last().map_or(at, |last| at - last.at);
        if waited > LONGEST_STEP.max(Duration::from_secs_f64(2.0 * launch_s)) {
            let why =
                format!("NVML's energy counter did not step for {:.1} s", waited.as_secs_f64());
            return Ok(Energy::NotResolved(why));
        }
        if readings.is_whole() {
            let busy = busy_ns * 1e-9 / at.as_secs_f64();
            return Ok(readings.energy(busy));
        }
    }
}

/// Readings at which the counter had stepped.
#[derive(Debug, Default)]
struct Steps {
    before: Option<u64>,
    steps: Vec<CounterReading>,
}

impl Steps {
    fn add(&mut self, reading: CounterReading) {
        if self.before.is_some_and(|before| reading.energy_mj > before) {
            self.steps.push(reading);
        }
        self.before = Some(reading.energy_mj);
    }

    fn window(&self) -> Option<(&CounterReading, &CounterReading)> {
        self.steps.first().zip(self.steps.last())
    }

    fn is_whole(&self) -> bool {
        self.steps.len() > FEWEST_STEPS
            && self.window().is_some_and(|(first, last)| last.at - first.at >= WINDOW)
    }

    /// The energy of a launch, of which launches kept the device busy for this share of the time.
    fn energy(&self, busy: f64) -> Energy {
        let Some((first, last)) = self.window() else {
            return Energy::NotResolved("NVML's energy counter did not step".to_owned());
        };
        if busy < LEAST_BUSY {
            let why =
                format!("launches kept the device busy for {:.0} % of the time", 100.0 * busy);
            return Energy::NotResolved(why);
        }
        let steps: Vec<f64> =
            self.steps.windows(2).map(|pair| (pair[1].at - pair[0].at).as_secs_f64()).collect();
        let window_s = (last.at - first.at).as_secs_f64();
        let energy_j = (last.energy_mj - first.energy_mj) as f64 * 1e-3;
        Energy::Measured(MeasuredEnergy {
            launch_j: energy_j / (last.launches - first.launches).max(1) as f64,
            relative: (median(&steps) / window_s).min(1.0),
            power_w: energy_j / window_s,
            window_s,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A card of 500 W whose counter steps each 100 ms, read each 10 ms behind 100 launches.
    fn steps(count: u64) -> Steps {
        let mut steps = Steps::default();
        for group in 1..=count {
            steps.add(CounterReading {
                at: Duration::from_millis(10 * group),
                launches: 100 * group,
                energy_mj: 50_000 * (group / 10),
            });
        }
        steps
    }

    #[test]
    fn a_window_begins_and_ends_on_a_step() {
        assert!(!steps(109).is_whole(), "from 0.1 s to 1.0 s");
        let whole = steps(117);
        assert!(whole.is_whole());
        let energy = whole.energy(0.99);
        let MeasuredEnergy { launch_j, relative, power_w, window_s } = *energy.measured().unwrap();
        assert!((window_s - 1.0).abs() < 1e-9 && (power_w - 500.0).abs() < 1e-9, "{energy:?}");
        assert!((launch_j - 0.05).abs() < 1e-9 && (relative - 0.1).abs() < 1e-9, "{energy:?}");
        energy.validate().unwrap();
    }

    #[test]
    fn an_idle_device_and_a_counter_without_steps_have_no_energy() {
        assert!(steps(117).energy(0.5).measured().is_none());
        assert!(steps(9).energy(0.99).measured().is_none());
        let wrong = MeasuredEnergy { launch_j: -1.0, relative: 0.1, power_w: 1.0, window_s: 1.0 };
        let why = Energy::Measured(wrong).validate().unwrap_err();
        assert_eq!(why, "an energy with launch_j of -1");
    }
}
