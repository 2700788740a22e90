//! Kernel specifications of the causal softmax of attention scores in memory.

use super::row::{EXAMPLE_MODEL_SHAPE, macro_of_element_type, shape_in_f32_and_bf16};
use crate::kernel_files::source_of_kernel_file;
use crate::transformer::shape::LanguageModelShape;
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;

/// Kernels of the causal softmax, forward and backward.
pub const CAUSAL_SOFTMAX_KERNELS: &[KernelSpec<LanguageModelShape>] = &[
    CAUSAL_SOFTMAX_KERNEL,
    CAUSAL_SOFTMAX_BACKWARD_KERNEL,
    CAUSAL_SOFTMAX_OF_F32_KERNEL,
    CAUSAL_SOFTMAX_BACKWARD_OF_F32_KERNEL,
];

const SOFTMAX_BLOCK_THREADS: usize = 128;

/// Kernel that computes causal softmax probabilities from attention scores in the model's dtype.
pub const CAUSAL_SOFTMAX_KERNEL: KernelSpec<LanguageModelShape> = KernelSpec {
    macro_definitions: |shape| vec![macro_of_element_type(shape), key_quads_per_lane_macro(shape)],
    constant_macros: |_| vec![("THREADS", SOFTMAX_BLOCK_THREADS)],
    listed_build_parameters: || shape_in_f32_and_bf16(EXAMPLE_MODEL_SHAPE).to_vec(),
    ..KernelSpec::new(
        source_of_kernel_file("transformer/softmax"),
        "transformer_causal_softmax",
        SOFTMAX_BLOCK_THREADS,
        |shape| {
            [
                (shape.heads * shape.batch * shape.context_tokens)
                    .div_ceil(SOFTMAX_BLOCK_THREADS / 32),
                1,
                1,
            ]
        },
    )
};

/// Kernel that computes the gradients of attention scores in the model's dtype.
pub const CAUSAL_SOFTMAX_BACKWARD_KERNEL: KernelSpec<LanguageModelShape> =
    KernelSpec { kernel_symbol: "transformer_causal_softmax_backward", ..CAUSAL_SOFTMAX_KERNEL };

/// Kernel that computes causal softmax probabilities from f32 attention scores.
pub const CAUSAL_SOFTMAX_OF_F32_KERNEL: KernelSpec<LanguageModelShape> = KernelSpec {
    macro_definitions: |shape| {
        vec![macro_of_element_type(shape), key_quads_per_lane_macro(shape), "SCORES_F32".to_owned()]
    },
    listed_build_parameters: || {
        vec![LanguageModelShape { dtype: Dtype::Bf16, ..EXAMPLE_MODEL_SHAPE }]
    },
    ..CAUSAL_SOFTMAX_KERNEL
};

/// Kernel that computes the gradients of attention scores from f32 gradients of the probabilities.
pub const CAUSAL_SOFTMAX_BACKWARD_OF_F32_KERNEL: KernelSpec<LanguageModelShape> = KernelSpec {
    kernel_symbol: "transformer_causal_softmax_backward",
    ..CAUSAL_SOFTMAX_OF_F32_KERNEL
};

/// Macro for the number of groups of four keys that one lane of the softmax kernels holds in
/// registers.
fn key_quads_per_lane_macro(shape: &LanguageModelShape) -> String {
    format!("QUADS={}", shape.context_tokens.div_ceil(4 * 32))
}
