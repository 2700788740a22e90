//! The denoise loop of a robot policy.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::bench(
        "denoise",
        kernelgate_suite::denoise::suites(),
        kernelgate_suite::denoise::kernels(),
    )
}
