//! Checks of a case other than its time: outputs of other inputs after timing, device memory.

pub mod after_timing;
pub mod changed_inputs;
pub mod device_memory;
