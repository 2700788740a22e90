//! GPU operations as columns: one column per field, all columns of a table equally long.

use super::interned_names::InternedNameId;
use super::packed_columns::{BitPackedColumn, PackableInteger};

/// Identifies the stream of a GPU operation, with its process, device and context: an index into
/// [`super::Trace::places`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OperationStreamIndex(pub u32);

impl PackableInteger for OperationStreamIndex {
    fn to_packed_integer(self) -> i64 {
        self.0.to_packed_integer()
    }

    fn from_packed_integer(number: i64) -> Self {
        Self(u32::from_packed_integer(number))
    }
}

/// The process, device, context and stream in which a GPU operation ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessDeviceContextAndStream {
    /// Index into [`super::Trace::processes`].
    pub process_index: u32,
    /// Ordinal of the device within its process.
    pub device: u32,
    /// The CUDA context.
    pub context: u32,
    /// The CUDA stream.
    pub stream: u64,
}

/// Columns that the tables of kernels, copies, memsets and graph launches have in common. Start and
/// end times of GPU operations are in nanoseconds on the trace's clock.
#[derive(Debug, Clone, Default)]
pub struct GpuOperationColumns {
    /// Start, nanoseconds.
    pub start_ns: BitPackedColumn<i64>,
    /// Length, nanoseconds.
    duration_ns: BitPackedColumn<i64>,
    /// Index of each GPU operation's process, device, context and stream.
    pub place: BitPackedColumn<OperationStreamIndex>,
    /// The correlation id that connects a GPU operation with its launch call in the same process; 0
    /// if the trace does not record it. The correlation column is emptied after GPU operations are
    /// joined with their launch calls.
    pub correlation: BitPackedColumn<u32>,
}

impl GpuOperationColumns {
    /// Number of GPU operations in the table.
    pub fn operation_count(&self) -> usize {
        self.start_ns.row_count()
    }

    /// Whether the table contains no GPU operation.
    pub fn has_no_operation(&self) -> bool {
        self.start_ns.has_no_row()
    }

    /// Adds one GPU operation.
    pub fn push_operation(
        &mut self,
        start: i64,
        end: i64,
        place: OperationStreamIndex,
        correlation: u32,
    ) {
        self.start_ns.push_row(start);
        self.duration_ns.push_row(end.wrapping_sub(start));
        self.place.push_row(place);
        self.correlation.push_row(correlation);
    }

    /// Duration of the GPU operation in a row, in nanoseconds.
    #[inline]
    pub fn operation_duration_ns(&self, row: usize) -> i64 {
        self.duration_ns.at(row)
    }

    /// Time at which the GPU operation in a row ended, in nanoseconds of the trace's clock.
    #[inline]
    pub fn operation_end_ns(&self, row: usize) -> i64 {
        self.start_ns.at(row).wrapping_add(self.duration_ns.at(row))
    }

    /// Nanoseconds of all.
    pub fn sum_of_operation_durations_ns(&self) -> i64 {
        self.duration_ns.iter_decoded_rows().sum()
    }

    /// Copies the GPU operations in the given rows into a new table.
    pub(crate) fn select_operations(&self, rows: &[u32]) -> Self {
        Self {
            start_ns: self.start_ns.select_packed_rows(rows),
            duration_ns: self.duration_ns.select_packed_rows(rows),
            place: self.place.select_packed_rows(rows),
            correlation: self.correlation.select_packed_rows(rows),
        }
    }
}

/// Copies the elements at the given rows; returns an empty vector if the trace did not record the
/// column.
pub(crate) fn select_column_elements<T: Copy>(column: &[T], rows: &[u32]) -> Vec<T> {
    if column.is_empty() {
        return Vec::new();
    }
    rows.iter().map(|&row| column[row as usize]).collect()
}

/// A compiled kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelFunctionName {
    /// Demangled name of the kernel function, with namespaces and template arguments.
    pub demangled_name: InternedNameId,
    /// Name of the kernel function without namespaces and template arguments.
    pub short_name: InternedNameId,
}

/// Grid, block, registers, shared memory and local memory of a kernel launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct KernelLaunchShape {
    /// Number of thread blocks in x, y and z.
    pub grid: [u32; 3],
    /// Number of threads per block in x, y and z.
    pub block: [u32; 3],
    /// Registers of a thread.
    pub registers_per_thread: u32,
    /// Bytes of shared memory per block that the kernel declares statically.
    pub static_shared_bytes: u32,
    /// Bytes of dynamic shared memory per block that the launch requests.
    pub dynamic_shared_bytes: u32,
    /// Bytes of local memory per thread, for spilled registers and local arrays.
    pub local_bytes_per_thread: u32,
}

impl KernelLaunchShape {
    pub fn blocks_in_grid(&self) -> u64 {
        self.grid.iter().map(|&n| u64::from(n)).product()
    }

    pub fn threads_per_block(&self) -> u64 {
        self.block.iter().map(|&n| u64::from(n)).product()
    }
}

