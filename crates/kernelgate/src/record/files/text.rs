//! Handles text from outside: names that must be plain, and messages that are cleaned before a
//! terminal shows them.
//!
//! Names in a record are checked when the file is read (`file::read`), and declared names when a
//! bench starts (`harness::names`), so that other code need not check them. Error messages may hold
//! any character, because they are cleaned when they are printed.

use std::borrow::Cow;
use std::path::Path;

/// Characters of a foreign text that a message quotes.
const MAX_QUOTED_CHARACTERS: usize = 200;
/// Characters that are kept at the end of a message that is cut.
const KEPT_MESSAGE_END_CHARACTERS: usize = 80;
/// Longest id of a case, bytes.
const MAX_CASE_ID_BYTES: usize = 1000;
/// Longest name of a file, without its ending.
pub(in crate::record) const MAX_FILE_NAME_CHARACTERS: usize = 64;

/// Returns whether a character controls a terminal, reorders the text around it, or is not allowed
/// in XML.
fn is_control_character(c: char) -> bool {
    let line_separator = ('\u{2028}'..='\u{2029}').contains(&c);
    let mark = matches!(c, '\u{61c}' | '\u{200e}'..='\u{200f}');
    let direction = mark || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || line_separator || direction || matches!(c, '\u{fffe}' | '\u{ffff}')
}

/// Writes every character that would act on a terminal as its escape: `a\u{1b}[2J`.
fn visible_characters(text: &str) -> String {
    let each = |c: char| {
        if is_control_character(c) { c.escape_default().to_string() } else { c.to_string() }
    };
    text.chars().map(each).collect()
}

/// Start of a text, with "…" if it is longer than the limit for quotations in messages.
pub fn start_of_quotation(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_QUOTED_CHARACTERS) {
        Some((at, _)) => Cow::Owned(format!("{}…", &text[..at])),
        None => Cow::Borrowed(text),
    }
}

/// Cuts the middle of a long message, which may quote much text.
pub fn shortened_message(message: String) -> String {
    let count = message.chars().count();
    if count <= MAX_QUOTED_CHARACTERS + 2 * KEPT_MESSAGE_END_CHARACTERS {
        return message;
    }
    let end: String = message.chars().skip(count - KEPT_MESSAGE_END_CHARACTERS).collect();
    format!("{} {end}", start_of_quotation(&message))
}

/// Returns whether a name is a single plain path component on every operating system.
pub fn is_plain_file_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || ['.', '_', '-'].contains(&c);
    name.len() <= MAX_FILE_NAME_CHARACTERS
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(plain)
}

/// Accepts text that a terminal shows unchanged, on one line.
///
/// # Errors
/// The error is a fragment of a message with the text, in which control characters are visible.
pub fn check_plain_text(text: &str) -> Result<(), String> {
    if text.chars().any(is_control_character) {
        Err(format!(
            "`{}` holds a control character",
            start_of_quotation(&visible_characters(text))
        ))
    } else {
        Ok(())
    }
}

/// Accepts one part of an id: plain, not empty, without `/`.
///
/// # Errors
/// The error is a fragment of a message with the name, in which control characters are visible.
pub fn check_plain_name(name: &str) -> Result<(), String> {
    check_plain_text(name)?;
    let problem = match name {
        _ if name.trim().is_empty() => "is empty",
        "." | ".." => "names a folder",
        _ if name.contains('/') => "holds `/`, which separates the parts of an id",
        _ => return Ok(()),
    };
    Err(format!("`{}` {problem}", start_of_quotation(name)))
}

/// Accepts parts of an id, separated by `/`: none empty, all plain.
///
/// # Errors
/// The error is a fragment of a message with the name, in which control characters are visible.
pub fn check_id_parts(names: &str) -> Result<(), String> {
    if !names.contains('/') {
        return check_plain_name(names);
    }
    let of_part = |problem: String| {
        format!("`{}`: its part {problem}", start_of_quotation(&visible_characters(names)))
    };
    names.split('/').try_for_each(|part| check_plain_name(part).map_err(of_part))
}

