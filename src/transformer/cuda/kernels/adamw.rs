//! Kernel specification of the AdamW optimiser.

use super::row::{
    EXAMPLE_MODEL_SHAPE, grid_covering_elements, macro_of_element_type, shape_in_f32_and_bf16,
};
use crate::kernel_files::source_of_kernel_file;
use crate::transformer::shape::{ADAMW_LEARNING_RATE, ADAMW_WEIGHT_DECAY, LanguageModelShape};
use kernelgate_cuda::KernelSpec;

/// The AdamW kernel, in the list of all kernels.
pub const ADAMW_KERNELS: &[KernelSpec<LanguageModelShape>] = &[ADAMW_UPDATE_KERNEL];

const ADAMW_BLOCK_THREADS: usize = 256;

/// Learning rate and weight decay, the last two arguments of the AdamW kernel.
pub const ADAMW_LEARNING_RATE_AND_WEIGHT_DECAY: [f32; 2] =
    [ADAMW_LEARNING_RATE as f32, ADAMW_WEIGHT_DECAY as f32];

/// Kernel of one AdamW step over rows of the parameter arena (the tensor of all parameters).
pub const ADAMW_UPDATE_KERNEL: KernelSpec<LanguageModelShape> = KernelSpec {
    macro_definitions: |shape| vec![macro_of_element_type(shape)],
    constant_macros: |_| vec![("THREADS", ADAMW_BLOCK_THREADS)],
    listed_build_parameters: || shape_in_f32_and_bf16(EXAMPLE_MODEL_SHAPE).to_vec(),
    ..KernelSpec::new(
        source_of_kernel_file("transformer/adamw"),
        "transformer_adamw",
        ADAMW_BLOCK_THREADS,
        |shape| grid_covering_elements(shape.number_of_parameters(), ADAMW_BLOCK_THREADS, 4),
    )
};
