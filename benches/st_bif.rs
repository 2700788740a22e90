//! ST-BIF spiking neurons, forward and backward.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench(
        &kernelgate_suite::st_bif::FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
