//! GEMMs on the host, in f32 and f64, over row-major views of `faer`.
//!
//! The kernels of `faer` leave AVX state behind ([`clear_upper_avx`]); these functions clear the
//! state.

use faer::Par;
use faer::linalg::matmul::matmul;
pub use faer::{Accum, MatMut, MatRef};

use crate::simd::clear_upper_avx;

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

/// `out = a·b` on all of rayon's threads.
pub fn multiply_on_all_threads(out: MatMut<'_, f32>, a: MatRef<'_, f32>, b: MatRef<'_, f32>) {
    matmul(out, Accum::Replace, a, b, 1.0, Par::rayon(0));
    clear_upper_avx();
    rayon::broadcast(|_| clear_upper_avx());
}
