//! A table of `nsys stats`, and its output as CSV, JSON and text.

use std::fmt::Write as _;

/// A value in a table: text, number or empty.
#[derive(Debug, Clone, PartialEq)]
pub enum TableCell {
    Text(String),
    /// A whole number.
    Integer(i64),
    /// A number that is printed with the given number of decimals.
    DecimalWithPlaces(f64, usize),
    /// An empty cell, for an unknown value.
    EmptyCell,
}

impl TableCell {
    /// Returns the value of the cell as unquoted text for CSV.
    pub fn cell_as_csv_text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Integer(value) => value.to_string(),
            Self::DecimalWithPlaces(value, decimals) => format!("{value:.decimals$}"),
            Self::EmptyCell => String::new(),
        }
    }

    fn cell_as_json(&self) -> serde_json::Value {
        match self {
            Self::Text(text) => text.as_str().into(),
            Self::Integer(value) => (*value).into(),
            // A decimal number is rounded to the decimals of the CSV output.
            Self::DecimalWithPlaces(..) => {
                self.cell_as_csv_text().parse::<f64>().map_or(serde_json::Value::Null, Into::into)
            }
            Self::EmptyCell => serde_json::Value::Null,
        }
    }
}

/// Rows under titles.
#[derive(Debug, Clone, PartialEq)]
pub struct StatsTable {
    /// The report's name.
    pub report_name: &'static str,
    /// Titles of the columns, including units.
    pub column_titles: Vec<&'static str>,
    /// Rows of the table; each row has one cell per column.
    pub rows: Vec<Vec<TableCell>>,
    /// Index of the column in which `--filter` searches.
    pub filtered_column_index: usize,
}

impl StatsTable {
    /// Keeps only the rows whose name matches the regular expression. The percentages of the
    /// remaining rows are unchanged, because they refer to the unfiltered table.
    pub fn keep_rows_with_matching_name(&mut self, expression: &regex::Regex) {
        let column = self.filtered_column_index;
        self.rows.retain(|row| expression.is_match(&row[column].cell_as_csv_text()));
    }

    /// Replaces every text cell of the table, for example to escape control characters for a
    /// terminal.
    pub fn replace_text_cells(&mut self, shown: impl Fn(&str) -> String) {
        for cell in self.rows.iter_mut().flatten() {
            if let TableCell::Text(text) = cell {
                *text = shown(text);
            }
        }
    }

    /// Formats the table as CSV, with the column titles in the first line.
    pub fn to_csv(&self) -> String {
        let mut writer = csv::Writer::from_writer(Vec::new());
        let written = writer.write_record(&self.column_titles).and_then(|()| {
            self.rows.iter().try_for_each(|row| {
                writer.write_record(row.iter().map(TableCell::cell_as_csv_text))
            })
        });
        let bytes = written.ok().and_then(|()| writer.into_inner().ok());
        String::from_utf8(bytes.expect("writing to memory does not fail")).expect("cells are UTF-8")
    }

    /// Formats the table as JSON: `{"report": …, "rows": [{title: value}]}`.
    pub fn table_as_json(&self) -> serde_json::Value {
        let rows: Vec<serde_json::Value> = self
            .rows
            .iter()
            .map(|row| {
                let fields = self
                    .column_titles
                    .iter()
                    .zip(row)
                    .map(|(&title, cell)| (title.to_owned(), cell.cell_as_json()));
                serde_json::Value::Object(fields.collect())
            })
            .collect();
        serde_json::json!({ "report": self.report_name, "rows": rows })
    }

    /// Formats the table for a terminal of 100 columns: aligned, with thousands separators, and
    /// with `…` in the middle of long names.
    pub fn to_terminal_text(&self) -> String {
        const TERMINAL_COLUMNS: usize = 100;
        let cells: Vec<Vec<String>> =
            self.rows.iter().map(|row| row.iter().map(cell_as_terminal_text).collect()).collect();
        let last = self.column_titles.len() - 1;
        let width = |column: usize| {
            let rows = cells.iter().map(|row| row[column].chars().count());
            rows.max().unwrap_or(0).max(self.column_titles[column].len())
        };
        let mut widths: Vec<usize> = (0..self.column_titles.len()).map(width).collect();
        let before: usize = widths[..last].iter().map(|width| width + 2).sum();
        widths[last] = widths[last].min(TERMINAL_COLUMNS.saturating_sub(before).max(40));
        let right: Vec<bool> = (0..self.column_titles.len())
            .map(|column| !self.rows.iter().any(|row| matches!(row[column], TableCell::Text(_))))
            .collect();
        let mut text = String::new();
        let titles: Vec<String> =
            self.column_titles.iter().map(|&title| title.to_owned()).collect();
        for row in std::iter::once(&titles).chain(&cells) {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let cell = shorten_in_the_middle(cell, widths[column]);
                let width = widths[column];
                let _ = if right[column] {
                    write!(line, "{cell:>width$}  ")
                } else {
                    write!(line, "{cell:<width$}  ")
                };
            }
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text
    }
}

fn cell_as_terminal_text(cell: &TableCell) -> String {
    match cell {
        TableCell::Integer(value) => with_thousands_separators(value),
        TableCell::DecimalWithPlaces(..) => with_thousands_separators(cell.cell_as_csv_text()),
        _ => cell.cell_as_csv_text(),
    }
}

/// `1234567.8` as `1,234,567.8`.
pub fn with_thousands_separators(number: impl ToString) -> String {
    let number = number.to_string();
    let (whole, fraction) =
        number.split_once('.').map_or((number.as_str(), None), |(w, f)| (w, Some(f)));
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    let mut text = sign.to_owned();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    if let Some(fraction) = fraction {
        text.push('.');
        text.push_str(fraction);
    }
    text
}

/// Shortens a text to at most `width` characters by replacing its middle with `…`; control
/// characters become spaces.
pub fn shorten_in_the_middle(text: &str, width: usize) -> String {
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let length = clean.chars().count();
    if length <= width || width < 3 {
        return clean;
    }
    let head = (width - 1) * 2 / 3;
    let tail = width - 1 - head;
    let mut short: String = clean.chars().take(head).collect();
    short.push('…');
    short.extend(clean.chars().skip(length - tail));
    short
}
