//! Helpers that all kernel specifications of the language model share.

use crate::transformer::shape::LanguageModelShape;
use kernelgate::workload::Dtype;

/// Macro that selects the element type of a kernel, f32 or bf16.
pub fn macro_of_element_type(shape: &LanguageModelShape) -> String {
    let name = if shape.dtype == Dtype::Bf16 { "ELEMENT_BF16" } else { "ELEMENT_F32" };
    name.to_owned()
}

/// Number of elements of the model's dtype in 16 bytes.
pub const fn elements_in_sixteen_bytes(shape: &LanguageModelShape) -> usize {
    16 / shape.dtype.bytes_per_element()
}

/// Grid that covers `elements` elements by blocks of `threads` threads, each of which processes
/// `elements_per_thread` elements.
pub const fn grid_covering_elements(
    elements: usize,
    threads: usize,
    elements_per_thread: usize,
) -> [usize; 3] {
    [elements.div_ceil(threads * elements_per_thread), 1, 1]
}

/// Returns a model shape with dtype f32 and with dtype bf16.
pub fn shape_in_f32_and_bf16(shape: LanguageModelShape) -> [LanguageModelShape; 2] {
    [Dtype::Bf16, Dtype::F32].map(|dtype| LanguageModelShape { dtype, ..shape })
}

/// Example model shape for which the kernels are compiled.
pub const EXAMPLE_MODEL_SHAPE: LanguageModelShape = LanguageModelShape {
    vocabulary_size: 10_000,
    model_width: 768,
    swiglu_hidden_width: 3072,
    layers: 12,
    heads: 12,
    context_tokens: 512,
    batch: 4,
    dtype: Dtype::Bf16,
};
