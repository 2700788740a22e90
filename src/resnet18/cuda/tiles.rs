//! Sizes, builds and grids of the ResNet-18 kernels that compute GEMM tiles by
//! `kernels/resnet18/tiles.cuh`.

use crate::resnet18::definition::ResNetParameters;
use kernelgate::backend::BackendError;
use kernelgate_cuda::{Device, KernelSpec, Source};

/// Parameters that determine the build and the grid of a kernel that computes GEMM tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileKernelParameters {
    /// Number of time steps, for which the kernel is compiled: 4, 8 or 16.
    pub time_steps: usize,
    /// Number of thread blocks of the grid in x and in y.
    pub blocks: [usize; 2],
}

/// Number of threads that compute one GEMM tile together; a block has one, two or four such groups.
pub const THREADS_PER_TILE_GROUP: usize = 128;
/// Number of threads in a block of the tile kernels with two groups.
pub const TWO_GROUP_BLOCK_THREADS: usize = 2 * THREADS_PER_TILE_GROUP;
/// Number of rows and of columns of a GEMM tile, which is also the number of channels in one step
/// of its GEMM. A row of a GEMM tile is one time step of an image at one pixel.
pub const GEMM_TILE_SIDE: usize = 64;
/// Number of steps of a group's GEMM whose operands are in shared memory at the same time.
const GEMM_STEPS_IN_SHARED_MEMORY: usize = 3;
/// Bytes of shared memory of a group: two bf16 operand tiles for each GEMM step in flight.
pub const SHARED_BYTES_PER_TILE_GROUP: usize =
    GEMM_STEPS_IN_SHARED_MEMORY * 2 * GEMM_TILE_SIDE * GEMM_TILE_SIDE * 2;

/// Declares a kernel that computes GEMM tiles in blocks of two groups, compiled for 4, 8 and 16
/// time steps.
pub const fn two_group_tile_kernel(
    source: Source,
    symbol: &'static str,
) -> KernelSpec<TileKernelParameters> {
    KernelSpec {
        macro_definitions: |grid| vec![format!("STEPS={}", grid.time_steps)],
        constant_macros: |_| tile_kernel_macros(TWO_GROUP_BLOCK_THREADS),
        dynamic_shared_bytes: |_| {
            TWO_GROUP_BLOCK_THREADS / THREADS_PER_TILE_GROUP * SHARED_BYTES_PER_TILE_GROUP
        },
        listed_build_parameters: || {
            [4, 8, 16]
                .map(|steps| TileKernelParameters { time_steps: steps, blocks: [1; 2] })
                .to_vec()
        },
        ..KernelSpec::new(source, symbol, TWO_GROUP_BLOCK_THREADS, |grid| {
            [grid.blocks[0], grid.blocks[1], 1]
        })
    }
}

/// Variant of a tile kernel with blocks of four groups, for grids in which every block has a
/// multiprocessor of its own.
pub const fn four_group_variant_of_kernel(
    narrow: KernelSpec<TileKernelParameters>,
) -> KernelSpec<TileKernelParameters> {
    KernelSpec {
        threads_per_block: 2 * TWO_GROUP_BLOCK_THREADS,
        macro_definitions: |grid| vec![format!("STEPS={}", grid.time_steps), "GROUPS=4".to_owned()],
        constant_macros: |_| tile_kernel_macros(2 * TWO_GROUP_BLOCK_THREADS),
        dynamic_shared_bytes: |_| {
            2 * TWO_GROUP_BLOCK_THREADS / THREADS_PER_TILE_GROUP * SHARED_BYTES_PER_TILE_GROUP
        },
        ..narrow
    }
}

/// Returns a function that decides on a device whether the four-group kernel is faster: it fits,
/// and every block has a multiprocessor of its own.
pub fn chooses_four_groups_on_device(
    wide: &KernelSpec<TileKernelParameters>,
    grid: TileKernelParameters,
) -> impl Fn(&Device) -> Result<bool, BackendError> + 'static {
    let wide = *wide;
    move |device| {
        let facts = device.gpu_properties();
        let blocks = grid.blocks[0] * grid.blocks[1];
        let fits = wide
            .reason_gpu_cannot_run_kernel_for(
                &grid,
                &facts.kernel_architecture,
                device.max_shared_bytes_per_block()?,
            )
            .is_none();
        Ok(fits && blocks <= facts.multiprocessor_count as usize)
    }
}

/// Numeric macros of `kernels/resnet18/tiles.cuh`, for blocks of `threads` threads.
pub fn tile_kernel_macros(threads: usize) -> Vec<(&'static str, usize)> {
    vec![("THREADS", threads), ("TILE", GEMM_TILE_SIDE), ("STAGES", GEMM_STEPS_IN_SHARED_MEMORY)]
}

/// Checks that the tile kernels are compiled for a network shape: 4, 8 or 16 time steps, and a
/// width that is a multiple of 64.
pub fn check_tile_kernels_are_compiled(shape: &ResNetParameters) -> Result<(), String> {
    if ![4, 8, 16].contains(&shape.time_steps) {
        return Err("compiled for 4, 8 and 16 time steps".to_owned());
    }
    if !shape.sizes.first_stage_channels.is_multiple_of(GEMM_TILE_SIDE) {
        return Err(format!("a width in multiples of {GEMM_TILE_SIDE}"));
    }
    Ok(())
}
