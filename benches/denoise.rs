//! The denoise loop of a robot policy.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench(
        &kernelgate_suite::denoise::FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
