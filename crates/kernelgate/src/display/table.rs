//! Formats tables of text cells, aligned for a terminal or as Markdown.

use super::harmless_text::EscapedForMarkdown;
use super::terminal::break_line_to_columns;
use crate::record::text::join_lines_with_spaces;

/// Maximum number of characters to which the cells of a column are padded.
const MAX_PADDED_COLUMN_WIDTH: usize = 200;
/// Minimum width in characters of the first column on a terminal.
const MIN_FIRST_COLUMN_WIDTH: usize = 8;

/// A table of text cells; the first column is left-aligned, all others are right-aligned. A row
/// with a single cell is a heading above the rows that follow.
#[derive(Debug, Clone, Default)]
pub struct AlignedTextTable {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl AlignedTextTable {
    /// Creates an empty table with these column names.
    pub fn new(header: &[&str]) -> Self {
        Self { header: header.iter().map(ToString::to_string).collect(), rows: Vec::new() }
    }

    /// Adds a row, which has one cell per column of the header.
    pub fn add_row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.header.len());
        self.rows.push(cells);
    }

    /// Adds a heading row, which may be wider than the table.
    pub fn add_heading(&mut self, text: String) {
        self.rows.push(vec![text]);
    }

    /// Names of the columns.
    pub fn column_names(&self) -> &[String] {
        &self.header
    }

    /// The rows of the table, including its heading rows.
    pub fn rows(&self) -> &[Vec<String>] {
        &self.rows
    }

    /// Whether the table has no rows.
    pub fn has_no_rows(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the table as text, with columns padded by spaces.
    pub fn aligned_text(&self) -> String {
        self.with_cleaned_cells(join_lines_with_spaces)
            .lines_of_joined_rows(|cells| cells.join("  ").trim_end().to_owned())
            .join("\n")
    }

    /// Formats the table for a terminal with `columns` columns, if given. A first cell that is too
    /// long for its column is printed in lines of its own above the other cells of its row.
    pub fn aligned_text_for_terminal(&self, columns: Option<usize>) -> String {
        let Some(columns) = columns else { return self.aligned_text() };
        let mut table = self.with_cleaned_cells(join_lines_with_spaces);
        let others: usize = table.column_widths().iter().skip(1).map(|width| width + 2).sum();
        let room = columns.saturating_sub(others).max(MIN_FIRST_COLUMN_WIDTH);
        let mut above = Vec::new();
        for row in std::iter::once(&mut table.header).chain(&mut table.rows) {
            let long = row.len() > 1 && row[0].chars().count() > room;
            above.push(
                long.then(|| break_line_to_columns(&std::mem::take(&mut row[0]), 2, columns)),
            );
        }
        let lines = table.lines_of_joined_rows(|cells| cells.join("  ").trim_end().to_owned());
        let each = above.into_iter().zip(lines).flat_map(|(above, line)| {
            above.into_iter().chain([break_line_to_columns(&line, MIN_FIRST_COLUMN_WIDTH, columns)])
        });
        each.collect::<Vec<_>>().join("\n")
    }

    /// A Markdown table.
    pub fn to_markdown(&self) -> String {
        let mut lines = self
            .with_cleaned_cells(|cell| EscapedForMarkdown(cell).to_string())
            .lines_of_joined_rows(|cells| format!("| {} |", cells.join(" | ")));
        let rule: Vec<&str> =
            (0..self.header.len()).map(|column| if column == 0 { "---" } else { "---:" }).collect();
        lines.insert(1, format!("| {} |", rule.join(" | ")));
        lines.join("\n")
    }

    fn with_cleaned_cells(&self, clean: fn(&str) -> String) -> Self {
        let row = |cells: &Vec<String>| cells.iter().map(|cell| clean(cell)).collect();
        Self { header: row(&self.header), rows: self.rows.iter().map(row).collect() }
    }

    /// Width of each column of the table, in characters.
    fn column_widths(&self) -> Vec<usize> {
        let all = || std::iter::once(&self.header).chain(&self.rows);
        let rows = || all().filter(|row| row.len() > 1 || self.header.len() == 1);
        let width = |column: usize| {
            rows().map(|row| row[column].chars().count().min(MAX_PADDED_COLUMN_WIDTH)).max()
        };
        (0..self.header.len()).map(|column| width(column).unwrap_or(0)).collect()
    }

    fn lines_of_joined_rows(&self, join: impl Fn(&[String]) -> String) -> Vec<String> {
        let all = || std::iter::once(&self.header).chain(&self.rows);
        let widths = self.column_widths();
        let pad = |row: &Vec<String>| -> Vec<String> {
            row.iter()
                .zip(&widths)
                .enumerate()
                .map(|(column, (cell, &width))| {
                    if column == 0 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                })
                .collect()
        };
        all().map(|row| join(&pad(row))).collect()
    }
}

