//! Specifications of CUDA kernels as rows of data: source, macros, launch shape, shared memory,
//! cluster, oldest architecture.
//!
//! Rust code loads a kernel from its row ([`KernelSpec::compile_and_load`]); `kernelgate resources`
//! and tests list the rows ([`list_kernel_rows()`]). A kernel's row contains all facts that loading
//! and listing the kernel use. This module deliberately has no registry of kernels. Each kernel
//! family has a constant for each of its specifications, and one slice with all of them.

mod kernel_spec;
mod loaded_kernel;
mod required_architecture;
mod spec_list;

pub use kernel_spec::KernelSpec;
pub use loaded_kernel::LoadedKernelWithLaunch;
pub use required_architecture::RequiredArchitecture;
pub use spec_list::{ListedKernelBuild, list_kernel_rows};
