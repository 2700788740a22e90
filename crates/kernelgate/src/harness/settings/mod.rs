//! The boundary: flags and environment variables of a bench binary.

pub mod args;
pub mod own_flags;
pub mod variables;
