//! Kernel specifications of SwiGLU and of its gradient.

use super::row::{
    EXAMPLE_MODEL_SHAPE, elements_in_sixteen_bytes, grid_covering_elements, macro_of_element_type,
    shape_in_f32_and_bf16,
};
use crate::kernel_files::source_of_kernel_file;
use crate::transformer::shape::LanguageModelShape;
use kernelgate_cuda::KernelSpec;

/// Kernels of SwiGLU.
pub const SWIGLU_KERNELS: &[KernelSpec<LanguageModelShape>] =
    &[SWIGLU_FORWARD_KERNEL, SWIGLU_BACKWARD_KERNEL];

const SWIGLU_BLOCK_THREADS: usize = 256;

/// Number of 16-byte packets that one thread of the SwiGLU kernels processes.
const SWIGLU_PACKETS_PER_THREAD: usize = 2;

/// Kernel that computes the hidden layer `silu(gate)·up` from gates and ups.
pub const SWIGLU_FORWARD_KERNEL: KernelSpec<LanguageModelShape> = KernelSpec {
    macro_definitions: |shape| vec![macro_of_element_type(shape)],
    constant_macros: |_| {
        vec![("THREADS", SWIGLU_BLOCK_THREADS), ("PACKETS", SWIGLU_PACKETS_PER_THREAD)]
    },
    listed_build_parameters: || shape_in_f32_and_bf16(EXAMPLE_MODEL_SHAPE).to_vec(),
    ..KernelSpec::new(
        source_of_kernel_file("transformer/swiglu"),
        "transformer_swiglu",
        SWIGLU_BLOCK_THREADS,
        |shape| {
            grid_covering_elements(
                shape.tokens_in_batch() * shape.swiglu_hidden_width,
                SWIGLU_BLOCK_THREADS,
                SWIGLU_PACKETS_PER_THREAD * elements_in_sixteen_bytes(shape),
            )
        },
    )
};

/// Kernel that computes the gradients of gates and ups from that of the hidden layer.
pub const SWIGLU_BACKWARD_KERNEL: KernelSpec<LanguageModelShape> =
    KernelSpec { kernel_symbol: "transformer_swiglu_backward", ..SWIGLU_FORWARD_KERNEL };
