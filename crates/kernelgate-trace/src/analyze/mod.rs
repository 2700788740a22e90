//! Joins the parts of a recorded trace: GPU operations with host calls, ranges, idle gaps and
//! dependencies. Absent: tables, judgement.

pub mod classes;
pub mod launches;
pub mod operations;
pub mod ranges;
pub mod replay;
pub mod time_order;
pub mod timeline;
pub mod work;
