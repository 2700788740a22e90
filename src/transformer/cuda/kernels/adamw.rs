//! Kernel row of the AdamW optimiser.

use super::row::{SMALL, both_dtypes, element_type_macro, grid_covering};
use crate::kernel_files::kernel_file;
use crate::transformer::shape::{LEARNING_RATE, LmShape, WEIGHT_DECAY};
use kernelgate_cuda::KernelSpec;

/// Kernel of AdamW in the list of all kernels.
pub const KERNELS: &[KernelSpec<LmShape>] = &[ADAMW_KERNEL];

const THREADS: usize = 256;

/// Learning rate and weight decay, the last two arguments of the kernel.
pub const ADAMW_RATES: [f32; 2] = [LEARNING_RATE as f32, WEIGHT_DECAY as f32];

/// Kernel of one AdamW step over the arena of parameters.
pub const ADAMW_KERNEL: KernelSpec<LmShape> = KernelSpec {
    defines: |shape| vec![element_type_macro(shape)],
    constants: |_| vec![("THREADS", THREADS)],
    variants: || both_dtypes(SMALL).to_vec(),
    ..KernelSpec::new(kernel_file("transformer/adamw"), "transformer_adamw", THREADS, |shape| {
        grid_covering(shape.parameter_count(), THREADS, 4)
    })
};
