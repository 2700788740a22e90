//! Formats the verdicts and times for reviewers (pull-request comment) and for other programs
//! (JUnit XML, metrics in JSON).

pub mod comment;
pub mod junit;
pub mod metrics;
