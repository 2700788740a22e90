//! Cells that several tables share.

use super::summary::ValueSummary;
use super::table::{StatsTable, TableCell};

/// Computes a share of a total, per cent.
#[allow(clippy::cast_precision_loss)]
fn percent_cell(part: i64, total: i64) -> TableCell {
    TableCell::Decimal(if total == 0 { 0.0 } else { part as f64 / total as f64 * 100.0 }, 1)
}

/// Share, total, count, mean, median, smallest, largest, deviation: the columns of most tables.
fn cells_of_summary(summary: &ValueSummary, total: i64) -> Vec<TableCell> {
    let mut cells = vec![percent_cell(summary.total, total)];
    cells.extend(total_cells_without_share(summary));
    cells
}

pub(super) fn total_cells_without_share(summary: &ValueSummary) -> Vec<TableCell> {
    vec![
        TableCell::Integer(summary.total),
        count_cell(summary.count),
        TableCell::Decimal(summary.mean, 1),
        TableCell::Decimal(summary.median, 1),
        TableCell::Integer(summary.min),
        TableCell::Integer(summary.max),
        TableCell::Decimal(summary.deviation, 1),
    ]
}

/// Makes a table of groups: the columns of [`cells_of_summary`], of which `counted` names the
/// third, then columns that identify the group, which `cells` makes from its label. The last cell
/// holds the name of the row.
pub(super) fn summary_table<T>(
    report: &'static str,
    counted: &'static str,
    labelled: &[&'static str],
    rows: Vec<(T, ValueSummary)>,
    cells: impl Fn(T) -> Vec<TableCell>,
) -> StatsTable {
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
    let row = |(label, summary): (T, ValueSummary)| {
        let mut row = cells_of_summary(&summary, total);
        row.extend(cells(label));
        row
    };
    StatsTable {
        report,
        named_by: columns.len() - 1,
        columns,
        rows: rows.into_iter().map(row).collect(),
    }
}

pub(super) fn count_cell(count: usize) -> TableCell {
    TableCell::Integer(i64::try_from(count).unwrap_or(i64::MAX))
}

/// Groups with their summaries, the largest total first; equal ones in order of their labels.
pub(super) fn groups_by_total<T: Ord>(
    labels: Vec<T>,
    summaries: Vec<ValueSummary>,
) -> Vec<(T, ValueSummary)> {
    let mut rows: Vec<(T, ValueSummary)> =
        labels.into_iter().zip(summaries).filter(|(_, summary)| summary.count > 0).collect();
    rows.sort_by(|(a, x), (b, y)| y.total.cmp(&x.total).then_with(|| a.cmp(b)));
    rows
}
