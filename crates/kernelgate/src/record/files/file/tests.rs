use super::*;
use serde::Deserialize;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct TestRecord {
    name: String,
    values: Vec<f64>,
}

impl RecordType for TestRecord {
    const SCHEMA: &'static str = "kernelgate.sample";
    const SCHEMA_VERSION: u64 = 2;
    const FILE_KIND: &'static str = "sample";

    fn validate(&self) -> Result<(), String> {
        if self.values.is_empty() { Err("no values".to_owned()) } else { Ok(()) }
    }
}

/// A test record with text in every place where a record may have text.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct FreeTextRecord {
    id: String,
    list: Vec<String>,
    nested: std::collections::BTreeMap<String, Vec<String>>,
    messages: std::collections::BTreeMap<String, Vec<String>>,
}

impl RecordType for FreeTextRecord {
    const SCHEMA: &'static str = "kernelgate.free_text";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "free text";
    const FREE_TEXT_FIELDS: &'static [&'static str] = &["messages"];

    fn validate(&self) -> Result<(), String> {
        Ok(())
    }
}

#[test]
fn control_characters_are_allowed_only_in_free_text_fields() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    let map = |name: &str, value: &str| [(name.to_owned(), vec![value.to_owned()])].into();
    let record_of = |[id, item, name, value, case, message]: [&str; 6]| FreeTextRecord {
        id: id.to_owned(),
        list: vec!["x".to_owned(), item.to_owned()],
        nested: map(name, value),
        messages: map(case, message),
    };
    let read_back = |record: &FreeTextRecord| {
        std::fs::write(&path, record_text(record)).unwrap();
        let read = read::<FreeTextRecord>(&path).map_err(|error| error.to_string());
        // Writing refuses every record that reading refuses.
        let written = write(&path, record).map_err(|error| error.to_string());
        let expected = read.as_ref().map(drop).map_err(|why| why.replacen("read", "write", 1));
        assert_eq!(written, expected);
        read
    };
    let bad = "a\u{1b}[2J";
    for (place, field) in [(0, "id:"), (1, "list:"), (2, "the name"), (3, "n:"), (4, "the name")] {
        let mut strings = ["i", "l", "n", "v", "c", "m"];
        strings[place] = bad;
        let message = read_back(&record_of(strings)).unwrap_err();
        let file = path.display();
        let why = format!("{field} `a\\u{{1b}}[2J` holds a control character");
        assert_eq!(message, format!("failed to read {file}: invalid free text: {why}"));
    }
    let valid = record_of(["i", "l", "n", "v", "c", bad]);
    assert_eq!(read_back(&valid), Ok(valid));
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct RecordWithChecksum {
    values: Vec<f64>,
}

impl RecordType for RecordWithChecksum {
    const SCHEMA: &'static str = "kernelgate.sealed";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "sealed";
    const HAS_CHECKSUM: bool = true;

    fn validate(&self) -> Result<(), String> {
        Ok(())
    }
}

#[test]
fn an_edited_record_is_refused_and_changed_white_space_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    let record = RecordWithChecksum { values: vec![0.1, 1.0, 1e-300] };
    write(&path, &record).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(read::<RecordWithChecksum>(&path).unwrap(), record);
    std::fs::write(&path, text.replace("  ", "\t")).unwrap();
    assert_eq!(read::<RecordWithChecksum>(&path).unwrap(), record);
    std::fs::write(&path, text.replace("0.1", "0.2")).unwrap();
    let error = read::<RecordWithChecksum>(&path).unwrap_err().to_string();
    assert!(
        error.contains("edited") && error.contains(&format!("baseline seal {}", path.display())),
        "{error}"
    );
    assert_eq!(read_without_checksum::<RecordWithChecksum>(&path).unwrap().values[0], 0.2);
    // The test removes the checksum from the text, as in records that were written before checksums
    // existed.
    let old: Vec<&str> = text.lines().filter(|line| !line.contains("checksum")).collect();
    std::fs::write(&path, old.join("\n")).unwrap();
    assert_eq!(read::<RecordWithChecksum>(&path).unwrap(), record);
}

