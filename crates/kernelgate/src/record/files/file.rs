//! Reads and writes kernelgate's record files: JSON with schema name, version and checksum, in a
//! stable layout, replaced atomically.

use std::fs::{File, TryLockError};
use std::io::{BufReader, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use pretty_json::write_json_in_record_layout;
use record_scan::RecordFileScan;

use super::text;

use kernelgate_cuda::regular_file::open_file_unless_device_or_pipe;

mod pretty_json;
mod record_scan;

/// A type of record that is stored in JSON files of its own format.
pub trait RecordFileType: Serialize + DeserializeOwned {
    /// Name of the record's file format, which each file contains.
    const SCHEMA: &'static str;
    /// Version of the format that this build writes, which is also the newest that it reads.
    const SCHEMA_VERSION: u64;
    /// Oldest version of the file format that this build reads.
    const OLDEST_READABLE_VERSION: u64 = 1;
    /// Name of this kind of record file in messages, such as "baseline".
    const FILE_KIND: &'static str;
    /// Whether files contain a checksum of their values, which reveals an edit by hand; files
    /// without a checksum are read too.
    const CONTAINS_CHECKSUM: bool = false;
    /// Names of fields whose values are messages, commands or paths, which may contain any
    /// character. All other strings and all field names are refused if they contain a control
    /// character.
    const FIELDS_WITH_ANY_CHARACTERS: &'static [&'static str] = &[];

    /// Names of fields each of whose entries is written on one line of the file, however long.
    const FIELDS_WITH_ONE_LINE_PER_ENTRY: &'static [&'static str] = &[];

    /// Checks facts about the record that its Rust types do not enforce, such as ranges of numbers.
    /// The error is a part of a sentence that names the problem.
    ///
    /// # Errors
    /// Fails if the content of the record contradicts itself.
    fn check_record_plausible(&self) -> Result<(), String>;
}

/// Bytes by which a file must be able to grow when kernelgate tests whether it can be written.
const FREE_BYTES_FOR_GROWTH: u64 = 1 << 16;
/// Beginning of the names of kernelgate's temporary files and folders.
const TEMPORARY_FILE_PREFIX: &str = ".kernelgate-";
/// Age from which a temporary file that no process has locked counts as left behind by a dead
/// process.
const ABANDONED_TEMPORARY_FILE_AGE: Duration = Duration::from_secs(1);
/// Age from which a temporary file counts as left behind if the file system has no locks.
const ABANDONED_TEMPORARY_FILE_AGE_WITHOUT_LOCKS: Duration = Duration::from_secs(3600);

/// The reason why a record file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordFileError {
    /// The operating system failed to read, write or lock the file.
    #[error("failed to {failed_operation} {record_path}: {cause}")]
    Io {
        /// Name of the operation that failed: "read", "write" or "lock".
        failed_operation: &'static str,
        /// Path of the file that caused the error.
        record_path: PathBuf,
        /// Error that the operating system returned.
        cause: std::io::Error,
    },
    /// The file's content is not valid JSON, for example because it is truncated.
    #[error("failed to read {record_path}: broken or cut short ({cause})")]
    InvalidJson {
        /// Path of the file that caused the error.
        record_path: PathBuf,
        /// Position and reason of the JSON syntax error.
        cause: serde_json::Error,
    },
    /// The file is valid JSON, but not a kernelgate record of the expected kind.
    #[error("failed to read {record_path}: not a kernelgate {expected_kind}")]
    NotExpectedRecordKind {
        /// Path of the file that caused the error.
        record_path: PathBuf,
        /// Name of the expected kind of record file, for messages.
        expected_kind: &'static str,
    },
    /// A later version of kernelgate wrote the file.
    #[error(
        "failed to read {record_path}: written by a newer kernelgate (schema {file_version}, this one reads up \
         to {newest_readable_version})"
    )]
    NewerVersion {
        /// Path of the file that caused the error.
        record_path: PathBuf,
        /// Version of the file format that the file states.
        file_version: u64,
        /// Newest version of the file format that this build reads.
        newest_readable_version: u64,
    },
    /// An earlier version of kernelgate wrote the file, in a format that this version no longer
    /// reads.
    #[error(
        "failed to read {record_path}: written by an older kernelgate (schema {file_version}, this one reads \
         from {oldest_readable_version}): record it again"
    )]
    OlderVersion {
        /// Path of the file that caused the error.
        record_path: PathBuf,
        /// Version of the file format that the file states.
        file_version: u64,
        /// Oldest version of the record file's format that this build reads.
        oldest_readable_version: u64,
    },
    /// Another process held the file's lock for the whole waiting time.
    #[error(
        "failed to lock {record_path}: another process has held {lock_path} for {waited_s} s: wait for it, or \
         end it"
    )]
    LockTimeout {
        /// Path of the file that caused the error.
        record_path: PathBuf,
        /// Lock file.
        lock_path: PathBuf,
        /// Seconds waited.
        waited_s: u64,
    },
    /// The checksum in the file does not match its values, because the file was edited or merged.
    #[error(
        "failed to read {record_path}: edited or merged after kernelgate wrote it (its checksum does not \
         match); where that is intended, `kernelgate baseline seal {record_path}` accepts it as it is"
    )]
    ChecksumMismatch {
        /// Path of the file that caused the error.
        record_path: PathBuf,
    },
    /// The file has the right format, but implausible content.
    #[error("failed to {failed_operation} {record_path}: invalid {record_kind}: {content_fault}")]
    ImplausibleContent {
        /// "read" or "write".
        failed_operation: &'static str,
        /// Path of the file that caused the error.
        record_path: PathBuf,
        /// Name of the kind of record file, such as "baseline", for messages.
        record_kind: &'static str,
        /// Description of the implausible content, as a part of a sentence.
        content_fault: String,
    },
}

