//! Reports of verdicts, histories, calibrations, bisections and costs as text and Markdown, and of
//! verdicts as JUnit XML and JSON metrics.

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
