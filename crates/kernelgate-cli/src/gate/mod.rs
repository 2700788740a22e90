//! Decides whether runs are slower than a baseline, or one build slower than another: verdicts with
//! confidence interval and detectable change, and refusals of meaningless comparisons.
//!
//! A verdict is based on process runs: each process gives one median time for each case. The module
//! `gate` measures nothing and prints nothing.

pub mod baseline;
pub mod calibration;
pub mod comparison;
pub mod comparison_shard;
pub mod costs;
pub mod inconclusive_reason;
pub mod judgement;
pub mod kernels;
pub mod limits;
pub mod outputs;
pub mod paired;
pub mod ratio_interval;
pub mod recorded_names;
mod result_json;
pub mod rules;
mod same_card_runs;
pub mod single_run;
pub mod verdict;
pub mod verdicts;

pub use verdict::VerdictOnCase;

#[cfg(test)]
mod tests;
