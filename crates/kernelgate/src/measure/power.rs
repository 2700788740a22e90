//! Power state: whether samples ran at the clock that a card sustains under this load, or in the
//! burst that follows a pause.
//!
//! A card at its power cap lowers its clock some tens of milliseconds after a load begins. A short
//! sample after a pause therefore runs above the sustained clock. In the steady state a case is
//! launched, the way it is sampled, until its time no longer changes: [`SettlingWindows`] decides
//! when. Deliberately absent: how launches are timed, how many samples follow.

use std::time::{Duration, Instant, SystemTime};

use serde::{Deserialize, Serialize};

use super::{plausibility, precision};
use crate::backend::BackendError;
use kernelgate_cuda::driver::device::DeviceFacts;
use kernelgate_cuda::observe::telemetry::{CardReading, CardTelemetry, names_slowdown};

/// Length of the windows of a load that are compared.
pub const SETTLING_WINDOW: Duration = Duration::from_millis(100);
/// Length of the windows into which samples are divided. The clock of a capped card may dip for a
/// tenth of a second, which longer windows average away.
const SAMPLE_WINDOW: Duration = Duration::from_millis(50);
/// Shortest load before the samples of a case at the power cap.
const LEAST_LOAD_TIME: Duration = Duration::from_millis(150);
/// Time after which a case is called unsettled.
pub const MAX_SETTLING_TIME: Duration = Duration::from_secs(1);
/// Longest time to wait for a hot card to cool.
const MAX_COOLING_TIME: Duration = Duration::from_secs(10);
/// Degrees below the slow-down temperature at which the load of a hot card starts again.
const COOLED_DEGREES: u32 = 10;
/// Times that a load begins again because heat slowed the card down.
const MAX_COOLINGS: u32 = 2;
/// Largest relative difference of two successive windows of a settled load.
const MAX_SETTLED_WINDOW_DIFFERENCE: f64 = 0.015;
/// Largest share of its samples' time that the card of a settled case waits for a host that was
/// held up: its clock rises meanwhile.
const MAX_IDLE_SHARE: f64 = 0.05;
/// A clock below this share of the highest clock may be due to the power cap.
const FULL_CLOCK_RATIO: f64 = 0.98;
/// Reason why a MIG partition has no power state.
const MIG_LIMITATION: &str = "a MIG partition shares the card's power with others";
/// NVML's name of the power cap among the throttle reasons.
const POWER_CAP: &str = "sw_power_cap";

/// Power state in which a case is timed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PowerMode {
    /// Mode of timing: the card runs at the clock that it sustains under this load.
    #[default]
    Steady,
    /// Mode of timing: pauses between samples keep the average power below the cap.
    Burst,
}

impl PowerMode {
    /// Name of the power mode in files and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Steady => "steady",
            Self::Burst => "burst",
        }
    }
}

/// Power state in which a case's samples were taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PowerState {
    /// Steady: the time of launches no longer changed under the load, or the card was below its
    /// power cap.
    Steady,
    /// The time still changed after [`MAX_SETTLING_TIME`], or the samples do not fix their median.
    Unsettled,
    /// Burst: pauses between samples kept the average power below the cap.
    Burst,
    /// The power state has no meaning here, or cannot be read; the record has the reason.
    NotApplicable,
}

impl PowerState {
    /// Name of the power state in files and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Steady => "steady",
            Self::Unsettled => "unsettled",
            Self::Burst => "burst",
            Self::NotApplicable => "n/a",
        }
    }

    /// Returns whether times in these two power states may be compared. An unsettled case ran under
    /// the same load as a steady one, but its interval is wider.
    pub const fn comparable(self, other: Self) -> bool {
        matches!(
            (self, other),
            (Self::Steady | Self::Unsettled, Self::Steady | Self::Unsettled)
                | (Self::Burst, Self::Burst)
                | (Self::NotApplicable, Self::NotApplicable)
        )
    }
}

