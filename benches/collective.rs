//! Exchanges between GPUs.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench_of_family(
        &kernelgate_suite::collective::COLLECTIVE_FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
