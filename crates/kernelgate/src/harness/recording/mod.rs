//! Files of a process: its run, a baseline, inputs and references that are kept, Criterion's store.

pub mod inputs;
pub mod invocation;
pub mod recorder;
pub mod references;
pub mod saving;
pub mod stored;
