//! A transformer language model: forward and training step.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench(
        &kernelgate_suite::transformer::FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
