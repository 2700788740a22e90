//! Kernel rows of SwiGLU and its gradient.

use super::row::{SMALL, both_dtypes, element_type_macro, grid_covering, packet_elements};
use crate::kernel_files::kernel_file;
use crate::transformer::shape::LmShape;
use kernelgate_cuda::KernelSpec;

/// Kernels of SwiGLU.
pub const KERNELS: &[KernelSpec<LmShape>] = &[SWIGLU_KERNEL, SWIGLU_BACKWARD_KERNEL];

const THREADS: usize = 256;

/// Number of 16-byte packets that a thread handles.
const PACKETS_PER_THREAD: usize = 2;

/// Kernel that computes the hidden layer from gates and ups.
pub const SWIGLU_KERNEL: KernelSpec<LmShape> = KernelSpec {
    defines: |shape| vec![element_type_macro(shape)],
    constants: |_| vec![("THREADS", THREADS), ("PACKETS", PACKETS_PER_THREAD)],
    variants: || both_dtypes(SMALL).to_vec(),
    ..KernelSpec::new(kernel_file("transformer/swiglu"), "transformer_swiglu", THREADS, |shape| {
        grid_covering(
            shape.token_count() * shape.ff,
            THREADS,
            PACKETS_PER_THREAD * packet_elements(shape),
        )
    })
};

/// Kernel that computes the gradients of gates and ups.
pub const SWIGLU_BACKWARD_KERNEL: KernelSpec<LmShape> =
    KernelSpec { symbol: "transformer_swiglu_backward", ..SWIGLU_KERNEL };
