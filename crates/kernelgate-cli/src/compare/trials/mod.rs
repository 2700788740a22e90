//! Runs one process of a comparison: starts it and reads its run record.

pub mod by_criterion;
pub mod by_protocol;
pub mod driver;
pub mod expected;
pub mod load;
pub mod process;
