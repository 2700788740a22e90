//! Kernel rows of the causal softmax of scores in memory.

use super::row::{SMALL, both_dtypes, element_type_macro};
use crate::kernel_files::kernel_file;
use crate::transformer::shape::LmShape;
use kernelgate::workload::Dtype;
use kernelgate_cuda::KernelSpec;

/// Kernels of the causal softmax.
pub const KERNELS: &[KernelSpec<LmShape>] = &[
    SOFTMAX_KERNEL,
    SOFTMAX_BACKWARD_KERNEL,
    SOFTMAX_OF_F32_KERNEL,
    SOFTMAX_BACKWARD_OF_F32_KERNEL,
];

const THREADS: usize = 128;

/// Kernel that computes probabilities from scores in the dtype.
pub const SOFTMAX_KERNEL: KernelSpec<LmShape> = KernelSpec {
    defines: |shape| vec![element_type_macro(shape), key_quads_macro(shape)],
    constants: |_| vec![("THREADS", THREADS)],
    variants: || both_dtypes(SMALL).to_vec(),
    ..KernelSpec::new(
        kernel_file("transformer/softmax"),
        "transformer_causal_softmax",
        THREADS,
        |shape| [(shape.heads * shape.batch * shape.context).div_ceil(THREADS / 32), 1, 1],
    )
};

/// Kernel that computes gradients of scores in the dtype.
pub const SOFTMAX_BACKWARD_KERNEL: KernelSpec<LmShape> =
    KernelSpec { symbol: "transformer_causal_softmax_backward", ..SOFTMAX_KERNEL };

/// Kernel that computes probabilities from f32 scores.
pub const SOFTMAX_OF_F32_KERNEL: KernelSpec<LmShape> = KernelSpec {
    defines: |shape| {
        vec![element_type_macro(shape), key_quads_macro(shape), "SCORES_F32".to_owned()]
    },
    variants: || vec![LmShape { dtype: Dtype::Bf16, ..SMALL }],
    ..SOFTMAX_KERNEL
};

/// Kernel that computes gradients of f32 scores from f32 gradients of the probabilities.
pub const SOFTMAX_BACKWARD_OF_F32_KERNEL: KernelSpec<LmShape> =
    KernelSpec { symbol: "transformer_causal_softmax_backward", ..SOFTMAX_OF_F32_KERNEL };

/// Macro for the number of groups of four keys that a lane holds.
fn key_quads_macro(shape: &LmShape) -> String {
    format!("QUADS={}", shape.context.div_ceil(4 * 32))
}
