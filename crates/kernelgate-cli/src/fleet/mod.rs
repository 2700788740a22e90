//! Work that is divided among machines: shards put together, and jobs of schedulers.
//!
//! A scheduler queues, places and repeats; this module only divides the work, and takes back what
//! belongs together. Deliberately absent: measuring, deciding.

pub mod anchors;
pub mod kubernetes;
pub mod merge;
pub mod pieces;
pub mod slurm;
pub mod submission;
pub mod task;
pub mod verification;
