//! Work (FLOPs and bytes) of GPU kernels and collectives, and the hardware peaks that bound their
//! speed. Absent: judgement.

pub mod bus_bandwidth;
pub mod device_peaks;
pub mod kernel_kinds;
pub mod operator_work;
pub mod utilization;
