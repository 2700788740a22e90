//! Samples: how long launches took, and the ceilings of the measured roofline.
//!
//! This module decides neither how many samples to take (Criterion plans them) nor what they mean
//! (`stats`, `gate`).

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

use self::power::PowerMeter;
use crate::backend::{BackendError, Executable};
pub use kernelgate_cuda::observe::range;

/// State of the caches when a launch begins: part of a case's identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheState {
    /// Hot caches hold the data that the previous launch left in them.
    Hot,
    /// Cold caches are filled with other data before each launch: the L2 cache holds no inputs.
    Cold,
}

impl CacheState {
    /// The name used in ids and files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hot => "hot",
            Self::Cold => "cold",
        }
    }
}

/// One timing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LaunchSample {
    /// Launches in the sample, at least 1.
    pub launches: u64,
    /// Time of all launches of the sample together, nanoseconds.
    pub elapsed_ns: f64,
    /// By how much the slowest GPU took longer than the fastest, for all of them together,
    /// nanoseconds; `None` for one GPU, and on the host.
    pub skew_ns: Option<f64>,
    /// SM clock during the sample's launches, MHz, if the device reports it.
    pub clock_mhz: Option<f64>,
    /// Number of attempts that were discarded before this sample, because the device was throttled
    /// or its clock not steady.
    pub discarded: u64,
    /// Whether the device was throttled in the kept sample as well, which was the last attempt.
    pub throttled: bool,
}

/// Conditions under which the samples of a case were taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SampleConditions {
    /// Number of launches that were timed together, as a graph; 1 for one launch of several
    /// commands; absent if each launch was timed directly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<u64>,
    /// Whether the host's launch time is in the samples, because a launch is too many commands to
    /// queue ahead.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub host_bound: bool,
    /// Attempts thrown away because the device was throttled, or its clock not steady.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub discarded: u64,
    /// Samples that were kept though the device was throttled, or its clock not steady, in each
    /// attempt.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub throttled: u64,
    /// Share of the host's CPU time that other processes and guests used during the samples, 0 to
    /// 1; absent if the system does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contention: Option<f64>,
    /// Number of other processes that computed on the GPU during the samples; absent on the host,
    /// or if NVML does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_processes: Option<u32>,
}

/// Returns whether a number is zero, so that a record can omit it.
pub(crate) fn is_zero<T: Default + PartialEq>(number: &T) -> bool {
    *number == T::default()
}

impl SampleConditions {
    /// Returns whether another process computed on the GPU during the samples.
    pub fn shared_gpu(&self) -> bool {
        self.other_processes.is_some_and(|others| others > 0)
    }

    /// Returns whether all conditions have their default values, so that a record omits them.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Checks the facts that deserialising does not enforce.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn validate(&self) -> Result<(), String> {
        self.contention.map_or(Ok(()), |share| plausibility::check_share("contention", share))?;
        plausibility::check_count("batch", self.batch.unwrap_or(1))?;
        plausibility::check_count("discarded", self.discarded)?;
        plausibility::check_count("throttled", self.throttled)
    }
}

/// Result of one more run of the timed graph or launch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReplayResult {
    /// Elapsed nanoseconds of the launches: of the GPU, or of all the host's threads.
    pub elapsed_ns: f64,
    /// SM clock during the replayed launch, MHz, if the device reports it.
    pub clock_mhz: Option<f64>,
    /// Launches in the replay.
    pub launches: u64,
    /// Nanoseconds by which an earlier replay of the same work may have been slower without a
    /// finding.
    pub allowed_ns: f64,
}

impl ReplayResult {
    /// Whether this replay did more than the next one, which ran with the same caches: the clock of
    /// the next replay counts, because the clock sinks while the host is busy.
    pub fn did_more_than_next(&self, next: &Self) -> bool {
        let slower = match (self.clock_mhz, next.clock_mhz) {
            (Some(own), Some(next)) => (own / next).min(1.0),
            _ => 1.0,
        };
        slower * self.elapsed_ns > next.elapsed_ns + next.allowed_ns
    }
}

/// Starts a number of launches one by one, without waiting for them.
fn launch_one_by_one(executable: &mut dyn Executable, launches: u64) -> Result<u64, BackendError> {
    (0..launches).try_for_each(|_| executable.launch()).map(|()| launches)
}

/// Measures the samples of one case.
pub trait Stopwatch {
    /// Times `launches` launches, or somewhat more if they are captured in batches.
    fn time_launches(
        &mut self,
        executable: &mut dyn Executable,
        launches: u64,
    ) -> Result<LaunchSample, BackendError>;

    /// Runs the timed graph once more, or one launch if launches were not captured. Returns its
    /// time, on a GPU with caches that hold other data; `None` if its time cannot be separated from
    /// the host's.
    fn replay_timed(
        &mut self,
        executable: &mut dyn Executable,
    ) -> Result<Option<ReplayResult>, BackendError>;

    /// Runs one launch of a case whose launches are short, alone and with caches that hold other
    /// data. Returns its time, nanoseconds; `None` for long launches, on the host, if launches
    /// carry state on, and if its time cannot be separated from the host's.
    fn replay_short(&mut self, _: &mut dyn Executable) -> Result<Option<f64>, BackendError> {
        Ok(None)
    }

    /// Launches once more while a recorder looks for work outside of the timed stream. The recorder
    /// runs after the samples, because recording changes times. Returns the reason if recording was
    /// not possible; the host needs no such check.
    ///
    /// # Errors
    /// Fails with [`BackendError::NotTimed`] if work ran elsewhere, or if a launch fails.
    fn check_elsewhere(
        &mut self,
        _executable: &mut dyn Executable,
    ) -> Result<Option<String>, BackendError> {
        Ok(None)
    }

    /// Reads the power state of the card that is timed; absent on the host.
    fn power(&self) -> Option<&Arc<PowerMeter>> {
        None
    }

    /// Starts at least `launches` launches back to back, without waiting for them, and returns
    /// their number.
    fn enqueue_launches(
        &mut self,
        executable: &mut dyn Executable,
        launches: u64,
    ) -> Result<u64, BackendError> {
        launch_one_by_one(executable, launches)
    }

    /// Keeps the device loaded between samples: the launches of the next sample are enqueued while
    /// the host waits for one. With `false`, only waits until the queued launches have finished.
    fn keep_loaded(&mut self, _loaded: bool) -> Result<(), BackendError> {
        Ok(())
    }

    /// Sets the SM clock that the following samples are compared with.
    fn settle_clock(&mut self, _clock_mhz: Option<f64>) {}

    /// Conditions that the timer sets: how launches are timed together, and by what.
    fn conditions(&self) -> SampleConditions;

    /// Commands that a launch puts into the device's queue: the nodes of its graph. The number is
    /// `None` if commands cannot be counted, and on the host.
    fn command_count(&self) -> Option<u64> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replay_with_more_work_takes_longer_at_the_same_clock() {
        let replay = |elapsed_ns| ReplayResult {
            elapsed_ns,
            clock_mhz: None,
            launches: 10,
            allowed_ns: 10e3,
        };
        let at = |elapsed_ns, clock| ReplayResult { clock_mhz: Some(clock), ..replay(elapsed_ns) };
        assert!(!replay(109.9e3).did_more_than_next(&replay(100e3)));
        assert!(replay(110.1e3).did_more_than_next(&replay(100e3)));
        assert!(!at(200e3, 990.0).did_more_than_next(&at(100e3, 1980.0)));
        assert!(at(200e3, 1980.0).did_more_than_next(&at(100e3, 990.0)));
    }
}
