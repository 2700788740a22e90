//! Decides whether a run is slower than the baseline, or a build slower than another: verdicts with
//! their interval and the detectable change, and refusals of comparisons that make no sense.
//!
//! The unit of a decision is a process run: one median for each run and case. Deliberately absent:
//! measuring, printing.

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
mod result_json;
pub mod rules;
mod same_card_runs;
pub mod single_run;
pub mod verdict;
pub mod verdicts;

pub use verdict::Verdict;

#[cfg(test)]
mod tests;
