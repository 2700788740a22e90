//! The audit of a timed region: does the time belong to the work that ran, and to all of it?
//!
//! Between the two events lies the region. A launch may enqueue work on the timed stream, and on
//! streams that are joined with it. A row that does anything else there gets an error and no time.
//! `L` marks checks of launches (own and attached rows), `A` of attached rows alone, `C` of the
//! passes of a Criterion bench.
//!
//! | check | catches | measured | error |
//! |---|---|---|---|
//! | [`commands::nothing`] `L` | nothing on the stream | a captured launch, before the samples | enqueues nothing |
//! | [`commands::check_alike`] `L` | launches that skip work | the graph of a batch against one launch | launches differ in their commands |
//! | [`allocations::check_graph`] `A` | allocation in stream order | a captured launch | allocates device memory |
//! | [`allocations::check_memory`] `A` | allocation, freed or not | free memory and the pool's peak around three launches | each launch allocates |
//! | [`waits::check`] `A` | a host that waits for the GPU | a launch behind a blocker; [`calls`]: CUPTI's record of its calls | waits for the GPU |
//! | [`other_streams::check_writes`] `L` | outputs written on another stream | samples of the outputs while a blocker holds the stream | writes its outputs while the stream is held |
//! | [`other_streams::check_duration`] `L` | long work on another stream | time until the context is idle after the stream | keeps the GPU busy |
//! | [`duration::check`] `L` | launches of nothing, each time or sometimes | every sample against an empty kernel | takes .. by the events around it |
//! | [`cupti::check`] `L` | any work on another stream | CUPTI's record of a launch behind a blocker, after the samples | on another stream, by CUPTI's record |
//! | [`reuse::check`] `L` | results computed once and returned later | first and second replay for new inputs | reuses what an earlier launch computed |
//! | [`passes`] `C` | nothing on the stream, work elsewhere | held passes, empty readings, the context after a pass | enqueues nothing; works on another stream |
//!
//! Three checks are measured elsewhere, because they need more than launches:
//!
//! | check | catches | measured | error |
//! |---|---|---|---|
//! | `harness/after_timing.rs` `L` | outputs that do not follow from the inputs | outputs of the timed graph or launch for new inputs, against their reference | does not compute its outputs from its inputs |
//! | `kernelgate_cuda::driver::thread_state` `A` | another current context, an open capture | around the first launches (`backend/cuda.rs`) | changes the CUDA context; leaves a capture open |
//! | `kernelgate_cuda::driver::stream_timer` `C` | an open capture | at both events | a capture is open on the stream |
//!
//! Deliberately absent: defence against code that attacks the process.

pub mod allocations;
pub mod calls;
pub mod commands;
pub mod cupti;
pub mod duration;
pub mod other_streams;
pub mod passes;
pub mod reuse;
pub mod waits;
