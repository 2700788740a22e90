//! Stores process runs and baselines as versioned files: measured values, environment and code.
//!
//! Run records contain the raw samples; statistics are computed when a run record is read. Baseline
//! files are committed to git and contain only the numbers that a verdict needs. Record files are
//! deterministic (equal content, equal bytes) and written atomically; an invalid or foreign file is
//! refused by name, never overwritten. Records contain no verdicts, which the module `gate`
//! decides.

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

pub use baseline::{BaselineFile, CaseInBaseline, EarlierRunsWithOtherCode, ProcessRunInBaseline};
pub use case_run::{CaseSummaryOfRun, PowerStateForComparison};
pub use files::file::{RecordFileError, read_record, write_record_atomically};
pub use files::lock::ExclusiveFileLock;
pub use files::{file, file_set, json_columns, lock, tensors, text};
pub use groups::measurement::{CaseInProcessRun, DifferingFactOfRuns, MeasurementOfRuns};
pub use groups::sessions::SessionOfRuns;
pub use groups::shard::ShardOfWork;
pub use groups::shard_partition::{DivisionAmongShardsSummary, ProblemsDividedAmongShards};
pub use groups::store::RecordFoldersOfPackage;
pub use groups::trial_request::{TrialRequestToBench, TrialSamplingPlan};
pub use groups::trials::{CaseTimeInTrial, ComparisonTrialsFile, TrialOfComparison};
pub use groups::{measurement, sessions, shard, shard_partition, store, trial_request, trials};
pub use numerics::{CaseOutputErrorsBySeed, OutputErrorsOfExecutable};
pub use origin::environment::RunEnvironment;
pub use origin::gpus::{GpuInEnvironment, GpusInEnvironment};
pub use origin::machine::MachineHardware;
pub use origin::package::CargoPackageId;
pub use origin::provenance::CommitAndChanges;
pub use origin::{environment, gpus, machine, package, provenance};
pub use run::{
    BenchProcessRun, CaseRecordWithSamples, LaunchCostsBesidesDeviceTime, SamplesOfCase,
};
pub use verification::OutputVerificationExtent;
pub use work::DeclaredWorkRecord;

pub use crate::workload::ThroughputItemUnit;

/// Returns the current time as text, in the format of records: The format is RFC 3339 in UTC with
/// whole seconds.
pub fn current_time_for_records() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// Returns the current time as text with milliseconds, for records that are sorted by time.
fn current_time_with_milliseconds() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}
