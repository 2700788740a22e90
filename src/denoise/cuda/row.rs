//! Data that all rows of the denoise family share: parameters of builds and grids, and the models
//! for which there are builds.

use crate::denoise::model::{ACTION_COLUMNS, ExpertModel, PI05_MODEL, TINY_MODEL};
use crate::kernel_files::kernel_file;
use kernelgate_cuda::KernelSpec;

/// Parameters on which the builds and grids of kernels depend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchItems {
    /// The model of the action expert.
    pub model: ExpertModel,
    /// Number of rows or elements of a layer, as the kernel counts them.
    pub items: usize,
    /// Number of layers that one launch computes.
    pub layers: usize,
}

/// Threads of a block, in all kernels but the persistent one.
pub const THREADS: usize = 256;

/// Declares a kernel of the family that has one build for all models.
pub const fn denoise_kernel(
    file: &'static str,
    symbol: &'static str,
    blocks: fn(&LaunchItems) -> [usize; 3],
) -> KernelSpec<LaunchItems> {
    KernelSpec {
        constants: |_| vec![("THREADS", THREADS)],
        variants: || vec![LaunchItems { model: PI05_MODEL, items: 1, layers: 1 }],
        ..KernelSpec::new(kernel_file(file), symbol, THREADS, blocks)
    }
}

/// Declares a kernel of the family that is compiled for a model. The kernel sets the shared-memory
/// carve-out to 100 %, so that its blocks and those of the next kernel can be co-resident.
pub const fn kernel_compiled_per_model(
    file: &'static str,
    symbol: &'static str,
    blocks: fn(&LaunchItems) -> [usize; 3],
) -> KernelSpec<LaunchItems> {
    KernelSpec {
        defines: |items| {
            fused_model_macro(&items.model).map(|define| define.to_owned()).into_iter().collect()
        },
        constants: |items| model_macros_and(items, &[("THREADS", THREADS)]),
        whole_shared: true,
        variants: || {
            [PI05_MODEL, TINY_MODEL]
                .map(|model| LaunchItems { model, items: 1, layers: 1 })
                .to_vec()
        },
        ..denoise_kernel(file, symbol, blocks)
    }
}

/// Macros of `kernels/denoise/model.cuh`, followed by `others`.
pub fn model_macros_and(
    items: &LaunchItems,
    others: &[(&'static str, usize)],
) -> Vec<(&'static str, usize)> {
    let ExpertModel { width, mlp, heads, head_dim, .. } = items.model;
    let model = [
        ("WIDTH", width),
        ("MLP", mlp),
        ("HEADS", heads),
        ("HEAD_DIM", head_dim),
        ("ACTION", ACTION_COLUMNS),
    ];
    [&model, others].concat()
}

/// Grid with one block for each row.
pub fn a_row_a_block(items: &LaunchItems) -> [usize; 3] {
    [items.items, 1, items.layers]
}

/// Macro that selects a model in the fused kernels, for any depth; `None` for a model without a
/// build.
pub fn fused_model_macro(model: &ExpertModel) -> Option<&'static str> {
    let same = |known: &ExpertModel| {
        ExpertModel { name: model.name, depth: model.depth, ..*known } == *model
    };
    [(PI05_MODEL, "MODEL=Pi05"), (TINY_MODEL, "MODEL=Tiny")]
        .into_iter()
        .find(|(known, _)| same(known))
        .map(|(_, define)| define)
}