impl RecordFileError {
    /// Returns whether a new file could not be created because a file of that name exists.
    pub fn is_because_file_exists(&self) -> bool {
        matches!(self, Self::Io { cause, .. } if cause.kind() == std::io::ErrorKind::AlreadyExists)
    }

    /// Returns whether the file could not be read because it does not exist.
    pub fn is_because_file_is_missing(&self) -> bool {
        matches!(self, Self::Io { cause, .. } if cause.kind() == std::io::ErrorKind::NotFound)
    }
}

/// Reads a record file, and checks its format, checksum and content.
///
/// # Errors
/// Fails if the file is missing, broken, no such record, newer than this program, edited although
/// it contains a checksum, or contradicts itself.
pub fn read_record<T: RecordFileType>(path: &Path) -> Result<T, RecordFileError> {
    read_record_in_two_passes(path, true)
}

/// Reads a record file, and checks its format and content, but not its checksum.
///
/// # Errors
/// Fails with the errors of [`read_record`], except an edit by hand.
pub fn read_record_ignoring_checksum<T: RecordFileType>(path: &Path) -> Result<T, RecordFileError> {
    read_record_in_two_passes(path, false)
}

/// Reads the text of a file that other programs may have written, with limited memory.
///
/// # Errors
/// Fails if it cannot be opened, is a device or a pipe, is longer than `most` bytes, or no UTF-8.
pub fn read_untrusted_text_up_to(path: &Path, most: u64) -> std::io::Result<String> {
    let mut text = String::new();
    let read = open_file_unless_device_or_pipe(path)?.take(most + 1).read_to_string(&mut text)?;
    if read as u64 > most {
        return Err(std::io::Error::other(format!("larger than {most} bytes")));
    }
    Ok(text)
}

