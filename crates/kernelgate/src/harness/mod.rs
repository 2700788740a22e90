//! A bench binary: selects cases, verifies them, has Criterion time them, and records the run.
//!
//! The only module that knows Criterion, with `measure::criterion`. Order of a case: inputs,
//! reference, verification, timing; a case that is wrong has no time. Deliberately absent: judging
//! what was measured (the program does).

mod answer;
mod auditing;
mod binary;
mod error;
pub mod gpu_time;
pub mod guard;
mod peers;
mod phase_timer;
mod recording;
mod running;
mod selection;
mod settings;
#[doc(hidden)]
pub mod testing;

pub use binary::Harness;
pub use error::HarnessError;
pub use peers::Peers;
pub use selection::{cases, filter, place};
pub use settings::{args, scheduler, variables};
