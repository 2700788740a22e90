//! Kernel specification of the rotary position embedding (RoPE).

use super::row::{
    EXAMPLE_MODEL_SHAPE, elements_in_sixteen_bytes, grid_covering_elements, macro_of_element_type,
    shape_in_f32_and_bf16,
};
use crate::kernel_files::source_of_kernel_file;
use crate::transformer::shape::{LanguageModelShape, ROPE_WAVELENGTH_BASE};
use kernelgate_cuda::KernelSpec;

/// The RoPE kernel, in the list of all kernels.
pub const ROPE_KERNELS: &[KernelSpec<LanguageModelShape>] = &[ROTATE_QUERIES_AND_KEYS_KERNEL];

const ROPE_BLOCK_THREADS: usize = 256;

/// Kernel that applies the rotary position embedding to queries and keys, forward or inverse.
pub const ROTATE_QUERIES_AND_KEYS_KERNEL: KernelSpec<LanguageModelShape> = KernelSpec {
    macro_definitions: |shape| vec![macro_of_element_type(shape)],
    constant_macros: |_| vec![("THREADS", ROPE_BLOCK_THREADS)],
    listed_build_parameters: || shape_in_f32_and_bf16(EXAMPLE_MODEL_SHAPE).to_vec(),
    ..KernelSpec::new(
        source_of_kernel_file("transformer/rope"),
        "transformer_rope",
        ROPE_BLOCK_THREADS,
        |shape| {
            grid_covering_elements(
                2 * shape.tokens_in_batch() * shape.model_width,
                ROPE_BLOCK_THREADS,
                elements_in_sixteen_bytes(shape),
            )
        },
    )
};

/// RoPE cosine and sine of each position and pair, `[context, head_dim / 2, 2]`.
pub fn rope_cosine_and_sine_table(shape: &LanguageModelShape) -> Vec<f32> {
    let pairs = shape.elements_per_head() / 2;
    let angles = (0..shape.context_tokens * pairs).map(|at| {
        let (position, pair) = ((at / pairs) as f64, (at % pairs) as f64);
        position * ROPE_WAVELENGTH_BASE.powf(-2.0 * pair / shape.elements_per_head() as f64)
    });
    angles.flat_map(|angle| [angle.cos() as f32, angle.sin() as f32]).collect()
}
