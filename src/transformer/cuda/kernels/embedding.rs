//! Kernel rows of the token embedding and its gradient.

use super::row::{SMALL, both_dtypes, element_type_macro, grid_covering};
use crate::kernel_files::kernel_file;
use crate::transformer::shape::LmShape;
use kernelgate_cuda::KernelSpec;

/// Kernels of the token embedding.
pub const KERNELS: &[KernelSpec<LmShape>] =
    &[EMBED_KERNEL, EMBEDDING_GRADIENT_KERNEL, EMBEDDING_GRADIENT_ATOMIC_KERNEL];

const THREADS: usize = 256;

/// Number of groups of four columns that a lane of the gradient kernel sums.
const QUADS_PER_LANE: usize = 6;

/// Number of tokens that the gradient kernel holds in shared memory.
const TOKENS_IN_SHARED_MEMORY: usize = 2048;

/// Kernel that copies rows of the embedding into the residual stream.
pub const EMBED_KERNEL: KernelSpec<LmShape> = KernelSpec {
    defines: |shape| vec![element_type_macro(shape)],
    constants: |_| {
        vec![("THREADS", THREADS), ("QUADS", QUADS_PER_LANE), ("TOKENS", TOKENS_IN_SHARED_MEMORY)]
    },
    variants: || both_dtypes(SMALL).to_vec(),
    ..KernelSpec::new(kernel_file("transformer/embedding"), "transformer_embed", THREADS, |shape| {
        grid_covering(shape.token_count() * shape.d, THREADS, 4)
    })
};

/// Kernel that computes the whole gradient of the embedding, with the same bits in every run.
pub const EMBEDDING_GRADIENT_KERNEL: KernelSpec<LmShape> = KernelSpec {
    symbol: "transformer_embedding_gradient",
    blocks: |shape| {
        [shape.vocabulary.div_ceil(THREADS / 32), shape.d.div_ceil(4 * 32 * QUADS_PER_LANE), 1]
    },
    ..EMBED_KERNEL
};

/// Kernel that adds the gradient to zeros by atomic additions, in no fixed order.
pub const EMBEDDING_GRADIENT_ATOMIC_KERNEL: KernelSpec<LmShape> =
    KernelSpec { symbol: "transformer_embedding_gradient_atomic", ..EMBED_KERNEL };
