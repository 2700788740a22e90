//! The tables of `nsys stats`, with the columns and values of Nsight Systems.
//!
//! Percentages are shares of the total of the same table. kernelgate does not make tables that list
//! single events (`_trace`).

mod calls;
mod gpu;
mod range_kernels;
mod range_projections;
mod ranges;
mod shared_cells;
mod summary;
mod table;

pub use calls::without_four_digit_version_suffix;
pub use summary::{SortedValuesByGroup, ValueSummary, ValuesByGroup};
pub use table::{StatsTable, TableCell, shorten_in_the_middle, with_thousands_separators};

use std::path::Path;

use range_kernels::KernelDurationsByRange;
use range_projections::GpuSpansOfRangesByName;
use ranges::{HostDurationsOfRangesByName, NamesAndEndAfterLastRow, TableBuiltFromStreamedRows};

use crate::error::TraceError;
use crate::model::Trace;
use crate::model::interned_names::InternedNameId;
use crate::read::{self, WantedTraceParts};

/// A table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StatsReport {
    /// Kernels by name.
    KernelsByName,
    /// Table of kernels by name, grid size and block size.
    KernelsByNameAndShape,
    /// Table of CUDA API calls by function name.
    ApiCallsByFunction,
    /// Table of ranges by range name and style (push/pop or start/end).
    RangesByName,
    /// Push/pop ranges by name.
    PushPopRangesByName,
    /// Table of kernels by the NVTX range in which each kernel was launched.
    KernelsByRange,
    /// Table of ranges by projected GPU time: from the first start to the last end of the
    /// operations launched in the range.
    RangesByProjectedGpuTime,
    /// Table of kernel launches with the times of API call, queue and kernel.
    KernelLaunchesAndExecutions,
    /// Table of copies and memsets by their durations.
    MemoryOperationDurations,
    /// Table of copies and memsets by their bytes.
    MemoryOperationSizes,
    /// Table of kernels, copies and memsets by their durations.
    GpuOperationDurations,
}

impl StatsReport {
    /// Every table.
    pub const ALL_REPORTS: [Self; 11] = [
        Self::KernelsByName,
        Self::KernelsByNameAndShape,
        Self::ApiCallsByFunction,
        Self::RangesByName,
        Self::PushPopRangesByName,
        Self::KernelsByRange,
        Self::RangesByProjectedGpuTime,
        Self::KernelLaunchesAndExecutions,
        Self::MemoryOperationDurations,
        Self::MemoryOperationSizes,
        Self::GpuOperationDurations,
    ];

    /// Name of the report in `nsys stats`, such as `cuda_gpu_kern_sum`.
    pub fn nsys_report_name(self) -> &'static str {
        match self {
            Self::KernelsByName => "cuda_gpu_kern_sum",
            Self::KernelsByNameAndShape => "cuda_gpu_kern_gb_sum",
            Self::ApiCallsByFunction => "cuda_api_sum",
            Self::RangesByName => "nvtx_sum",
            Self::PushPopRangesByName => "nvtx_pushpop_sum",
            Self::KernelsByRange => "nvtx_kern_sum",
            Self::RangesByProjectedGpuTime => "nvtx_gpu_proj_sum",
            Self::KernelLaunchesAndExecutions => "cuda_kern_exec_sum",
            Self::MemoryOperationDurations => "cuda_gpu_mem_time_sum",
            Self::MemoryOperationSizes => "cuda_gpu_mem_size_sum",
            Self::GpuOperationDurations => "cuda_gpu_sum",
        }
    }

    /// Describes the rows of the report's table in a few words.
    pub fn row_description(self) -> &'static str {
        match self {
            Self::KernelsByName => "kernels by name",
            Self::KernelsByNameAndShape => "kernels by name, grid and block",
            Self::ApiCallsByFunction => "calls of CUDA by name",
            Self::RangesByName => "ranges by name and style",
            Self::PushPopRangesByName => "push/pop ranges by name",
            Self::KernelsByRange => "kernels by the ranges that they were launched in",
            Self::RangesByProjectedGpuTime => {
                "ranges by the GPU time from their first to their last operation"
            }
            Self::KernelLaunchesAndExecutions => "launches: call, wait in the queue, kernel",
            Self::MemoryOperationDurations => "copies and sets by time",
            Self::MemoryOperationSizes => "copies and sets by bytes",
            Self::GpuOperationDurations => "kernels, copies and sets by time",
        }
    }

    /// Finds the report that has this name in `nsys stats`; `None` for unknown names.
    pub fn from_nsys_report_name(name: &str) -> Option<StatsReport> {
        Self::ALL_REPORTS.into_iter().find(|report| report.nsys_report_name() == name)
    }

    /// The parts of a trace file that must be read to make the report's table.
    pub fn trace_parts_for_report(self) -> WantedTraceParts {
        let nothing = WantedTraceParts::default();
        match self {
            Self::KernelsByName
            | Self::MemoryOperationDurations
            | Self::MemoryOperationSizes
            | Self::GpuOperationDurations => WantedTraceParts { reads_operations: true, ..nothing },
            Self::KernelsByNameAndShape => {
                WantedTraceParts { reads_operations: true, reads_launch_shapes: true, ..nothing }
            }
            Self::ApiCallsByFunction => WantedTraceParts { reads_api_calls: true, ..nothing },
            Self::RangesByName | Self::PushPopRangesByName => {
                WantedTraceParts { reads_ranges: true, ..nothing }
            }
            Self::KernelsByRange | Self::RangesByProjectedGpuTime => WantedTraceParts {
                reads_operations: true,
                reads_api_calls: true,
                reads_ranges: true,
                ..nothing
            },
            Self::KernelLaunchesAndExecutions => {
                WantedTraceParts { reads_operations: true, reads_api_calls: true, ..nothing }
            }
        }
    }
}

