//! Divides measuring work among the machines of a cluster: job scripts for Slurm and Kubernetes,
//! and the merge of shard records.
//!
//! The cluster's scheduler queues, places and repeats jobs; kernelgate divides the cases into
//! shards and merges the records that belong together. The module `fleet` measures nothing and
//! decides no verdicts.

pub mod anchors;
pub mod counted_shards;
pub mod job_commands;
pub mod kubernetes;
pub mod merge;
pub mod slurm;
pub mod submission;
pub mod verification;
