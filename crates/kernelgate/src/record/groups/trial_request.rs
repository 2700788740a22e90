//! Defines the request for one trial: the work of one bench process in a comparison.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Request for one trial: its cases, its sampling plan, and the path of its run record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialRequestToBench {
    /// Name of the comparison, which becomes the session name of the trial's run.
    pub session: String,
    /// Path at which the bench process writes the trial's run record.
    pub record: PathBuf,
    /// Case ids to run, among those that the flags select; absent if all selected cases run.
    pub cases: Option<BTreeSet<String>>,
    /// Case ids that run first, because their code changed.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub first: BTreeSet<String>,
    /// Run record of an earlier process of this executable: a case whose output bits equal those
    /// verified there counts as verified.
    pub verified: Option<PathBuf>,
    /// Folder with the inputs of this executable, which the first process generates and later
    /// processes read; absent if each process generates its own.
    pub inputs: Option<PathBuf>,
    /// Folder in which the base's first process stores outputs that no reference verifies, so that
    /// the head's outputs can be compared with them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_outputs: Option<PathBuf>,
    /// Whether outputs of verified cases are stored in that folder too, for a head build that
    /// cannot verify its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_verified: bool,
    /// Folder that contains the stored outputs of the base build. The head's first process compares
    /// its outputs with these outputs if the case has no reference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base_outputs: Option<PathBuf>,
    /// Whether to measure the anchor rates of the device, by which shards on several cards are
    /// compared.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub anchors: bool,
    /// Durations of warm-up and measurement of each case, and numbers of samples.
    pub sampling: TrialSamplingPlan,
}

impl TrialRequestToBench {
    /// Makes a request to run every case that the flags select, with inputs that the process
    /// generates itself.
    pub fn for_all_selected_cases(
        session: impl Into<String>,
        record: PathBuf,
        sampling: TrialSamplingPlan,
    ) -> Self {
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

/// Sampling plan of a trial: durations of warm-up and measurement of each case, and numbers of
/// samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TrialSamplingPlan {
    /// Warm-up of a case, seconds; skipped if one launch of the verification took longer than the
    /// whole plan.
    pub warm_up_s: f64,
    /// Measurement of a case, seconds; the minimum number of samples may take longer.
    pub measurement_s: f64,
    /// Fewest samples.
    pub fewest: usize,
    /// Most samples.
    pub most: usize,
}

impl TrialSamplingPlan {
    /// Fails if a duration or number of samples of this plan is implausible.
    ///
    /// # Errors
    /// The error is a fragment of a message that names the invalid fields.
    pub fn check_sampling_plan_plausible(&self) -> Result<(), String> {
        let Self { warm_up_s, measurement_s, fewest, most } = *self;
        if ![warm_up_s, measurement_s].iter().all(|seconds| (0.0..1e6).contains(seconds)) {
            return Err(format!("warm-up of {warm_up_s} s, measurement of {measurement_s} s"));
        }
        if fewest == 0 || most < fewest {
            return Err(format!("{fewest} to {most} samples"));
        }
        Ok(())
    }

    /// Adapts the sampling plan to a GPU, where samples have a fixed length: the maximum number of
    /// samples grows with the measurement time.
    pub fn with_sample_count_for_gpu(self) -> Self {
        let usual = Self::SAMPLING_ON_GPU;
        let most = usual.most as f64 * self.measurement_s / usual.measurement_s;
        Self { fewest: usual.fewest, most: usual.most.max(most.ceil() as usize), ..self }
    }

    /// Sampling plan of a process that only verifies: one sample shows that each case runs.
    pub const ONE_SAMPLE_FOR_VERIFICATION: Self =
        Self { warm_up_s: 0.0, measurement_s: 0.0, fewest: 1, most: 1 };
    /// Sampling plan of a trial on a GPU, where samples within a process vary less than medians of
    /// processes.
    pub const SAMPLING_ON_GPU: Self =
        Self { warm_up_s: 0.05, measurement_s: 0.2, fewest: 2, most: 50 };
    /// Sampling plan of a process that keeps the device busy until the process is ended.
    pub const SAMPLING_UNTIL_PROCESS_IS_ENDED: Self =
        Self { warm_up_s: 0.0, measurement_s: 600.0, fewest: 1, most: 1_000_000 };
    /// Sampling plan of a trial on the host CPU, whose median is used.
    pub const SAMPLING_ON_HOST: Self =
        Self { warm_up_s: 0.1, measurement_s: 0.3, fewest: 2, most: 20 };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_measurement_on_a_gpu_takes_more_samples() {
        let samples = |measurement_s| {
            TrialSamplingPlan { measurement_s, ..TrialSamplingPlan::SAMPLING_ON_HOST }
                .with_sample_count_for_gpu()
                .most
        };
        assert_eq!([0.03, 0.2, 1.0].map(samples), [50, 50, 250]);
    }
}
