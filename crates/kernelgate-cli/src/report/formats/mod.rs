//! Verdicts and times for reviewers and for other programs.

pub mod comment;
pub mod junit;
pub mod metrics;
