//! The GPU's work as columns, one a field, all of the same length.

use super::interned_names::NameId;
use super::packed_columns::{PackedColumn, PackedValue};

/// The place of an operation: an index into [`super::Trace::places`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PlaceId(pub u32);

impl PackedValue for PlaceId {
    fn number(self) -> i64 {
        self.0.number()
    }

    fn from_number(number: i64) -> Self {
        Self(u32::from_number(number))
    }
}

/// The place where an operation ran: process, device, context and stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperationPlace {
    /// Index into [`super::Trace::processes`].
    pub process: u32,
    /// Number of the device within its process.
    pub device: u32,
    /// The CUDA context.
    pub context: u32,
    /// The CUDA stream.
    pub stream: u64,
}

/// Table columns that kernels, copies and other GPU operations have in common. Times are
/// nanoseconds of the trace's clock.
#[derive(Debug, Clone, Default)]
pub struct OperationColumns {
    /// Start, nanoseconds.
    pub start: PackedColumn<i64>,
    /// Length, nanoseconds.
    length: PackedColumn<i64>,
    /// Process, device, context and stream of each operation.
    pub place: PackedColumn<PlaceId>,
    /// The correlation id that joins an operation with its launch call, within its process; 0: not
    /// recorded. The column is empty once operations and calls are joined.
    pub correlation: PackedColumn<u32>,
}

impl OperationColumns {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.start.len()
    }

    /// Whether the table has no operation.
    pub fn is_empty(&self) -> bool {
        self.start.is_empty()
    }

    /// Adds one.
    pub fn push(&mut self, start: i64, end: i64, place: PlaceId, correlation: u32) {
        self.start.push(start);
        self.length.push(end.wrapping_sub(start));
        self.place.push(place);
        self.correlation.push(correlation);
    }

    /// Duration of an operation, nanoseconds.
    #[inline]
    pub fn length(&self, row: usize) -> i64 {
        self.length.at(row)
    }

    /// End of an operation, in nanoseconds; exclusive.
    #[inline]
    pub fn end(&self, row: usize) -> i64 {
        self.start.at(row).wrapping_add(self.length.at(row))
    }

    /// Nanoseconds of all.
    pub fn total_duration_ns(&self) -> i64 {
        self.length.iter().sum()
    }

    /// Returns a table of the operations with these indices.
    pub(crate) fn select_rows(&self, rows: &[u32]) -> Self {
        Self {
            start: self.start.select_rows(rows),
            length: self.length.select_rows(rows),
            place: self.place.select_rows(rows),
            correlation: self.correlation.select_rows(rows),
        }
    }
}

/// The elements at some indices; nothing of a column that was not recorded.
pub(crate) fn select_elements<T: Copy>(column: &[T], rows: &[u32]) -> Vec<T> {
    if column.is_empty() {
        return Vec::new();
    }
    rows.iter().map(|&row| column[row as usize]).collect()
}

/// A compiled kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelFunction {
    /// Name of the function with its namespaces and template arguments.
    pub demangled: NameId,
    /// Name of the function without its namespaces and arguments.
    pub short: NameId,
}

/// How a kernel was launched, and what it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LaunchShape {
    /// Number of blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of shared memory that the kernel declares.
    pub static_shared: u32,
    /// Bytes of shared memory that the launch adds.
    pub dynamic_shared: u32,
    /// Bytes of local memory of a thread: spilled registers and arrays.
    pub local: u32,
}

impl LaunchShape {
    pub fn block_count(&self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }

    pub fn threads_per_block(&self) -> u64 {
        self.block.iter().map(|&n| u64::from(n)).product()
    }
}

/// Executions of kernels.
#[derive(Debug, Clone, Default)]
pub struct KernelTable {
    /// Times of the operation, and the stream on which it ran.
    pub on_gpu: OperationColumns,
    /// Index into [`super::Trace::functions`].
    pub function: PackedColumn<u32>,
    /// Index into [`super::Trace::shapes`]; empty when shapes were not read.
    pub shape: PackedColumn<u32>,
    /// The node of a CUDA graph that launched it, 0: none; empty when none is known.
    pub graph_node: PackedColumn<u64>,
}

