//! Reads facts of this process for records: environment variables, working folder and program file.
//! [`RecordFoldersOfPackage`] and [`CommitAndChanges`] read these facts of the process once.
//!
//! [`RecordFoldersOfPackage`]: crate::record::RecordFoldersOfPackage
//! [`CommitAndChanges`]: crate::record::CommitAndChanges
#![allow(clippy::disallowed_methods, reason = "the boundary of records: the process is read here")]

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Returns the value of an environment variable of this process if it is set and not empty.
pub(in crate::record) fn nonempty_environment_variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

pub(in crate::record) fn working_folder_of_process() -> PathBuf {
    std::env::current_dir().unwrap_or_else(|_| PathBuf::from("."))
}

/// Returns the Cargo target folder that contains this program's file; `None` if the program is
/// elsewhere.
pub(in crate::record) fn cargo_target_folder_of_program() -> Option<PathBuf> {
    // The program's file is target/<profile>/program or target/<profile>/deps/program; cargo marks
    // the target folder by `CACHEDIR.TAG`.
    let program = std::env::current_exe().ok()?;
    let mut folders = program.ancestors().skip(1).take(4);
    folders.find(|folder| folder.join("CACHEDIR.TAG").is_file()).map(Path::to_owned)
}
