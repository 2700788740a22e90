//! Formats JSON in the layout of kernelgate's record files.

use std::fmt::Write as _;

use serde_json::Value;

/// Writes JSON with two spaces of indentation, sorted keys, and each list of plain values on one
/// line, which keeps diffs short. Entries of the fields named in `lines` take one line each; short
/// objects inside other objects take one line.
pub(super) fn write_json_in_record_layout(
    value: &Value,
    depth: usize,
    lines: &[&str],
    out: &mut String,
) {
    let is_nested = |value: &Value| value.is_array() || value.is_object();
    match value {
        Value::Object(map) if depth > 0 && is_object_written_on_one_line(map, lines) => {
            let fields = map.iter().map(|(key, value)| {
                let mut text = String::new();
                write_json_in_record_layout(value, depth + 1, lines, &mut text);
                format!("{}: {text}", Value::from(key.as_str()))
            });
            let _ = write!(out, "{{{}}}", fields.collect::<Vec<_>>().join(", "));
        }
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
                match value {
                    Value::Object(entries) if lines.contains(&key.as_str()) => {
                        write_each_entry_on_one_line(entries, depth + 1, out)
                    }
                    value => write_json_in_record_layout(value, depth + 1, lines, out),
                }
                out.push_str(if i + 1 < map.len() { ",\n" } else { "\n" });
            }
            let _ = write!(out, "{:indent$}}}", "", indent = 2 * depth);
        }
        Value::Array(items) if items.iter().any(is_nested) => {
            out.push_str("[\n");
            for (i, item) in items.iter().enumerate() {
                let _ = write!(out, "{:indent$}", "", indent = 2 * (depth + 1));
                write_json_in_record_layout(item, depth + 1, lines, out);
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

/// Length up to which an object is written on one line, in characters of compact JSON.
const MAX_ONE_LINE_OBJECT_CHARACTERS: usize = 100;

/// Returns whether the record layout writes this object on one line.
fn is_object_written_on_one_line(map: &serde_json::Map<String, Value>, lines: &[&str]) -> bool {
    let has_lines = map.iter().any(|(key, value)| value.is_object() && lines.contains(&&**key));
    map.len() < MAX_ONE_LINE_OBJECT_CHARACTERS
        && !has_lines
        && serde_json::to_string(map).is_ok_and(|it| it.len() <= MAX_ONE_LINE_OBJECT_CHARACTERS)
}

/// Writes the entries of an object, each on one line.
fn write_each_entry_on_one_line(
    entries: &serde_json::Map<String, Value>,
    depth: usize,
    out: &mut String,
) {
    out.push_str("{\n");
    for (i, (key, value)) in entries.iter().enumerate() {
        let comma = if i + 1 < entries.len() { "," } else { "" };
        let key = Value::from(key.as_str());
        let _ = writeln!(out, "{:indent$}{key}: {value}{comma}", "", indent = 2 * (depth + 1));
    }
    let _ = write!(out, "{:indent$}}}", "", indent = 2 * depth);
}
