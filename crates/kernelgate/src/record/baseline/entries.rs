//! Content of a baseline: its process runs and its cases.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::measure::limits::DeviceLimits;
use crate::record::case_run::CaseRun;
use crate::record::environment::Environment;
use crate::record::files::json_columns;
use crate::record::numerics::CaseNumerics;
use crate::record::package::CargoPackage;
use crate::record::provenance::Provenance;
use crate::record::verification::VerificationExtent;
use crate::record::work::WorkRecord;
use crate::stats::relative_half_range;
use crate::workload::SampleUnit;

/// Environment and provenance of one process run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BaselineRun {
    /// Start time of the run, RFC 3339, UTC.
    pub started: String,
    /// Environment of the process.
    pub environment: Environment,
    /// Package of the bench; absent if the record has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<CargoPackage>,
    /// Code that was measured.
    pub provenance: Provenance,
    /// Whether the environment variable `KERNELGATE_COMMIT` stated the commit.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stated_commit: bool,
    /// Seed of the inputs.
    #[serde(default = "default_first_seed")]
    pub seed: u64,
    /// Content hash of the executable; absent if it cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub executable: Option<String>,
    /// Ceilings of the device, as the bench process measured them.
    #[serde(default, skip_serializing_if = "DeviceLimits::is_empty")]
    pub limits: DeviceLimits,
    /// Wall time of each problem with all of its cases, seconds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub problems_s: BTreeMap<String, f64>,
}

/// Seed that runs without a recorded seed used.
const fn default_first_seed() -> u64 {
    1
}

/// One case of a baseline file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BaselineCase {
    /// `family/operation`.
    pub workload: String,
    /// Revision of the workload's definition when the case was measured.
    pub revision: u32,
    /// Declared work of one launch of the case.
    pub work: WorkRecord,
    /// Samples that a launch computes, for a rate; absent where its workload names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub computed_samples: Option<u64>,
    /// Unit of the samples in which throughput is stated.
    #[serde(default, skip_serializing_if = "SampleUnit::is_default_unit")]
    pub sample_unit: SampleUnit,
    /// Measurements of the case by run key; at least one run. In a file, an object with `keys`,
    /// `same` (facts of all runs) and `each` (lists with an entry a run).
    #[serde(with = "json_columns")]
    pub runs: BTreeMap<String, CaseRun>,
    /// How far the outputs were verified, in the run that verified least.
    #[serde(default, skip_serializing_if = "VerificationExtent::is_unknown")]
    pub verification: VerificationExtent,
    /// Errors of the outputs of this code relative to the reference, if they were recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numerics: Option<CaseNumerics>,
    /// Summary of the earlier runs that the present ones replaced, if there were several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earlier: Option<EarlierRuns>,
}

/// Earlier runs of a case with other code: they show how much its runs vary, but not its present
/// time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EarlierRuns {
    /// Commit of the code that the earlier runs measured, as [`Provenance::short_commit`] writes
    /// it.
    pub commit: String,
    /// Median of each run, nanoseconds a launch; at least two.
    pub medians_ns: Vec<f64>,
}

impl EarlierRuns {
    /// Half the range of the medians, relative to their median.
    pub fn spread(&self) -> f64 {
        relative_half_range(&self.medians_ns)
    }
}
