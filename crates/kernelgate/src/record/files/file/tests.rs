use super::*;
use serde::Deserialize;

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct NumberRecord {
    name: String,
    values: Vec<f64>,
}

impl RecordFileType for NumberRecord {
    const SCHEMA: &'static str = "kernelgate.sample";
    const SCHEMA_VERSION: u64 = 2;
    const FILE_KIND: &'static str = "sample";

    fn check_record_plausible(&self) -> Result<(), String> {
        if self.values.is_empty() { Err("no values".to_owned()) } else { Ok(()) }
    }
}

/// A test record that contains text in every place where records may contain text.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct FreeTextRecord {
    id: String,
    list: Vec<String>,
    nested: std::collections::BTreeMap<String, Vec<String>>,
    messages: std::collections::BTreeMap<String, Vec<String>>,
}

impl RecordFileType for FreeTextRecord {
    const SCHEMA: &'static str = "kernelgate.free_text";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "free text";
    const FIELDS_WITH_ANY_CHARACTERS: &'static [&'static str] = &["messages"];

    fn check_record_plausible(&self) -> Result<(), String> {
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
        std::fs::write(&path, json_text_of_record(record)).unwrap();
        let read = read_record::<FreeTextRecord>(&path).map_err(|error| error.to_string());
        // Writing refuses every record that reading would refuse.
        let written = write_record_atomically(&path, record).map_err(|error| error.to_string());
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

impl RecordFileType for RecordWithChecksum {
    const SCHEMA: &'static str = "kernelgate.sealed";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "sealed";
    const CONTAINS_CHECKSUM: bool = true;

    fn check_record_plausible(&self) -> Result<(), String> {
        Ok(())
    }
}

#[test]
fn an_edited_record_is_refused_but_white_space_may_change() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    let record = RecordWithChecksum { values: vec![0.1, 1.0, 1e-300] };
    write_record_atomically(&path, &record).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(read_record::<RecordWithChecksum>(&path).unwrap(), record);
    std::fs::write(&path, text.replace("  ", "\t")).unwrap();
    assert_eq!(read_record::<RecordWithChecksum>(&path).unwrap(), record);
    std::fs::write(&path, text.replace("0.1", "0.2")).unwrap();
    let error = read_record::<RecordWithChecksum>(&path).unwrap_err().to_string();
    assert!(
        error.contains("edited") && error.contains(&format!("baseline seal {}", path.display())),
        "{error}"
    );
    assert_eq!(read_record_ignoring_checksum::<RecordWithChecksum>(&path).unwrap().values[0], 0.2);
    // The test removes the checksum from the file, as in files written before checksums existed.
    let old: Vec<&str> = text.lines().filter(|line| !line.contains("checksum")).collect();
    std::fs::write(&path, old.join("\n")).unwrap();
    assert_eq!(read_record::<RecordWithChecksum>(&path).unwrap(), record);
}

fn example_number_record() -> NumberRecord {
    NumberRecord { name: "a \"quoted\" name".to_owned(), values: vec![1.5, 2.0] }
}

#[test]
fn a_record_is_read_back_and_its_bytes_are_stable() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/er/file.json");
    write_record_atomically(&path, &example_number_record()).unwrap();
    let first = std::fs::read_to_string(&path).unwrap();
    assert_eq!(read_record::<NumberRecord>(&path).unwrap(), example_number_record());
    write_record_atomically(&path, &example_number_record()).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), first);
    assert!(first.contains("\"values\": [1.5, 2]"), "{first}");
    assert_eq!(
        std::fs::read_dir(path.parent().unwrap()).unwrap().count(),
        1,
        "no temporary file is left"
    );
}

#[test]
fn every_number_is_read_back_with_its_value() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.json");
    let values: Vec<f64> = (1..2000).map(|i| f64::from(i) * 1e5 / 19.0).collect();
    write_record_atomically(
        &path,
        &NumberRecord { values: values.clone(), ..example_number_record() },
    )
    .unwrap();
    assert_eq!(read_record::<NumberRecord>(&path).unwrap().values, values);
}

#[test]
fn broken_record_files_are_refused_with_their_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.json");
    let whole = json_text_of_record(&example_number_record());
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
        let message = read_record::<NumberRecord>(&path).unwrap_err().to_string();
        assert_eq!(message, format!("failed to read {}: {wanted}", path.display()));
    }
    assert!(
        read_record::<NumberRecord>(&folder.path().join("none.json"))
            .unwrap_err()
            .is_because_file_is_missing()
    );
}

#[test]
fn writing_an_invalid_record_keeps_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.json");
    let invalid = NumberRecord { values: Vec::new(), ..example_number_record() };
    let expected = format!("failed to write {}: invalid sample: no values", path.display());
    assert_eq!(create_record_exclusively(&path, &invalid).unwrap_err().to_string(), expected);
    assert!(!path.exists());
    write_record_atomically(&path, &example_number_record()).unwrap();
    assert_eq!(write_record_atomically(&path, &invalid).unwrap_err().to_string(), expected);
    assert_eq!(read_record::<NumberRecord>(&path).unwrap(), example_number_record());
}

