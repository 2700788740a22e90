//! A table, and how it is written.

use std::fmt::Write as _;

/// A value in a table: text, number or empty.
#[derive(Debug, Clone, PartialEq)]
pub enum TableCell {
    Text(String),
    /// A whole number.
    Integer(i64),
    /// A number printed with this many decimals.
    Decimal(f64, usize),
    /// An empty cell, because the value is unknown.
    Empty,
}

impl TableCell {
    /// Returns the value as text in CSV format.
    pub fn csv_text(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Integer(value) => value.to_string(),
            Self::Decimal(value, decimals) => format!("{value:.decimals$}"),
            Self::Empty => String::new(),
        }
    }

    fn cell_to_json(&self) -> serde_json::Value {
        match self {
            Self::Text(text) => text.as_str().into(),
            Self::Integer(value) => (*value).into(),
            // The number has as many decimals as in CSV.
            Self::Decimal(..) => {
                self.csv_text().parse::<f64>().map_or(serde_json::Value::Null, Into::into)
            }
            Self::Empty => serde_json::Value::Null,
        }
    }
}

/// Rows under titles.
#[derive(Debug, Clone, PartialEq)]
pub struct StatsTable {
    /// The report's name.
    pub report: &'static str,
    /// Titles of the columns, with their units.
    pub columns: Vec<&'static str>,
    /// Rows of the table; each has one cell a column.
    pub rows: Vec<Vec<TableCell>>,
    /// Index of the column that `--filter` searches.
    pub named_by: usize,
}

impl StatsTable {
    /// Keeps only the rows whose name matches. Shares are not changed, because they refer to the
    /// whole table.
    pub fn keep_matching_rows(&mut self, expression: &regex::Regex) {
        let column = self.named_by;
        self.rows.retain(|row| expression.is_match(&row[column].csv_text()));
    }

    /// Replaces every text of the table, for example by text that is harmless on a terminal.
    pub fn map_text_cells(&mut self, shown: impl Fn(&str) -> String) {
        for cell in self.rows.iter_mut().flatten() {
            if let TableCell::Text(text) = cell {
                *text = shown(text);
            }
        }
    }

    /// Formats the table as CSV, with a line of titles.
    pub fn to_csv(&self) -> String {
        let mut writer = csv::Writer::from_writer(Vec::new());
        let written = writer.write_record(&self.columns).and_then(|()| {
            self.rows
                .iter()
                .try_for_each(|row| writer.write_record(row.iter().map(TableCell::csv_text)))
        });
        let bytes = written.ok().and_then(|()| writer.into_inner().ok());
        String::from_utf8(bytes.expect("writing to memory does not fail")).expect("cells are UTF-8")
    }

    /// Converts to JSON: Formats the table as JSON: `{"report": …, "rows": [{title: value}]}`.
    pub fn cell_to_json(&self) -> serde_json::Value {
        let rows: Vec<serde_json::Value> = self
            .rows
            .iter()
            .map(|row| {
                let fields = self
                    .columns
                    .iter()
                    .zip(row)
                    .map(|(&title, cell)| (title.to_owned(), cell.cell_to_json()));
                serde_json::Value::Object(fields.collect())
            })
            .collect();
        serde_json::json!({ "report": self.report, "rows": rows })
    }

    /// The table as text for a terminal of 100 columns: aligned, thousands separated, long names
    /// cut in their middle.
    pub fn to_text(&self) -> String {
        const TABLE_WIDTH: usize = 100;
        let cells: Vec<Vec<String>> =
            self.rows.iter().map(|row| row.iter().map(cell_text).collect()).collect();
        let last = self.columns.len() - 1;
        let width = |column: usize| {
            let rows = cells.iter().map(|row| row[column].chars().count());
            rows.max().unwrap_or(0).max(self.columns[column].len())
        };
        let mut widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let before: usize = widths[..last].iter().map(|width| width + 2).sum();
        widths[last] = widths[last].min(TABLE_WIDTH.saturating_sub(before).max(40));
        let right: Vec<bool> = (0..self.columns.len())
            .map(|column| !self.rows.iter().any(|row| matches!(row[column], TableCell::Text(_))))
            .collect();
        let mut text = String::new();
        let titles: Vec<String> = self.columns.iter().map(|&title| title.to_owned()).collect();
        for row in std::iter::once(&titles).chain(&cells) {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let cell = shorten(cell, widths[column]);
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

fn cell_text(cell: &TableCell) -> String {
    match cell {
        TableCell::Integer(value) => with_thousands_separators(value),
        TableCell::Decimal(..) => with_thousands_separators(cell.csv_text()),
        _ => cell.csv_text(),
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

/// Shortens a text to at most `width` characters by removing its middle.
pub fn shorten(text: &str, width: usize) -> String {
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
