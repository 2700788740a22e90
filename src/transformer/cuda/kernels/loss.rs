//! Kernel rows of the cross entropy.

use super::row::{SMALL, both_dtypes, element_type_macro, packet_elements};
use crate::kernel_files::kernel_file;
use crate::transformer::shape::LmShape;
use kernelgate_cuda::KernelSpec;

/// Kernels of the cross entropy.
pub const KERNELS: &[KernelSpec<LmShape>] = &[LOSS_KERNEL, LOSS_FORWARD_KERNEL, MEAN_LOSS_KERNEL];

const THREADS: usize = 256;

/// Kernel of the tokens' losses and of the gradients, which overwrite the logits.
pub const LOSS_KERNEL: KernelSpec<LmShape> = KernelSpec {
    defines: |shape| {
        let packets = shape.padded_vocabulary().div_ceil(THREADS * packet_elements(shape));
        vec![element_type_macro(shape), format!("PACKETS={packets}")]
    },
    constants: |_| vec![("THREADS", THREADS)],
    variants: || {
        let vocabularies = [SMALL.vocabulary, 1001];
        let shapes = vocabularies.map(|vocabulary| LmShape { vocabulary, ..SMALL });
        shapes.into_iter().flat_map(both_dtypes).collect()
    },
    ..KernelSpec::new(kernel_file("transformer/loss"), "transformer_loss", THREADS, |shape| {
        [shape.token_count(), 1, 1]
    })
};

/// Kernel of the tokens' losses alone.
pub const LOSS_FORWARD_KERNEL: KernelSpec<LmShape> =
    KernelSpec { symbol: "transformer_loss_forward", ..LOSS_KERNEL };

/// Kernel of the mean loss of each sequence.
pub const MEAN_LOSS_KERNEL: KernelSpec<LmShape> = KernelSpec {
    symbol: "transformer_mean_loss",
    blocks: |shape| [shape.batch, 1, 1],
    ..LOSS_KERNEL
};
