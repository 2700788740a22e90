//! Work that is divided among machines: merging shards, and jobs of schedulers.
//!
//! A cluster scheduler queues, places and repeats jobs; this module divides the work among them,
//! and merges results that belong together. Deliberately absent: measuring, deciding.

pub mod anchors;
pub mod counted_shards;
pub mod job_commands;
pub mod kubernetes;
pub mod merge;
pub mod slurm;
pub mod submission;
pub mod verification;
