//! A network as one list of launches: kernels, library GEMMs, copies, fills and launches of other
//! code, in concurrent lanes and named ranges, with its device memory.
//!
//! A [`LaunchProgram`] is written without a GPU, so its device memory is known before allocation
//! ([`LaunchProgram::device_bytes`]), and tests read its steps without a GPU. A memory region is
//! declared once with its [`MemoryPurpose`]; launches take [`RegionPointer`]s into regions, which
//! become addresses when the program is loaded.
//!
//! ```
//! use kernelgate::backend::cuda::{KernelSpec, Source};
//! use kernelgate::backend::program::{MemoryPurpose, LaunchProgram, long_operand};
//! use kernelgate::workload::Dtype;
//!
//! const RELU: KernelSpec<usize> =
//!     KernelSpec::new(Source::new("relu", ""), "relu", 128, |n| [n.div_ceil(128), 1, 1]);
//!
//! let n = 1000;
//! let mut program = LaunchProgram::new();
//! program.add_input("x", MemoryPurpose::Inputs, 4 * n);
//! program.add_scratch("hidden", MemoryPurpose::Activations, 4 * n);
//! let y = program.add_output("y", [n], Dtype::F32);
//! program.add_steps_in_named_range("Layers", |program| {
//!     program.add_launch(&RELU, &n, ("x", "hidden", long_operand(n)));
//!     program.add_launch(&RELU, &n, ("hidden", y, long_operand(n)));
//! });
//! assert_eq!(program.check(), Ok(()));
//! assert_eq!(program.device_bytes(), 12_000);
//! ```
//!
//! This module deliberately knows neither times nor particular kernels.

mod error;
mod lanes;
mod load;
mod memory;
#[cfg(test)]
mod network_tests;
mod operand;
mod plan;
pub mod program_set;
mod step;
#[cfg(test)]
mod tests;

pub use error::LaunchListError;
pub use lanes::ProgramLane;
pub use load::{LoadedProgram, ProgramLaunchMode};
pub use memory::{MemoryPurpose, TableNumberOrAddress};
pub use operand::{
    LaunchArgument, LaunchArgumentList, NULL, RegionPointer, int_operand, int_operands,
    long_operand, tensor_map_operand,
};
pub use plan::LaunchProgram;
pub use step::{
    DeviceStreamAndAddresses, EnqueueStep, KeepOrReleaseL2Lines, KernelLaunchStep,
    KernelWithParameters, ProgramStep,
};