/// Accepts the id of a case, also of a plain Criterion bench: not blank, and short enough for a
/// line.
///
/// # Errors
/// The error is a fragment of a message with the id.
pub fn check_case_id(id: &str) -> Result<(), String> {
    match id {
        _ if id.trim().is_empty() => Err("a case without an id".to_owned()),
        _ if id.len() > MAX_CASE_ID_BYTES => Err(format!(
            "the id `{}` has more than {MAX_CASE_ID_BYTES} bytes",
            start_of_quotation(id)
        )),
        _ => Ok(()),
    }
}

/// Accepts a time as records have it, RFC 3339.
///
/// # Errors
/// The error is a fragment of a message with the text.
pub fn check_rfc3339_time(text: &str) -> Result<(), String> {
    let parsed = text.parse::<jiff::Timestamp>();
    parsed.map(drop).map_err(|_| format!("`{}` is no time", start_of_quotation(text)))
}

/// Makes a message safe for a terminal. Lines and tabs stay, colours are removed, and other control
/// characters are escaped.
pub fn printable_on_terminal(text: &str) -> Cow<'_, str> {
    let kept = |c: char| c == '\n' || c == '\t' || !is_control_character(c);
    if text.chars().all(kept) {
        return Cow::Borrowed(text);
    }
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(c) = rest.chars().next() {
        let after = &rest[c.len_utf8()..];
        rest = match after_control_sequence(rest) {
            Some(after) => after,
            None if kept(c) => {
                out.push(c);
                after
            }
            // The end of a line in Windows' format is kept.
            None if c == '\r' && after.starts_with('\n') => after,
            None => {
                out.extend(c.escape_default());
                after
            }
        };
    }
    Cow::Owned(out)
}

/// Indents every line of a text, so that no line of it can be taken for a line of the surrounding
/// output.
pub fn indent_lines(text: &str) -> String {
    let text = printable_on_terminal(text);
    let lines = text.split('\n').map(str::trim_end).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("\n    ")
}

/// Returns equivalent JSON in which control characters are written as escapes. JSON text contains
/// no control characters outside of its strings except line breaks.
pub fn json_with_escaped_controls(json: String) -> String {
    let kept = |c: char| c == '\n' || !is_control_character(c);
    if json.chars().all(kept) {
        return json;
    }
    // No character that must be escaped is above U+FFFF, so one `\u` escape covers each.
    let escape = |c: char| if kept(c) { c.to_string() } else { format!("\\u{:04x}", u32::from(c)) };
    json.chars().map(escape).collect()
}

/// A file path with control characters escaped, for a terminal.
pub fn printable_path(path: &Path) -> String {
    printable_on_terminal(&path.display().to_string()).into_owned()
}

