//! Numbers that a machine can have measured: what is beyond them is a mistake, or was written into
//! a file by hand. The bounds are wide; nothing is judged by them.

use std::ops::RangeInclusive;

/// Times of a launch: from a femtosecond to thirty years, in nanoseconds.
pub const LAUNCH_NS: RangeInclusive<f64> = 1e-6..=1e18;
/// Time of the host to start a launch, nanoseconds; 0 where a clock is too coarse to tell.
const HOST_NS: RangeInclusive<f64> = 0.0..=1e18;
/// Clocks, MHz; 0 where a device says so.
const CLOCK_MHZ: RangeInclusive<f64> = 0.0..=1e6;
/// Wall times of processes: up to thirty years, seconds.
const SECONDS: RangeInclusive<f64> = 0.0..=1e9;
/// Shares of a whole.
const SHARE: RangeInclusive<f64> = 0.0..=1.0;
/// Clock cycles of a launch; 0 where a device reports a clock of 0.
const CYCLES: RangeInclusive<f64> = 0.0..=1e18;
/// Bytes, or operations, a second.
const RATE: RangeInclusive<f64> = 1.0..=1e21;
/// What launching costs, nanoseconds: a difference of times, which noise may make negative.
const COST_NS: RangeInclusive<f64> = -1e12..=1e12;

/// Accepts the time of a launch; `what` begins the error: "a median".
///
/// # Errors
/// A fragment with the time.
pub fn check_launch_ns(what: &str, ns: f64) -> Result<(), String> {
    check(&LAUNCH_NS, ns, || format!("{what} of {} ns a launch", number(ns)))
}

/// Accepts the time of the host to start a launch.
///
/// # Errors
/// A fragment with the time.
pub fn check_host_ns(ns: f64) -> Result<(), String> {
    check(&HOST_NS, ns, || format!("a host launch of {} ns", number(ns)))
}

/// Accepts a clock.
///
/// # Errors
/// A fragment with the clock.
pub fn check_clock_mhz(mhz: f64) -> Result<(), String> {
    check(&CLOCK_MHZ, mhz, || format!("a clock of {} MHz", number(mhz)))
}

/// Accepts bytes or operations a second; `what` begins the error: "a bandwidth".
///
/// # Errors
/// A fragment with the rate.
pub fn check_rate(what: &str, rate: f64) -> Result<(), String> {
    check(&RATE, rate, || format!("{what} of {} a second", number(rate)))
}

/// Accepts what launching costs.
///
/// # Errors
/// A fragment with the time.
pub fn check_cost_ns(ns: f64) -> Result<(), String> {
    check(&COST_NS, ns, || format!("an overhead of {} ns", number(ns)))
}

/// Accepts a wall time; `what` begins the error: "wall_s".
///
/// # Errors
/// A fragment with the time.
pub fn check_seconds(what: &str, seconds: f64) -> Result<(), String> {
    check(&SECONDS, seconds, || format!("{what} of {} s", number(seconds)))
}

/// Accepts a share of a whole, 0 to 1; `what` begins the error: "contention".
///
/// # Errors
/// A fragment with the share.
pub fn check_share(what: &str, share: f64) -> Result<(), String> {
    check(&SHARE, share, || format!("{what} of {}", number(share)))
}

/// Accepts clock cycles of a launch.
///
/// # Errors
/// A fragment with the cycles.
pub fn check_cycles(cycles: f64) -> Result<(), String> {
    check(&CYCLES, cycles, || format!("{} cycles a launch", number(cycles)))
}

/// Without hundreds of zeros.
fn number(value: f64) -> String {
    let plain = !value.is_normal() || (1e-9..1e21).contains(&value.abs());
    if plain { value.to_string() } else { format!("{value:e}") }
}

/// NaN is in no range.
fn check(
    range: &RangeInclusive<f64>,
    value: f64,
    problem: impl FnOnce() -> String,
) -> Result<(), String> {
    if range.contains(&value) { Ok(()) } else { Err(problem()) }
}
