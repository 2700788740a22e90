//! SwiGLU.

use super::row::{SMALL, both_dtypes, covering, element, packet};
use crate::kernel_files::kernel_file;
use crate::transformer::shape::Shape;
use kernelgate_cuda::KernelSpec;

/// The kernels.
pub const KERNELS: &[KernelSpec<Shape>] = &[SWIGLU, BACKWARD];

const THREADS: usize = 256;

/// Packets of 16 bytes a thread.
const PACKETS: usize = 2;

/// The hidden layer from gates and ups.
pub const SWIGLU: KernelSpec<Shape> = KernelSpec {
    defines: |shape| vec![element(shape)],
    constants: |_| vec![("THREADS", THREADS), ("PACKETS", PACKETS)],
    variants: || both_dtypes(SMALL).to_vec(),
    ..KernelSpec::new(
        kernel_file(
            "transformer/swiglu",
            include_str!("../../../../kernels/transformer/swiglu.cu"),
        ),
        "transformer_swiglu",
        THREADS,
        |shape| covering(shape.tokens() * shape.ff, THREADS, PACKETS * packet(shape)),
    )
};

/// Gradients of gates and ups.
pub const BACKWARD: KernelSpec<Shape> =
    KernelSpec { symbol: "transformer_swiglu_backward", ..SWIGLU };
