//! GEMMs on the host, in f32 and f64, over row-major views of `faer`.
//!
//! The kernels of `faer` leave AVX state behind ([`clear_upper_avx`]); these functions clear the
//! state.

use faer::Par;
use faer::linalg::matmul::matmul;
pub use faer::{Accum, MatMut, MatRef};

use crate::simd::clear_upper_avx;

/// A matrix of consecutive rows.
pub fn view<T>(values: &[T], rows: usize, columns: usize) -> MatRef<'_, T> {
    MatRef::from_row_major_slice(values, rows, columns)
}

/// Computes `out = factor·a·b`, or adds the product to `out`, on the calling thread.
pub fn multiply_f32(
    out: MatMut<'_, f32>,
    accumulate: Accum,
    a: MatRef<'_, f32>,
    b: MatRef<'_, f32>,
    factor: f32,
) {
    matmul(out, accumulate, a, b, factor, Par::Seq);
    clear_upper_avx();
}

/// Computes `out = factor·a·b`, or adds the product to `out`, on the calling thread.
pub fn multiply_f64(
    out: MatMut<'_, f64>,
    accumulate: Accum,
    a: MatRef<'_, f64>,
    b: MatRef<'_, f64>,
    factor: f64,
) {
    matmul(out, accumulate, a, b, factor, Par::Seq);
    clear_upper_avx();
}

/// Returns `a·b`, row by row, computed on the calling thread.
pub fn product(a: MatRef<'_, f64>, b: MatRef<'_, f64>) -> Vec<f64> {
    let mut out = vec![0.0; a.nrows() * b.ncols()];
    let view = MatMut::from_row_major_slice_mut(&mut out, a.nrows(), b.ncols());
    multiply_f64(view, Accum::Replace, a, b, 1.0);
    out
}

/// `out = a·b` on all of rayon's threads.
pub fn multiply(out: &mut [f32], a: MatRef<'_, f32>, b: MatRef<'_, f32>) {
    let out = MatMut::from_row_major_slice_mut(out, a.nrows(), b.ncols());
    matmul(out, Accum::Replace, a, b, 1.0, Par::rayon(0));
    clear_upper_avx();
    rayon::broadcast(|_| clear_upper_avx());
}