/// Shortens a text to `most` characters on one line by cutting out its middle.
pub fn shorten_in_the_middle_to(text: &str, most: usize) -> String {
    let chars: Vec<char> = join_lines_with_spaces(text).chars().collect();
    if chars.len() <= most || most < 3 {
        return chars.into_iter().take(most).collect();
    }
    let (head, tail) = ((most - 1) / 2, most / 2);
    chars[..head].iter().chain(&['…']).chain(&chars[chars.len() - tail..]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_as_text_and_as_markdown() {
        let mut table = AlignedTextTable::new(&["case", "time"]);
        table.add_row(vec!["a".to_owned(), "1 µs".to_owned()]);
        table.add_row(vec!["longer".to_owned(), "10 ns".to_owned()]);
        assert_eq!(table.aligned_text(), "case     time\na        1 µs\nlonger  10 ns");
        assert_eq!(
            table.to_markdown(),
            "| case   |  time |\n| --- | ---: |\n| a      |  1 µs |\n| longer | 10 ns |"
        );
    }

    #[test]
    fn a_heading_does_not_widen_a_column() {
        let mut table = AlignedTextTable::new(&["case", "time"]);
        table.add_heading("a heading that is longer".to_owned());
        table.add_row(vec!["a".to_owned(), "1 µs".to_owned()]);
        let text = "case  time\na heading that is longer\na     1 µs";
        assert_eq!(table.aligned_text(), text);
        assert_eq!(table.aligned_text_for_terminal(Some(40)), text);
    }

    #[test]
    fn a_table_fits_a_terminal_without_cutting_ids() {
        let id = "family/operation/s1024_d64_full_f32/cuda/a_long_implementation/hot";
        let mut table = AlignedTextTable::new(&["case", "time", "limited by"]);
        table.add_row(vec!["a/b".to_owned(), "1 µs".to_owned(), "read".to_owned()]);
        table.add_row(vec![id.to_owned(), "10 ns".to_owned(), "matmul f32".to_owned()]);
        assert_eq!(table.aligned_text_for_terminal(None), table.aligned_text());
        assert_eq!(table.aligned_text_for_terminal(Some(200)), table.aligned_text());
        let narrow = table.aligned_text_for_terminal(Some(70));
        let expected = format!(
            "{:<46}   time  limited by\n{:<46}   1 µs        read\n{id}\n{:<46}  10 ns  matmul f32",
            "case", "a/b", ""
        );
        let squeezed = |text: &str| -> Vec<String> {
            let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
            text.lines().map(words).collect()
        };
        assert_eq!(squeezed(&narrow), squeezed(&expected));
        for columns in [40, 70, 100] {
            let text = table.aligned_text_for_terminal(Some(columns));
            assert!(text.lines().all(|line| line.chars().count() <= columns), "{text}");
            assert!(text.replace("\n  ", "").contains(id), "{text}");
        }
        let mut wide = AlignedTextTable::new(&["what", "why"]);
        wide.add_row(vec!["x".to_owned(), "a reason ".repeat(30)]);
        let text = wide.aligned_text_for_terminal(Some(60));
        assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
        assert_eq!(text.matches("reason").count(), 30, "{text}");
    }

    #[test]
    fn cells_with_line_breaks_or_markup_stay_on_one_line() {
        let mut table = AlignedTextTable::new(&["case"]);
        table.add_row(vec!["a\u{1b}[2J\n| b \\[x](y) <img>".to_owned()]);
        assert_eq!(table.aligned_text(), "case\na | b \\[x](y) <img>");
        let row = table.to_markdown().lines().last().map(str::to_owned);
        assert_eq!(row.as_deref(), Some("| a \\| b \\\\\\[x](y) &lt;img> |"));
    }
}