/// Power state of a case in one process run, with the card's readings behind its samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PowerRecord {
    /// The state.
    pub state: PowerState,
    /// Reason why no power state applies to the case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Whether the power cap limited the SM clock.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_cap: bool,
    /// For an unsettled case only: where another run's median may lie, relative to the median
    /// sample. The range holds each window after the first and the mean's 99 % interval.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<[f64; 2]>,
    /// Share of the samples' wall time during which their launches ran: a card at its cap that
    /// idles between samples has a higher clock. Absent in records of versions that let the card
    /// idle between samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy: Option<f64>,
    /// Power drawn at the end of the samples, milliwatts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_mw: Option<u32>,
    /// Power that the card may draw, milliwatts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power_limit_mw: Option<u32>,
    /// Temperature of the GPU at the end of the samples, °C.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<u32>,
    /// Throttle reasons at the end of the samples, by NVML's names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub throttle: Vec<String>,
    /// Seconds of load before the first sample.
    #[serde(default, skip_serializing_if = "crate::measure::is_zero")]
    pub settling_s: f64,
}

impl PowerRecord {
    /// A case whose power state is not applicable, with the reason.
    pub fn not_applicable(reason: &str) -> PowerRecord {
        Self {
            state: PowerState::NotApplicable,
            reason: Some(reason.to_owned()),
            at_cap: false,
            range: None,
            busy: None,
            power_mw: None,
            power_limit_mw: None,
            temperature_c: None,
            throttle: Vec::new(),
            settling_s: 0.0,
        }
    }

    /// Returns whether heat or a slow-down of the hardware limited the clock at the end of the
    /// samples.
    pub fn was_slowed(&self) -> bool {
        names_slowdown(&self.throttle)
    }

    /// Checks that the numbers of a power record are plausible.
    pub fn validate(&self) -> Result<(), String> {
        plausibility::check_seconds("settling_s", self.settling_s)?;
        self.busy.map_or(Ok(()), |share| plausibility::check_share("busy", share))?;
        self.range.map_or(Ok(()), plausibility::check_power_range)
    }
}

/// Why settling ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SettlingEnd {
    /// The load ended because the average power of the card is below its cap.
    BelowCap,
    /// The load ended because two successive windows at the power cap agree.
    AtCap,
    /// The load ended because no two successive windows agreed within [`MAX_SETTLING_TIME`].
    Unsettled,
}

/// One sample of the load before a case's samples.
#[derive(Debug, Clone, Copy)]
pub struct TimedLaunches {
    /// Launches in the sample.
    pub launches: u64,
    /// Time of all launches of the load sample together, nanoseconds.
    pub elapsed_ns: f64,
    /// SM clock during the load's launches, MHz, if the device reports it.
    pub clock_mhz: Option<f64>,
}

/// Launches of a case or a ceiling, timed in one sample after the other without a pause.
pub trait GpuLoad {
    /// Takes the next sample.
    fn take_load_sample(&mut self) -> Result<TimedLaunches, BackendError>;

    /// Reads whether the power cap or heat limits the clock, at the end of a window; `clock_mhz` is
    /// the SM clock of the window's last sample.
    fn cap_reading(&mut self, clock_mhz: Option<f64>) -> CapReading;

    /// From now on, enqueues the next sample's launches while one runs: the clock of a capped card
    /// depends on the time that the card idles between samples.
    fn keep_loaded(&mut self) -> Result<(), BackendError>;

    /// Waits for a card that heat slows down to cool.
    fn cool_card(&mut self);
}

/// Runs a load until samples may begin; the load still runs when this function returns. If heat
/// slows the card down, the load pauses and begins again, twice at most.
pub fn wait_until_steady(
    load: &mut dyn GpuLoad,
) -> Result<(SettlingWindows, SettlingEnd), BackendError> {
    let mut settling = SettlingWindows::default();
    let mut coolings = 0;
    loop {
        let started = Instant::now();
        let TimedLaunches { launches, elapsed_ns, clock_mhz } = load.take_load_sample()?;
        if !settling.add(started.elapsed(), launches, elapsed_ns, clock_mhz) {
            continue;
        }
        let reading = load.cap_reading(clock_mhz);
        if reading.slowed == Some(true) && coolings < MAX_COOLINGS {
            coolings += 1;
            load.cool_card();
            settling = SettlingWindows::default();
        } else if let Some(settled) = settling.decide(&reading) {
            return Ok((settling, settled));
        } else {
            load.keep_loaded()?;
        }
    }
}

/// Reads the power state of one card.
pub struct PowerMeter {
    highest_mhz: f64,
    telemetry: Option<CardTelemetry>,
    /// Telemetry of the other GPUs of the set.
    others: Vec<CardTelemetry>,
    /// Reason why the card's power is not that of one process alone, if the reason is known without
    /// NVML.
    shared: Option<&'static str>,
}

