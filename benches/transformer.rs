//! Entry point of the bench for a transformer language model: forward pass and training step.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench_of_family(
        &kernelgate_suite::transformer::TRANSFORMER_FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
