//! Work that is divided among machines: merging shards, and jobs of schedulers.
//!
//! The scheduler queues, places and repeats jobs; this module divides the work, and merges the
//! results that belong together. Deliberately absent: measuring, deciding.

pub mod anchors;
pub mod counted_shards;
pub mod job_commands;
pub mod kubernetes;
pub mod merge;
pub mod slurm;
pub mod submission;
pub mod verification;
