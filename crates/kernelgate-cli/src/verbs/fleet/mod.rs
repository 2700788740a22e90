//! Verbs of kernelgate that spread cases over several machines as shards, and merge the records of
//! the shards.

pub mod kubernetes;
pub mod merge;
pub mod slurm;
pub mod submit;
pub mod work_division;
