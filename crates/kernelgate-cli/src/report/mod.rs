//! Verdicts as text, Markdown, JUnit XML and metrics, for people and programs. Deliberately absent:
//! decisions.

mod baseline;
pub mod bisection;
pub mod calibration;
pub mod comparison;
pub mod costs;
pub mod formats;
pub mod history;
pub mod intervals;
pub mod judgement_cells;
pub mod summary;
pub mod utilization;
pub mod verdicts;

#[cfg(test)]
mod tests;
