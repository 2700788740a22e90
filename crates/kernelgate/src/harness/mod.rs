//! A bench binary: selects cases, verifies them, has Criterion time them, and records the run.
//!
//! The only module that knows Criterion, with `measure::criterion`. Order of a case: inputs,
//! reference, verification, timing; a case that is wrong has no time. Deliberately absent: judging
//! what was measured (the program does).

mod after_timing;
mod answer;
pub mod args;
mod bench_run;
mod binary;
mod case_error;
pub mod cases;
mod changed_inputs;
mod deadline;
mod device_memory;
mod error;
mod estimate;
mod execution;
#[cfg(test)]
mod exploits;
pub mod filter;
pub mod gpu_time;
pub mod guard;
pub mod inputs;
mod invocation;
pub mod names;
mod own_flags;
mod peers;
pub mod place;
pub mod problem;
mod progress;
mod recorder;
mod references;
#[cfg(test)]
mod sample;
mod saving;
mod spent;
mod stored;
mod terse;
mod timing;
pub mod trial;
mod trial_run;
pub mod variables;

pub use binary::Harness;
pub use error::HarnessError;
pub use peers::Peers;
