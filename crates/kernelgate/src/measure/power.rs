//! Detects whether samples ran at the SM clock that a GPU sustains under this load, or at the
//! higher clock of a short burst after a pause.
//!
//! A GPU at its power cap lowers its SM clock some tens of milliseconds after a load begins. A
//! short sample after a pause therefore runs at a higher SM clock than the GPU sustains. In steady
//! mode a case is launched, as its samples are, until its launch time no longer changes:
//! [`GpuLoadTimeWindows`] decides when. This module (`measure::power`) neither times launches nor
//! decides how many samples follow.

use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

use super::{plausibility, precision};
use crate::backend::BackendError;
use kernelgate_cuda::driver::device::GpuProperties;
use kernelgate_cuda::observe::telemetry::{
    CardTelemetryByNvml, GpuCardReading, throttle_reasons_name_heat_or_hardware,
};

/// Length of the time windows of a load; the mean launch times of successive windows are compared.
pub const LOAD_SETTLING_WINDOW: Duration = Duration::from_millis(100);
/// Length of the time windows into which the samples of a case are divided. The SM clock of a GPU
/// at its power cap may dip for a tenth of a second, which longer windows would average away.
const SAMPLES_TIME_WINDOW: Duration = Duration::from_millis(50);
/// Shortest time that a load runs before the samples of a case at the power cap.
const MIN_LOAD_TIME_AT_POWER_CAP: Duration = Duration::from_millis(150);
/// Time of load after which the power state of a case is recorded as unsettled.
pub const MAX_LOAD_SETTLING_TIME: Duration = Duration::from_secs(1);
/// Longest time that kernelgate waits for a hot GPU to cool.
const MAX_GPU_COOLING_TIME: Duration = Duration::from_secs(10);
/// Number of degrees Celsius by which a hot GPU must cool before the load starts again.
const COOLING_DEGREES_CELSIUS: u32 = 10;
/// Largest number of times that a load is interrupted so that a GPU slowed by heat can cool.
const MAX_COOLING_PAUSES: u32 = 2;
/// Largest relative difference of the launch times in two successive windows of a settled load.
const MAX_RELATIVE_DIFFERENCE_OF_SETTLED_WINDOWS: f64 = 0.015;
/// Largest share of the samples' time for which the GPU of a settled case may idle because the host
/// was delayed; the SM clock rises meanwhile.
const MAX_IDLE_SHARE_OF_SETTLED_CASE: f64 = 0.05;
/// If the SM clock is below this share of the GPU's highest clock, the power cap may have lowered
/// it.
const MIN_UNCAPPED_SM_CLOCK_RATIO: f64 = 0.98;
/// Reason in the record why a case on a MIG partition has no power state.
const MIG_LIMITATION: &str = "a MIG partition shares the card's power with others";
/// Name that NVML gives to the power cap among the throttle reasons.
const NVML_POWER_CAP_REASON: &str = "sw_power_cap";

/// Power mode in which cases are timed: after a load, or in bursts after pauses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimingPowerMode {
    /// Steady mode: before the samples the GPU is loaded until its SM clock is the one that it
    /// sustains.
    #[default]
    #[serde(rename = "steady")]
    SteadyLoad,
    /// Burst mode: pauses between samples keep the average power below the power cap.
    #[serde(rename = "burst")]
    BurstsAfterPauses,
}

impl TimingPowerMode {
    /// Name of the power mode in files and messages.
    pub const fn name_in_files(self) -> &'static str {
        match self {
            Self::SteadyLoad => "steady",
            Self::BurstsAfterPauses => "burst",
        }
    }
}

/// Power state of the GPU in which the samples of a case were taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PowerStateOfSamples {
    /// Steady: the launch time no longer changed under the load, or the GPU was below its power
    /// cap.
    #[serde(rename = "steady")]
    SteadyUnderLoad,
    /// Unsettled: the launch time still changed after [`MAX_LOAD_SETTLING_TIME`], or the samples
    /// spread too much to determine their median.
    #[serde(rename = "unsettled")]
    UnsettledUnderLoad,
    /// Burst: pauses between samples kept the average power of the GPU below its cap.
    #[serde(rename = "burst")]
    BurstsAfterPauses,
    /// Not applicable: the power state has no meaning for this device or cannot be read; the record
    /// contains the reason.
    #[serde(rename = "not_applicable")]
    PowerStateNotApplicable,
}

impl PowerStateOfSamples {
    /// Name of the power state in files and tables.
    pub const fn name_in_files_and_tables(self) -> &'static str {
        match self {
            Self::SteadyUnderLoad => "steady",
            Self::UnsettledUnderLoad => "unsettled",
            Self::BurstsAfterPauses => "burst",
            Self::PowerStateNotApplicable => "n/a",
        }
    }

    /// Returns whether launch times measured in these two power states may be compared. An
    /// unsettled case ran under the same load as a steady case, so the two are comparable; its
    /// median is only less certain.
    pub const fn are_times_comparable_with(self, other: Self) -> bool {
        matches!(
            (self, other),
            (
                Self::SteadyUnderLoad | Self::UnsettledUnderLoad,
                Self::SteadyUnderLoad | Self::UnsettledUnderLoad
            ) | (Self::BurstsAfterPauses, Self::BurstsAfterPauses)
                | (Self::PowerStateNotApplicable, Self::PowerStateNotApplicable)
        )
    }
}

