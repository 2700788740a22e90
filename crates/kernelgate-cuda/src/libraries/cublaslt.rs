//! GEMMs by cuBLASLt: the measured matmul ceiling of the roofline.

use std::sync::Arc;

use super::lt::{self, LtError};
use crate::BackendError;
use crate::library::{self, Library};
use crate::{Buffer, Device};

/// What a GEMM multiplies; it always accumulates in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operands {
    /// 8-bit floats of 4 exponent and 3 mantissa bits.
    Fp8,
    /// Brain floats.
    Bf16,
    /// IEEE half precision.
    F16,
    /// f32 rounded to 10 mantissa bits by the tensor cores.
    Tf32,
    /// f32 on the CUDA cores.
    F32,
}

impl Operands {
    /// All of them, fastest first.
    pub const ALL: [Self; 5] = [Self::Fp8, Self::Bf16, Self::F16, Self::Tf32, Self::F32];

    /// The name used in files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Tf32 => "tf32",
            Self::F32 => "f32",
        }
    }

    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Fp8 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::Tf32 | Self::F32 => 4,
        }
    }

    const fn types(self) -> (lt::DataType, lt::DataType, lt::Compute) {
        use lt::Compute::{CUBLAS_COMPUTE_32F as COMPUTE, CUBLAS_COMPUTE_32F_FAST_TF32 as TENSOR};
        use lt::DataType as D;
        match self {
            Self::Fp8 => (D::CUDA_R_8F_E4M3, D::CUDA_R_16BF, COMPUTE),
            Self::Bf16 => (D::CUDA_R_16BF, D::CUDA_R_16BF, COMPUTE),
            Self::F16 => (D::CUDA_R_16F, D::CUDA_R_16F, COMPUTE),
            Self::Tf32 => (D::CUDA_R_32F, D::CUDA_R_32F, TENSOR),
            Self::F32 => (D::CUDA_R_32F, D::CUDA_R_32F, COMPUTE),
        }
    }
}

/// D = Aᵀ·B of square matrices on a device, and the algorithms that the library proposes for it.
pub struct SquareGemm {
    device: Arc<Device>,
    handle: lt::Object,
    description: lt::Object,
    operand: lt::Object,
    result: lt::Object,
    algorithms: Vec<lt::Algorithm>,
    a: Buffer,
    b: Buffer,
    d: Buffer,
    workspace: Buffer,
}

const WORKSPACE_BYTES: usize = 32 << 20;

impl SquareGemm {
    /// Prepares the GEMM of two `size`×`size` matrices, whose elements lie in `a` and `b`; `None`
    /// where the library is missing, or knows no algorithm for such elements on this GPU.
    ///
    /// # Errors
    /// When the elements are not as many as that, the library fails, or memory is short.
    pub fn new(
        device: &Arc<Device>,
        operands: Operands,
        size: u64,
        [a, b]: [&[u8]; 2],
    ) -> Result<Option<Self>, BackendError> {
        if library::load(Library::CublasLt).is_none() {
            return Ok(None);
        }
        let (input, output, compute) = operands.types();
        let elements = (size * size) as usize;
        if [a, b].iter().any(|matrix| matrix.len() != elements * operands.bytes()) {
            return Err(BackendError::Launch(format!(
                "a GEMM of {size} by {size} with operands of another size"
            )));
        }
        let output_bytes = if operands == Operands::Fp8 { 2 } else { operands.bytes() };
        // In this order: from here on the destructor gives back what was made.
        let mut gemm = Self {
            device: Arc::clone(device),
            handle: std::ptr::null_mut(),
            description: std::ptr::null_mut(),
            operand: std::ptr::null_mut(),
            result: std::ptr::null_mut(),
            algorithms: Vec::new(),
            a: device.upload(a)?,
            b: device.upload(b)?,
            d: device.allocate(elements * output_bytes)?,
            workspace: device.allocate(WORKSPACE_BYTES)?,
        };
        gemm.handle = lt::create().map_err(failed("open"))?;
        // The transposed form is the one that every dtype supports, and fp8 needs.
        gemm.description = lt::description(compute, lt::DataType::CUDA_R_32F, true)
            .map_err(failed("describe a GEMM"))?;
        let layout =
            |dtype| lt::layout(dtype, size, size, size as i64).map_err(failed("describe a matrix"));
        gemm.operand = layout(input)?;
        gemm.result = layout(output)?;
        let layouts = [gemm.operand, gemm.operand, gemm.result];
        // SAFETY: handle, description and layouts were made above and are alive.
        let proposed =
            unsafe { lt::propose(gemm.handle, gemm.description, layouts, WORKSPACE_BYTES) };
        gemm.algorithms = match proposed {
            // fp8 before sm_89: no ceiling, and no work that has one.
            Err(LtError::NOT_SUPPORTED) => return Ok(None),
            proposed => proposed.map_err(failed("propose an algorithm"))?,
        };
        Ok(Some(gemm))
    }

    /// How many algorithms there are.
    pub fn algorithms(&self) -> usize {
        self.algorithms.len()
    }

    /// Enqueues the GEMM by one of them.
    ///
    /// # Errors
    /// When the library refuses.
    pub fn launch(&self, algorithm: usize) -> Result<(), BackendError> {
        let launch = lt::Launch {
            handle: self.handle,
            description: self.description,
            scale: 1.0,
            matrices: [&self.a, &self.b, &self.d].map(Buffer::address),
            layouts: [self.operand, self.operand, self.result],
            algorithm: &raw const self.algorithms[algorithm],
            workspace: (self.workspace.address(), WORKSPACE_BYTES),
            stream: self.device.stream().cu_stream().cast(),
        };
        // SAFETY: handle, descriptions and algorithm belong together and to this GEMM; the buffers
        // are as large as described and live as long as `self`.
        unsafe { lt::matmul(launch) }.map_err(failed("launch a GEMM"))
    }
}

impl Drop for SquareGemm {
    fn drop(&mut self) {
        // SAFETY: each is destroyed once, if it was made; nothing of the GEMM runs any more once
        // the buffers are freed in order.
        unsafe {
            for (kind, object) in [
                (lt::Kind::Layout, self.result),
                (lt::Kind::Layout, self.operand),
                (lt::Kind::Description, self.description),
                (lt::Kind::Handle, self.handle),
            ] {
                lt::destroy(kind, object);
            }
        }
    }
}

pub(super) fn failed(action: &'static str) -> impl Fn(LtError) -> BackendError {
    move |error| BackendError::Launch(format!("cuBLASLt failed to {action}: {error}"))
}
