//! Verbs for several machines, which run and merge shards.

pub mod division;
pub mod kubernetes;
pub mod merge;
pub mod slurm;
pub mod submit;
