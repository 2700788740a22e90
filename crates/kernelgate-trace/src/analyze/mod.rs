//! How the parts of a trace belong together. Absent: tables, judgement.

pub mod bus;
pub mod classes;
pub mod cover;
pub mod graph_nodes;
pub mod idle;
pub mod inside;
pub mod iterations;
pub mod job_replay;
pub mod kernel_kinds;
pub mod launch_calls;
pub mod launches;
pub mod operations;
pub mod operator_work;
pub mod order;
pub(crate) mod passing;
pub mod paths;
pub mod peaks;
pub mod replay;
pub mod restrict;
pub mod sweep;
pub mod timeline;
pub mod utilization;