impl PowerMeter {
    /// Opens NVML for a card; a card without it has a meter that reads clocks only.
    pub fn open_for_device(facts: &DeviceFacts) -> PowerMeter {
        Self {
            highest_mhz: f64::from(facts.max_clock_mhz),
            telemetry: CardTelemetry::open_card(&facts.uuid),
            shared: match facts {
                _ if facts.uuid.starts_with("MIG-") => Some(MIG_LIMITATION),
                _ if facts.mps => Some("MPS shares the card's power with other processes"),
                _ => None,
            },
            others: Vec::new(),
        }
    }

    /// Opens NVML for the cards of a set: power and energy are read from the first card, heat and
    /// other processes from all cards.
    pub fn open_for_devices<'a>(
        first: &DeviceFacts,
        others: impl Iterator<Item = &'a DeviceFacts>,
    ) -> PowerMeter {
        let others = others.filter_map(|facts| CardTelemetry::open_card(&facts.uuid)).collect();
        Self { others, ..Self::open_for_device(first) }
    }

    /// Creates a power meter for a card without NVML, which reads nothing.
    #[cfg(test)]
    pub const fn without_nvml(shared: Option<&'static str>) -> PowerMeter {
        Self { highest_mhz: 1980.0, telemetry: None, others: Vec::new(), shared }
    }

    /// Returns whether heat or a slow-down of the hardware limits the clock now; `None` if NVML
    /// does not report reasons.
    pub fn is_slowed_by_hardware(&self) -> Option<bool> {
        let others = self.others.iter().any(|card| card.is_slowed_by_hardware() == Some(true));
        self.telemetry.as_ref()?.is_slowed_by_hardware().map(|slowed| slowed || others)
    }

    /// Reads whether the power cap or heat holds the card's clock down, at the end of a window.
    /// Reading whether the cap limits the clock takes two calls of NVML.
    pub fn cap_reading(&self, clock_mhz: Option<f64>) -> CapReading {
        let capped = self.telemetry.as_ref().and_then(CardTelemetry::is_power_capped);
        CapReading {
            clock_mhz,
            highest_mhz: self.highest_mhz,
            capped,
            slowed: self.is_slowed_by_hardware(),
        }
    }

    /// Waits until the card is 10 °C cooler, for at most 10 s.
    pub fn cool_card(&self) {
        let Some(telemetry) = &self.telemetry else { return };
        let Some(hot_c) = telemetry.temperature_c() else { return };
        let started = Instant::now();
        while started.elapsed() < MAX_COOLING_TIME
            && telemetry.temperature_c().is_some_and(|now_c| now_c + COOLED_DEGREES > hot_c)
        {
            std::thread::sleep(SETTLING_WINDOW);
        }
    }

    /// Number of other processes that computed on the card since `then`; `None` if NVML does not
    /// report it.
    pub fn others_computing_since(&self, then: SystemTime) -> Option<u32> {
        let cards = self.telemetry.iter().chain(&self.others);
        let counts: Vec<u32> =
            cards.map(|card| card.others_computing_since(then)).collect::<Option<_>>()?;
        (!counts.is_empty()).then(|| counts.into_iter().sum())
    }

    /// Reads every quantity of the card that NVML reports. Reading NVML takes some milliseconds, so
    /// it is never done while samples are taken.
    pub fn reading(&self) -> Option<CardReading> {
        self.telemetry.as_ref().map(CardTelemetry::read_card)
    }

    /// Energy that the card has used, millijoules; `None` if it has no counter, if other GPUs or
    /// instances share the counter, and for a set of cards.
    pub fn energy_mj(&self) -> Option<u64> {
        let alone = self.shared.is_none() && self.others.is_empty();
        self.telemetry.as_ref().filter(|_| alone).and_then(CardTelemetry::energy_mj)
    }

    /// Reason why a power state cannot be stated for this card; `None` if it can.
    pub fn limitation(&self) -> Option<&'static str> {
        if self.shared.is_some() {
            return self.shared;
        }
        let Some(telemetry) = &self.telemetry else {
            return Some("NVML is missing, or does not know this device");
        };
        match telemetry.is_power_capped() {
            _ if telemetry.is_virtual() => {
                Some("a hypervisor divides the power of the card of a virtual GPU")
            }
            None => Some("NVML reports no throttle reasons here"),
            Some(_) => None,
        }
    }
}

