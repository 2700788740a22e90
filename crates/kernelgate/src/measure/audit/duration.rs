//! Launches that take less than a kernel can.

use crate::backend::BackendError;
use crate::stats;

/// A launch that takes less than this share of an empty kernel is not on the stream.
pub const MIN_OF_EMPTY: f64 = 0.25;
/// Launches whose median is so many times the least possible: none of them can be below it by noise.
const LONG: f64 = 20.0;

/// Checks the times of one sample, each of `launches` launches, nanoseconds, without the overhead of
/// timing. An empty kernel takes `empty_ns`.
///
/// # Errors
/// [`BackendError::NotTimed`] if launches take less than a kernel can, or one of long launches does.
pub fn check(times_ns: &[f64], launches: u64, empty_ns: f64) -> Result<(), BackendError> {
    let least_ns = MIN_OF_EMPTY * empty_ns;
    let launch_ns = stats::median(times_ns) / launches as f64;
    if launch_ns < least_ns {
        return Err(impossible(launch_ns, empty_ns));
    }
    let shortest_ns = times_ns.iter().copied().fold(f64::INFINITY, f64::min) / launches as f64;
    if shortest_ns < least_ns && launch_ns > LONG * least_ns {
        return Err(impossible(shortest_ns, empty_ns));
    }
    Ok(())
}

fn impossible(launch_ns: f64, empty_ns: f64) -> BackendError {
    // The overhead that was subtracted may be more than the events read around nothing.
    let launch_ns = launch_ns.max(0.0);
    BackendError::NotTimed(format!(
        "a launch takes {launch_ns:.0} ns by the events around it, an empty kernel {empty_ns:.0} ns"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY_NS: f64 = 1000.0;

    #[test]
    fn a_launch_takes_a_quarter_of_an_empty_kernel_at_least() {
        assert!(check(&[2600.0, 2500.0, 2550.0], 10, EMPTY_NS).is_ok());
        let short = check(&[2400.0, -50.0, 2600.0], 10, EMPTY_NS).unwrap_err().to_string();
        assert!(short.contains("takes 240 ns") && short.contains("kernel 1000 ns"), "{short}");
        let negative = check(&[-400.0], 1, EMPTY_NS).unwrap_err().to_string();
        assert!(negative.contains("takes 0 ns"), "{negative}");
    }

    #[test]
    fn one_launch_of_nothing_among_long_ones_is_refused() {
        // Among short ones it is noise.
        assert!(check(&[900.0, 100.0, 900.0], 1, EMPTY_NS).is_ok());
        let skipped = check(&[6000.0, 100.0, 6000.0], 1, EMPTY_NS).unwrap_err().to_string();
        assert!(skipped.contains("takes 100 ns"), "{skipped}");
    }
}
