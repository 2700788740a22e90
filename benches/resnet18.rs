//! An ST-BIF ResNet-18: inference and training step.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::bench(&kernelgate_suite::resnet18::FAMILY)
}
