//! Verbs of kernelgate that record where the time of a case goes, and verbs that read traces.

pub mod batch_curve;
pub mod diagnose;
pub mod export;
pub mod network;
pub mod part_tables;
pub mod profile;
pub mod recorded_case;
pub mod stages;
pub mod stats;
pub mod tool_lines;
pub mod trace_file;
