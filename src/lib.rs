//! The benchmark suite of kernelgate: families of real workloads, each in a folder with its
//! definition, fp64 reference, and CPU and CUDA implementations. The crate of the benchmark suite
//! uses only the public API of the crate `kernelgate`, as a user's package would.

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
use kernelgate::suite::WorkloadSuite;
use kernelgate_cuda::compiler::source::NamedKernelFile;
use kernelgate_cuda::spec::ListedKernelBuild;

/// All workload families, in the order in which reports and lists show their cases.
const WORKLOAD_FAMILIES: &[&WorkloadFamily] = &[
    &st_bif::ST_BIF_FAMILY,
    &attention::ATTENTION_FAMILY,
    &denoise::DENOISE_FAMILY,
    &resnet18::RESNET18_FAMILY,
    &mlp::MLP_FAMILY,
    &transformer::TRANSFORMER_FAMILY,
    &collective::COLLECTIVE_FAMILY,
];

/// Returns all workloads of all families, each with its implementations.
pub fn suites_of_all_families() -> Vec<WorkloadSuite> {
    WORKLOAD_FAMILIES.iter().flat_map(|family| (family.suites)()).collect()
}

/// Lists the CUDA kernels of all families.
pub fn list_kernels_of_all_families() -> Vec<ListedKernelBuild> {
    WORKLOAD_FAMILIES.iter().flat_map(|family| (family.kernels)()).collect()
}

/// The `main` function of a family's bench executable, which embeds the kernel files
/// ([`kernel_files!`](macro@crate::kernel_files)); its filter may also name cases of other benches.
pub fn run_bench_of_family(
    family: &WorkloadFamily,
    kernel_files: &'static [NamedKernelFile],
) -> ExitCode {
    Harness::new(family.family_name, (family.suites)())
        .suites_of_sibling_benches(suites_of_all_families())
        .peers(WORKLOAD_FAMILIES.iter().filter_map(|family| family.peer_program).collect())
        .kernels((family.kernels)())
        .kernel_files(kernel_files)
        .main()
}
