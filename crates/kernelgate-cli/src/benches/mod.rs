//! Finds and builds the bench executables of the package in the current folder, and sends requests
//! to them.
//!
//! Bench executables run all GPU and CPU kernels, so that every subcommand of the program
//! kernelgate works for every package. The module `benches` does not interpret the responses of
//! benches (`verbs` does) and does not run the timed processes of comparisons (`compare` does).

pub mod bench_requests;
pub mod cargo;
pub mod child_process;
pub mod criterion;
pub mod find;
pub mod harness_kind;
pub mod package;
pub mod prebuilt;
pub mod process_output;
pub mod versions;

/// Text that the program kernelgate prints if it is mistaken for a bench executable and asked for
/// its protocol versions.
pub const KERNELGATE_PROGRAM_VERSION_ANSWER: &str = "kernelgate program";
