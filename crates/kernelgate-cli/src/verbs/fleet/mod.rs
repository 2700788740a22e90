//! Several machines: verbs for shards.

pub mod merge;