/// Reads the file twice, to save memory: the first pass checks schema, checksum and text without
/// keeping values, the second builds the record.
fn read_record_in_two_passes<T: RecordFileType>(
    path: &Path,
    check: bool,
) -> Result<T, RecordFileError> {
    let (failed_operation, record_path) = ("read", path);
    let io = |cause| RecordFileError::Io {
        failed_operation,
        record_path: record_path.to_owned(),
        cause,
    };
    let broken = |cause: serde_json::Error| match cause.is_io() {
        true => io(cause.into()),
        false => RecordFileError::InvalidJson { record_path: path.to_owned(), cause },
    };
    let foreign = || RecordFileError::NotExpectedRecordKind {
        record_path: path.to_owned(),
        expected_kind: T::FILE_KIND,
    };
    let mut file = open_file_unless_device_or_pipe(path).map_err(io)?;
    let scanned = {
        let mut json = serde_json::Deserializer::from_reader(large_buffered_reader(&file));
        let sealed = T::CONTAINS_CHECKSUM && check;
        let any_text = T::FIELDS_WITH_ANY_CHARACTERS;
        let scanned = RecordFileScan::scan_record_json(&mut json, T::FILE_KIND, any_text, sealed)
            .map_err(broken)?;
        json.end().map_err(broken)?;
        scanned
    };
    if scanned.schema_name.as_deref() != Some(T::SCHEMA) {
        return Err(foreign());
    }
    let found = scanned.schema_version.filter(|&found| found > 0).ok_or_else(foreign)?;
    if found > T::SCHEMA_VERSION {
        return Err(RecordFileError::NewerVersion {
            record_path: path.to_owned(),
            file_version: found,
            newest_readable_version: T::SCHEMA_VERSION,
        });
    }
    if found < T::OLDEST_READABLE_VERSION {
        return Err(RecordFileError::OlderVersion {
            record_path: path.to_owned(),
            file_version: found,
            oldest_readable_version: T::OLDEST_READABLE_VERSION,
        });
    }
    if let Some(checksum) = scanned.checksum.as_ref().filter(|_| T::CONTAINS_CHECKSUM && check) {
        let hash = match scanned.hash_of_values_hex() {
            Some(hash) => hash,
            // The field names are not sorted, because another program wrote or merged the file, so
            // the checksum is computed from sorted values.
            None => {
                file.rewind().map_err(io)?;
                let mut value: Value =
                    serde_json::from_reader(large_buffered_reader(&file)).map_err(broken)?;
                value.as_object_mut().ok_or_else(foreign)?.remove("checksum");
                checksum_of_json_value(&value)
            }
        };
        if checksum.as_str() != Some(&hash) {
            return Err(RecordFileError::ChecksumMismatch { record_path: path.to_owned() });
        }
    }
    let invalid = |problem: String| {
        let problem = text::cut_middle_of_long_message(problem);
        RecordFileError::ImplausibleContent {
            failed_operation,
            record_path: path.to_owned(),
            record_kind: T::FILE_KIND,
            content_fault: problem,
        }
    };
    if let Some(problem) = scanned.refused_text {
        return Err(invalid(problem));
    }
    file.rewind().map_err(io)?;
    let mut json = serde_json::Deserializer::from_reader(large_buffered_reader(&file));
    let record = T::deserialize(&mut json).map_err(|error| match error.is_io() {
        true => io(error.into()),
        false => invalid(error.to_string()),
    })?;
    record.check_record_plausible().map_err(invalid)?;
    Ok(record)
}

fn large_buffered_reader(file: &File) -> BufReader<&File> {
    BufReader::with_capacity(1 << 16, file)
}

/// Reads only the start time of a run record, without keeping the rest in memory; `None` if the
/// record has no start time.
pub(in crate::record) fn read_start_time_of_run(path: &Path) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct StartTimeOfRun {
        #[serde(rename = "started")]
        start_time: String,
    }
    let file = BufReader::new(open_file_unless_device_or_pipe(path).ok()?);
    serde_json::from_reader(file).ok().map(|StartTimeOfRun { start_time: started }| started)
}

/// Reads only the Cargo package of a run record, without keeping the rest in memory.
pub(in crate::record) fn read_package_of_run<P: DeserializeOwned>(
    path: &Path,
) -> std::io::Result<Option<P>> {
    #[derive(serde::Deserialize)]
    struct PackageOfRun<P> {
        package: Option<P>,
    }
    let file = open_file_unless_device_or_pipe(path)?;
    let of_package: PackageOfRun<P> = serde_json::from_reader(large_buffered_reader(&file))?;
    Ok(of_package.package)
}

/// Returns the format name in the field `schema` of a record file; `None` for other JSON.
///
/// # Errors
/// Fails if the file cannot be read, or is not JSON.
pub fn read_schema_name_of_file(path: &Path) -> Result<Option<String>, RecordFileError> {
    #[derive(serde::Deserialize)]
    struct SchemaField {
        #[serde(default)]
        schema: Option<String>,
    }
    let io = |cause| RecordFileError::Io {
        failed_operation: "read",
        record_path: path.to_owned(),
        cause,
    };
    let file = open_file_unless_device_or_pipe(path).map_err(io)?;
    let envelope = serde_json::from_reader::<_, SchemaField>(large_buffered_reader(&file));
    match envelope {
        Ok(envelope) => Ok(envelope.schema),
        // The file contains JSON that is not an object, such as a list.
        Err(cause) if cause.is_data() => Ok(None),
        Err(cause) if cause.is_io() => Err(io(cause.into())),
        Err(cause) => Err(RecordFileError::InvalidJson { record_path: path.to_owned(), cause }),
    }
}

