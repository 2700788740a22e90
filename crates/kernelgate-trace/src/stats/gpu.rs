//! Makes tables of GPU operations.

use super::shared_cells::{count_cell, groups_by_total, summary_table};
use super::summary::{GroupedSamples, ValueSummary};
use super::table::{StatsTable, TableCell};
use crate::analyze::operations::{MEMSET_NAME, memcpy_name};
use crate::model::{InternedValues as Interner, Trace};

/// Number of bytes in a megabyte, as `nsys stats` counts them.
const BYTES_PER_MEGABYTE: f64 = 1e6;

/// Kernels by name.
fn kernel_summary_rows(trace: &Trace) -> Vec<(String, ValueSummary)> {
    let mut names = Interner::default();
    let kernels = &trace.kernels;
    let mut samples = GroupedSamples::with_value_capacity(kernels.on_gpu.len());
    for (row, function) in kernels.function.iter().enumerate() {
        let name = trace.functions[function as usize].demangled;
        samples.push(names.intern(name), kernels.on_gpu.length(row));
    }
    let summaries = samples.group_summaries(names.values.len());
    let text = |name| trace.names.text(name).to_owned();
    groups_by_total(names.values.into_iter().map(text).collect(), summaries)
}

pub(super) fn kernels(trace: &Trace) -> StatsTable {
    let rows = kernel_summary_rows(trace);
    summary_table("cuda_gpu_kern_sum", "Instances", &["Name"], rows, |name| {
        vec![TableCell::Text(name)]
    })
}

pub(super) fn kernel_shape_table(trace: &Trace) -> StatsTable {
    let mut groups = Interner::default();
    let kernels = &trace.kernels;
    let mut samples = GroupedSamples::with_value_capacity(kernels.on_gpu.len());
    for (row, function) in kernels.function.iter().enumerate() {
        let name = trace.functions[function as usize].demangled;
        let shape = kernels.shape.get(row).map(|shape| trace.shapes[shape as usize]);
        let shape = shape.unwrap_or_default();
        samples.push(groups.intern((name, shape.grid, shape.block)), kernels.on_gpu.length(row));
    }
    let summaries = samples.group_summaries(groups.values.len());
    let rows = groups_by_total(groups.values, summaries);
    let triple = |[x, y, z]: [u32; 3]| TableCell::Text(format!("{x:>4} {y:>4} {z:>4}"));
    let labelled = ["GridXYZ", "BlockXYZ", "Name"];
    summary_table("cuda_gpu_kern_gb_sum", "Instances", &labelled, rows, |(name, grid, block)| {
        vec![triple(grid), triple(block), TableCell::Text(trace.names.text(name).to_owned())]
    })
}

/// Copies by direction and sets, of one value each.
fn memory_operation_rows(
    trace: &Trace,
    copy: impl Fn(usize) -> i64,
    set: impl Fn(usize) -> i64,
) -> Vec<(String, ValueSummary)> {
    let mut kinds = Interner::default();
    let mut samples = GroupedSamples::default();
    for (row, &kind) in trace.copies.kind.iter().enumerate() {
        samples.push(kinds.intern(Some(kind)), copy(row));
    }
    for row in 0..trace.sets.on_gpu.len() {
        samples.push(kinds.intern(None), set(row));
    }
    let summaries = samples.group_summaries(kinds.values.len());
    let label = |kind: Option<_>| {
        kind.map_or(MEMSET_NAME.to_owned(), |kind| memcpy_name(trace.names.text(kind)))
    };
    groups_by_total(kinds.values.into_iter().map(label).collect(), summaries)
}

fn memory_time_rows(trace: &Trace) -> Vec<(String, ValueSummary)> {
    memory_operation_rows(
        trace,
        |row| trace.copies.on_gpu.length(row),
        |row| trace.sets.on_gpu.length(row),
    )
}

pub(super) fn memory_time_table(trace: &Trace) -> StatsTable {
    let rows = memory_time_rows(trace);
    summary_table("cuda_gpu_mem_time_sum", "Count", &["Operation"], rows, |name| {
        vec![TableCell::Text(name)]
    })
}

pub(super) fn memory_size_table(trace: &Trace) -> StatsTable {
    let bytes = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    let rows = memory_operation_rows(
        trace,
        |row| bytes(trace.copies.bytes[row]),
        |row| bytes(trace.sets.bytes[row]),
    );
    let megabytes = |bytes: f64| TableCell::Decimal(bytes / BYTES_PER_MEGABYTE, 3);
    #[allow(clippy::cast_precision_loss)]
    let row = |(name, summary): (String, ValueSummary)| {
        vec![
            megabytes(summary.total as f64),
            count_cell(summary.count),
            megabytes(summary.mean),
            megabytes(summary.median),
            megabytes(summary.min as f64),
            megabytes(summary.max as f64),
            megabytes(summary.deviation),
            TableCell::Text(name),
        ]
    };
    StatsTable {
        report: "cuda_gpu_mem_size_sum",
        columns: vec![
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
        named_by: 7,
    }
}

pub(super) fn gpu_operation_table(trace: &Trace) -> StatsTable {
    let categorized = |rows: Vec<(String, ValueSummary)>, category: &'static str| {
        rows.into_iter().map(move |(name, summary)| ((name, category), summary))
    };
    let mut rows: Vec<((String, &str), ValueSummary)> =
        categorized(kernel_summary_rows(trace), "CUDA_KERNEL")
            .chain(categorized(memory_time_rows(trace), "MEMORY_OPER"))
            .collect();
    rows.sort_by(|(a, x), (b, y)| y.total.cmp(&x.total).then_with(|| a.cmp(b)));
    let labelled = ["Category", "Operation"];
    summary_table("cuda_gpu_sum", "Instances", &labelled, rows, |(name, category)| {
        vec![TableCell::Text(category.to_owned()), TableCell::Text(name)]
    })
}
