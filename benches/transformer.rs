//! A transformer language model: forward and training step.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::bench(&kernelgate_suite::transformer::FAMILY)
}
