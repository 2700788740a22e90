//! Kernel rows of the language model, with a file for each file of `kernels/transformer`.
//!
//! Layouts are those of [`shape`](crate::transformer::shape); parameters, alignment and units are
//! in the kernels' headers. Rows of tensors have a multiple of 8 elements. Every kernel computes in
//! f32 and waits for its predecessors itself, so that programmatic dependent launch is allowed.

pub mod adamw;
pub mod embedding;
pub mod gemm;
pub mod loss;
pub mod norm;
pub mod rope;
mod row;
pub mod softmax;
pub mod swiglu;

use kernelgate_cuda::spec::{ListedKernel, list};

/// Every kernel of this folder.
pub fn kernels() -> Vec<ListedKernel> {
    [
        list(embedding::KERNELS),
        list(norm::KERNELS),
        list(rope::KERNELS),
        list(swiglu::KERNELS),
        list(softmax::KERNELS),
        list(gemm::KERNELS),
        list(loss::KERNELS),
        list(adamw::KERNELS),
    ]
    .concat()
}
