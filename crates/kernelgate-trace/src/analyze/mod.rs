//! How the parts of a trace belong together. Absent: tables, judgement.

pub mod classes;
pub mod launches;
pub mod operations;
pub mod order;
pub mod ranges;
pub mod replay;
pub mod timeline;
pub mod work;
