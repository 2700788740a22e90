//! Imports run records and baselines into a history store: from files, folders, downloaded CI
//! artifacts or other stores.
//!
//! An imported record is stored under the hash of its content, so that importing it twice, or from
//! two programs at once, gives one file. An imported record is first written to a temporary file
//! and then renamed, so that a killed program leaves no incomplete record.

use std::path::{Path, PathBuf};

use super::CaseHistoryError;
use super::indexed_run::RunOrBaselineFile;
use super::store::{FileWithoutRun, HistoryRecordStore};
use kernelgate::record::file;

/// Largest depth of subfolders in which the import searches for records.
const MAX_IMPORT_FOLDER_DEPTH: usize = 8;
/// Largest number of characters of a session's or file's name that the store's folder and file
/// names keep.
const MAX_IMPORTED_NAME_CHARACTERS: usize = 40;
/// Number of digits of the content's hash at the end of an imported folder's name.
const HASH_DIGITS_IN_IMPORTED_NAME: usize = 12;

/// Result of importing records into a history store: numbers of new and known records, and the
/// skipped files.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct RecordImportResult {
    /// Number of imported records that the store did not have before.
    #[serde(rename = "new")]
    pub newly_imported_records: usize,
    /// Number of imported records that the history store already had.
    #[serde(rename = "known")]
    pub already_stored_records: usize,
    /// Files that were not imported because they are not records, each with the reason.
    #[serde(rename = "skipped")]
    pub files_without_run: Vec<FileWithoutRun>,
}

/// Imports the records in the given files, and in the given folders and their subfolders.
///
/// # Errors
/// Fails if a given file or folder does not exist, a folder cannot be listed, or the history store
/// cannot be written. Records that were imported before an error stay in the store.
pub fn import_records_into_store(
    store: &HistoryRecordStore,
    sources: &[PathBuf],
) -> Result<RecordImportResult, CaseHistoryError> {
    let mut imported = RecordImportResult::default();
    for source in sources {
        let facts = std::fs::metadata(source)
            .map_err(|cause| CaseHistoryError::file_error("read", source, cause))?;
        if facts.is_dir() {
            import_records_in_folder(store, source, MAX_IMPORT_FOLDER_DEPTH, &mut imported)?;
        } else {
            import_record_file(store, source, &mut imported)?;
        }
    }
    Ok(imported)
}

/// Imports the records in one folder and its subfolders. The import does not follow symbolic links,
/// because they may form a circle or lead out of the folder. A file that is named like a record
/// (`.json`) but is not imported is reported as skipped.
fn import_records_in_folder(
    store: &HistoryRecordStore,
    path: &Path,
    deeper: usize,
    imported: &mut RecordImportResult,
) -> Result<(), CaseHistoryError> {
    let unreadable = |cause| CaseHistoryError::file_error("read", path, cause);
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
                .files_without_run
                .push(FileWithoutRun { ignored_file: path.clone(), why_no_run: why.to_owned() });
        };
        if kind.is_dir() && deeper == 0 {
            skip("folders below it are too deep");
        } else if kind.is_dir() {
            import_records_in_folder(store, &path, deeper - 1, imported)?;
        } else if named_as_record && kind.is_symlink() {
            skip("links are not followed: name the file itself");
        } else if named_as_record {
            // `import_record_file` reads only regular files and skips everything else.
            import_record_file(store, &path, imported)?;
        }
    }
    Ok(())
}

fn import_record_file(
    store: &HistoryRecordStore,
    path: &Path,
    imported: &mut RecordImportResult,
) -> Result<(), CaseHistoryError> {
    let read = RunOrBaselineFile::read_run_or_baseline(path).and_then(|record| {
        let text = file::read_untrusted_text_up_to(path, u64::MAX - 1)
            .map_err(|cause| cause.to_string())?;
        Ok((record, text))
    });
    let (record, text) = match read {
        Ok(read) => read,
        Err(problem) => {
            imported
                .files_without_run
                .push(FileWithoutRun { ignored_file: path.to_owned(), why_no_run: problem });
            return Ok(());
        }
    };
    let (folder, name) = match &record {
        RunOrBaselineFile::Run(run) => (
            safe_start_of_file_name(&run.session_name),
            safe_start_of_file_name(&run.bench_name_with_shard()),
        ),
        RunOrBaselineFile::Baseline(baseline) => {
            ("baseline".to_owned(), safe_start_of_file_name(&baseline.baseline_name))
        }
    };
    let hash = file::text_hash_hex(&text);
    let to = store
        .imported_records_folder()
        .join(format!("{folder}-{}", &hash[..HASH_DIGITS_IN_IMPORTED_NAME]));
    let to = to.join(format!("{name}.json"));
    if to.is_file() {
        imported.already_stored_records += 1;
        return Ok(());
    }
    file::write_text_atomically(&to, &text)?;
    imported.newly_imported_records += 1;
    Ok(())
}

/// Returns the start of a name with every character replaced that is unsafe in a file name, because
/// the authors of records are not trusted.
fn safe_start_of_file_name(name: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "_-".contains(c) { c } else { '_' };
    name.chars().take(MAX_IMPORTED_NAME_CHARACTERS).map(safe).collect()
}