/// Summary of the samples that were taken after a load brought the card to a steady state.
#[derive(Debug, Clone, Copy)]
pub struct SamplesBehindLoad<'a> {
    /// Time of a launch in each whole window of the samples, nanoseconds.
    pub windows_ns: &'a [f64],
    /// Median time of a launch, nanoseconds.
    pub median_ns: f64,
    /// Share of the samples' time that the card waited for a host that was held up.
    pub idle: f64,
}

impl PowerRecord {
    /// Decides whether samples that were taken behind a load are settled, and records their power
    /// state.
    pub fn from_samples_behind_load(
        (settling, settled): &(SettlingWindows, SettlingEnd),
        samples: &SamplesBehindLoad<'_>,
        meter: &PowerMeter,
    ) -> PowerRecord {
        let reading = meter.reading().unwrap_or_default();
        let precise = *settled == SettlingEnd::BelowCap
            || (samples.idle <= MAX_IDLE_SHARE && settling.median_is_precise(samples.windows_ns));
        let at_cap = names_power_cap(&reading)
            || (*settled != SettlingEnd::BelowCap && !reading.is_slowed_by_hardware());
        let limitation = meter.limitation();
        let state = match settled {
            _ if limitation.is_some() => PowerState::NotApplicable,
            SettlingEnd::Unsettled => PowerState::Unsettled,
            _ if !precise => PowerState::Unsettled,
            _ => PowerState::Steady,
        };
        let unsettled = state == PowerState::Unsettled;
        Self {
            state,
            reason: limitation.map(str::to_owned),
            at_cap: at_cap && limitation.is_none(),
            range: if unsettled { settling.relative_window_range(samples) } else { None },
            settling_s: settling.elapsed().as_secs_f64(),
            ..Self::from_reading(state, reading)
        }
    }

    /// Builds the power record of samples from a card reading taken after them.
    pub fn from_reading(state: PowerState, reading: CardReading) -> PowerRecord {
        Self {
            state,
            reason: None,
            at_cap: names_power_cap(&reading),
            range: None,
            busy: None,
            power_mw: reading.power_mw,
            power_limit_mw: reading.power_limit_mw,
            temperature_c: reading.temperature_c,
            throttle: reading.throttle,
            settling_s: 0.0,
        }
    }
}

/// Decides from windows of a running load when its samples may begin.
#[derive(Debug)]
pub struct SettlingWindows {
    /// Length of a window.
    window: Duration,
    /// Nanoseconds of a launch in each complete window.
    windows_ns: Vec<f64>,
    open: LoadWindow,
    elapsed: Duration,
}

/// A time window of the load that has not ended yet.
#[derive(Debug, Default)]
struct LoadWindow {
    wall: Duration,
    launches: u64,
    busy_ns: f64,
    clock_mhz: Option<f64>,
}

/// State of the card at the end of a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CapReading {
    /// SM clock during the window, MHz; `None` if the device does not report it.
    pub clock_mhz: Option<f64>,
    /// Highest SM clock that the card supports, MHz.
    pub highest_mhz: f64,
    /// Whether NVML names the power cap as a reason for the clock; `None` if NVML does not report
    /// reasons.
    pub capped: Option<bool>,
    /// Whether NVML names heat or a slow-down of the hardware as a reason for the clock; `None` if
    /// NVML does not report reasons.
    pub slowed: Option<bool>,
}

impl CapReading {
    /// Returns whether the power cap may limit the clock: The power cap may hold the clock down if
    /// NVML names it, if NVML reports nothing, or if the clock is clearly below the highest one.
    pub fn may_be_capped(&self) -> bool {
        let low = self.clock_mhz.is_some_and(|clock| clock < FULL_CLOCK_RATIO * self.highest_mhz);
        low || self.capped.unwrap_or(self.clock_mhz.is_none())
    }
}

/// Returns whether NVML's reading names the power cap as a reason for the clock.
pub fn names_power_cap(reading: &CardReading) -> bool {
    reading.throttle.iter().any(|reason| reason == POWER_CAP)
}

impl Default for SettlingWindows {
    fn default() -> Self {
        Self::in_windows(SETTLING_WINDOW)
    }
}

impl SettlingWindows {
    fn in_windows(window: Duration) -> SettlingWindows {
        Self {
            window,
            windows_ns: Vec::new(),
            open: LoadWindow::default(),
            elapsed: Duration::ZERO,
        }
    }

