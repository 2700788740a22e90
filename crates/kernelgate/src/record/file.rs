//! Reading and writing record files: the envelope with its schema, stable JSON, atomic replacement.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::text;

/// A type with a file format of its own.
pub trait Record: Serialize + DeserializeOwned {
    /// Names the format inside the file.
    const SCHEMA: &'static str;
    /// Version this build writes; it reads this one and the older ones it knows.
    const VERSION: u64;
    /// What a person calls such a file: "baseline".
    const KIND: &'static str;
    /// Whether the file carries a checksum of its content, so that an edit by hand is noticed.
    /// Files without one are read too.
    const SEALED: bool = false;
    /// Fields whose values are messages, commands or paths, which may hold any character. Every
    /// other string, and every name of a field, is refused where it holds a control character.
    const FREE_TEXT: &'static [&'static str] = &[];

    /// What the types alone do not enforce: a fragment that says what is wrong.
    ///
    /// # Errors
    /// When the content contradicts itself.
    fn validate(&self) -> Result<(), String>;
}

/// Why a record file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The operating system said no.
    #[error("{action} {path}: {cause}")]
    Io {
        /// "read", "write" or "lock".
        action: &'static str,
        /// Which file.
        path: PathBuf,
        /// What it said.
        cause: std::io::Error,
    },
    /// Not JSON, or cut short.
    #[error("read {path}: broken or cut short ({cause})")]
    Json {
        /// Which file.
        path: PathBuf,
        /// Where it broke.
        cause: serde_json::Error,
    },
    /// JSON, but of something else.
    #[error("read {path}: not a kernelgate {kind}")]
    Foreign {
        /// Which file.
        path: PathBuf,
        /// What was wanted.
        kind: &'static str,
    },
    /// From a later version of this program.
    #[error(
        "read {path}: written by a newer kernelgate (schema {found}, this one reads up to {known})"
    )]
    Newer {
        /// Which file.
        path: PathBuf,
        /// Version in the file.
        found: u64,
        /// Latest version known here.
        known: u64,
    },
    /// Others changed it all the time.
    #[error(
        "lock {path}: another process has held {lock} for {waited_s} s: wait for it, or end it"
    )]
    Locked {
        /// Which file.
        path: PathBuf,
        /// What is locked in its place.
        lock: PathBuf,
        /// For how long.
        waited_s: u64,
    },
    /// The content is not what was written.
    #[error(
        "read {path}: edited or merged after kernelgate wrote it (its checksum does not match); \
         where that is intended, `kernelgate baseline seal {path}` accepts it as it is"
    )]
    Edited {
        /// Which file.
        path: PathBuf,
    },
    /// The right format with impossible content.
    #[error("read {path}: invalid {kind}: {problem}")]
    Invalid {
        /// Which file.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
        /// What is wrong.
        problem: String,
    },
}

impl FileError {
    /// Whether the file simply is not there.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { cause, .. } if cause.kind() == std::io::ErrorKind::NotFound)
    }
}

/// Reads and validates a record.
///
/// # Errors
/// When the file is missing, broken, foreign, newer than this program, edited although it is
/// sealed, or contradicts itself.
pub fn read<T: Record>(path: &Path) -> Result<T, FileError> {
    read_checked(path, true)
}

/// The same, whatever the checksum says.
///
/// # Errors
/// As [`read()`], without that of an edit.
pub fn read_unsealed<T: Record>(path: &Path) -> Result<T, FileError> {
    read_checked(path, false)
}

