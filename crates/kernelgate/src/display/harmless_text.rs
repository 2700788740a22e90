//! Escapes text from untrusted sources for the medium that displays the text; each medium has its
//! own type.
//!
//! Ids, names of kernels, ranges and files, and messages may contain characters that a terminal,
//! Markdown, HTML or a spreadsheet interprets. Every output wraps untrusted text in the type of its
//! medium. The crates `maud` and `quick_junit` write the escapes of HTML and XML markup.

use std::fmt::{self, Write as _};

use crate::record::text::{clean_message_for_terminal, join_lines_with_spaces};

/// Untrusted text for a terminal: control characters and characters that reorder text are escaped;
/// line breaks are kept.
#[derive(Debug, Clone, Copy)]
pub struct EscapedForTerminal<'a>(pub &'a str);

/// Untrusted text for Markdown, on one line: escaped so that it cannot end a table cell or become
/// HTML, a link, an image, a mention or an issue reference.
#[derive(Debug, Clone, Copy)]
pub struct EscapedForMarkdown<'a>(pub &'a str);

/// Untrusted text for HTML and SVG: characters that a browser would hide or reorder are escaped.
#[derive(Debug, Clone, Copy)]
pub struct EscapedForHtml<'a>(pub &'a str);

/// Untrusted text for a CSV field, on one line and without quotes; an apostrophe is prepended if a
/// spreadsheet would interpret the text as a formula.
#[derive(Debug, Clone, Copy)]
pub struct EscapedForCsv<'a>(pub &'a str);

/// Untrusted text for JUnit XML, with characters that XML forbids escaped.
#[derive(Debug, Clone, Copy)]
pub struct EscapedForJunit<'a>(pub &'a str);

/// HTML entity of the zero-width space, which separates characters that Markdown renderers would
/// join to a mention or link.
const ZERO_WIDTH_SPACE_ENTITY: &str = "&#8203;";

impl fmt::Display for EscapedForTerminal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&clean_message_for_terminal(self.0))
    }
}

impl fmt::Display for EscapedForHtml<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&clean_message_for_terminal(self.0))
    }
}

impl fmt::Display for EscapedForJunit<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&clean_message_for_terminal(self.0))
    }
}

impl fmt::Display for EscapedForMarkdown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = join_lines_with_spaces(self.0);
        let mut before = ' ';
        for (at, c) in text.char_indices() {
            let after = &text[at + c.len_utf8()..];
            match c {
                '\\' | '|' | '[' => write!(f, "\\{c}")?,
                '<' => f.write_str("&lt;")?,
                '&' if after.starts_with(['#', '&']) || after.contains(';') => {
                    f.write_str("&amp;")?;
                }
                // A zero-width space after `@` prevents GitHub from mentioning users, and after `#`
                // from linking issues.
                '@' => write!(f, "@{ZERO_WIDTH_SPACE_ENTITY}")?,
                '#' if after.starts_with(|c: char| c.is_ascii_digit()) => {
                    write!(f, "#{ZERO_WIDTH_SPACE_ENTITY}")?
                }
                // A bare URL.
                ':' if after.starts_with("//") => write!(f, ":{ZERO_WIDTH_SPACE_ENTITY}")?,
                '.' if before.eq_ignore_ascii_case(&'w') => {
                    write!(f, "{ZERO_WIDTH_SPACE_ENTITY}.")?
                }
                _ => f.write_char(c)?,
            }
            before = c;
        }
        Ok(())
    }
}

impl fmt::Display for EscapedForCsv<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = join_lines_with_spaces(self.0);
        // A signed number starts like a formula, but a spreadsheet reads it as a number.
        if text.starts_with(['=', '+', '-', '@']) && text.parse::<f64>().is_err() {
            f.write_char('\'')?;
        }
        f.write_str(&text)
    }
}

impl serde::Serialize for EscapedForCsv<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markdown_markup_in_untrusted_text_is_escaped() {
        for (text, shown) in [
            ("a|b\\c", "a\\|b\\\\c"),
            ("<b>x</b>", "&lt;b>x&lt;/b>"),
            ("![x](y) [l](z)", "!\\[x](y) \\[l](z)"),
            ("@team fix a@b.c", "@&#8203;team fix a@&#8203;b.c"),
            ("see o/r#1 and #x", "see o/r#&#8203;1 and #x"),
            ("http://x.y www.x.y", "http:&#8203;//x.y www&#8203;.x.y"),
            ("&lt;b&#62; a & b", "&amp;lt;b&amp;#&#8203;62; a & b"),
            ("two\nlines\u{1b}[31m\u{202e}", "two lines\\\\u{202e}"),
            ("größe 3.5 µs", "größe 3.5 µs"),
        ] {
            assert_eq!(EscapedForMarkdown(text).to_string(), shown);
        }
    }

    #[test]
    fn csv_formulas_in_untrusted_text_get_an_apostrophe() {
        for (text, shown) in [
            ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
            ("@SUM(1)", "'@SUM(1)"),
            ("+1+2", "'+1+2"),
            ("-1.5e3", "-1.5e3"),
            ("a\tb\nc\u{1b}[2J", "a b c"),
            ("w/f=1", "w/f=1"),
        ] {
            assert_eq!(EscapedForCsv(text).to_string(), shown);
        }
    }

    #[test]
    fn control_characters_are_escaped_on_terminals_html_and_junit() {
        let text = "a\u{1b}]0;t\u{7}\u{202e}\u{ffff}\nb";
        let shown = "a\\u{1b}]0;t\\u{7}\\u{202e}\\u{ffff}\nb";
        assert_eq!(EscapedForTerminal(text).to_string(), shown);
        assert_eq!(EscapedForHtml(text).to_string(), shown);
        assert_eq!(EscapedForJunit(text).to_string(), shown);
    }
}
