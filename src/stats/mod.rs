//! Pure statistics on slices of numbers. No files, no cases, no judgement.

pub mod quantile;

pub use quantile::{Spread, median, quantile};
