//! Cross entropy.

use super::row::{SMALL, both_dtypes, element_type_macro, packet_elements};
use crate::kernel_files::kernel_file;
use crate::transformer::shape::Shape;
use kernelgate_cuda::KernelSpec;

/// The kernels.
pub const KERNELS: &[KernelSpec<Shape>] = &[LOSS_KERNEL, LOSS_FORWARD_KERNEL, MEAN_LOSS_KERNEL];

const THREADS: usize = 256;

/// Losses of tokens, and gradients that overwrite the logits.
pub const LOSS_KERNEL: KernelSpec<Shape> = KernelSpec {
    defines: |shape| {
        let packets = shape.padded().div_ceil(THREADS * packet_elements(shape));
        vec![element_type_macro(shape), format!("PACKETS={packets}")]
    },
    constants: |_| vec![("THREADS", THREADS)],
    variants: || {
        let vocabularies = [SMALL.vocabulary, 1001];
        let shapes = vocabularies.map(|vocabulary| Shape { vocabulary, ..SMALL });
        shapes.into_iter().flat_map(both_dtypes).collect()
    },
    ..KernelSpec::new(
        kernel_file("transformer/loss", include_str!("../../../../kernels/transformer/loss.cu")),
        "transformer_loss",
        THREADS,
        |shape| [shape.tokens(), 1, 1],
    )
};

/// Losses of tokens.
pub const LOSS_FORWARD_KERNEL: KernelSpec<Shape> =
    KernelSpec { symbol: "transformer_loss_forward", ..LOSS_KERNEL };

/// Mean loss of each sequence.
pub const MEAN_LOSS_KERNEL: KernelSpec<Shape> = KernelSpec {
    symbol: "transformer_mean_loss",
    blocks: |shape| [shape.batch, 1, 1],
    ..LOSS_KERNEL
};
