//! Records from elsewhere taken into a store: committed baselines, folders of runs, what CI kept,
//! whole stores.
//!
//! A record lies under the hash of its content, so that importing twice, or from two programs at
//! once, gives one file. It appears whole (a temporary file and a rename), so that a program that
//! is killed leaves nothing half written.

use std::path::{Path, PathBuf};

use super::HistoryError;
use super::indexed_run::RecordFile;
use super::store::{HistoryStore, Skipped};
use kernelgate::record::file;

/// Folders below the one that was named that are searched.
const DEEPEST: usize = 8;
/// Characters of a name that a folder's name begins with.
const MAX_NAME: usize = 40;
/// Digits of the content's hash after it.
const DIGITS: usize = 12;

/// What an import did.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct Imported {
    /// Records that are new in the store.
    pub new: usize,
    /// Records that it had.
    pub known: usize,
    /// Files that are no records, with the reason.
    pub skipped: Vec<Skipped>,
}

/// Takes in the records in files, and in folders and those below.
///
/// # Errors
/// When one that was named is not there, a folder cannot be listed, or the store not be written.
/// What was taken in until then stays.
pub fn import(store: &HistoryStore, sources: &[PathBuf]) -> Result<Imported, HistoryError> {
    let mut imported = Imported::default();
    for source in sources {
        let facts =
            std::fs::metadata(source).map_err(|cause| HistoryError::io("read", source, cause))?;
        if facts.is_dir() {
            folder(store, source, DEEPEST, &mut imported)?;
        } else {
            record(store, source, &mut imported)?;
        }
    }
    Ok(imported)
}

/// Links are not followed: they may lead in a circle, or out of what was named. What has the name of
/// a record and is left out for that is told.
fn folder(
    store: &HistoryStore,
    path: &Path,
    deeper: usize,
    imported: &mut Imported,
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
            imported.skipped.push(Skipped { path: path.clone(), problem: why.to_owned() });
        };
        if kind.is_dir() && deeper == 0 {
            skip("folders below it are too deep");
        } else if kind.is_dir() {
            folder(store, &path, deeper - 1, imported)?;
        } else if named_as_record && kind.is_symlink() {
            skip("links are not followed: name the file itself");
        } else if named_as_record {
            // What is no file is refused where it is read.
            record(store, &path, imported)?;
        }
    }
    Ok(())
}

fn record(store: &HistoryStore, path: &Path, imported: &mut Imported) -> Result<(), HistoryError> {
    let read = RecordFile::read(path).and_then(|record| {
        let text = file::text_of(path, u64::MAX - 1).map_err(|cause| cause.to_string())?;
        Ok((record, text))
    });
    let (record, text) = match read {
        Ok(read) => read,
        Err(problem) => {
            imported.skipped.push(Skipped { path: path.to_owned(), problem });
            return Ok(());
        }
    };
    let (folder, name) = match &record {
        RecordFile::Run(run) => (plain(&run.session), plain(&run.process())),
        RecordFile::Baseline(baseline) => ("baseline".to_owned(), plain(&baseline.name)),
    };
    let hash = file::text_hash(&text);
    let to = store.imported().join(format!("{folder}-{}", &hash[..DIGITS]));
    let to = to.join(format!("{name}.json"));
    if to.is_file() {
        imported.known += 1;
        return Ok(());
    }
    file::write_text(&to, &text)?;
    imported.new += 1;
    Ok(())
}

/// What of a name can be part of a file's: records may be of anybody.
fn plain(name: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "_-".contains(c) { c } else { '_' };
    name.chars().take(MAX_NAME).map(safe).collect()
}
