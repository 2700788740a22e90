//! The process whose runs are recorded: its variables, its folder and its file, for
//! [`BaselineStore`] and [`Provenance`], which are made once a process.
//!
//! [`BaselineStore`]: crate::record::BaselineStore
//! [`Provenance`]: crate::record::Provenance
#![allow(clippy::disallowed_methods, reason = "the boundary of records: the process is read here")]

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Returns the value of an environment variable that is set and not empty.
pub(in crate::record) fn nonempty_variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

pub(in crate::record) fn working_folder() -> PathBuf {
    std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."))
}

/// Returns the target folder that contains this program; `None` if it was built elsewhere.
pub(in crate::record) fn target_folder_of_program() -> Option<PathBuf> {
    // The program is target/<profile>/program or target/<profile>/deps/program: cargo marks the
    // target folder.
    let program = std::env::current_exe().ok()?;
    let mut folders = program.ancestors().skip(1).take(4);
    folders.find(|folder| folder.join("CACHEDIR.TAG").is_file()).map(Path::to_owned)
}
