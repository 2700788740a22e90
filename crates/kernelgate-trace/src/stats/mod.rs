//! The tables of `nsys stats`, with its columns and values.
//!
//! Percentages are shares of the table's own total. Absent: tables of single events (`_trace`).

mod calls;
mod cells;
mod gpu;
mod ranges;
mod summary;
mod table;

pub use calls::without_version;
pub use summary::{Samples, Summary};
pub use table::{Cell, Table, shorten, thousands};

use crate::model::Trace;
use crate::read::Wanted;

/// A table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Report {
    /// Kernels by name.
    GpuKernels,
    /// Kernels by name, grid and block.
    GpuKernelShapes,
    /// Calls of CUDA by name.
    ApiCalls,
    /// Ranges by name and style.
    Ranges,
    /// Push/pop ranges by name.
    PushPopRanges,
    /// Kernels by the ranges that they were launched in.
    RangeKernels,
    /// Ranges by the GPU time between their first and last operation.
    RangeProjections,
    /// Launches: call, wait in the queue, kernel.
    KernelExecution,
    /// Copies and sets by time.
    MemoryTimes,
    /// Copies and sets by bytes.
    MemorySizes,
    /// Kernels, copies and sets by time.
    GpuOperations,
}

impl Report {
    /// Every table.
    pub const ALL: [Self; 11] = [
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

    /// Its name in `nsys stats`.
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

    /// The table of a name.
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|report| report.name() == name)
    }

    /// What has to be read for it.
    pub fn wanted(self) -> Wanted {
        let nothing = Wanted::default();
        match self {
            Self::GpuKernels | Self::MemoryTimes | Self::MemorySizes | Self::GpuOperations => {
                Wanted { operations: true, ..nothing }
            }
            Self::GpuKernelShapes => Wanted { operations: true, shapes: true, ..nothing },
            Self::ApiCalls => Wanted { calls: true, ..nothing },
            Self::Ranges | Self::PushPopRanges => Wanted { ranges: true, ..nothing },
            Self::RangeKernels | Self::RangeProjections => {
                Wanted { operations: true, calls: true, ranges: true, ..nothing }
            }
            Self::KernelExecution => Wanted { operations: true, calls: true, ..nothing },
        }
    }
}

/// A table of a trace.
pub fn table(trace: &Trace, report: Report) -> Table {
    match report {
        Report::GpuKernels => gpu::kernels(trace),
        Report::GpuKernelShapes => gpu::kernel_shapes(trace),
        Report::ApiCalls => calls::calls(trace),
        Report::Ranges => ranges::ranges(trace),
        Report::PushPopRanges => ranges::push_pop(trace),
        Report::RangeKernels => ranges::kernels(trace),
        Report::RangeProjections => ranges::projections(trace),
        Report::KernelExecution => calls::kernel_execution(trace),
        Report::MemoryTimes => gpu::memory_times(trace),
        Report::MemorySizes => gpu::memory_sizes(trace),
        Report::GpuOperations => gpu::operations(trace),
    }
}
