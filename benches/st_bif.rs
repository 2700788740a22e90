//! ST-BIF spiking neurons, forward and backward.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::bench(
        "st_bif",
        kernelgate_suite::st_bif::suites(),
        kernelgate_suite::st_bif_kernels(),
    )
}
