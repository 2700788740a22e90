//! Finds the NVTX ranges around host calls and GPU operations. This module does not compute the
//! times of ranges.

pub mod paths;
pub mod range_sweep;
pub mod restricted_reading;
pub mod restricted_trace;
