//! The denoise loop of a robot policy.

use std::process::ExitCode;

use kernelgate::builtin;

fn main() -> ExitCode {
    builtin::bench("denoise", builtin::denoise())
}
