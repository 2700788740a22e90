//! Model FLOP utilization: the declared operations of a launch's matrix products, with causal
//! attention counted as half, over the operations that the device could compute in the same time.

use kernelgate::record::WorkRecord;
use kernelgate_trace::analyze::work::device_peaks::{DevicePeaks, MatrixPrecision};

/// Utilization of the matrix units by a launch; a share is absent without a peak.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ModelUtilization {
    /// Share of the published dense peak of the device, 0 to 1.
    pub of_published: Option<f64>,
    /// Share of the peak that this project measured, 0 to 1.
    pub of_measured: Option<f64>,
}

/// The precision for a dtype of declared work.
fn precision_of_dtype(dtype: &str) -> Option<MatrixPrecision> {
    Some(match dtype {
        "f64" => MatrixPrecision::Fp64,
        "f32" => MatrixPrecision::Fp32,
        "f16" | "bf16" => MatrixPrecision::Fp16,
        "fp8" => MatrixPrecision::Fp8,
        "i8" => MatrixPrecision::Int8,
        _ => return None,
    })
}

impl ModelUtilization {
    /// Utilization of a launch on the device with this name; `measured` has operations a second by
    /// compute unit and dtype ("matmul bf16").
    pub fn new(
        work: &WorkRecord,
        device: &str,
        measured: impl Fn(&str) -> Option<f64>,
        launch_ns: f64,
    ) -> Self {
        let peaks = DevicePeaks::from_device_name(device);
        let products = || {
            let flops = work.flops.iter().filter(|(_, count)| **count > 0);
            flops.filter_map(|(unit, count)| Some((unit, unit.strip_prefix("matmul ")?, *count)))
        };
        let published_ns = |(_, dtype, count): (&String, &str, u64)| {
            Some(count as f64 / peaks.as_ref()?.peak_flops_per_ns(precision_of_dtype(dtype)?)?)
        };
        let measured_ns =
            |(unit, _, count): (&String, &str, u64)| Some(count as f64 / measured(unit)? * 1e9);
        let share = |least_ns: Option<f64>| {
            least_ns.map(|least_ns| least_ns / launch_ns).filter(|share| *share > 0.0)
        };
        Self {
            of_published: share(products().map(published_ns).sum()),
            of_measured: share(products().map(measured_ns).sum()),
        }
    }
}

/// The published dense peak on which a utilization is based: "989 TFLOP/s bf16".
pub fn published_peak_text(work: &WorkRecord, device: &str) -> Option<String> {
    let peaks = DevicePeaks::from_device_name(device)?;
    let (unit, _) = work.flops.iter().find(|(unit, _)| unit.starts_with("matmul "))?;
    let dtype = unit.strip_prefix("matmul ")?;
    let flops_per_ns = peaks.peak_flops_per_ns(precision_of_dtype(dtype)?)?;
    Some(format!("{:.0} TFLOP/s {dtype}", flops_per_ns / 1e3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_at_half_the_peak_has_a_utilization_of_one_half() {
        let flops = [("matmul bf16", 989_400_000), ("vector f32", 7)];
        let flops = flops.map(|(unit, count)| (unit.to_owned(), count)).into();
        let work = WorkRecord { flops, ..WorkRecord::default() };
        let utilization = |device| ModelUtilization::new(&work, device, |_| Some(800e12), 2000.0);
        assert_eq!(utilization("NVIDIA H100 80GB HBM3").of_published, Some(0.5));
        assert_eq!(utilization("NVIDIA H100 80GB HBM3").of_measured, Some(0.618_375));
        assert_eq!(utilization("Toy GPU").of_published, None);
        let idle = ModelUtilization::new(&WorkRecord::default(), "NVIDIA H100", |_| None, 2000.0);
        assert_eq!(idle, ModelUtilization::default());
        assert_eq!(published_peak_text(&work, "NVIDIA H100").as_deref(), Some("989 TFLOP/s bf16"));
    }
}
