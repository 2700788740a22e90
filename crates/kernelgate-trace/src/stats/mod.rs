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
    GpuKernels,
    /// Table of kernels by name, grid size and block size.
    GpuKernelShapes,
    /// Table of CUDA API calls by function name.
    ApiCalls,
    /// Table of ranges by range name and style (push/pop or start/end).
    Ranges,
    /// Push/pop ranges by name.
    PushPopRanges,
    /// Table of kernels by the NVTX range in which each kernel was launched.
    RangeKernels,
    /// Table of ranges by projected GPU time: from the first start to the last end of the
    /// operations launched in the range.
    RangeProjections,
    /// Table of kernel launches with the times of API call, queue and kernel.
    KernelExecution,
    /// Table of copies and memsets by their durations.
    MemoryTimes,
    /// Table of copies and memsets by their bytes.
    MemorySizes,
    /// Table of kernels, copies and memsets by their durations.
    GpuOperations,
}

impl StatsReport {
    /// Every table.
    pub const ALL_REPORTS: [Self; 11] = [
        Self::GpuKernels,
        Self::GpuKernelShapes,
        Self::ApiCalls,
        Self::Ranges,
        Self::PushPopRanges,
        Self::RangeKernels,
        Self::RangeProjections,
        Self::KernelExecution,
        Self::MemoryTimes,
        Self::MemorySizes,
        Self::GpuOperations,
    ];

    /// Name of the report in `nsys stats`, such as `cuda_gpu_kern_sum`.
    pub fn nsys_report_name(self) -> &'static str {
        match self {
            Self::GpuKernels => "cuda_gpu_kern_sum",
            Self::GpuKernelShapes => "cuda_gpu_kern_gb_sum",
            Self::ApiCalls => "cuda_api_sum",
            Self::Ranges => "nvtx_sum",
            Self::PushPopRanges => "nvtx_pushpop_sum",
            Self::RangeKernels => "nvtx_kern_sum",
            Self::RangeProjections => "nvtx_gpu_proj_sum",
            Self::KernelExecution => "cuda_kern_exec_sum",
            Self::MemoryTimes => "cuda_gpu_mem_time_sum",
            Self::MemorySizes => "cuda_gpu_mem_size_sum",
            Self::GpuOperations => "cuda_gpu_sum",
        }
    }

    /// Describes the rows of the report's table in a few words.
    pub fn row_description(self) -> &'static str {
        match self {
            Self::GpuKernels => "kernels by name",
            Self::GpuKernelShapes => "kernels by name, grid and block",
            Self::ApiCalls => "calls of CUDA by name",
            Self::Ranges => "ranges by name and style",
            Self::PushPopRanges => "push/pop ranges by name",
            Self::RangeKernels => "kernels by the ranges that they were launched in",
            Self::RangeProjections => {
                "ranges by the GPU time from their first to their last operation"
            }
            Self::KernelExecution => "launches: call, wait in the queue, kernel",
            Self::MemoryTimes => "copies and sets by time",
            Self::MemorySizes => "copies and sets by bytes",
            Self::GpuOperations => "kernels, copies and sets by time",
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
            Self::GpuKernels | Self::MemoryTimes | Self::MemorySizes | Self::GpuOperations => {
                WantedTraceParts { operations: true, ..nothing }
            }
            Self::GpuKernelShapes => WantedTraceParts { operations: true, shapes: true, ..nothing },
            Self::ApiCalls => WantedTraceParts { calls: true, ..nothing },
            Self::Ranges | Self::PushPopRanges => WantedTraceParts { ranges: true, ..nothing },
            Self::RangeKernels | Self::RangeProjections => {
                WantedTraceParts { operations: true, calls: true, ranges: true, ..nothing }
            }
            Self::KernelExecution => WantedTraceParts { operations: true, calls: true, ..nothing },
        }
    }
}

pub fn make_table(trace: &Trace, report: StatsReport) -> StatsTable {
    match report {
        StatsReport::GpuKernels => gpu::kernel_duration_table(trace),
        StatsReport::GpuKernelShapes => gpu::kernel_duration_table_by_launch_shape(trace),
        StatsReport::ApiCalls => calls::cuda_api_call_table(trace),
        StatsReport::Ranges => table_from_trace_in_memory(
            trace,
            HostDurationsOfRangesByName::for_all_or_push_pop_ranges(false),
        ),
        StatsReport::PushPopRanges => table_from_trace_in_memory(
            trace,
            HostDurationsOfRangesByName::for_all_or_push_pop_ranges(true),
        ),
        StatsReport::RangeKernels => {
            table_from_trace_in_memory(trace, KernelDurationsByRange::default())
        }
        StatsReport::RangeProjections => {
            table_from_trace_in_memory(trace, GpuSpansOfRangesByName::default())
        }
        StatsReport::KernelExecution => calls::kernel_launch_and_execution_table(trace),
        StatsReport::MemoryTimes => gpu::memory_operation_duration_table(trace),
        StatsReport::MemorySizes => gpu::memory_operation_size_table(trace),
        StatsReport::GpuOperations => gpu::gpu_operation_duration_table(trace),
    }
}

fn table_from_trace_in_memory(
    trace: &Trace,
    mut sums: impl TableBuiltFromStreamedRows,
) -> StatsTable {
    read::for_each_range_and_call_by_time(trace, |row| sums.add_range_or_call_row(trace, row));
    sums.into_stats_table(&NamesAndEndAfterLastRow {
        trace,
        name_of: InternedNameId,
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
        StatsReport::Ranges => sum_streamed_rows_into_table(
            path,
            report,
            HostDurationsOfRangesByName::for_all_or_push_pop_ranges(false),
        ),
        StatsReport::PushPopRanges => sum_streamed_rows_into_table(
            path,
            report,
            HostDurationsOfRangesByName::for_all_or_push_pop_ranges(true),
        ),
        StatsReport::RangeKernels => {
            sum_streamed_rows_into_table(path, report, KernelDurationsByRange::default())
        }
        StatsReport::RangeProjections => {
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
    Ok(streamed.map(|read::StreamedExportRest { trace, names, trace_end_ns: last }| {
        let name_of = |label: u32| names[label as usize];
        let table = sums.into_stats_table(&NamesAndEndAfterLastRow {
            trace: &trace,
            name_of,
            trace_end_ns: last,
        });
        TableOfStreamedExport { table, trace }
    }))
}
