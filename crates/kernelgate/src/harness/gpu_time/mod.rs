//! GPU times for an existing Criterion bench: a measurement on the stream of the bench's own code,
//! whichever library created the stream.
//!
//! ```no_run
//! use criterion::{criterion_group, criterion_main};
//! use kernelgate::gpu_time::{Criterion, GpuTime};
//!
//! # fn stream() -> *mut u8 { std::ptr::null_mut() }
//! # fn launch() {}
//! fn copies(c: &mut Criterion) {
//!     c.bench_function("copy", |b| b.iter(|| launch()));
//! }
//!
//! criterion_group! {
//!     name = benches;
//!     config = criterion::Criterion::default().with_measurement(GpuTime::time_on_stream(stream()));
//!     targets = copies
//! }
//! criterion_main!(benches);
//! ```
//!
//! The measured time lies between two CUDA events around the routine's work on that stream, for all
//! iterations of a sample together. Nothing is subtracted. If a routine waits for the GPU, the wait
//! is part of its time, and the record states that; the routine need not wait, because the
//! measurement waits itself. The process ends with an error and exit code 1 if the measured time
//! would not be that of the routine's work.
//!
//! When the measurement is dropped after the last benchmark of its group, the run is recorded: ids
//! and samples in Criterion's store that this process measured. `kernelgate gate`, `baseline` and
//! `runs` accept it as any other run, and `compare` drives the bench by Criterion's flags. Cases
//! that are timed this way are unverified, because their outputs are not checked. Deliberately
//! absent: the blocking kernel, clocks and ceilings of the harness, which need kernels of its own
//! in the bench's context.

mod measurement;
mod recording;
mod samples;

pub use super::settings::process::RECORD_VARIABLE;
/// Re-export of Criterion in the supported version, for benches that depend on another version.
pub use criterion;
pub use kernelgate_cuda::driver::stream::foreign_stream::StreamError;
pub use kernelgate_cuda::driver::stream::raw_stream::RawStream;
pub use measurement::GpuTime;
pub use recording::CRITERION_MAIN_MARK;
pub use samples::GpuEventInterval;

/// Criterion with GPU time, to use instead of `criterion::Criterion` in a bench function's
/// signature.
pub type Criterion = criterion::Criterion<GpuTime>;
/// Criterion's benchmark group, measuring GPU times.
pub type BenchmarkGroup<'a> = criterion::BenchmarkGroup<'a, GpuTime>;
/// Criterion's bencher, measuring GPU times.
pub type Bencher<'a> = criterion::Bencher<'a, GpuTime>;