fn read_checked<T: Record>(path: &Path, check: bool) -> Result<T, FileError> {
    let text = std::fs::read(path).map_err(|cause| FileError::Io {
        action: "read",
        path: path.to_owned(),
        cause,
    })?;
    let mut value: Value = serde_json::from_slice(&text)
        .map_err(|cause| FileError::Json { path: path.to_owned(), cause })?;
    let foreign = || FileError::Foreign { path: path.to_owned(), kind: T::KIND };
    let envelope = value.as_object_mut().ok_or_else(foreign)?;
    let checksum = envelope.remove("checksum");
    let edited =
        || checksum.is_some_and(|checksum| checksum.as_str() != Some(&checksum_of(&value)));
    let edited = T::SEALED && check && edited();
    let envelope = value.as_object_mut().ok_or_else(foreign)?;
    if envelope.remove("schema").as_ref().and_then(Value::as_str) != Some(T::SCHEMA) {
        return Err(foreign());
    }
    let found = envelope
        .remove("schema_version")
        .as_ref()
        .and_then(Value::as_u64)
        .filter(|&found| found > 0)
        .ok_or_else(foreign)?;
    if found > T::VERSION {
        return Err(FileError::Newer { path: path.to_owned(), found, known: T::VERSION });
    }
    if edited {
        return Err(FileError::Edited { path: path.to_owned() });
    }
    let invalid =
        |problem: String| FileError::Invalid { path: path.to_owned(), kind: T::KIND, problem };
    check_text(&value, Some(T::KIND), T::FREE_TEXT).map_err(invalid)?;
    let record: T = serde_json::from_value(value).map_err(|error| invalid(error.to_string()))?;
    record.validate().map_err(invalid)?;
    Ok(record)
}

