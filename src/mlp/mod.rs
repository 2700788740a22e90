//! A two-layer perceptron: definition, fp64 reference, CPU and CUDA rows. The smallest network of
//! the suite, and the example of a family ("How to add" in CONTRIBUTING).

mod cpu;
mod cuda;
mod definition;
mod reference;
mod shape;

use crate::family::WorkloadFamily;
pub use cuda::kernels;
pub use definition::*;
use kernelgate::suite::{Suite, join_rows};

/// All workloads of the perceptron family, each with its rows.
pub fn suites() -> Vec<Suite> {
    vec![
        join_rows(&FORWARD, cpu::FORWARD.iter().chain(cuda::FORWARD)),
        join_rows(&BACKWARD, cpu::BACKWARD.iter().chain(cuda::BACKWARD)),
    ]
}

/// Entry of the perceptron in the list of workload families.
pub const FAMILY: WorkloadFamily = WorkloadFamily { name: "mlp", suites, kernels, peers: None };
