//! Rows that are closures over the raw stream handle: kernels of whatever binding, library or
//! framework launches them, with or without a reference.
//!
//! ```no_run
//! use kernelgate::attach::*;
//! use kernelgate::harness::Harness;
//!
//! # fn their_axpy(_: *mut u8, _: u64, _: u64, _: usize) -> Result<(), String> { Ok(()) }
//! fn main() -> std::process::ExitCode {
//!     let axpy = Attached::new("mine/axpy", &["n=16777216"])
//!         .define(|point| {
//!             let n = point.number("n")?;
//!             Ok(Definition::new().input("x", [n], Dtype::F32).output("y", [n], Dtype::F32))
//!         })
//!         .row("cuda/theirs", |at| {
//!             let (stream, n) = (at.stream().pointer(), at.number("n")?);
//!             let (x, y) = (at.input("x")?, at.output("y")?);
//!             Ok(Launches::new(move || their_axpy(stream, x, y, n)))
//!         });
//!     Harness::new("axpy", vec![axpy.suite()]).main()
//! }
//! ```
//!
//! The harness draws the inputs, copies them to the device, allocates the outputs and passes
//! addresses, stream and context. A row loads what it launches while it is prepared ([`Image`] for
//! cubin, fatbin and PTX), and its closure enqueues on the stream, or on one that it joined
//! ([`At::join`]). It may not wait, allocate, change the current context or leave a capture open:
//! each is an error and no time, but for a wait that cannot be told from a full queue: where CUPTI
//! is missing, and the launch is of more than 400 commands or cannot be captured and returns before
//! the GPU is done. Inputs that it packs or copies while it is prepared are told by [`Launches::reading`], state
//! that launches carry on by [`Launches::with_reset`]. The reference is code in fp64, golden tensors,
//! another row, or nothing: what nothing verifies is timed and marked "unverified".
//!
//! A definition that is more than this is a [`Workload`](crate::workload::Workload) with rows of
//! its own. Deliberately absent: rows for the CPU, source ([`At::device`] compiles it), and how
//! anything is timed.

mod definition;
mod golden;
mod problem;
mod row;
pub mod safetensors;
mod suite;

pub use definition::{Definition, Reference};
pub use row::{At, Launches};
pub use suite::Attached;

pub use crate::backend::BackendError;
pub use crate::backend::cuda::{
    Buffer, Image, JoinedStream, LaunchDims, Parameters, PreparedLaunch, RawContext, RawStream,
    Source,
};
pub use crate::workload::{AxisError, Dtype, Expected, Point, Tensors, Work};
