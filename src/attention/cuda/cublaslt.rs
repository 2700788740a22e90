//! The GEMMs of attention as separate cuBLASLt calls, as a user without a fused kernel would make
//! them.

use std::sync::Arc;

use super::launch::{Extents, upload_inputs};
use crate::attention::components::{ComponentShape, ScoresProblem, ValuesProblem};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::{self, CudaTask, Output};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::Device;
use kernelgate_cuda::libraries::gemm::{
    self, CublasLtLanes, GemmOperands, GemmSpec, MatrixDtype, PreparedGemm,
};
use kernelgate_cuda::observe::range::within_range;

/// Checks that cuBLASLt is loaded and supports the types.
pub fn check_cublaslt_support(extents: &Extents) -> Result<(), String> {
    extents.supported_with_scores(&[])?;
    gemm::check_available()
}

/// GEMM task of the scores: `q kᵀ / sqrt(d)` of every head.
pub fn scores_gemm_task(
    problem: &ScoresProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let ComponentShape { s, d, dtype, .. } = problem.shape;
    let spec = GemmSpec {
        b_transposed: true,
        alpha: 1.0 / (d as f32).sqrt(),
        ..GemmSpec::new(s, s, d, matrix_dtype(dtype), MatrixDtype::F32)
    };
    let out = Output::new(device, "scores", problem.shape.score_shape(), Dtype::F32)?;
    gemm_task_batched_by_head(device, &problem.shape, spec, inputs, ["q", "k"], out)
}

/// GEMM task of the output: GEMM task of the output: `p v` of every head.
pub fn values_gemm_task(
    problem: &ValuesProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let ComponentShape { s, d, dtype, .. } = problem.shape;
    let spec = GemmSpec::new(s, d, s, matrix_dtype(dtype), matrix_dtype(dtype));
    let out = Output::new(device, "out", problem.shape.vector_shape(), dtype)?;
    gemm_task_batched_by_head(device, &problem.shape, spec, inputs, ["probabilities", "v"], out)
}

const fn matrix_dtype(dtype: Dtype) -> MatrixDtype {
    if matches!(dtype, Dtype::F16) { MatrixDtype::F16 } else { MatrixDtype::Bf16 }
}

/// Task of one batched GEMM with a batch entry for every head.
fn gemm_task_batched_by_head(
    device: &Arc<Device>,
    shape: &ComponentShape,
    spec: GemmSpec,
    inputs: &Tensors,
    names: [&'static str; 2],
    out: Output,
) -> Result<CudaTask, BackendError> {
    let blas = CublasLtLanes::open(device, 1)?;
    let mut gemm = PreparedGemm::new(&blas, GemmSpec { batch_count: shape.b * shape.h, ..spec })?;
    let [a, b] = upload_inputs(device, inputs, names)?;
    gemm.choose_fastest_algorithm(&[GemmOperands::new(a.address(), b.address(), out.address())])?;
    let inputs = cuda::named_inputs([(names[0], &a), (names[1], &b)]);
    Ok(CudaTask::new(device, inputs, vec![out], move |outputs| {
        let operands = GemmOperands::new(a.address(), b.address(), outputs[0].address());
        within_range("gemm", || gemm.launch_in_lane(0, &operands))
    }))
}
