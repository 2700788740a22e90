//! Makes self-contained HTML pages that contain charts of [`crate::plot`].
//!
//! - [`measured_runs`]: runs and baselines in the one shape that pages are made from.
//! - [`charts`]: the charts of these, one file a kind.
//! - [`tables`]: the numbers of the pages as CSV and JSON.
//! - [`results`]: the same numbers as Markdown to commit, one page for each family.
//! - [`report`], [`verdict`], [`trace`], [`ranks`]: the pages of measurements, of verdicts, of a
//!   trace, of the ranks of a job.
//! - [`page_frame`]: common parts of pages: style, themes, tables that can be sorted.
//!
//! Deliberately absent: reading files, deciding (`gate`), and anything from a network.

pub mod charts;
pub mod measured_runs;
pub mod page_frame;
pub mod ranks;
pub mod report;
pub mod results;
pub mod tables;
pub mod trace;
pub mod verdict;
