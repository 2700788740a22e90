//! Writes JSON in the layout of record files.

use std::fmt::Write as _;

use serde_json::Value;

/// Two-space JSON with sorted keys (`serde_json::Value` sorts them) and lists of plain values on
/// one line, so that a diff shows one line a list of samples. Entries of the fields named in
/// `lines` take one line each, and so do short objects inside other objects.
pub(super) fn write_pretty_json(value: &Value, depth: usize, lines: &[&str], out: &mut String) {
    let is_nested = |value: &Value| value.is_array() || value.is_object();
    match value {
        Value::Object(map) if depth > 0 && fits_one_line(map, lines) => {
            let fields = map.iter().map(|(key, value)| {
                let mut text = String::new();
                write_pretty_json(value, depth + 1, lines, &mut text);
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
                        write_entry_lines(entries, depth + 1, out)
                    }
                    value => write_pretty_json(value, depth + 1, lines, out),
                }
                out.push_str(if i + 1 < map.len() { ",\n" } else { "\n" });
            }
            let _ = write!(out, "{:indent$}}}", "", indent = 2 * depth);
        }
        Value::Array(items) if items.iter().any(is_nested) => {
            out.push_str("[\n");
            for (i, item) in items.iter().enumerate() {
                let _ = write!(out, "{:indent$}", "", indent = 2 * (depth + 1));
                write_pretty_json(item, depth + 1, lines, out);
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

/// Longest object that stands on one line, in characters of compact JSON.
const MAX_LINE_CHARACTERS: usize = 100;

/// Returns whether an object is written on one line.
fn fits_one_line(map: &serde_json::Map<String, Value>, lines: &[&str]) -> bool {
    let has_lines = map.iter().any(|(key, value)| value.is_object() && lines.contains(&&**key));
    map.len() < MAX_LINE_CHARACTERS
        && !has_lines
        && serde_json::to_string(map).is_ok_and(|it| it.len() <= MAX_LINE_CHARACTERS)
}

/// Writes the entries of an object, one on each line.
fn write_entry_lines(entries: &serde_json::Map<String, Value>, depth: usize, out: &mut String) {
    out.push_str("{\n");
    for (i, (key, value)) in entries.iter().enumerate() {
        let comma = if i + 1 < entries.len() { "," } else { "" };
        let key = Value::from(key.as_str());
        let _ = writeln!(out, "{:indent$}{key}: {value}{comma}", "", indent = 2 * (depth + 1));
    }
    let _ = write!(out, "{:indent$}}}", "", indent = 2 * depth);
}
