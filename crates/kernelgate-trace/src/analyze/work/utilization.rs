//! Computes how much of a GPU's peak throughput the operators and ranges of a trace use. The module
//! `operator_work` computes the work of an operator; other modules find the kernels of an operator.

use crate::analyze::work::device_peaks::{GpuPeakThroughput, MatrixPrecision};
use crate::analyze::work::operator_work::OperatorFlopsAndBytes;

/// FLOPs, bytes and measured kernel time, summed over operator calls.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SummedWorkAndKernelTime {
    /// Number of operator calls.
    pub operator_call_count: usize,
    /// Total time of the operators' kernels, nanoseconds.
    pub kernel_ns: i64,
    /// Floating-point operations of all operators' matrix products.
    pub summed_matrix_flops: f64,
    /// The fewest bytes that device memory must move for all operator calls.
    pub least_bytes: f64,
    /// Time that the operators' matrix products would take at the GPU's peaks for their precisions,
    /// nanoseconds.
    pub matrix_time_at_peak_ns: f64,
    /// Time that the operators' bytes would take at the GPU's peak memory bandwidth, nanoseconds.
    pub memory_time_at_peak_ns: f64,
    /// Sum over the operators of the longer of matrix time and memory time at the peaks: the least
    /// time by the roofline, nanoseconds.
    pub roofline_time_sum_ns: f64,
    /// Number of summands for which the GPU's peak in their precision is not published.
    pub operators_without_known_peak: usize,
}

impl SummedWorkAndKernelTime {
    pub fn add_operator_call(
        &mut self,
        work: &OperatorFlopsAndBytes,
        kernel_ns: i64,
        peaks: Option<&GpuPeakThroughput>,
    ) {
        self.add_equal_operator_calls(1, work, kernel_ns, peaks);
    }

    /// Adds `times` calls of an operator, from the work of one call and the kernel time of all
    /// calls.
    #[allow(clippy::cast_precision_loss)]
    pub fn add_equal_operator_calls(
        &mut self,
        times: usize,
        work: &OperatorFlopsAndBytes,
        kernel_ns: i64,
        peaks: Option<&GpuPeakThroughput>,
    ) {
        let each = times as f64;
        let work = &OperatorFlopsAndBytes {
            matrix_flops: work.matrix_flops * each,
            least_bytes: work.least_bytes * each,
            ..*work
        };
        self.operator_call_count += times;
        self.kernel_ns += kernel_ns;
        self.summed_matrix_flops += work.matrix_flops;
        self.least_bytes += work.least_bytes;
        let Some(peaks) = peaks else {
            self.operators_without_known_peak += 1;
            return;
        };
        let tensor = match (work.matrix_flops > 0.0, work.precision) {
            (true, Some(precision)) => {
                peaks.peak_operations_per_ns(precision).map(|peak| work.matrix_flops / peak)
            }
            (true, None) => None,
            (false, _) => Some(0.0),
        };
        let Some(tensor) = tensor else {
            self.operators_without_known_peak += 1;
            return;
        };
        let published = peaks.device_memory_bytes_per_ns > 0.0;
        let memory =
            if published { work.least_bytes / peaks.device_memory_bytes_per_ns } else { 0.0 };
        self.matrix_time_at_peak_ns += tensor;
        self.memory_time_at_peak_ns += memory;
        self.roofline_time_sum_ns += tensor.max(memory);
    }

    /// FLOPs per byte of the summed work (arithmetic intensity), if both are known.
    pub fn flops_per_byte_moved(&self) -> Option<f64> {
        (self.summed_matrix_flops > 0.0 && self.least_bytes > 0.0)
            .then(|| self.summed_matrix_flops / self.least_bytes)
    }

    /// Achieved 10^12 FLOPs per second of kernel time.
    #[allow(clippy::cast_precision_loss)]
    pub fn achieved_tera_flops_per_second(&self) -> Option<f64> {
        (self.summed_matrix_flops > 0.0 && self.kernel_ns > 0)
            .then(|| self.summed_matrix_flops / self.kernel_ns as f64 / 1e3)
    }

