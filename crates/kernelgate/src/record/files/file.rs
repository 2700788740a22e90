//! Reading and writing record files: the envelope with its schema, stable JSON, atomic replacement.

use std::fs::{File, TryLockError};
use std::io::{BufReader, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use pretty_json::write_pretty_json;
use record_scan::ScannedFile;

use super::text;

use kernelgate_cuda::regular_file::open_regular_file;

mod pretty_json;
mod record_scan;

/// A type with a file format of its own.
pub trait RecordType: Serialize + DeserializeOwned {
    /// Name of the record format that the file states.
    const SCHEMA: &'static str;
    /// Version of the format that this build writes, which is also the newest that it reads.
    const SCHEMA_VERSION: u64;
    /// Oldest version of the format that this build reads.
    const OLDEST_VERSION: u64 = 1;
    /// Name of a file of this format in messages: "baseline".
    const FILE_KIND: &'static str;
    /// Whether files must carry a checksum of their content, by which an edit by hand is noticed;
    /// by default files without one are read too.
    const HAS_CHECKSUM: bool = false;
    /// Fields whose values are messages, commands or paths, which may hold any character. Every
    /// other string, and every name of a field, is refused if it holds a control character.
    const FREE_TEXT_FIELDS: &'static [&'static str] = &[];

    /// Fields whose entries take one line each in the file, whatever their length.
    const ONE_LINE_FIELDS: &'static [&'static str] = &[];

    /// Checks the facts that the types alone do not enforce. The error is a fragment of a sentence.
    ///
    /// # Errors
    /// Fails if the content of the record contradicts itself.
    fn validate(&self) -> Result<(), String>;
}

/// Growth of a file beyond which a folder counts as full, bytes.
const MIN_FREE_BYTES: u64 = 1 << 16;
/// Prefix of the names of temporary files.
const TEMPORARY_PREFIX: &str = ".kernelgate-";
/// Age after which an unlocked temporary file counts as abandoned by its writer.
const ABANDONED_FILE_AGE: Duration = Duration::from_secs(1);
/// Age of an abandoned temporary file on a file system without locks.
const ABANDONED_FILE_AGE_WITHOUT_LOCKS: Duration = Duration::from_secs(3600);

/// Why a record file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RecordFileError {
    /// An operation of the file system failed.
    #[error("failed to {action} {path}: {cause}")]
    Io {
        /// "read", "write" or "lock".
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// Error that the operating system returned.
        cause: std::io::Error,
    },
    /// The file is not JSON, or is truncated.
    #[error("failed to read {path}: broken or cut short ({cause})")]
    Json {
        /// Which file.
        path: PathBuf,
        /// Position and reason of the syntax error in the JSON.
        cause: serde_json::Error,
    },
    /// The file is JSON, but not a record of this kind.
    #[error("failed to read {path}: not a kernelgate {kind}")]
    Foreign {
        /// Which file.
        path: PathBuf,
        /// Name of the expected kind of file, for messages.
        kind: &'static str,
    },
    /// A later version of this program wrote the file.
    #[error(
        "failed to read {path}: written by a newer kernelgate (schema {found}, this one reads up \
         to {known})"
    )]
    Newer {
        /// Which file.
        path: PathBuf,
        /// Version in the file.
        found: u64,
        /// Latest version known here.
        known: u64,
    },
    /// An earlier version of this program wrote the file, in a format that is no longer read.
    #[error(
        "failed to read {path}: written by an older kernelgate (schema {found}, this one reads \
         from {oldest}): record it again"
    )]
    Older {
        /// Which file.
        path: PathBuf,
        /// Version in the file.
        found: u64,
        /// Oldest version read here.
        oldest: u64,
    },
    /// Another process held the lock for the whole waiting time.
    #[error(
        "failed to lock {path}: another process has held {lock} for {waited_s} s: wait for it, or \
         end it"
    )]
    Locked {
        /// Which file.
        path: PathBuf,
        /// Lock file.
        lock: PathBuf,
        /// Seconds waited.
        waited_s: u64,
    },
    /// The content of the file differs from the content that was written: its checksum does not
    /// match.
    #[error(
        "failed to read {path}: edited or merged after kernelgate wrote it (its checksum does not \
         match); where that is intended, `kernelgate baseline seal {path}` accepts it as it is"
    )]
    Edited {
        /// Which file.
        path: PathBuf,
    },
    /// The file has the right format, but impossible content.
    #[error("failed to {action} {path}: invalid {kind}: {problem}")]
    Invalid {
        /// "read" or "write".
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// Name of the kind of record in messages.
        kind: &'static str,
        /// Fragment of a sentence that names the problem.
        problem: String,
    },
}

