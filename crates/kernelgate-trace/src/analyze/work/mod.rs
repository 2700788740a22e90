//! Work of kernels and collectives, and the hardware peaks that bound it. Absent: judgement.

pub mod bus_bandwidth;
pub mod device_peaks;
pub mod kernel_kinds;
pub mod operator_work;
pub mod utilization;
