//! Entry point of the bench for a two-layer perceptron (MLP): forward pass and backward pass.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench_of_family(
        &kernelgate_suite::mlp::MLP_FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
