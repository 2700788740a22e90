//! Runs and baselines as versioned files: what was measured, where, of what.
//!
//! Runs hold raw samples, and statistics are derived when they are read; baselines, which are
//! committed, hold what a verdict needs of them. Files are deterministic (same
//! content, same bytes), written atomically, and a broken or foreign file is refused by name, never
//! overwritten. Deliberately absent: any judgement of what was measured (`gate`).

pub mod baseline;
pub mod case_run;
mod comparable;
pub mod criterion_store;
pub mod environment;
pub mod file;
pub mod gpus;
pub mod lock;
pub mod measurement;
pub mod numerics;
mod origin;
pub mod package;
pub mod provenance;
pub mod resources;
pub mod run;
pub mod sessions;
pub mod shard;
pub mod store;
pub mod tensors;
pub mod text;
pub mod trial_request;
pub mod trials;
pub mod verification;
pub mod work;

pub use baseline::{Baseline, BaselineCase, BaselineRun, EarlierRuns};
pub use case_run::{CasePower, CaseRun};
pub use environment::Environment;
pub use file::{FileError, read, write};
pub use gpus::{Gpu, Gpus};
pub use lock::Lock;
pub use measurement::{CaseOfRun, Differing, Measurement};
pub use numerics::{CaseNumerics, Numerics};
pub use package::Package;
pub use provenance::Provenance;
pub use run::{CaseRecord, LaunchCosts, ProcessRun, Samples};
pub use sessions::Session;
pub use shard::Shard;
pub use store::Store;
pub use trial_request::{TrialRequest, TrialSampling};
pub use trials::{Timing, TrialRecord, Trials};
pub use verification::Verification;
pub use work::WorkRecord;

/// Now, as records say when: RFC 3339, UTC, whole seconds.
pub fn timestamp() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// The same to the millisecond, for what is put in order by it.
fn precise_timestamp() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string()
}
