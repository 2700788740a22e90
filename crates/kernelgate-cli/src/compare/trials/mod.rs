//! One process of a comparison: how it is started, and how its run is read.

pub mod by_criterion;
pub mod by_protocol;
pub mod driver;
pub mod expected;
pub mod load;
pub mod process;
