//! The firing rate of each neuron: definition, fp64 reference, CPU row.

mod cpu;
mod definition;

pub use cpu::FIRING_RATE_ROWS;
pub use definition::{FiringRate, RATE_WORKLOAD};
