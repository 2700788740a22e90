//! Work that is divided among machines: merging shards, and jobs of schedulers.
//!
//! The scheduler queues, places and repeats jobs; this module divides the work, and merges the
//! results that belong together. Deliberately absent: measuring, deciding.

pub mod anchors;
pub mod kubernetes;
pub mod merge;
pub mod pieces;
pub mod slurm;
pub mod submission;
pub mod task;
pub mod verification;
