//! The two GEMMs of attention as separate cuBLASLt calls, as a user without a fused kernel would
//! make them.

use std::sync::Arc;

use super::launch::{AttentionExtents, upload_named_inputs};
use crate::attention::components::{
    AttentionComponentShape, AttentionScoresProblem, AttentionValuesProblem,
};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::{self, CudaTask, DeviceOutput};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::Device;
use kernelgate_cuda::libraries::gemm::{
    self, CublasLtLanes, GemmMatrixDtype, GemmOperandAddresses, GemmSpec, PreparedGemm,
};
use kernelgate_cuda::observe::range::run_within_named_range;

/// Checks that the cuBLASLt library is available and that the dtype and the bytes of scores are
/// supported.
pub fn check_cublaslt_supports_separate_gemms(extents: &AttentionExtents) -> Result<(), String> {
    extents.check_support_with_scores_in_memory(&[])?;
    gemm::require_cublaslt()
}

/// Prepares the timed cuBLASLt GEMM of the attention scores `q kᵀ / sqrt(d)` of every head.
pub fn prepare_cublaslt_scores_task(
    problem: &AttentionScoresProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let AttentionComponentShape { seq_len: s, head_dim: d, dtype, .. } = problem.shape;
    let spec = GemmSpec {
        b_transposed: true,
        alpha: 1.0 / (d as f32).sqrt(),
        ..GemmSpec::new(s, s, d, gemm_matrix_dtype_of_16_bit_dtype(dtype), GemmMatrixDtype::F32)
    };
    let out = DeviceOutput::new(device, "scores", problem.shape.score_matrix_shape(), Dtype::F32)?;
    prepare_gemm_task_batched_by_head(device, &problem.shape, spec, inputs, ["q", "k"], out)
}

/// Prepares the timed cuBLASLt GEMM of the attention output `p v` of every head, from probabilities
/// p and values v.
pub fn prepare_cublaslt_values_task(
    problem: &AttentionValuesProblem,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let AttentionComponentShape { seq_len: s, head_dim: d, dtype, .. } = problem.shape;
    let spec = GemmSpec::new(
        s,
        d,
        s,
        gemm_matrix_dtype_of_16_bit_dtype(dtype),
        gemm_matrix_dtype_of_16_bit_dtype(dtype),
    );
    let out = DeviceOutput::new(device, "out", problem.shape.query_key_value_shape(), dtype)?;
    prepare_gemm_task_batched_by_head(
        device,
        &problem.shape,
        spec,
        inputs,
        ["probabilities", "v"],
        out,
    )
}

const fn gemm_matrix_dtype_of_16_bit_dtype(dtype: Dtype) -> GemmMatrixDtype {
    if matches!(dtype, Dtype::F16) { GemmMatrixDtype::F16 } else { GemmMatrixDtype::Bf16 }
}

/// Prepares the timed task of one batched cuBLASLt GEMM with a batch entry for every head, by the
/// fastest algorithm measured.
fn prepare_gemm_task_batched_by_head(
    device: &Arc<Device>,
    shape: &AttentionComponentShape,
    spec: GemmSpec,
    inputs: &Tensors,
    names: [&'static str; 2],
    out: DeviceOutput,
) -> Result<CudaTask, BackendError> {
    let blas = CublasLtLanes::open_cublaslt_with_default_workspace(device, 1)?;
    let mut gemm = PreparedGemm::gemm_with_proposed_algorithms(
        &blas,
        GemmSpec { batch_count: shape.batch * shape.heads, ..spec },
    )?;
    let [a, b] = upload_named_inputs(device, inputs, names)?;
    gemm.time_and_choose_algorithm(&[GemmOperandAddresses::gemm_operands_from_a_b_d(
        a.device_address(),
        b.device_address(),
        out.address(),
    )])?;
    let inputs = cuda::named_inputs([(names[0], &a), (names[1], &b)]);
    Ok(CudaTask::new(device, inputs, vec![out], move |outputs| {
        let operands = GemmOperandAddresses::gemm_operands_from_a_b_d(
            a.device_address(),
            b.device_address(),
            outputs[0].address(),
        );
        run_within_named_range("gemm", || gemm.enqueue_gemm_in_lane(0, &operands))
    }))
}