    /// Settling during the samples after the load, in shorter windows.
    pub fn while_sampling() -> SettlingWindows {
        Self::in_windows(SAMPLE_WINDOW)
    }

    /// Adds a sample of the load, which took `wall` in all. Adds a sample; returns whether it
    /// completed a window.
    pub fn add(
        &mut self,
        wall: Duration,
        launches: u64,
        elapsed_ns: f64,
        clock_mhz: Option<f64>,
    ) -> bool {
        self.elapsed += wall;
        self.open.wall += wall;
        self.open.launches += launches;
        self.open.busy_ns += elapsed_ns;
        self.open.clock_mhz = clock_mhz.or(self.open.clock_mhz);
        if self.open.wall < self.window {
            return false;
        }
        self.windows_ns.push(self.open.busy_ns / self.open.launches.max(1) as f64);
        self.open = LoadWindow::default();
        true
    }

    /// Decides at the end of a window; absent while the load has to go on.
    pub fn decide(&self, reading: &CapReading) -> Option<SettlingEnd> {
        if !reading.may_be_capped() {
            return Some(SettlingEnd::BelowCap);
        }
        if self.elapsed >= LEAST_LOAD_TIME
            && let [.., before, last] = self.windows_ns[..]
            && times_agree(before, last, MAX_SETTLED_WINDOW_DIFFERENCE)
        {
            return Some(SettlingEnd::AtCap);
        }
        (self.elapsed >= MAX_SETTLING_TIME).then_some(SettlingEnd::Unsettled)
    }

    /// Load so far.
    pub const fn elapsed(&self) -> Duration {
        self.elapsed
    }

    /// Time of a launch in each whole window, nanoseconds.
    pub fn windows_ns(&self) -> &[f64] {
        &self.windows_ns
    }

    /// Range in which another run's median may lie, relative to the samples' median: the windows of
    /// a load, and the samples' `precision::range_of_medians`. The first window, which is a burst,
    /// does not count. A card that does not idle is slower, at most by
    /// the share that it idled.
    pub fn relative_window_range(&self, samples: &SamplesBehindLoad<'_>) -> Option<[f64; 2]> {
        let around_ns = precision::range_of_medians(samples.windows_ns).into_iter().flatten();
        let of_load_ns = self.windows_ns.iter().skip(1).copied();
        let relative: Vec<f64> =
            of_load_ns.chain(around_ns).map(|time_ns| time_ns / samples.median_ns).collect();
        let [low, high] = precision::smallest_and_largest(&relative)?;
        Some([low, high * (1.0 + samples.idle)])
    }

    /// Whether the samples behind this load have a median that is precise enough for a settled
    /// case, by their windows and those of the load: without its first, which is a burst, and its
    /// last, which holds samples.
    pub fn median_is_precise(&self, windows_ns: &[f64]) -> bool {
        let [_, of_load_ns @ .., _] = &self.windows_ns[..] else {
            return precision::median_is_precise(windows_ns);
        };
        precision::median_is_precise(&[of_load_ns, windows_ns].concat())
    }
}

