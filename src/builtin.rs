//! The three families that come with kernelgate, in the order they are shown. Nothing here that an outside package could not write.

use std::process::ExitCode;

use crate::backend::{cpu, cuda};
use crate::harness::Harness;
use crate::suite::{Suite, suite};
use crate::workload::{attention, denoise, st_bif};

/// ST-BIF spiking neurons.
pub fn st_bif() -> Vec<Box<dyn Suite>> {
    vec![
        suite(&st_bif::FORWARD, cpu::st_bif::FORWARD.iter().chain(cuda::st_bif::FORWARD)),
        suite(&st_bif::BACKWARD, cpu::st_bif::BACKWARD.iter().chain(cuda::st_bif::BACKWARD)),
    ]
}

/// Attention.
pub fn attention() -> Vec<Box<dyn Suite>> {
    use crate::workload::attention::components;
    vec![
        suite(&attention::FORWARD, cpu::attention::FORWARD.iter().chain(cuda::attention::FORWARD)),
        suite(&attention::BACKWARD, cpu::attention::BACKWARD.iter().chain(cuda::attention::BACKWARD)),
        suite(&components::SCORES, cpu::attention::SCORES.iter().chain(cuda::attention::SCORES)),
        suite(&components::SOFTMAX, cpu::attention::SOFTMAX.iter().chain(cuda::attention::SOFTMAX)),
        suite(&components::VALUES, cpu::attention::VALUES.iter().chain(cuda::attention::VALUES)),
    ]
}

/// The denoise loop of a robot policy.
pub fn denoise() -> Vec<Box<dyn Suite>> {
    vec![
        suite(&denoise::STEP, cpu::denoise::STEP.iter().chain(cuda::denoise::STEP)),
        suite(&denoise::LOOP, cpu::denoise::LOOP.iter().chain(cuda::denoise::LOOP)),
    ]
}

/// Every workload of every family.
pub fn all() -> Vec<Box<dyn Suite>> {
    [st_bif(), attention(), denoise()].into_iter().flatten().collect()
}

/// `main` of a bench binary of this package; a filter may name a case of another one.
pub fn bench(name: &'static str, suites: Vec<Box<dyn Suite>>) -> ExitCode {
    Harness::new(name, suites).siblings(all()).main()
}
