//! The GEMMs of attention apart, by cuBLASLt: what a user without a fused kernel would call.

use std::sync::Arc;

use super::launch::{Extents, upload};
use crate::attention::components::{ComponentShape, Scores, ValuesMatmul};
use kernelgate::backend::BackendError;
use kernelgate::backend::cuda::{self, CudaTask, Output};
use kernelgate::workload::{Dtype, Tensors};
use kernelgate_cuda::Device;
use kernelgate_cuda::libraries::gemm::{self, Batch, Blas, Gemm, Spec};
use kernelgate_cuda::observe::range::within;

/// Whether the library is there and is asked for such types.
///
/// # Errors
/// The reason why not.
pub fn supported(extents: &Extents) -> Result<(), String> {
    extents.supported_with_scores(&[])?;
    gemm::available()
}

/// q kᵀ / sqrt(d) of every head.
pub fn scores(
    problem: &Scores,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let ComponentShape { s, d, .. } = problem.shape;
    let spec = Spec { rows: s, columns: s, depth: d, transposed: true, wide: true };
    let out = Output::new(device, "scores", problem.shape.pairs(), Dtype::F32)?;
    task(device, &problem.shape, spec, 1.0 / (d as f32).sqrt(), inputs, ["q", "k"], out)
}

/// p v of every head.
pub fn values(
    problem: &ValuesMatmul,
    inputs: &Tensors,
    device: &Arc<Device>,
) -> Result<CudaTask, BackendError> {
    let ComponentShape { s, d, dtype, .. } = problem.shape;
    let spec = Spec { rows: s, columns: d, depth: s, transposed: false, wide: false };
    let out = Output::new(device, "out", problem.shape.vectors(), dtype)?;
    task(device, &problem.shape, spec, 1.0, inputs, ["probabilities", "v"], out)
}

/// `out = scale · x w` of every head.
fn task(
    device: &Arc<Device>,
    shape: &ComponentShape,
    spec: Spec,
    scale: f32,
    inputs: &Tensors,
    names: [&'static str; 2],
    out: Output,
) -> Result<CudaTask, BackendError> {
    let blas = Blas::open(device, 1)?;
    let batch = Batch { count: shape.b * shape.h, scale, half: shape.dtype == Dtype::F16 };
    let mut gemm = Gemm::batched(&blas, spec, batch)?;
    let [x, w] = upload(device, inputs, names)?;
    gemm.choose(&[[x.address(), w.address(), out.address()]])?;
    let inputs = cuda::inputs([(names[0], &x), (names[1], &w)]);
    Ok(CudaTask::new(device, inputs, vec![out], move |outputs| {
        within("gemm", || gemm.launch(0, x.address(), w.address(), outputs[0].address()))
    }))
}
