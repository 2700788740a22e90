//! Traces of GPU work: read, summed up, diagnosed.
//!
//! - [`model`]: one model of what a GPU and its host did, whoever recorded it.
//! - [`read`]: files into the model: Nsight Systems, Nsight Compute, PyTorch's profiler.
//! - [`analyze`]: launches joined with what they launched, ranges with what was launched in them,
//!   idle time.
//! - [`stats`]: the tables of `nsys stats`.
//! - [`diagnose`]: what is wrong, with evidence.
//! - [`export`]: a timeline for Perfetto.
//!
//! ```no_run
//! use kernelgate_trace::read::{self, WantedTraceParts};
//! use kernelgate_trace::stats::{self, StatsReport};
//!
//! let trace = read::open("trace.sqlite".as_ref(), &WantedTraceParts::ALL)?;
//! println!("{}", stats::table(&trace, StatsReport::GpuKernels).to_text());
//! # Ok::<(), kernelgate_trace::TraceError>(())
//! ```
//!
//! Absent: recording (the harness of `kernelgate` records through CUPTI), the command line.

pub mod analyze;
pub mod diagnose;
mod error;
pub mod export;
pub mod model;
pub mod read;
pub mod stats;

pub use error::TraceError;
