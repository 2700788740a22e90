//! The activity model: data types for what a GPU and its host did, for all recorders.
//!
//! Columns, one vector a field, because a trace has millions of rows and most questions need few of
//! their fields. Texts, places, functions and launch shapes are tables of their own that rows refer
//! to. A column that was not recorded is empty. The model does not interpret its numbers.

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

use collectives::CollectiveTable;
use gpu::{
    AllocationTable, CopyTable, CounterSamples, CudaGraphNode, DeclaredProblemPart,
    DeclaredRangeWork, GraphLaunchTable, GraphNodeEvents, KernelFunction, KernelTable, LaunchShape,
    MemsetTable, OperationPlace, PageFaultTable, PlaceId, StreamKindTable, SynchronisationTable,
};
use hashbrown::HashMap;
use host::{
    ApiCallTable, HostMarkTable, HostRangeTable, HostThread, OperatorInputs, OsCallTable,
    ThreadSwitchTable,
};
use interned_names::{NameId, TraceNames};
use kernel_metrics::ProfiledLaunch;
use packed_columns::PackedColumn;
use quality::TraceQuality;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TracedProcess {
    /// The recorder's key of the process, unique among machines; `pid` where the recorder has no
    /// key.
    pub key: u64,
    /// The system's id.
    pub pid: i64,
    /// Name of the process, if it was recorded.
    pub name: Option<NameId>,
}

/// A GPU with the properties that the trace states.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TracedDevice {
    /// Number of the device.
    pub id: u32,
    pub name: String,
    /// Streaming multiprocessors.
    pub multiprocessors: Option<u32>,
    /// Compute capability of the device: major and minor number.
    pub compute: Option<(u32, u32)>,
    /// Threads, registers and bytes of shared memory of a multiprocessor.
    pub threads_per_sm: Option<u32>,
    /// Registers of a multiprocessor.
    pub registers_per_sm: Option<u32>,
    /// Bytes of shared memory of a multiprocessor.
    pub shared_per_sm: Option<u32>,
    /// Maximum number of blocks that a multiprocessor holds.
    pub blocks_per_sm: Option<u32>,
    /// Threads that run in lockstep: 32 in a warp, 64 in a wavefront.
    pub warp: Option<u32>,
}

/// The program that recorded a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TraceRecorder {
    #[default]
    NsightSystems,
    NsightCompute,
    /// PyTorch's profiler, or another that writes Chrome's format.
    Chrome,
    /// The profiler of JAX and XLA recorded the trace.
    Xla,
    /// AMD's `rocprofv3`.
    Rocprof,
    /// CUPTI in the process that was measured.
    Cupti,
}

impl TraceRecorder {
    /// Label in printed output.
    pub fn label(self) -> &'static str {
        match self {
            Self::NsightSystems => "Nsight Systems",
            Self::NsightCompute => "Nsight Compute",
            Self::Chrome => "Chrome trace",
            Self::Xla => "XLA profiler",
            Self::Rocprof => "rocprofv3",
            Self::Cupti => "CUPTI",
        }
    }
}

/// Everything that one file, or one recording, holds.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    pub recorder: TraceRecorder,
    /// All texts.
    pub names: TraceNames,
    pub processes: Vec<TracedProcess>,
    pub threads: Vec<HostThread>,
    /// Table of places: process, device, context and stream.
    pub places: Vec<OperationPlace>,
    /// GPUs.
    pub devices: Vec<TracedDevice>,
    /// Compiled kernels.
    pub functions: Vec<KernelFunction>,
    pub shapes: Vec<LaunchShape>,
    /// Executions of kernels.
    pub kernels: KernelTable,
    /// Descriptions of the kernels that communicate.
    pub collectives: CollectiveTable,
    pub copies: CopyTable,
    pub sets: MemsetTable,
    /// Executions of whole graphs.
    pub graphs: GraphLaunchTable,
    pub graph_nodes: Vec<CudaGraphNode>,
    /// When and where nodes were created, where that was recorded in place of their ranges.
    pub node_events: GraphNodeEvents,
    /// Work that ranges declare.
    pub work: Vec<DeclaredRangeWork>,
    /// Work that parts of a problem declare.
    pub parts: Vec<DeclaredProblemPart>,
    /// How streams were created.
    pub streams: StreamKindTable,
    /// Waits of the host.
    pub syncs: SynchronisationTable,
    /// Calls of CUDA.
    pub calls: ApiCallTable,
    /// Named spans of host time, such as NVTX ranges.
    pub ranges: HostRangeTable,
    /// Inputs of operators, which [`HostRangeTable::inputs`] refers to.
    pub inputs: Vec<OperatorInputs>,
    /// Named moments of host time, such as NVTX marks.
    pub marks: HostMarkTable,
    /// Calls of the operating system that took long.
    pub os_calls: OsCallTable,
    /// The scheduler's decisions.
    pub switches: ThreadSwitchTable,
    /// Device memory over time.
    pub allocations: AllocationTable,
    /// Page faults of managed memory.
    pub page_faults: PageFaultTable,
    /// Hardware counters over time.
    pub counters: CounterSamples,
    /// Kernel launches that Nsight Compute profiled one by one.
    pub profiled: Vec<ProfiledLaunch>,
    /// The file's description of itself: versions, options, host.
    pub metadata: BTreeMap<String, String>,
    /// Missing and implausible parts of the trace.
    pub quality: TraceQuality,
}

