//! The host's ceiling of GEMMs: f32, by `faer`.

use std::hint::black_box;

use kernelgate_numerics::gemm::{Accum, MatMut, MatRef, multiply_f32, multiply_on_all_threads};
use rayon::prelude::*;

use super::fastest::fastest_s;
use crate::workload::random;

/// Operations a second: the faster of one GEMM on all threads and of one GEMM a thread, where no
/// thread waits. Kernels do either.
pub fn flops_per_s() -> f64 {
    const TOGETHER: usize = 2048;
    const APART: usize = 768;
    let mut together = HostGemm::new(TOGETHER);
    let together_s = fastest_s(|| together.run(multiply_on_all_threads));
    let mut apart: Vec<HostGemm> =
        (0..rayon::current_num_threads()).map(|_| HostGemm::new(APART)).collect();
    let apart_s = fastest_s(|| apart.par_iter_mut().for_each(|gemm| gemm.run(multiply)));
    let rate = |size: usize, count: usize, seconds: f64| {
        2.0 * (size as f64).powi(3) * count as f64 / seconds
    };
    rate(TOGETHER, 1, together_s).max(rate(APART, apart.len(), apart_s))
}

fn multiply(c: MatMut<'_, f32>, a: MatRef<'_, f32>, b: MatRef<'_, f32>) {
    multiply_f32(c, Accum::Replace, a, b, 1.0);
}

/// Square matrices of random numbers, and room for their GEMM.
struct HostGemm {
    size: usize,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl HostGemm {
    fn new(size: usize) -> Self {
        let operand = |name| random::normal(0, name, size * size);
        Self { size, a: operand("a"), b: operand("b"), c: vec![0.0; size * size] }
    }

    fn run(&mut self, multiply: fn(MatMut<'_, f32>, MatRef<'_, f32>, MatRef<'_, f32>)) {
        let size = self.size;
        multiply(
            MatMut::from_row_major_slice_mut(&mut self.c, size, size),
            MatRef::from_row_major_slice(&self.a, size, size),
            MatRef::from_row_major_slice(&self.b, size, size),
        );
        black_box(&self.c);
    }
}
