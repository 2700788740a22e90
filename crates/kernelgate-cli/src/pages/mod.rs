//! Pages to look at: HTML files of their own that open from disk, with the charts of
//! [`crate::plot`] in them.
//!
//! - [`measured`]: what runs and baselines measured, in the one shape that pages are made from.
//! - [`charts`]: which charts that gives, one file a kind.
//! - [`tables`]: the same numbers as CSV and JSON.
//! - [`results`]: the same numbers as Markdown to commit, one page for each family.
//! - [`report`], [`verdict`], [`trace`], [`ranks`]: a page each, of measurements, of verdicts, of a
//!   trace, of the ranks of a job.
//! - [`shell`]: what pages have in common: style, themes, tables that can be sorted.
//!
//! Deliberately absent: reading files, deciding (`gate`), and anything from a network.

pub mod charts;
pub mod measured;
pub mod ranks;
pub mod report;
pub mod results;
pub mod shell;
pub mod tables;
pub mod trace;
pub mod verdict;
