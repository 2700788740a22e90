//! Checks of a case besides its time: outputs for changed inputs after timing, and device memory.

pub mod after_timing;
pub mod changed_inputs;
pub mod device_memory;
