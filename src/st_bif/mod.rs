//! ST-BIF spiking neurons: definition, fp64 reference, CPU and CUDA rows.

mod cpu;
mod cuda;
mod definition;
pub mod neuron;

pub use definition::*;
use kernelgate::suite::{Suite, suite};

/// The workloads of the family, each with its rows.
pub fn suites() -> Vec<Box<dyn Suite>> {
    vec![suite(&FORWARD, cpu::FORWARD.iter().chain(cuda::FORWARD)), suite(&BACKWARD, cpu::BACKWARD.iter().chain(cuda::BACKWARD))]
}