/// Power state of a case's samples in one process run, with NVML's readings of the card after the
/// samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CasePowerRecord {
    /// Power state in which the samples were taken.
    pub state: PowerStateOfSamples,
    /// Reason why the power state of this case is not applicable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "reason")]
    pub reason_not_applicable: Option<String>,
    /// Whether the power cap lowered the SM clock during the samples.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "at_cap")]
    pub at_power_cap: bool,
    /// Only for an unsettled case: range in which the median of another run may lie, as multiples
    /// of the median sample. The range covers the launch times of all windows after the first, and
    /// the 99 % confidence interval of their mean.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<[f64; 2]>,
    /// Share of the samples' wall time during which their launches ran on the GPU: a GPU at its
    /// power cap that idles between samples has a higher clock. The share is absent in records of
    /// kernelgate versions that let the GPU idle between samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "busy")]
    pub gpu_busy_share: Option<f64>,
    /// Power that the card drew at the end of the samples, milliwatts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "power_mw")]
    pub drawn_power_mw: Option<u32>,
    /// Power limit of the card, milliwatts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_mw: Option<u32>,
    /// Temperature of the GPU at the end of the samples, °C.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<u32>,
    /// Throttle reasons at the end of the samples, with NVML's names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[serde(rename = "throttle")]
    pub throttle_reasons: Vec<String>,
    /// Seconds for which the load ran before the first sample.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero_for_serde")]
    #[serde(rename = "settling_s")]
    pub load_before_samples_s: f64,
}

impl CasePowerRecord {
    /// Makes the record of a case whose power state is not applicable, with the reason.
    pub fn with_power_state_not_applicable(reason: &str) -> CasePowerRecord {
        Self {
            state: PowerStateOfSamples::PowerStateNotApplicable,
            reason_not_applicable: Some(reason.to_owned()),
            at_power_cap: false,
            range: None,
            gpu_busy_share: None,
            drawn_power_mw: None,
            power_limit_mw: None,
            temperature_c: None,
            throttle_reasons: Vec::new(),
            load_before_samples_s: 0.0,
        }
    }

    /// Returns whether heat or a hardware slow-down lowered the SM clock at the end of the samples.
    pub fn was_slowed_by_heat_or_hardware(&self) -> bool {
        throttle_reasons_name_heat_or_hardware(&self.throttle_reasons)
    }

    /// Fails if a duration, share or range in this power record is implausible.
    pub fn check_power_record_plausible(&self) -> Result<(), String> {
        plausibility::check_wall_seconds_plausible("settling_s", self.load_before_samples_s)?;
        self.gpu_busy_share
            .map_or(Ok(()), |share| plausibility::check_share_plausible("busy", share))?;
        self.range.map_or(Ok(()), plausibility::check_power_window_range_plausible)
    }
}

/// Why settling ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasonThatGpuLoadEnded {
    /// The GPU is below its power cap, so samples may begin.
    SteadyBelowPowerCap,
    /// At the power cap, the launch times of two successive windows agree, so samples may begin.
    SteadyAtPowerCap,
    /// No two successive windows agreed within [`MAX_LOAD_SETTLING_TIME`]; samples begin although
    /// the load is unsettled.
    UnsteadyAtTimeLimit,
}

/// Launches of one sample of the load that precedes a case's samples, with their time.
#[derive(Debug, Clone, Copy)]
pub struct GpuLoadSample {
    /// Number of launches in the load sample.
    pub launches: u64,
    /// Time of all launches of this load sample together, nanoseconds.
    pub elapsed_ns: f64,
    /// SM clock during the launches of this load sample, MHz; `None` if the device does not report
    /// it.
    pub sm_clock_mhz: Option<f64>,
}

/// A load on the GPU: launches of a case or of a ceiling measurement, timed in one sample after the
/// other without a pause.
pub trait LoadOfGpu {
    /// Runs the launches of the next load sample and times them.
    fn run_load_sample(&mut self) -> Result<GpuLoadSample, BackendError>;

    /// Reads whether the power cap or heat lowers the SM clock, at the end of a window; `clock_mhz`
    /// is the SM clock of the window's last sample.
    fn read_power_cap_and_heat(&mut self, clock_mhz: Option<f64>) -> ClockAndThrottleReading;

    /// From now on, the launches of the next sample are enqueued while a sample runs, because a GPU
    /// at its power cap that idles between samples has a higher clock.
    fn enqueue_samples_ahead(&mut self) -> Result<(), BackendError>;

    /// Pauses the load until a GPU that heat slows down has cooled.
    fn wait_for_hot_gpu_to_cool(&mut self);
}

