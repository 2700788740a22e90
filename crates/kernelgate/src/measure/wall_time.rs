//! Times launches of the CPU backend by wall time on the host.

use std::time::{Duration, Instant};

use super::{CaseSampleConditions, LaunchStopwatch, TimedLaunchSample, TimedReplay};
use crate::backend::{BackendError, LaunchableProblem, cpu, host_timeout};

/// CPU time by which the first replay may exceed the next one: this share of a launch, because
/// caches differ, plus nanoseconds for each thread that wakes up.
const REPLAY_TOLERANCE_SHARE_OF_LAUNCH: f64 = 1.0;
const REPLAY_TOLERANCE_NS_PER_THREAD: f64 = 200_000.0;

/// Returns the CPU time that all threads of this process have used so far; `None` if the operating
/// system does not report it.
pub fn cpu_time_of_this_process() -> Option<Duration> {
    #[cfg(unix)]
    {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Duration::try_from(time).ok()
    }
    #[cfg(not(unix))]
    None
}

/// Times launches by wall time, from before the first launch call until the last launch has
/// finished.
pub struct WallTimeStopwatch;

impl LaunchStopwatch for WallTimeStopwatch {
    fn take_sample_of_launches(
        &mut self,
        executable: &mut dyn LaunchableProblem,
        launches: u64,
    ) -> Result<TimedLaunchSample, BackendError> {
        let _watched = host_timeout::start_timeout_of_host_launches();
        let start = Instant::now();
        for _ in 0..launches {
            executable.launch_once()?;
        }
        executable.wait_for_launches()?;
        // A sample takes at least 1 ns, because Criterion would drop the whole case for a sample of
        // zero.
        let elapsed_ns = (start.elapsed().as_nanos() as f64).max(1.0);
        Ok(TimedLaunchSample {
            launches,
            elapsed_ns,
            skew_between_gpus_ns: None,
            sm_clock_mhz: None,
            discarded_attempts: 0,
            gpu_was_throttled: false,
        })
    }

    fn time_one_replay(
        &mut self,
        executable: &mut dyn LaunchableProblem,
    ) -> Result<Option<TimedReplay>, BackendError> {
        // The check compares CPU times, not wall times, because other processes may delay one
        // replay and not the next.
        let _watched = host_timeout::start_timeout_of_host_launches();
        let before = cpu_time_of_this_process();
        executable.launch_once()?;
        executable.wait_for_launches()?;
        let spent = cpu_time_of_this_process()
            .zip(before)
            .map(|(after, before)| after.saturating_sub(before));
        Ok(spent.map(|spent| {
            let elapsed_ns = spent.as_nanos() as f64;
            let allowed_ns = REPLAY_TOLERANCE_SHARE_OF_LAUNCH * elapsed_ns
                + REPLAY_TOLERANCE_NS_PER_THREAD * cpu::cpu_backend_thread_count() as f64;
            TimedReplay {
                replay_ns: elapsed_ns,
                sm_clock_mhz: None,
                launches: 1,
                allowed_excess_ns: allowed_ns,
            }
        }))
    }

    fn sample_conditions(&self) -> CaseSampleConditions {
        CaseSampleConditions::default()
    }
}