/// Returns whether a record file contains a checksum.
pub fn file_contains_checksum(path: &Path) -> bool {
    #[derive(serde::Deserialize)]
    struct ChecksumField {
        checksum: Option<String>,
    }
    let file = open_file_unless_device_or_pipe(path).ok();
    let sealed = file.and_then(|file| serde_json::from_reader(large_buffered_reader(&file)).ok());
    sealed.is_some_and(|ChecksumField { checksum }| checksum.is_some())
}

/// Writes a record file atomically: at any time either the old or the new content is in the file.
///
/// # Errors
/// Fails if the record is one that [`read_record`] refuses, the folder cannot be made or written,
/// or the disk is full; the old file is then untouched.
pub fn write_record_atomically<T: RecordFileType>(
    path: &Path,
    record: &T,
) -> Result<(), RecordFileError> {
    write_text_atomically(path, &checked_record_text(path, record)?)
}

/// Writes a record file that another process on this machine reads soon, without syncing it to the
/// disk: a power failure may lose it.
pub fn write_record_without_sync<T: RecordFileType>(
    path: &Path,
    record: &T,
) -> Result<(), RecordFileError> {
    let io = |cause| RecordFileError::Io {
        failed_operation: "write",
        record_path: path.to_owned(),
        cause,
    };
    let text = checked_record_text(path, record)?;
    let mut file = create_temporary_file_beside(path).map_err(io)?;
    file.write_all(text.as_bytes()).map_err(io)?;
    file.persist(path).map(drop).map_err(|error| io(error.error))
}

/// Returns the JSON text of a record, after checking that [`read_record`] would accept it.
fn checked_record_text<T: RecordFileType>(
    path: &Path,
    record: &T,
) -> Result<String, RecordFileError> {
    let text = || {
        record.check_record_plausible()?;
        // The conversion to JSON fails if a path in the record is not valid Unicode.
        let value = json_value_of_record(record).map_err(|cause| cause.to_string())?;
        let scanned = RecordFileScan::scan_record_json(
            &value,
            T::FILE_KIND,
            T::FIELDS_WITH_ANY_CHARACTERS,
            false,
        );
        let refused = scanned.map_err(|cause| cause.to_string())?.refused_text;
        refused.map_or_else(|| Ok(layout_json_of_record::<T>(&value)), Err)
    };
    text().map_err(|problem: String| RecordFileError::ImplausibleContent {
        failed_operation: "write",
        record_path: path.to_owned(),
        record_kind: T::FILE_KIND,
        content_fault: text::cut_middle_of_long_message(problem),
    })
}

/// Returns the JSON text of a record whose paths are valid Unicode, as [`write_record_atomically`]
/// writes it.
pub fn json_text_of_record<T: RecordFileType>(record: &T) -> String {
    layout_json_of_record::<T>(
        &json_value_of_record(record).expect("records have string keys and finite numbers"),
    )
}

fn json_value_of_record<T: RecordFileType>(record: &T) -> Result<Value, serde_json::Error> {
    let mut value = serde_json::to_value(record)?;
    replace_whole_floats_by_integers(&mut value);
    let envelope = value.as_object_mut().expect("records are structs");
    envelope.insert("schema".to_owned(), T::SCHEMA.into());
    envelope.insert("schema_version".to_owned(), T::SCHEMA_VERSION.into());
    if T::CONTAINS_CHECKSUM {
        let checksum = checksum_of_json_value(&value);
        value
            .as_object_mut()
            .expect("records are structs")
            .insert("checksum".to_owned(), checksum.into());
    }
    Ok(value)
}

/// Replaces floating-point numbers without a fraction by integers, so that the JSON text does not
/// contain ".0".
fn replace_whole_floats_by_integers(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(replace_whole_floats_by_integers),
        Value::Object(fields) => fields.values_mut().for_each(replace_whole_floats_by_integers),
        Value::Number(number) if number.is_f64() => {
            let exact = number.as_f64().filter(|it| it.fract() == 0.0 && it.abs() < 1e15);
            *value = exact.map_or_else(|| value.clone(), |it| (it as i64).into());
        }
        _ => {}
    }
}

fn layout_json_of_record<T: RecordFileType>(value: &Value) -> String {
    let mut text = String::new();
    write_json_in_record_layout(value, 0, T::FIELDS_WITH_ONE_LINE_PER_ENTRY, &mut text);
    text.push('\n');
    text
}

/// Replaces a text file atomically: writes and syncs a temporary file in the same folder, then
/// renames it.
pub fn write_text_atomically(path: &Path, text: &str) -> Result<(), RecordFileError> {
    replace_files_after_writing_all([(path, text)])
}

