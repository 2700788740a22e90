//! How the work is cut: blocks of queries a task, tiles of scores in cache, GEMMs on one thread.

use crate::parallel;
use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, multiply_f32};

/// Queries of a task.
pub const QUERIES: usize = 256;
/// Keys of a tile.
pub const KEYS: usize = 64;
/// Scores of a tile: 64 KiB.
pub const TILE: usize = QUERIES * KEYS;

/// The first `rows` rows of a row-major slice.
pub fn matrix(values: &[f32], rows: usize, columns: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(&values[..rows * columns], rows, columns)
}

/// `out = factor · a b`, or added to it, on this thread.
pub fn gemm(
    out: &mut [f32],
    accumulate: Accum,
    a: MatRef<'_, f32>,
    b: MatRef<'_, f32>,
    factor: f32,
) {
    let out = MatMut::from_row_major_slice_mut(out, a.nrows(), b.ncols());
    multiply_f32(out, accumulate, a, b, factor);
}

/// Calls `f(head, row, block)` for blocks of at most [`QUERIES`] rows of `[heads, s, width]`, in
/// parallel. `row` counts from the start of the tensor.
pub fn for_row_blocks(
    out: &mut [f32],
    s: usize,
    width: usize,
    f: &(dyn Fn(usize, usize, &mut [f32]) + Sync),
) {
    let heads = out.chunks_mut(s * width).enumerate();
    let blocks = heads.flat_map(|(head, out)| {
        let blocks = out.chunks_mut(QUERIES * width).enumerate();
        blocks.map(move |(block, out)| (head, head * s + block * QUERIES, out))
    });
    parallel::for_each_task(blocks.collect(), &|_, (head, row, out)| f(head, row, out));
}
