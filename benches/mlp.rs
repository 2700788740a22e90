//! A two-layer perceptron, forward and backward.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::bench(&kernelgate_suite::mlp::FAMILY)
}