/// Runs a load on the GPU until the samples of a case may begin; the GPU is still busy when this
/// function returns. If heat slows the GPU down, the load pauses and begins again, at most twice.
pub fn run_load_until_gpu_is_steady(
    load: &mut dyn LoadOfGpu,
) -> Result<(GpuLoadTimeWindows, ReasonThatGpuLoadEnded), BackendError> {
    let mut settling = GpuLoadTimeWindows::default();
    let mut coolings = 0;
    loop {
        let started = Instant::now();
        let GpuLoadSample { launches, elapsed_ns, sm_clock_mhz: clock_mhz } =
            load.run_load_sample()?;
        if !settling.add_load_sample(started.elapsed(), launches, elapsed_ns, clock_mhz) {
            continue;
        }
        let reading = load.read_power_cap_and_heat(clock_mhz);
        if reading.slowed_by_heat_or_hardware == Some(true) && coolings < MAX_COOLING_PAUSES {
            coolings += 1;
            load.wait_for_hot_gpu_to_cool();
            settling = GpuLoadTimeWindows::default();
        } else if let Some(settled) = settling.decide_whether_gpu_load_may_end(&reading) {
            return Ok((settling, settled));
        } else {
            load.enqueue_samples_ahead()?;
        }
    }
}

/// Reads power, throttling, temperature and energy of a GPU through NVML.
pub struct NvmlPowerMeter {
    highest_sm_clock_mhz: f64,
    telemetry: Option<CardTelemetryByNvml>,
    /// NVML handles of the case's GPUs after the first.
    telemetry_of_other_gpus: Vec<CardTelemetryByNvml>,
    /// Reason, known without NVML, why the card's power is shared with other processes (MIG or
    /// MPS).
    reason_gpu_is_shared: Option<&'static str>,
}

impl NvmlPowerMeter {
    /// Opens NVML for a GPU; without NVML the meter has only the highest SM clock, and reads
    /// nothing.
    pub fn open_for_gpu(facts: &GpuProperties) -> NvmlPowerMeter {
        Self {
            highest_sm_clock_mhz: f64::from(facts.max_sm_clock_mhz),
            telemetry: CardTelemetryByNvml::open_card_by_uuid(&facts.gpu_uuid),
            reason_gpu_is_shared: match facts {
                _ if facts.gpu_uuid.starts_with("MIG-") => Some(MIG_LIMITATION),
                _ if facts.mps_enabled => Some("MPS shares the card's power with other processes"),
                _ => None,
            },
            telemetry_of_other_gpus: Vec::new(),
        }
    }

    /// Opens NVML for several GPUs: power and energy are read from the first GPU, heat and other
    /// processes from all GPUs.
    pub fn open_for_gpus<'a>(
        first: &GpuProperties,
        others: impl Iterator<Item = &'a GpuProperties>,
    ) -> NvmlPowerMeter {
        let others = others
            .filter_map(|facts| CardTelemetryByNvml::open_card_by_uuid(&facts.gpu_uuid))
            .collect();
        Self { telemetry_of_other_gpus: others, ..Self::open_for_gpu(first) }
    }

    /// Creates, for tests, a power meter of a card without NVML, which reads nothing.
    #[cfg(test)]
    pub const fn without_nvml_for_tests(shared: Option<&'static str>) -> NvmlPowerMeter {
        Self {
            highest_sm_clock_mhz: 1980.0,
            telemetry: None,
            telemetry_of_other_gpus: Vec::new(),
            reason_gpu_is_shared: shared,
        }
    }

    /// Returns whether heat or a hardware slow-down lowers the SM clock of a GPU now; `None` if
    /// NVML does not report throttle reasons.
    pub fn is_gpu_slowed_by_heat_or_hardware(&self) -> Option<bool> {
        let others = self
            .telemetry_of_other_gpus
            .iter()
            .any(|card| card.is_slowed_by_heat_or_hardware_now() == Some(true));
        self.telemetry.as_ref()?.is_slowed_by_heat_or_hardware_now().map(|slowed| slowed || others)
    }

    /// Reads whether the power cap or heat lowers the SM clock of the GPU, at the end of a window.
    /// Reading the throttle reasons of a GPU takes two calls of NVML.
    pub fn read_power_cap_and_heat_with_nvml(
        &self,
        clock_mhz: Option<f64>,
    ) -> ClockAndThrottleReading {
        let capped = self
            .telemetry
            .as_ref()
            .and_then(CardTelemetryByNvml::is_clock_limited_by_power_cap_now);
        ClockAndThrottleReading {
            sm_clock_mhz: clock_mhz,
            highest_sm_clock_mhz: self.highest_sm_clock_mhz,
            at_power_cap: capped,
            slowed_by_heat_or_hardware: self.is_gpu_slowed_by_heat_or_hardware(),
        }
    }

    /// Waits until the GPU is 10 °C cooler than now, for at most 10 s.
    pub fn wait_until_gpu_is_cooler(&self) {
        let Some(telemetry) = &self.telemetry else { return };
        let Some(hot_c) = telemetry.gpu_temperature_c() else { return };
        let started = Instant::now();
        while started.elapsed() < MAX_GPU_COOLING_TIME
            && telemetry
                .gpu_temperature_c()
                .is_some_and(|now_c| now_c + COOLING_DEGREES_CELSIUS > hot_c)
        {
            std::thread::sleep(LOAD_SETTLING_WINDOW);
        }
    }

    /// Returns the number of other processes that computed on the case's GPUs since `then`; `None`
    /// if NVML does not report it.
    pub fn other_processes_on_gpus_since(&self, then: SystemTime) -> Option<u32> {
        let cards = self.telemetry.iter().chain(&self.telemetry_of_other_gpus);
        let counts: Vec<u32> = cards
            .map(|card| card.other_processes_that_computed_since(then))
            .collect::<Option<_>>()?;
        (!counts.is_empty()).then(|| counts.into_iter().sum())
    }

    /// Reads power, power limit, temperature and throttle reasons of the first GPU; `None` without
    /// NVML. These NVML calls take some milliseconds, so they are never made while samples are
    /// taken.
    pub fn read_card_with_nvml(&self) -> Option<GpuCardReading> {
        self.telemetry.as_ref().map(CardTelemetryByNvml::read_card_sensors)
    }

    /// Returns the energy counter of the card, millijoules; `None` if it has none, if other GPUs or
    /// MIG instances share it, or for several GPUs.
    pub fn energy_counter_mj(&self) -> Option<u64> {
        let alone = self.reason_gpu_is_shared.is_none() && self.telemetry_of_other_gpus.is_empty();
        self.telemetry
            .as_ref()
            .filter(|_| alone)
            .and_then(CardTelemetryByNvml::energy_since_driver_load_mj)
    }

    /// Returns the reason why no power state can be determined for this GPU; `None` if it can.
    pub fn reason_without_power_state(&self) -> Option<&'static str> {
        if self.reason_gpu_is_shared.is_some() {
            return self.reason_gpu_is_shared;
        }
        let Some(telemetry) = &self.telemetry else {
            return Some("NVML is missing, or does not know this device");
        };
        match telemetry.is_clock_limited_by_power_cap_now() {
            _ if telemetry.is_virtual_gpu() => {
                Some("a hypervisor divides the power of the card of a virtual GPU")
            }
            None => Some("NVML reports no throttle reasons here"),
            Some(_) => None,
        }
    }
}