    /// Divides a least time at the peaks by a span of time; `None` if the peak of some work is not
    /// known.
    #[allow(clippy::cast_precision_loss)]
    fn least_time_by_span(&self, least_ns: f64, span_ns: i64) -> Option<f64> {
        (self.operators_without_known_peak == 0 && span_ns > 0).then(|| least_ns / span_ns as f64)
    }

    /// Share of the peak throughput of the matrix units that was achieved during the kernels' time,
    /// 0 to 1.
    pub fn matrix_peak_share_of_kernel_time(&self) -> Option<f64> {
        self.least_time_by_span(self.matrix_time_at_peak_ns, self.kernel_ns)
            .filter(|_| self.summed_matrix_flops > 0.0)
    }

    /// Share of the peak throughput of the matrix units that was achieved during another span of
    /// time, such as a range on the host, 0 to 1.
    pub fn matrix_peak_share_of_span(&self, span_ns: i64) -> Option<f64> {
        self.least_time_by_span(self.matrix_time_at_peak_ns, span_ns)
            .filter(|_| self.summed_matrix_flops > 0.0)
    }

    /// Share of the peak memory bandwidth that was achieved during the kernels' time, 0 to 1.
    pub fn memory_peak_share_of_kernel_time(&self) -> Option<f64> {
        self.least_time_by_span(self.memory_time_at_peak_ns, self.kernel_ns)
            .filter(|share| *share > 0.0)
    }

    /// Least time by the roofline divided by the kernels' time, 0 to 1; `None` without a published
    /// memory bandwidth.
    pub fn roofline_share_of_kernel_time(&self) -> Option<f64> {
        self.least_time_by_span(self.roofline_time_sum_ns, self.kernel_ns)
            .filter(|_| self.memory_time_at_peak_ns > 0.0)
    }

    /// Whether the matrix units or the memory need longer at their peaks for the summed work.
    pub fn roofline_limit_of_work(&self) -> Option<RooflineLimitOfWork> {
        let any = self.operators_without_known_peak == 0 && self.memory_time_at_peak_ns > 0.0;
        let limit = if self.matrix_time_at_peak_ns > self.memory_time_at_peak_ns {
            RooflineLimitOfWork::MatrixUnits
        } else {
            RooflineLimitOfWork::MemoryBandwidth
        };
        any.then_some(limit)
    }
}

/// Which peak of the roofline limits the work: memory bandwidth or matrix units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RooflineLimitOfWork {
    /// At the peaks the matrix units need longer than the memory, so the matrix units limit the
    /// work.
    MatrixUnits,
    /// At the peaks the memory needs at least as long as the matrix units, so memory bandwidth
    /// limits the work.
    MemoryBandwidth,
}

impl RooflineLimitOfWork {
    /// Returns the label of the roofline's limit in printed output.
    pub const fn printed_limit_label(self) -> &'static str {
        match self {
            Self::MatrixUnits => "compute",
            Self::MemoryBandwidth => "memory",
        }
    }
}

/// A framework operator with the summed work and kernel time of all its calls.
#[derive(Debug, Clone, PartialEq)]
pub struct OperatorWorkAndKernelTime {
    pub operator_name: String,
    /// Precision of the factors that the operator multiplies.
    pub precision: Option<MatrixPrecision>,
    pub work_and_kernel_time: SummedWorkAndKernelTime,
}

/// A range path of the trace with the summed work of the operators inside its ranges.
#[derive(Debug, Clone, PartialEq)]
pub struct RangeWorkAndKernelTime {
    pub range_path: String,
    /// Time of all kernels that were launched in ranges of this path, nanoseconds.
    pub kernel_ns: i64,
    /// Total time that the ranges of this path lasted on the host, nanoseconds.
    pub host_range_ns: i64,
    /// Summed work and kernel time of the operators with known work inside these ranges.
    pub work_and_kernel_time: SummedWorkAndKernelTime,
}