impl KernelTable {
    /// Adds the node that launched the last kernel; 0: none.
    pub(crate) fn push_graph_node(&mut self, node: u64) {
        if node != 0 && self.graph_node.is_empty() {
            self.graph_node = PackedColumn::column_filled_with(self.on_gpu.len() - 1, 0);
        }
        if node != 0 || !self.graph_node.is_empty() {
            self.graph_node.push(node);
        }
    }
}

/// Copies between memories.
#[derive(Debug, Clone, Default)]
pub struct CopyTable {
    /// Times of the operation, and the stream on which it ran.
    pub on_gpu: OperationColumns,
    pub bytes: Vec<u64>,
    /// Direction, as a label such as `Host-to-Device`.
    pub kind: Vec<NameId>,
    /// Memory that is read.
    pub source: Vec<MemoryKind>,
    /// Memory that is written.
    pub target: Vec<MemoryKind>,
}

/// Kind of memory that findings distinguish: pageable, pinned, device or managed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum MemoryKind {
    /// The memory kind was not recorded, or is not one of these.
    #[default]
    Unknown,
    /// Host memory that may be swapped out: a copy goes through a staging buffer.
    Pageable,
    /// Host memory, page-locked.
    Pinned,
    Device,
    /// CUDA arrays.
    Array,
    /// Managed or unified.
    Managed,
}

impl MemoryKind {
    /// Label in printed output.
    pub fn label(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Pageable => "pageable",
            Self::Pinned => "pinned",
            Self::Device => "device",
            Self::Array => "array",
            Self::Managed => "managed",
        }
    }
}

/// Table of memsets, which fill memory with one value.
#[derive(Debug, Clone, Default)]
pub struct MemsetTable {
    /// Times of the operation, and the stream on which it ran.
    pub on_gpu: OperationColumns,
    pub bytes: Vec<u64>,
}

/// Executions of whole CUDA graphs, where the profiler did not record their nodes.
#[derive(Debug, Clone, Default)]
pub struct GraphLaunchTable {
    /// Times of the operation, and the stream on which it ran.
    pub on_gpu: OperationColumns,
    /// The instantiated graph.
    pub executable: Vec<u32>,
}

/// A node of a CUDA graph, with the ranges in which it was created. Filled by recorders that see
/// the capture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaGraphNode {
    /// Index into [`super::Trace::processes`]: ids are unique in one only.
    pub process: u32,
    /// Id of the graph node, which [`KernelTable::graph_node`] refers to.
    pub id: u64,
    /// The ranges that were open when it, or the node that it was cloned from, was created; the
    /// outermost first.
    pub ranges: Vec<NameId>,
}

