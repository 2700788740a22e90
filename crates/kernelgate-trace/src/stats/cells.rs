//! What several tables have in common.

use super::summary::Summary;
use super::table::Cell;

/// Share of a total in percent.
#[allow(clippy::cast_precision_loss)]
pub(super) fn percent(part: i64, total: i64) -> Cell {
    Cell::Decimal(if total == 0 { 0.0 } else { part as f64 / total as f64 * 100.0 }, 1)
}

/// Share, total, count, mean, median, smallest, largest, deviation: the columns of most tables.
pub(super) fn summary_cells(summary: &Summary, total: i64) -> Vec<Cell> {
    let mut cells = vec![percent(summary.total, total)];
    cells.extend(total_cells(summary));
    cells
}

/// The same without the share.
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