/// How much of a GPU's peak throughput the operators and ranges of a trace use.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuPeakUseOfTrace {
    /// Name and peak throughput of the GPU, if the peaks are published.
    pub gpu_name_and_peaks: Option<(String, GpuPeakThroughput)>,
    /// Total time of all kernels of the trace, nanoseconds.
    pub all_kernels_ns: i64,
    /// Summed work and kernel time of all operators with known work.
    pub all_operators: SummedWorkAndKernelTime,
    /// Framework operators sorted by kernel time, the longest first.
    pub operators: Vec<OperatorWorkAndKernelTime>,
    /// Outer range paths sorted by kernel time, the longest first.
    pub ranges: Vec<RangeWorkAndKernelTime>,
    /// Texts about questions without an answer, each with the data that an answer would need.
    pub unanswered_questions: Vec<String>,
}

impl GpuPeakUseOfTrace {
    /// Kernel time of operators with known work divided by all kernel time, 0 to 1.
    #[allow(clippy::cast_precision_loss)]
    pub fn kernel_time_share_with_known_work(&self) -> f64 {
        self.all_operators.kernel_ns as f64 / self.all_kernels_ns.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peak_shares_are_relative_to_the_peaks_of_the_gpu() {
        let peaks = GpuPeakThroughput::peak_throughput_of_gpu_name("NVIDIA H100 80GB HBM3")
            .expect("it is in the table");
        let mut sum = SummedWorkAndKernelTime::default();
        let flops = 989.4e3 * 1000.0;
        let work = OperatorFlopsAndBytes {
            matrix_flops: flops,
            least_bytes: 3350.0 * 100.0,
            precision: Some(MatrixPrecision::Fp16OrBf16),
        };
        sum.add_operator_call(&work, 2000, Some(&peaks));
        let near = |value: Option<f64>, expected: f64| {
            assert!(value.is_some_and(|value| (value - expected).abs() < 1e-9), "{value:?}");
        };
        near(sum.matrix_peak_share_of_kernel_time(), 0.5);
        near(sum.matrix_peak_share_of_span(4000), 0.25);
        near(sum.memory_peak_share_of_kernel_time(), 0.05);
        near(sum.roofline_share_of_kernel_time(), 0.5);
        near(sum.achieved_tera_flops_per_second(), 494.7);
        assert_eq!(sum.roofline_limit_of_work(), Some(RooflineLimitOfWork::MatrixUnits));
        let moves = OperatorFlopsAndBytes {
            matrix_flops: 0.0,
            least_bytes: 3350.0 * 4000.0,
            precision: None,
        };
        sum.add_operator_call(&moves, 8000, Some(&peaks));
        near(sum.roofline_share_of_kernel_time(), 0.5);
        assert_eq!(sum.roofline_limit_of_work(), Some(RooflineLimitOfWork::MemoryBandwidth));
    }

    #[test]
    fn work_on_a_gpu_without_known_peaks_has_no_peak_share() {
        let v100 = GpuPeakThroughput::peak_throughput_of_gpu_name("Tesla V100")
            .expect("it is in the table");
        let work = OperatorFlopsAndBytes {
            matrix_flops: 1e6,
            least_bytes: 1e3,
            precision: Some(MatrixPrecision::Fp8),
        };
        for peaks in [None, Some(&v100)] {
            let mut sum = SummedWorkAndKernelTime::default();
            sum.add_operator_call(&work, 100, peaks);
            assert_eq!(
                (
                    sum.matrix_peak_share_of_kernel_time(),
                    sum.roofline_share_of_kernel_time(),
                    sum.roofline_limit_of_work()
                ),
                (None, None, None)
            );
            assert_eq!(
                (sum.achieved_tera_flops_per_second(), sum.flops_per_byte_moved()),
                (Some(10.0), Some(1000.0))
            );
        }
    }
}
