//! The common part of the family's rows: parameters of builds and grids, and the models that have
//! builds.

use crate::denoise::model::{ACTION_COLUMNS, Model, PI05_MODEL, TINY};
use crate::kernel_files::kernel_file;
use kernelgate_cuda::KernelSpec;

/// The parameters of builds and grids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Items {
    /// The expert.
    pub model: Model,
    /// Rows or elements, as the kernel counts, of a layer.
    pub items: usize,
    /// Layers that one launch computes.
    pub layers: usize,
}

/// Threads a block of all kernels but the persistent one.
pub const THREADS: usize = 256;

/// A kernel of the family that is the same for every model.
pub const fn kernel(
    file: &'static str,
    text: &'static str,
    symbol: &'static str,
    blocks: fn(&Items) -> [usize; 3],
) -> KernelSpec<Items> {
    KernelSpec {
        constants: |_| vec![("THREADS", THREADS)],
        variants: || vec![Items { model: PI05_MODEL, items: 1, layers: 1 }],
        ..KernelSpec::new(kernel_file(file, text), symbol, THREADS, blocks)
    }
}

/// A kernel of the family that is compiled for a model. Blocks of one kernel and of the next are
/// co-resident: both set the shared-memory carve-out to 100 %.
pub const fn model_kernel(
    file: &'static str,
    text: &'static str,
    symbol: &'static str,
    blocks: fn(&Items) -> [usize; 3],
) -> KernelSpec<Items> {
    KernelSpec {
        defines: |items| {
            fused_model_macro(&items.model).map(|define| define.to_owned()).into_iter().collect()
        },
        constants: |items| with_model(items, &[("THREADS", THREADS)]),
        whole_shared: true,
        variants: || [PI05_MODEL, TINY].map(|model| Items { model, items: 1, layers: 1 }).to_vec(),
        ..kernel(file, text, symbol, blocks)
    }
}

/// The numbers of `kernels/denoise/model.cuh`, and others.
pub fn with_model(items: &Items, others: &[(&'static str, usize)]) -> Vec<(&'static str, usize)> {
    let Model { width, mlp, heads, head_dim, .. } = items.model;
    let model = [
        ("WIDTH", width),
        ("MLP", mlp),
        ("HEADS", heads),
        ("HEAD_DIM", head_dim),
        ("ACTION", ACTION_COLUMNS),
    ];
    [&model, others].concat()
}

/// A row a block.
pub fn a_row_a_block(items: &Items) -> [usize; 3] {
    [items.items, 1, items.layers]
}

/// The macro that selects a model in the fused kernels, for any depth; `None` for a model without a
/// build.
pub fn fused_model_macro(model: &Model) -> Option<&'static str> {
    let same = |known: &Model| Model { name: model.name, depth: model.depth, ..*known } == *model;
    [(PI05_MODEL, "MODEL=Pi05"), (TINY, "MODEL=Tiny")]
        .into_iter()
        .find(|(known, _)| same(known))
        .map(|(_, define)| define)
}