impl RecordFileError {
    /// Returns whether creating a new file failed because the file exists.
    pub fn is_already_there(&self) -> bool {
        matches!(self, Self::Io { cause, .. } if cause.kind() == std::io::ErrorKind::AlreadyExists)
    }

    /// Returns whether the error says that the file does not exist.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { cause, .. } if cause.kind() == std::io::ErrorKind::NotFound)
    }
}

/// Reads a record from a file and validates it.
///
/// # Errors
/// Fails if the file is missing, broken, foreign, newer than this program, edited although it is
/// sealed, or contradicts itself.
pub fn read<T: RecordType>(path: &Path) -> Result<T, RecordFileError> {
    read_checked(path, true)
}

/// Reads a record without checking its checksum.
///
/// # Errors
/// Fails with the errors of [`read()`], except an edit by hand.
pub fn read_without_checksum<T: RecordType>(path: &Path) -> Result<T, RecordFileError> {
    read_checked(path, false)
}

/// Reads the text of a file that other programs may have written.
///
/// # Errors
/// Fails if it cannot be opened, is a device or a pipe, is longer than `most` bytes, or no UTF-8.
pub fn read_untrusted_text(path: &Path, most: u64) -> std::io::Result<String> {
    let mut text = String::new();
    let read = open_regular_file(path)?.take(most + 1).read_to_string(&mut text)?;
    if read as u64 > most {
        return Err(std::io::Error::other(format!("larger than {most} bytes")));
    }
    Ok(text)
}

/// Reads the file twice, so that memory holds no more than the record: the first pass checks the
/// envelope, the checksum and the text.
fn read_checked<T: RecordType>(path: &Path, check: bool) -> Result<T, RecordFileError> {
    let io = |cause| RecordFileError::Io { action: "read", path: path.to_owned(), cause };
    let broken = |cause: serde_json::Error| match cause.is_io() {
        true => io(cause.into()),
        false => RecordFileError::Json { path: path.to_owned(), cause },
    };
    let foreign = || RecordFileError::Foreign { path: path.to_owned(), kind: T::FILE_KIND };
    let mut file = open_regular_file(path).map_err(io)?;
    let scanned = {
        let mut json = serde_json::Deserializer::from_reader(buffered_reader(&file));
        let sealed = T::HAS_CHECKSUM && check;
        let scanned = ScannedFile::scan_json(&mut json, T::FILE_KIND, T::FREE_TEXT_FIELDS, sealed)
            .map_err(broken)?;
        json.end().map_err(broken)?;
        scanned
    };
    if scanned.schema.as_deref() != Some(T::SCHEMA) {
        return Err(foreign());
    }
    let found = scanned.version.filter(|&found| found > 0).ok_or_else(foreign)?;
    if found > T::SCHEMA_VERSION {
        return Err(RecordFileError::Newer {
            path: path.to_owned(),
            found,
            known: T::SCHEMA_VERSION,
        });
    }
    if found < T::OLDEST_VERSION {
        return Err(RecordFileError::Older {
            path: path.to_owned(),
            found,
            oldest: T::OLDEST_VERSION,
        });
    }
    if let Some(checksum) = scanned.checksum.as_ref().filter(|_| T::HAS_CHECKSUM && check) {
        let hash = match scanned.hash() {
            Some(hash) => hash,
            // The file was written by another program, or merged, so its names have to be put in
            // order.
            None => {
                file.rewind().map_err(io)?;
                let mut value: Value =
                    serde_json::from_reader(buffered_reader(&file)).map_err(broken)?;
                value.as_object_mut().ok_or_else(foreign)?.remove("checksum");
                checksum_of(&value)
            }
        };
        if checksum.as_str() != Some(&hash) {
            return Err(RecordFileError::Edited { path: path.to_owned() });
        }
    }
    let invalid = |problem: String| {
        let problem = text::shortened_message(problem);
        let (action, path) = ("read", path.to_owned());
        RecordFileError::Invalid { action, path, kind: T::FILE_KIND, problem }
    };
    if let Some(problem) = scanned.refused {
        return Err(invalid(problem));
    }
    file.rewind().map_err(io)?;
    let mut json = serde_json::Deserializer::from_reader(buffered_reader(&file));
    let record = T::deserialize(&mut json).map_err(|error| match error.is_io() {
        true => io(error.into()),
        false => invalid(error.to_string()),
    })?;
    record.validate().map_err(invalid)?;
    Ok(record)
}

