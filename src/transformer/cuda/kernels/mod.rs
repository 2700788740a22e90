//! Kernel specifications of the language model, with one file for each file of
//! `kernels/transformer`.
//!
//! Tensor layouts are those of [`shape`](crate::transformer::shape); the headers of the kernel
//! files state parameters, alignment and units. Rows of the language model's tensors have a
//! multiple of 8 elements. Every kernel of the language model computes in f32 and waits for the
//! preceding kernel itself, so it may be launched with programmatic dependent launch.

pub mod adamw;
pub mod embedding;
pub mod gemm;
pub mod loss;
pub mod norm;
pub mod rope;
mod row;
pub mod softmax;
pub mod swiglu;

use kernelgate_cuda::spec::{ListedKernelBuild, list_kernel_rows};

/// Lists the CUDA kernels of the language model.
pub fn list_transformer_kernels() -> Vec<ListedKernelBuild> {
    [
        list_kernel_rows(embedding::EMBEDDING_KERNELS),
        list_kernel_rows(norm::RMS_NORM_KERNELS),
        list_kernel_rows(rope::ROPE_KERNELS),
        list_kernel_rows(swiglu::SWIGLU_KERNELS),
        list_kernel_rows(softmax::CAUSAL_SOFTMAX_KERNELS),
        list_kernel_rows(gemm::EPILOGUE_GEMM_KERNELS),
        list_kernel_rows(loss::CROSS_ENTROPY_KERNELS),
        list_kernel_rows(adamw::ADAMW_KERNELS),
    ]
    .concat()
}