#[test]
fn a_failed_write_keeps_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let blocked = folder.path().join("file");
    std::fs::write(&blocked, "old").unwrap();
    let error =
        write_record_atomically(&blocked.join("below.json"), &example_number_record()).unwrap_err();
    assert!(matches!(error, RecordFileError::Io { failed_operation: "write", .. }), "{error}");
    assert_eq!(std::fs::read_to_string(&blocked).unwrap(), "old");
}

/// The reader's first pass (the scan) must read the whole content of the file.
#[test]
fn reordered_fields_pass_the_checksum_and_changed_values_fail() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    write_record_atomically(&path, &RecordWithChecksum { values: vec![-0.0, 1e300, 0.1, 3.0] })
        .unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    // The test reorders the fields of the file, as another program may write them.
    let (head, last) = text.trim_end_matches("\n}\n").rsplit_once(",\n").unwrap();
    let turned = format!("{{\n{last},\n{}\n}}", head.trim_start_matches("{\n"));
    assert_ne!(turned, text);
    std::fs::write(&path, &turned).unwrap();
    assert_eq!(read_record::<RecordWithChecksum>(&path).unwrap().values, [-0.0, 1e300, 0.1, 3.0]);
    std::fs::write(&path, turned.replace("0.1", "0.2")).unwrap();
    assert!(matches!(
        read_record::<RecordWithChecksum>(&path),
        Err(RecordFileError::ChecksumMismatch { .. })
    ));
    // A repeated name is refused, because the reader's two passes would take different values of
    // it.
    std::fs::write(&path, text.replace("\"values\"", "\"values\": [],\n  \"values\"")).unwrap();
    assert!(read_record::<RecordWithChecksum>(&path).is_err());
}

/// A git commit may contain a symbolic link to a device, and a bench may leave a pipe instead of
/// its response file.
#[test]
fn records_are_read_from_regular_files_only() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.json");
    std::os::unix::fs::symlink("/dev/null", &path).unwrap();
    let why = read_record::<RecordWithChecksum>(&path).unwrap_err().to_string();
    let reason = "it is no file but a device, a pipe or a socket";
    assert_eq!(why, format!("failed to read {}: {reason}", path.display()));
    assert!(file_content_hash_hex(&path).is_err());
    std::fs::remove_file(&path).unwrap();
    let socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
    assert!(read_untrusted_text_up_to(&path, 10).unwrap_err().to_string().contains("no file"));
    drop(socket);
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "ten bytes.").unwrap();
    assert_eq!(read_untrusted_text_up_to(&path, 10).unwrap(), "ten bytes.");
    assert_eq!(read_untrusted_text_up_to(&path, 9).unwrap_err().to_string(), "larger than 9 bytes");
}

#[test]
fn a_writer_removes_temporary_files_of_dead_processes() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let old = std::time::SystemTime::now() - 2 * ABANDONED_TEMPORARY_FILE_AGE;
    let aged = |name: &str| {
        let file = File::create(at(name)).unwrap();
        file.set_modified(old).unwrap();
        file
    };
    let held = create_temporary_file_beside(&at("a")).unwrap();
    held.as_file().set_modified(old).unwrap();
    drop([".kernelgate-oldold", ".kernelgate-ours", "old"].map(aged));
    std::fs::create_dir(at(".kernelgate-folder")).unwrap();
    std::fs::write(at(".kernelgate-folder/a"), "x").unwrap();
    File::open(at(".kernelgate-folder")).unwrap().set_modified(old).unwrap();
    std::fs::write(at(".kernelgate-newnew"), "x").unwrap();
    let waited_for = aged(".b.json.lock");
    waited_for.lock().unwrap();
    drop([".c.json.lock", ".d.lock"].map(aged));
    write_text_atomically(&at("a"), "x").unwrap();
    assert!(!at(".kernelgate-oldold").exists() && !at(".kernelgate-folder").exists());
    assert!(!at(".c.json.lock").exists());
    let kept = [".kernelgate-newnew", ".kernelgate-ours", "old", ".b.json.lock", ".d.lock"];
    assert!(kept.iter().all(|name| at(name).exists()));
    assert!(held.path().exists(), "its writer still writes");
}

#[test]
fn a_record_with_a_repeated_name_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.json");
    let run = crate::record::BenchProcessRun::empty_run_starting_now(
        "b",
        "s",
        crate::record::RunEnvironment::environment_of_process_on_cpu(),
        crate::record::CommitAndChanges::default(),
    );
    let text = json_text_of_record(&run);
    let read_with = |from: &str, to: &str| {
        std::fs::write(&path, text.replacen(from, to, 1)).unwrap();
        read_record::<crate::record::BenchProcessRun>(&path)
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
