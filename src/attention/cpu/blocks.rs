//! Division of CPU attention into tasks: each task computes a block of queries, with tiles of
//! scores in cache and single-threaded GEMMs.

use crate::parallel;
use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, matmul_f32_on_calling_thread};

/// Maximum number of queries in the block that one CPU attention task computes.
pub const QUERIES_PER_CPU_TASK: usize = 256;
/// Maximum number of keys in the tile of scores that a CPU attention task holds at once.
pub const KEYS_PER_CPU_SCORE_TILE: usize = 64;
/// Number of fp32 scores in the largest tile of CPU attention; they take 64 KiB.
pub const SCORES_PER_CPU_TILE: usize = QUERIES_PER_CPU_TASK * KEYS_PER_CPU_SCORE_TILE;

/// Returns a matrix view of the first `rows` rows of a row-major slice, without a copy.
pub fn view_first_rows_as_matrix(values: &[f32], rows: usize, columns: usize) -> MatRef<'_, f32> {
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
    matmul_f32_on_calling_thread(out, accumulate, a, b, factor);
}

/// Calls `f(head, row, block)` in parallel for each block of at most [`QUERIES_PER_CPU_TASK`] rows
/// of the tensor `out` `[heads, s, width]`. The argument `row` is the index of the block's first
/// row among the rows of all heads.
pub fn for_row_blocks_of_heads_in_parallel(
    out: &mut [f32],
    s: usize,
    width: usize,
    f: &(dyn Fn(usize, usize, &mut [f32]) + Sync),
) {
    let heads = out.chunks_mut(s * width).enumerate();
    let blocks = heads.flat_map(|(head, out)| {
        let blocks = out.chunks_mut(QUERIES_PER_CPU_TASK * width).enumerate();
        blocks.map(move |(block, out)| (head, head * s + block * QUERIES_PER_CPU_TASK, out))
    });
    parallel::run_tasks_in_parallel(blocks.collect(), &|_, (head, row, out)| f(head, row, out));
}
