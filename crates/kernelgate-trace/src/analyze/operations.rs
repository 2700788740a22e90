//! Kernels, copies, sets and graph launches as one list.

use crate::model::Trace;
use crate::model::gpu::{OperationColumns, PlaceId};

/// Kind of a GPU operation: kernel, copy, memset or graph launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OperationKind {
    Kernel,
    Copy,
    Set,
    /// A whole graph.
    Graph,
}

/// An operation by its number: kernels first, then copies, sets and graph launches.
pub type OperationId = u32;

/// All GPU operations of a trace under one numbering.
#[derive(Debug, Clone, Copy)]
pub struct AllOperations<'a> {
    trace: &'a Trace,
    /// Numbers at which copies, sets and graph launches begin, and the number of all operations.
    bounds: [u32; 4],
}

impl<'a> AllOperations<'a> {
    /// Numbers the GPU operations of a trace.
    pub fn new(trace: &'a Trace) -> Self {
        let mut next = 0;
        let mut bound = |operations: &OperationColumns| {
            next += u32::try_from(operations.len()).expect("fewer than 2^32 operations");
            next
        };
        let bounds = [
            bound(&trace.kernels.on_gpu),
            bound(&trace.copies.on_gpu),
            bound(&trace.sets.on_gpu),
            bound(&trace.graphs.on_gpu),
        ];
        Self { trace, bounds }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.bounds[3] as usize
    }

    /// Returns whether the trace has no GPU operation.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every number.
    pub fn ids(&self) -> std::ops::Range<OperationId> {
        0..self.bounds[3]
    }

    /// The numbers of the kernels, each of which is also the row of the kernel.
    pub fn kernel_ids(&self) -> std::ops::Range<OperationId> {
        0..self.bounds[0]
    }

    /// Kind of an operation, and its index in the columns of that kind.
    pub fn kind_and_row(&self, id: OperationId) -> (OperationKind, usize) {
        let [kernels, copies, sets, _] = self.bounds;
        match id {
            _ if id < kernels => (OperationKind::Kernel, id as usize),
            _ if id < copies => (OperationKind::Copy, (id - kernels) as usize),
            _ if id < sets => (OperationKind::Set, (id - copies) as usize),
            _ => (OperationKind::Graph, (id - sets) as usize),
        }
    }

    #[inline]
    fn columns_and_row(&self, id: OperationId) -> (&'a OperationColumns, usize) {
        let (kind, index) = self.kind_and_row(id);
        let columns = match kind {
            OperationKind::Kernel => &self.trace.kernels.on_gpu,
            OperationKind::Copy => &self.trace.copies.on_gpu,
            OperationKind::Set => &self.trace.sets.on_gpu,
            OperationKind::Graph => &self.trace.graphs.on_gpu,
        };
        (columns, index)
    }

    /// First nanosecond.
    #[inline]
    pub fn start(&self, id: OperationId) -> i64 {
        let (columns, index) = self.columns_and_row(id);
        columns.start.at(index)
    }

    /// Nanosecond after the last.
    #[inline]
    pub fn end(&self, id: OperationId) -> i64 {
        let (columns, index) = self.columns_and_row(id);
        columns.end(index)
    }

    /// Duration of a GPU operation, nanoseconds.
    #[inline]
    pub fn length(&self, id: OperationId) -> i64 {
        let (columns, index) = self.columns_and_row(id);
        columns.length(index)
    }

    /// Start and end of the operation, in nanoseconds; the end is exclusive.
    #[inline]
    pub fn span(&self, id: OperationId) -> (i64, i64) {
        let (columns, index) = self.columns_and_row(id);
        let start = columns.start.at(index);
        (start, start.wrapping_add(columns.length(index)))
    }

    pub fn place(&self, id: OperationId) -> PlaceId {
        let (columns, index) = self.columns_and_row(id);
        columns.place.at(index)
    }

    /// Correlation id of the operation; 0 if it has no id.
    pub fn correlation(&self, id: OperationId) -> u32 {
        let (columns, index) = self.columns_and_row(id);
        columns.correlation.get(index).unwrap_or(0)
    }

    /// A name for people: the kernel's, `[CUDA memcpy …]`, `[CUDA memset]`, `graph …`.
    pub fn name(&self, id: OperationId) -> String {
        let trace = self.trace;
        match self.kind_and_row(id) {
            (OperationKind::Kernel, index) => trace.kernel_name(index).to_owned(),
            (OperationKind::Copy, index) => memcpy_name(trace.names.text(trace.copies.kind[index])),
            (OperationKind::Set, _) => MEMSET_NAME.to_owned(),
            (OperationKind::Graph, index) => format!("graph {}", trace.graphs.executable[index]),
        }
    }
}

/// Name of memsets in tables.
pub const MEMSET_NAME: &str = "[CUDA memset]";

/// The name of copies of a direction in tables.
pub fn memcpy_name(direction: &str) -> String {
    format!("[CUDA memcpy {direction}]")
}
