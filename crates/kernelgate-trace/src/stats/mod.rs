//! The tables of `nsys stats`, with its columns and values.
//!
//! Percentages are shares of the table's own total. Tables of single events (`_trace`) are not
//! supported.

mod calls;
mod gpu;
mod range_kernels;
mod range_projections;
mod ranges;
mod shared_cells;
mod summary;
mod table;

pub use calls::without_interface_version;
pub use summary::{GroupedSamples, ValueCountsByGroup, ValueSummary};
pub use table::{StatsTable, TableCell, shorten, with_thousands_separators};

use std::path::Path;

use range_kernels::KernelSumsByRange;
use range_projections::ProjectionSums;
use ranges::{EndOfRows, RangeSumsByName, StreamedSums};

use crate::error::TraceError;
use crate::model::Trace;
use crate::model::interned_names::NameId;
use crate::read::{self, WantedTraceParts};

/// A table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StatsReport {
    /// Kernels by name.
    GpuKernels,
    /// Table of kernels by name, grid and block.
    GpuKernelShapes,
    /// Table of CUDA API calls by name.
    ApiCalls,
    /// Table of ranges by name and style.
    Ranges,
    /// Push/pop ranges by name.
    PushPopRanges,
    /// Kernels by the ranges that they were launched in.
    RangeKernels,
    /// Ranges by the GPU time between the first and the last operation launched in them.
    RangeProjections,
    /// Table of launches: call, time in the queue, kernel.
    KernelExecution,
    /// Table of copies and memsets by time.
    MemoryTimes,
    /// Table of copies and memsets by bytes.
    MemorySizes,
    /// Table of kernels, copies and memsets by time.
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

    /// Name of the report in `nsys stats`.
    pub fn name(self) -> &'static str {
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

    /// The rows of the report, in words.
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

    /// The report whose table has this name.
    pub fn from_name(name: &str) -> Option<StatsReport> {
        Self::ALL_REPORTS.into_iter().find(|report| report.name() == name)
    }

    /// The parts of a file that the table needs.
    pub fn wanted_parts(self) -> WantedTraceParts {
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
        StatsReport::GpuKernels => gpu::kernels(trace),
        StatsReport::GpuKernelShapes => gpu::kernel_shape_table(trace),
        StatsReport::ApiCalls => calls::host_call_table(trace),
        StatsReport::Ranges => table_from_rows(trace, RangeSumsByName::new(false)),
        StatsReport::PushPopRanges => table_from_rows(trace, RangeSumsByName::new(true)),
        StatsReport::RangeKernels => table_from_rows(trace, KernelSumsByRange::default()),
        StatsReport::RangeProjections => table_from_rows(trace, ProjectionSums::default()),
        StatsReport::KernelExecution => calls::kernel_execution_table(trace),
        StatsReport::MemoryTimes => gpu::memory_time_table(trace),
        StatsReport::MemorySizes => gpu::memory_size_table(trace),
        StatsReport::GpuOperations => gpu::gpu_operation_table(trace),
    }
}

fn table_from_rows(trace: &Trace, mut sums: impl StreamedSums) -> StatsTable {
    read::for_each_row(trace, |row| sums.add(trace, row));
    sums.projection_table(&EndOfRows { trace, name_of: NameId, last: i64::MAX })
}

/// Makes a table from an export of any length: ranges and calls are summed while they are read, and
/// not stored. `None` for a table of neither, and for a file of another format.
pub fn table_of_streamed_export(
    path: &Path,
    report: StatsReport,
) -> Result<Option<StreamedTable>, TraceError> {
    match report {
        StatsReport::Ranges => table_from_stream(path, report, RangeSumsByName::new(false)),
        StatsReport::PushPopRanges => table_from_stream(path, report, RangeSumsByName::new(true)),
        StatsReport::RangeKernels => table_from_stream(path, report, KernelSumsByRange::default()),
        StatsReport::RangeProjections => table_from_stream(path, report, ProjectionSums::default()),
        _ => Ok(None),
    }
}

/// Makes a table from an export that is not kept in memory.
#[derive(Debug)]
pub struct StreamedTable {
    pub table: StatsTable,
    /// The trace without its ranges and calls.
    pub trace: Trace,
}

fn table_from_stream(
    path: &Path,
    report: StatsReport,
    mut sums: impl StreamedSums,
) -> Result<Option<StreamedTable>, TraceError> {
    let streamed =
        read::stream_trace_rows(path, &report.wanted_parts(), |trace, row| sums.add(trace, row))?;
    Ok(streamed.map(|read::StreamedRows { trace, names, last }| {
        let name_of = |label: u32| names[label as usize];
        let table = sums.projection_table(&EndOfRows { trace: &trace, name_of, last });
        StreamedTable { table, trace }
    }))
}
