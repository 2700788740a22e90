//! Defines the entries of a baseline file: process runs and cases.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::measure::limits::MeasuredDeviceLimits;
use crate::record::case_run::CaseSummaryOfRun;
use crate::record::environment::RunEnvironment;
use crate::record::files::json_columns;
use crate::record::numerics::CaseOutputErrorsBySeed;
use crate::record::package::CargoPackageId;
use crate::record::provenance::CommitAndChanges;
use crate::record::verification::OutputVerificationExtent;
use crate::record::work::DeclaredWorkRecord;
use crate::stats::half_range_by_median;
use crate::workload::ThroughputItemUnit;

/// Environment, code and seed of one process run whose measurements a baseline contains.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessRunInBaseline {
    /// Time at which the process run started, RFC 3339, UTC.
    pub started: String,
    /// Environment of the process.
    pub environment: RunEnvironment,
    /// Cargo package of the bench; absent if the run's record has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<CargoPackageId>,
    /// Code that was measured.
    pub provenance: CommitAndChanges,
    /// Whether the user stated the commit in the environment variable `KERNELGATE_COMMIT`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stated_commit: bool,
    /// Seed of the inputs.
    #[serde(default = "default_first_seed")]
    pub seed: u64,
    /// Hash of the bench executable's content; absent if the executable could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub executable: Option<String>,
    /// Performance ceilings of the device, as the bench process measured them.
    #[serde(default, skip_serializing_if = "MeasuredDeviceLimits::has_no_limits")]
    pub limits: MeasuredDeviceLimits,
    /// Wall time that the process spent on each problem with all of its cases, seconds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub problems_s: BTreeMap<String, f64>,
}

/// Seed of runs whose record contains no seed, because a version without seeds wrote it.
const fn default_first_seed() -> u64 {
    1
}

/// One benchmark case in a baseline file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseInBaseline {
    /// Name of the workload: `family/operation`.
    pub workload: String,
    /// Revision of the workload's definition at the time of the measurement.
    pub revision: u32,
    /// Declared bytes and operations of one launch of the case.
    pub work: DeclaredWorkRecord,
    /// Number of data items that one launch computes, for a throughput; absent if the workload
    /// states none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub computed_samples: Option<u64>,
    /// Unit of these data items in which the throughput is stated.
    #[serde(default, skip_serializing_if = "ThroughputItemUnit::is_default_unit")]
    pub sample_unit: ThroughputItemUnit,
    /// Measurements of the case by the key of the process run; at least one. In the file, the
    /// measurements are an object with `keys`, `same` (facts shared by all runs) and `each` (lists
    /// with one entry per run).
    #[serde(with = "json_columns")]
    pub runs: BTreeMap<String, CaseSummaryOfRun>,
    /// Which part of the outputs was verified, in the run that verified least.
    #[serde(default, skip_serializing_if = "OutputVerificationExtent::is_unknown")]
    pub verification: OutputVerificationExtent,
    /// Errors of the outputs relative to the reference, by seed, if they were recorded for this
    /// code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numerics: Option<CaseOutputErrorsBySeed>,
    /// Summary of earlier runs that the present runs replaced, if there were at least two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earlier: Option<EarlierRunsWithOtherCode>,
}

/// Medians of a case's earlier runs, with other code: they show how much runs vary, but not the
/// present time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EarlierRunsWithOtherCode {
    /// Commit of the code that the earlier runs measured, in the form of
    /// [`CommitAndChanges::short_commit_with_changes_mark`].
    pub commit: String,
    /// Median launch time of each earlier run, nanoseconds; at least two runs.
    pub medians_ns: Vec<f64>,
}

impl EarlierRunsWithOtherCode {
    /// Returns half the range of the earlier runs' medians, divided by their median.
    pub fn relative_half_range_of_medians(&self) -> f64 {
        half_range_by_median(&self.medians_ns)
    }
}
