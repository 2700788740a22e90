//! Kernel row of the rotary position embedding (RoPE).

use super::row::{SMALL, both_dtypes, element_type_macro, grid_covering, packet_elements};
use crate::kernel_files::kernel_file;
use crate::transformer::shape::{LmShape, ROPE_BASE};
use kernelgate_cuda::KernelSpec;

/// Kernel of RoPE in the list of all kernels.
pub const KERNELS: &[KernelSpec<LmShape>] = &[ROPE_KERNEL];

const THREADS: usize = 256;

/// Kernel that rotates queries and keys.
pub const ROPE_KERNEL: KernelSpec<LmShape> = KernelSpec {
    defines: |shape| vec![element_type_macro(shape)],
    constants: |_| vec![("THREADS", THREADS)],
    variants: || both_dtypes(SMALL).to_vec(),
    ..KernelSpec::new(kernel_file("transformer/rope"), "transformer_rope", THREADS, |shape| {
        grid_covering(2 * shape.token_count() * shape.d, THREADS, packet_elements(shape))
    })
};

/// Cosine and sine of each angle, `[context, head_dim / 2, 2]`.
pub fn rotary_table(shape: &LmShape) -> Vec<f32> {
    let pairs = shape.head_dim() / 2;
    let angles = (0..shape.context * pairs).map(|at| {
        let (position, pair) = ((at / pairs) as f64, (at % pairs) as f64);
        position * ROPE_BASE.powf(-2.0 * pair / shape.head_dim() as f64)
    });
    angles.flat_map(|angle| [angle.cos() as f32, angle.sin() as f32]).collect()
}
