//! This bench times the three groups of `before.rs` as GPU time, by CUDA events on the stream on
//! which the code enqueues its work.

mod gpu;

use criterion::{criterion_group, criterion_main};
use gpu::Gpu;
use kernelgate::gpu_time::{Criterion, GpuTimeMeasurement};

const SIZES: [usize; 2] = [1 << 20, 1 << 26];

fn fill(c: &mut Criterion) {
    let gpu = Gpu::get();
    let mut group = c.benchmark_group("fill");
    for bytes in SIZES {
        let buffer = gpu.allocate(bytes);
        group.bench_function(bytes.to_string(), |b| {
            b.iter(|| {
                gpu.fill(buffer, bytes);
            });
        });
    }
}

fn copy(c: &mut Criterion) {
    let gpu = Gpu::get();
    let mut group = c.benchmark_group("copy");
    for bytes in SIZES {
        let (source, target) = (gpu.allocate(bytes), gpu.allocate(bytes));
        group.bench_function(bytes.to_string(), |b| {
            b.iter(|| {
                gpu.copy(target, source, bytes);
            });
        });
    }
}

fn scale(c: &mut Criterion) {
    let gpu = Gpu::get();
    let mut group = c.benchmark_group("scale");
    for bytes in SIZES {
        let buffer = gpu.allocate(bytes);
        group.bench_function(bytes.to_string(), |b| {
            b.iter(|| {
                gpu.scale(buffer, bytes);
            });
        });
    }
}

criterion_group! {
    name = benches;
    config = criterion::Criterion::default()
        .with_measurement(GpuTimeMeasurement::time_on_stream(Gpu::get().stream()));
    targets = fill, copy, scale
}
criterion_main!(benches);
