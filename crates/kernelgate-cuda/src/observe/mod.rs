//! Observation of this process and of the GPU: CUPTI's activity records, NVML's readings, NVTX
//! ranges.

pub mod activity;
pub mod cupti;
pub mod range;
pub mod telemetry;
