//! A kernel as one row of data: source, macros, launch shape, shared memory, cluster, least
//! architecture.
//!
//! Launchers load and launch a row ([`KernelSpec::compile_and_load`]), `kernelgate resources` and
//! the tests list it ([`list_kernel_rows()`]); all facts about a kernel that they use are in its
//! row. Deliberately absent: a registry. Each kernel family has its specifications as constants,
//! and one slice with all of them.

mod kernel_spec;
mod loaded_kernel;
mod required_architecture;
mod spec_list;

pub use kernel_spec::KernelSpec;
pub use loaded_kernel::LoadedKernel;
pub use required_architecture::RequiredArchitecture;
pub use spec_list::{ListedKernel, list_kernel_rows};
