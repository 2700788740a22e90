//! Verbs that show times, of one run and over commits.

pub mod diff;
pub mod history;
pub mod peers;
pub mod report;
pub mod runs;
pub mod timing;
