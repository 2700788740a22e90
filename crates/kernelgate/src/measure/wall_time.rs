//! Timer of the CPU backend: wall time on the host.

use std::time::{Duration, Instant};

use super::{LaunchSample, ReplayResult, SampleConditions, Stopwatch};
use crate::backend::{BackendError, Executable, cpu, host_timeout};

/// How much more CPU time a replay may take than the next one: of a launch, as caches differ, and
/// for each thread, which may have to wake up or look for work, nanoseconds.
const REPLAY_TOLERANCE_OF_LAUNCH: f64 = 1.0;
const REPLAY_TOLERANCE_NS: f64 = 200_000.0;

/// CPU time of all threads of this process; `None` if the operating system does not report it.
pub fn process_cpu_time() -> Option<Duration> {
    #[cfg(unix)]
    {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Duration::try_from(time).ok()
    }
    #[cfg(not(unix))]
    None
}

/// Timer that measures wall time from before the first launch to after the end of the last launch.
pub struct WallClock;

impl Stopwatch for WallClock {
    fn time_launches(
        &mut self,
        executable: &mut dyn Executable,
        launches: u64,
    ) -> Result<LaunchSample, BackendError> {
        let _watched = host_timeout::watch_host_launches();
        let start = Instant::now();
        for _ in 0..launches {
            executable.launch()?;
        }
        executable.synchronize()?;
        // The clock's resolution: a sample of exactly zero would lose Criterion's whole case.
        let elapsed_ns = (start.elapsed().as_nanos() as f64).max(1.0);
        Ok(LaunchSample {
            launches,
            elapsed_ns,
            skew_ns: None,
            clock_mhz: None,
            discarded: 0,
            throttled: false,
        })
    }

    fn replay_timed(
        &mut self,
        executable: &mut dyn Executable,
    ) -> Result<Option<ReplayResult>, BackendError> {
        // CPU time is compared, not wall time: other processes may hold up one replay and not the
        // next.
        let _watched = host_timeout::watch_host_launches();
        let before = process_cpu_time();
        executable.launch()?;
        executable.synchronize()?;
        let spent =
            process_cpu_time().zip(before).map(|(after, before)| after.saturating_sub(before));
        Ok(spent.map(|spent| {
            let elapsed_ns = spent.as_nanos() as f64;
            let allowed_ns = REPLAY_TOLERANCE_OF_LAUNCH * elapsed_ns
                + REPLAY_TOLERANCE_NS * cpu::available_threads() as f64;
            ReplayResult { elapsed_ns, clock_mhz: None, launches: 1, allowed_ns }
        }))
    }

    fn conditions(&self) -> SampleConditions {
        SampleConditions::default()
    }
}
