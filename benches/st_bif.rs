//! ST-BIF spiking neurons, forward and backward.

use std::process::ExitCode;

use kernelgate::builtin;

fn main() -> ExitCode {
    builtin::bench("st_bif", builtin::st_bif())
}
