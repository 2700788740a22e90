//! The bench executables of the package where the program was called: found, built, asked.
//!
//! Everything that needs a kernel is done by them, so that every verb works for every package.
//! Deliberately absent: what the answers mean (`verbs`), and processes whose times count
//! (`compare`).

pub mod ask;
pub mod cargo;
pub mod child;
pub mod criterion;
pub mod find;
pub mod mark;
pub mod output;
pub mod package;
pub mod prebuilt;
pub mod versions;

/// What the program itself answers when it is taken for a bench executable and asked for its
/// versions.
pub const PROGRAM: &str = "kernelgate program";
