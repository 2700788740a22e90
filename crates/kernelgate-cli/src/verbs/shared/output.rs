//! Output of verbs: formats, JSON, the command line again.

use std::path::Path;

use anyhow::Context as _;

use crate::fleet::job_commands::shell_quoted;
use clap::ValueEnum;
use kernelgate::display;
use kernelgate::display::harmless_text::MarkdownText;
use kernelgate::display::table::TextTable;
use kernelgate::display::terminal;
use kernelgate::record::file_set::PreparedFileSet;
use kernelgate::record::text::{indent_lines, json_with_escaped_controls};

/// Format in which a result is printed: text, Markdown or JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum OutputFormat {
    /// Text for a terminal.
    #[default]
    Text,
    /// JSON for programs.
    Json,
    /// Markdown for a pull request or a page.
    Markdown,
}

impl OutputFormat {
    /// Text that others wrote, such as a message, harmless in this format.
    pub fn words(self, text: &str) -> String {
        if self == Self::Markdown { MarkdownText(text).to_string() } else { indent_lines(text) }
    }
}

impl OutputFormat {
    /// A table in this format, within the terminal's width if there is a terminal. In Markdown an
    /// empty line follows the text.
    pub fn table(self, table: &TextTable) -> String {
        match self {
            Self::Markdown => table.to_markdown() + "\n",
            _ => table.text_within(terminal::terminal_columns()),
        }
    }

    /// Prints lines in this format: wrapped to the terminal's width, unless they are Markdown.
    pub fn print(self, text: &str) {
        match self {
            Self::Markdown => println!("{text}"),
            _ => terminal::print_wrapped(text),
        }
    }
}

pub fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    print!("{}", json(value)?);
    Ok(())
}

/// Refuses to overwrite a file that is also read, even if a link names it.
pub fn refuse_overwriting_source(flag: &str, out: &Path, source: &Path) -> anyhow::Result<()> {
    let same = match (out.canonicalize(), source.canonicalize()) {
        (Ok(out), Ok(source)) => out == source || are_same_file(&out, &source),
        _ => false,
    };
    anyhow::ensure!(
        !same,
        "{flag} {}: it is {}, which is read: give it another name",
        out.display(),
        source.display()
    );
    Ok(())
}

/// Whether two names refer to one file.
fn are_same_file(one: &Path, two: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let id = |path: &Path| path.metadata().ok().map(|facts| (facts.dev(), facts.ino()));
    id(one).is_some_and(|one| id(two) == Some(one))
}

/// Writes a set of files, given as names with texts, into a folder: all or none. `absent` are files
/// of an earlier set that this one lacks.
pub fn write_files<'a>(
    folder: &Path,
    files: impl IntoIterator<Item = (&'a str, String)>,
    absent: &[&str],
) -> anyhow::Result<()> {
    let write = || {
        let set = PreparedFileSet::new(folder)?;
        files.into_iter().try_for_each(|(name, text)| set.add(name, text))?;
        set.replace_file_set(absent)
    };
    write().context("--out")
}

/// Formats JSON so that terminals show it safely.
pub fn json(value: &impl serde::Serialize) -> anyhow::Result<String> {
    Ok(json_with_escaped_controls(serde_json::to_string_pretty(value)?) + "\n")
}

/// The arguments of the program, as text.
pub fn arguments_of_process() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}

/// The command line that repeats the call in a shell, without some flags; the flags of the first
/// list have a value.
pub fn shell_command_line(
    arguments: impl Iterator<Item = String>,
    valued: &[&str],
    bare: &[&str],
) -> String {
    let words = display::words_without_flags(arguments, valued, bare);
    let words = words.iter().map(|word| shell_quoted(word));
    std::iter::once("kernelgate".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_command_line_can_be_typed_into_a_shell() {
        let line = |words: &[&str]| {
            shell_command_line(
                words.iter().map(|word| (*word).to_owned()),
                &["--dir", "--output"],
                &["--resume"],
            )
        };
        let words = [
            "calibrate",
            "st_bif",
            "--dir",
            "/x/y",
            "--resume",
            "--output=/a.json",
            "--inject",
            "2,5",
        ];
        assert_eq!(line(&words), "kernelgate calibrate st_bif --inject 2,5");
        assert_eq!(
            line(&["compare", "a(b|c)", "it's", ""]),
            "kernelgate compare 'a(b|c)' 'it'\\''s' ''"
        );
        assert_eq!(line(&["compare", "--dir"]), "kernelgate compare");
    }
}
