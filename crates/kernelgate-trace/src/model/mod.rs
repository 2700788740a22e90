//! The trace data model: types for GPU operations and host activity that all trace readers fill.
//!
//! Tables store one vector per field, because a trace has millions of rows and most analyses read
//! few of their fields. Texts, streams, kernel functions and launch shapes are stored once in
//! tables, and rows refer to them by index. A column is empty if the trace does not record its
//! field. The data model stores recorded numbers and does not interpret them.

pub mod collective;
pub mod collectives;
pub mod gpu;
pub mod host;
pub mod interned_names;
pub mod kernel_metrics;
pub mod packed_columns;
pub mod quality;

use std::collections::BTreeMap;
use std::hash::Hash;

use collectives::RecordedCollectiveTable;
use gpu::{
    CudaGraphNodeWithRanges, DeclaredProblemPart, DeclaredWorkOfRange,
    DeviceAllocationAndFreeTable, GraphNodeCreationTable, HardwareCounterSampleTable,
    KernelFunctionName, KernelLaunchShape, KernelLaunchTable, ManagedPageFaultTable,
    MemoryCopyTable, MemsetTable, OperationStreamIndex, ProcessDeviceContextAndStream,
    SpecialStreamTable, SynchronisationWaitTable, WholeGraphLaunchTable,
};
use hashbrown::HashMap;
use host::{
    ApiCallTable, HostMarkerTable, HostRangeTable, HostThread, RecordedOperatorInputs,
    SlowOsCallTable, ThreadContextSwitchTable,
};
use interned_names::{InternedNameId, InternedTraceNames};
use kernel_metrics::NcuProfiledLaunch;
use packed_columns::BitPackedColumn;
use quality::MissingAndImplausibleTraceData;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TracedHostProcess {
    /// The recorder's unique key of the process, also across machines; equal to `pid` if the
    /// recorder has no key.
    pub unique_process_key: u64,
    /// The system's id.
    pub pid: i64,
    /// Name of the traced process, if the trace records it.
    pub process_name: Option<InternedNameId>,
}

/// Properties of a GPU, as far as the trace records them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TracedDevice {
    /// Ordinal of the GPU in the trace.
    pub device_ordinal: u32,
    pub device_name: String,
    /// Streaming multiprocessors.
    pub multiprocessors: Option<u32>,
    /// Major and minor number of the GPU's compute capability.
    pub compute_capability: Option<(u32, u32)>,
    /// Maximum number of resident threads per multiprocessor.
    pub threads_per_sm: Option<u32>,
    /// Number of registers per multiprocessor.
    pub registers_per_sm: Option<u32>,
    /// Bytes of shared memory per multiprocessor.
    pub shared_bytes_per_sm: Option<u32>,
    /// Maximum number of resident blocks per multiprocessor.
    pub blocks_per_sm: Option<u32>,
    /// Threads that run in lockstep: 32 in a warp of NVIDIA, 64 or 32 in a wavefront of AMD.
    pub threads_per_warp: Option<u32>,
}

/// The profiler that recorded a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TraceRecorder {
    #[default]
    NsightSystems,
    NsightCompute,
    /// PyTorch's profiler, or another program that writes Chrome trace JSON, recorded the trace.
    PytorchOrChromeTrace,
    /// The profiler of JAX and XLA recorded the trace.
    XlaProfiler,
    /// AMD's `rocprofv3`.
    Rocprof,
    /// kernelgate recorded the trace through CUPTI in the measured process itself.
    KernelgateCupti,
}

impl TraceRecorder {
    /// Returns the printed label of a trace's recorder.
    pub fn recorder_label(self) -> &'static str {
        match self {
            Self::NsightSystems => "Nsight Systems",
            Self::NsightCompute => "Nsight Compute",
            Self::PytorchOrChromeTrace => "Chrome trace",
            Self::XlaProfiler => "XLA profiler",
            Self::Rocprof => "rocprofv3",
            Self::KernelgateCupti => "CUPTI",
        }
    }
}