/// Statistics of the samples that were taken after a load had brought the GPU to a steady power
/// state.
#[derive(Debug, Clone, Copy)]
pub struct SamplesAfterLoad<'a> {
    /// Mean launch time in each complete time window of the samples, nanoseconds.
    pub window_mean_launch_ns: &'a [f64],
    /// Median launch time of the samples, nanoseconds.
    pub median_launch_ns: f64,
    /// Share of the samples' time for which the GPU idled because the host was delayed.
    pub gpu_idle_share: f64,
}

impl CasePowerRecord {
    /// Decides whether the samples after a load are steady or unsettled, and makes the power record
    /// of the case.
    pub fn from_samples_after_load(
        (settling, settled): &(GpuLoadTimeWindows, ReasonThatGpuLoadEnded),
        samples: &SamplesAfterLoad<'_>,
        meter: &NvmlPowerMeter,
    ) -> CasePowerRecord {
        let reading = meter.read_card_with_nvml().unwrap_or_default();
        let precise = *settled == ReasonThatGpuLoadEnded::SteadyBelowPowerCap
            || (samples.gpu_idle_share <= MAX_IDLE_SHARE_OF_SETTLED_CASE
                && settling.is_median_precise_with_load_windows(samples.window_mean_launch_ns));
        let at_cap = has_power_cap_among_throttle_reasons(&reading)
            || (*settled != ReasonThatGpuLoadEnded::SteadyBelowPowerCap
                && !reading.was_slowed_by_heat_or_hardware());
        let limitation = meter.reason_without_power_state();
        let state = match settled {
            _ if limitation.is_some() => PowerStateOfSamples::PowerStateNotApplicable,
            ReasonThatGpuLoadEnded::UnsteadyAtTimeLimit => PowerStateOfSamples::UnsettledUnderLoad,
            _ if !precise => PowerStateOfSamples::UnsettledUnderLoad,
            _ => PowerStateOfSamples::SteadyUnderLoad,
        };
        let unsettled = state == PowerStateOfSamples::UnsettledUnderLoad;
        Self {
            state,
            reason_not_applicable: limitation.map(str::to_owned),
            at_power_cap: at_cap && limitation.is_none(),
            range: if unsettled { settling.range_of_other_runs_median(samples) } else { None },
            load_before_samples_s: settling.duration_under_load().as_secs_f64(),
            ..Self::from_nvml_reading(state, reading)
        }
    }

