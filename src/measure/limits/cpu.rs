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

fn measure_matmul_f32() -> f64 {
    const SIZE: usize = 2048;
    let operand = |name| random::normal(0, name, SIZE * SIZE);
    let (a, b, mut c) = (operand("a"), operand("b"), vec![0f32; SIZE * SIZE]);
    let seconds = fastest_s(|| {
        matmul(
            MatMut::from_row_major_slice_mut(&mut c, SIZE, SIZE),
            Accum::Replace,
            MatRef::from_row_major_slice(&a, SIZE, SIZE),
            MatRef::from_row_major_slice(&b, SIZE, SIZE),
            1.0,
            Par::rayon(0),
        );
        black_box(&c);
    });
    leave_avx();
    rayon::broadcast(|_| leave_avx());
    2.0 * (SIZE as f64).powi(3) / seconds
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
