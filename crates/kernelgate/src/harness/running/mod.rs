//! Runs the selected cases in a process of `cargo bench`, or in a trial process of a comparison.

pub mod bench_run;
pub mod case_error;
pub mod deadline;
pub mod estimate;
pub mod execution;
pub mod problem;
pub mod progress;
pub mod sampling;
pub mod session;
pub mod silence_criterion;
pub mod test_run;
pub mod timing;
pub mod trial;
pub mod trial_run;
