//! Several machines: verbs for shards.

pub mod merge;
pub mod submit;
