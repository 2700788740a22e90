//! The audit checks that a measured time covers all the GPU work of the timed code, and nothing
//! else.
//!
//! The audit checks the timed code, which runs between the two CUDA events of a measurement. A
//! launch may enqueue work on the timed stream and on streams joined with the timed stream by
//! events; [`AllowedActionsOfTimedCode`] lists its further permissions. A row whose launches do
//! anything beyond their permissions is reported with an error instead of a time. In the table of
//! the audit's checks, `L` marks checks of launches (of kernelgate's own and of attached rows) and
//! `C` checks of the passes of a Criterion routine. A name in the last column is the permission of
//! [`AllowedActionsOfTimedCode`] that turns the check off.
//!
//! | check | catches | measured | error | |
//! |---|---|---|---|---|
//! | [`commands::check_launch_has_commands`] `L` | nothing on the stream | a captured launch, before the samples | [`TimingRefusal::NothingEnqueued`] | |
//! | [`routine_passes`] `C` | nothing on the stream | held passes against events around nothing | [`TimingRefusal::NothingEnqueued`] | |
//! | [`commands::check_batch_has_commands_of_single_launches`] `L` | launches that skip work | the graph of a batch against one launch | [`TimingRefusal::CommandsDifferInBatch`] | |
//! | [`duration`] `L` `C` | launches of nothing, each time or sometimes | every sample against the least command | [`TimingRefusal::ShorterThanShortestCommand`] | |
//! | [`early_writes`] `L` | outputs written on another stream | samples of the outputs while a blocker holds the stream | [`TimingRefusal::WritesWhileStreamBlocked`] | |
//! | [`context`] `L` `C` | long work on another stream | time until the context is idle after the stream | [`TimingRefusal::ContextBusyAfterStream`] | |
//! | [`cupti`] `L` `C` | any work on another stream | CUPTI's record of a launch behind a blocker, after the samples; of the third pass, held | [`TimingRefusal::RecordedOnOtherStream`] | |
//! | [`routine_passes`] `C` | a host that waits for work elsewhere | the first pass against passes without a hold | [`TimingRefusal::WaitsForWorkOnOtherStream`] | |
//! | [`gpu_waits`] `L` `C` | a host that waits for the GPU | a launch or pass behind a hold; [`blocking_calls`]: CUPTI's record of its calls | [`TimingRefusal::WaitsForGpu`], [`TimingRefusal::WaitsInCudaCall`] | `may_wait_for_gpu` |
//! | [`allocations`] `L` | device memory, freed or not | nodes of a captured launch; free memory and the pool's peak around three launches | [`TimingRefusal::AllocatesInGraph`], [`TimingRefusal::AllocatesDeviceMemory`] | `may_allocate_device_memory` |
//! | [`reused_results`] `L` | results computed once and returned later | first and second replay for new inputs; of short launches rounds of three | [`TimingRefusal::ReusesResults`] | |
//! | [`reused_results`] `L` | results computed once for a captured batch | a launch captured alone against those captured together | [`TimingRefusal::ReusesResultsInBatch`] | |
//!
//! The outputs of a Criterion routine, and its reuse of results, are not checked, because
//! kernelgate does not know its inputs and outputs. The check [`cupti`] also detects the early
//! writes that [`early_writes`] detects. The numbers of commands in a Criterion routine's passes
//! are not compared, because Criterion does not say how many iterations a pass has. A Criterion
//! routine may allocate memory and change the current CUDA context, so [`allocations`] and contexts
//! are not checked for Criterion benches.
//!
//! Three further checks need more than launches and are in modules outside `measure::audit`:
//!
//! | check | catches | measured | error | |
//! |---|---|---|---|---|
//! | `harness/after_timing.rs` `L` | outputs that do not follow from the inputs | outputs of the timed graph or launch for new inputs, against their reference | the comparison's; [`TimingRefusal::OutputsComputedByReset`] | |
//! | `kernelgate_cuda::driver::stream::thread_state` `L` | another current context, an open capture | around the first launches (`backend/cuda.rs`) | `BackendError::ComputationFailed` | `may_change_current_context` |
//! | `kernelgate_cuda::driver::stream::foreign_stream` `C` | an open capture | at both events | `BackendError::NotTimed` | |
//!
//! The audit does not defend against code that attacks its own process on purpose.

pub mod allocations;
mod audit_finding;
pub mod blocking_calls;
pub mod commands;
pub mod context;
pub mod cupti;
pub mod duration;
pub mod early_writes;
pub mod gpu_waits;
pub mod launches;
pub mod reused_results;
pub mod routine_passes;

pub use crate::backend::AllowedActionsOfTimedCode;
pub use audit_finding::{RefusedTimedCode, TimingRefusal};
