//! A bench executable: selects cases, verifies them, times them with Criterion, and records the
//! run.
//!
//! Besides `measure::criterion`, only this module uses Criterion. Each case is processed in the
//! order inputs, reference, verification, timing; a case with wrong outputs is not timed. The
//! harness does not judge results; the program `kernelgate` does.

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
pub use peers::EmbeddedPeerProgram;
pub use selection::{backend_choice, cases, filter};
pub use settings::{args, scheduler, variables};
