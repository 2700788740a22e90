//! An ST-BIF ResNet-18: inference and training step.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench(
        &kernelgate_suite::resnet18::FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
