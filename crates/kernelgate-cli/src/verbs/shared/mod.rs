//! Flags, files and output that several verbs share.

pub mod bench_flags;
pub mod case_selection;
pub mod comparison;
pub mod interrupt;
pub mod nvrtc;
pub mod output;
pub mod refusal;
pub mod sessions;
pub mod settings;
