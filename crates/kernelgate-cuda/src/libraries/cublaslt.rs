//! GEMMs by cuBLASLt: the measured matmul ceiling of the roofline.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;

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

    const fn types(self) -> (sys::cudaDataType, sys::cudaDataType, sys::cublasComputeType_t) {
        use sys::cublasComputeType_t::{
            CUBLAS_COMPUTE_32F as COMPUTE, CUBLAS_COMPUTE_32F_FAST_TF32 as TENSOR,
        };
        use sys::cudaDataType_t as D;
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
    handle: sys::cublasLtHandle_t,
    description: sys::cublasLtMatmulDesc_t,
    operand: sys::cublasLtMatrixLayout_t,
    result: sys::cublasLtMatrixLayout_t,
    algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
    a: Buffer,
    b: Buffer,
    d: Buffer,
    workspace: Buffer,
}

const WORKSPACE_BYTES: usize = 32 << 20;

impl SquareGemm {
    /// Prepares the GEMM of two `size`×`size` matrices, whose elements lie in `a` and `b`; `None`
    /// where the library is missing.
    ///
    /// # Errors
    /// When the elements are not as many as that, the library fails or knows no algorithm, or
    /// memory is short.
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
        gemm.handle = result::create_handle().map_err(failed("open"))?;
        gemm.description = result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F)
            .map_err(failed("describe a GEMM"))?;
        gemm.operand = result::create_matrix_layout(input, size, size, size as i64)
            .map_err(failed("describe a matrix"))?;
        gemm.result = result::create_matrix_layout(output, size, size, size as i64)
            .map_err(failed("describe a matrix"))?;
        gemm.transpose_a().map_err(failed("transpose"))?;
        let (operand, result) = (gemm.operand, gemm.result);
        // SAFETY: handle, description and layouts were made above and are alive.
        let proposed = unsafe {
            propose(gemm.handle, gemm.description, [operand, operand, result], WORKSPACE_BYTES)
        };
        gemm.algorithms = proposed.map_err(failed("propose an algorithm"))?;
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
        let (one, zero) = (1f32, 0f32);
        let pointer = |buffer: &Buffer| buffer.address() as *mut c_void;
        // SAFETY: handle, descriptions and algorithm belong together and to this GEMM; the buffers
        // are as large as described and live as long as `self`; the scalars are f32 as the
        // description says and are read during the call.
        unsafe {
            result::matmul(
                self.handle,
                self.description,
                (&raw const one).cast(),
                (&raw const zero).cast(),
                pointer(&self.a),
                self.operand,
                pointer(&self.b),
                self.operand,
                pointer(&self.d),
                self.result,
                pointer(&self.d),
                self.result,
                &raw const self.algorithms[algorithm],
                pointer(&self.workspace),
                WORKSPACE_BYTES,
                self.device.stream().cu_stream().cast(),
            )
        }
        .map_err(failed("launch a GEMM"))
    }

    /// The form that every dtype supports, and fp8 needs.
    fn transpose_a(&self) -> Result<(), CublasError> {
        // CUBLAS_OP_T.
        let transposed = 1i32;
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the description is alive; the attribute is of that type and copied.
        unsafe {
            result::set_matmul_desc_attribute(
                self.description,
                attribute,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )
        }
    }
}

impl Drop for SquareGemm {
    fn drop(&mut self) {
        // SAFETY: each is destroyed once, if it was made; nothing of the GEMM runs any more once
        // the buffers are freed in order.
        unsafe {
            let _ = (!self.result.is_null()).then(|| result::destroy_matrix_layout(self.result));
            let _ = (!self.operand.is_null()).then(|| result::destroy_matrix_layout(self.operand));
            let _ = (!self.description.is_null())
                .then(|| result::destroy_matmul_desc(self.description));
            let _ = (!self.handle.is_null()).then(|| result::destroy_handle(self.handle));
        }
    }
}

/// Algorithms asked for.
const MAX_ALGORITHMS: usize = 8;

/// The algorithms that the library proposes for d = a·b with matrices of these layouts (a, b, d),
/// the most promising first; at least one.
///
/// # Safety
/// The handle, the description and the layouts are alive.
///
/// # Errors
/// When the library fails or knows none.
pub(super) unsafe fn propose(
    handle: sys::cublasLtHandle_t,
    description: sys::cublasLtMatmulDesc_t,
    [a, b, d]: [sys::cublasLtMatrixLayout_t; 3],
    workspace_bytes: usize,
) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, CublasError> {
    let preference = result::create_matmul_pref()?;
    let attribute =
        sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
    let mut proposals =
        [std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit(); MAX_ALGORITHMS];
    let mut count = 0;
    // SAFETY: what the caller passed is alive; the attribute is a size_t and copied; there is room
    // for the proposals asked for.
    let outcome = unsafe {
        let set = result::set_matmul_pref_attribute(
            preference,
            attribute,
            (&raw const workspace_bytes).cast(),
            size_of::<usize>(),
        );
        let asked = sys::cublasLtMatmulAlgoGetHeuristic(
            handle,
            description,
            a,
            b,
            d,
            d,
            preference,
            MAX_ALGORITHMS as i32,
            proposals.as_mut_ptr().cast(),
            &raw mut count,
        );
        let destroyed = result::destroy_matmul_pref(preference);
        set.and(asked.result()).and(destroyed)
    };
    outcome?;
    // SAFETY: the library filled the first `count`.
    let proposals =
        proposals[..count.max(0) as usize].iter().map(|proposal| unsafe { proposal.assume_init() });
    let algorithms: Vec<_> = proposals
        .filter(|proposal| proposal.state.result().is_ok())
        .map(|proposal| proposal.algo)
        .collect();
    if algorithms.is_empty() {
        Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED))
    } else {
        Ok(algorithms)
    }
}

pub(super) fn failed(action: &'static str) -> impl Fn(CublasError) -> BackendError {
    move |error| BackendError::Launch(format!("cuBLASLt failed to {action}: {error}"))
}
