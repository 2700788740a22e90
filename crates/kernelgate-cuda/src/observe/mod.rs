//! Observation of this process and its GPU by CUPTI's activity records, NVML's sensor readings, and
//! named ranges, which NVTX also reports to profilers.

pub mod activity;
pub mod cupti;
pub mod range;
pub mod telemetry;