fn buffered_reader(file: &File) -> BufReader<&File> {
    BufReader::with_capacity(1 << 16, file)
}

/// Start time that a record states, read without holding the rest of the record in memory.
pub(in crate::record) fn start_time_of_record(path: &Path) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct StartTimeField {
        started: String,
    }
    let file = BufReader::new(open_regular_file(path).ok()?);
    serde_json::from_reader(file).ok().map(|StartTimeField { started }| started)
}

/// Package that a run's file names, read without the rest of the run; an error if the file cannot
/// be read as a run.
pub(in crate::record) fn package_of_run<P: DeserializeOwned>(
    path: &Path,
) -> std::io::Result<Option<P>> {
    #[derive(serde::Deserialize)]
    struct PackageField<P> {
        package: Option<P>,
    }
    let file = open_regular_file(path)?;
    let of_package: PackageField<P> = serde_json::from_reader(buffered_reader(&file))?;
    Ok(of_package.package)
}

/// Name of the format of a record file; absent in JSON of something else.
///
/// # Errors
/// Fails if the file cannot be read, or is not JSON.
pub fn schema_of_file(path: &Path) -> Result<Option<String>, RecordFileError> {
    #[derive(serde::Deserialize)]
    struct RecordEnvelope {
        #[serde(default)]
        schema: Option<String>,
    }
    let io = |cause| RecordFileError::Io { action: "read", path: path.to_owned(), cause };
    let file = open_regular_file(path).map_err(io)?;
    let envelope = serde_json::from_reader::<_, RecordEnvelope>(buffered_reader(&file));
    match envelope {
        Ok(envelope) => Ok(envelope.schema),
        // The JSON has another structure than a record, such as a list.
        Err(cause) if cause.is_data() => Ok(None),
        Err(cause) if cause.is_io() => Err(io(cause.into())),
        Err(cause) => Err(RecordFileError::Json { path: path.to_owned(), cause }),
    }
}

/// Returns whether a record file contains a checksum.
pub fn has_checksum(path: &Path) -> bool {
    #[derive(serde::Deserialize)]
    struct ChecksummedRecord {
        checksum: Option<String>,
    }
    let file = open_regular_file(path).ok();
    let sealed = file.and_then(|file| serde_json::from_reader(buffered_reader(&file)).ok());
    sealed.is_some_and(|ChecksummedRecord { checksum }| checksum.is_some())
}

/// Writes a record atomically: at any time the old file or the new one exists, never half of one.
///
/// # Errors
/// Fails if the record is one that [`read()`] refuses, the folder cannot be made or written, or the
/// disk is full; the old file is then untouched.
pub fn write<T: RecordType>(path: &Path, record: &T) -> Result<(), RecordFileError> {
    write_text(path, &readable_text(path, record)?)
}

/// Writes a record that another process of this machine reads soon, without syncing it: a power
/// failure may lose it.
pub fn write_unsynced<T: RecordType>(path: &Path, record: &T) -> Result<(), RecordFileError> {
    let io = |cause| RecordFileError::Io { action: "write", path: path.to_owned(), cause };
    let text = readable_text(path, record)?;
    let mut file = temporary_beside(path).map_err(io)?;
    file.write_all(text.as_bytes()).map_err(io)?;
    file.persist(path).map(drop).map_err(|error| io(error.error))
}

/// The text of a record that can be read again.
fn readable_text<T: RecordType>(path: &Path, record: &T) -> Result<String, RecordFileError> {
    let text = || {
        record.validate()?;
        // Converting fails for a path that is not valid text.
        let value = record_to_json(record).map_err(|cause| cause.to_string())?;
        let scanned = ScannedFile::scan_json(&value, T::FILE_KIND, T::FREE_TEXT_FIELDS, false);
        let refused = scanned.map_err(|cause| cause.to_string())?.refused;
        refused.map_or_else(|| Ok(text_of_json::<T>(&value)), Err)
    };
    text().map_err(|problem: String| RecordFileError::Invalid {
        action: "write",
        path: path.to_owned(),
        kind: T::FILE_KIND,
        problem: text::shortened_message(problem),
    })
}

/// Text of a record without paths, as [`write()`] writes it.
pub fn record_text<T: RecordType>(record: &T) -> String {
    text_of_json::<T>(&record_to_json(record).expect("records have string keys and finite numbers"))
}

