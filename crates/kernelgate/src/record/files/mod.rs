//! Files as this workspace reads and writes them: versioned, atomic, locked, with plain names.

pub mod file;
pub mod file_set;
pub mod json_columns;
pub mod lock;
pub mod tensors;
pub mod text;
