//! Observation of the process and the card: CUPTI's activity records, NVML's readings, NVTX ranges.

pub mod activity;
pub mod cupti;
pub mod range;
pub mod telemetry;
