//! Files of a process: its run, a baseline, inputs and references that are kept, Criterion's store.

pub mod criterion_results;
pub mod invocation;
pub mod kept_inputs;
pub mod kept_references;
pub mod recorder;
pub mod save_baseline;
