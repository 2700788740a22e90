//! Reads and writes the files of this workspace: versioned records, atomic replacement, locks, and
//! plain file names.

pub mod file;
pub mod file_set;
pub mod json_columns;
pub mod lock;
pub mod tensors;
pub mod text;