/// Refuses control characters in names and in every string that is not free text. `field` is the
/// field whose value this is; free text is none.
fn check_text(value: &Value, field: Option<&str>, free: &[&str]) -> Result<(), String> {
    match value {
        Value::String(string) => {
            let Some(field) = field else { return Ok(()) };
            text::check_plain(string).map_err(|problem| format!("{field}: {problem}"))
        }
        Value::Array(items) => items.iter().try_for_each(|item| check_text(item, field, free)),
        Value::Object(fields) => fields.iter().try_for_each(|(name, value)| {
            text::check_plain(name).map_err(|problem| format!("the name {problem}"))?;
            let is_free = field.is_none() || free.contains(&name.as_str());
            check_text(value, (!is_free).then_some(name), free)
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
    }
}

/// Writes a record: the old file or the new one is there at any time, never half of one.
///
/// # Errors
/// When the folder cannot be made or written, or the disk is full; the old file is then untouched.
pub fn write<T: Record>(path: &Path, record: &T) -> Result<(), FileError> {
    write_text(path, &to_text(record))
}

/// The text of a record as [`write()`] writes it.
pub fn to_text<T: Record>(record: &T) -> String {
    let mut value =
        serde_json::to_value(record).expect("records have string keys and finite numbers");
    let envelope = value.as_object_mut().expect("records are structs");
    envelope.insert("schema".to_owned(), T::SCHEMA.into());
    envelope.insert("schema_version".to_owned(), T::VERSION.into());
    if T::SEALED {
        let checksum = checksum_of(&value);
        value
            .as_object_mut()
            .expect("records are structs")
            .insert("checksum".to_owned(), checksum.into());
    }
    let mut text = String::new();
    pretty(&value, 0, &mut text);
    text.push('\n');
    text
}

/// Replaces a file atomically: a temporary file in the same folder, synced, then renamed.
///
/// # Errors
/// As [`write()`].
pub fn write_text(path: &Path, text: &str) -> Result<(), FileError> {
    let io = |cause| FileError::Io { action: "write", path: path.to_owned(), cause };
    let mut file = temporary_beside(path).map_err(io)?;
    file.write_all(text.as_bytes()).map_err(io)?;
    file.as_file().sync_all().map_err(io)?;
    file.persist(path).map_err(|error| io(error.error))?;
    Ok(())
}

/// Hash of a record's values, however the file is spaced.
fn checksum_of(value: &Value) -> String {
    text_hash(&value.to_string())
}

/// Hash of a text: 32 hexadecimal digits.
pub fn text_hash(text: &str) -> String {
    format!("{:032x}", xxhash_rust::xxh3::xxh3_128(text.as_bytes()))
}

/// Content hash of a file: 32 hexadecimal digits.
///
/// # Errors
/// When the file cannot be read.
pub fn content_hash(path: &Path) -> Result<String, FileError> {
    let io = |cause| FileError::Io { action: "read", path: path.to_owned(), cause };
    let mut file = std::fs::File::open(path).map_err(io)?;
    let mut hasher = xxhash_rust::xxh3::Xxh3Default::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match std::io::Read::read(&mut file, &mut buffer).map_err(io)? {
            0 => return Ok(format!("{:032x}", hasher.digest128())),
            read => hasher.update(&buffer[..read]),
        }
    }
}

/// Hash of some texts, each by itself: 32 hexadecimal digits.
pub fn hash_of_all<'a>(texts: impl IntoIterator<Item = &'a str>) -> String {
    let mut hasher = xxhash_rust::xxh3::Xxh3Default::new();
    for text in texts {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    format!("{:032x}", hasher.digest128())
}

/// A temporary file in the folder of `path`, which is made where it is missing: to be filled and
/// then renamed.
///
/// # Errors
/// When the folder cannot be made or written.
pub fn temporary_beside(path: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    {
        // As any newly created file: readable as the user's umask says, not private like a
        // temporary file.
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(std::fs::Permissions::from_mode(0o666));
    }
    builder.prefix(".kernelgate-").tempfile_in(folder)
}

/// Two-space JSON with sorted keys (`serde_json::Value` sorts them) and lists of plain values on
/// one line, so that a diff shows one line a list of samples.
fn pretty(value: &Value, depth: usize, out: &mut String) {
    let is_nested = |value: &Value| value.is_array() || value.is_object();
    match value {
        Value::Object(map) if !map.is_empty() => {
            out.push_str("{\n");
            for (i, (key, value)) in map.iter().enumerate() {
                let _ = write!(
                    out,
                    "{:indent$}{}: ",
                    "",
                    Value::from(key.as_str()),
                    indent = 2 * (depth + 1)
                );
                pretty(value, depth + 1, out);
                out.push_str(if i + 1 < map.len() { ",\n" } else { "\n" });
            }
            let _ = write!(out, "{:indent$}}}", "", indent = 2 * depth);
        }
        Value::Array(items) if items.iter().any(is_nested) => {
            out.push_str("[\n");
            for (i, item) in items.iter().enumerate() {
                let _ = write!(out, "{:indent$}", "", indent = 2 * (depth + 1));
                pretty(item, depth + 1, out);
                out.push_str(if i + 1 < items.len() { ",\n" } else { "\n" });
            }
            let _ = write!(out, "{:indent$}]", "", indent = 2 * depth);
        }
        Value::Array(items) => {
            let items: Vec<String> = items.iter().map(Value::to_string).collect();
            let _ = write!(out, "[{}]", items.join(", "));
        }
        plain => out.push_str(&plain.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct TestRecord {
        name: String,
        values: Vec<f64>,
    }

    impl Record for TestRecord {
        const SCHEMA: &'static str = "kernelgate.sample";
        const VERSION: u64 = 2;
        const KIND: &'static str = "sample";

        fn validate(&self) -> Result<(), String> {
            if self.values.is_empty() { Err("no values".to_owned()) } else { Ok(()) }
        }
    }

    /// Strings wherever a record may have them.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Told {
        id: String,
        list: Vec<String>,
        nested: std::collections::BTreeMap<String, Vec<String>>,
        messages: std::collections::BTreeMap<String, Vec<String>>,
    }

    impl Record for Told {
        const SCHEMA: &'static str = "kernelgate.told";
        const VERSION: u64 = 1;
        const KIND: &'static str = "told";
        const FREE_TEXT: &'static [&'static str] = &["messages"];

        fn validate(&self) -> Result<(), String> {
            Ok(())
        }
    }

    #[test]
    fn control_characters_are_refused_but_in_messages() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let map = |name: &str, value: &str| [(name.to_owned(), vec![value.to_owned()])].into();
        let told = |[id, item, name, value, case, message]: [&str; 6]| Told {
            id: id.to_owned(),
            list: vec!["x".to_owned(), item.to_owned()],
            nested: map(name, value),
            messages: map(case, message),
        };
        let read_back = |record: &Told| {
            write(&path, record).unwrap();
            read::<Told>(&path).map_err(|error| error.to_string())
        };
        let bad = "a\u{1b}[2J";
        for (place, field) in [(0, "id"), (1, "list"), (2, "the name"), (3, "n"), (4, "the name")] {
            let mut strings = ["i", "l", "n", "v", "c", "m"];
            strings[place] = bad;
            let message = read_back(&told(strings)).unwrap_err();
            let wanted = format!("invalid told: {field}");
            assert!(
                message.contains(&wanted) && message.contains("`a\\u{1b}[2J` holds a control"),
                "{message}"
            );
            assert!(!message.contains('\u{1b}'));
        }
        let fine = told(["i", "l", "n", "v", "c", bad]);
        assert_eq!(read_back(&fine), Ok(fine));
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Sealed {
        values: Vec<f64>,
    }

    impl Record for Sealed {
        const SCHEMA: &'static str = "kernelgate.sealed";
        const VERSION: u64 = 1;
        const KIND: &'static str = "sealed";
        const SEALED: bool = true;

        fn validate(&self) -> Result<(), String> {
            Ok(())
        }
    }

    #[test]
    fn an_edit_is_noticed_and_spaces_are_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let record = Sealed { values: vec![0.1, 1.0, 1e-300] };
        write(&path, &record).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(read::<Sealed>(&path).unwrap(), record);
        std::fs::write(&path, text.replace("  ", "\t")).unwrap();
        assert_eq!(read::<Sealed>(&path).unwrap(), record);
        std::fs::write(&path, text.replace("0.1", "0.2")).unwrap();
        let error = read::<Sealed>(&path).unwrap_err().to_string();
        assert!(
            error.contains("edited")
                && error.contains(&format!("baseline seal {}", path.display())),
            "{error}"
        );
        assert_eq!(read_unsealed::<Sealed>(&path).unwrap().values[0], 0.2);
        // As written before there were checksums.
        let old: Vec<&str> = text.lines().filter(|line| !line.contains("checksum")).collect();
        std::fs::write(&path, old.join("\n")).unwrap();
        assert_eq!(read::<Sealed>(&path).unwrap(), record);
    }

    fn sample() -> TestRecord {
        TestRecord { name: "a \"quoted\" name".to_owned(), values: vec![1.5, 2.0] }
    }

    #[test]
    fn what_is_written_is_read_back_and_bytes_are_stable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/file.json");
        write(&path, &sample()).unwrap();
        let first = std::fs::read_to_string(&path).unwrap();
        assert_eq!(read::<TestRecord>(&path).unwrap(), sample());
        write(&path, &sample()).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), first);
        assert!(first.contains("\"values\": [1.5, 2.0]"), "{first}");
        assert_eq!(
            std::fs::read_dir(path.parent().unwrap()).unwrap().count(),
            1,
            "no temporary file is left"
        );
    }

    #[test]
    fn every_number_survives_reading_and_writing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        let values: Vec<f64> = (1..2000).map(|i| f64::from(i) * 1e5 / 19.0).collect();
        write(&path, &TestRecord { values: values.clone(), ..sample() }).unwrap();
        assert_eq!(read::<TestRecord>(&path).unwrap().values, values);
    }

    #[test]
    fn broken_files_are_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.json");
        let whole = to_text(&sample());
        let cases = [
            (whole[..whole.len() / 2].to_owned(), "broken or cut short"),
            ("[1, 2]".to_owned(), "not a kernelgate sample"),
            (
                "{\"schema\": \"other\", \"schema_version\": 1}".to_owned(),
                "not a kernelgate sample",
            ),
            (
                whole.replace("\"schema_version\": 2", "\"schema_version\": 0"),
                "not a kernelgate sample",
            ),
            (
                whole.replace("\"schema_version\": 2", "\"schema_version\": 3"),
                "newer kernelgate (schema 3, this one reads up to 2)",
            ),
            (whole.replace("[1.5, 2.0]", "[]"), "invalid sample: no values"),
            (whole.replace("[1.5, 2.0]", "[\"x\"]"), "invalid sample: invalid type"),
        ];
        for (text, wanted) in cases {
            std::fs::write(&path, &text).unwrap();
            let message = read::<TestRecord>(&path).unwrap_err().to_string();
            assert!(message.contains(wanted) && message.contains("x.json"), "{message}");
        }
        assert!(read::<TestRecord>(&folder.path().join("none.json")).unwrap_err().is_not_found());
    }

    #[test]
    fn a_failed_write_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let blocked = folder.path().join("file");
        std::fs::write(&blocked, "old").unwrap();
        let error = write(&blocked.join("below.json"), &sample()).unwrap_err();
        assert!(error.to_string().starts_with("write "), "{error}");
        assert_eq!(std::fs::read_to_string(&blocked).unwrap(), "old");
    }
}
