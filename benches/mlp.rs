//! A two-layer perceptron, forward and backward.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench(
        &kernelgate_suite::mlp::FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
