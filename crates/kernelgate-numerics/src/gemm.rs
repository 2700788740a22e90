//! Matrix multiplication on the host in f32 and f64, over row-major views of the crate `faer`.
//!
//! The functions of this module clear the AVX state that `faer`'s kernels leave in vector registers
//! ([`clear_upper_avx`]).

use faer::Par;
use faer::linalg::matmul::matmul;
pub use faer::{Accum, MatMut, MatRef};

use crate::simd::clear_upper_avx;

/// Returns a slice as a row-major matrix without gaps between its rows.
pub fn row_major_matrix_view<T>(values: &[T], rows: usize, columns: usize) -> MatRef<'_, T> {
    MatRef::from_row_major_slice(values, rows, columns)
}

/// Computes `out = factor·a·b` or `out += factor·a·b` in f32 on the calling thread, as `accumulate`
/// says.
pub fn matmul_f32_on_calling_thread(
    out: MatMut<'_, f32>,
    accumulate: Accum,
    a: MatRef<'_, f32>,
    b: MatRef<'_, f32>,
    factor: f32,
) {
    matmul(out, accumulate, a, b, factor, Par::Seq);
    clear_upper_avx();
}

/// Computes `out = factor·a·b` or `out += factor·a·b` in f64 on the calling thread, as `accumulate`
/// says.
pub fn matmul_f64_on_calling_thread(
    out: MatMut<'_, f64>,
    accumulate: Accum,
    a: MatRef<'_, f64>,
    b: MatRef<'_, f64>,
    factor: f64,
) {
    matmul(out, accumulate, a, b, factor, Par::Seq);
    clear_upper_avx();
}

/// Returns the elements of `a·b` in row-major order, computed in f64 on the calling thread.
pub fn row_major_product_f64(a: MatRef<'_, f64>, b: MatRef<'_, f64>) -> Vec<f64> {
    let mut out = vec![0.0; a.nrows() * b.ncols()];
    let view = MatMut::from_row_major_slice_mut(&mut out, a.nrows(), b.ncols());
    matmul_f64_on_calling_thread(view, Accum::Replace, a, b, 1.0);
    out
}

/// Computes `out = a·b` in f32 on all of rayon's threads; `out` is row-major.
pub fn matmul_f32_on_all_threads(out: &mut [f32], a: MatRef<'_, f32>, b: MatRef<'_, f32>) {
    let out = MatMut::from_row_major_slice_mut(out, a.nrows(), b.ncols());
    matmul(out, Accum::Replace, a, b, 1.0, Par::rayon(0));
    clear_upper_avx();
    rayon::broadcast(|_| clear_upper_avx());
}
