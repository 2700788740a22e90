//! Entry point of the bench for ST-BIF spiking neurons: forward pass and backward pass.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench_of_family(
        &kernelgate_suite::st_bif::ST_BIF_FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
