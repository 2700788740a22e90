//! This bench times CUDA code in three Criterion groups by the host's clock, so every time includes
//! the host's launch and wait.

mod gpu;

use criterion::{Criterion, criterion_group, criterion_main};
use gpu::Gpu;

const SIZES: [usize; 2] = [1 << 20, 1 << 26];

fn fill(c: &mut Criterion) {
    let gpu = Gpu::get();
    let mut group = c.benchmark_group("fill");
    for bytes in SIZES {
        let buffer = gpu.allocate(bytes);
        group.bench_function(bytes.to_string(), |b| {
            b.iter(|| {
                gpu.fill(buffer, bytes);
                gpu.wait();
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
                gpu.wait();
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
                gpu.wait();
            });
        });
    }
}

criterion_group!(benches, fill, copy, scale);
criterion_main!(benches);
