//! What a profiler sees: CUPTI's records of what the process does, NVML's readings of the card, NVTX
//! ranges.

pub mod activity;
pub mod cupti;
pub mod range;
pub mod telemetry;
