//! Kernel rows of RMSNorm and its gradients.

use super::row::{SMALL, both_dtypes, element_type_macro};
use crate::kernel_files::kernel_file;
use crate::transformer::shape::LmShape;
use kernelgate_cuda::KernelSpec;

/// Kernels of RMSNorm.
pub const KERNELS: &[KernelSpec<LmShape>] =
    &[NORM_KERNEL, NORM_ADD_KERNEL, NORM_BACKWARD_KERNEL, GAIN_GRADIENT_KERNEL];

/// Number of threads that compute one row.
const THREADS_PER_NORM_ROW: usize = 128;

/// Number of threads in a block of the backward pass.
const THREADS: usize = 512;

/// Maximum number of blocks of the backward pass: two on each multiprocessor of an H100, because
/// every block adds a row of partial sums.
const MAX_BLOCKS: usize = 264;

/// Number of blocks of the backward pass, each with a row of partial gain gradients.
pub fn norm_backward_blocks(shape: &LmShape) -> usize {
    MAX_BLOCKS.min(shape.token_count().div_ceil(THREADS / THREADS_PER_NORM_ROW))
}

/// Kernel of RMSNorm of rows.
pub const NORM_KERNEL: KernelSpec<LmShape> = KernelSpec {
    defines: |shape| {
        vec![
            element_type_macro(shape),
            format!("QUADS={}", shape.d.div_ceil(4 * THREADS_PER_NORM_ROW)),
        ]
    },
    constants: |_| vec![("THREADS", THREADS), ("GROUP", THREADS_PER_NORM_ROW)],
    variants: || {
        let widths = [SMALL.d, 1600];
        widths.into_iter().flat_map(|d| both_dtypes(LmShape { d, ..SMALL })).collect()
    },
    ..KernelSpec::new(
        kernel_file("transformer/norm"),
        "transformer_norm",
        THREADS_PER_NORM_ROW,
        |shape| [shape.token_count(), 1, 1],
    )
};

/// Kernel of RMSNorm of the sum of the residual stream and a branch.
pub const NORM_ADD_KERNEL: KernelSpec<LmShape> =
    KernelSpec { symbol: "transformer_norm_add", ..NORM_KERNEL };

/// Kernel of the gradient of the residual stream, and of partial gradients of the gain.
pub const NORM_BACKWARD_KERNEL: KernelSpec<LmShape> = KernelSpec {
    symbol: "transformer_norm_backward",
    threads: THREADS,
    blocks: |shape| [norm_backward_blocks(shape), 1, 1],
    ..NORM_KERNEL
};

/// Kernel that sums the partial gradients of all gains, `[gains, norm_blocks, d]`.
pub const GAIN_GRADIENT_KERNEL: KernelSpec<LmShape> = KernelSpec {
    symbol: "transformer_gain_gradient",
    threads: 1024,
    blocks: |shape| [shape.d.div_ceil(32), shape.norm_count(), 1],
    ..NORM_KERNEL
};
