//! A trial request: the work of one bench process in a comparison.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A request for one trial: its cases, its duration, and the path of its run record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialRequest {
    /// Name of the comparison, which is the session of the run.
    pub session: String,
    /// Path of the trial's run record.
    pub record: PathBuf,
    /// Cases to run, all of which the flags select; absent if only the flags select cases.
    pub cases: Option<BTreeSet<String>>,
    /// Cases that run first because their code changed.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub first: BTreeSet<String>,
    /// Run of an earlier process of the executable: a case with the output bits that were verified
    /// there counts as verified.
    pub verified: Option<PathBuf>,
    /// Folder with this executable's inputs, which are drawn once and then read; absent if each
    /// process draws its own.
    pub inputs: Option<PathBuf>,
    /// Folder where outputs are left that no reference verifies, for the head's to be compared
    /// with; in the base's first process of an executable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_outputs: Option<PathBuf>,
    /// Whether outputs of verified cases are also kept in that folder, for a head build that cannot
    /// verify its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_verified: bool,
    /// Folder that holds the base build's outputs. The head's first process compares its outputs
    /// with these outputs of the base build if the case has no reference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_outputs: Option<PathBuf>,
    /// Whether to measure the anchor rates, the rates of fixed work by which cards are compared.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub anchors: bool,
    /// Duration of the warm-up and the measurement of a case.
    pub sampling: TrialSampling,
}

impl TrialRequest {
    /// A request to run every case that the flags select, with inputs that the process draws
    /// itself.
    pub fn new(session: impl Into<String>, record: PathBuf, sampling: TrialSampling) -> Self {
        Self {
            session: session.into(),
            record,
            cases: None,
            first: BTreeSet::new(),
            verified: None,
            inputs: None,
            keep_outputs: None,
            keep_verified: false,
            base_outputs: None,
            anchors: false,
            sampling,
        }
    }
}

/// Duration of the warm-up and the measurement of a case in a trial.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TrialSampling {
    /// Warm-up, seconds; skipped if the launch of the verification took longer than the whole plan.
    pub warm_up_s: f64,
    /// Measurement, seconds; longer if the minimum number of samples takes longer.
    pub measurement_s: f64,
    /// Fewest samples.
    pub fewest: usize,
    /// Most samples.
    pub most: usize,
}

impl TrialSampling {
    /// Checks that the times and counts of the request are plausible.
    ///
    /// # Errors
    /// The error is a fragment of a message that names the invalid fields.
    pub fn validate(&self) -> Result<(), String> {
        let Self { warm_up_s, measurement_s, fewest, most } = *self;
        if ![warm_up_s, measurement_s].iter().all(|seconds| (0.0..1e6).contains(seconds)) {
            return Err(format!("warm-up of {warm_up_s} s, measurement of {measurement_s} s"));
        }
        if fewest == 0 || most < fewest {
            return Err(format!("{fewest} to {most} samples"));
        }
        Ok(())
    }

    /// Converts the sampling plan for a GPU, where samples have a fixed length: as many samples as
    /// the measurement time holds.
    pub fn sampling_on_gpu(self) -> Self {
        let usual = Self::GPU_SAMPLING;
        let most = usual.most as f64 * self.measurement_s / usual.measurement_s;
        Self { fewest: usual.fewest, most: usual.most.max(most.ceil() as usize), ..self }
    }

    /// The verification pass of a process: one sample, so that every case is seen to run.
    pub const VERIFICATION_SAMPLING: Self =
        Self { warm_up_s: 0.0, measurement_s: 0.0, fewest: 1, most: 1 };
    /// Sampling plan of a trial on a GPU, where samples of one process vary less than processes do.
    pub const GPU_SAMPLING: Self =
        Self { warm_up_s: 0.05, measurement_s: 0.2, fewest: 2, most: 50 };
    /// Sampling plan of a process that keeps the device busy until it is ended.
    pub const ENDLESS_SAMPLING: Self =
        Self { warm_up_s: 0.0, measurement_s: 600.0, fewest: 1, most: 1_000_000 };
    /// Sampling plan of a process whose median counts, on the host.
    pub const HOST_SAMPLING: Self =
        Self { warm_up_s: 0.1, measurement_s: 0.3, fewest: 2, most: 20 };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_sampling_on_a_gpu_takes_more_samples() {
        let samples = |measurement_s| {
            TrialSampling { measurement_s, ..TrialSampling::HOST_SAMPLING }.sampling_on_gpu().most
        };
        assert_eq!([0.03, 0.2, 1.0].map(samples), [50, 50, 250]);
    }
}
