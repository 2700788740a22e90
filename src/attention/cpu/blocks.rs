//! Division of the CPU's work: each task computes a block of queries, with tiles of scores in cache
//! and single-threaded GEMMs.

use crate::parallel;
use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, multiply_f32};

/// Number of queries that one CPU task computes.
pub const QUERIES_PER_BLOCK: usize = 256;
/// Number of keys in a tile of scores.
pub const KEYS_PER_TILE: usize = 64;
/// Number of scores in a tile, which takes 64 KiB.
pub const SCORES_PER_TILE: usize = QUERIES_PER_BLOCK * KEYS_PER_TILE;

/// Views the first `rows` rows of a row-major slice as a matrix.
pub fn matrix(values: &[f32], rows: usize, columns: usize) -> MatRef<'_, f32> {
    MatRef::from_row_major_slice(&values[..rows * columns], rows, columns)
}

/// Computes `out = factor · a b`, or adds it to `out`, on the calling thread.
pub fn single_thread_gemm(
    out: &mut [f32],
    accumulate: Accum,
    a: MatRef<'_, f32>,
    b: MatRef<'_, f32>,
    factor: f32,
) {
    let out = MatMut::from_row_major_slice_mut(out, a.nrows(), b.ncols());
    multiply_f32(out, accumulate, a, b, factor);
}

/// Calls `f(head, row, block)` in parallel for blocks of at most [`QUERIES_PER_BLOCK`] rows of a
/// tensor `[heads, s, width]`. The argument `row` counts from the start of the tensor.
pub fn for_row_blocks(
    out: &mut [f32],
    s: usize,
    width: usize,
    f: &(dyn Fn(usize, usize, &mut [f32]) + Sync),
) {
    let heads = out.chunks_mut(s * width).enumerate();
    let blocks = heads.flat_map(|(head, out)| {
        let blocks = out.chunks_mut(QUERIES_PER_BLOCK * width).enumerate();
        blocks.map(move |(block, out)| (head, head * s + block * QUERIES_PER_BLOCK, out))
    });
    parallel::for_each_task(blocks.collect(), &|_, (head, row, out)| f(head, row, out));
}
