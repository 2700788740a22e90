//! Exchanges between GPUs.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench(
        &kernelgate_suite::collective::FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
