//! Measures how long launches take, and the performance ceilings of the device (its roofline).
//!
//! This module decides neither how many samples to take (Criterion plans them) nor what samples
//! mean (`stats`, `gate`).

pub mod accuracy;
pub mod anchors;
pub(crate) mod audit;
mod clock;
pub mod contention;
pub mod criterion;
pub mod delay;
pub mod energy;
pub mod events;
mod launch_queue;
pub mod limits;
pub mod plausibility;
pub mod power;
mod precision;
pub mod wall_time;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use self::power::NvmlPowerMeter;
use crate::backend::{BackendError, LaunchableProblem};
pub use kernelgate_cuda::observe::range;

/// State of the caches when a launch begins; the state is a part of the case id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheState {
    /// Hot: the caches contain the data that the previous launch of the case left in them.
    #[serde(rename = "hot")]
    HotCaches,
    /// Cold: other data fills the L2 cache before each launch, so L2 contains no inputs.
    #[serde(rename = "cold")]
    ColdCaches,
}

impl CacheState {
    /// Returns `hot` or `cold`, the name in case ids and files.
    pub const fn cache_state_name(self) -> &'static str {
        match self {
            Self::HotCaches => "hot",
            Self::ColdCaches => "cold",
        }
    }
}

/// One timing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimedLaunchSample {
    /// Number of launches in the sample, at least 1.
    pub launches: u64,
    /// Time of all launches of the sample together, nanoseconds.
    pub elapsed_ns: f64,
    /// Time by which the slowest GPU exceeded the fastest GPU over all launches of the sample,
    /// nanoseconds; `None` for one GPU or the host.
    pub skew_between_gpus_ns: Option<f64>,
    /// SM clock during the sample's launches, MHz, if the device reports it.
    pub sm_clock_mhz: Option<f64>,
    /// Number of attempts that were discarded before this sample because the GPU was throttled.
    pub discarded_attempts: u64,
    /// Whether the GPU was throttled in this sample too, which was kept as the last attempt.
    pub gpu_was_throttled: bool,
}

/// Conditions under which the samples of a case were taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct CaseSampleConditions {
    /// Number of launches timed together as one graph (1: a single launch of several commands);
    /// absent if launches were timed without a graph.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "batch")]
    pub launches_per_graph: Option<u64>,
    /// Whether the samples include the host's launch time, because a launch has too many commands
    /// to be queued ahead.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "host_bound")]
    pub includes_host_launch_time: bool,
    /// Number of sample attempts that were discarded because the GPU was throttled.
    #[serde(default, skip_serializing_if = "is_zero_for_serde")]
    #[serde(rename = "discarded")]
    pub discarded_attempts: u64,
    /// Number of samples that were kept although the GPU was throttled in every attempt.
    #[serde(default, skip_serializing_if = "is_zero_for_serde")]
    #[serde(rename = "throttled")]
    pub throttled_samples: u64,
    /// Share of the host's CPU time that other processes, and other guests of the machine, used
    /// during the samples, 0 to 1; absent if the system does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "contention")]
    pub other_processes_cpu_share: Option<f64>,
    /// Number of other processes that computed on the GPU during the samples; absent on the host,
    /// or if NVML does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "other_processes")]
    pub other_gpu_processes: Option<u32>,
}

/// Returns whether a number is zero, so that a record can omit it.
pub(crate) fn is_zero_for_serde<T: Default + PartialEq>(number: &T) -> bool {
    *number == T::default()
}

impl CaseSampleConditions {
    /// Returns whether another process computed on the GPU during the samples.
    pub fn was_gpu_shared_with_other_processes(&self) -> bool {
        self.other_gpu_processes.is_some_and(|others| others > 0)
    }

    /// Returns whether all sample conditions have their default values, so that the record omits
    /// them.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    pub fn are_all_defaults(&self) -> bool {
        *self == Self::default()
    }

    /// Fails if a share or a count in these sample conditions is implausible.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_conditions_plausible(&self) -> Result<(), String> {
        self.other_processes_cpu_share
            .map_or(Ok(()), |share| plausibility::check_share_plausible("contention", share))?;
        plausibility::check_count_plausible("batch", self.launches_per_graph.unwrap_or(1))?;
        plausibility::check_count_plausible("discarded", self.discarded_attempts)?;
        plausibility::check_count_plausible("throttled", self.throttled_samples)
    }
}

/// Time of one more run of the timed graph or launch after the samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimedReplay {
    /// Nanoseconds that the launches of the replay took: on the GPU, or CPU time of all threads on
    /// the host.
    pub replay_ns: f64,
    /// SM clock during the replayed launch, MHz, if the device reports it.
    pub sm_clock_mhz: Option<f64>,
    /// Launches in the replay.
    pub launches: u64,
    /// Nanoseconds by which the first replay may exceed the next one, as noise, before it counts as
    /// doing more work.
    pub allowed_excess_ns: f64,
}

