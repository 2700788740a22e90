//! Token embedding and its gradient.

use super::row::{SMALL, both_dtypes, covering, element};
use crate::kernel_files::kernel_file;
use crate::transformer::shape::Shape;
use kernelgate_cuda::KernelSpec;

/// The kernels.
pub const KERNELS: &[KernelSpec<Shape>] = &[EMBED, GRADIENT, GRADIENT_ATOMIC];

const THREADS: usize = 256;

/// Groups of four columns that a lane of the gradient kernel adds up.
const QUADS: usize = 6;

/// Tokens in shared memory.
const TOKENS: usize = 2048;

/// Rows of the embedding into the residual stream.
pub const EMBED: KernelSpec<Shape> = KernelSpec {
    defines: |shape| vec![element(shape)],
    constants: |_| vec![("THREADS", THREADS), ("QUADS", QUADS), ("TOKENS", TOKENS)],
    variants: || both_dtypes(SMALL).to_vec(),
    ..KernelSpec::new(
        kernel_file(
            "transformer/embedding",
            include_str!("../../../../kernels/transformer/embedding.cu"),
        ),
        "transformer_embed",
        THREADS,
        |shape| covering(shape.tokens() * shape.d, THREADS, 4),
    )
};

/// The whole gradient of the embedding, with the same bits in every run.
pub const GRADIENT: KernelSpec<Shape> = KernelSpec {
    symbol: "transformer_embedding_gradient",
    blocks: |shape| [shape.vocabulary.div_ceil(THREADS / 32), shape.d.div_ceil(4 * 32 * QUADS), 1],
    ..EMBED
};

/// Adds the gradient to zeros, in no fixed order.
pub const GRADIENT_ATOMIC: KernelSpec<Shape> =
    KernelSpec { symbol: "transformer_embedding_gradient_atomic", ..EMBED };