/// All activity, tables of names and metrics from one trace file or one recording.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    pub recorder: TraceRecorder,
    /// All texts.
    pub names: InternedTraceNames,
    pub processes: Vec<TracedHostProcess>,
    pub threads: Vec<HostThread>,
    /// Table of processes, devices, contexts and streams that GPU operations refer to.
    pub places: Vec<ProcessDeviceContextAndStream>,
    /// Properties of the GPUs in the trace.
    pub devices: Vec<TracedDevice>,
    /// Compiled kernels.
    pub functions: Vec<KernelFunctionName>,
    pub shapes: Vec<KernelLaunchShape>,
    /// Executions of kernels.
    pub kernels: KernelLaunchTable,
    /// Sizes and ranks of collective kernels, as the framework recorded them.
    pub collectives: RecordedCollectiveTable,
    pub copies: MemoryCopyTable,
    pub memsets: MemsetTable,
    /// Executions of whole CUDA graphs whose single nodes were not recorded.
    pub graphs: WholeGraphLaunchTable,
    pub graph_nodes: Vec<CudaGraphNodeWithRanges>,
    /// Creation times of CUDA graph nodes, if they were recorded instead of the ranges of the
    /// nodes.
    pub node_events: GraphNodeCreationTable,
    /// Operations and bytes that benchmark cases declare for ranges.
    pub declared_work: Vec<DeclaredWorkOfRange>,
    /// Operations and bytes that each named part of a benchmark problem declares.
    pub declared_parts: Vec<DeclaredProblemPart>,
    /// Legacy default streams and non-blocking streams, which synchronise differently from other
    /// streams.
    pub special_streams: SpecialStreamTable,
    /// Waits of the host, or of a stream, for GPU work.
    pub synchronisation_waits: SynchronisationWaitTable,
    /// Calls of CUDA API functions by the host.
    pub calls: ApiCallTable,
    /// Named time spans on the host, such as NVTX ranges.
    pub ranges: HostRangeTable,
    /// Inputs of operator calls, to which [`HostRangeTable::operator_inputs_number`] refers.
    pub operator_inputs: Vec<RecordedOperatorInputs>,
    /// Named instants on the host, such as NVTX marks.
    pub host_marks: HostMarkerTable,
    /// Calls of operating-system functions that took longer than the recorder's threshold.
    pub os_calls: SlowOsCallTable,
    /// The scheduler's decisions.
    pub context_switches: ThreadContextSwitchTable,
    /// Allocations and frees of device memory over time.
    pub allocations: DeviceAllocationAndFreeTable,
    /// Page faults of managed memory.
    pub page_faults: ManagedPageFaultTable,
    /// Samples of hardware counters over time.
    pub counters: HardwareCounterSampleTable,
    /// Kernel launches that Nsight Compute profiled, with their metrics.
    pub profiled_launches: Vec<NcuProfiledLaunch>,
    /// Facts that the trace file records about itself, such as versions, options and host.
    pub metadata: BTreeMap<String, String>,
    /// Data that is missing from the trace, and implausible data.
    pub quality: MissingAndImplausibleTraceData,
}

impl Trace {
    /// Frees the correlation-id columns after GPU operations were joined with their launch calls.
    pub(crate) fn free_correlation_columns(&mut self) {
        let parts = [
            &mut self.kernels.on_gpu,
            &mut self.copies.on_gpu,
            &mut self.memsets.on_gpu,
            &mut self.graphs.on_gpu,
        ];
        parts.into_iter().for_each(|part| part.correlation = BitPackedColumn::default());
    }

    /// The process that owns a stream: an index into the table of processes.
    pub fn process_index_of_place(&self, place: OperationStreamIndex) -> u32 {
        self.places[place.0 as usize].process_index
    }

    /// The kernel's demangled name, with namespaces and template arguments.
    pub fn demangled_kernel_name(&self, kernel: usize) -> &str {
        self.names.text_of_name(
            self.functions[self.kernels.function_index.at(kernel) as usize].demangled_name,
        )
    }

    /// Number of GPU operations in the trace: kernels, copies, memsets and graph launches.
    pub fn gpu_operation_count(&self) -> usize {
        self.kernels.on_gpu.operation_count()
            + self.copies.on_gpu.operation_count()
            + self.memsets.on_gpu.operation_count()
            + self.graphs.on_gpu.operation_count()
    }

    /// Start of the first and end of the last activity in the trace, in nanoseconds; `None` if the
    /// trace is empty.
    pub fn first_and_last_activity_ns(&self) -> Option<(i64, i64)> {
        let operations =
            [&self.kernels.on_gpu, &self.copies.on_gpu, &self.memsets.on_gpu, &self.graphs.on_gpu];
        let rows = [
            (&self.calls.start_ns, &self.calls.end_ns),
            (&self.ranges.start_ns, &self.ranges.end_ns),
        ];
        let starts = operations.iter().filter_map(|of| of.start_ns.iter_decoded_rows().min());
        let first = starts.chain(rows.iter().filter_map(|of| of.0.iter().min().copied())).min()?;
        let ends = operations
            .iter()
            .filter_map(|of| (0..of.operation_count()).map(|row| of.operation_end_ns(row)).max());
        let last = ends.chain(rows.iter().filter_map(|of| of.1.iter().max().copied())).max()?;
        Some((first, last))
    }
}

/// Combines process and correlation id to a unique key, because correlation ids are unique only
/// within a process.
pub(crate) fn process_and_correlation_key(process: u32, correlation: u32) -> u64 {
    u64::from(process) << 32 | u64::from(correlation)
}

/// Stores each distinct value once and gives it an index, to which rows refer.
#[derive(Debug, Clone)]
pub(crate) struct DistinctValues<T> {
    pub values: Vec<T>,
    index: HashMap<T, u32>,
    last_found: Option<(T, u32)>,
}

impl<T> Default for DistinctValues<T> {
    fn default() -> Self {
        Self { values: Vec::new(), index: HashMap::default(), last_found: None }
    }
}

impl<T: Copy + Eq + Hash> DistinctValues<T> {
    /// Returns the index of an equal stored value, or stores the value and returns its new index.
    pub fn index_of_value(&mut self, value: T) -> u32 {
        // Consecutive rows mostly have the same thread, stream or kernel, so the last value is
        // compared first.
        if let Some((known, index)) = self.last_found
            && known == value
        {
            return index;
        }
        let new = u32::try_from(self.values.len()).expect("fewer than 2^32 distinct values");
        let index = *self.index.entry(value).or_insert_with(|| {
            self.values.push(value);
            new
        });
        self.last_found = Some((value, index));
        index
    }
}
