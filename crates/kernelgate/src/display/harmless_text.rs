//! Text that others wrote, harmless in the medium that shows it: one type a medium.
//!
//! Ids, names of kernels, ranges and files, and messages may hold anything that a medium acts on.
//! Every output wraps such text in the type of its medium. Deliberately absent: HTML's own escapes,
//! which `maud` writes, and XML's, which `quick_junit` writes.

use std::fmt::{self, Write as _};

use crate::record::text::{on_one_line, printable_on_terminal};

/// Text for a terminal: control sequences and characters that reorder text are removed or escaped;
/// lines stay.
#[derive(Debug, Clone, Copy)]
pub struct TerminalText<'a>(pub &'a str);

/// Text for Markdown, on one line: it cannot end a cell, or contain HTML, a link, an image, a
/// mention, a reference to an issue or a bare URL.
#[derive(Debug, Clone, Copy)]
pub struct MarkdownText<'a>(pub &'a str);

/// Text for HTML and SVG: characters that a browser would not show, or would reorder, are escaped.
#[derive(Debug, Clone, Copy)]
pub struct HtmlText<'a>(pub &'a str);

/// Text for a field of CSV, on one line and without quotes: a text that a spreadsheet would
/// interpret as a formula begins with an apostrophe.
#[derive(Debug, Clone, Copy)]
pub struct CsvText<'a>(pub &'a str);

/// Text for JUnit XML, without characters that XML does not allow.
#[derive(Debug, Clone, Copy)]
pub struct JunitText<'a>(pub &'a str);

/// Invisible character that separates characters which a renderer would join.
const ZERO_WIDTH_SPACE: &str = "&#8203;";

impl fmt::Display for TerminalText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable_on_terminal(self.0))
    }
}

impl fmt::Display for HtmlText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable_on_terminal(self.0))
    }
}

impl fmt::Display for JunitText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable_on_terminal(self.0))
    }
}

impl fmt::Display for MarkdownText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = on_one_line(self.0);
        let mut before = ' ';
        for (at, c) in text.char_indices() {
            let after = &text[at + c.len_utf8()..];
            match c {
                '\\' | '|' | '[' => write!(f, "\\{c}")?,
                '<' => f.write_str("&lt;")?,
                '&' if after.starts_with(['#', '&']) || after.contains(';') => {
                    f.write_str("&amp;")?;
                }
                // The zero-width space keeps GitHub from mentioning people and linking issues.
                '@' => write!(f, "@{ZERO_WIDTH_SPACE}")?,
                '#' if after.starts_with(|c: char| c.is_ascii_digit()) => {
                    write!(f, "#{ZERO_WIDTH_SPACE}")?
                }
                // A bare URL.
                ':' if after.starts_with("//") => write!(f, ":{ZERO_WIDTH_SPACE}")?,
                '.' if before.eq_ignore_ascii_case(&'w') => write!(f, "{ZERO_WIDTH_SPACE}.")?,
                _ => f.write_char(c)?,
            }
            before = c;
        }
        Ok(())
    }
}

impl fmt::Display for CsvText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = on_one_line(self.0);
        // A number may begin with a sign.
        if text.starts_with(['=', '+', '-', '@']) && text.parse::<f64>().is_err() {
            f.write_char('\'')?;
        }
        f.write_str(&text)
    }
}

impl serde::Serialize for CsvText<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markdown_markup_in_foreign_text_is_escaped() {
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
            assert_eq!(MarkdownText(text).to_string(), shown);
        }
    }

    #[test]
    fn csv_formulas_in_foreign_text_are_disabled() {
        for (text, shown) in [
            ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
            ("@SUM(1)", "'@SUM(1)"),
            ("+1+2", "'+1+2"),
            ("-1.5e3", "-1.5e3"),
            ("a\tb\nc\u{1b}[2J", "a b c"),
            ("w/f=1", "w/f=1"),
        ] {
            assert_eq!(CsvText(text).to_string(), shown);
        }
    }

    #[test]
    fn terminal_html_and_junit_show_control_characters_as_escapes() {
        let text = "a\u{1b}]0;t\u{7}\u{202e}\u{ffff}\nb";
        let shown = "a\\u{1b}]0;t\\u{7}\\u{202e}\\u{ffff}\nb";
        assert_eq!(TerminalText(text).to_string(), shown);
        assert_eq!(HtmlText(text).to_string(), shown);
        assert_eq!(JunitText(text).to_string(), shown);
    }
}
