//! Data that all GPU rungs of the denoise family share: the sizes from which grids and compile-time
//! macros follow, and the models for which kernels are compiled.

use crate::denoise::model::{
    ExpertDimensions, PI05_EXPERT_MODEL, TINY_TEST_MODEL, VALUES_PER_ACTION,
};
use crate::kernel_files::source_of_kernel_file;
use kernelgate_cuda::KernelSpec;

/// Model and sizes from which the compile-time macros and the grid of a denoising kernel follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DenoiseLaunchSizes {
    /// The dimensions of the denoising action expert.
    pub model: ExpertDimensions,
    /// Number of rows or elements of a layer that the launch covers; each kernel counts its own
    /// unit.
    pub rows_or_elements: usize,
    /// Number of transformer layers that one launch computes.
    pub layers_per_launch: usize,
}

/// Threads of a block in all denoising kernels except the persistent and the streamed ones.
pub const DENOISE_BLOCK_THREADS: usize = 256;

/// Declares a denoising kernel that is compiled once for all models.
pub const fn kernel_compiled_for_all_models(
    file: &'static str,
    symbol: &'static str,
    blocks: fn(&DenoiseLaunchSizes) -> [usize; 3],
) -> KernelSpec<DenoiseLaunchSizes> {
    KernelSpec {
        constant_macros: |_| vec![("THREADS", DENOISE_BLOCK_THREADS)],
        listed_build_parameters: || {
            vec![DenoiseLaunchSizes {
                model: PI05_EXPERT_MODEL,
                rows_or_elements: 1,
                layers_per_launch: 1,
            }]
        },
        ..KernelSpec::new(source_of_kernel_file(file), symbol, DENOISE_BLOCK_THREADS, blocks)
    }
}

/// Declares a denoising kernel that is compiled for each model separately. Each per-model kernel
/// sets the shared-memory carve-out to 100 %, so that its blocks and those of the next kernel can
/// be co-resident.
pub const fn kernel_compiled_per_model(
    file: &'static str,
    symbol: &'static str,
    blocks: fn(&DenoiseLaunchSizes) -> [usize; 3],
) -> KernelSpec<DenoiseLaunchSizes> {
    KernelSpec {
        macro_definitions: |items| {
            model_selection_macro(&items.model)
                .map(|define| define.to_owned())
                .into_iter()
                .collect()
        },
        constant_macros: |items| {
            model_dimension_macros_and(items, &[("THREADS", DENOISE_BLOCK_THREADS)])
        },
        uses_max_shared_carveout: true,
        listed_build_parameters: || {
            [PI05_EXPERT_MODEL, TINY_TEST_MODEL]
                .map(|model| DenoiseLaunchSizes {
                    model,
                    rows_or_elements: 1,
                    layers_per_launch: 1,
                })
                .to_vec()
        },
        ..kernel_compiled_for_all_models(file, symbol, blocks)
    }
}

/// Numeric macros of `kernels/denoise/model.cuh` (the model's dimensions), followed by the macros
/// `others`.
pub fn model_dimension_macros_and(
    items: &DenoiseLaunchSizes,
    others: &[(&'static str, usize)],
) -> Vec<(&'static str, usize)> {
    let ExpertDimensions {
        model_width: width,
        feed_forward_width: mlp,
        query_heads: heads,
        head_dim,
        ..
    } = items.model;
    let model = [
        ("WIDTH", width),
        ("MLP", mlp),
        ("HEADS", heads),
        ("HEAD_DIM", head_dim),
        ("ACTION", VALUES_PER_ACTION),
    ];
    [&model, others].concat()
}

/// Grid of a kernel launch with one block for each row of each layer.
pub fn grid_with_one_block_per_row(items: &DenoiseLaunchSizes) -> [usize; 3] {
    [items.rows_or_elements, 1, items.layers_per_launch]
}

/// Macro that selects the model in the fused kernels, for any number of layers; `None` if these
/// kernels are not compiled for the model's dimensions.
pub fn model_selection_macro(model: &ExpertDimensions) -> Option<&'static str> {
    let same = |known: &ExpertDimensions| {
        ExpertDimensions { model_name: model.model_name, layer_count: model.layer_count, ..*known }
            == *model
    };
    [(PI05_EXPERT_MODEL, "MODEL=Pi05"), (TINY_TEST_MODEL, "MODEL=Tiny")]
        .into_iter()
        .find(|(known, _)| same(known))
        .map(|(_, define)| define)
}
