//! The device's measured ceilings, and the time they allow for declared work.
//!
//! Bandwidth depends on where the working set lives, so it is measured at several sizes and interpolated between them: a case whose
//! data fits a cache is held against that cache. Fractions are not clamped: above 100 % is a finding.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use pulp::Arch;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::simd::leave_avx;
use crate::workload::{Unit, Work, random};

/// Measured ceilings of a device.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Bandwidths by working set, smallest first.
    pub bandwidth: Vec<Bandwidth>,
    /// Operations a second, by unit and dtype ("matmul f32").
    pub flops_per_s: BTreeMap<String, f64>,
}

/// Bandwidths with one working set: all bytes that the pass touches.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Bytes touched.
    pub working_set_bytes: u64,
    /// Bytes a second when everything is read.
    pub read: f64,
    /// Bytes a second when half is read and half is written, both counted.
    pub copy: f64,
    /// Bytes a second when everything is written.
    pub write: f64,
}

/// The time that the ceilings allow, and which ceiling sets it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Bound {
    /// Nanoseconds a launch.
    pub time_ns: f64,
    /// "memory", or the unit: "matmul f32".
    pub by: String,
}

impl Bound {
    /// How much of the limit a time reaches: 1 is the limit.
    pub fn fraction(&self, elapsed_ns: f64) -> f64 {
        self.time_ns / elapsed_ns
    }
}

impl Limits {
    /// The least time for the work: the largest of memory and each unit. Units whose ceiling was not measured do not bound.
    pub fn bound(&self, work: &Work) -> Option<Bound> {
        let mut bounds = Vec::new();
        if let Some(time_ns) = self.memory_ns(work.read_bytes, work.write_bytes) {
            bounds.push(Bound { time_ns, by: "memory".to_owned() });
        }
        for flops in &work.flops {
            let key = format!("{} {}", flops.unit.name(), flops.dtype.name());
            if let Some(rate) = self.flops_per_s.get(&key) {
                bounds.push(Bound { time_ns: flops.count as f64 / rate * 1e9, by: key });
            }
        }
        bounds.into_iter().filter(|bound| bound.time_ns > 0.0).max_by(|a, b| a.time_ns.total_cmp(&b.time_ns))
    }

    /// Reads cost what the read pass measured; writes beside reads cost what a copy takes beyond its reads.
    fn memory_ns(&self, read_bytes: u64, write_bytes: u64) -> Option<f64> {
        let at = self.bandwidth_at(read_bytes + write_bytes)?;
        let beside_reads = 2.0 / at.copy - 1.0 / at.read;
        let write_s = if read_bytes == 0 || beside_reads <= 0.0 { 1.0 / at.write } else { beside_reads };
        Some((read_bytes as f64 / at.read + write_bytes as f64 * write_s) * 1e9)
    }

    /// Bandwidths for a working set, by linear interpolation of seconds a byte over the logarithm of the size.
    fn bandwidth_at(&self, working_set_bytes: u64) -> Option<Bandwidth> {
        let (first, last) = (*self.bandwidth.first()?, *self.bandwidth.last()?);
        let above = self.bandwidth.iter().position(|measured| measured.working_set_bytes >= working_set_bytes);
        let (low, high) = match above {
            Some(0) => (first, first),
            Some(i) => (self.bandwidth[i - 1], self.bandwidth[i]),
            None => (last, last),
        };
        if low.working_set_bytes == high.working_set_bytes {
            return Some(low);
        }
        let log = |bytes: u64| (bytes as f64).ln();
        let share =
            (log(working_set_bytes) - log(low.working_set_bytes)) / (log(high.working_set_bytes) - log(low.working_set_bytes));
        let mix = |low: f64, high: f64| 1.0 / ((1.0 - share) / low + share / high);
        Some(Bandwidth {
            working_set_bytes,
            read: mix(low.read, high.read),
            copy: mix(low.copy, high.copy),
            write: mix(low.write, high.write),
        })
    }

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

    /// The ceilings in one line, at the largest working set.
    pub fn summary(&self) -> String {
        let mut parts = Vec::new();
        if let Some(last) = self.bandwidth.last() {
            let gb = |rate: f64| rate / 1e9;
            parts.push(format!("read {:.1} GB/s, copy {:.1} GB/s, write {:.1} GB/s", gb(last.read), gb(last.copy), gb(last.write)));
        }
        parts.extend(self.flops_per_s.iter().map(|(unit, rate)| format!("{unit} {:.1} GFLOP/s", rate / 1e9)));
        parts.join(", ")
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Dtype;

    fn limits() -> Limits {
        let at = |working_set_bytes, scale: f64| Bandwidth {
            working_set_bytes,
            read: 4e9 * scale,
            copy: 4e9 * scale,
            write: 2e9 * scale,
        };
        Limits { bandwidth: vec![at(1000, 4.0), at(1_000_000, 1.0)], flops_per_s: BTreeMap::from([("matmul f32".to_owned(), 1e9)]) }
    }

    #[test]
    fn memory_bounds_by_reads_and_writes() {
        let bound = |read, write| limits().bound(&Work::bytes(read, write)).unwrap();
        // 4 GB/s read; a copy at 4 GB/s leaves 4 GB/s for its writes.
        assert_eq!(bound(4_000_000, 0), Bound { time_ns: 1e6, by: "memory".to_owned() });
        assert!((bound(4_000_000, 4_000_000).time_ns - 2e6).abs() < 1e-3);
        // Writes alone are held against the write pass.
        assert!((bound(0, 4_000_000).time_ns - 2e6).abs() < 1e-3);
    }

    #[test]
    fn small_working_sets_are_held_against_the_cache() {
        let rate = |bytes: u64| bytes as f64 / limits().bound(&Work::bytes(bytes, 0)).unwrap().time_ns;
        assert!((rate(500) - 16.0).abs() < 1e-9);
        assert!((rate(10_000_000) - 4.0).abs() < 1e-9);
        let between = rate(31_623);
        assert!(between > 4.0 && between < 16.0, "{between}");
    }

    #[test]
    fn the_slowest_unit_bounds_and_unmeasured_units_do_not() {
        let work = Work::bytes(4, 0).with_flops(Unit::Matmul, Dtype::F32, 5_000).with_flops(Unit::Vector, Dtype::F32, u64::MAX);
        assert_eq!(limits().bound(&work), Some(Bound { time_ns: 5000.0, by: "matmul f32".to_owned() }));
        assert_eq!(Limits::default().bound(&work), None);
        assert_eq!(limits().bound(&Work::default()), None);
    }
}
