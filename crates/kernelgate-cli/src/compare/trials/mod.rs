//! Runs one bench process (trial) of a comparison and reads its run record.

pub mod artificial_load;
pub mod by_criterion;
pub mod by_protocol;
pub mod expected_record;
pub mod process;
pub mod trial_driver;
