//! An ST-BIF ResNet-18: inference and training step.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::bench(
        "resnet18",
        kernelgate_suite::resnet18::suites(),
        kernelgate_suite::resnet18::kernels(),
    )
}
