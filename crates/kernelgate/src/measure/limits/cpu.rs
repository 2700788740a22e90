//! The host's ceilings: bandwidths with every core and, with the feature `matmul-ceiling`, GEMMs.

use std::hint::black_box;

use pulp::Arch;
use rayon::prelude::*;

use super::fastest::fastest_s;
use super::{Bandwidth, Limits};
use crate::workload::{Work, random};

impl Limits {
    /// Measures those ceilings of the host that bound any of the works: bandwidths at four working
    /// sets, GEMMs. Takes about two seconds.
    pub fn measure_cpu(works: &[Work]) -> Self {
        let mut limits = Self::default();
        if works.iter().any(|work| work.total_bytes() > 0) {
            limits.bandwidth = measure_bandwidths();
        }
        #[cfg(feature = "matmul-ceiling")]
        if works.iter().any(|work| work.matmul_flops() > 0) {
            let unit = crate::workload::Unit::Matmul.name();
            limits.flops_per_s.insert(format!("{unit} f32"), super::cpu_matmul::flops_per_s());
        }
        limits
    }
}

/// Working sets measured: inside the private caches, around the shared cache, and far beyond it.
const WORKING_SETS: [usize; 4] = [2 << 20, 16 << 20, 128 << 20, 512 << 20];
fn measure_bandwidths() -> Vec<Bandwidth> {
    let floats = WORKING_SETS[WORKING_SETS.len() - 1] / size_of::<f32>();
    let mut buffer = random::normal(0, "bandwidth", 1 << 16).repeat(floats >> 16);
    WORKING_SETS
        .iter()
        .map(|&bytes| measure_bandwidth(&mut buffer[..bytes / size_of::<f32>()]))
        .collect()
}

fn measure_bandwidth(buffer: &mut [f32]) -> Bandwidth {
    let bytes = size_of_val(buffer);
    let chunk = |len: usize| len.div_ceil(8 * rayon::current_num_threads()).max(1024);
    let read = fastest_s(|| {
        let sum: f32 = buffer
            .par_chunks(chunk(buffer.len()))
            .map(|part| Arch::new().dispatch(|| sum(part)))
            .sum();
        black_box(sum);
    });
    let half = buffer.len() / 2;
    let (source, target) = buffer.split_at_mut(half);
    let copy = fastest_s(|| {
        target
            .par_chunks_mut(chunk(half))
            .zip(source.par_chunks(chunk(half)))
            .for_each(|(to, from)| to.copy_from_slice(from));
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
    Bandwidth {
        working_set_bytes: bytes as u64,
        read: rate(read),
        copy: rate(copy),
        write: rate(write),
    }
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
