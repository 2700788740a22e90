//! Kernel specifications of the cross-entropy loss.

use super::row::{
    EXAMPLE_MODEL_SHAPE, elements_in_sixteen_bytes, macro_of_element_type, shape_in_f32_and_bf16,
};
use crate::kernel_files::source_of_kernel_file;
use crate::transformer::shape::LanguageModelShape;
use kernelgate_cuda::KernelSpec;

/// Kernels of the cross-entropy loss.
pub const CROSS_ENTROPY_KERNELS: &[KernelSpec<LanguageModelShape>] =
    &[LOSS_AND_LOGIT_GRADIENT_KERNEL, TOKEN_LOSS_KERNEL, MEAN_LOSS_OF_SEQUENCE_KERNEL];

const CROSS_ENTROPY_BLOCK_THREADS: usize = 256;

/// Kernel of the losses of the tokens and of the logits' gradients, which overwrite the logits.
pub const LOSS_AND_LOGIT_GRADIENT_KERNEL: KernelSpec<LanguageModelShape> = KernelSpec {
    macro_definitions: |shape| {
        let packets = shape
            .padded_logit_columns()
            .div_ceil(CROSS_ENTROPY_BLOCK_THREADS * elements_in_sixteen_bytes(shape));
        vec![macro_of_element_type(shape), format!("PACKETS={packets}")]
    },
    constant_macros: |_| vec![("THREADS", CROSS_ENTROPY_BLOCK_THREADS)],
    listed_build_parameters: || {
        let vocabularies = [EXAMPLE_MODEL_SHAPE.vocabulary_size, 1001];
        let shapes = vocabularies.map(|vocabulary| LanguageModelShape {
            vocabulary_size: vocabulary,
            ..EXAMPLE_MODEL_SHAPE
        });
        shapes.into_iter().flat_map(shape_in_f32_and_bf16).collect()
    },
    ..KernelSpec::new(
        source_of_kernel_file("transformer/loss"),
        "transformer_loss",
        CROSS_ENTROPY_BLOCK_THREADS,
        |shape| [shape.tokens_in_batch(), 1, 1],
    )
};

/// Kernel of the losses of the tokens, without gradients.
pub const TOKEN_LOSS_KERNEL: KernelSpec<LanguageModelShape> =
    KernelSpec { kernel_symbol: "transformer_loss_forward", ..LOSS_AND_LOGIT_GRADIENT_KERNEL };

/// Kernel of the mean loss over the tokens of each sequence.
pub const MEAN_LOSS_OF_SEQUENCE_KERNEL: KernelSpec<LanguageModelShape> = KernelSpec {
    kernel_symbol: "transformer_mean_loss",
    blocks: |shape| [shape.batch, 1, 1],
    ..LOSS_AND_LOGIT_GRADIENT_KERNEL
};
