//! An ST-BIF ResNet-18, whole: definition, fp64 reference, CPU and CUDA rows.

mod convolution;
mod cpu;
mod cuda;
mod definition;
mod gradient;
pub mod network;
#[cfg(test)]
mod plain;
pub mod reference;
mod shape;

pub use cuda::kernels;
pub use definition::*;
use kernelgate::suite::{Suite, suite};

/// The workloads of the family, each with its rows.
pub fn suites() -> Vec<Box<dyn Suite>> {
    vec![
        suite(&INFERENCE, cpu::INFERENCE.iter().chain(cuda::INFERENCE)),
        suite(&TRAIN_STEP, cpu::TRAIN_STEP),
    ]
}
