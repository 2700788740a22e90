//! Measures GPU times in an existing Criterion bench, on the stream of the bench's own code,
//! whichever library created the stream.
//!
//! ```no_run
//! use criterion::{criterion_group, criterion_main};
//! use kernelgate::gpu_time::{Criterion, GpuTimeMeasurement};
//!
//! # fn stream() -> *mut u8 { std::ptr::null_mut() }
//! # fn launch() {}
//! fn copies(c: &mut Criterion) {
//!     c.bench_function("copy", |b| b.iter(|| launch()));
//! }
//!
//! criterion_group! {
//!     name = benches;
//!     config = criterion::Criterion::default()
//!         .with_measurement(GpuTimeMeasurement::time_on_stream(stream()));
//!     targets = copies
//! }
//! criterion_main!(benches);
//! ```
//!
//! The measured time lies between two CUDA events around the routine's work on that stream, for all
//! iterations of a sample together. Nothing is subtracted. If the routine waits for the GPU, the
//! wait is part of its time and the record says so; waiting is unnecessary, because the measurement
//! itself waits. If the measured time would not be the time of the routine's work, the process ends
//! with an error and exit code 1.
//!
//! When the measurement is dropped after the last benchmark of its group, it writes a run record
//! with the ids and samples that this process measured. `kernelgate gate`, `baseline` and `runs`
//! accept the record like any other; `compare` runs the bench with Criterion's flags. Cases
//! measured by `GpuTimeMeasurement` are recorded as unverified, because nothing checks their
//! outputs. Measurements by `GpuTimeMeasurement` lack the harness's blocking kernel, clock readings
//! and ceilings, which need kernelgate's own kernels in the bench's context.

mod measurement;
mod recording;
mod samples;

pub use super::settings::process::RECORD_PATH_VARIABLE;
/// Re-exports the supported Criterion version, for benches that depend on another version.
pub use criterion;
pub use kernelgate_cuda::driver::stream::foreign_stream::ForeignStreamError;
pub use kernelgate_cuda::driver::stream::raw_stream::RawStreamHandle;
pub use measurement::GpuTimeMeasurement;
pub use recording::MARK_OF_CRITERION_BENCH_EXECUTABLE;
pub use samples::GpuTimeSample;

/// Criterion with GPU time, to replace `criterion::Criterion` in signatures of bench functions.
pub type Criterion = criterion::Criterion<GpuTimeMeasurement>;
/// Criterion's benchmark group with GPU time.
pub type BenchmarkGroup<'a> = criterion::BenchmarkGroup<'a, GpuTimeMeasurement>;
/// Criterion's bencher with GPU time.
pub type Bencher<'a> = criterion::Bencher<'a, GpuTimeMeasurement>;
