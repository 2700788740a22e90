//! Runs and baselines as versioned files: measured values, environment and code.
//!
//! Runs hold raw samples; statistics are derived when runs are read. Baselines are committed and
//! hold only the numbers that a verdict needs. Files are deterministic (same content, same bytes)
//! and written atomically; an invalid or foreign file is refused by name, never overwritten.
//! Records contain no judgement of the results, which is the task of `gate`.

pub mod baseline;
pub mod case_run;
pub mod criterion_store;
mod files;
mod groups;
pub mod numerics;
mod origin;
pub mod resources;
pub mod run;
pub mod verification;
pub mod work;

pub use baseline::{Baseline, BaselineCase, BaselineRun, EarlierRuns};
pub use case_run::{CasePower, CaseRun};
pub use files::file::{RecordFileError, read, write};
pub use files::lock::FileLock;
pub use files::{file, file_set, json_columns, lock, tensors, text};
pub use groups::measurement::{CaseInRun, DifferingRunFact, Measurement};
pub use groups::sessions::Session;
pub use groups::shard::Shard;
pub use groups::shard_partition::{BenchShardPlan, ShardPartition};
pub use groups::store::BaselineStore;
pub use groups::trial_request::{TrialRequest, TrialSampling};
pub use groups::trials::{CaseTiming, ComparisonTrials, TrialRecord};
pub use groups::{measurement, sessions, shard, shard_partition, store, trial_request, trials};
pub use numerics::{CaseNumerics, Numerics};
pub use origin::environment::Environment;
pub use origin::gpus::{Gpu, RecordedGpus};
pub use origin::machine::MachineFacts;
pub use origin::package::CargoPackage;
pub use origin::provenance::Provenance;
pub use origin::{environment, gpus, machine, package, provenance};
pub use run::{CaseRecord, CaseSamples, LaunchCosts, ProcessRun};
pub use verification::VerificationExtent;
pub use work::WorkRecord;

pub use crate::workload::SampleUnit;

/// Returns the current time in the text format of records: RFC 3339 in UTC with whole seconds.
pub fn current_timestamp() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Current time to the millisecond, for records that are sorted by time.
fn millisecond_timestamp() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}