fn example_record() -> TestRecord {
    TestRecord { name: "a \"quoted\" name".to_owned(), values: vec![1.5, 2.0] }
}

#[test]
fn records_round_trip_and_their_bytes_are_stable() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/er/file.json");
    write(&path, &example_record()).unwrap();
    let first = std::fs::read_to_string(&path).unwrap();
    assert_eq!(read::<TestRecord>(&path).unwrap(), example_record());
    write(&path, &example_record()).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), first);
    assert!(first.contains("\"values\": [1.5, 2]"), "{first}");
    assert_eq!(
        std::fs::read_dir(path.parent().unwrap()).unwrap().count(),
        1,
        "no temporary file is left"
    );
}

#[test]
fn every_number_keeps_its_value_when_written_and_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.json");
    let values: Vec<f64> = (1..2000).map(|i| f64::from(i) * 1e5 / 19.0).collect();
    write(&path, &TestRecord { values: values.clone(), ..example_record() }).unwrap();
    assert_eq!(read::<TestRecord>(&path).unwrap().values, values);
}

#[test]
fn broken_files_are_refused_with_their_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.json");
    let whole = record_text(&example_record());
    let cases = [
        (
            whole[..whole.len() / 2].to_owned(),
            "broken or cut short (EOF while parsing a string at line 3 column 23)",
        ),
        ("[1, 2]".to_owned(), "not a kernelgate sample"),
        ("{\"schema\": \"other\", \"schema_version\": 1}".to_owned(), "not a kernelgate sample"),
        (
            whole.replace("\"schema_version\": 2", "\"schema_version\": 0"),
            "not a kernelgate sample",
        ),
        (
            whole.replace("\"schema_version\": 2", "\"schema_version\": 3"),
            "written by a newer kernelgate (schema 3, this one reads up to 2)",
        ),
        (whole.replace("[1.5, 2]", "[]"), "invalid sample: no values"),
        (
            whole.replace("[1.5, 2]", "[\"x\"]"),
            "invalid sample: invalid type: string \"x\", expected f64 at line 5 column 16",
        ),
    ];
    for (text, wanted) in cases {
        std::fs::write(&path, &text).unwrap();
        let message = read::<TestRecord>(&path).unwrap_err().to_string();
        assert_eq!(message, format!("failed to read {}: {wanted}", path.display()));
    }
    assert!(read::<TestRecord>(&folder.path().join("none.json")).unwrap_err().is_not_found());
}

#[test]
fn writing_an_invalid_record_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.json");
    let invalid = TestRecord { values: Vec::new(), ..example_record() };
    let expected = format!("failed to write {}: invalid sample: no values", path.display());
    assert_eq!(write_new(&path, &invalid).unwrap_err().to_string(), expected);
    assert!(!path.exists());
    write(&path, &example_record()).unwrap();
    assert_eq!(write(&path, &invalid).unwrap_err().to_string(), expected);
    assert_eq!(read::<TestRecord>(&path).unwrap(), example_record());
}

#[test]
fn a_failed_write_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let blocked = folder.path().join("file");
    std::fs::write(&blocked, "old").unwrap();
    let error = write(&blocked.join("below.json"), &example_record()).unwrap_err();
    assert!(matches!(error, RecordFileError::Io { action: "write", .. }), "{error}");
    assert_eq!(std::fs::read_to_string(&blocked).unwrap(), "old");
}

