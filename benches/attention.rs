//! Attention, forward, backward and by component.

use std::process::ExitCode;

use kernelgate::builtin;

fn main() -> ExitCode {
    builtin::bench("attention", builtin::attention())
}
