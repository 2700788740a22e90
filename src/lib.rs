//! The benchmark suite of kernelgate: four families of real work, each in a folder of its own with
//! its definition, fp64 reference, CPU rows and CUDA rows. It uses nothing of `kernelgate` that an
//! outside package could not.

pub mod attention;
#[cfg(test)]
mod change_tests;
pub mod denoise;
#[cfg(test)]
mod driver_tests;
mod e4m3;
#[cfg(test)]
mod gpu_tests;
mod kernel_files;
#[cfg(test)]
mod kernel_tests;
mod math;
mod parallel;
#[cfg(test)]
mod precision_tests;
pub mod resnet18;
#[cfg(test)]
mod selection_tests;
pub mod st_bif;

use std::process::ExitCode;

use kernelgate::harness::{Harness, Peers};
use kernelgate::suite::Suite;
use kernelgate_cuda::instruments;
use kernelgate_cuda::spec::ListedKernel;

/// Every workload of every family, in the order they are shown.
pub fn all() -> Vec<Suite> {
    [st_bif::suites(), attention::suites(), denoise::suites(), resnet18::suites()]
        .into_iter()
        .flatten()
        .collect()
}

/// Every kernel of every family, and those that measuring needs, which are recorded with the first
/// family's.
pub fn kernels() -> Vec<ListedKernel> {
    [st_bif_kernels(), attention::kernels(), denoise::kernels(), resnet18::kernels()].concat()
}

/// The kernels that the bench of ST-BIF lists.
pub fn st_bif_kernels() -> Vec<ListedKernel> {
    [st_bif::kernels(), instruments::kernels()].concat()
}

/// `main` of a bench binary of this package; a filter may name a case of another one.
pub fn bench(name: &'static str, suites: Vec<Suite>, kernels: Vec<ListedKernel>) -> ExitCode {
    const PEERS: &[Peers] = &[st_bif::PEERS, attention::PEERS, denoise::PEERS, resnet18::PEERS];
    Harness::new(name, suites).siblings(all()).peers(PEERS).kernels(kernels).main()
}