/// Replaces several files: their new contents are all on the disk before the first file is renamed.
///
/// # Errors
/// Fails if a file cannot be written; if one does not fit on the disk, none is replaced.
pub fn replace_files_after_writing_all<'a>(
    files: impl IntoIterator<Item = (&'a Path, &'a str)>,
) -> Result<(), RecordFileError> {
    let io = |path: &Path, cause| RecordFileError::Io {
        failed_operation: "write",
        record_path: path.to_owned(),
        cause,
    };
    let prepared = files.into_iter().map(|(path, text)| {
        let file = write_temporary_file_beside(path, text)?;
        match path.is_dir() {
            true => Err(io(path, std::io::ErrorKind::IsADirectory.into())),
            false => Ok((path, file)),
        }
    });
    for (path, file) in prepared.collect::<Result<Vec<_>, _>>()? {
        file.persist(path).map_err(|error| io(path, error.error))?;
    }
    Ok(())
}

/// Creates a temporary file with this content, synced to the disk, in the folder of `path`.
fn write_temporary_file_beside(
    path: &Path,
    content: impl AsRef<[u8]>,
) -> Result<tempfile::NamedTempFile, RecordFileError> {
    let io = |cause| RecordFileError::Io {
        failed_operation: "write",
        record_path: path.to_owned(),
        cause,
    };
    let file = create_temporary_file_beside(path).map_err(io)?;
    write_and_sync_file(file.as_file(), content).map_err(io)?;
    Ok(file)
}

/// Writes the content of a file and syncs the file to the disk.
pub(super) fn write_and_sync_file(
    mut file: &File,
    content: impl AsRef<[u8]>,
) -> std::io::Result<()> {
    file.write_all(content.as_ref())?;
    file.sync_all()
}

/// Creates a record file atomically: of two processes that create the same file, only one succeeds.
///
/// # Errors
/// Fails with the errors of [`write_record_atomically`], and when a file of that name exists, which
/// stays unchanged.
pub fn create_record_exclusively<T: RecordFileType>(
    path: &Path,
    record: &T,
) -> Result<(), RecordFileError> {
    let io = |cause| RecordFileError::Io {
        failed_operation: "write",
        record_path: path.to_owned(),
        cause,
    };
    match write_temporary_file_beside(path, checked_record_text(path, record)?)?
        .persist_noclobber(path)
    {
        Ok(_) => Ok(()),
        // On a file system that cannot create a file exclusively, the temporary file is renamed to
        // the new file instead.
        Err(error) if !path.exists() => {
            error.file.persist(path).map_err(|error| io(error.error)).map(drop)
        }
        Err(_) => Err(io(std::io::ErrorKind::AlreadyExists.into())),
    }
}

/// Resolves a symbolic link to the file that it names, and returns any other path unchanged, so
/// that changes go to the linked file.
pub fn resolve_symbolic_link(path: &Path) -> PathBuf {
    let is_link = std::fs::symlink_metadata(path).is_ok_and(|facts| facts.is_symlink());
    let led = is_link.then(|| std::fs::canonicalize(path).ok()).flatten();
    led.unwrap_or_else(|| path.to_owned())
}

/// Returns a hash of a record's JSON values, which does not depend on white space in the file.
fn checksum_of_json_value(value: &Value) -> String {
    text_hash_hex(&value.to_string())
}

/// Returns a 128-bit hash of a text, as 32 hexadecimal digits.
pub fn text_hash_hex(text: &str) -> String {
    format!("{:032x}", xxhash_rust::xxh3::xxh3_128(text.as_bytes()))
}

/// Returns a 128-bit hash of a file's content, as 32 hexadecimal digits.
pub fn file_content_hash_hex(path: &Path) -> Result<String, RecordFileError> {
    let io = |cause| RecordFileError::Io {
        failed_operation: "read",
        record_path: path.to_owned(),
        cause,
    };
    let mut file = open_file_unless_device_or_pipe(path).map_err(io)?;
    let mut hasher = xxhash_rust::xxh3::Xxh3Default::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match std::io::Read::read(&mut file, &mut buffer).map_err(io)? {
            0 => return Ok(format!("{:032x}", hasher.digest128())),
            read => hasher.update(&buffer[..read]),
        }
    }
}

/// Returns a 128-bit hash of several texts and their boundaries, as 32 hexadecimal digits.
pub fn hash_of_texts_hex<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hasher = xxhash_rust::xxh3::Xxh3Default::new();
    for text in texts {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    format!("{:032x}", hasher.digest128())
}

