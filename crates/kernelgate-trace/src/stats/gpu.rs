//! Makes the `nsys stats` tables of GPU operations.

use super::shared_cells::{count_cell, sort_groups_by_descending_total, table_of_group_summaries};
use super::summary::{ValueSummary, ValuesByGroup};
use super::table::{StatsTable, TableCell};
use crate::analyze::operations::{PRINTED_MEMSET_NAME, printed_memcpy_name};
use crate::model::{DistinctValues as Interner, Trace};

/// Number of bytes in a megabyte, as in `nsys stats`.
const BYTES_PER_MEGABYTE: f64 = 1e6;

/// Kernels by name.
fn duration_summary_by_kernel_name(trace: &Trace) -> Vec<(String, ValueSummary)> {
    let mut names = Interner::default();
    let kernels = &trace.kernels;
    let mut samples = ValuesByGroup::with_capacity_for_values(kernels.on_gpu.operation_count());
    for (row, function) in kernels.function_index.iter_decoded_rows().enumerate() {
        let name = trace.functions[function as usize].demangled_name;
        samples.push_value_of_group(
            names.index_of_value(name),
            kernels.on_gpu.operation_duration_ns(row),
        );
    }
    let summaries = samples.summaries_of_groups(names.values.len());
    let text = |name| trace.names.text_of_name(name).to_owned();
    sort_groups_by_descending_total(names.values.into_iter().map(text).collect(), summaries)
}

pub(super) fn kernel_duration_table(trace: &Trace) -> StatsTable {
    let rows = duration_summary_by_kernel_name(trace);
    table_of_group_summaries("cuda_gpu_kern_sum", "Instances", &["Name"], rows, |name| {
        vec![TableCell::Text(name)]
    })
}

pub(super) fn kernel_duration_table_by_launch_shape(trace: &Trace) -> StatsTable {
    let mut groups = Interner::default();
    let kernels = &trace.kernels;
    let mut samples = ValuesByGroup::with_capacity_for_values(kernels.on_gpu.operation_count());
    for (row, function) in kernels.function_index.iter_decoded_rows().enumerate() {
        let name = trace.functions[function as usize].demangled_name;
        let shape =
            kernels.launch_shape_index.decoded_row(row).map(|shape| trace.shapes[shape as usize]);
        let shape = shape.unwrap_or_default();
        samples.push_value_of_group(
            groups.index_of_value((name, shape.grid, shape.block)),
            kernels.on_gpu.operation_duration_ns(row),
        );
    }
    let summaries = samples.summaries_of_groups(groups.values.len());
    let rows = sort_groups_by_descending_total(groups.values, summaries);
    let triple = |[x, y, z]: [u32; 3]| TableCell::Text(format!("{x:>4} {y:>4} {z:>4}"));
    let labelled = ["GridXYZ", "BlockXYZ", "Name"];
    table_of_group_summaries(
        "cuda_gpu_kern_gb_sum",
        "Instances",
        &labelled,
        rows,
        |(name, grid, block)| {
            vec![
                triple(grid),
                triple(block),
                TableCell::Text(trace.names.text_of_name(name).to_owned()),
            ]
        },
    )
}

/// Summarises one value per memory copy, by copy direction, and one value per memset.
fn summary_by_copy_direction_and_memset(
    trace: &Trace,
    copy: impl Fn(usize) -> i64,
    set: impl Fn(usize) -> i64,
) -> Vec<(String, ValueSummary)> {
    let mut kinds = Interner::default();
    let mut samples = ValuesByGroup::default();
    for (row, &kind) in trace.copies.direction_label.iter().enumerate() {
        samples.push_value_of_group(kinds.index_of_value(Some(kind)), copy(row));
    }
    for row in 0..trace.memsets.on_gpu.operation_count() {
        samples.push_value_of_group(kinds.index_of_value(None), set(row));
    }
    let summaries = samples.summaries_of_groups(kinds.values.len());
    let label = |kind: Option<_>| {
        kind.map_or(PRINTED_MEMSET_NAME.to_owned(), |kind| {
            printed_memcpy_name(trace.names.text_of_name(kind))
        })
    };
    sort_groups_by_descending_total(kinds.values.into_iter().map(label).collect(), summaries)
}

fn duration_summary_of_memory_operations(trace: &Trace) -> Vec<(String, ValueSummary)> {
    summary_by_copy_direction_and_memset(
        trace,
        |row| trace.copies.on_gpu.operation_duration_ns(row),
        |row| trace.memsets.on_gpu.operation_duration_ns(row),
    )
}

pub(super) fn memory_operation_duration_table(trace: &Trace) -> StatsTable {
    let rows = duration_summary_of_memory_operations(trace);
    table_of_group_summaries("cuda_gpu_mem_time_sum", "Count", &["Operation"], rows, |name| {
        vec![TableCell::Text(name)]
    })
}

pub(super) fn memory_operation_size_table(trace: &Trace) -> StatsTable {
    let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let rows = summary_by_copy_direction_and_memset(
        trace,
        |row| bytes(trace.copies.copied_bytes[row]),
        |row| bytes(trace.memsets.set_bytes[row]),
    );
    let megabytes = |bytes: f64| TableCell::DecimalWithPlaces(bytes / BYTES_PER_MEGABYTE, 3);
    #[allow(clippy::cast_precision_loss)]
    let row = |(name, summary): (String, ValueSummary)| {
        vec![
            megabytes(summary.total as f64),
            count_cell(summary.value_count),
            megabytes(summary.mean),
            megabytes(summary.median),
            megabytes(summary.min as f64),
            megabytes(summary.max as f64),
            megabytes(summary.standard_deviation),
            TableCell::Text(name),
        ]
    };
    StatsTable {
        report_name: "cuda_gpu_mem_size_sum",
        column_titles: vec![
            "Total (MB)",
            "Count",
            "Avg (MB)",
            "Med (MB)",
            "Min (MB)",
            "Max (MB)",
            "StdDev (MB)",
            "Operation",
        ],
        rows: rows.into_iter().map(row).collect(),
        filtered_column_index: 7,
    }
}

pub(super) fn gpu_operation_duration_table(trace: &Trace) -> StatsTable {
    let categorized = |rows: Vec<(String, ValueSummary)>, category: &'static str| {
        rows.into_iter().map(move |(name, summary)| ((name, category), summary))
    };
    let mut rows: Vec<((String, &str), ValueSummary)> =
        categorized(duration_summary_by_kernel_name(trace), "CUDA_KERNEL")
            .chain(categorized(duration_summary_of_memory_operations(trace), "MEMORY_OPER"))
            .collect();
    rows.sort_by(|(a, x), (b, y)| y.total.cmp(&x.total).then_with(|| a.cmp(b)));
    let labelled = ["Category", "Operation"];
    table_of_group_summaries("cuda_gpu_sum", "Instances", &labelled, rows, |(name, category)| {
        vec![TableCell::Text(category.to_owned()), TableCell::Text(name)]
    })
}
