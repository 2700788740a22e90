//! Command-line flags, files and output that several kernelgate verbs share.

pub mod bench_flags;
pub mod case_selection;
pub mod comparison;
pub mod interrupt;
pub mod nvrtc;
pub mod output;
pub mod refusal;
pub mod sessions;
pub mod settings;
