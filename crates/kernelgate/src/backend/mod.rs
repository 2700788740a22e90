//! How problems are computed: one implementation a row, on one backend.
//!
//! Deliberately absent: clocks. A backend launches and synchronises; `measure` times.

mod allowed_actions;
mod compute_target;
pub mod cpu;
pub mod cuda;
mod executable;
pub mod failure_facts;
pub mod host_timeout;
mod implementation;
pub mod program;

pub use allowed_actions::AllowedActions;
pub use compute_target::{BackendKind, BenchTarget};
pub use executable::{Executable, OutputContent};
pub use implementation::{Implementation, Prepare, PrepareOnCuda};
pub use kernelgate_cuda::BackendError;
