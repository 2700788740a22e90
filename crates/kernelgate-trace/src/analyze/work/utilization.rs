//! How much of a device's peaks operators and ranges use. Other modules find the work
//! (`operator_work`) and the kernels of an operator.

use crate::analyze::work::device_peaks::{DevicePeaks, MatrixPrecision};
use crate::analyze::work::operator_work::OperatorWork;

/// Sum of declared work and measured kernel time.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WorkAndTimeSum {
    /// How many operators.
    pub count: usize,
    /// Total time of the kernels, nanoseconds.
    pub kernel_ns: i64,
    /// Floating-point operations of all matrix products.
    pub flops: f64,
    /// The fewest bytes that memory must move for all operators.
    pub bytes: f64,
    /// Time that the matrix products take at the peaks of their precisions, in nanoseconds.
    pub tensor_ns: f64,
    /// Time that memory takes at its peak, in nanoseconds.
    pub memory_ns: f64,
    /// Sum of the longer of both times of each operator: the least time that the roofline allows.
    pub roofline_ns: f64,
    /// Operators whose precision or device has no published peak.
    pub without_peak: usize,
}

impl WorkAndTimeSum {
    pub fn add(&mut self, work: &OperatorWork, kernel_ns: i64, peaks: Option<&DevicePeaks>) {
        self.add_operator_calls(1, work, kernel_ns, peaks);
    }

    /// Adds `times` calls of an operator, given the work of one call and the time of all kernels.
    #[allow(clippy::cast_precision_loss)]
    pub fn add_operator_calls(
        &mut self,
        times: usize,
        work: &OperatorWork,
        kernel_ns: i64,
        peaks: Option<&DevicePeaks>,
    ) {
        let each = times as f64;
        let work = &OperatorWork { flops: work.flops * each, bytes: work.bytes * each, ..*work };
        self.count += times;
        self.kernel_ns += kernel_ns;
        self.flops += work.flops;
        self.bytes += work.bytes;
        let Some(peaks) = peaks else {
            self.without_peak += 1;
            return;
        };
        let tensor = match (work.flops > 0.0, work.precision) {
            (true, Some(precision)) => {
                peaks.peak_flops_per_ns(precision).map(|peak| work.flops / peak)
            }
            (true, None) => None,
            (false, _) => Some(0.0),
        };
        let Some(tensor) = tensor else {
            self.without_peak += 1;
            return;
        };
        let published = peaks.bytes_per_ns > 0.0;
        let memory = if published { work.bytes / peaks.bytes_per_ns } else { 0.0 };
        self.tensor_ns += tensor;
        self.memory_ns += memory;
        self.roofline_ns += tensor.max(memory);
    }

    /// Returns FLOPs per byte, if both are known.
    pub fn flops_per_byte(&self) -> Option<f64> {
        (self.flops > 0.0 && self.bytes > 0.0).then(|| self.flops / self.bytes)
    }

    /// Returns 10^12 FLOPs per second of kernel time.
    #[allow(clippy::cast_precision_loss)]
    pub fn achieved_teraflops(&self) -> Option<f64> {
        (self.flops > 0.0 && self.kernel_ns > 0).then(|| self.flops / self.kernel_ns as f64 / 1e3)
    }

    /// A part of a span of time; `None` where some of the work has no peak.
    #[allow(clippy::cast_precision_loss)]
    fn share_of_span(&self, least_ns: f64, span_ns: i64) -> Option<f64> {
        (self.without_peak == 0 && span_ns > 0).then(|| least_ns / span_ns as f64)
    }

    /// Share of the tensor peak over the kernels' time, 0 to 1.
    pub fn share_of_tensor_peak(&self) -> Option<f64> {
        self.share_of_span(self.tensor_ns, self.kernel_ns).filter(|_| self.flops > 0.0)
    }

    /// Returns the share of the tensor peak during another time span, such as a range on the host.
    pub fn share_of_tensor_peak_over(&self, span_ns: i64) -> Option<f64> {
        self.share_of_span(self.tensor_ns, span_ns).filter(|_| self.flops > 0.0)
    }

    /// Share of the memory peak over the kernels' time, 0 to 1.
    pub fn share_of_memory_peak(&self) -> Option<f64> {
        self.share_of_span(self.memory_ns, self.kernel_ns).filter(|share| *share > 0.0)
    }

    /// The least time that the roofline allows over the time taken, 0 to 1; `None` without a
    /// published peak of memory.
    pub fn share_of_roofline(&self) -> Option<f64> {
        self.share_of_span(self.roofline_ns, self.kernel_ns).filter(|_| self.memory_ns > 0.0)
    }

