//! A bench binary: selects cases, verifies them, has Criterion time them, and records the run.
//!
//! Besides `measure::criterion`, this module is the only one that uses Criterion. The order of a
//! case is inputs, reference, verification, timing; a wrong case gets no time. The harness
//! deliberately judges no results: the program `kernelgate` does.

mod answer;
mod auditing;
mod binary;
mod error;
pub mod gpu_time;
pub mod panic_guard;
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
pub use peers::PeerProgramSource;
pub use selection::{backend_choice, cases, filter};
pub use settings::{args, scheduler, variables};
