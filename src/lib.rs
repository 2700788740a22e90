//! The benchmark suite of kernelgate: families of real work, each in a folder of its own with its
//! definition, fp64 reference, CPU rows and CUDA rows. This crate uses only the parts of
//! `kernelgate` that are public to other packages.

#![allow(
    missing_docs,
    reason = "nobody links this library; a name that says it all has no comment"
)]

pub mod attention;
#[cfg(test)]
mod change_tests;
pub mod collective;
#[cfg(test)]
mod cpu_tests;
pub mod denoise;
mod draw;
#[cfg(test)]
mod driver_tests;
mod e4m3;
mod family;
#[cfg(test)]
mod gpu_tests;
mod kernel_files;
#[cfg(test)]
mod kernel_tests;
mod math;
pub mod mlp;
mod parallel;
#[cfg(test)]
mod precision_tests;
pub mod resnet18;
#[cfg(test)]
mod selection_tests;
pub mod st_bif;
pub mod transformer;

use std::process::ExitCode;

pub use family::WorkloadFamily;
use kernelgate::harness::Harness;
use kernelgate::suite::Suite;
use kernelgate_cuda::compiler::source::KernelFile;
use kernelgate_cuda::spec::ListedKernel;

/// Every family, in the order in which its cases are shown.
const WORKLOAD_FAMILIES: &[&WorkloadFamily] = &[
    &st_bif::FAMILY,
    &attention::FAMILY,
    &denoise::FAMILY,
    &resnet18::FAMILY,
    &mlp::FAMILY,
    &transformer::FAMILY,
    &collective::FAMILY,
];

/// All workloads of all families, with their rows.
pub fn all_suites() -> Vec<Suite> {
    WORKLOAD_FAMILIES.iter().flat_map(|family| (family.suites)()).collect()
}

/// All kernels of all families.
pub fn kernels() -> Vec<ListedKernel> {
    WORKLOAD_FAMILIES.iter().flat_map(|family| (family.kernels)()).collect()
}

/// `main` of a bench binary of this package, which embeds the kernel files
/// ([`kernel_files!`](macro@crate::kernel_files)); a filter may name a case of another binary.
pub fn run_bench(family: &WorkloadFamily, kernel_files: &'static [KernelFile]) -> ExitCode {
    Harness::new(family.name, (family.suites)())
        .siblings(all_suites())
        .peers(WORKLOAD_FAMILIES.iter().filter_map(|family| family.peers).collect())
        .kernels((family.kernels)())
        .kernel_files(kernel_files)
        .main()
}
