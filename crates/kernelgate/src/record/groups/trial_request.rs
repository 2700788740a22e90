//! Defines the request for one trial: the work of one bench process in a comparison.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Request for one trial: its cases, its sampling plan, and the path of its run record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrialRequestToBench {
    /// Name of the comparison, which becomes the session name of the trial's run.
    #[serde(rename = "session")]
    pub session_name: String,
    /// Path at which the bench process writes the trial's run record.
    #[serde(rename = "record")]
    pub run_record_path: PathBuf,
    /// Case ids to run, among those that the flags select; absent if all selected cases run.
    #[serde(rename = "cases")]
    pub case_ids_to_run: Option<BTreeSet<String>>,
    /// Case ids that run first, because their code changed.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[serde(rename = "first")]
    pub case_ids_to_run_first: BTreeSet<String>,
    /// Run record of an earlier process of this executable: a case whose output bits equal those
    /// verified there counts as verified.
    #[serde(rename = "verified")]
    pub verified_run_record: Option<PathBuf>,
    /// Folder with the inputs of this executable, which the first process generates and later
    /// processes read; absent if each process generates its own.
    #[serde(rename = "inputs")]
    pub inputs_folder: Option<PathBuf>,
    /// Folder in which the base's first process stores outputs that no reference verifies, so that
    /// the head's outputs can be compared with them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "keep_outputs")]
    pub kept_outputs_folder: Option<PathBuf>,
    /// Whether outputs of verified cases are stored in that folder too, for a head build that
    /// cannot verify its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "keep_verified")]
    pub keep_verified_outputs: bool,
    /// Folder that contains the stored outputs of the base build. The head's first process compares
    /// its outputs with these outputs if the case has no reference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "base_outputs")]
    pub base_outputs_folder: Option<PathBuf>,
    /// Whether to measure the anchor rates of the device, by which shards on several cards are
    /// compared.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "anchors")]
    pub measure_anchor_rates: bool,
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
            session_name: session.into(),
            run_record_path: record,
            case_ids_to_run: None,
            case_ids_to_run_first: BTreeSet::new(),
            verified_run_record: None,
            inputs_folder: None,
            kept_outputs_folder: None,
            keep_verified_outputs: false,
            base_outputs_folder: None,
            measure_anchor_rates: false,
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
    #[serde(rename = "fewest")]
    pub fewest_samples: usize,
    /// Most samples.
    #[serde(rename = "most")]
    pub most_samples: usize,
}

impl TrialSamplingPlan {
    /// Fails if a duration or number of samples of this plan is implausible.
    ///
    /// # Errors
    /// The error is a fragment of a message that names the invalid fields.
    pub fn check_sampling_plan_plausible(&self) -> Result<(), String> {
        let Self { warm_up_s, measurement_s, fewest_samples: fewest, most_samples: most } = *self;
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
        let most = usual.most_samples as f64 * self.measurement_s / usual.measurement_s;
        Self {
            fewest_samples: usual.fewest_samples,
            most_samples: usual.most_samples.max(most.ceil() as usize),
            ..self
        }
    }

    /// Sampling plan of a process that only verifies: one sample shows that each case runs.
    pub const ONE_SAMPLE_FOR_VERIFICATION: Self =
        Self { warm_up_s: 0.0, measurement_s: 0.0, fewest_samples: 1, most_samples: 1 };
    /// Sampling plan of a trial on a GPU, where samples within a process vary less than medians of
    /// processes.
    pub const SAMPLING_ON_GPU: Self =
        Self { warm_up_s: 0.05, measurement_s: 0.2, fewest_samples: 2, most_samples: 50 };
    /// Sampling plan of a process that keeps the device busy until the process is ended.
    pub const SAMPLING_UNTIL_PROCESS_IS_ENDED: Self =
        Self { warm_up_s: 0.0, measurement_s: 600.0, fewest_samples: 1, most_samples: 1_000_000 };
    /// Sampling plan of a trial on the host CPU, whose median is used.
    pub const SAMPLING_ON_HOST: Self =
        Self { warm_up_s: 0.1, measurement_s: 0.3, fewest_samples: 2, most_samples: 20 };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_measurement_on_a_gpu_takes_more_samples() {
        let samples = |measurement_s| {
            TrialSamplingPlan { measurement_s, ..TrialSamplingPlan::SAMPLING_ON_HOST }
                .with_sample_count_for_gpu()
                .most_samples
        };
        assert_eq!([0.03, 0.2, 1.0].map(samples), [50, 50, 250]);
    }
}