/// Nodes of graphs as they were created, where that was recorded in place of their ranges.
#[derive(Debug, Clone, Default)]
pub struct GraphNodeEvents {
    /// When.
    pub time: Vec<i64>,
    /// Index into [`super::Trace::threads`]: the thread that captured or built the graph.
    pub thread: Vec<u32>,
    /// Id of the node.
    pub node: Vec<u64>,
    /// The node from which this node was cloned; 0 if it was not cloned.
    pub original: Vec<u64>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeclaredWorkCount {
    /// Operations by unit and type, such as `matmul bf16`.
    pub flops: Vec<(String, f64)>,
    /// The fewest bytes that memory must move for the declared work.
    pub bytes: f64,
}

/// A part of a problem with its declared work in one launch.
#[derive(Debug, Clone, PartialEq)]
pub struct DeclaredProblemPart {
    /// Name of the part.
    pub label: String,
    /// End of the paths of the part's ranges.
    pub range: String,
    pub work: DeclaredWorkCount,
}

/// The work of each range of a path, and its least times: declared work over measured ceilings.
#[derive(Debug, Clone, PartialEq)]
pub struct DeclaredRangeWork {
    /// Path of the range: names with `/` between them.
    pub path: String,
    /// Time limits in nanoseconds, each with the ceiling that sets it: [`Self::MEMORY_LIMIT_NAME`]
    /// or a unit.
    pub limits: Vec<(String, f64)>,
    pub work: DeclaredWorkCount,
}

impl DeclaredRangeWork {
    /// Name of the time limit that memory sets.
    pub const MEMORY_LIMIT_NAME: &str = "memory";
}

/// Waits of the host for the GPU.
#[derive(Debug, Clone, Default)]
pub struct SynchronisationTable {
    /// Time of each wait, and the context or stream that is waited for.
    pub on_gpu: OperationColumns,
    /// Object of the wait.
    pub kind: Vec<SynchronisationKind>,
}

/// The object that a synchronisation waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum SynchronisationKind {
    /// The object that the synchronisation waits for was not recorded.
    #[default]
    Unknown,
    /// The host waits for an event.
    Event,
    /// An event, by a stream: the host does not wait.
    StreamWaitsEvent,
    Stream,
    /// All of a context.
    Context,
}

/// Allocations and frees of device memory in a trace, as columns with one row for each.
#[derive(Debug, Clone, Default)]
pub struct AllocationTable {
    /// When.
    pub time: Vec<i64>,
    /// Process, device, context and stream.
    pub place: Vec<PlaceId>,
    pub address: Vec<u64>,
    /// Bytes; 0 of freed memory whose size was not recorded.
    pub bytes: Vec<u64>,
    /// Whether the row is a free instead of an allocation.
    pub given_back: Vec<bool>,
}

impl AllocationTable {
    /// Adds one.
    pub fn push(&mut self, time: i64, place: PlaceId, address: u64, bytes: u64, given_back: bool) {
        self.time.push(time);
        self.place.push(place);
        self.address.push(address);
        self.bytes.push(bytes);
        self.given_back.push(given_back);
    }
}

/// Streams, by process and number, that differ from others in what they wait for.
#[derive(Debug, Clone, Default)]
pub struct StreamKindTable {
    /// Legacy default streams: their work waits for work in all other streams, and vice versa.
    pub null: Vec<(u32, u64)>,
    /// Streams that do not wait for the default stream.
    pub non_blocking: Vec<(u32, u64)>,
}

impl StreamKindTable {
    /// Whether the work of two streams of a process waits for each other.
    pub fn wait_for_each_other(&self, process: u32, a: u64, b: u64) -> bool {
        let is = |of: &[(u32, u64)], stream: u64| of.contains(&(process, stream));
        let blocking = ![a, b].iter().any(|&stream| is(&self.non_blocking, stream));
        a != b && blocking && [a, b].iter().any(|&stream| is(&self.null, stream))
    }
}

/// Table of page faults of managed memory.
#[derive(Debug, Clone, Default)]
pub struct PageFaultTable {
    /// When.
    pub start: Vec<i64>,
    /// Time at which the last fault of the group was served; equal to the start for faults of the
    /// host.
    pub end: Vec<i64>,
    /// Index into [`super::Trace::processes`].
    pub process: Vec<u32>,
    /// The device that had the page fault, or [`Self::HOST_PLACE`].
    pub device: Vec<u32>,
    /// How many.
    pub count: Vec<u64>,
}

impl PageFaultTable {
    /// Number that stands for the host in place of a device.
    pub const HOST_PLACE: u32 = u32::MAX;
}

/// Sampled hardware counters.
#[derive(Debug, Clone, Default)]
pub struct CounterSamples {
    /// When.
    pub time: Vec<i64>,
    pub gpu: Vec<u32>,
    /// The counter. Metric names are used instead of ids, because ids differ between versions.
    pub metric: Vec<NameId>,
    pub value: Vec<f64>,
}
