//! Files as this workspace reads and writes them: versioned, atomic, locked, with plain names.

pub mod columns;
pub mod file;
pub mod file_set;
pub mod lock;
pub mod tensors;
pub mod text;
