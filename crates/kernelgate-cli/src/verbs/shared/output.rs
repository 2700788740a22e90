//! Output of the kernelgate verbs: text, Markdown and JSON, files of results, and the command line
//! that repeats a call.

use std::path::Path;

use anyhow::Context as _;

use crate::fleet::job_commands::shell_quoted_if_necessary;
use clap::ValueEnum;
use kernelgate::display;
use kernelgate::display::harmless_text::EscapedForMarkdown;
use kernelgate::display::table::AlignedTextTable;
use kernelgate::display::terminal;
use kernelgate::record::file_set::ReplacementFileSet;
use kernelgate::record::text::{escape_control_characters_in_json, indent_every_line};

/// Format in which a verb prints its result: text, Markdown or JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum OutputFormat {
    /// Text for a terminal.
    #[default]
    Text,
    /// JSON for programs.
    Json,
    /// Markdown for a pull-request comment or a page.
    Markdown,
}

impl OutputFormat {
    /// Escapes a text that others wrote, such as a failure message, so that it is harmless in this
    /// output format.
    pub fn escape_foreign_text(self, text: &str) -> String {
        if self == Self::Markdown {
            EscapedForMarkdown(text).to_string()
        } else {
            indent_every_line(text)
        }
    }
}

impl OutputFormat {
    /// Formats a table for this output format, as wide as the terminal if the output is a terminal.
    /// In the Markdown format, an empty line follows the table.
    pub fn format_table(self, table: &AlignedTextTable) -> String {
        match self {
            Self::Markdown => table.to_markdown() + "\n",
            _ => table.aligned_text_for_terminal(terminal::terminal_columns()),
        }
    }

    /// Prints lines in this output format: wrapped to the width of the terminal, unless the format
    /// is Markdown.
    pub fn print_wrapped_lines(self, text: &str) {
        match self {
            Self::Markdown => println!("{text}"),
            _ => terminal::print_broken_to_terminal_width(text),
        }
    }
}

pub fn print_as_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    print!("{}", json_safe_for_terminals(value)?);
    Ok(())
}

/// Returns an error if the output file of a flag is the same file as an input, even through a link.
pub fn refuse_to_overwrite_input(flag: &str, out: &Path, source: &Path) -> anyhow::Result<()> {
    let same = match (out.canonicalize(), source.canonicalize()) {
        (Ok(out), Ok(source)) => out == source || are_paths_of_same_file(&out, &source),
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

/// Whether two paths refer to the same existing file.
fn are_paths_of_same_file(one: &Path, two: &Path) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let id = |path: &Path| path.metadata().ok().map(|facts| (facts.dev(), facts.ino()));
    id(one).is_some_and(|one| id(two) == Some(one))
}

/// Writes a set of files, given as file names and texts, into a folder: either all files or none.
/// `absent` names files of an earlier set that the new set lacks; these files are removed.
pub fn write_all_files_or_none<'a>(
    folder: &Path,
    files: impl IntoIterator<Item = (&'a str, String)>,
    absent: &[&str],
) -> anyhow::Result<()> {
    let write = || {
        let set = ReplacementFileSet::begin_file_set_for_folder(folder)?;
        files.into_iter().try_for_each(|(name, text)| set.add_synced_file(name, text))?;
        set.replace_earlier_set(absent)
    };
    write().context("--out")
}

/// Formats a value as JSON, with characters that control a terminal escaped.
pub fn json_safe_for_terminals(value: &impl serde::Serialize) -> anyhow::Result<String> {
    Ok(escape_control_characters_in_json(serde_json::to_string_pretty(value)?) + "\n")
}

/// The command-line arguments of this process, as text.
pub fn command_line_arguments_of_process() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}

/// A shell command line that repeats the call of this process without some flags; the flags of the
/// first list have a value.
pub fn shell_command_line_without_flags(
    arguments: impl Iterator<Item = String>,
    valued: &[&str],
    bare: &[&str],
) -> String {
    let words = display::words_without_flags(arguments, valued, bare);
    let words = words.iter().map(|word| shell_quoted_if_necessary(word));
    std::iter::once("kernelgate".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_printed_command_line_can_be_typed_into_a_shell() {
        let line = |words: &[&str]| {
            shell_command_line_without_flags(
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
