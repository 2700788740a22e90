//! GPU time for a Criterion bench that exists: a measurement over the stream of the bench's own
//! code, whatever made it.
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
//!     config = criterion::Criterion::default().with_measurement(GpuTime::on_stream(stream()));
//!     targets = copies
//! }
//! criterion_main!(benches);
//! ```
//!
//! The time is that between two CUDA events around what the routine enqueues on that stream, all
//! iterations of a sample together. Nothing is subtracted. A routine that waits for the GPU has the
//! wait in its time, which the record says: it need not wait, because the measurement does. If the
//! time would not be that of the routine's work, the process ends with an error and exit code 1.
//!
//! When the measurement is dropped, after the targets of its group, the process' run is recorded:
//! ids and samples of Criterion's store, as far as they were taken here. `kernelgate gate`,
//! `baseline` and `runs` take it as any other, `compare` drives the bench by Criterion's flags.
//! Nothing says whether the outputs are right: such cases are unverified. Deliberately absent: the
//! blocker, clocks and ceilings of the harness, which need kernels of its own in the bench's
//! context.

mod measurement;
mod recording;
mod samples;

pub use super::settings::process::RECORD;
/// Criterion in the version that this measurement is for, for benches that name another one.
pub use criterion;
pub use kernelgate_cuda::driver::stream::foreign_stream::StreamError;
pub use kernelgate_cuda::driver::stream::raw_stream::RawStream;
pub use measurement::GpuTime;
pub use recording::MARK;
pub use samples::GpuElapsed;

/// Criterion with GPU time: in place of `criterion::Criterion` where a bench function names it.
pub type Criterion = criterion::Criterion<GpuTime>;
/// Criterion's benchmark group with GPU times.
pub type BenchmarkGroup<'a> = criterion::BenchmarkGroup<'a, GpuTime>;
/// Criterion's bencher with GPU times.
pub type Bencher<'a> = criterion::Bencher<'a, GpuTime>;
