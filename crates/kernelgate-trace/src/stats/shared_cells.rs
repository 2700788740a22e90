//! Table cells that several `nsys stats` tables have in common.

use super::summary::ValueSummary;
use super::table::{StatsTable, TableCell};

/// Cell with the percentage of a part in a total.
#[allow(clippy::cast_precision_loss)]
fn percent_cell(part: i64, total: i64) -> TableCell {
    TableCell::DecimalWithPlaces(
        if total == 0 { 0.0 } else { part as f64 / total as f64 * 100.0 },
        1,
    )
}

/// Cells for percentage of total, total, count, mean, median, minimum, maximum and standard
/// deviation, which most tables have.
fn share_and_summary_cells(summary: &ValueSummary, total: i64) -> Vec<TableCell> {
    let mut cells = vec![percent_cell(summary.total, total)];
    cells.extend(summary_cells_without_share(summary));
    cells
}

pub(super) fn summary_cells_without_share(summary: &ValueSummary) -> Vec<TableCell> {
    vec![
        TableCell::Integer(summary.total),
        count_cell(summary.value_count),
        TableCell::DecimalWithPlaces(summary.mean, 1),
        TableCell::DecimalWithPlaces(summary.median, 1),
        TableCell::Integer(summary.min),
        TableCell::Integer(summary.max),
        TableCell::DecimalWithPlaces(summary.standard_deviation, 1),
    ]
}

/// Makes a table with one row per group: the columns of [`share_and_summary_cells`], with `counted`
/// as title of the third, and columns that identify the group. The last column contains the name by
/// which rows are filtered.
pub(super) fn table_of_group_summaries<T>(
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
        let mut row = share_and_summary_cells(&summary, total);
        row.extend(cells(label));
        row
    };
    StatsTable {
        report_name: report,
        filtered_column_index: columns.len() - 1,
        column_titles: columns,
        rows: rows.into_iter().map(row).collect(),
    }
}

pub(super) fn count_cell(count: usize) -> TableCell {
    TableCell::Integer(i64::try_from(count).unwrap_or(i64::MAX))
}

/// Joins groups with their summaries and sorts them by descending total; equal totals are sorted by
/// label.
pub(super) fn sort_groups_by_descending_total<T: Ord>(
    labels: Vec<T>,
    summaries: Vec<ValueSummary>,
) -> Vec<(T, ValueSummary)> {
    let mut rows: Vec<(T, ValueSummary)> =
        labels.into_iter().zip(summaries).filter(|(_, summary)| summary.value_count > 0).collect();
    rows.sort_by(|(a, x), (b, y)| y.total.cmp(&x.total).then_with(|| a.cmp(b)));
    rows
}
