//! The bench executables of the package in the current folder: found, built, asked.
//!
//! Bench executables do everything that needs a kernel, so that every verb works for every package.
//! Deliberately absent: the meaning of the answers (`verbs`), and processes whose times count
//! (`compare`).

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

/// The program's own answer if it is taken for a bench executable and asked for its versions.
pub const PROGRAM_MARK: &str = "kernelgate program";
