//! Attention, forward, backward and by component.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench(
        &kernelgate_suite::attention::FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