/// Executions of kernels.
#[derive(Debug, Clone, Default)]
pub struct KernelLaunchTable {
    /// Start, end and stream of each kernel.
    pub on_gpu: GpuOperationColumns,
    /// Index into [`super::Trace::functions`].
    pub function_index: BitPackedColumn<u32>,
    /// For each kernel, the index of its grid and block sizes in [`super::Trace::shapes`]; empty if
    /// the shapes were not read.
    pub launch_shape_index: BitPackedColumn<u32>,
    /// For each kernel, the id of the CUDA graph node that launched the kernel; 0: no graph; the
    /// column is empty if no kernel has a node.
    pub graph_node: BitPackedColumn<u64>,
}

impl KernelLaunchTable {
    /// Sets the CUDA graph node that launched the last kernel of the table; 0: no graph.
    pub(crate) fn push_graph_node_of_last_kernel(&mut self, node: u64) {
        if node != 0 && self.graph_node.has_no_row() {
            self.graph_node =
                BitPackedColumn::column_filled_with(self.on_gpu.operation_count() - 1, 0);
        }
        if node != 0 || !self.graph_node.has_no_row() {
            self.graph_node.push_row(node);
        }
    }
}

/// Copies between memories.
#[derive(Debug, Clone, Default)]
pub struct MemoryCopyTable {
    /// Start, end and stream of each memory copy.
    pub on_gpu: GpuOperationColumns,
    pub copied_bytes: Vec<u64>,
    /// Copy direction, as a label such as `Host-to-Device`.
    pub direction_label: Vec<InternedNameId>,
    /// Kind of memory from which each copy reads.
    pub source_memory: Vec<CopiedMemoryKind>,
    /// Kind of memory to which each copy writes.
    pub target_memory: Vec<CopiedMemoryKind>,
}

/// Kind of memory that a copy reads or writes: pageable, pinned, device, array or managed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum CopiedMemoryKind {
    /// The memory kind was not recorded, or is not one of the kinds of this enum.
    #[default]
    Unknown,
    /// Pageable host memory; the driver copies it through a pinned staging buffer.
    Pageable,
    /// Host memory, page-locked.
    Pinned,
    DeviceMemory,
    /// CUDA arrays.
    CudaArray,
    /// Managed or unified.
    Managed,
}

impl CopiedMemoryKind {
    /// Returns the printed label of a kind of memory.
    pub fn memory_kind_label(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Pageable => "pageable",
            Self::Pinned => "pinned",
            Self::DeviceMemory => "device",
            Self::CudaArray => "array",
            Self::Managed => "managed",
        }
    }
}

/// Table of memset operations, which fill GPU memory with one value.
#[derive(Debug, Clone, Default)]
pub struct MemsetTable {
    /// Start, end and stream of each memset.
    pub on_gpu: GpuOperationColumns,
    pub set_bytes: Vec<u64>,
}

/// Executions of whole CUDA graphs, for traces in which the profiler did not record single graph
/// nodes.
#[derive(Debug, Clone, Default)]
pub struct WholeGraphLaunchTable {
    /// Start, end and stream of each CUDA graph execution.
    pub on_gpu: GpuOperationColumns,
    /// The instantiated graph.
    pub executable_graph_id: Vec<u32>,
}

/// A node of a CUDA graph, with the ranges that were open when the node was created. Only recorders
/// that observe CUDA graph capture fill this table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaGraphNodeWithRanges {
    /// Index of the node's process in [`super::Trace::processes`], because node ids are unique only
    /// within a process.
    pub process_index: u32,
    /// Id of the CUDA graph node, as in [`KernelLaunchTable::graph_node`].
    pub graph_node_id: u64,
    /// Ranges that were open when the CUDA graph node, or the node from which it was cloned, was
    /// created; outermost first.
    pub ranges_open_at_creation: Vec<InternedNameId>,
}