    /// Makes the power record of samples from NVML's reading of the card after these samples.
    pub fn from_nvml_reading(
        state: PowerStateOfSamples,
        reading: GpuCardReading,
    ) -> CasePowerRecord {
        Self {
            state,
            reason_not_applicable: None,
            at_power_cap: has_power_cap_among_throttle_reasons(&reading),
            range: None,
            gpu_busy_share: None,
            drawn_power_mw: reading.power_mw,
            power_limit_mw: reading.power_limit_mw,
            temperature_c: reading.temperature_c,
            throttle_reasons: reading.throttle_reasons,
            load_before_samples_s: 0.0,
        }
    }
}

/// Divides a running load into time windows, and decides from the launch times in the windows when
/// samples may begin.
#[derive(Debug)]
pub struct GpuLoadTimeWindows {
    /// Length of a time window of the load.
    window_length: Duration,
    /// Mean launch time in each complete window, nanoseconds.
    window_mean_launch_ns: Vec<f64>,
    open_window: IncompleteGpuLoadWindow,
    duration_under_load: Duration,
}

/// The time window of a load that is not complete yet.
#[derive(Debug, Default)]
struct IncompleteGpuLoadWindow {
    wall_time: Duration,
    launches: u64,
    gpu_time_ns: f64,
    sm_clock_mhz: Option<f64>,
}

/// SM clock and throttle reasons of the GPU at the end of a time window of the load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClockAndThrottleReading {
    /// SM clock during the window, MHz; `None` if the device does not report it.
    pub sm_clock_mhz: Option<f64>,
    /// Highest SM clock of the GPU, MHz.
    pub highest_sm_clock_mhz: f64,
    /// Whether NVML reports that the power cap lowers the SM clock; `None` if NVML does not report
    /// throttle reasons.
    pub at_power_cap: Option<bool>,
    /// Whether NVML reports that heat or a hardware slow-down lowers the SM clock; `None` if NVML
    /// does not report throttle reasons.
    pub slowed_by_heat_or_hardware: Option<bool>,
}

impl ClockAndThrottleReading {
    /// Returns whether the power cap may lower the SM clock: This is so if the SM clock is clearly
    /// below the highest one, if NVML names the power cap, or if neither clock nor throttle reasons
    /// are known.
    pub fn may_power_cap_lower_sm_clock(&self) -> bool {
        let low = self
            .sm_clock_mhz
            .is_some_and(|clock| clock < MIN_UNCAPPED_SM_CLOCK_RATIO * self.highest_sm_clock_mhz);
        low || self.at_power_cap.unwrap_or(self.sm_clock_mhz.is_none())
    }
}

/// Returns whether NVML's reading contains the power cap among the throttle reasons.
pub fn has_power_cap_among_throttle_reasons(reading: &GpuCardReading) -> bool {
    reading.throttle_reasons.iter().any(|reason| reason == NVML_POWER_CAP_REASON)
}

impl Default for GpuLoadTimeWindows {
    fn default() -> Self {
        Self::with_window_length(LOAD_SETTLING_WINDOW)
    }
}

impl GpuLoadTimeWindows {
    fn with_window_length(window: Duration) -> GpuLoadTimeWindows {
        Self {
            window_length: window,
            window_mean_launch_ns: Vec::new(),
            open_window: IncompleteGpuLoadWindow::default(),
            duration_under_load: Duration::ZERO,
        }
    }

    /// Divides the samples that follow the load into windows, which are shorter than the load's.
    pub fn with_window_length_for_samples() -> GpuLoadTimeWindows {
        Self::with_window_length(SAMPLES_TIME_WINDOW)
    }

    /// Adds a sample of the load: `wall` is its wall time, `elapsed_ns` the GPU time of its
    /// launches. Returns whether the sample completed a time window.
    pub fn add_load_sample(
        &mut self,
        wall: Duration,
        launches: u64,
        elapsed_ns: f64,
        clock_mhz: Option<f64>,
    ) -> bool {
        self.duration_under_load += wall;
        self.open_window.wall_time += wall;
        self.open_window.launches += launches;
        self.open_window.gpu_time_ns += elapsed_ns;
        self.open_window.sm_clock_mhz = clock_mhz.or(self.open_window.sm_clock_mhz);
        if self.open_window.wall_time < self.window_length {
            return false;
        }
        self.window_mean_launch_ns
            .push(self.open_window.gpu_time_ns / self.open_window.launches.max(1) as f64);
        self.open_window = IncompleteGpuLoadWindow::default();
        true
    }

    /// Decides at the end of a window whether the load may end, and why; returns `None` if the load
    /// must go on.
    pub fn decide_whether_gpu_load_may_end(
        &self,
        reading: &ClockAndThrottleReading,
    ) -> Option<ReasonThatGpuLoadEnded> {
        if !reading.may_power_cap_lower_sm_clock() {
            return Some(ReasonThatGpuLoadEnded::SteadyBelowPowerCap);
        }
        if self.duration_under_load >= MIN_LOAD_TIME_AT_POWER_CAP
            && let [.., before, last] = self.window_mean_launch_ns[..]
            && window_times_agree(before, last, MAX_RELATIVE_DIFFERENCE_OF_SETTLED_WINDOWS)
        {
            return Some(ReasonThatGpuLoadEnded::SteadyAtPowerCap);
        }
        (self.duration_under_load >= MAX_LOAD_SETTLING_TIME)
            .then_some(ReasonThatGpuLoadEnded::UnsteadyAtTimeLimit)
    }

