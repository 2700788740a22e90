//! The host's ceilings: bandwidths with every core, and the fastest matrix product there is here.

use std::hint::black_box;
use std::time::Instant;

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use pulp::Arch;
use rayon::prelude::*;

use super::{Bandwidth, Limits};
use crate::simd::leave_avx;
use crate::workload::{Unit, Work, random};

impl Limits {
    /// Measures those ceilings of the host that bound any of the works: bandwidths at four working sets, matrix products. Takes
    /// about two seconds.
    pub fn measure_cpu(works: &[Work]) -> Self {
        let mut limits = Self::default();
        if works.iter().any(|work| work.total_bytes() > 0) {
            limits.bandwidth = measure_bandwidths();
        }
        if works.iter().any(|work| work.matmul_flops() > 0) {
            limits.flops_per_s.insert(format!("{} f32", Unit::Matmul.name()), measure_matmul_f32());
        }
        limits
    }
}

/// Working sets measured: inside the private caches, around the shared cache, and far beyond it.
const WORKING_SETS: [usize; 4] = [2 << 20, 16 << 20, 128 << 20, 512 << 20];
/// Repetitions of each pass, of which the fastest counts: a ceiling is what the device can do, not what it does on average.
const REPEATS: usize = 5;
/// Time that one repetition should last at least, so that small working sets are passed over many times.
const REPEAT_S: f64 = 0.01;

fn measure_bandwidths() -> Vec<Bandwidth> {
    let floats = WORKING_SETS[WORKING_SETS.len() - 1] / size_of::<f32>();
    let mut buffer = random::normal(0, "bandwidth", 1 << 16).repeat(floats >> 16);
    WORKING_SETS.iter().map(|&bytes| measure_bandwidth(&mut buffer[..bytes / size_of::<f32>()])).collect()
}

fn measure_bandwidth(buffer: &mut [f32]) -> Bandwidth {
    let bytes = size_of_val(buffer);
    let chunk = |len: usize| len.div_ceil(8 * rayon::current_num_threads()).max(1024);
    let read = fastest_s(|| {
        let sum: f32 = buffer.par_chunks(chunk(buffer.len())).map(|part| Arch::new().dispatch(|| sum(part))).sum();
        black_box(sum);
    });
    let half = buffer.len() / 2;
    let (source, target) = buffer.split_at_mut(half);
    let copy = fastest_s(|| {
        target.par_chunks_mut(chunk(half)).zip(source.par_chunks(chunk(half))).for_each(|(to, from)| to.copy_from_slice(from));
        black_box(&target);
    });
    let mut value = 0.5;
    let write = fastest_s(|| {
        value += 1.0;
        let size = chunk(buffer.len());
        buffer.par_chunks_mut(size).for_each(|part| part.fill(value));
        black_box(&buffer);
    });
    let rate = |seconds: f64| bytes as f64 / seconds;
    Bandwidth { working_set_bytes: bytes as u64, read: rate(read), copy: rate(copy), write: rate(write) }
}

/// Sum with enough independent accumulators to be bound by loads, not by additions.
#[inline(always)]
fn sum(values: &[f32]) -> f32 {
    let mut lanes = [0f32; 64];
    for chunk in values.chunks_exact(64) {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += value;
        }
    }
    lanes.iter().sum()
}

/// The faster of one product on all threads and of a product a thread, which no thread waits in: kernels do either.
fn measure_matmul_f32() -> f64 {
    const TOGETHER: usize = 2048;
    const APART: usize = 768;
    let mut together = Product::new(TOGETHER);
    let together_s = fastest_s(|| together.run(Par::rayon(0)));
    let mut apart: Vec<Product> = (0..rayon::current_num_threads()).map(|_| Product::new(APART)).collect();
    let apart_s = fastest_s(|| apart.par_iter_mut().for_each(|product| product.run(Par::Seq)));
    leave_avx();
    rayon::broadcast(|_| leave_avx());
    let rate = |size: usize, count: usize, seconds: f64| 2.0 * (size as f64).powi(3) * count as f64 / seconds;
    rate(TOGETHER, 1, together_s).max(rate(APART, apart.len(), apart_s))
}

/// Square matrices of random numbers and their product.
struct Product {
    size: usize,
    a: Vec<f32>,
    b: Vec<f32>,
    c: Vec<f32>,
}

impl Product {
    fn new(size: usize) -> Self {
        let operand = |name| random::normal(0, name, size * size);
        Self { size, a: operand("a"), b: operand("b"), c: vec![0.0; size * size] }
    }

    fn run(&mut self, par: Par) {
        let size = self.size;
        matmul(
            MatMut::from_row_major_slice_mut(&mut self.c, size, size),
            Accum::Replace,
            MatRef::from_row_major_slice(&self.a, size, size),
            MatRef::from_row_major_slice(&self.b, size, size),
            1.0,
            par,
        );
        black_box(&self.c);
    }
}

/// Seconds of the fastest repetition, after one that does not count.
fn fastest_s(mut pass: impl FnMut()) -> f64 {
    pass();
    let start = Instant::now();
    pass();
    let passes = (REPEAT_S / start.elapsed().as_secs_f64().max(1e-9)).ceil() as usize;
    let mut repetition = || {
        let start = Instant::now();
        (0..passes).for_each(|_| pass());
        start.elapsed().as_secs_f64() / passes as f64
    };
    (0..REPEATS).map(|_| repetition()).fold(f64::INFINITY, f64::min)
}
