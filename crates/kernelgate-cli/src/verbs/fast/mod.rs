//! Verbs of kernelgate that show recorded times: of one run, of two runs, or over commits.

pub mod diff;
pub mod history;
pub mod peers;
pub mod report;
pub mod runs;
pub mod timing;
