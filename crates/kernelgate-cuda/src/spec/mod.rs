//! A kernel as one row of data: source, macros, launch shape, shared memory, cluster, least
//! architecture.
//!
//! Launchers load and launch a row ([`KernelSpec::compile_and_load`]), `kernelgate resources` and
//! the tests list it ([`list_kernel_rows()`]); all facts about a kernel that they use are in its
//! row. Deliberately absent: a registry. Each kernel family has its specifications as constants,
//! and one slice with all of them.

mod list;
mod load;
mod requires;
mod row;

pub use list::{ListedKernel, list_kernel_rows};
pub use load::LoadedKernel;
pub use requires::RequiredArchitecture;
pub use row::KernelSpec;