fn times_agree(one_ns: f64, other_ns: f64, tolerance: f64) -> bool {
    (one_ns - other_ns).abs() <= tolerance * one_ns.min(other_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPPED_READING: CapReading = CapReading {
        clock_mhz: Some(1430.0),
        highest_mhz: 1980.0,
        capped: Some(true),
        slowed: None,
    };

    /// Windows of one sample each; the time after which settling ended, and why.
    fn settling_time(windows_ns: &[f64], reading: &CapReading) -> (u128, Option<SettlingEnd>) {
        let mut settling = SettlingWindows::default();
        for &window_ns in windows_ns {
            assert!(settling.add(SETTLING_WINDOW, 10, 10.0 * window_ns, None));
            if let Some(settled) = settling.decide(reading) {
                return (settling.elapsed().as_millis(), Some(settled));
            }
        }
        (settling.elapsed().as_millis(), None)
    }

    #[test]
    fn a_case_below_the_power_cap_needs_one_window_of_load() {
        let below = CapReading { clock_mhz: Some(1980.0), capped: None, ..CAPPED_READING };
        assert_eq!(settling_time(&[1.0], &below), (100, Some(SettlingEnd::BelowCap)));
        let named = CapReading { capped: Some(true), ..below };
        assert_eq!(settling_time(&[1.0], &named), (100, None));
        let low = CapReading { clock_mhz: Some(1700.0), capped: Some(false), ..below };
        assert_eq!(settling_time(&[1.0], &low), (100, None));
        let blind = CapReading { clock_mhz: None, ..below };
        assert_eq!(settling_time(&[1.0], &blind), (100, None));
    }

    /// A simulated hot card, which is slowed down until it has cooled this many times.
    struct HotCard {
        needs: u32,
        coolings: u32,
    }

    impl GpuLoad for HotCard {
        fn take_load_sample(&mut self) -> Result<TimedLaunches, BackendError> {
            std::thread::sleep(SETTLING_WINDOW / 2);
            Ok(TimedLaunches { launches: 10, elapsed_ns: 10.0, clock_mhz: Some(1980.0) })
        }

        fn cap_reading(&mut self, clock_mhz: Option<f64>) -> CapReading {
            let slowed = Some(self.coolings < self.needs);
            CapReading { clock_mhz, capped: Some(false), slowed, ..CAPPED_READING }
        }

        fn keep_loaded(&mut self) -> Result<(), BackendError> {
            Ok(())
        }

        fn cool_card(&mut self) {
            self.coolings += 1;
        }
    }

    #[test]
    fn the_load_starts_again_after_a_hot_card_has_cooled() {
        for (needs, coolings) in [(0, 0), (1, 1), (5, MAX_COOLINGS)] {
            let mut card = HotCard { needs, coolings: 0 };
            let (settling, settled) = wait_until_steady(&mut card).unwrap();
            assert_eq!((card.coolings, settled), (coolings, SettlingEnd::BelowCap));
            assert_eq!(settling.windows_ns.len(), 1, "windows before a pause do not count");
        }
    }

    #[test]
    fn a_card_slowed_by_heat_is_not_at_its_power_cap() {
        let hot = |reasons: &[&str]| {
            let throttle = reasons.iter().map(|reason| (*reason).to_owned()).collect();
            let reading = CardReading { throttle, ..CardReading::default() };
            let record = PowerRecord::from_reading(PowerState::Steady, reading);
            (record.at_cap, record.was_slowed())
        };
        assert_eq!(hot(&["sw_thermal_slowdown"]), (false, true));
        assert_eq!(hot(&["sw_power_cap"]), (true, false));
        assert_eq!(hot(&["hw_slowdown", "sw_power_cap"]), (true, true));
    }

    #[test]
    fn simulated_attention_settles_after_its_initial_burst() {
        // An H100 after a pause: the first 100 ms are a burst.
        let attention = [0.92, 0.995, 1.0, 1.0];
        assert_eq!(settling_time(&attention, &CAPPED_READING), (300, Some(SettlingEnd::AtCap)));
        assert_eq!(settling_time(&[1.0, 1.0], &CAPPED_READING), (200, Some(SettlingEnd::AtCap)));
    }

    #[test]
    fn a_load_whose_time_wanders_is_unsettled_after_a_second() {
        let gemm = [0.93, 0.99, 1.02, 1.05, 1.08, 1.11, 1.14, 1.16, 1.13, 1.10, 1.07];
        assert_eq!(settling_time(&gemm, &CAPPED_READING), (1000, Some(SettlingEnd::Unsettled)));
        let mut settling = SettlingWindows::default();
        for window_ns in gemm {
            settling.add(SETTLING_WINDOW, 1, window_ns, None);
        }
        let samples = SamplesBehindLoad { windows_ns: &[1.2], median_ns: 1.0, idle: 0.0 };
        assert_eq!(settling.relative_window_range(&samples), Some([0.99, 1.2 * 1.0075]));
        let [low, high] =
            settling.relative_window_range(&SamplesBehindLoad { idle: 0.1, ..samples }).unwrap();
        assert!(low == 0.99 && (high - 1.32 * 1.0075).abs() < 1e-12, "{low} {high}");
    }

    #[test]
    fn a_window_consists_of_whole_samples() {
        let mut settling = SettlingWindows::default();
        assert!(!settling.add(Duration::from_millis(60), 3, 30.0, None));
        assert!(settling.add(Duration::from_millis(60), 1, 14.0, Some(1500.0)));
        assert_eq!(settling.windows_ns(), [11.0]);
        assert_eq!(settling.elapsed(), Duration::from_millis(120));
    }

    /// One launch of 400 ms is a sample, and a window.
    #[test]
    fn a_launch_longer_than_a_window_fills_one_window() {
        let settling_time = |launches_ns: &[f64]| {
            let mut settling = SettlingWindows::default();
            for &launch_ns in launches_ns {
                assert!(settling.add(Duration::from_millis(400), 1, launch_ns, Some(1430.0)));
                if let Some(settled) = settling.decide(&CAPPED_READING) {
                    return (settling.elapsed().as_millis(), Some(settled));
                }
            }
            (settling.elapsed().as_millis(), None)
        };
        assert_eq!(settling_time(&[4e8]), (400, None));
        assert_eq!(settling_time(&[4e8, 4.01e8]), (800, Some(SettlingEnd::AtCap)));
        assert_eq!(settling_time(&[4e8, 4.4e8, 4.8e8]), (1200, Some(SettlingEnd::Unsettled)));
    }

    #[test]
    fn a_card_without_readable_power_has_no_power_state() {
        let record = |meter: &PowerMeter| {
            let load = (SettlingWindows::default(), SettlingEnd::Unsettled);
            let samples = SamplesBehindLoad { windows_ns: &[1.0, 2.0], median_ns: 1.5, idle: 0.0 };
            PowerRecord::from_samples_behind_load(&load, &samples, meter)
        };
        for (shared, reason) in [
            (None, "NVML is missing, or does not know this device"),
            (Some(MIG_LIMITATION), "a MIG partition shares the card's power with others"),
        ] {
            let PowerRecord { state, reason: found, at_cap, range, .. } =
                record(&PowerMeter::without_nvml(shared));
            assert_eq!((state, at_cap, range), (PowerState::NotApplicable, false, None));
            assert_eq!(found.as_deref(), Some(reason));
        }
        assert_eq!(PowerMeter::without_nvml(Some(MIG_LIMITATION)).energy_mj(), None);
    }

    /// Launches of 5 ms behind a load that had settled, as an H100 took them: the clock dips for a
    /// tenth of a second, and both windows of 100 ms have the same time.
    #[test]
    fn a_drop_of_the_clock_during_samples_makes_the_state_unsettled() {
        let launches = [4.92, 4.96, 5.15, 5.15, 5.24, 5.15, 5.05, 5.0, 4.98, 4.98];
        let windows = |mut windows: SettlingWindows| {
            for launch_ms in launches.into_iter().flat_map(|launch_ms| [launch_ms; 4]) {
                let wall = Duration::from_secs_f64(launch_ms * 1.03e-3);
                windows.add(wall, 1, launch_ms * 1e6, None);
            }
            windows
        };
        let (long, short) =
            (windows(SettlingWindows::default()), windows(SettlingWindows::while_sampling()));
        let settled_load = SettlingWindows::default();
        assert!(settled_load.median_is_precise(long.windows_ns()));
        assert!(!settled_load.median_is_precise(short.windows_ns()));
    }

    /// Two windows of a load agree at the turn of a clock that wandered for half a second.
    #[test]
    fn a_load_that_wandered_shows_in_its_samples() {
        let load = |windows_ns: &[f64]| {
            let mut load = SettlingWindows::default();
            for &window_ns in windows_ns {
                load.add(SETTLING_WINDOW, 1, window_ns, None);
            }
            load
        };
        let samples = [1.0, 1.002, 1.0, 0.999];
        assert!(load(&[0.9, 1.0]).median_is_precise(&samples), "the first window is a burst");
        assert!(load(&[0.9, 1.004, 1.0]).median_is_precise(&samples));
        assert!(!load(&[0.9, 0.97, 1.0, 1.0]).median_is_precise(&samples));
    }

    #[test]
    fn only_equal_kinds_of_power_state_are_comparable() {
        use PowerState::{Burst, NotApplicable, Steady, Unsettled};
        assert!(Steady.comparable(Unsettled) && Burst.comparable(Burst));
        assert!(!Steady.comparable(Burst) && !Unsettled.comparable(NotApplicable));
    }

    #[test]
    fn impossible_unsettled_ranges_are_refused() {
        let record = PowerRecord {
            range: Some([0.99, 1.2]),
            ..PowerRecord::not_applicable("the host computes")
        };
        assert_eq!(record.validate(), Ok(()));
        for range in [[1.2, 0.9], [-1.0, 1.0], [f64::NAN, 1.0], [1.0, f64::INFINITY]] {
            assert!(PowerRecord { range: Some(range), ..record.clone() }.validate().is_err());
        }
    }
}
