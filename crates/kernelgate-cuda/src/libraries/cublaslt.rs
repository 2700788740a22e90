//! GEMMs of square matrices by cuBLASLt, which measure the highest matmul rate for the roofline.

use std::sync::Arc;

use super::gemm::{CublasLtLanes, GemmMatrixDtype, GemmOperandAddresses, GemmSpec, PreparedGemm};
use crate::BackendError;
use crate::library::{self, NvidiaLibrary};
use crate::{Device, DeviceBuffer};

/// Dtypes of a GEMM's input matrices; the GEMM always accumulates in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GemmInputDtype {
    /// 8-bit floats with 4 exponent bits and 3 mantissa bits.
    Fp8,
    /// Brain floats.
    Bf16,
    /// IEEE half precision.
    F16,
    /// f32 elements that the tensor cores round to 10 mantissa bits (TF32).
    Tf32,
    /// f32 elements that are multiplied exactly in f32 on the CUDA cores.
    F32,
}

impl GemmInputDtype {
    /// All dtypes of GEMM inputs, fastest first.
    pub const DTYPES_FASTEST_FIRST: [Self; 5] =
        [Self::Fp8, Self::Bf16, Self::F16, Self::Tf32, Self::F32];

    /// Name of the dtype in records: "fp8", "bf16", "f16", "tf32" or "f32".
    pub const fn name_in_records(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Tf32 => "tf32",
            Self::F32 => "f32",
        }
    }

    /// Size of an element of the input matrices in bytes.
    pub const fn bytes_of_input_element(self) -> usize {
        match self {
            Self::Fp8 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::Tf32 | Self::F32 => 4,
        }
    }

    /// Specification of a GEMM of square matrices of this size in the form Aᵀ·B, which cuBLASLt
    /// supports for every dtype and requires for fp8.
    const fn spec_of_square_gemm(self, size: usize) -> GemmSpec {
        use GemmMatrixDtype as D;
        let (input, output) = match self {
            Self::Fp8 => (D::E4m3, D::Bf16),
            Self::Bf16 => (D::Bf16, D::Bf16),
            Self::F16 => (D::F16, D::F16),
            Self::Tf32 | Self::F32 => (D::F32, D::F32),
        };
        GemmSpec {
            b_transposed: true,
            rounds_inputs_to_tf32: matches!(self, Self::Tf32),
            ..GemmSpec::new(size, size, size, input, output)
        }
    }
}

/// The product B·Aᵀ of two square matrices on a GPU, with the algorithms that cuBLASLt proposes for
/// it.
pub struct SquareGemmByCublasLt {
    gemm: PreparedGemm,
    matrix_a: DeviceBuffer,
    matrix_b: DeviceBuffer,
    matrix_d: DeviceBuffer,
}

const GEMM_WORKSPACE_BYTES_FOR_PEAK: usize = 32 << 20;

impl SquareGemmByCublasLt {
    /// Prepares the GEMM of two `size`×`size` matrices whose elements repeat the patterns
    /// `matrix_a` and `matrix_b`; `None` without cuBLASLt, or if it has no algorithm for the dtype
    /// on this GPU.
    ///
    /// # Errors
    /// Fails if a matrix is not a whole number of its patterns, cuBLASLt returns an error, or too
    /// little device memory is free.
    pub fn prepare_gemm_if_supported(
        device: &Arc<Device>,
        operands: GemmInputDtype,
        size: u64,
        [a, b]: [&[u8]; 2],
    ) -> Result<Option<Self>, BackendError> {
        if library::open_library_once(NvidiaLibrary::CublasLt).is_none() {
            return Ok(None);
        }
        let spec = operands.spec_of_square_gemm(size as usize);
        let elements = (size * size) as usize;
        let bytes = elements * operands.bytes_of_input_element();
        if [a, b].iter().any(|pattern| bytes.checked_rem(pattern.len()) != Some(0)) {
            return Err(BackendError::ComputationFailed(format!(
                "a GEMM of {size} by {size} with operands of another size"
            )));
        }
        let fill = |pattern| device.allocate_with_repeated_pattern(pattern, bytes);
        let [a, b] = [fill(a)?, fill(b)?];
        let d = device.allocate(elements * spec.d.size_of_element_in_bytes())?;
        let blas =
            CublasLtLanes::open_cublaslt_with_workspace(device, 1, GEMM_WORKSPACE_BYTES_FOR_PEAK)?;
        match PreparedGemm::gemm_with_proposed_algorithms(&blas, spec) {
            Ok(gemm) => Ok(Some(Self { gemm, matrix_a: a, matrix_b: b, matrix_d: d })),
            // GPUs before sm_89 do not support fp8, so no fp8 rate is measured there.
            Err(error) if error.means_unsupported_gemm() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Number of algorithms that cuBLASLt proposes for the GEMM.
    pub fn proposed_algorithm_count(&self) -> usize {
        self.gemm.proposed_algorithm_count()
    }

    /// Enqueues the GEMM with the proposed algorithm of this index.
    pub fn enqueue_gemm_with_algorithm(&self, algorithm: usize) -> Result<(), BackendError> {
        let [a, b, d] =
            [&self.matrix_a, &self.matrix_b, &self.matrix_d].map(DeviceBuffer::device_address);
        self.gemm.enqueue_gemm_with_proposed_algorithm(
            algorithm,
            0,
            &GemmOperandAddresses::gemm_operands_from_a_b_d(b, a, d),
        )
    }
}