pub fn make_table(trace: &Trace, report: StatsReport) -> StatsTable {
    match report {
        StatsReport::KernelsByName => gpu::kernel_duration_table(trace),
        StatsReport::KernelsByNameAndShape => gpu::kernel_duration_table_by_launch_shape(trace),
        StatsReport::ApiCallsByFunction => calls::cuda_api_call_table(trace),
        StatsReport::RangesByName => table_from_trace_in_memory(
            trace,
            HostDurationsOfRangesByName::for_all_or_push_pop_ranges(false),
        ),
        StatsReport::PushPopRangesByName => table_from_trace_in_memory(
            trace,
            HostDurationsOfRangesByName::for_all_or_push_pop_ranges(true),
        ),
        StatsReport::KernelsByRange => {
            table_from_trace_in_memory(trace, KernelDurationsByRange::default())
        }
        StatsReport::RangesByProjectedGpuTime => {
            table_from_trace_in_memory(trace, GpuSpansOfRangesByName::default())
        }
        StatsReport::KernelLaunchesAndExecutions => calls::kernel_launch_and_execution_table(trace),
        StatsReport::MemoryOperationDurations => gpu::memory_operation_duration_table(trace),
        StatsReport::MemoryOperationSizes => gpu::memory_operation_size_table(trace),
        StatsReport::GpuOperationDurations => gpu::gpu_operation_duration_table(trace),
    }
}

fn table_from_trace_in_memory(
    trace: &Trace,
    mut sums: impl TableBuiltFromStreamedRows,
) -> StatsTable {
    read::for_each_range_and_call_by_time(trace, |row| sums.add_range_or_call_row(trace, row));
    sums.into_stats_table(&NamesAndEndAfterLastRow {
        trace,
        name_of_range_label: InternedNameId,
        trace_end_ns: i64::MAX,
    })
}

/// Makes a report's table from an export of any length: ranges and calls are summed while they are
/// read and are not kept in memory. `Ok(None)` if the report's table contains no ranges, or if the
/// file is not an export of Nsight Systems.
pub fn table_from_streamed_export(
    path: &Path,
    report: StatsReport,
) -> Result<Option<TableOfStreamedExport>, TraceError> {
    match report {
        StatsReport::RangesByName => sum_streamed_rows_into_table(
            path,
            report,
            HostDurationsOfRangesByName::for_all_or_push_pop_ranges(false),
        ),
        StatsReport::PushPopRangesByName => sum_streamed_rows_into_table(
            path,
            report,
            HostDurationsOfRangesByName::for_all_or_push_pop_ranges(true),
        ),
        StatsReport::KernelsByRange => {
            sum_streamed_rows_into_table(path, report, KernelDurationsByRange::default())
        }
        StatsReport::RangesByProjectedGpuTime => {
            sum_streamed_rows_into_table(path, report, GpuSpansOfRangesByName::default())
        }
        _ => Ok(None),
    }
}

/// A table that was made without keeping the export's ranges and calls in memory.
#[derive(Debug)]
pub struct TableOfStreamedExport {
    pub table: StatsTable,
    /// The trace without its ranges and API calls.
    pub trace: Trace,
}

fn sum_streamed_rows_into_table(
    path: &Path,
    report: StatsReport,
    mut sums: impl TableBuiltFromStreamedRows,
) -> Result<Option<TableOfStreamedExport>, TraceError> {
    let streamed =
        read::stream_ranges_and_calls(path, &report.trace_parts_for_report(), |trace, row| {
            sums.add_range_or_call_row(trace, row)
        })?;
    Ok(streamed.map(
        |read::ExportWithoutStreamedRows {
             trace,
             name_by_range_name_index: names,
             trace_end_ns,
         }| {
            let name_of = |label: u32| names[label as usize];
            let table = sums.into_stats_table(&NamesAndEndAfterLastRow {
                trace: &trace,
                name_of_range_label: name_of,
                trace_end_ns,
            });
            TableOfStreamedExport { table, trace }
        },
    ))
}
