//! The boundary of a bench binary: its flags and environment variables become [`BenchSettings`]
//! here, once. No module below `settings` reads flags or variables.

pub mod args;
mod flag_variables;
mod parsed;
pub mod process;
pub mod scheduler;
pub mod variables;

pub use parsed::BenchSettings;
