//! Plausible ranges of numbers in records: a number outside its range is an error of measurement or
//! was edited by hand. The ranges are wide, because they only detect errors; they influence no
//! verdict. The errors of these checks are parts of a message, and name the implausible number.

use std::ops::RangeInclusive;

/// Plausible times of one launch, nanoseconds: from a femtosecond to thirty years.
pub const PLAUSIBLE_LAUNCH_NS: RangeInclusive<f64> = 1e-6..=1e18;
/// Plausible host times of one launch call, nanoseconds; 0 if the host's clock is too coarse.
const PLAUSIBLE_HOST_LAUNCH_NS: RangeInclusive<f64> = 0.0..=1e18;
/// Plausible SM clocks, MHz; some devices report 0.
const PLAUSIBLE_SM_CLOCK_MHZ: RangeInclusive<f64> = 0.0..=1e6;
/// Plausible wall times of a process, seconds: up to thirty years.
const PLAUSIBLE_WALL_TIME_SECONDS: RangeInclusive<f64> = 0.0..=1e9;
/// Plausible shares of a whole: 0 to 1.
const PLAUSIBLE_SHARE: RangeInclusive<f64> = 0.0..=1.0;
/// Plausible numbers of clock cycles of one launch; 0 if the device reports a clock of 0.
const PLAUSIBLE_CYCLES_PER_LAUNCH: RangeInclusive<f64> = 0.0..=1e18;
/// Plausible sizes of memory and files, bytes: at most an exbibyte, so that sums of sizes do not
/// overflow.
const PLAUSIBLE_BYTES: RangeInclusive<u64> = 0..=1 << 60;
/// Plausible counts of launches, commands or cycles: integers that an f64 represents exactly.
const PLAUSIBLE_COUNT: RangeInclusive<u64> = 0..=1 << 53;
/// Plausible ratios of two times, such as measured time to limit.
const PLAUSIBLE_TIME_RATIO: RangeInclusive<f64> = 1e-12..=1e12;
/// Plausible spreads of samples relative to their median, without unit.
const PLAUSIBLE_RELATIVE_SPREAD: RangeInclusive<f64> = 0.0..=1e24;
/// Plausible rates, bytes or operations a second.
const PLAUSIBLE_RATE_PER_S: RangeInclusive<f64> = 1.0..=1e21;
/// Plausible overheads of launching, nanoseconds: differences of times, which noise may make
/// negative.
const PLAUSIBLE_OVERHEAD_NS: RangeInclusive<f64> = -1e12..=1e12;

/// Fails if the time of a launch is implausible; the error message begins with `what`, such as "a
/// median".
pub fn check_launch_ns_plausible(what: &str, ns: f64) -> Result<(), String> {
    refuse_value_outside_range(&PLAUSIBLE_LAUNCH_NS, ns, || {
        format!("{what} of {} ns a launch", format_without_many_zeros(ns))
    })
}

/// Fails if the host time of a launch call, nanoseconds, is implausible.
pub fn check_host_launch_ns_plausible(ns: f64) -> Result<(), String> {
    refuse_value_outside_range(&PLAUSIBLE_HOST_LAUNCH_NS, ns, || {
        format!("a host launch of {} ns", format_without_many_zeros(ns))
    })
}

/// Accepts a clock.
pub fn check_sm_clock_mhz_plausible(mhz: f64) -> Result<(), String> {
    refuse_value_outside_range(&PLAUSIBLE_SM_CLOCK_MHZ, mhz, || {
        format!("a clock of {} MHz", format_without_many_zeros(mhz))
    })
}

/// Fails if a rate in bytes or operations a second is implausible; the error message begins with
/// `what`, such as "a bandwidth".
pub fn check_rate_per_s_plausible(what: &str, rate: f64) -> Result<(), String> {
    refuse_value_outside_range(&PLAUSIBLE_RATE_PER_S, rate, || {
        format!("{what} of {} a second", format_without_many_zeros(rate))
    })
}