/// Creates a temporary file in the folder of `path`, and the folder if it is missing. The caller
/// writes the temporary file and renames it to `path`.
///
/// # Errors
/// Fails if the folder cannot be made or written.
pub fn create_temporary_file_beside(path: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    remove_files_of_dead_writers(folder);
    let mut builder = tempfile::Builder::new();
    // The temporary file is readable according to the user's umask, like any new file.
    use std::os::unix::fs::PermissionsExt;
    builder.permissions(std::fs::Permissions::from_mode(0o666));
    let file = builder.prefix(TEMPORARY_FILE_PREFIX).tempfile_in(folder)?;
    // The lock on the temporary file shows other processes that its writer is alive; the system
    // releases the lock of a killed process.
    let _ = file.as_file().try_lock();
    Ok(file)
}

/// Creates a temporary folder inside a folder; the caller fills it and renames it. The second
/// result is the opened folder, whose lock shows other processes that its owner is alive.
///
/// # Errors
/// Fails if the temporary folder cannot be made.
pub fn create_temporary_folder_in(
    folder: &Path,
) -> std::io::Result<(tempfile::TempDir, Option<File>)> {
    remove_files_of_dead_writers(folder);
    let temporary = tempfile::Builder::new().prefix(TEMPORARY_FILE_PREFIX).tempdir_in(folder)?;
    let held = File::open(temporary.path()).ok().filter(|held| held.try_lock().is_ok());
    Ok((temporary, held))
}

/// Removes temporary files, temporary folders and lock files that killed kernelgate processes left
/// in a folder.
pub(super) fn remove_files_of_dead_writers(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if !(is_name_of_temporary_file(&name)
            || (name.starts_with('.') && name.ends_with(".json.lock")))
        {
            continue;
        }
        let Ok(facts) = entry.metadata() else { continue };
        let age = facts.modified().ok().and_then(|modified| modified.elapsed().ok());
        let path = entry.path();
        if !(facts.is_file() || facts.is_dir() && is_name_of_temporary_file(&name)) {
            continue;
        }
        // A lock file is removed while this process holds its lock, so that a process waiting for
        // the lock notices the removal.
        let opened = open_file_unless_device_or_pipe(&path);
        let least = match opened.as_ref().map(File::try_lock) {
            Ok(Ok(())) => Some(ABANDONED_TEMPORARY_FILE_AGE),
            Ok(Err(TryLockError::WouldBlock)) => None,
            Ok(Err(TryLockError::Error(_))) | Err(_) => {
                Some(ABANDONED_TEMPORARY_FILE_AGE_WITHOUT_LOCKS)
            }
        };
        if least.is_some_and(|least| age > Some(least)) {
            // Another process may have removed the temporary file already, so errors are ignored.
            let _ = match facts.is_dir() {
                true => std::fs::remove_dir_all(path),
                false => std::fs::remove_file(path),
            };
        }
    }
}

/// Returns whether a name has the form that [`create_temporary_file_beside`] and
/// [`create_temporary_folder_in`] give.
fn is_name_of_temporary_file(name: &str) -> bool {
    const RANDOM_CHARACTERS_IN_NAME: usize = 6;
    name.strip_prefix(TEMPORARY_FILE_PREFIX).is_some_and(|drawn| {
        drawn.len() == RANDOM_CHARACTERS_IN_NAME
            && drawn.bytes().all(|byte| byte.is_ascii_alphanumeric())
    })
}

/// Checks that a file can be written at a path: creates its folder, and writes a temporary file of
/// the present size plus 64 KiB.
///
/// # Errors
/// Fails if no file can be written at the path.
pub fn check_file_is_writable(path: &Path) -> Result<(), RecordFileError> {
    let io = |cause| RecordFileError::Io {
        failed_operation: "write",
        record_path: path.to_owned(),
        cause,
    };
    if path.is_dir() {
        return Err(io(std::io::ErrorKind::IsADirectory.into()));
    }
    let room = std::fs::metadata(path).map_or(0, |facts| facts.len()) + FREE_BYTES_FOR_GROWTH;
    let mut probe = create_temporary_file_beside(path).map_err(io)?;
    std::io::copy(&mut std::io::repeat(0).take(room), &mut probe).map_err(io)?;
    probe.as_file().sync_all().map_err(io)
}

#[cfg(test)]
mod tests;
