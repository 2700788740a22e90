//! Joins the parts of a trace: operations with calls, ranges, gaps and dependencies. Absent:
//! tables, judgement.

pub mod classes;
pub mod launches;
pub mod operations;
pub mod ranges;
pub mod replay;
pub mod time_order;
pub mod timeline;
pub mod work;
