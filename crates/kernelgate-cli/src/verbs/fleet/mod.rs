//! Several machines: verbs for shards.

pub mod division;
pub mod kubernetes;
pub mod merge;
pub mod slurm;
pub mod submit;
