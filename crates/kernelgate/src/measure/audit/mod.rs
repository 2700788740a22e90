//! The audit of a timed region checks that the measured time belongs to the work that ran, and to
//! all of that work.
//!
//! The timed region lies between two CUDA events. A launch may enqueue work on the timed stream,
//! and on streams that are joined with it; [`AllowedActions`] lists its other permissions. A row
//! whose launches do anything else gets an error and no time. In the table, `L` marks checks of
//! launches (own and attached rows) and `C` checks of a Criterion bench's passes; a name in the
//! last column is the permission that turns the check off.
//!
//! | check | catches | measured | error | |
//! |---|---|---|---|---|
//! | [`commands::check_has_commands`] `L` | nothing on the stream | a captured launch, before the samples | [`TimingRefusal::NothingEnqueued`] | |
//! | [`routine_passes`] `C` | nothing on the stream | held passes against events around nothing | [`TimingRefusal::NothingEnqueued`] | |
//! | [`commands::check_captured_commands_match`] `L` | launches that skip work | the graph of a batch against one launch | [`TimingRefusal::CommandsDiffer`] | |
//! | [`duration`] `L` `C` | launches of nothing, each time or sometimes | every sample against the least command | [`TimingRefusal::TooShort`] | |
//! | [`early_writes`] `L` | outputs written on another stream | samples of the outputs while a blocker holds the stream | [`TimingRefusal::WritesWhileHeld`] | |
//! | [`context`] `L` `C` | long work on another stream | time until the context is idle after the stream | [`TimingRefusal::BusyAfterStream`] | |
//! | [`cupti`] `L` `C` | any work on another stream | CUPTI's record of a launch behind a blocker, after the samples; of the third pass, held | [`TimingRefusal::RecordedElsewhere`] | |
//! | [`routine_passes`] `C` | a host that waits for work elsewhere | the first pass against passes without a hold | [`TimingRefusal::WaitsForWorkElsewhere`] | |
//! | [`gpu_waits`] `L` `C` | a host that waits for the GPU | a launch or pass behind a hold; [`blocking_calls`]: CUPTI's record of its calls | [`TimingRefusal::Waits`], [`TimingRefusal::WaitsIn`] | `waits` |
//! | [`allocations`] `L` | device memory, freed or not | nodes of a captured launch; free memory and the pool's peak around three launches | [`TimingRefusal::AllocatesInOrder`], [`TimingRefusal::Allocates`] | `allocations` |
//! | [`reused_results`] `L` | results computed once and returned later | first and second replay for new inputs; of short launches rounds of three | [`TimingRefusal::Reuses`] | |
//! | [`reused_results`] `L` | results computed once for a captured batch | a launch captured alone against those captured together | [`TimingRefusal::ReusesInBatch`] | |
//!
//! A Criterion bench has no check of its outputs and of what it reuses, because its inputs and
//! outputs are its own. The check [`cupti`] also finds what [`early_writes`] would find. The
//! commands of a Criterion pass are not compared, because Criterion does not say how many
//! iterations a pass has. A Criterion routine has the permissions of our own rows
//! ([`AllowedActions`]), so [`allocations`] and contexts need no check.
//!
//! Three checks need more than launches and are elsewhere:
//!
//! | check | catches | measured | error | |
//! |---|---|---|---|---|
//! | `harness/after_timing.rs` `L` | outputs that do not follow from the inputs | outputs of the timed graph or launch for new inputs, against their reference | the comparison's; [`TimingRefusal::ComputedByReset`] | |
//! | `kernelgate_cuda::driver::stream::thread_state` `L` | another current context, an open capture | around the first launches (`backend/cuda.rs`) | `BackendError::Launch` | `contexts` |
//! | `kernelgate_cuda::driver::stream::foreign_stream` `C` | an open capture | at both events | `BackendError::NotTimed` | |
//!
//! Deliberately absent: defence against code that attacks the process.

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

pub use crate::backend::AllowedActions;
pub use audit_finding::{RefusedSubject, TimingRefusal};
