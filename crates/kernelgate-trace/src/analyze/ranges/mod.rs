//! Finds the ranges around calls and operations. Absent: times of ranges.

pub mod inside;
pub mod paths;
pub mod restrict;
pub mod sweep;
