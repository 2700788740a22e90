//! Makes self-contained HTML pages that contain charts of [`crate::plot`].
//!
//! - [`measured_runs`] joins run records and baselines into the data that all pages show.
//! - [`charts`] draws charts of measured runs, with one file for each kind of chart.
//! - [`tables`] writes the numbers of a report page as CSV and JSON.
//! - [`results`] writes the numbers as Markdown pages to commit, one for each family of workloads.
//! - [`report`], [`verdict`], [`trace`] and [`ranks`] each make one kind of HTML page: of
//!   measurements, of verdicts, of a trace, and of the ranks of a job.
//! - [`page_frame`] builds what all HTML pages share: style, themes, tables that can be sorted.
//!
//! The module `pages` reads no files, decides no verdicts (`gate` does), and its pages load nothing
//! from a network.

pub mod charts;
pub mod measured_runs;
pub mod page_frame;
pub mod ranks;
pub mod report;
pub mod results;
pub mod tables;
pub mod trace;
pub mod verdict;