fn record_to_json<T: RecordType>(record: &T) -> Result<Value, serde_json::Error> {
    let mut value = serde_json::to_value(record)?;
    shorten_whole_numbers(&mut value);
    let envelope = value.as_object_mut().expect("records are structs");
    envelope.insert("schema".to_owned(), T::SCHEMA.into());
    envelope.insert("schema_version".to_owned(), T::SCHEMA_VERSION.into());
    if T::HAS_CHECKSUM {
        let checksum = checksum_of(&value);
        value
            .as_object_mut()
            .expect("records are structs")
            .insert("checksum".to_owned(), checksum.into());
    }
    Ok(value)
}

/// Replaces whole floating-point numbers by integers, which are written without ".0".
fn shorten_whole_numbers(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(shorten_whole_numbers),
        Value::Object(fields) => fields.values_mut().for_each(shorten_whole_numbers),
        Value::Number(number) if number.is_f64() => {
            let exact = number.as_f64().filter(|it| it.fract() == 0.0 && it.abs() < 1e15);
            *value = exact.map_or_else(|| value.clone(), |it| (it as i64).into());
        }
        _ => {}
    }
}

fn text_of_json<T: RecordType>(value: &Value) -> String {
    let mut text = String::new();
    write_pretty_json(value, 0, T::ONE_LINE_FIELDS, &mut text);
    text.push('\n');
    text
}

/// Replaces a file atomically: a temporary file in the same folder, synced, then renamed.
pub fn write_text(path: &Path, text: &str) -> Result<(), RecordFileError> {
    replace_files([(path, text)])
}

