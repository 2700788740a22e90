//! Refuses launches and Criterion iterations that take less time than any GPU command needs.

use super::audit_finding::{RefusedTimedCode, TimingRefusal};
use crate::stats;

/// Smallest accepted time of a launch or iteration, as a share of the time of the shortest command
/// (an empty kernel or a one-byte memset).
pub const MIN_SHARE_OF_SHORTEST_COMMAND_TIME: f64 = 0.25;
/// If the median launch takes more than this multiple of the shortest accepted time, noise cannot
/// explain a sample below that time.
const LONG_LAUNCH_TO_SHORTEST_TIME_RATIO: f64 = 20.0;

/// Checks sample times in nanoseconds, each for `launches` launches, from which the overhead of
/// timing has been subtracted. The parameter `empty_ns` is the time of an empty kernel,
/// nanoseconds.
///
/// # Errors
/// Fails if a launch is shorter than any kernel, or if one of several long launches is far shorter
/// than their median.
pub fn refuse_launches_faster_than_empty_kernel(
    times_ns: &[f64],
    launches: u64,
    empty_ns: f64,
) -> Result<(), TimingRefusal> {
    let launch_ns = stats::median(times_ns) / launches as f64;
    refuse_time_below_shortest_command(
        RefusedTimedCode::ImplementationLaunch,
        launch_ns,
        empty_ns,
    )?;
    if launch_ns
        > LONG_LAUNCH_TO_SHORTEST_TIME_RATIO * MIN_SHARE_OF_SHORTEST_COMMAND_TIME * empty_ns
    {
        let shortest_ns = times_ns.iter().copied().fold(f64::INFINITY, f64::min) / launches as f64;
        refuse_time_below_shortest_command(
            RefusedTimedCode::ImplementationLaunch,
            shortest_ns,
            empty_ns,
        )?;
    }
    Ok(())
}

/// Refuses a launch or a Criterion iteration that takes less than a quarter of the shortest
/// command's time `least_ns`.
///
/// # Errors
/// Fails if the launch or iteration takes less than the shortest possible time.
pub fn refuse_time_below_shortest_command(
    subject: RefusedTimedCode,
    elapsed_ns: f64,
    least_ns: f64,
) -> Result<(), TimingRefusal> {
    if elapsed_ns < MIN_SHARE_OF_SHORTEST_COMMAND_TIME * least_ns {
        // The measured time can be negative, because the subtracted overhead of the events may
        // exceed the time between them.
        return Err(TimingRefusal::ShorterThanShortestCommand {
            subject,
            launch_or_iteration_ns: elapsed_ns.max(0.0),
            shortest_command_ns: least_ns,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY_KERNEL_NS: f64 = 1000.0;

    fn refusal_below_empty_kernel_time(elapsed_ns: f64) -> TimingRefusal {
        TimingRefusal::ShorterThanShortestCommand {
            subject: RefusedTimedCode::ImplementationLaunch,
            launch_or_iteration_ns: elapsed_ns,
            shortest_command_ns: EMPTY_KERNEL_NS,
        }
    }

    #[test]
    fn a_launch_shorter_than_a_quarter_of_an_empty_kernel_is_refused() {
        assert_eq!(
            refuse_launches_faster_than_empty_kernel(
                &[2600.0, 2500.0, 2550.0],
                10,
                EMPTY_KERNEL_NS
            ),
            Ok(())
        );
        let short =
            refuse_launches_faster_than_empty_kernel(&[2400.0, -50.0, 2600.0], 10, EMPTY_KERNEL_NS)
                .unwrap_err();
        assert_eq!(short, refusal_below_empty_kernel_time(240.0));
        let words = "a launch takes 240 ns by the events around it, an empty kernel 1000 ns";
        assert_eq!(short.to_string(), words);
        assert_eq!(
            refuse_launches_faster_than_empty_kernel(&[-400.0], 1, EMPTY_KERNEL_NS),
            Err(refusal_below_empty_kernel_time(0.0))
        );
    }

    #[test]
    fn an_empty_launch_among_long_launches_is_refused() {
        // Among three launches of at most 0.9 times an empty kernel's time, one very short time may
        // be noise, so no launch is refused.
        assert_eq!(
            refuse_launches_faster_than_empty_kernel(&[900.0, 100.0, 900.0], 1, EMPTY_KERNEL_NS),
            Ok(())
        );
        let skipped =
            refuse_launches_faster_than_empty_kernel(&[6000.0, 100.0, 6000.0], 1, EMPTY_KERNEL_NS);
        assert_eq!(skipped, Err(refusal_below_empty_kernel_time(100.0)));
    }
}