impl TimedReplay {
    /// Returns whether this replay did more work than the next one. The times of both replays are
    /// compared at the SM clock of the second replay, because the clock sinks while the host is
    /// busy.
    pub fn took_longer_than_next_replay(&self, next: &Self) -> bool {
        let slower = match (self.sm_clock_mhz, next.sm_clock_mhz) {
            (Some(own), Some(next)) => (own / next).min(1.0),
            _ => 1.0,
        };
        slower * self.replay_ns > next.replay_ns + next.allowed_excess_ns
    }
}

/// Enqueues `launches` launches one by one, without waiting for the GPU, and returns their number.
fn enqueue_launches_one_by_one(
    executable: &mut dyn LaunchableProblem,
    launches: u64,
) -> Result<u64, BackendError> {
    (0..launches).try_for_each(|_| executable.launch_once()).map(|()| launches)
}

/// Takes the samples of one case, and repeats single launches of the case for checks.
pub trait LaunchStopwatch {
    /// Takes a sample of `launches` launches, or of slightly more if several launches are captured
    /// in one graph.
    fn take_sample_of_launches(
        &mut self,
        executable: &mut dyn LaunchableProblem,
        launches: u64,
    ) -> Result<TimedLaunchSample, BackendError>;

    /// Runs the timed graph once more, or one launch if the launches are not captured. Returns the
    /// time of the replay, on a GPU with cold caches; `None` if it cannot be separated from the
    /// host's launch time.
    fn time_one_replay(
        &mut self,
        executable: &mut dyn LaunchableProblem,
    ) -> Result<Option<TimedReplay>, BackendError>;

    /// Runs one launch of a case with short launches, alone and with cold caches. Returns the
    /// launch's time, nanoseconds; `None` for long launches, on the host, for launches that carry
    /// state, or if host time is included.
    fn time_one_short_launch(
        &mut self,
        _: &mut dyn LaunchableProblem,
    ) -> Result<Option<f64>, BackendError> {
        Ok(None)
    }

    /// Launches once more while CUPTI records, and fails if CUPTI finds work outside of the timed
    /// stream. CUPTI records only after the samples were taken, because recording changes times.
    /// Returns the reason if CUPTI could not record; launches on the host need no such check for
    /// work on other streams.
    ///
    /// # Errors
    /// Fails with [`BackendError::NotTimed`] if work ran on another stream or GPU, or if a launch
    /// fails.
    fn check_for_work_on_other_streams(
        &mut self,
        _executable: &mut dyn LaunchableProblem,
    ) -> Result<Option<String>, BackendError> {
        Ok(None)
    }

    /// Returns the meter for power and throttling of the timed GPU; `None` on the host.
    fn power_meter(&self) -> Option<&Arc<NvmlPowerMeter>> {
        None
    }

    /// Enqueues at least `launches` launches back to back, without waiting for them, and returns
    /// their number.
    fn enqueue_launches_without_waiting(
        &mut self,
        executable: &mut dyn LaunchableProblem,
        launches: u64,
    ) -> Result<u64, BackendError> {
        enqueue_launches_one_by_one(executable, launches)
    }

    /// With `true`, keeps the GPU busy between samples: the launches of the next sample are
    /// enqueued while the host waits for the present one. With `false`, no longer keeps the GPU
    /// busy between samples, after waiting until the enqueued launches have finished.
    fn keep_gpu_loaded_between_samples(&mut self, _loaded: bool) -> Result<(), BackendError> {
        Ok(())
    }

    /// Sets the settled SM clock, MHz, with which the SM clocks of the following samples are
    /// compared.
    fn set_settled_sm_clock_of_case(&mut self, _clock_mhz: Option<f64>) {}

    /// Returns the sample conditions that this stopwatch sets: how many launches are timed
    /// together, and whether host time is included.
    fn sample_conditions(&self) -> CaseSampleConditions;

    /// Returns the number of commands that one launch enqueues on the GPU, which is the number of
    /// nodes of its graph. The number of commands is `None` if the launch cannot be captured, and
    /// on the host.
    fn commands_per_launch(&self) -> Option<u64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_with_more_work_takes_longer_at_equal_clock() {
        let replay = |elapsed_ns| TimedReplay {
            replay_ns: elapsed_ns,
            sm_clock_mhz: None,
            launches: 10,
            allowed_excess_ns: 10e3,
        };
        let at =
            |elapsed_ns, clock| TimedReplay { sm_clock_mhz: Some(clock), ..replay(elapsed_ns) };
        assert!(!replay(109.9e3).took_longer_than_next_replay(&replay(100e3)));
        assert!(replay(110.1e3).took_longer_than_next_replay(&replay(100e3)));
        assert!(!at(200e3, 990.0).took_longer_than_next_replay(&at(100e3, 1980.0)));
        assert!(at(200e3, 1980.0).took_longer_than_next_replay(&at(100e3, 990.0)));
    }
}