/// The first pass over a file must read all of its content.
#[test]
fn reordered_fields_pass_the_checksum_and_a_changed_value_fails() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    write(&path, &RecordWithChecksum { values: vec![-0.0, 1e300, 0.1, 3.0] }).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    // The test reorders the fields, as another program may write them.
    let (head, last) = text.trim_end_matches("\n}\n").rsplit_once(",\n").unwrap();
    let turned = format!("{{\n{last},\n{}\n}}", head.trim_start_matches("{\n"));
    assert_ne!(turned, text);
    std::fs::write(&path, &turned).unwrap();
    assert_eq!(read::<RecordWithChecksum>(&path).unwrap().values, [-0.0, 1e300, 0.1, 3.0]);
    std::fs::write(&path, turned.replace("0.1", "0.2")).unwrap();
    assert!(matches!(read::<RecordWithChecksum>(&path), Err(RecordFileError::Edited { .. })));
    // The first pass of the reader takes the last value of a repeated name, the second no value.
    std::fs::write(&path, text.replace("\"values\"", "\"values\": [],\n  \"values\"")).unwrap();
    assert!(read::<RecordWithChecksum>(&path).is_err());
}

/// A commit may hold a link to a device, and a bench may leave a pipe where its response belongs.
#[test]
fn rejects_paths_that_are_not_regular_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    std::os::unix::fs::symlink("/dev/null", &path).unwrap();
    let why = read::<RecordWithChecksum>(&path).unwrap_err().to_string();
    let reason = "it is no file but a device, a pipe or a socket";
    assert_eq!(why, format!("failed to read {}: {reason}", path.display()));
    assert!(content_hash_of_file(&path).is_err());
    std::fs::remove_file(&path).unwrap();
    let socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
    assert!(read_untrusted_text(&path, 10).unwrap_err().to_string().contains("no file"));
    drop(socket);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "ten bytes.").unwrap();
    assert_eq!(read_untrusted_text(&path, 10).unwrap(), "ten bytes.");
    assert_eq!(read_untrusted_text(&path, 9).unwrap_err().to_string(), "larger than 9 bytes");
}

#[test]
fn a_writer_removes_temporary_files_of_dead_processes() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let old = std::time::SystemTime::now() - 2 * ABANDONED_FILE_AGE;
    let aged = |name: &str| {
        let file = File::create(at(name)).unwrap();
        file.set_modified(old).unwrap();
        file
    };
    let held = temporary_beside(&at("a")).unwrap();
    held.as_file().set_modified(old).unwrap();
    drop([".kernelgate-oldold", ".kernelgate-ours", "old"].map(aged));
    std::fs::create_dir(at(".kernelgate-folder")).unwrap();
    std::fs::write(at(".kernelgate-folder/a"), "x").unwrap();
    File::open(at(".kernelgate-folder")).unwrap().set_modified(old).unwrap();
    std::fs::write(at(".kernelgate-newnew"), "x").unwrap();
    let waited_for = aged(".b.json.lock");
    waited_for.lock().unwrap();
    drop([".c.json.lock", ".d.lock"].map(aged));
    write_text(&at("a"), "x").unwrap();
    assert!(!at(".kernelgate-oldold").exists() && !at(".kernelgate-folder").exists());
    assert!(!at(".c.json.lock").exists());
    let kept = [".kernelgate-newnew", ".kernelgate-ours", "old", ".b.json.lock", ".d.lock"];
    assert!(kept.iter().all(|name| at(name).exists()));
    assert!(held.path().exists(), "its writer still writes");
}

#[test]
fn an_object_with_a_repeated_name_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.json");
    let run = crate::record::ProcessRun::start_now(
        "b",
        "s",
        crate::record::Environment::cpu(),
        crate::record::Provenance::default(),
    );
    let text = record_text(&run);
    let read_with = |from: &str, to: &str| {
        std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
        read::<crate::record::ProcessRun>(&path)
    };
    assert_eq!(read_with("", "").unwrap(), run);
    let skipped = r#""skipped": {"a": "x", "a": "y"}"#;
    let refused = read_with(r#""skipped": {}"#, skipped).unwrap_err().to_string();
    assert_eq!(
        refused,
        format!("failed to read {}: invalid run: a field has a name twice", path.display())
    );
    let twice = r#""cores": 1, "os": "x", "cores": 2"#;
    let refused = read_with(r#""cores""#, &format!("{twice}, \"x\"")).unwrap_err().to_string();
    assert_eq!(
        refused,
        format!("failed to read {}: invalid run: environment has a name twice", path.display())
    );
}
