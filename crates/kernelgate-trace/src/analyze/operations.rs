//! Gives all kernels, copies, memsets and graph launches of a trace one common numbering.

use crate::model::Trace;
use crate::model::gpu::{GpuOperationColumns, OperationStreamIndex};

/// Kind of a GPU operation: kernel, copy, memset or launch of a whole graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GpuOperationKind {
    Kernel,
    Copy,
    Memset,
    /// A whole graph.
    CudaGraphLaunch,
}

/// Number of a GPU operation in a trace: kernels come first, then copies, memsets and graph
/// launches.
pub type GpuOperationId = u32;

/// All GPU operations of a trace under one numbering.
#[derive(Debug, Clone, Copy)]
pub struct AllGpuOperations<'a> {
    trace: &'a Trace,
    /// First operation id of copies, of memsets and of graph launches, and the number of all
    /// operations.
    bounds: [u32; 4],
}

impl<'a> AllGpuOperations<'a> {
    /// Numbers the GPU operations of a trace: kernels, then copies, memsets and graph launches.
    pub fn number_operations_of_trace(trace: &'a Trace) -> Self {
        let mut next = 0;
        let mut bound = |operations: &GpuOperationColumns| {
            next +=
                u32::try_from(operations.operation_count()).expect("fewer than 2^32 operations");
            next
        };
        let bounds = [
            bound(&trace.kernels.on_gpu),
            bound(&trace.copies.on_gpu),
            bound(&trace.memsets.on_gpu),
            bound(&trace.graphs.on_gpu),
        ];
        Self { trace, bounds }
    }

    /// Returns the number of GPU operations of the trace.
    pub fn len(&self) -> usize {
        self.bounds[3] as usize
    }

    /// Returns whether the trace has no GPU operation.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Ids of all GPU operations of the trace.
    pub fn all_operation_ids(&self) -> std::ops::Range<GpuOperationId> {
        0..self.bounds[3]
    }

    /// Operation ids of the kernels, each of which is also the row of the kernel in the trace's
    /// kernel table.
    pub fn kernel_ids(&self) -> std::ops::Range<GpuOperationId> {
        0..self.bounds[0]
    }

    /// Returns the kind of an operation, and its row in the trace's table of that kind.
    pub fn kind_and_table_row(&self, id: GpuOperationId) -> (GpuOperationKind, usize) {
        let [kernels, copies, sets, _] = self.bounds;
        match id {
            _ if id < kernels => (GpuOperationKind::Kernel, id as usize),
            _ if id < copies => (GpuOperationKind::Copy, (id - kernels) as usize),
            _ if id < sets => (GpuOperationKind::Memset, (id - copies) as usize),
            _ => (GpuOperationKind::CudaGraphLaunch, (id - sets) as usize),
        }
    }

    #[inline]
    fn gpu_columns_and_row(&self, id: GpuOperationId) -> (&'a GpuOperationColumns, usize) {
        let (kind, index) = self.kind_and_table_row(id);
        let columns = match kind {
            GpuOperationKind::Kernel => &self.trace.kernels.on_gpu,
            GpuOperationKind::Copy => &self.trace.copies.on_gpu,
            GpuOperationKind::Memset => &self.trace.memsets.on_gpu,
            GpuOperationKind::CudaGraphLaunch => &self.trace.graphs.on_gpu,
        };
        (columns, index)
    }

    /// Start of a GPU operation: its first nanosecond.
    #[inline]
    pub fn operation_start_ns(&self, id: GpuOperationId) -> i64 {
        let (columns, index) = self.gpu_columns_and_row(id);
        columns.start_ns.at(index)
    }

    /// Exclusive end of a GPU operation: the first nanosecond after its last one.
    #[inline]
    pub fn operation_end_exclusive_ns(&self, id: GpuOperationId) -> i64 {
        let (columns, index) = self.gpu_columns_and_row(id);
        columns.operation_end_ns(index)
    }

    /// Duration of a GPU operation, nanoseconds.
    #[inline]
    pub fn operation_length_ns(&self, id: GpuOperationId) -> i64 {
        let (columns, index) = self.gpu_columns_and_row(id);
        columns.operation_duration_ns(index)
    }

    /// Start and exclusive end of a GPU operation, nanoseconds of the trace's clock.
    #[inline]
    pub fn operation_start_and_end_ns(&self, id: GpuOperationId) -> (i64, i64) {
        let (columns, index) = self.gpu_columns_and_row(id);
        let start = columns.start_ns.at(index);
        (start, start.wrapping_add(columns.operation_duration_ns(index)))
    }

    pub fn place_of_operation(&self, id: GpuOperationId) -> OperationStreamIndex {
        let (columns, index) = self.gpu_columns_and_row(id);
        columns.place.at(index)
    }

    /// Correlation id that a GPU operation shares with the host call that launched it; 0 if it has
    /// none.
    pub fn correlation_id_of_operation(&self, id: GpuOperationId) -> u32 {
        let (columns, index) = self.gpu_columns_and_row(id);
        columns.correlation.decoded_row(index).unwrap_or(0)
    }

    /// Name of a GPU operation in printed tables: the kernel's name, `[CUDA memcpy …]`, `[CUDA
    /// memset]` or `graph …`.
    pub fn printed_operation_name(&self, id: GpuOperationId) -> String {
        let trace = self.trace;
        match self.kind_and_table_row(id) {
            (GpuOperationKind::Kernel, index) => trace.demangled_kernel_name(index).to_owned(),
            (GpuOperationKind::Copy, index) => {
                printed_memcpy_name(trace.names.text_of_name(trace.copies.direction_label[index]))
            }
            (GpuOperationKind::Memset, _) => PRINTED_MEMSET_NAME.to_owned(),
            (GpuOperationKind::CudaGraphLaunch, index) => {
                format!("graph {}", trace.graphs.executable_graph_id[index])
            }
        }
    }
}

/// Name under which printed tables list memsets.
pub const PRINTED_MEMSET_NAME: &str = "[CUDA memset]";

/// Returns the name under which printed tables list copies of a direction.
pub fn printed_memcpy_name(direction: &str) -> String {
    format!("[CUDA memcpy {direction}]")
}
