//! The firing rate of each neuron: definition, fp64 reference and CPU implementation.

mod cpu;
mod definition;

pub use cpu::CPU_FIRING_RATE_ROWS;
pub use definition::{FIRING_RATE_WORKLOAD, FiringRateProblem};
