//! Backends (CPU and CUDA) that prepare and launch implementations of problems.
//!
//! Backends read no clocks. A backend launches and synchronizes; the module `measure` does the
//! timing.

mod allowed_actions;
mod compute_target;
pub mod cpu;
pub mod cuda;
mod executable;
pub mod failure_facts;
pub mod host_timeout;
mod implementation;
pub mod program;

pub use allowed_actions::AllowedActionsOfTimedCode;
pub use compute_target::{BackendKind, BenchDevices};
pub use executable::{LaunchableProblem, OutputContentBeforeLaunch};
pub use implementation::{Implementation, PrepareFunction, PrepareOnOneGpu};
pub use kernelgate_cuda::BackendError;
