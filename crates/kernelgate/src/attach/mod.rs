//! Adds implementations that are closures over a raw CUDA stream: any binding, library or framework
//! may launch the kernels, with or without a reference.
//!
//! ```no_run
//! use kernelgate::attach::*;
//! use kernelgate::harness::Harness;
//!
//! # fn their_copy(_: *mut u8, _: u64, _: u64, _: usize) -> Result<(), String> { Ok(()) }
//! fn main() -> std::process::ExitCode {
//!     let copy = AttachedWorkload::new("mine/copy", &["n=16777216"], |point| {
//!         let n = point.number("n")?;
//!         let inputs = vec![TensorSpec::new("x", [n], Dtype::F32)];
//!         let outputs = vec![TensorSpec::new("y", [n], Dtype::F32)];
//!         let work = ProblemDefinition::traffic_work(&inputs, &outputs);
//!         let (reference, tolerance) = (OutputReference::NoReference, Tolerances::by_dtype());
//!         Ok(ProblemDefinition { inputs, outputs, reference, work, tolerance })
//!     });
//!     let copy = copy.add_stream_row("cuda/theirs", ["x", "y"], |at, [x, y]| {
//!         let (stream, n) = (at.stream().raw_pointer(), at.axis_number("n")?);
//!         Ok(RowLaunchClosures::new(move || their_copy(stream, x, y, n)))
//!     });
//!     Harness::new("copy", [copy]).main()
//! }
//! ```
//!
//! The harness draws the inputs, copies them to the device, allocates the outputs and passes
//! addresses, stream and context. An attached row loads its kernels while it is prepared
//! ([`RowContext::compile_kernel`] for source, [`KernelImage`] for cubin, fatbin and PTX); its
//! closure enqueues on the given stream or on a joined stream ([`RowContext::join_stream`]). The
//! closure must not wait, allocate, change the current context or leave a stream capture open:
//! kernelgate reports each as an error. Without CUPTI, the audit mistakes a wait for a full queue
//! if the launch has more than 400 commands, or cannot be captured and returns before the GPU
//! finishes. A row that packs or copies inputs during preparation declares with
//! [`RowLaunchClosures::reading_only_inputs`] which inputs its launches still read. A row whose
//! launch changes state that the next launch reads, restores the state with
//! [`RowLaunchClosures::with_reset`]. Expected outputs come from fp64 code, golden tensors, another
//! row, or nowhere; a case without a reference is timed and marked "unverified".
//!
//! For more control, implement [`Workload`](crate::workload::Workload) with rows of its own instead
//! of attaching closures. The module `attach` contains no timing.

mod definition;
mod golden_tensors;
mod problem;
mod row;
pub mod safetensors;
mod suite;

pub use definition::{OutputReference, ProblemDefinition, TensorSpec, Tolerances};
pub use row::{RowContext, RowLaunchClosures};
pub use suite::AttachedWorkload;

pub use crate::backend::BackendError;
pub use crate::backend::cuda::{
    DeviceBuffer, ForeignStreamJoinedWithDevice, KernelArgumentList, KernelImage, Launch,
    PreparedLaunch, RawContextHandle, RawStreamHandle, Source,
};
pub use crate::workload::{AxisError, Dtype, Expected, Point, Tensors, Work};