/// A message on one line, words separated by one space.
pub fn on_one_line(text: &str) -> String {
    printable_on_terminal(text).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Rest of the text after a whole control sequence at its start (ECMA-48, 5.4), such as colours and
/// cursor movements.
fn after_control_sequence(text: &str) -> Option<&str> {
    let rest = text.strip_prefix("\u{1b}[").or_else(|| text.strip_prefix('\u{9b}'))?;
    let rest = rest.trim_start_matches(|c| ('0'..='?').contains(&c));
    let rest = rest.trim_start_matches(|c| (' '..='/').contains(&c));
    rest.strip_prefix(|c| ('@'..='~').contains(&c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_names_are_accepted_and_path_parts_are_refused() {
        for good in ["st_bif", "pi0.5", "größe", "a b", "=1"] {
            assert_eq!(check_plain_name(good), Ok(()));
            assert_eq!(check_id_parts(&format!("{good}/{good}")), Ok(()));
        }
        for (bad, wanted) in [
            ("", "`` is empty"),
            (" ", "` ` is empty"),
            ("..", "`..` names a folder"),
            ("a/b", "`a/b` holds `/`, which separates the parts of an id"),
            ("a\nb", "`a\\nb` holds a control character"),
            ("a\u{1b}[2J", "`a\\u{1b}[2J` holds a control character"),
            ("a\u{9b}", "`a\\u{9b}` holds a control character"),
            ("a\u{7f}", "`a\\u{7f}` holds a control character"),
            ("a\u{202e}b", "`a\\u{202e}b` holds a control character"),
            ("a\u{2028}b", "`a\\u{2028}b` holds a control character"),
            ("a\u{fffe}b", "`a\\u{fffe}b` holds a control character"),
            ("a\u{ffff}b", "`a\\u{ffff}b` holds a control character"),
        ] {
            assert_eq!(check_plain_name(bad).unwrap_err(), wanted);
        }
        assert_eq!(check_case_id("a//b"), Ok(()), "Criterion has such ids");
        assert_eq!(check_case_id(" ").unwrap_err(), "a case without an id");
        let long = check_case_id(&"x".repeat(1001)).unwrap_err();
        assert_eq!(
            long,
            "the id `xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…` has more than 1000 bytes"
        );
        for bad in ["", "/a", "a/", "a//b", "a/../b", "a/\tb"] {
            assert!(check_id_parts(bad).is_err(), "{bad}");
        }
        assert_eq!(check_id_parts("a//b").unwrap_err(), "`a//b`: its part `` is empty");
        assert_eq!(
            check_id_parts("a/\u{1b}").unwrap_err(),
            "`a/\\u{1b}`: its part `\\u{1b}` holds a control character"
        );
    }

    #[test]
    fn a_quoted_text_is_cut_to_a_maximum_length() {
        assert_eq!(start_of_quotation(&"ü".repeat(200)), "ü".repeat(200));
        assert_eq!(start_of_quotation(&"ü".repeat(201)), format!("{}…", "ü".repeat(200)));
        let long = format!("a number is `{}`, wanted text at line 3", "9".repeat(100_000));
        let short = shortened_message(long);
        let (start, end) = ("9".repeat(200 - 13), "9".repeat(80 - 24));
        assert_eq!(short, format!("a number is `{start}… {end}`, wanted text at line 3"));
        assert_eq!(shortened_message("all of it".to_owned()), "all of it");
        let name = check_plain_name(&format!("{}/", "x".repeat(100_000))).unwrap_err();
        let start = "x".repeat(200);
        assert_eq!(name, format!("`{start}…` holds `/`, which separates the parts of an id"));
    }

    #[test]
    fn printed_messages_lose_control_sequences_and_keep_their_lines() {
        for plain in ["", "two\nlines\tand a tab", "größe … ≤ 5 µs"] {
            assert!(matches!(printable_on_terminal(plain), Cow::Borrowed(same) if same == plain));
        }
        for (text, wanted) in [
            ("\u{1b}[1;31merror\u{1b}[0m: x", "error: x"),
            ("\u{9b}31mred", "red"),
            ("a\u{1b}[2J\u{1b}[Hb", "ab"),
            ("a\u{1b}]0;title\u{7}b", "a\\u{1b}]0;title\\u{7}b"),
            ("a\u{1b}", "a\\u{1b}"),
            ("a\u{1b}[12", "a\\u{1b}[12"),
            ("100%\rgone", "100%\\rgone"),
            ("one\r\ntwo", "one\ntwo"),
            ("a\u{202e}b", "a\\u{202e}b"),
            ("\u{1b}\u{1b}[0m[31mx", "\\u{1b}[31mx"),
        ] {
            let cleaned = printable_on_terminal(text);
            assert_eq!(cleaned, wanted);
            assert!(!cleaned.chars().any(is_control_character) || cleaned.contains('\n'));
        }
        assert_eq!(on_one_line(" a\n\tb\u{1b}[0m  c "), "a b c");
        assert_eq!(indent_lines("boom\r\n\n0 regressed\n  x\n"), "boom\n    0 regressed\n      x");
    }

    #[test]
    fn control_characters_in_json_are_escaped_without_changing_values() {
        let plain = "{\n  \"a\": \"größe\"\n}".to_owned();
        assert_eq!(json_with_escaped_controls(plain.clone()), plain);
        let bad = "\u{9b}31m\u{202e}\u{2028}\u{7f}\u{ffff}\u{1b}\n";
        let escaped = json_with_escaped_controls(serde_json::to_string_pretty(bad).unwrap());
        assert_eq!(escaped, r#""\u009b31m\u202e\u2028\u007f\uffff\u001b\n""#);
        assert_eq!(serde_json::from_str::<String>(&escaped).unwrap(), bad);
    }
}