    /// Load so far.
    pub const fn duration_under_load(&self) -> Duration {
        self.duration_under_load
    }

    /// Returns the mean launch time in each complete window, nanoseconds.
    pub fn launch_times_by_window_ns(&self) -> &[f64] {
        &self.window_mean_launch_ns
    }

    /// Returns the range in which another run's median may lie, relative to the samples' median,
    /// from the windows of the load and of the samples. The first window of the load is not used,
    /// because it ran at the burst's higher clock. A GPU without idle times would be slower, at
    /// most by the share of the time for which it idled; the upper end of the range includes that
    /// slow-down.
    pub fn range_of_other_runs_median(&self, samples: &SamplesAfterLoad<'_>) -> Option<[f64; 2]> {
        let around_ns = precision::range_of_medians_of_other_runs(samples.window_mean_launch_ns)
            .into_iter()
            .flatten();
        let of_load_ns = self.window_mean_launch_ns.iter().skip(1).copied();
        let relative: Vec<f64> =
            of_load_ns.chain(around_ns).map(|time_ns| time_ns / samples.median_launch_ns).collect();
        let [low, high] = precision::min_and_max(&relative)?;
        Some([low, high * (1.0 + samples.gpu_idle_share)])
    }

    /// Returns whether the median of the samples after this load is precise enough for a settled
    /// case, judged by the windows of samples and load. The load's first and last windows are not
    /// used.
    pub fn is_median_precise_with_load_windows(&self, windows_ns: &[f64]) -> bool {
        let [_, of_load_ns @ .., _] = &self.window_mean_launch_ns[..] else {
            return precision::is_median_of_windows_precise(windows_ns);
        };
        precision::is_median_of_windows_precise(&[of_load_ns, windows_ns].concat())
    }
}

