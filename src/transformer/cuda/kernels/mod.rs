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

use kernelgate_cuda::spec::{ListedKernel, list_kernel_rows};

/// Every kernel of this folder.
pub fn kernels() -> Vec<ListedKernel> {
    [
        list_kernel_rows(embedding::KERNELS),
        list_kernel_rows(norm::KERNELS),
        list_kernel_rows(rope::KERNELS),
        list_kernel_rows(swiglu::KERNELS),
        list_kernel_rows(softmax::KERNELS),
        list_kernel_rows(gemm::KERNELS),
        list_kernel_rows(loss::KERNELS),
        list_kernel_rows(adamw::KERNELS),
    ]
    .concat()
}
