//! Files that a bench process reads or writes: run record, baseline, stored inputs and references,
//! and Criterion's store.

pub mod criterion_results;
pub mod invocation;
pub mod kept_inputs;
pub mod kept_references;
pub mod recorder;
pub mod save_baseline;