impl Trace {
    /// Frees the correlation ids of operations that were joined with their calls.
    pub(crate) fn forget_correlations(&mut self) {
        let parts = [
            &mut self.kernels.on_gpu,
            &mut self.copies.on_gpu,
            &mut self.sets.on_gpu,
            &mut self.graphs.on_gpu,
        ];
        parts.into_iter().for_each(|part| part.correlation = PackedColumn::default());
    }

    /// The process to which a place (process, device, context, stream) belongs.
    pub fn process_of_place(&self, place: PlaceId) -> u32 {
        self.places[place.0 as usize].process
    }

    /// The kernel's name with namespaces and template arguments.
    pub fn kernel_name(&self, kernel: usize) -> &str {
        self.names.text(self.functions[self.kernels.function.at(kernel) as usize].demangled)
    }

    /// How often the GPU was used: kernels, copies, sets and graph launches.
    pub fn operation_count(&self) -> usize {
        self.kernels.on_gpu.len()
            + self.copies.on_gpu.len()
            + self.sets.on_gpu.len()
            + self.graphs.on_gpu.len()
    }

    /// The first and the last time of any activity, or `None` if the trace is empty.
    pub fn first_and_last_ns(&self) -> Option<(i64, i64)> {
        let operations =
            [&self.kernels.on_gpu, &self.copies.on_gpu, &self.sets.on_gpu, &self.graphs.on_gpu];
        let rows = [(&self.calls.start, &self.calls.end), (&self.ranges.start, &self.ranges.end)];
        let starts = operations.iter().filter_map(|of| of.start.iter().min());
        let first = starts.chain(rows.iter().filter_map(|of| of.0.iter().min().copied())).min()?;
        let ends = operations.iter().filter_map(|of| (0..of.len()).map(|row| of.end(row)).max());
        let last = ends.chain(rows.iter().filter_map(|of| of.1.iter().max().copied())).max()?;
        Some((first, last))
    }
}

/// The key that joins operations and calls: correlation ids are unique in a process only.
pub(crate) fn launch_correlation_key(process: u32, correlation: u32) -> u64 {
    u64::from(process) << 32 | u64::from(correlation)
}

/// Distinct values, to which rows refer by index.
#[derive(Debug, Clone)]
pub(crate) struct InternedValues<T> {
    pub values: Vec<T>,
    index: HashMap<T, u32>,
    last: Option<(T, u32)>,
}

impl<T> Default for InternedValues<T> {
    fn default() -> Self {
        Self { values: Vec::new(), index: HashMap::default(), last: None }
    }
}

impl<T: Copy + Eq + Hash> InternedValues<T> {
    /// Returns the index of a value, which is added if it is new.
    pub fn intern(&mut self, value: T) -> u32 {
        // Rows of the same thread, place or kernel follow each other.
        if let Some((known, index)) = self.last
            && known == value
        {
            return index;
        }
        let new = u32::try_from(self.values.len()).expect("fewer than 2^32 distinct values");
        let index = *self.index.entry(value).or_insert_with(|| {
            self.values.push(value);
            new
        });
        self.last = Some((value, index));
        index
    }
}
