//! Cross entropy.

use super::row::{SMALL, both_dtypes, element, packet};
use crate::kernel_files::kernel_file;
use crate::transformer::shape::Shape;
use kernelgate_cuda::KernelSpec;

/// The kernels.
pub const KERNELS: &[KernelSpec<Shape>] = &[LOSS, LOSS_FORWARD, MEAN_LOSS];

const THREADS: usize = 256;

/// Losses of tokens, and gradients that overwrite the logits.
pub const LOSS: KernelSpec<Shape> = KernelSpec {
    defines: |shape| {
        let packets = shape.padded().div_ceil(THREADS * packet(shape));
        vec![element(shape), format!("PACKETS={packets}")]
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
pub const LOSS_FORWARD: KernelSpec<Shape> =
    KernelSpec { symbol: "transformer_loss_forward", ..LOSS };

/// Mean loss of each sequence.
pub const MEAN_LOSS: KernelSpec<Shape> =
    KernelSpec { symbol: "transformer_mean_loss", blocks: |shape| [shape.batch, 1, 1], ..LOSS };
