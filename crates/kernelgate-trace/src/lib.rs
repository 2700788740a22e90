//! Reads, sums and diagnoses traces of GPU work.
//!
//! - [`model`]: one data model of what a GPU and its host did, for all recorders.
//! - [`read`]: reads trace files into the model: of Nsight Systems, Nsight Compute and PyTorch's
//!   profiler.
//! - [`analyze`]: launches joined with what they launched, ranges with what was launched in them,
//!   idle time.
//! - [`stats`]: computes the tables of `nsys stats`.
//! - [`diagnose`]: finds what wastes time, with evidence.
//! - [`export`]: writes a timeline for Perfetto.
//!
//! ```no_run
//! use kernelgate_trace::read::{self, WantedTraceParts};
//! use kernelgate_trace::stats::{self, StatsReport};
//!
//! let trace = read::open_trace_file("trace.sqlite".as_ref(), &WantedTraceParts::ALL)?;
//! println!("{}", stats::make_table(&trace, StatsReport::KernelsByName).to_terminal_text());
//! # Ok::<(), kernelgate_trace::TraceError>(())
//! ```
//!
//! The crate does not record traces (the harness of `kernelgate` records through CUPTI), and has no
//! command line.

#![allow(missing_docs, reason = "a name that says it all has no comment")]

pub mod analyze;
pub mod diagnose;
mod error;
pub mod export;
pub mod model;
pub mod read;
pub mod stats;

pub use error::TraceError;
