//! Checks names from outside, which must be plain text, and cleans messages before a terminal shows
//! them.
//!
//! Names in a record are checked when the file is read, names that a bench declares when it starts;
//! other code need not check them again. Error messages may contain any character, because they are
//! cleaned when they are printed.

use std::borrow::Cow;
use std::path::Path;

/// Largest number of characters that a message quotes of a text from outside.
const MAX_QUOTED_CHARACTERS_OF_TEXT: usize = 200;
/// Number of characters kept from the end of a message whose middle is cut out.
const KEPT_END_OF_SHORTENED_MESSAGE: usize = 80;
/// Length of the longest accepted case id, bytes.
const MAX_CASE_ID_BYTES: usize = 1000;
/// Length of the longest accepted file name without its extension, characters.
pub(in crate::record) const MAX_FILE_NAME_CHARACTERS: usize = 64;

/// Returns whether a character controls a terminal, reorders the text around it, or is forbidden in
/// XML.
fn is_control_or_reordering_character(c: char) -> bool {
    let line_separator = ('\u{2028}'..='\u{2029}').contains(&c);
    let mark = matches!(c, '\u{61c}' | '\u{200e}'..='\u{200f}');
    let direction = mark || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || line_separator || direction || matches!(c, '\u{fffe}' | '\u{ffff}')
}

/// Replaces every character that would control a terminal or reorder text by its escape:
/// `a\u{1b}[2J`.
fn escape_control_characters(text: &str) -> String {
    let each = |c: char| {
        if is_control_or_reordering_character(c) {
            c.escape_default().to_string()
        } else {
            c.to_string()
        }
    };
    text.chars().map(each).collect()
}

/// Returns the beginning of a text for a quotation in a message, with "…" if the text is longer
/// than the limit.
pub fn shortened_quotation(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(MAX_QUOTED_CHARACTERS_OF_TEXT) {
        Some((at, _)) => Cow::Owned(format!("{}…", &text[..at])),
        None => Cow::Borrowed(text),
    }
}

/// Cuts out the middle of a long message, which may quote much text.
pub fn cut_middle_of_long_message(message: String) -> String {
    let count = message.chars().count();
    if count <= MAX_QUOTED_CHARACTERS_OF_TEXT + 2 * KEPT_END_OF_SHORTENED_MESSAGE {
        return message;
    }
    let end: String = message.chars().skip(count - KEPT_END_OF_SHORTENED_MESSAGE).collect();
    format!("{} {end}", shortened_quotation(&message))
}

/// Returns whether a name is a single path component that is valid on every operating system.
pub fn is_portable_file_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || ['.', '_', '-'].contains(&c);
    name.len() <= MAX_FILE_NAME_CHARACTERS
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(plain)
}

/// Fails if a text contains a line break or a control character that a terminal would act on.
///
/// # Errors
/// The error is a fragment of a message with the text, in which control characters are visible.
pub fn refuse_control_characters(text: &str) -> Result<(), String> {
    if text.chars().any(is_control_or_reordering_character) {
        Err(format!(
            "`{}` holds a control character",
            shortened_quotation(&escape_control_characters(text))
        ))
    } else {
        Ok(())
    }
}

/// Fails unless a text can be one part of an id: plain, not empty, without `/`.
///
/// # Errors
/// The error is a fragment of a message with the name, in which control characters are visible.
pub fn check_is_plain_name(name: &str) -> Result<(), String> {
    refuse_control_characters(name)?;
    let problem = match name {
        _ if name.trim().is_empty() => "is empty",
        "." | ".." => "names a folder",
        _ if name.contains('/') => "holds `/`, which separates the parts of an id",
        _ => return Ok(()),
    };
    Err(format!("`{}` {problem}", shortened_quotation(name)))
}

/// Fails unless a text consists of id parts separated by `/`, all of them plain and not empty.
///
/// # Errors
/// The error is a fragment of a message with the name, in which control characters are visible.
pub fn check_parts_of_id(names: &str) -> Result<(), String> {
    if !names.contains('/') {
        return check_is_plain_name(names);
    }
    let of_part = |problem: String| {
        format!("`{}`: its part {problem}", shortened_quotation(&escape_control_characters(names)))
    };
    names.split('/').try_for_each(|part| check_is_plain_name(part).map_err(of_part))
}

/// Fails unless a text can be a case id, also of a plain Criterion bench: plain, not blank, at most
/// 1000 bytes.
///
/// # Errors
/// The error is a fragment of a message with the id.
pub fn check_case_id_text(id: &str) -> Result<(), String> {
    match id {
        _ if id.trim().is_empty() => Err("a case without an id".to_owned()),
        _ if id.len() > MAX_CASE_ID_BYTES => Err(format!(
            "the id `{}` has more than {MAX_CASE_ID_BYTES} bytes",
            shortened_quotation(id)
        )),
        _ => Ok(()),
    }
}

/// Fails unless a text is a time as records contain it, in RFC 3339 format.
///
/// # Errors
/// The error is a fragment of a message with the text.
pub fn check_is_rfc3339_time(text: &str) -> Result<(), String> {
    let parsed = text.parse::<jiff::Timestamp>();
    parsed.map(drop).map_err(|_| format!("`{}` is no time", shortened_quotation(text)))
}

