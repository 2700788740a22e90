//! What a profiler sees: CUPTI's records of kernels, NVML's readings of the card, NVTX ranges.

pub mod cupti;
pub mod range;
pub mod telemetry;
