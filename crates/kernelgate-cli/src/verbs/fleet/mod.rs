//! Verbs for several machines, which run and merge shards.

pub mod kubernetes;
pub mod merge;
pub mod slurm;
pub mod submit;
pub mod work_division;
