//! Tables, aligned for a terminal or as Markdown.

use crate::record::text::one_line;

/// Columns are padded to this many characters at most.
const WIDEST: usize = 200;

/// A table of cells; the first column is aligned left, the others right.
#[derive(Debug, Clone, Default)]
pub struct Table {
    header: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these column names.
    pub fn new(header: &[&str]) -> Self {
        Self { header: header.iter().map(ToString::to_string).collect(), rows: Vec::new() }
    }

    /// Adds a row with as many cells as the header.
    pub fn row(&mut self, cells: Vec<String>) {
        debug_assert_eq!(cells.len(), self.header.len());
        self.rows.push(cells);
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Columns padded with spaces.
    pub fn text(&self) -> String {
        self.cleaned(one_line).lines(|cells| cells.join("  ").trim_end().to_owned()).join("\n")
    }

    /// A Markdown table.
    pub fn markdown(&self) -> String {
        let mut lines = self.cleaned(escape).lines(|cells| format!("| {} |", cells.join(" | ")));
        let rule: Vec<&str> =
            (0..self.header.len()).map(|column| if column == 0 { "---" } else { "---:" }).collect();
        lines.insert(1, format!("| {} |", rule.join(" | ")));
        lines.join("\n")
    }

    fn cleaned(&self, clean: fn(&str) -> String) -> Self {
        let row = |cells: &Vec<String>| cells.iter().map(|cell| clean(cell)).collect();
        Self { header: row(&self.header), rows: self.rows.iter().map(row).collect() }
    }

    fn lines(&self, join: impl Fn(&[String]) -> String) -> Vec<String> {
        let all = || std::iter::once(&self.header).chain(&self.rows);
        let widths: Vec<usize> = (0..self.header.len())
            .map(|column| {
                all().map(|row| row[column].chars().count().min(WIDEST)).max().unwrap_or(0)
            })
            .collect();
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

/// A text on one line in which Markdown sees neither the end of a cell nor HTML, links or images.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in one_line(text).chars() {
        match c {
            '\\' | '|' | '[' => out.extend(['\\', c]),
            '<' => out.push_str("&lt;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_markdown_align() {
        let mut table = Table::new(&["case", "time"]);
        table.row(vec!["a".to_owned(), "1 µs".to_owned()]);
        table.row(vec!["longer".to_owned(), "10 ns".to_owned()]);
        assert_eq!(table.text(), "case     time\na        1 µs\nlonger  10 ns");
        assert_eq!(
            table.markdown(),
            "| case   |  time |\n| --- | ---: |\n| a      |  1 µs |\n| longer | 10 ns |"
        );
    }

    #[test]
    fn a_cell_is_one_line_and_no_markup() {
        let mut table = Table::new(&["case"]);
        table.row(vec!["a\u{1b}[2J\n| b \\[x](y) <img>".to_owned()]);
        assert_eq!(table.text(), "case\na | b \\[x](y) <img>");
        let row = table.markdown().lines().last().map(str::to_owned);
        assert_eq!(row.as_deref(), Some("| a \\| b \\\\\\[x](y) &lt;img> |"));
    }
}