/// Replaces several files: the new content of all files is on the disk before the first file is
/// renamed.
///
/// # Errors
/// Fails if a file cannot be written; if one does not fit on the disk, none is replaced.
pub fn replace_files<'a>(
    files: impl IntoIterator<Item = (&'a Path, &'a str)>,
) -> Result<(), RecordFileError> {
    let io =
        |path: &Path, cause| RecordFileError::Io { action: "write", path: path.to_owned(), cause };
    let prepared = files.into_iter().map(|(path, text)| {
        let file = prepared_temporary_file(path, text)?;
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

/// A temporary file in the folder of a path, with its content on the disk.
fn prepared_temporary_file(
    path: &Path,
    content: impl AsRef<[u8]>,
) -> Result<tempfile::NamedTempFile, RecordFileError> {
    let io = |cause| RecordFileError::Io { action: "write", path: path.to_owned(), cause };
    let file = temporary_beside(path).map_err(io)?;
    write_synced(file.as_file(), content).map_err(io)?;
    Ok(file)
}

/// Writes the content of a new file and syncs it to the disk.
pub(super) fn write_synced(mut file: &File, content: impl AsRef<[u8]>) -> std::io::Result<()> {
    file.write_all(content.as_ref())?;
    file.sync_all()
}

/// Creates a record atomically: of two processes that create the same file, one succeeds.
///
/// # Errors
/// Fails with the errors of [`write()`], and when a file of that name exists, which stays
/// unchanged.
pub fn write_new<T: RecordType>(path: &Path, record: &T) -> Result<(), RecordFileError> {
    let io = |cause| RecordFileError::Io { action: "write", path: path.to_owned(), cause };
    match prepared_temporary_file(path, readable_text(path, record)?)?.persist_noclobber(path) {
        Ok(_) => Ok(()),
        // Some file systems cannot create a file exclusively; there the file is replaced.
        Err(error) if !path.exists() => {
            error.file.persist(path).map_err(|error| io(error.error)).map(drop)
        }
        Err(_) => Err(io(std::io::ErrorKind::AlreadyExists.into())),
    }
}

/// Follows a link to the file that it names, and returns any other path unchanged, so that a file
/// under the name of a link is read, changed and written in place.
pub fn follow_link(path: &Path) -> PathBuf {
    let is_link = std::fs::symlink_metadata(path).is_ok_and(|facts| facts.is_symlink());
    let led = is_link.then(|| std::fs::canonicalize(path).ok()).flatten();
    led.unwrap_or_else(|| path.to_owned())
}

/// Hash of a record's values, however the file is spaced.
fn checksum_of(value: &Value) -> String {
    text_hash(&value.to_string())
}

/// Hash of a text, as 32 hexadecimal digits.
pub fn text_hash(text: &str) -> String {
    format!("{:032x}", xxhash_rust::xxh3::xxh3_128(text.as_bytes()))
}

/// Hash of a file's content, as 32 hexadecimal digits.
pub fn content_hash_of_file(path: &Path) -> Result<String, RecordFileError> {
    let io = |cause| RecordFileError::Io { action: "read", path: path.to_owned(), cause };
    let mut file = open_regular_file(path).map_err(io)?;
    let mut hasher = xxhash_rust::xxh3::Xxh3Default::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match std::io::Read::read(&mut file, &mut buffer).map_err(io)? {
            0 => return Ok(format!("{:032x}", hasher.digest128())),
            read => hasher.update(&buffer[..read]),
        }
    }
}

/// Hash of several texts, with their boundaries: 32 hexadecimal digits.
pub fn hash_of_all<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hasher = xxhash_rust::xxh3::Xxh3Default::new();
    for text in texts {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    format!("{:032x}", hasher.digest128())
}

/// A temporary file in the folder of `path`, which is created if it is missing. The caller fills
/// and renames the temporary file.
///
/// # Errors
/// Fails if the folder cannot be made or written.
pub fn temporary_beside(path: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    remove_abandoned_files(folder);
    let mut builder = tempfile::Builder::new();
    // Like any new file, readable according to the user's umask, not private like a temporary
    // file.
    use std::os::unix::fs::PermissionsExt;
    builder.permissions(std::fs::Permissions::from_mode(0o666));
    let file = builder.prefix(TEMPORARY_PREFIX).tempfile_in(folder)?;
    // The system gives back the lock of a writer that is killed.
    let _ = file.as_file().try_lock();
    Ok(file)
}

/// A temporary folder in another one, which the caller fills and renames. The open file marks the
/// temporary folder as in use.
///
/// # Errors
/// Fails if the temporary folder cannot be made.
pub fn temporary_folder(folder: &Path) -> std::io::Result<(tempfile::TempDir, Option<File>)> {
    remove_abandoned_files(folder);
    let temporary = tempfile::Builder::new().prefix(TEMPORARY_PREFIX).tempdir_in(folder)?;
    let held = File::open(temporary.path()).ok().filter(|held| held.try_lock().is_ok());
    Ok((temporary, held))
}

/// Removes temporary files and folders, and locks, that a writer left in a folder when it was
/// killed.
pub(super) fn remove_abandoned_files(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if !(is_temporary_file_name(&name)
            || (name.starts_with('.') && name.ends_with(".json.lock")))
        {
            continue;
        }
        let Ok(facts) = entry.metadata() else { continue };
        let age = facts.modified().ok().and_then(|modified| modified.elapsed().ok());
        let path = entry.path();
        if !(facts.is_file() || facts.is_dir() && is_temporary_file_name(&name)) {
            continue;
        }
        // The lock file is removed while it is locked, so that a process waiting for the lock
        // notices that its file is gone.
        let opened = open_regular_file(&path);
        let least = match opened.as_ref().map(File::try_lock) {
            Ok(Ok(())) => Some(ABANDONED_FILE_AGE),
            Ok(Err(TryLockError::WouldBlock)) => None,
            Ok(Err(TryLockError::Error(_))) | Err(_) => Some(ABANDONED_FILE_AGE_WITHOUT_LOCKS),
        };
        if least.is_some_and(|least| age > Some(least)) {
            // Another writer may remove the temporary file before this process does.
            let _ = match facts.is_dir() {
                true => std::fs::remove_dir_all(path),
                false => std::fs::remove_file(path),
            };
        }
    }
}

/// True for names that [`temporary_beside`] and [`temporary_folder`] give.
fn is_temporary_file_name(name: &str) -> bool {
    const RANDOM_CHARACTERS: usize = 6;
    name.strip_prefix(TEMPORARY_PREFIX).is_some_and(|drawn| {
        drawn.len() == RANDOM_CHARACTERS && drawn.bytes().all(|byte| byte.is_ascii_alphanumeric())
    })
}

/// Checks that a file can be written: creates its folder, which must have room for the present size
/// and a little more.
///
/// # Errors
/// Fails if no file can be written at the path.
pub fn check_writable(path: &Path) -> Result<(), RecordFileError> {
    let io = |cause| RecordFileError::Io { action: "write", path: path.to_owned(), cause };
    if path.is_dir() {
        return Err(io(std::io::ErrorKind::IsADirectory.into()));
    }
    let room = std::fs::metadata(path).map_or(0, |facts| facts.len()) + MIN_FREE_BYTES;
    let mut probe = temporary_beside(path).map_err(io)?;
    std::io::copy(&mut std::io::repeat(0).take(room), &mut probe).map_err(io)?;
    probe.as_file().sync_all().map_err(io)
}

#[cfg(test)]
mod tests;
