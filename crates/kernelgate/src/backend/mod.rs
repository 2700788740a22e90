//! How problems are computed: one implementation a row, on one backend.
//!
//! Deliberately absent: clocks. A backend launches and synchronises; `measure` times.

mod allowed;
pub mod cpu;
pub mod cuda;
mod executable;
pub mod failure_facts;
pub mod host_timeout;
mod implementation;
pub mod program;
mod target;

pub use allowed::AllowedActions;
pub use executable::{Executable, OutputContent};
pub use implementation::{Implementation, Prepare, PrepareOnCuda};
pub use kernelgate_cuda::BackendError;
pub use target::{BackendKind, BenchTarget};
