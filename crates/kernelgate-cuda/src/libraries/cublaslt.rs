//! GEMMs by cuBLASLt: the measured matmul ceiling of the roofline.

use std::sync::Arc;

use super::gemm::{CublasLtLanes, GemmOperands, GemmSpec, MatrixDtype, PreparedGemm};
use crate::BackendError;
use crate::library::{self, RequiredLibrary};
use crate::{Device, DeviceBuffer};

/// Dtypes of a GEMM's matrices; the GEMM always accumulates in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OperandDtypes {
    /// 8-bit floats of 4 exponent and 3 mantissa bits.
    Fp8,
    /// Brain floats.
    Bf16,
    /// IEEE half precision.
    F16,
    /// f32 rounded to 10 mantissa bits by the tensor cores.
    Tf32,
    /// Arithmetic in f32 on the CUDA cores.
    F32,
}

impl OperandDtypes {
    /// All algorithms, fastest first.
    pub const FASTEST_FIRST: [Self; 5] = [Self::Fp8, Self::Bf16, Self::F16, Self::Tf32, Self::F32];

    /// Name of the matrix precision in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Tf32 => "tf32",
            Self::F32 => "f32",
        }
    }

    /// Returns the size of an operand element, bytes.
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::Fp8 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::Tf32 | Self::F32 => 4,
        }
    }

    /// The GEMM of square matrices, as the library sees it Aᵀ·B: the form that every dtype supports
    /// and fp8 needs.
    const fn square_gemm(self, size: usize) -> GemmSpec {
        use MatrixDtype as D;
        let (input, output) = match self {
            Self::Fp8 => (D::E4m3, D::Bf16),
            Self::Bf16 => (D::Bf16, D::Bf16),
            Self::F16 => (D::F16, D::F16),
            Self::Tf32 | Self::F32 => (D::F32, D::F32),
        };
        GemmSpec {
            b_transposed: true,
            tf32: matches!(self, Self::Tf32),
            ..GemmSpec::new(size, size, size, input, output)
        }
    }
}

/// The product B·Aᵀ of square matrices on a GPU, with the algorithms that cuBLASLt proposes for it.
pub struct SquareGemm {
    gemm: PreparedGemm,
    a: DeviceBuffer,
    b: DeviceBuffer,
    d: DeviceBuffer,
}

const WORKSPACE_BYTES: usize = 32 << 20;

impl SquareGemm {
    /// Prepares the GEMM of two `size`×`size` matrices, whose elements lie in `a` and `b`; `None`
    /// if the library is missing, or has no algorithm for these dtypes on this GPU.
    ///
    /// # Errors
    /// Fails if the buffers have another number of elements, the library fails, or memory is short.
    pub fn new(
        device: &Arc<Device>,
        operands: OperandDtypes,
        size: u64,
        [a, b]: [&[u8]; 2],
    ) -> Result<Option<Self>, BackendError> {
        if library::load_once(RequiredLibrary::CublasLt).is_none() {
            return Ok(None);
        }
        let spec = operands.square_gemm(size as usize);
        let elements = (size * size) as usize;
        if [a, b].iter().any(|matrix| matrix.len() != elements * operands.element_bytes()) {
            return Err(BackendError::Launch(format!(
                "a GEMM of {size} by {size} with operands of another size"
            )));
        }
        let [a, b] = [device.upload(a)?, device.upload(b)?];
        let d = device.allocate(elements * spec.d.element_bytes())?;
        let blas = CublasLtLanes::with_workspace(device, 1, WORKSPACE_BYTES)?;
        match PreparedGemm::new(&blas, spec) {
            Ok(gemm) => Ok(Some(Self { gemm, a, b, d })),
            // Before sm_89, fp8 is unsupported: fp8 has no ceiling, and no work uses it.
            Err(error) if error.is_unsupported() => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Number of algorithms that the library proposes.
    pub fn algorithm_count(&self) -> usize {
        self.gemm.proposed_algorithm_count()
    }

    /// Enqueues the GEMM with the algorithm of the given index.
    pub fn launch(&self, algorithm: usize) -> Result<(), BackendError> {
        let [a, b, d] = [&self.a, &self.b, &self.d].map(DeviceBuffer::address);
        self.gemm.launch_algorithm(algorithm, 0, &GemmOperands::new(b, a, d))
    }
}
