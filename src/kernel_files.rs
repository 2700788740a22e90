//! The headers of `kernels/`, one table for the kernels of all families.

use kernelgate_cuda::Source;
use kernelgate_cuda::compiler::source::Header;

const KERNEL_HEADERS: &[Header] = kernelgate_cuda::headers!(
    "../kernels",
    "attention/shape.cuh",
    "attention/warp_gemm.cuh",
    "attention/warpgroup/gemm.cuh",
    "attention/warpgroup/gemm_e4m3.cuh",
    "collective/sum.cuh",
    "denoise/actions.cuh",
    "denoise/model.cuh",
    "denoise/panel.cuh",
    "denoise/persistent.cuh",
    "denoise/persistent_attention.cuh",
    "denoise/skinny_gemm.cuh",
    "denoise/units.cuh",
    "resnet18/best.cuh",
    "resnet18/best_stem.cuh",
    "resnet18/neurons.cuh",
    "resnet18/packed.cuh",
    "resnet18/spikes.cuh",
    "resnet18/tiles.cuh",
    "st_bif/columns.cuh",
    "st_bif/neuron.cuh",
    "transformer/quads.cuh",
    "transformer/wide_gemm.cuh",
);

/// A source file of the folder `kernels/`, which may include every header of that folder.
pub const fn kernel_file(file: &'static str, text: &'static str) -> Source {
    Source::new(file, text).with_headers(KERNEL_HEADERS)
}
