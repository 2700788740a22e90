//! Rows that are closures over the raw stream handle: any binding, library or framework may launch
//! the kernels, with or without a reference.
//!
//! ```no_run
//! use kernelgate::attach::*;
//! use kernelgate::harness::Harness;
//!
//! # fn their_copy(_: *mut u8, _: u64, _: u64, _: usize) -> Result<(), String> { Ok(()) }
//! fn main() -> std::process::ExitCode {
//!     let copy = Attached::new("mine/copy", &["n=16777216"], |point| {
//!         let n = point.number("n")?;
//!         let inputs = vec![TensorSpec::new("x", [n], Dtype::F32)];
//!         let outputs = vec![TensorSpec::new("y", [n], Dtype::F32)];
//!         let work = ProblemDefinition::traffic_work(&inputs, &outputs);
//!         let (reference, tolerance) = (OutputReference::None, Tolerances::by_dtype());
//!         Ok(ProblemDefinition { inputs, outputs, reference, work, tolerance })
//!     });
//!     let copy = copy.row("cuda/theirs", ["x", "y"], |at, [x, y]| {
//!         let (stream, n) = (at.stream().raw_pointer(), at.number("n")?);
//!         Ok(RowLaunches::new(move || their_copy(stream, x, y, n)))
//!     });
//!     Harness::new("copy", [copy]).main()
//! }
//! ```
//!
//! The harness draws the inputs, copies them to the device, allocates the outputs and passes
//! addresses, stream and context. A row loads its kernels while it is prepared ([`At::compile`] for
//! source, [`KernelImage`] for cubin, fatbin and PTX), and its closure enqueues on the stream, or
//! on one that it joined ([`At::join`]). The closure may not wait, allocate, change the current
//! context or leave a capture open: each is an error. The audit misses one kind of wait: if CUPTI
//! is missing, a wait looks like a full queue when the launch has more than 400 commands, or cannot
//! be captured and returns before the GPU is done. A row that packs or copies inputs while it is
//! prepared names the inputs that launches still read with [`RowLaunches::reading`]. A row whose
//! launches carry state on restores it with [`RowLaunches::with_reset`]. The reference is code in
//! fp64, golden tensors, another row, or nothing; a case without a reference is timed and marked
//! "unverified".
//!
//! A definition that needs more than this is a [`Workload`](crate::workload::Workload) with rows of
//! its own. Deliberately absent: timing.

mod definition;
mod golden_tensors;
mod problem;
mod row;
pub mod safetensors;
mod suite;

pub use definition::{OutputReference, ProblemDefinition, TensorSpec, Tolerances};
pub use row::{At, RowLaunches};
pub use suite::Attached;

pub use crate::backend::BackendError;
pub use crate::backend::cuda::{
    Arguments, DeviceBuffer, JoinedStreams, KernelImage, Launch, PreparedLaunch, RawContext,
    RawStream, Source,
};
pub use crate::workload::{AxisError, Dtype, Expected, Point, Tensors, Work};
