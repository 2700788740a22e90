//! Entry point of the attention bench: attention forward, attention backward, and the component
//! kernels of attention.

use std::process::ExitCode;

fn main() -> ExitCode {
    kernelgate_suite::run_bench_of_family(
        &kernelgate_suite::attention::ATTENTION_FAMILY,
        kernelgate_suite::kernel_files!("../kernels"),
    )
}
