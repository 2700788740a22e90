//! The kernel source files of `kernels/`, in one table for the kernels of all families.
//!
//! The bench executables embed the table of kernel files, this library does not, so an edited
//! kernel recompiles only `benches/`.

use kernelgate_cuda::Source;
use kernelgate_cuda::compiler::source::NamedKernelFile;

/// Expands to the table of all kernel source files, embedded into the calling crate; `$kernels` is
/// the path of `kernels/` from the calling file.
#[macro_export]
macro_rules! kernel_files {
    ($kernels:literal) => {
        kernelgate_cuda::embedded_files!(
            $kernels,
            "attention/backward_flash_mma.cu",
            "attention/backward_flash_wgmma.cu",
            "attention/backward_naive.cu",
            "attention/forward_flash.cu",
            "attention/forward_flash_decode.cu",
            "attention/forward_flash_mma.cu",
            "attention/forward_flash_wgmma.cu",
            "attention/forward_naive.cu",
            "attention/forward_tiled.cu",
            "attention/ring_barrier.cu",
            "attention/ring_merge.cu",
            "attention/shape.cuh",
            "attention/softmax_vectorized.cu",
            "attention/transpose_values.cu",
            "attention/warp_gemm.cuh",
            "attention/warpgroup/gemm.cuh",
            "attention/warpgroup/gemm_e4m3.cuh",
            "collective/all_reduce_one_shot.cu",
            "collective/all_reduce_two_shot.cu",
            "collective/sum.cuh",
            "denoise/actions.cuh",
            "denoise/fused_attention.cu",
            "denoise/fused_project.cu",
            "denoise/fused_rows.cu",
            "denoise/model.cuh",
            "denoise/panel.cuh",
            "denoise/per_op.cu",
            "denoise/persistent.cu",
            "denoise/persistent.cuh",
            "denoise/persistent_attention.cuh",
            "denoise/skinny_gemm.cuh",
            "denoise/streamed_rows.cu",
            "denoise/units.cuh",
            "mlp/per_op.cu",
            "resnet18/best.cu",
            "resnet18/best.cuh",
            "resnet18/best_stem.cuh",
            "resnet18/fused.cu",
            "resnet18/fused_backward.cu",
            "resnet18/fused_step.cu",
            "resnet18/neurons.cuh",
            "resnet18/packed.cuh",
            "resnet18/per_op.cu",
            "resnet18/spikes.cuh",
            "resnet18/tiles.cuh",
            "resnet18/train.cu",
            "st_bif/backward_replay.cu",
            "st_bif/backward_replay_any.cu",
            "st_bif/backward_saved.cu",
            "st_bif/columns.cuh",
            "st_bif/forward_fused.cu",
            "st_bif/forward_packed.cu",
            "st_bif/forward_per_step.cu",
            "st_bif/forward_vectorized.cu",
            "st_bif/neuron.cuh",
            "transformer/adamw.cu",
            "transformer/embedding.cu",
            "transformer/gemm_rope.cu",
            "transformer/gemm_swiglu.cu",
            "transformer/gemm_swiglu_backward.cu",
            "transformer/loss.cu",
            "transformer/norm.cu",
            "transformer/quads.cuh",
            "transformer/rope.cu",
            "transformer/softmax.cu",
            "transformer/swiglu.cu",
            "transformer/wide_gemm.cuh",
        )
    };
}

/// Unit tests of this library have no bench executable that embeds the kernel files, so the library
/// embeds them for tests.
#[cfg(test)]
const KERNEL_FILES_EMBEDDED_FOR_TESTS: &[NamedKernelFile] = kernel_files!("../kernels");
#[cfg(not(test))]
const KERNEL_FILES_EMBEDDED_FOR_TESTS: &[NamedKernelFile] = &[];

/// Returns the kernel source file of this name in the folder `kernels/`; it may include every
/// header of that folder.
pub const fn source_of_kernel_file(file: &'static str) -> Source {
    Source::from_package_files(file, KERNEL_FILES_EMBEDDED_FOR_TESTS)
}
