//! Imports records into a store: committed baselines, folders of runs, artifacts of CI, whole
//! stores.
//!
//! A record is stored under the hash of its content, so that importing twice, or from two programs
//! at once, gives one file. The record is written to a temporary file and renamed, so that a killed
//! program leaves no incomplete record.

use std::path::{Path, PathBuf};

use super::HistoryError;
use super::indexed_run::IndexedRecordFile;
use super::store::{HistoryStore, SkippedRecordFile};
use kernelgate::record::file;

/// Largest depth of folders that are searched for records.
const MAX_DEPTH: usize = 8;
/// Largest number of characters of a file's name in the name of a stored folder.
const MAX_FOLDER_NAME: usize = 40;
/// Digits of the content's hash that follow.
const IMPORT_HASH_DIGITS: usize = 12;

/// Result of an import.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct ImportResult {
    /// Records that are new in the store.
    pub new: usize,
    /// Number of records that the store already had.
    pub known: usize,
    /// Files that are not records, with the reason.
    pub skipped: Vec<SkippedRecordFile>,
}

/// Imports the records in files, and in folders and those below.
///
/// # Errors
/// Fails if a named file or folder is missing, a folder cannot be listed, or the store cannot be
/// written. Records that were imported before an error stay in the store.
pub fn import_records(
    store: &HistoryStore,
    sources: &[PathBuf],
) -> Result<ImportResult, HistoryError> {
    let mut imported = ImportResult::default();
    for source in sources {
        let facts =
            std::fs::metadata(source).map_err(|cause| HistoryError::io("read", source, cause))?;
        if facts.is_dir() {
            import_folder(store, source, MAX_DEPTH, &mut imported)?;
        } else {
            import_record(store, source, &mut imported)?;
        }
    }
    Ok(imported)
}

/// Imports the records in a folder and those below. Symbolic links are not followed: they may form
/// a circle or lead out of the folder. A skipped file that has the name of a record is reported.
fn import_folder(
    store: &HistoryStore,
    path: &Path,
    deeper: usize,
    imported: &mut ImportResult,
) -> Result<(), HistoryError> {
    let unreadable = |cause| HistoryError::io("read", path, cause);
    let mut entries = std::fs::read_dir(path)
        .map_err(unreadable)?
        .collect::<Result<Vec<_>, _>>()
        .map_err(unreadable)?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let (kind, path) = (entry.file_type().map_err(unreadable)?, entry.path());
        let named_as_record = path.extension().is_some_and(|it| it == "json");
        let mut skip = |why: &str| {
            imported
                .skipped
                .push(SkippedRecordFile { path: path.clone(), problem: why.to_owned() });
        };
        if kind.is_dir() && deeper == 0 {
            skip("folders below it are too deep");
        } else if kind.is_dir() {
            import_folder(store, &path, deeper - 1, imported)?;
        } else if named_as_record && kind.is_symlink() {
            skip("links are not followed: name the file itself");
        } else if named_as_record {
            // `record` reads only regular files, and refuses anything else.
            import_record(store, &path, imported)?;
        }
    }
    Ok(())
}

fn import_record(
    store: &HistoryStore,
    path: &Path,
    imported: &mut ImportResult,
) -> Result<(), HistoryError> {
    let read = IndexedRecordFile::read(path).and_then(|record| {
        let text =
            file::read_untrusted_text(path, u64::MAX - 1).map_err(|cause| cause.to_string())?;
        Ok((record, text))
    });
    let (record, text) = match read {
        Ok(read) => read,
        Err(problem) => {
            imported.skipped.push(SkippedRecordFile { path: path.to_owned(), problem });
            return Ok(());
        }
    };
    let (folder, name) = match &record {
        IndexedRecordFile::Run(run) => {
            (safe_file_name(&run.session), safe_file_name(&run.process_name_of_run()))
        }
        IndexedRecordFile::Baseline(baseline) => {
            ("baseline".to_owned(), safe_file_name(&baseline.name))
        }
    };
    let hash = file::text_hash(&text);
    let to = store.imported().join(format!("{folder}-{}", &hash[..IMPORT_HASH_DIGITS]));
    let to = to.join(format!("{name}.json"));
    if to.is_file() {
        imported.known += 1;
        return Ok(());
    }
    file::write_text(&to, &text)?;
    imported.new += 1;
    Ok(())
}

/// The part of a name that is safe in a file name: the authors of records are not trusted.
fn safe_file_name(name: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "_-".contains(c) { c } else { '_' };
    name.chars().take(MAX_FOLDER_NAME).map(safe).collect()
}
