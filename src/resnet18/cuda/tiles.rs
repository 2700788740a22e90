//! Extents, builds and grids of kernels with the tiles of `kernels/resnet18/tiles.cuh`.

use crate::resnet18::definition::NetworkShape;
use kernelgate::backend::BackendError;
use kernelgate_cuda::{Device, KernelSpec, Source};

/// Parameters that determine a kernel build and its grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileGrid {
    /// Number of time steps, for which the kernel is compiled: 4, 8 or 16.
    pub steps: usize,
    /// Number of blocks of the grid in x and y.
    pub blocks: [usize; 2],
}

/// Number of threads that share a tile; blocks have one, two or four such groups.
pub const THREADS_PER_GROUP: usize = 128;
/// Number of threads in a block, unless a row has its own.
pub const THREADS: usize = 2 * THREADS_PER_GROUP;
/// Number of rows and of columns of a tile, which is also the number of channels in a step of its
/// GEMM. A row is one time step of an image at one pixel.
pub const TILE_SIDE: usize = 64;
/// Number of steps of a group's GEMM whose operands are in shared memory.
const STAGES_AHEAD: usize = 3;
/// Shared memory of a group: stages of two operands in bf16.
pub const SHARED_BYTES_PER_GROUP: usize = STAGES_AHEAD * 2 * TILE_SIDE * TILE_SIDE * 2;

/// Declares a kernel that is launched over tiles: the common part of all rows of one file.
pub const fn tiled_kernel(source: Source, symbol: &'static str) -> KernelSpec<TileGrid> {
    KernelSpec {
        defines: |grid| vec![format!("STEPS={}", grid.steps)],
        constants: |_| tile_constants(THREADS),
        shared_bytes: |_| THREADS / THREADS_PER_GROUP * SHARED_BYTES_PER_GROUP,
        variants: || [4, 8, 16].map(|steps| TileGrid { steps, blocks: [1; 2] }).to_vec(),
        ..KernelSpec::new(source, symbol, THREADS, |grid| [grid.blocks[0], grid.blocks[1], 1])
    }
}

/// Build of a kernel with blocks of four groups, for grids in which every block has a
/// multiprocessor of its own.
pub const fn four_group_build(narrow: KernelSpec<TileGrid>) -> KernelSpec<TileGrid> {
    KernelSpec {
        threads: 2 * THREADS,
        defines: |grid| vec![format!("STEPS={}", grid.steps), "GROUPS=4".to_owned()],
        constants: |_| tile_constants(2 * THREADS),
        shared_bytes: |_| 2 * THREADS / THREADS_PER_GROUP * SHARED_BYTES_PER_GROUP,
        ..narrow
    }
}

/// Whether the wide build of a kernel is faster on a device: it fits, and every block of the grid
/// has a multiprocessor of its own.
pub fn wide_is_faster(
    wide: &KernelSpec<TileGrid>,
    grid: TileGrid,
) -> impl Fn(&Device) -> Result<bool, BackendError> + 'static {
    let wide = *wide;
    move |device| {
        let facts = device.facts();
        let blocks = grid.blocks[0] * grid.blocks[1];
        let fits = wide
            .unmet_requirement_for(&grid, &facts.arch, device.shared_bytes_a_block()?)
            .is_none();
        Ok(fits && blocks <= facts.multiprocessors as usize)
    }
}

/// Macros of `tiles.cuh`, for blocks of `threads` threads.
pub fn tile_constants(threads: usize) -> Vec<(&'static str, usize)> {
    vec![("THREADS", threads), ("TILE", TILE_SIDE), ("STAGES", STAGES_AHEAD)]
}

/// Checks that the kernels are compiled for a shape.
pub fn check_compiled(shape: &NetworkShape) -> Result<(), String> {
    if ![4, 8, 16].contains(&shape.t) {
        return Err("compiled for 4, 8 and 16 time steps".to_owned());
    }
    if !shape.sizes.width.is_multiple_of(TILE_SIDE) {
        return Err(format!("a width in multiples of {TILE_SIDE}"));
    }
    Ok(())
}
