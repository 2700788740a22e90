//! Kernel specifications of the token embedding and of its gradient.

use super::row::{
    EXAMPLE_MODEL_SHAPE, grid_covering_elements, macro_of_element_type, shape_in_f32_and_bf16,
};
use crate::kernel_files::source_of_kernel_file;
use crate::transformer::shape::LanguageModelShape;
use kernelgate_cuda::KernelSpec;

/// Kernels of the token embedding and of its gradient.
pub const EMBEDDING_KERNELS: &[KernelSpec<LanguageModelShape>] = &[
    TOKEN_EMBEDDING_KERNEL,
    FIXED_ORDER_EMBEDDING_GRADIENT_KERNEL,
    ATOMIC_EMBEDDING_GRADIENT_KERNEL,
];

const EMBEDDING_BLOCK_THREADS: usize = 256;

/// Number of groups of four columns that one lane of the embedding gradient kernel sums.
const COLUMN_QUADS_PER_LANE: usize = 6;

/// Number of tokens that a block of the embedding gradient kernel holds in shared memory.
const TOKENS_IN_SHARED_MEMORY_PER_BLOCK: usize = 2048;

/// Kernel that copies the embedding row of each token into the residual stream.
pub const TOKEN_EMBEDDING_KERNEL: KernelSpec<LanguageModelShape> = KernelSpec {
    macro_definitions: |shape| vec![macro_of_element_type(shape)],
    constant_macros: |_| {
        vec![
            ("THREADS", EMBEDDING_BLOCK_THREADS),
            ("QUADS", COLUMN_QUADS_PER_LANE),
            ("TOKENS", TOKENS_IN_SHARED_MEMORY_PER_BLOCK),
        ]
    },
    listed_build_parameters: || shape_in_f32_and_bf16(EXAMPLE_MODEL_SHAPE).to_vec(),
    ..KernelSpec::new(
        source_of_kernel_file("transformer/embedding"),
        "transformer_embed",
        EMBEDDING_BLOCK_THREADS,
        |shape| {
            grid_covering_elements(
                shape.tokens_in_batch() * shape.model_width,
                EMBEDDING_BLOCK_THREADS,
                4,
            )
        },
    )
};

/// Kernel that computes the whole gradient of the embedding table in a fixed order of additions, so
/// every launch gives the same bits.
pub const FIXED_ORDER_EMBEDDING_GRADIENT_KERNEL: KernelSpec<LanguageModelShape> = KernelSpec {
    kernel_symbol: "transformer_embedding_gradient",
    blocks: |shape| {
        [
            shape.vocabulary_size.div_ceil(EMBEDDING_BLOCK_THREADS / 32),
            shape.model_width.div_ceil(4 * 32 * COLUMN_QUADS_PER_LANE),
            1,
        ]
    },
    ..TOKEN_EMBEDDING_KERNEL
};

/// Kernel that adds the embedding's gradient to a zeroed table by atomic additions, in no fixed
/// order.
pub const ATOMIC_EMBEDDING_GRADIENT_KERNEL: KernelSpec<LanguageModelShape> =
    KernelSpec { kernel_symbol: "transformer_embedding_gradient_atomic", ..TOKEN_EMBEDDING_KERNEL };
