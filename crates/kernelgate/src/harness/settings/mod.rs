//! The boundary of a bench binary: its flags and environment variables become [`Settings`] here,
//! once. Below it no module reads either.

pub mod args;
mod flag_variables;
mod parsed;
pub mod process;
pub mod scheduler;
pub mod variables;

pub use parsed::Settings;