/// Makes a message safe to print on a terminal. Line breaks and tabs stay, colour sequences are
/// removed, and other control characters are escaped.
pub fn clean_message_for_terminal(text: &str) -> Cow<'_, str> {
    let kept = |c: char| c == '\n' || c == '\t' || !is_control_or_reordering_character(c);
    if text.chars().all(kept) {
        return Cow::Borrowed(text);
    }
    let (mut out, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(c) = rest.chars().next() {
        let after = &rest[c.len_utf8()..];
        rest = match text_after_leading_control_sequence(rest) {
            Some(after) => after,
            None if kept(c) => {
                out.push(c);
                after
            }
            // A Windows line ending (CR LF) is kept.
            None if c == '\r' && after.starts_with('\n') => after,
            None => {
                out.extend(c.escape_default());
                after
            }
        };
    }
    Cow::Owned(out)
}

/// Indents every line of a text, so that none of its lines can be mistaken for a line of the
/// surrounding output.
pub fn indent_every_line(text: &str) -> String {
    let text = clean_message_for_terminal(text);
    let lines = text.split('\n').map(str::trim_end).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("\n    ")
}

/// Returns equivalent JSON text in which control characters inside strings are escaped. Outside of
/// its strings, JSON text contains no control characters except line breaks.
pub fn escape_control_characters_in_json(json: String) -> String {
    let kept = |c: char| c == '\n' || !is_control_or_reordering_character(c);
    if json.chars().all(kept) {
        return json;
    }
    // All characters that must be escaped are at most U+FFFF, so that one `\u` escape suffices for
    // each.
    let escape = |c: char| if kept(c) { c.to_string() } else { format!("\\u{:04x}", u32::from(c)) };
    json.chars().map(escape).collect()
}

/// Returns a file path with control characters escaped, for a terminal.
pub fn path_for_terminal(path: &Path) -> String {
    clean_message_for_terminal(&path.display().to_string()).into_owned()
}

/// Returns a message on one line, with its words separated by single spaces.
pub fn join_lines_with_spaces(text: &str) -> String {
    clean_message_for_terminal(text).split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Returns the text after a complete control sequence (ECMA-48, 5.4) at its start, such as a colour
/// or cursor movement; `None` if it has none.
fn text_after_leading_control_sequence(text: &str) -> Option<&str> {
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
            assert_eq!(check_is_plain_name(good), Ok(()));
            assert_eq!(check_parts_of_id(&format!("{good}/{good}")), Ok(()));
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
            assert_eq!(check_is_plain_name(bad).unwrap_err(), wanted);
        }
        assert_eq!(check_case_id_text("a//b"), Ok(()), "Criterion has such ids");
        assert_eq!(check_case_id_text(" ").unwrap_err(), "a case without an id");
        let long = check_case_id_text(&"x".repeat(1001)).unwrap_err();
        assert_eq!(
            long,
            "the id `xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…` has more than 1000 bytes"
        );
        for bad in ["", "/a", "a/", "a//b", "a/../b", "a/\tb"] {
            assert!(check_parts_of_id(bad).is_err(), "{bad}");
        }
        assert_eq!(check_parts_of_id("a//b").unwrap_err(), "`a//b`: its part `` is empty");
        assert_eq!(
            check_parts_of_id("a/\u{1b}").unwrap_err(),
            "`a/\\u{1b}`: its part `\\u{1b}` holds a control character"
        );
    }

    #[test]
    fn a_long_text_is_cut_for_a_quotation() {
        assert_eq!(shortened_quotation(&"ü".repeat(200)), "ü".repeat(200));
        assert_eq!(shortened_quotation(&"ü".repeat(201)), format!("{}…", "ü".repeat(200)));
        let long = format!("a number is `{}`, wanted text at line 3", "9".repeat(100_000));
        let short = cut_middle_of_long_message(long);
        let (start, end) = ("9".repeat(200 - 13), "9".repeat(80 - 24));
        assert_eq!(short, format!("a number is `{start}… {end}`, wanted text at line 3"));
        assert_eq!(cut_middle_of_long_message("all of it".to_owned()), "all of it");
        let name = check_is_plain_name(&format!("{}/", "x".repeat(100_000))).unwrap_err();
        let start = "x".repeat(200);
        assert_eq!(name, format!("`{start}…` holds `/`, which separates the parts of an id"));
    }

    #[test]
    fn cleaned_messages_lose_control_sequences_and_keep_lines() {
        for plain in ["", "two\nlines\tand a tab", "größe … ≤ 5 µs"] {
            assert!(
                matches!(clean_message_for_terminal(plain), Cow::Borrowed(same) if same == plain)
            );
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
            let cleaned = clean_message_for_terminal(text);
            assert_eq!(cleaned, wanted);
            assert!(
                !cleaned.chars().any(is_control_or_reordering_character) || cleaned.contains('\n')
            );
        }
        assert_eq!(join_lines_with_spaces(" a\n\tb\u{1b}[0m  c "), "a b c");
        assert_eq!(
            indent_every_line("boom\r\n\n0 regressed\n  x\n"),
            "boom\n    0 regressed\n      x"
        );
    }

    #[test]
    fn control_characters_in_json_are_escaped_without_changing_values() {
        let plain = "{\n  \"a\": \"größe\"\n}".to_owned();
        assert_eq!(escape_control_characters_in_json(plain.clone()), plain);
        let bad = "\u{9b}31m\u{202e}\u{2028}\u{7f}\u{ffff}\u{1b}\n";
        let escaped = escape_control_characters_in_json(serde_json::to_string_pretty(bad).unwrap());
        assert_eq!(escaped, r#""\u009b31m\u202e\u2028\u007f\uffff\u001b\n""#);
        assert_eq!(serde_json::from_str::<String>(&escaped).unwrap(), bad);
    }
}
