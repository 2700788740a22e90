//! Model FLOP utilization of one launch: the operations of its matrix products that the bench
//! declares (causal attention counts as half), over the operations the device could do in the same
//! time.

use kernelgate::record::DeclaredWorkRecord;
use kernelgate_trace::analyze::work::device_peaks::{GpuPeakThroughput, MatrixPrecision};

/// Share of the device's peak matrix throughput that a launch reaches; a share is `None` if the
/// peak is unknown.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct MatrixThroughputShare {
    /// Reached share of the vendor's published peak throughput without sparsity, 0 to 1.
    pub share_of_published_peak: Option<f64>,
    /// Reached share of the peak matrix throughput that kernelgate measured on the device, 0 to 1.
    pub share_of_measured_peak: Option<f64>,
}

/// The matrix precision, such as bf16, for the dtype that a bench declares for its work.
fn matrix_precision_of_dtype(dtype: &str) -> Option<MatrixPrecision> {
    Some(match dtype {
        "f64" => MatrixPrecision::Fp64,
        "f32" => MatrixPrecision::Fp32,
        "f16" | "bf16" => MatrixPrecision::Fp16OrBf16,
        "fp8" => MatrixPrecision::Fp8,
        "i8" => MatrixPrecision::Int8,
        _ => return None,
    })
}

impl MatrixThroughputShare {
    /// Computes the utilization of a launch on the named device; `measured` maps compute unit and
    /// dtype ("matmul bf16") to measured operations per second.
    pub fn utilization_of_launch(
        work: &DeclaredWorkRecord,
        device: &str,
        measured: impl Fn(&str) -> Option<f64>,
        launch_ns: f64,
    ) -> Self {
        let peaks = GpuPeakThroughput::peak_throughput_of_gpu_name(device);
        let products = || {
            let flops = work.flops_by_unit_and_dtype.iter().filter(|(_, count)| **count > 0);
            flops.filter_map(|(unit, count)| Some((unit, unit.strip_prefix("matmul ")?, *count)))
        };
        let published_ns = |(_, dtype, count): (&String, &str, u64)| {
            Some(
                count as f64
                    / peaks.as_ref()?.peak_operations_per_ns(matrix_precision_of_dtype(dtype)?)?,
            )
        };
        let measured_ns =
            |(unit, _, count): (&String, &str, u64)| Some(count as f64 / measured(unit)? * 1e9);
        let share = |least_ns: Option<f64>| {
            least_ns.map(|least_ns| least_ns / launch_ns).filter(|share| *share > 0.0)
        };
        Self {
            share_of_published_peak: share(products().map(published_ns).sum()),
            share_of_measured_peak: share(products().map(measured_ns).sum()),
        }
    }
}

/// The published peak throughput without sparsity to which a utilization refers: "989 TFLOP/s
/// bf16".
pub fn published_peak_throughput_text(work: &DeclaredWorkRecord, device: &str) -> Option<String> {
    let peaks = GpuPeakThroughput::peak_throughput_of_gpu_name(device)?;
    let (unit, _) =
        work.flops_by_unit_and_dtype.iter().find(|(unit, _)| unit.starts_with("matmul "))?;
    let dtype = unit.strip_prefix("matmul ")?;
    let flops_per_ns = peaks.peak_operations_per_ns(matrix_precision_of_dtype(dtype)?)?;
    Some(format!("{:.0} TFLOP/s {dtype}", flops_per_ns / 1e3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_at_half_the_peak_has_a_utilization_of_one_half() {
        let flops = [("matmul bf16", 989_400_000), ("vector f32", 7)];
        let flops = flops.map(|(unit, count)| (unit.to_owned(), count)).into();
        let work =
            DeclaredWorkRecord { flops_by_unit_and_dtype: flops, ..DeclaredWorkRecord::default() };
        let utilization = |device| {
            MatrixThroughputShare::utilization_of_launch(&work, device, |_| Some(800e12), 2000.0)
        };
        assert_eq!(utilization("NVIDIA H100 80GB HBM3").share_of_published_peak, Some(0.5));
        assert_eq!(utilization("NVIDIA H100 80GB HBM3").share_of_measured_peak, Some(0.618_375));
        assert_eq!(utilization("Toy GPU").share_of_published_peak, None);
        let idle = MatrixThroughputShare::utilization_of_launch(
            &DeclaredWorkRecord::default(),
            "NVIDIA H100",
            |_| None,
            2000.0,
        );
        assert_eq!(idle, MatrixThroughputShare::default());
        assert_eq!(
            published_peak_throughput_text(&work, "NVIDIA H100").as_deref(),
            Some("989 TFLOP/s bf16")
        );
    }
}
