//! Peak throughput of GPUs from the data sheets of their vendors: dense matrix operations by
//! precision, without sparsity, and memory bandwidth. The peaks assume boost clocks; lower clocks
//! and power limits are not considered.

/// Number format of the factors that a GPU's matrix units multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MatrixPrecision {
    /// 64 bits.
    Fp64,
    /// 32-bit floats, which NVIDIA GPUs multiply in their CUDA cores instead of the tensor cores.
    Fp32,
    /// 32-bit floats that the matrix units round to 19 bits.
    Tf32,
    /// 16-bit formats: half or bfloat16.
    Fp16OrBf16,
    /// 8-bit floating-point formats.
    Fp8,
    /// Integers of 8 bits.
    Int8,
}

impl MatrixPrecision {
    /// Returns the label of the matrix precision in printed output.
    pub const fn printed_precision_label(self) -> &'static str {
        match self {
            Self::Fp64 => "FP64",
            Self::Fp32 => "FP32",
            Self::Tf32 => "TF32",
            Self::Fp16OrBf16 => "FP16/BF16",
            Self::Fp8 => "FP8",
            Self::Int8 => "INT8",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuPeakThroughput {
    /// Peak 10^12 operations a second of FP64, FP32, TF32, FP16, FP8 and INT8; 0 if not supported
    /// or not published.
    tera: [f64; 6],
    /// Peak bandwidth of device memory, bytes a nanosecond (GB/s); 0 if GPUs of this name have
    /// different memories.
    pub device_memory_bytes_per_ns: f64,
}

impl GpuPeakThroughput {
    /// Peak operations of the GPU per nanosecond in a precision; `None` if not supported or not
    /// published.
    pub fn peak_operations_per_ns(&self, precision: MatrixPrecision) -> Option<f64> {
        let index = match precision {
            MatrixPrecision::Fp64 => 0,
            MatrixPrecision::Fp32 => 1,
            MatrixPrecision::Tf32 => 2,
            MatrixPrecision::Fp16OrBf16 => 3,
            MatrixPrecision::Fp8 => 4,
            MatrixPrecision::Int8 => 5,
        };
        Some(self.tera[index] * 1e3).filter(|peak| *peak > 0.0)
    }

    /// Returns the peak throughput of the GPU with this name; `None` if the table does not contain
    /// the name.
    pub fn peak_throughput_of_gpu_name(name: &str) -> Option<GpuPeakThroughput> {
        let words: Vec<String> = name
            .split(|c: char| !c.is_ascii_alphanumeric())
            .map(str::to_ascii_lowercase)
            .filter(|word| !word.is_empty())
            .collect();
        let named = |device: &&GpuPeakTableRow| {
            device.0.iter().all(|part| words.iter().any(|word| word == part))
        };
        let GpuPeakTableRow(_, tera, bytes_per_ns) = GPU_PEAKS_BY_NAME_WORDS.iter().find(named)?;
        Some(Self { tera: *tera, device_memory_bytes_per_ns: *bytes_per_ns })
    }
}

/// Words that must all be in the GPU's name, peak 10^12 operations a second by precision, and
/// memory bandwidth in GB/s.
struct GpuPeakTableRow(&'static [&'static str], [f64; 6], f64);

/// GPU names with more words come before names whose words they contain. The comment above each
/// group of rows names the data sheet; peaks that a data sheet states with sparsity are halved.
const GPU_PEAKS_BY_NAME_WORDS: &[GpuPeakTableRow] = &[
    // These values are from the NVIDIA GB200 NVL72 data sheet, divided by the 72 GPUs of the rack.
    GpuPeakTableRow(&["gb200"], [40.0, 80.0, 1250.0, 2500.0, 5000.0, 5000.0], 8000.0),
    // Values are from the NVIDIA HGX B200 and HGX B300 data sheet for a board of eight GPUs,
    // divided by eight. The INT8 peak of B300 is missing, because sources differ.
    GpuPeakTableRow(&["b200"], [37.0, 75.0, 1100.0, 2250.0, 4500.0, 4500.0], 7700.0),
    GpuPeakTableRow(&["b300"], [1.25, 75.0, 1125.0, 2250.0, 4500.0, 0.0], 8000.0),
    // Values are from the NVIDIA RTX Blackwell architecture white paper; FP16 and FP8 rates are
    // with FP32 accumulation.
    GpuPeakTableRow(&["rtx", "5090"], [1.6, 104.8, 104.8, 209.5, 419.0, 838.0], 1792.0),
    // Values are from the NVIDIA GH200 data sheet; the memory bandwidth is open, because the 96 GB
    // and 144 GB versions differ.
    GpuPeakTableRow(&["gh200"], [67.0, 67.0, 494.7, 989.4, 1978.9, 1978.9], 0.0),
    // Values are from the NVIDIA H200 data sheet and, with more digits, from the H100 architecture
    // white paper.
    GpuPeakTableRow(&["h200", "nvl"], [60.0, 60.0, 417.5, 835.5, 1670.5, 1670.5], 4800.0),
    GpuPeakTableRow(&["h200"], [66.9, 66.9, 494.7, 989.4, 1978.9, 1978.9], 4800.0),
    // Values are from the NVIDIA H100 data sheet and the H100 architecture white paper.
    GpuPeakTableRow(&["h100", "pcie"], [51.2, 51.2, 378.0, 756.0, 1513.0, 1513.0], 2000.0),
    GpuPeakTableRow(&["h100", "nvl"], [60.0, 60.0, 417.5, 835.5, 1670.5, 1670.5], 3900.0),
    GpuPeakTableRow(&["h100"], [66.9, 66.9, 494.7, 989.4, 1978.9, 1978.9], 3350.0),
    // NVIDIA has no public data sheet for H20; these values are from resellers' pages. The table
    // has no H800, because no source states its peaks.
    GpuPeakTableRow(&["h20"], [1.0, 44.0, 74.0, 148.0, 296.0, 296.0], 4000.0),
    // These values are from the data sheets of NVIDIA L40S, L40 and L4.
    GpuPeakTableRow(&["l40s"], [1.4, 91.6, 183.0, 362.0, 733.0, 733.0], 864.0),
    GpuPeakTableRow(&["l40"], [1.4, 90.5, 90.5, 181.0, 362.0, 362.0], 864.0),
    GpuPeakTableRow(&["l4"], [0.5, 30.3, 60.0, 121.0, 242.0, 242.0], 300.0),
    // Values are from the NVIDIA RTX 6000 and RTX 5000 Ada data sheets, which state the FP8 rate
    // with sparsity.
    GpuPeakTableRow(&["rtx", "6000", "ada"], [1.4, 91.1, 182.0, 364.0, 728.0, 728.0], 960.0),
    GpuPeakTableRow(&["rtx", "5000", "ada"], [1.0, 65.3, 130.5, 261.0, 522.0, 522.0], 576.0),
    // Values are from the NVIDIA Ada architecture white paper; FP16 and FP8 rates are with FP32
    // accumulation.
    GpuPeakTableRow(&["rtx", "4090"], [1.3, 82.6, 82.6, 165.2, 330.3, 660.6], 1008.0),
    // Values are from the NVIDIA A100 data sheet; the A800 has the same matrix units.
    GpuPeakTableRow(&["a100", "80gb", "pcie"], [19.5, 19.5, 156.0, 312.0, 0.0, 624.0], 1935.0),
    GpuPeakTableRow(&["a100", "80gb"], [19.5, 19.5, 156.0, 312.0, 0.0, 624.0], 2039.0),
    GpuPeakTableRow(&["a100", "40gb"], [19.5, 19.5, 156.0, 312.0, 0.0, 624.0], 1555.0),
    GpuPeakTableRow(&["a100"], [19.5, 19.5, 156.0, 312.0, 0.0, 624.0], 0.0),
    GpuPeakTableRow(&["a800"], [19.5, 19.5, 156.0, 312.0, 0.0, 624.0], 0.0),
    // These values are from the data sheets of NVIDIA A30, A40 and A10.
    GpuPeakTableRow(&["a30"], [10.3, 10.3, 82.0, 165.0, 0.0, 330.0], 933.0),
    GpuPeakTableRow(&["a40"], [0.6, 37.4, 74.8, 149.7, 0.0, 299.3], 696.0),
    GpuPeakTableRow(&["a10"], [1.0, 31.2, 62.5, 125.0, 0.0, 250.0], 600.0),
    // Values are from the NVIDIA Ampere GA102 architecture white paper; the FP16 rate is with FP32
    // accumulation.
    GpuPeakTableRow(&["rtx", "a6000"], [0.6, 38.7, 77.4, 154.8, 0.0, 309.7], 768.0),
    GpuPeakTableRow(&["rtx", "3090"], [0.6, 35.6, 35.6, 71.0, 0.0, 284.0], 936.0),
    GpuPeakTableRow(&["rtx", "3080"], [0.5, 29.8, 29.8, 59.5, 0.0, 238.0], 760.0),
    GpuPeakTableRow(&["rtx", "3070", "ti"], [0.3, 21.7, 21.7, 43.5, 0.0, 174.0], 608.0),
    // These values are from the data sheets of NVIDIA T4 and V100 Tensor Core GPU.
    GpuPeakTableRow(&["t4"], [0.3, 8.1, 0.0, 65.0, 0.0, 130.0], 320.0),
    GpuPeakTableRow(&["v100", "pcie"], [7.0, 14.0, 0.0, 112.0, 0.0, 0.0], 900.0),
    GpuPeakTableRow(&["v100"], [7.8, 15.7, 0.0, 125.0, 0.0, 0.0], 900.0),
    // Values are the matrix rates in the data sheets of AMD Instinct MI355X, MI325X, MI300X and
    // MI210.
    GpuPeakTableRow(&["mi355x"], [78.6, 157.3, 0.0, 2516.6, 5033.2, 5033.2], 8000.0),
    GpuPeakTableRow(&["mi325x"], [163.4, 163.4, 653.7, 1307.4, 2614.9, 2614.9], 6000.0),
    GpuPeakTableRow(&["mi300x"], [163.4, 163.4, 653.7, 1307.4, 2614.9, 2614.9], 5300.0),
    GpuPeakTableRow(&["mi210"], [45.3, 45.3, 0.0, 181.0, 0.0, 181.0], 1600.0),
    // Values are from the AMD Instinct MI250X and MI250 data sheets, halved, because each half of
    // the card is a GPU of its own.
    GpuPeakTableRow(&["mi250x"], [47.9, 47.9, 0.0, 191.5, 0.0, 191.5], 1600.0),
    GpuPeakTableRow(&["mi250"], [45.3, 45.3, 0.0, 181.0, 0.0, 181.0], 1600.0),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn fp16_peak_tera_operations(name: &str) -> Option<f64> {
        GpuPeakThroughput::peak_throughput_of_gpu_name(name)?
            .peak_operations_per_ns(MatrixPrecision::Fp16OrBf16)
            .map(|peak| (peak / 1e3 * 10.0).round() / 10.0)
    }

    #[test]
    fn gpu_peaks_equal_those_of_the_data_sheets() {
        assert_eq!(fp16_peak_tera_operations("NVIDIA H100 80GB HBM3"), Some(989.4));
        assert_eq!(fp16_peak_tera_operations("NVIDIA H100 PCIe"), Some(756.0));
        assert_eq!(fp16_peak_tera_operations("NVIDIA A100-SXM4-80GB"), Some(312.0));
        assert_eq!(fp16_peak_tera_operations("Tesla V100-SXM2-32GB"), Some(125.0));
        assert_eq!(fp16_peak_tera_operations("AMD Instinct MI300X"), Some(1307.4));
        assert_eq!(fp16_peak_tera_operations("NVIDIA L40S"), Some(362.0));
        assert_eq!(fp16_peak_tera_operations("NVIDIA H800"), None, "no sheet");
        assert_eq!(fp16_peak_tera_operations("AMD Instinct MI250"), Some(181.0));
        assert_eq!(fp16_peak_tera_operations("Test GPU"), None);
        assert_eq!(
            fp16_peak_tera_operations("NVIDIA A1000"),
            None,
            "only whole words of a name count"
        );
    }

    #[test]
    fn an_unsupported_precision_has_no_peak() {
        let v100 = GpuPeakThroughput::peak_throughput_of_gpu_name("Tesla V100")
            .expect("it is in the table");
        assert_eq!(v100.peak_operations_per_ns(MatrixPrecision::Fp8), None);
        let a100 = GpuPeakThroughput::peak_throughput_of_gpu_name("NVIDIA A100")
            .expect("it is in the table");
        assert_eq!(a100.device_memory_bytes_per_ns, 0.0, "40 or 80 GB");
    }
}
