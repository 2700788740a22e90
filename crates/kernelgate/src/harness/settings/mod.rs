//! Parses flags and environment variables of a bench executable once, into [`BenchSettings`]. No
//! module outside `settings` reads flags or environment variables.

pub mod args;
mod flag_variables;
mod parsed;
pub mod process;
pub mod scheduler;
pub mod variables;

pub use parsed::BenchSettings;
