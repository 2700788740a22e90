//! Kernel specifications of RMSNorm and of its gradients.

use super::row::{EXAMPLE_MODEL_SHAPE, macro_of_element_type, shape_in_f32_and_bf16};
use crate::kernel_files::source_of_kernel_file;
use crate::transformer::shape::LanguageModelShape;
use kernelgate_cuda::KernelSpec;

/// Kernels of RMSNorm.
pub const RMS_NORM_KERNELS: &[KernelSpec<LanguageModelShape>] = &[
    RMS_NORM_KERNEL,
    ADD_BRANCH_AND_RMS_NORM_KERNEL,
    RMS_NORM_BACKWARD_KERNEL,
    SUM_GAIN_GRADIENTS_KERNEL,
];

/// Number of threads that compute one row of RMSNorm.
const THREADS_PER_NORM_ROW: usize = 128;

/// Number of threads in a block of the RMSNorm backward kernel.
const NORM_BACKWARD_BLOCK_THREADS: usize = 512;

/// Maximum number of blocks of the RMSNorm backward kernel: two on each multiprocessor of an H100,
/// because every block writes a row of partial gain gradients.
const MAX_NORM_BACKWARD_BLOCKS: usize = 264;

/// Number of blocks of the RMSNorm backward kernel, each of which writes a row of partial gain
/// gradients.
pub fn norm_backward_block_count(shape: &LanguageModelShape) -> usize {
    MAX_NORM_BACKWARD_BLOCKS
        .min(shape.tokens_in_batch().div_ceil(NORM_BACKWARD_BLOCK_THREADS / THREADS_PER_NORM_ROW))
}

/// Kernel that computes RMSNorm of rows.
pub const RMS_NORM_KERNEL: KernelSpec<LanguageModelShape> = KernelSpec {
    macro_definitions: |shape| {
        vec![
            macro_of_element_type(shape),
            format!("QUADS={}", shape.model_width.div_ceil(4 * THREADS_PER_NORM_ROW)),
        ]
    },
    constant_macros: |_| {
        vec![("THREADS", NORM_BACKWARD_BLOCK_THREADS), ("GROUP", THREADS_PER_NORM_ROW)]
    },
    listed_build_parameters: || {
        let widths = [EXAMPLE_MODEL_SHAPE.model_width, 1600];
        widths
            .into_iter()
            .flat_map(|d| {
                shape_in_f32_and_bf16(LanguageModelShape { model_width: d, ..EXAMPLE_MODEL_SHAPE })
            })
            .collect()
    },
    ..KernelSpec::new(
        source_of_kernel_file("transformer/norm"),
        "transformer_norm",
        THREADS_PER_NORM_ROW,
        |shape| [shape.tokens_in_batch(), 1, 1],
    )
};

/// Kernel that adds a layer branch to the residual stream and computes RMSNorm of the sum.
pub const ADD_BRANCH_AND_RMS_NORM_KERNEL: KernelSpec<LanguageModelShape> =
    KernelSpec { kernel_symbol: "transformer_norm_add", ..RMS_NORM_KERNEL };

/// Kernel of RMSNorm's backward pass: gradient of the residual stream, and partial gradients of the
/// gain.
pub const RMS_NORM_BACKWARD_KERNEL: KernelSpec<LanguageModelShape> = KernelSpec {
    kernel_symbol: "transformer_norm_backward",
    threads_per_block: NORM_BACKWARD_BLOCK_THREADS,
    blocks: |shape| [norm_backward_block_count(shape), 1, 1],
    ..RMS_NORM_KERNEL
};

/// Kernel that sums the partial gain gradients of all norms, `[gains, norm_blocks, d]`.
pub const SUM_GAIN_GRADIENTS_KERNEL: KernelSpec<LanguageModelShape> = KernelSpec {
    kernel_symbol: "transformer_gain_gradient",
    threads_per_block: 1024,
    blocks: |shape| [shape.model_width.div_ceil(32), shape.number_of_norms(), 1],
    ..RMS_NORM_KERNEL
};
