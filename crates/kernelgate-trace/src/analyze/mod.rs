//! Joins the GPU operations of a recorded trace with host calls, ranges, idle gaps and
//! dependencies. This module neither makes tables nor judges a trace.

pub mod classes;
pub mod launches;
pub mod operations;
pub mod ranges;
pub mod replay;
pub mod time_order;
pub mod timeline;
pub mod work;