/// Fails if an overhead of launching or timing, nanoseconds, is implausible.
pub fn check_overhead_ns_plausible(ns: f64) -> Result<(), String> {
    refuse_value_outside_range(&PLAUSIBLE_OVERHEAD_NS, ns, || {
        format!("an overhead of {} ns", format_without_many_zeros(ns))
    })
}

/// Fails if a wall time in seconds is implausible; the error message begins with `what`, such as
/// "wall_s".
pub fn check_wall_seconds_plausible(what: &str, seconds: f64) -> Result<(), String> {
    refuse_value_outside_range(&PLAUSIBLE_WALL_TIME_SECONDS, seconds, || {
        format!("{what} of {} s", format_without_many_zeros(seconds))
    })
}

/// Fails if a share is outside of 0 to 1; the error message begins with `what`, such as
/// "contention".
pub fn check_share_plausible(what: &str, share: f64) -> Result<(), String> {
    refuse_value_outside_range(&PLAUSIBLE_SHARE, share, || {
        format!("{what} of {}", format_without_many_zeros(share))
    })
}

/// Fails if a size in bytes is implausible; the error message begins with `what`, such as
/// "device_bytes".
pub fn check_bytes_plausible(what: &str, bytes: u64) -> Result<(), String> {
    refuse_value_outside_range(&PLAUSIBLE_BYTES, bytes, || format!("{what} of {bytes} bytes"))
}

/// Fails if a count is implausible; the error message begins with `what`, such as "commands".
pub fn check_count_plausible(what: &str, count: u64) -> Result<(), String> {
    refuse_value_outside_range(&PLAUSIBLE_COUNT, count, || format!("{what} of {count}"))
}

/// Fails if the ratio of two times is implausible; the error message begins with `what`, such as
/// "of_limit".
pub fn check_time_ratio_plausible(what: &str, ratio: f64) -> Result<(), String> {
    refuse_value_outside_range(&PLAUSIBLE_TIME_RATIO, ratio, || {
        format!("{what} of {}", format_without_many_zeros(ratio))
    })
}

/// Fails if the spread of samples, relative to their median, is implausible.
pub fn check_relative_spread_plausible(spread: f64) -> Result<(), String> {
    refuse_value_outside_range(&PLAUSIBLE_RELATIVE_SPREAD, spread, || {
        format!("a spread of {}", format_without_many_zeros(spread))
    })
}

/// Fails if a range from shortest to longest window time, both relative to the median sample, is
/// implausible.
pub fn check_power_window_range_plausible([low, high]: [f64; 2]) -> Result<(), String> {
    let possible =
        PLAUSIBLE_TIME_RATIO.contains(&low) && PLAUSIBLE_TIME_RATIO.contains(&high) && low <= high;
    if possible { Ok(()) } else { Err(format!("a power range of {low} to {high}")) }
}

/// Fails if the number of clock cycles of a launch is implausible.
pub fn check_cycles_per_launch_plausible(cycles: f64) -> Result<(), String> {
    refuse_value_outside_range(&PLAUSIBLE_CYCLES_PER_LAUNCH, cycles, || {
        format!("{} cycles a launch", format_without_many_zeros(cycles))
    })
}

/// Formats a number in scientific notation if it is huge or tiny, which avoids hundreds of zeros.
fn format_without_many_zeros(value: f64) -> String {
    let plain = !value.is_normal() || (1e-9..1e21).contains(&value.abs());
    if plain { value.to_string() } else { format!("{value:e}") }
}

/// NaN is in no range, so this comparison refuses NaN.
fn refuse_value_outside_range<T: PartialOrd>(
    range: &RangeInclusive<T>,
    value: T,
    problem: impl FnOnce() -> String,
) -> Result<(), String> {
    if range.contains(&value) { Ok(()) } else { Err(problem()) }
}
