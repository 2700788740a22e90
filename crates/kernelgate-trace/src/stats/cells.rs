//! Parts that several tables share.

use super::summary::Summary;
use super::table::{Cell, Table};

/// Share of a total in percent.
#[allow(clippy::cast_precision_loss)]
fn percent(part: i64, total: i64) -> Cell {
    Cell::Decimal(if total == 0 { 0.0 } else { part as f64 / total as f64 * 100.0 }, 1)
}

/// Share, total, count, mean, median, smallest, largest, deviation: the columns of most tables.
fn summary_cells(summary: &Summary, total: i64) -> Vec<Cell> {
    let mut cells = vec![percent(summary.total, total)];
    cells.extend(total_cells(summary));
    cells
}

/// Cells of a summary without the share.
pub(super) fn total_cells(summary: &Summary) -> Vec<Cell> {
    vec![
        Cell::Integer(summary.total),
        count(summary.count),
        Cell::Decimal(summary.mean, 1),
        Cell::Decimal(summary.median, 1),
        Cell::Integer(summary.min),
        Cell::Integer(summary.max),
        Cell::Decimal(summary.deviation, 1),
    ]
}

/// A table of groups: the columns of [`summary_cells`], `counted` being what the third is called,
/// then those that say which group, from its label by `cells`. The last cell holds the name of the
/// row.
pub(super) fn summary_table<T>(
    report: &'static str,
    counted: &'static str,
    labelled: &[&'static str],
    rows: Vec<(T, Summary)>,
    cells: impl Fn(T) -> Vec<Cell>,
) -> Table {
    let total = rows.iter().map(|(_, summary)| summary.total).fold(0, i64::saturating_add);
    let columns = [
        "Time (%)",
        "Total Time (ns)",
        counted,
        "Avg (ns)",
        "Med (ns)",
        "Min (ns)",
        "Max (ns)",
        "StdDev (ns)",
    ];
    let columns: Vec<_> = columns.iter().chain(labelled).copied().collect();
    let row = |(label, summary): (T, Summary)| {
        let mut row = summary_cells(&summary, total);
        row.extend(cells(label));
        row
    };
    Table {
        report,
        named_by: columns.len() - 1,
        columns,
        rows: rows.into_iter().map(row).collect(),
    }
}

pub(super) fn count(count: usize) -> Cell {
    Cell::Integer(i64::try_from(count).unwrap_or(i64::MAX))
}

/// Groups with their summaries, the largest total first; equal ones in order of their labels.
pub(super) fn by_total<T: Ord>(labels: Vec<T>, summaries: Vec<Summary>) -> Vec<(T, Summary)> {
    let mut rows: Vec<(T, Summary)> =
        labels.into_iter().zip(summaries).filter(|(_, summary)| summary.count > 0).collect();
    rows.sort_by(|(a, x), (b, y)| y.total.cmp(&x.total).then_with(|| a.cmp(b)));
    rows
}
