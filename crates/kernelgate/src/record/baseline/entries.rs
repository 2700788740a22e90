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
    #[serde(rename = "started")]
    pub start_time: String,
    /// Machine, devices and build of the bench process.
    pub environment: RunEnvironment,
    /// Cargo package of the bench; absent if the run's record has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<CargoPackageId>,
    /// Commit of the measured code, and whether its working tree had changes.
    pub provenance: CommitAndChanges,
    /// Whether the user stated the commit in the environment variable `KERNELGATE_COMMIT`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "stated_commit")]
    pub user_stated_commit: bool,
    /// Seed of the inputs.
    #[serde(default = "seed_of_records_without_seed")]
    #[serde(rename = "seed")]
    pub input_seed: u64,
    /// Hash of the bench executable's content; absent if the executable could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "executable")]
    pub executable_hash: Option<String>,
    /// Performance ceilings of the device, as the bench process measured them.
    #[serde(default, skip_serializing_if = "MeasuredDeviceLimits::has_no_limits")]
    pub limits: MeasuredDeviceLimits,
    /// Wall time that the process spent on each problem with all of its cases, seconds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "problems_s")]
    pub wall_s_by_problem: BTreeMap<String, f64>,
}

/// Seed of runs whose record contains no seed, because a version without seeds wrote it.
const fn seed_of_records_without_seed() -> u64 {
    1
}

/// One benchmark case in a baseline file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseInBaseline {
    /// Name of the workload: `family/operation`.
    #[serde(rename = "workload")]
    pub workload_name: String,
    /// Revision of the workload's definition at the time of the measurement.
    #[serde(rename = "revision")]
    pub workload_revision: u32,
    /// Declared bytes and operations of one launch of the case.
    pub work: DeclaredWorkRecord,
    /// Number of data items that one launch computes, for a throughput; absent if the workload
    /// states none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "computed_samples")]
    pub items_per_launch: Option<u64>,
    /// Unit of these data items in which the throughput is stated.
    #[serde(default, skip_serializing_if = "ThroughputItemUnit::is_default_unit")]
    pub sample_unit: ThroughputItemUnit,
    /// Measurements of the case by the key of the process run; at least one. In the file, the
    /// measurements are an object with `keys`, `same` (facts shared by all runs) and `each` (lists
    /// with one entry per run).
    #[serde(with = "json_columns")]
    pub runs: BTreeMap<String, CaseSummaryOfRun>,
    /// Which part of the outputs was verified, in the run that verified least.
    #[serde(default, skip_serializing_if = "OutputVerificationExtent::is_comparison_not_recorded")]
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
    #[serde(rename = "medians_ns")]
    pub median_launch_ns_of_runs: Vec<f64>,
}

impl EarlierRunsWithOtherCode {
    /// Returns half the range of the earlier runs' medians, divided by their median.
    pub fn relative_half_range_of_medians(&self) -> f64 {
        half_range_by_median(&self.median_launch_ns_of_runs)
    }
}