fn window_times_agree(one_ns: f64, other_ns: f64, tolerance: f64) -> bool {
    (one_ns - other_ns).abs() <= tolerance * one_ns.min(other_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    const READING_AT_POWER_CAP: ClockAndThrottleReading = ClockAndThrottleReading {
        sm_clock_mhz: Some(1430.0),
        highest_sm_clock_mhz: 1980.0,
        at_power_cap: Some(true),
        slowed_by_heat_or_hardware: None,
    };

    /// Adds load samples that each fill one window; returns the time after which the load ended,
    /// milliseconds, and why.
    fn gpu_load_end_for_window_times(
        windows_ns: &[f64],
        reading: &ClockAndThrottleReading,
    ) -> (u128, Option<ReasonThatGpuLoadEnded>) {
        let mut settling = GpuLoadTimeWindows::default();
        for &window_ns in windows_ns {
            assert!(settling.add_load_sample(LOAD_SETTLING_WINDOW, 10, 10.0 * window_ns, None));
            if let Some(settled) = settling.decide_whether_gpu_load_may_end(reading) {
                return (settling.duration_under_load().as_millis(), Some(settled));
            }
        }
        (settling.duration_under_load().as_millis(), None)
    }

    #[test]
    fn a_case_below_the_power_cap_needs_one_load_window() {
        let below = ClockAndThrottleReading {
            sm_clock_mhz: Some(1980.0),
            at_power_cap: None,
            ..READING_AT_POWER_CAP
        };
        assert_eq!(
            gpu_load_end_for_window_times(&[1.0], &below),
            (100, Some(ReasonThatGpuLoadEnded::SteadyBelowPowerCap))
        );
        let named = ClockAndThrottleReading { at_power_cap: Some(true), ..below };
        assert_eq!(gpu_load_end_for_window_times(&[1.0], &named), (100, None));
        let low = ClockAndThrottleReading {
            sm_clock_mhz: Some(1700.0),
            at_power_cap: Some(false),
            ..below
        };
        assert_eq!(gpu_load_end_for_window_times(&[1.0], &low), (100, None));
        let blind = ClockAndThrottleReading { sm_clock_mhz: None, ..below };
        assert_eq!(gpu_load_end_for_window_times(&[1.0], &blind), (100, None));
    }

    /// A simulated GPU that heat slows down until it has been cooled this many times.
    struct SimulatedHotGpu {
        coolings_needed: u32,
        coolings_so_far: u32,
    }

    impl LoadOfGpu for SimulatedHotGpu {
        fn run_load_sample(&mut self) -> Result<GpuLoadSample, BackendError> {
            std::thread::sleep(LOAD_SETTLING_WINDOW / 2);
            Ok(GpuLoadSample { launches: 10, elapsed_ns: 10.0, sm_clock_mhz: Some(1980.0) })
        }

        fn read_power_cap_and_heat(&mut self, clock_mhz: Option<f64>) -> ClockAndThrottleReading {
            let slowed = Some(self.coolings_so_far < self.coolings_needed);
            ClockAndThrottleReading {
                sm_clock_mhz: clock_mhz,
                at_power_cap: Some(false),
                slowed_by_heat_or_hardware: slowed,
                ..READING_AT_POWER_CAP
            }
        }

        fn enqueue_samples_ahead(&mut self) -> Result<(), BackendError> {
            Ok(())
        }

        fn wait_for_hot_gpu_to_cool(&mut self) {
            self.coolings_so_far += 1;
        }
    }

    #[test]
    fn the_load_starts_again_after_a_hot_gpu_has_cooled() {
        for (needs, coolings) in [(0, 0), (1, 1), (5, MAX_COOLING_PAUSES)] {
            let mut card = SimulatedHotGpu { coolings_needed: needs, coolings_so_far: 0 };
            let (settling, settled) = run_load_until_gpu_is_steady(&mut card).unwrap();
            assert_eq!(
                (card.coolings_so_far, settled),
                (coolings, ReasonThatGpuLoadEnded::SteadyBelowPowerCap)
            );
            assert_eq!(
                settling.window_mean_launch_ns.len(),
                1,
                "windows before a pause do not count"
            );
        }
    }

    #[test]
    fn a_gpu_slowed_by_heat_is_not_at_its_power_cap() {
        let hot = |reasons: &[&str]| {
            let throttle = reasons.iter().map(|reason| (*reason).to_owned()).collect();
            let reading =
                GpuCardReading { throttle_reasons: throttle, ..GpuCardReading::default() };
            let record =
                CasePowerRecord::from_nvml_reading(PowerStateOfSamples::SteadyUnderLoad, reading);
            (record.at_power_cap, record.was_slowed_by_heat_or_hardware())
        };
        assert_eq!(hot(&["sw_thermal_slowdown"]), (false, true));
        assert_eq!(hot(&["sw_power_cap"]), (true, false));
        assert_eq!(hot(&["hw_slowdown", "sw_power_cap"]), (true, true));
    }

    #[test]
    fn the_load_of_attention_settles_after_its_initial_burst() {
        // Window times of an H100 after a pause: the first 100 ms are a burst at a higher clock.
        let attention = [0.92, 0.995, 1.0, 1.0];
        assert_eq!(
            gpu_load_end_for_window_times(&attention, &READING_AT_POWER_CAP),
            (300, Some(ReasonThatGpuLoadEnded::SteadyAtPowerCap))
        );
        assert_eq!(
            gpu_load_end_for_window_times(&[1.0, 1.0], &READING_AT_POWER_CAP),
            (200, Some(ReasonThatGpuLoadEnded::SteadyAtPowerCap))
        );
    }

    #[test]
    fn a_load_with_wandering_time_is_unsettled_after_a_second() {
        let gemm = [0.93, 0.99, 1.02, 1.05, 1.08, 1.11, 1.14, 1.16, 1.13, 1.10, 1.07];
        assert_eq!(
            gpu_load_end_for_window_times(&gemm, &READING_AT_POWER_CAP),
            (1000, Some(ReasonThatGpuLoadEnded::UnsteadyAtTimeLimit))
        );
        let mut settling = GpuLoadTimeWindows::default();
        for window_ns in gemm {
            settling.add_load_sample(LOAD_SETTLING_WINDOW, 1, window_ns, None);
        }
        let samples = SamplesAfterLoad {
            window_mean_launch_ns: &[1.2],
            median_launch_ns: 1.0,
            gpu_idle_share: 0.0,
        };
        assert_eq!(settling.range_of_other_runs_median(&samples), Some([0.99, 1.2 * 1.0075]));
        let [low, high] = settling
            .range_of_other_runs_median(&SamplesAfterLoad { gpu_idle_share: 0.1, ..samples })
            .unwrap();
        assert!(low == 0.99 && (high - 1.32 * 1.0075).abs() < 1e-12, "{low} {high}");
    }

    #[test]
    fn a_load_window_consists_of_whole_samples() {
        let mut settling = GpuLoadTimeWindows::default();
        assert!(!settling.add_load_sample(Duration::from_millis(60), 3, 30.0, None));
        assert!(settling.add_load_sample(Duration::from_millis(60), 1, 14.0, Some(1500.0)));
        assert_eq!(settling.launch_times_by_window_ns(), [11.0]);
        assert_eq!(settling.duration_under_load(), Duration::from_millis(120));
    }

    /// One launch of 400 ms is one sample of the load, and one window.
    #[test]
    fn a_launch_longer_than_a_load_window_fills_one_window() {
        let settling_time = |launches_ns: &[f64]| {
            let mut settling = GpuLoadTimeWindows::default();
            for &launch_ns in launches_ns {
                assert!(settling.add_load_sample(
                    Duration::from_millis(400),
                    1,
                    launch_ns,
                    Some(1430.0)
                ));
                if let Some(settled) =
                    settling.decide_whether_gpu_load_may_end(&READING_AT_POWER_CAP)
                {
                    return (settling.duration_under_load().as_millis(), Some(settled));
                }
            }
            (settling.duration_under_load().as_millis(), None)
        };
        assert_eq!(settling_time(&[4e8]), (400, None));
        assert_eq!(
            settling_time(&[4e8, 4.01e8]),
            (800, Some(ReasonThatGpuLoadEnded::SteadyAtPowerCap))
        );
        assert_eq!(
            settling_time(&[4e8, 4.4e8, 4.8e8]),
            (1200, Some(ReasonThatGpuLoadEnded::UnsteadyAtTimeLimit))
        );
    }

    #[test]
    fn a_gpu_without_readable_power_has_no_power_state() {
        let record = |meter: &NvmlPowerMeter| {
            let load = (GpuLoadTimeWindows::default(), ReasonThatGpuLoadEnded::UnsteadyAtTimeLimit);
            let samples = SamplesAfterLoad {
                window_mean_launch_ns: &[1.0, 2.0],
                median_launch_ns: 1.5,
                gpu_idle_share: 0.0,
            };
            CasePowerRecord::from_samples_after_load(&load, &samples, meter)
        };
        for (shared, reason) in [
            (None, "NVML is missing, or does not know this device"),
            (Some(MIG_LIMITATION), "a MIG partition shares the card's power with others"),
        ] {
            let CasePowerRecord {
                state,
                reason_not_applicable: found,
                at_power_cap: at_cap,
                range,
                ..
            } = record(&NvmlPowerMeter::without_nvml_for_tests(shared));
            assert_eq!(
                (state, at_cap, range),
                (PowerStateOfSamples::PowerStateNotApplicable, false, None)
            );
            assert_eq!(found.as_deref(), Some(reason));
        }
        assert_eq!(
            NvmlPowerMeter::without_nvml_for_tests(Some(MIG_LIMITATION)).energy_counter_mj(),
            None
        );
    }

    /// Launches of 5 ms on an H100 after a settled load. The SM clock dips for a tenth of a second,
    /// but both windows of 100 ms have the same mean time.
    #[test]
    fn a_clock_drop_during_samples_makes_the_case_unsettled() {
        let launches = [4.92, 4.96, 5.15, 5.15, 5.24, 5.15, 5.05, 5.0, 4.98, 4.98];
        let windows = |mut windows: GpuLoadTimeWindows| {
            for launch_ms in launches.into_iter().flat_map(|launch_ms| [launch_ms; 4]) {
                let wall = Duration::from_secs_f64(launch_ms * 1.03e-3);
                windows.add_load_sample(wall, 1, launch_ms * 1e6, None);
            }
            windows
        };
        let (long, short) = (
            windows(GpuLoadTimeWindows::default()),
            windows(GpuLoadTimeWindows::with_window_length_for_samples()),
        );
        let settled_load = GpuLoadTimeWindows::default();
        assert!(settled_load.is_median_precise_with_load_windows(long.launch_times_by_window_ns()));
        assert!(
            !settled_load.is_median_precise_with_load_windows(short.launch_times_by_window_ns())
        );
    }

    /// In this simulation two successive windows of a load happen to agree at a turning point of a
    /// clock that wanders with a period of half a second.
    #[test]
    fn samples_after_a_wandering_load_are_unsettled() {
        let load = |windows_ns: &[f64]| {
            let mut load = GpuLoadTimeWindows::default();
            for &window_ns in windows_ns {
                load.add_load_sample(LOAD_SETTLING_WINDOW, 1, window_ns, None);
            }
            load
        };
        let samples = [1.0, 1.002, 1.0, 0.999];
        assert!(
            load(&[0.9, 1.0]).is_median_precise_with_load_windows(&samples),
            "the first window is a burst"
        );
        assert!(load(&[0.9, 1.004, 1.0]).is_median_precise_with_load_windows(&samples));
        assert!(!load(&[0.9, 0.97, 1.0, 1.0]).is_median_precise_with_load_windows(&samples));
    }

    #[test]
    fn only_times_in_equal_kinds_of_power_state_are_comparable() {
        use PowerStateOfSamples::{
            BurstsAfterPauses, PowerStateNotApplicable, SteadyUnderLoad, UnsettledUnderLoad,
        };
        assert!(
            SteadyUnderLoad.are_times_comparable_with(UnsettledUnderLoad)
                && BurstsAfterPauses.are_times_comparable_with(BurstsAfterPauses)
        );
        assert!(
            !SteadyUnderLoad.are_times_comparable_with(BurstsAfterPauses)
                && !UnsettledUnderLoad.are_times_comparable_with(PowerStateNotApplicable)
        );
    }

    #[test]
    fn impossible_ranges_of_unsettled_cases_are_refused() {
        let record = CasePowerRecord {
            range: Some([0.99, 1.2]),
            ..CasePowerRecord::with_power_state_not_applicable("the host computes")
        };
        assert_eq!(record.check_power_record_plausible(), Ok(()));
        for range in [[1.2, 0.9], [-1.0, 1.0], [f64::NAN, 1.0], [1.0, f64::INFINITY]] {
            assert!(
                CasePowerRecord { range: Some(range), ..record.clone() }
                    .check_power_record_plausible()
                    .is_err()
            );
        }
    }
}
