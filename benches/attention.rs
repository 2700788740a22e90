//! Attention, forward, backward and by component.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::bench(
        "attention",
        kernelgate_suite::attention::suites(),
        kernelgate_suite::attention::kernels(),
    )
}
