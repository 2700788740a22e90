//! Plausible ranges of measured numbers: a value outside is a mistake, or was written into a file
//! by hand. The ranges of plausible values are wide; they decide no verdict. The errors are
//! fragments of a message that name the number.

use std::ops::RangeInclusive;

/// Times of a launch: from a femtosecond to thirty years, in nanoseconds.
pub const PLAUSIBLE_LAUNCH_NS: RangeInclusive<f64> = 1e-6..=1e18;
/// Plausible times of the host to start a launch, nanoseconds; 0 if its clock is too coarse.
const PLAUSIBLE_HOST_NS: RangeInclusive<f64> = 0.0..=1e18;
/// Plausible SM clocks, MHz; some devices report 0.
const PLAUSIBLE_CLOCK_MHZ: RangeInclusive<f64> = 0.0..=1e6;
/// Plausible wall times of a process, seconds: up to thirty years.
const PLAUSIBLE_SECONDS: RangeInclusive<f64> = 0.0..=1e9;
/// Shares of a whole.
const PLAUSIBLE_SHARE: RangeInclusive<f64> = 0.0..=1.0;
/// Clock cycles of a launch; 0 if a device reports a clock of 0.
const PLAUSIBLE_CYCLES: RangeInclusive<f64> = 0.0..=1e18;
/// Plausible sizes of memory and files, bytes: up to an exbibyte, so that sums of sizes do not
/// overflow.
const PLAUSIBLE_BYTES: RangeInclusive<u64> = 0..=1 << 60;
/// Things that are counted: launches, commands, cycles of a stage.
const PLAUSIBLE_COUNT: RangeInclusive<u64> = 0..=1 << 53;
/// Ratios of two times.
const PLAUSIBLE_TIME_RATIO: RangeInclusive<f64> = 1e-12..=1e12;
/// Plausible spreads of samples, relative to their median.
const PLAUSIBLE_SPREAD: RangeInclusive<f64> = 0.0..=1e24;
/// Plausible rates: bytes or operations a second.
const PLAUSIBLE_RATE: RangeInclusive<f64> = 1.0..=1e21;
/// Cost of launching, nanoseconds: a difference of times, which noise may make negative.
const PLAUSIBLE_COST_NS: RangeInclusive<f64> = -1e12..=1e12;

/// Accepts the time of a launch; `what` begins the error: "a median".
pub fn check_launch_ns(what: &str, ns: f64) -> Result<(), String> {
    check_in_range(&PLAUSIBLE_LAUNCH_NS, ns, || {
        format!("{what} of {} ns a launch", short_number(ns))
    })
}

/// Accepts the time of the host to start a launch.
pub fn check_host_ns(ns: f64) -> Result<(), String> {
    check_in_range(&PLAUSIBLE_HOST_NS, ns, || format!("a host launch of {} ns", short_number(ns)))
}

/// Accepts a clock.
pub fn check_clock_mhz(mhz: f64) -> Result<(), String> {
    check_in_range(&PLAUSIBLE_CLOCK_MHZ, mhz, || format!("a clock of {} MHz", short_number(mhz)))
}

/// Accepts bytes or operations a second; `what` begins the error: "a bandwidth".
pub fn check_rate(what: &str, rate: f64) -> Result<(), String> {
    check_in_range(&PLAUSIBLE_RATE, rate, || format!("{what} of {} a second", short_number(rate)))
}

/// Accepts what launching costs.
pub fn check_cost_ns(ns: f64) -> Result<(), String> {
    check_in_range(&PLAUSIBLE_COST_NS, ns, || format!("an overhead of {} ns", short_number(ns)))
}

/// Checks that a wall time is plausible; `what` begins the error message: "wall_s".
pub fn check_seconds(what: &str, seconds: f64) -> Result<(), String> {
    check_in_range(&PLAUSIBLE_SECONDS, seconds, || format!("{what} of {} s", short_number(seconds)))
}

/// Accepts a share of a whole, 0 to 1; `what` begins the error: "contention".
pub fn check_share(what: &str, share: f64) -> Result<(), String> {
    check_in_range(&PLAUSIBLE_SHARE, share, || format!("{what} of {}", short_number(share)))
}

/// Accepts a size in bytes; `what` begins the error: "device_bytes".
pub fn check_bytes(what: &str, bytes: u64) -> Result<(), String> {
    check_in_range(&PLAUSIBLE_BYTES, bytes, || format!("{what} of {bytes} bytes"))
}

/// Checks that a count is plausible; `what` begins the error message: "commands".
pub fn check_count(what: &str, count: u64) -> Result<(), String> {
    check_in_range(&PLAUSIBLE_COUNT, count, || format!("{what} of {count}"))
}

/// Accepts the ratio of two times; `what` begins the error: "of_limit".
pub fn check_ratio(what: &str, ratio: f64) -> Result<(), String> {
    check_in_range(&PLAUSIBLE_TIME_RATIO, ratio, || format!("{what} of {}", short_number(ratio)))
}

/// Accepts a plausible relative spread of samples.
pub fn check_spread(spread: f64) -> Result<(), String> {
    check_in_range(&PLAUSIBLE_SPREAD, spread, || format!("a spread of {}", short_number(spread)))
}

/// Accepts the shortest and the longest time of a window, relative to the median sample.
pub fn check_power_range([low, high]: [f64; 2]) -> Result<(), String> {
    let possible =
        PLAUSIBLE_TIME_RATIO.contains(&low) && PLAUSIBLE_TIME_RATIO.contains(&high) && low <= high;
    if possible { Ok(()) } else { Err(format!("a power range of {low} to {high}")) }
}

/// Accepts a plausible number of clock cycles of a launch.
pub fn check_cycles(cycles: f64) -> Result<(), String> {
    check_in_range(&PLAUSIBLE_CYCLES, cycles, || {
        format!("{} cycles a launch", short_number(cycles))
    })
}

/// Formats a number so that a huge or tiny one does not show hundreds of zeros.
fn short_number(value: f64) -> String {
    let plain = !value.is_normal() || (1e-9..1e21).contains(&value.abs());
    if plain { value.to_string() } else { format!("{value:e}") }
}

/// NaN lies in no range, so this comparison refuses it.
fn check_in_range<T: PartialOrd>(
    range: &RangeInclusive<T>,
    value: T,
    problem: impl FnOnce() -> String,
) -> Result<(), String> {
    if range.contains(&value) { Ok(()) } else { Err(problem()) }
}
