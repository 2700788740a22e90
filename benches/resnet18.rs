//! Entry point of the bench for a ResNet-18 with spiking ST-BIF neurons: inference and training
//! step.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench_of_family(
        &kernelgate_suite::resnet18::RESNET18_FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
