//! Groups of process runs that belong together: sessions, measurements, shards, the trials of a
//! comparison, and the folders that contain their files.

pub mod measurement;
pub mod sessions;
pub mod shard;
pub mod shard_partition;
pub mod store;
pub mod trial_request;
pub mod trials;
