//! Launches and iterations that take less than the GPU needs for anything.

use super::audit_finding::{RefusedSubject, TimingRefusal};
use crate::stats;

/// Least share of the least command (an empty kernel, a fill of one byte) that work takes.
pub const MIN_SHARE_OF_LEAST_COMMAND: f64 = 0.25;
/// Ratio of the median to the least possible time above which noise cannot explain a shorter
/// launch.
const LONG_LAUNCH_RATIO: f64 = 20.0;

/// Checks the times of one sample, each of `launches` launches, nanoseconds, without the overhead
/// of timing. `empty_ns` is the time of an empty kernel.
///
/// # Errors
/// Fails if a launch is shorter than any kernel, or if one of several long launches is far shorter
/// than their median.
pub fn check_launch_times(
    times_ns: &[f64],
    launches: u64,
    empty_ns: f64,
) -> Result<(), TimingRefusal> {
    let launch_ns = stats::median(times_ns) / launches as f64;
    check_shortest_time(RefusedSubject::Launch, launch_ns, empty_ns)?;
    if launch_ns > LONG_LAUNCH_RATIO * MIN_SHARE_OF_LEAST_COMMAND * empty_ns {
        let shortest_ns = times_ns.iter().copied().fold(f64::INFINITY, f64::min) / launches as f64;
        check_shortest_time(RefusedSubject::Launch, shortest_ns, empty_ns)?;
    }
    Ok(())
}

/// Compares the time of one launch or iteration with the shortest possible time of a command,
/// nanoseconds.
///
/// # Errors
/// Fails if the launch or iteration takes less than the shortest possible time.
pub fn check_shortest_time(
    subject: RefusedSubject,
    elapsed_ns: f64,
    least_ns: f64,
) -> Result<(), TimingRefusal> {
    if elapsed_ns < MIN_SHARE_OF_LEAST_COMMAND * least_ns {
        // The overhead that was subtracted may be more than the events read around nothing.
        return Err(TimingRefusal::TooShort { subject, elapsed_ns: elapsed_ns.max(0.0), least_ns });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY_COMMAND_NS: f64 = 1000.0;

    fn refusal_of_launch(elapsed_ns: f64) -> TimingRefusal {
        TimingRefusal::TooShort {
            subject: RefusedSubject::Launch,
            elapsed_ns,
            least_ns: EMPTY_COMMAND_NS,
        }
    }

    #[test]
    fn a_launch_shorter_than_a_quarter_of_an_empty_kernel_is_refused() {
        assert_eq!(check_launch_times(&[2600.0, 2500.0, 2550.0], 10, EMPTY_COMMAND_NS), Ok(()));
        let short = check_launch_times(&[2400.0, -50.0, 2600.0], 10, EMPTY_COMMAND_NS).unwrap_err();
        assert_eq!(short, refusal_of_launch(240.0));
        let words = "a launch takes 240 ns by the events around it, an empty kernel 1000 ns";
        assert_eq!(short.to_string(), words);
        assert_eq!(check_launch_times(&[-400.0], 1, EMPTY_COMMAND_NS), Err(refusal_of_launch(0.0)));
    }

    #[test]
    fn one_empty_launch_among_long_launches_is_refused() {
        // Among short launches, one very short time may be noise.
        assert_eq!(check_launch_times(&[900.0, 100.0, 900.0], 1, EMPTY_COMMAND_NS), Ok(()));
        let skipped = check_launch_times(&[6000.0, 100.0, 6000.0], 1, EMPTY_COMMAND_NS);
        assert_eq!(skipped, Err(refusal_of_launch(100.0)));
    }
}
