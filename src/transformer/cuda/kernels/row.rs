//! Code that all kernel rows of the language model share.

use crate::transformer::shape::LmShape;
use kernelgate::workload::Dtype;

/// Macro that selects the element type.
pub fn element_type_macro(shape: &LmShape) -> String {
    let name = if shape.dtype == Dtype::Bf16 { "ELEMENT_BF16" } else { "ELEMENT_F32" };
    name.to_owned()
}

/// Number of elements of the dtype in 16 bytes.
pub const fn packet_elements(shape: &LmShape) -> usize {
    16 / shape.dtype.bytes()
}

/// Grid that covers `elements` elements by blocks of `threads` threads, each of which handles
/// `each` elements.
pub const fn grid_covering(elements: usize, threads: usize, each: usize) -> [usize; 3] {
    [elements.div_ceil(threads * each), 1, 1]
}

/// A model shape in both dtypes, f32 and bf16.
pub fn both_dtypes(shape: LmShape) -> [LmShape; 2] {
    [Dtype::Bf16, Dtype::F32].map(|dtype| LmShape { dtype, ..shape })
}

/// Model shape for which the builds are recorded.
pub const SMALL: LmShape = LmShape {
    vocabulary: 10_000,
    d: 768,
    ff: 3072,
    layers: 12,
    heads: 12,
    context: 512,
    batch: 4,
    dtype: Dtype::Bf16,
};