    /// The peak that limits the work: memory or compute.
    pub fn limiting_peak(&self) -> Option<RooflineLimit> {
        let any = self.without_peak == 0 && self.memory_ns > 0.0;
        let limit = if self.tensor_ns > self.memory_ns {
            RooflineLimit::Compute
        } else {
            RooflineLimit::Memory
        };
        any.then_some(limit)
    }
}

/// The part of the roofline that limits work: memory or compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RooflineLimit {
    /// The work has more operations per byte than the roofline's ridge: matrix units limit it.
    Compute,
    /// The intensity is below the ridge of the roofline: memory limits the work.
    Memory,
}

impl RooflineLimit {
    /// Label in printed output.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Memory => "memory",
        }
    }
}

/// An operator with the sums of all its calls.
#[derive(Debug, Clone, PartialEq)]
pub struct OperatorUtilization {
    pub name: String,
    /// Precision in which the operator multiplies.
    pub precision: Option<MatrixPrecision>,
    pub sum: WorkAndTimeSum,
}

/// A range with the summed work of the operators inside it.
#[derive(Debug, Clone, PartialEq)]
pub struct RangeUtilization {
    pub path: String,
    /// Time of all kernels that were launched in the range, nanoseconds.
    pub kernel_ns: i64,
    /// Host time of the ranges of this path, in nanoseconds.
    pub host_ns: i64,
    /// Sums of the operators with known work in the ranges.
    pub sum: WorkAndTimeSum,
}

/// How much of a device's peaks a trace uses.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeviceUtilization {
    /// The device and its peaks, if the peaks are published.
    pub device: Option<(String, DevicePeaks)>,
    /// Total time of all kernels, nanoseconds.
    pub kernel_ns: i64,
    /// Sums of all operators with known work.
    pub all: WorkAndTimeSum,
    /// Operators in the order of their kernel time, the longest first.
    pub operators: Vec<OperatorUtilization>,
    /// Outer ranges in the order of their kernel time, the longest first.
    pub ranges: Vec<RangeUtilization>,
    /// Questions without an answer, each with the data that its answer needs.
    pub unknown: Vec<String>,
}

impl DeviceUtilization {
    /// The part of the kernel time whose work is known, 0 to 1.
    #[allow(clippy::cast_precision_loss)]
    pub fn known_work_share(&self) -> f64 {
        self.all.kernel_ns as f64 / self.kernel_ns.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn utilization_is_relative_to_the_peaks_of_the_device() {
        let peaks =
            DevicePeaks::from_device_name("NVIDIA H100 80GB HBM3").expect("it is in the table");
        let mut sum = WorkAndTimeSum::default();
        let flops = 989.4e3 * 1000.0;
        let work =
            OperatorWork { flops, bytes: 3350.0 * 100.0, precision: Some(MatrixPrecision::Fp16) };
        sum.add(&work, 2000, Some(&peaks));
        let near = |value: Option<f64>, expected: f64| {
            assert!(value.is_some_and(|value| (value - expected).abs() < 1e-9), "{value:?}");
        };
        near(sum.share_of_tensor_peak(), 0.5);
        near(sum.share_of_tensor_peak_over(4000), 0.25);
        near(sum.share_of_memory_peak(), 0.05);
        near(sum.share_of_roofline(), 0.5);
        near(sum.achieved_teraflops(), 494.7);
        assert_eq!(sum.limiting_peak(), Some(RooflineLimit::Compute));
        let moves = OperatorWork { flops: 0.0, bytes: 3350.0 * 4000.0, precision: None };
        sum.add(&moves, 8000, Some(&peaks));
        near(sum.share_of_roofline(), 0.5);
        assert_eq!(sum.limiting_peak(), Some(RooflineLimit::Memory));
    }

    #[test]
    fn work_on_a_device_without_known_peaks_has_no_utilization() {
        let v100 = DevicePeaks::from_device_name("Tesla V100").expect("it is in the table");
        let work = OperatorWork { flops: 1e6, bytes: 1e3, precision: Some(MatrixPrecision::Fp8) };
        for peaks in [None, Some(&v100)] {
            let mut sum = WorkAndTimeSum::default();
            sum.add(&work, 100, peaks);
            assert_eq!(
                (sum.share_of_tensor_peak(), sum.share_of_roofline(), sum.limiting_peak()),
                (None, None, None)
            );
            assert_eq!(
                (sum.achieved_teraflops(), sum.flops_per_byte()),
                (Some(10.0), Some(1000.0))
            );
        }
    }
}