/// Creation times of CUDA graph nodes, for recorders that do not record the ranges of the nodes
/// themselves.
#[derive(Debug, Clone, Default)]
pub struct GraphNodeCreationTable {
    /// Time of each row, nanoseconds of the trace's clock.
    pub time_ns: Vec<i64>,
    /// Index into [`super::Trace::threads`] of the thread that captured or built the CUDA graph.
    pub thread_index: Vec<u32>,
    /// Id of the created CUDA graph node.
    pub node_id: Vec<u64>,
    /// Id of the node from which this CUDA graph node was cloned; 0 if the node was not cloned.
    pub cloned_from_node_id: Vec<u64>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeclaredOperationsAndBytes {
    /// Declared number of arithmetic operations by execution unit and data type, such as `matmul
    /// bf16`.
    pub flops_by_unit_and_dtype: Vec<(String, f64)>,
    /// Minimum number of bytes that the declared work must move to and from device memory.
    pub min_device_memory_bytes: f64,
}

/// A named part of a benchmark problem, with its declared operations and bytes per launch.
#[derive(Debug, Clone, PartialEq)]
pub struct DeclaredProblemPart {
    /// Name of the problem part, such as a layer.
    pub part_name: String,
    /// The path of each range of this part ends with this text.
    pub range_path_suffix: String,
    pub work: DeclaredOperationsAndBytes,
}

/// Declared operations and bytes of each range on a path, and their minimum time: declared work
/// divided by measured device rates.
#[derive(Debug, Clone, PartialEq)]
pub struct DeclaredWorkOfRange {
    /// Path of the range: range names from outermost to innermost, separated by `/`.
    pub range_path: String,
    /// Minimum times in nanoseconds, each with its limiting resource:
    /// [`Self::MEMORY_BANDWIDTH_LIMIT_NAME`] or an execution unit.
    pub min_ns_by_resource: Vec<(String, f64)>,
    pub work: DeclaredOperationsAndBytes,
}

impl DeclaredWorkOfRange {
    /// Name of the minimum time that memory bandwidth sets.
    pub const MEMORY_BANDWIDTH_LIMIT_NAME: &str = "memory";
}

/// Waits of the host, or of a stream, for GPU work.
#[derive(Debug, Clone, Default)]
pub struct SynchronisationWaitTable {
    /// Start and end of each wait, and the context or stream on which it waits.
    pub on_gpu: GpuOperationColumns,
    /// Object for which each call or stream waits.
    pub kind: Vec<SynchronisationTarget>,
}

/// The object for which a synchronisation call waits: an event, a stream or a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum SynchronisationTarget {
    /// The trace does not record the object of the wait.
    #[default]
    Unknown,
    /// The host waits for a CUDA event.
    HostWaitsForEvent,
    /// A stream waits for a CUDA event; the host does not wait.
    StreamWaitsEvent,
    HostWaitsForStream,
    /// The host waits for all work of a CUDA context.
    HostWaitsForContext,
}

/// Allocations and frees of device memory in a trace; one row per allocation or free.
#[derive(Debug, Clone, Default)]
pub struct DeviceAllocationAndFreeTable {
    /// Time of each row, nanoseconds of the trace's clock.
    pub time_ns: Vec<i64>,
    /// Process, device, context and stream of each allocation or free.
    pub place: Vec<OperationStreamIndex>,
    pub address: Vec<u64>,
    /// Allocated or freed bytes; 0 for a free whose size was not recorded.
    pub allocated_or_freed_bytes: Vec<u64>,
    /// Whether the row is a free (true) or an allocation (false).
    pub is_free: Vec<bool>,
}

impl DeviceAllocationAndFreeTable {
    /// Adds one allocation or free.
    pub fn push_allocation_or_free(
        &mut self,
        time: i64,
        place: OperationStreamIndex,
        address: u64,
        bytes: u64,
        given_back: bool,
    ) {
        self.time_ns.push(time);
        self.place.push(place);
        self.address.push(address);
        self.allocated_or_freed_bytes.push(bytes);
        self.is_free.push(given_back);
    }
}

/// Streams, by process and stream number, whose implicit synchronisation differs from ordinary
/// blocking streams.
#[derive(Debug, Clone, Default)]
pub struct SpecialStreamTable {
    /// Legacy default streams: work on a legacy default stream waits for work on all blocking
    /// streams, and vice versa.
    pub null_streams: Vec<(u32, u64)>,
    /// Non-blocking streams, which do not synchronise with the legacy default stream.
    pub non_blocking_streams: Vec<(u32, u64)>,
}

impl SpecialStreamTable {
    /// Whether the default-stream rule makes the work of two streams in one process wait for each
    /// other.
    pub fn synchronise_through_default_stream(&self, process: u32, a: u64, b: u64) -> bool {
        let is = |of: &[(u32, u64)], stream: u64| of.contains(&(process, stream));
        let blocking = ![a, b].iter().any(|&stream| is(&self.non_blocking_streams, stream));
        a != b && blocking && [a, b].iter().any(|&stream| is(&self.null_streams, stream))
    }
}

/// Page faults of managed memory, one row per recorded group of faults.
#[derive(Debug, Clone, Default)]
pub struct ManagedPageFaultTable {
    /// Start of each row, nanoseconds of the trace's clock.
    pub start_ns: Vec<i64>,
    /// Time at which the last page fault of the group was served; equal to the start for page
    /// faults of the host.
    pub end_ns: Vec<i64>,
    /// Index into [`super::Trace::processes`].
    pub process_index: Vec<u32>,
    /// The device whose access caused the page faults, or [`Self::HOST_INSTEAD_OF_DEVICE`] if the
    /// host's access did.
    pub device: Vec<u32>,
    /// Number of page faults in each row.
    pub fault_count: Vec<u64>,
}

impl ManagedPageFaultTable {
    /// Device number that marks page faults of the host instead of a GPU.
    pub const HOST_INSTEAD_OF_DEVICE: u32 = u32::MAX;
}

/// Sampled hardware counters.
#[derive(Debug, Clone, Default)]
pub struct HardwareCounterSampleTable {
    /// Time of each row, nanoseconds of the trace's clock.
    pub time_ns: Vec<i64>,
    pub gpu_number: Vec<u32>,
    /// The counter. The counter's metric name is stored instead of its id, because metric ids
    /// differ between versions of Nsight Systems.
    pub metric_name: Vec<InternedNameId>,
    pub metric_value: Vec<f64>,
}
