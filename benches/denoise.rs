//! Entry point of the bench for the denoise loop of a robot policy, which calls the denoising
//! network once per step.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench_of_family(
        &kernelgate_suite::denoise::DENOISE_FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
