//! CUPTI's activity records of this process as plain data: one list for each kind of record; names
//! are indices into a list of texts.
//!
//! Recorded files and the responses to `kernelgate profile` contain this type, so its fields are a
//! format: fields may be added, never changed. Times are nanoseconds of CUPTI's clock, which the
//! host and all GPUs share. This module does not interpret the records, and does not join a call
//! with the work that it launched.

use serde::{Deserialize, Serialize};

use crate::{BackendError, Device};
use cudarc::driver::sys::CUdevice_attribute as Attribute;

/// All records that CUPTI collected in this process between two calls that take them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CuptiRecordedActivity {
    /// Id of the recorded process.
    pub pid: u32,
    /// Texts of this recording; every `name_index` of its records is an index into this list.
    #[serde(rename = "names")]
    pub interned_names: Vec<String>,
    /// Records of kernels that ran on the GPU, in order of their start.
    pub kernels: Vec<KernelRecord>,
    /// Copies between memories.
    pub copies: Vec<MemoryCopyRecord>,
    /// Records of memory sets.
    #[serde(rename = "sets")]
    pub memsets: Vec<MemsetRecord>,
    /// Records of host calls of the CUDA driver and of the CUDA runtime.
    pub calls: Vec<HostCallRecord>,
    /// Records of the host's waits for the GPU, and of the waits of streams for events.
    #[serde(rename = "waits")]
    pub synchronizations: Vec<SynchronizationRecord>,
    /// Records of named ranges that the host has closed.
    pub ranges: Vec<NamedRangeRecord>,
    /// Graph nodes that launched recorded operations, with the ranges that were open when the node
    /// was created.
    pub graph_nodes: Vec<GraphNodeRangesRecord>,
    /// Records of allocations of device memory and of their releases.
    #[serde(rename = "allocations")]
    pub device_memory_changes: Vec<DeviceMemoryChangeRecord>,
    /// Spans in which CUPTI itself worked and disturbed the process: first nanosecond, and the
    /// nanosecond after the last one.
    pub overhead: Vec<[u64; 2]>,
    /// Number of records that CUPTI lost.
    #[serde(rename = "dropped")]
    pub dropped_records: u64,
}

/// GPU, CUDA context and stream of an operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuContextStreamIds {
    /// Ordinal of the GPU in this process.
    #[serde(rename = "device")]
    pub device_ordinal: u32,
    /// The CUDA context.
    #[serde(rename = "context")]
    pub context_id: u32,
    /// The stream.
    #[serde(rename = "stream")]
    pub stream_id: u32,
}

/// Record of one run of a kernel on the GPU, with the start and end that the hardware measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelRecord {
    /// Name of the kernel: an index into [`CuptiRecordedActivity::interned_names`].
    #[serde(rename = "name")]
    pub name_index: u32,
    /// Time at which the kernel began on the GPU, nanoseconds; `start_ns` and `end_ns` are 0 if
    /// CUPTI did not measure the kernel's times.
    #[serde(rename = "start")]
    pub start_ns: u64,
    /// Time at which the kernel finished on the GPU, nanoseconds.
    #[serde(rename = "end")]
    pub end_ns: u64,
    /// GPU, CUDA context and stream to which the record belongs.
    #[serde(rename = "on")]
    pub device_context_stream: GpuContextStreamIds,
    /// CUPTI's correlation id, which the kernel record shares with the record of the host call that
    /// launched the kernel.
    #[serde(rename = "correlation")]
    pub correlation_id: u32,
    /// Number of blocks of the kernel's grid in x, y and z.
    pub grid: [u32; 3],
    /// Number of threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Registers that each thread of the kernel uses.
    #[serde(rename = "registers")]
    pub registers_per_thread: u32,
    /// Bytes of static shared memory of a block.
    #[serde(rename = "static_shared")]
    pub static_shared_bytes: u32,
    /// Bytes of dynamic shared memory of a block, which the launch requests.
    #[serde(rename = "dynamic_shared")]
    pub dynamic_shared_bytes: u32,
    /// Bytes of local memory that each thread of the kernel has.
    #[serde(rename = "local")]
    pub local_bytes_per_thread: u32,
    /// CUPTI's id of the graph node that launched the kernel; 0 if no graph launched the kernel.
    #[serde(rename = "graph_node")]
    pub graph_node_id: u64,
}

impl KernelRecord {
    /// Duration of the kernel on the GPU, nanoseconds.
    pub const fn kernel_duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
    }
}

/// A copy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryCopyRecord {
    /// Time at which the copy began on the GPU, nanoseconds.
    #[serde(rename = "start")]
    pub start_ns: u64,
    /// Time at which the copy finished on the GPU, nanoseconds.
    #[serde(rename = "end")]
    pub end_ns: u64,
    /// Device, context and stream.
    #[serde(rename = "on")]
    pub device_context_stream: GpuContextStreamIds,
    /// CUPTI's correlation id, which the copy record shares with the record of the host call that
    /// enqueued the copy.
    #[serde(rename = "correlation")]
    pub correlation_id: u32,
    /// Number of bytes that the copy or memset writes.
    #[serde(rename = "bytes")]
    pub copied_bytes: u64,
    /// Direction of the copy by CUPTI's numbers: 1 host to device, 2 device to host, 8 within a
    /// device, 10 between devices.
    #[serde(rename = "kind")]
    pub copy_direction: u8,
    /// Kind of the memory that the copy reads, by CUPTI's numbers: 1 pageable, 2 pinned, 3 device,
    /// 4 array, 5 managed.
    #[serde(rename = "source")]
    pub source_memory_kind: u8,
    /// Kind of the memory that the copy writes, by CUPTI's numbers.
    #[serde(rename = "target")]
    pub target_memory_kind: u8,
    /// CUPTI's id of the graph node that launched the copy; 0 if no graph launched the copy.
    #[serde(rename = "graph_node")]
    pub graph_node_id: u64,
}

/// Record of one memset that ran on a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemsetRecord {
    /// Time at which the memset began on the GPU, nanoseconds.
    #[serde(rename = "start")]
    pub start_ns: u64,
    /// Time at which the memset finished on the GPU, nanoseconds.
    #[serde(rename = "end")]
    pub end_ns: u64,
    /// Device, context and stream.
    #[serde(rename = "on")]
    pub device_context_stream: GpuContextStreamIds,
    /// CUPTI's correlation id, which the memset record shares with the record of the host call that
    /// enqueued the memset.
    #[serde(rename = "correlation")]
    pub correlation_id: u32,
    /// Number of bytes copied or set.
    pub bytes: u64,
    /// CUPTI's id of the graph node that launched the memset; 0 if no graph launched the memset.
    #[serde(rename = "graph_node")]
    pub graph_node_id: u64,
}

/// Record of one host call of a CUDA driver or CUDA runtime function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostCallRecord {
    /// Name of the called function: an index into [`CuptiRecordedActivity::interned_names`].
    #[serde(rename = "name")]
    pub name_index: u32,
    /// Time at which the host entered the call, nanoseconds.
    #[serde(rename = "start")]
    pub start_ns: u64,
    /// Time at which the host call returned, nanoseconds.
    #[serde(rename = "end")]
    pub end_ns: u64,
    /// Operating-system id of the thread that made the call.
    #[serde(rename = "thread")]
    pub os_thread_id: u32,
    /// CUPTI's correlation id, which the host call shares with the records of the operations that
    /// it launched.
    #[serde(rename = "correlation")]
    pub correlation_id: u32,
}

/// A wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SynchronizationRecord {
    /// Time at which the host or stream began to wait, nanoseconds.
    #[serde(rename = "start")]
    pub start_ns: u64,
    /// Time at which the wait of the host or stream ended, nanoseconds.
    #[serde(rename = "end")]
    pub end_ns: u64,
    /// CUDA context of the wait and, if a stream waits or the host waits for a stream, that stream;
    /// the GPU is unknown.
    #[serde(rename = "on")]
    pub device_context_stream: GpuContextStreamIds,
    /// CUPTI's correlation id, which the wait record shares with the record of the host call that
    /// waited.
    #[serde(rename = "correlation")]
    pub correlation_id: u32,
    /// Kind of the wait as CUPTI's number: 1 if the host waits for an event, 2 if a stream waits
    /// for an event, 3 if the host waits for a stream, 4 if the host waits for a context.
    #[serde(rename = "kind")]
    pub synchronization_kind: u32,
}

/// Record of a named range that kernelgate opened and closed on a host thread
/// ([`super::range::NamedRangeGuard`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedRangeRecord {
    /// Name of the range: an index into [`CuptiRecordedActivity::interned_names`].
    #[serde(rename = "name")]
    pub name_index: u32,
    /// Time at which the host opened the range, nanoseconds.
    #[serde(rename = "start")]
    pub start_ns: u64,
    /// Time at which the host closed the range, nanoseconds.
    #[serde(rename = "end")]
    pub end_ns: u64,
    /// Operating-system id of the host thread that opened the range.
    #[serde(rename = "thread")]
    pub os_thread_id: u32,
}

/// Named ranges of the host that were open when a CUDA graph node was created.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphNodeRangesRecord {
    /// CUPTI's id of the node, as in [`KernelRecord::graph_node_id`]; each clone of the node has an
    /// id of its own.
    #[serde(rename = "id")]
    pub graph_node_id: u64,
    /// Named ranges that were open when the node was created, the outermost first: indices into
    /// [`CuptiRecordedActivity::interned_names`].
    #[serde(rename = "ranges")]
    pub range_name_indices: Vec<u32>,
}

/// Record of one allocation of device memory, or of its release.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMemoryChangeRecord {
    /// Time of the change, nanoseconds of the recording's clock.
    #[serde(rename = "time")]
    pub time_ns: u64,
    /// Device, context and stream.
    #[serde(rename = "on")]
    pub device_context_stream: GpuContextStreamIds,
    /// Address of the allocation.
    #[serde(rename = "address")]
    pub allocation_address: u64,
    /// Number of bytes of device memory that were allocated; negative for bytes freed.
    #[serde(rename = "bytes")]
    pub memory_change_bytes: i64,
}

/// Resource limits of a GPU, with which readers of a recording compare launch shapes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedDeviceLimits {
    /// Ordinal of the GPU in this process.
    #[serde(rename = "id")]
    pub device_ordinal: u32,
    /// Name of the GPU model that the device reports.
    #[serde(rename = "name")]
    pub gpu_model_name: String,
    /// Compute capability of the GPU: major and minor number.
    pub compute: [u32; 2],
    /// Multiprocessors.
    #[serde(rename = "multiprocessors")]
    pub multiprocessor_count: u32,
    /// Largest number of threads that a multiprocessor holds at the same time.
    pub threads_per_sm: u32,
    /// Registers of a multiprocessor.
    pub registers_per_sm: u32,
    /// Bytes of shared memory of a multiprocessor of the GPU.
    #[serde(rename = "shared_per_sm")]
    pub shared_bytes_per_sm: u32,
    /// Largest number of blocks that a multiprocessor holds at the same time.
    pub blocks_per_sm: u32,
}

impl RecordedDeviceLimits {
    /// Reads the resource limits of a GPU from the driver.
    pub fn read_device_limits_from_driver(
        device: &Device,
    ) -> Result<RecordedDeviceLimits, BackendError> {
        let ask = |attribute| {
            let value = device.context().attribute(attribute);
            let value = value.map_err(|error| {
                BackendError::ComputationFailed(format!("failed to describe the GPU: {error}"))
            })?;
            Ok::<u32, BackendError>(value.unsigned_abs())
        };
        let facts = device.gpu_properties();
        Ok(Self {
            device_ordinal: u32::try_from(facts.gpu_ordinal).unwrap_or(u32::MAX),
            gpu_model_name: facts.gpu_name.clone(),
            compute: [
                ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ],
            multiprocessor_count: facts.multiprocessor_count,
            threads_per_sm: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
            registers_per_sm: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
            shared_bytes_per_sm: ask(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?,
            blocks_per_sm: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR)?,
        })
    }
}

impl CuptiRecordedActivity {
    /// Returns the ids of graph nodes that launched kernels, copies or memsets; an id may occur
    /// several times.
    pub(super) fn graph_nodes_that_launched_work(&self) -> impl Iterator<Item = u64> + '_ {
        let kernels = self.kernels.iter().map(|kernel| kernel.graph_node_id);
        let copies = self.copies.iter().map(|copy| copy.graph_node_id);
        let sets = self.memsets.iter().map(|set| set.graph_node_id);
        kernels.chain(copies).chain(sets).filter(|&node| node != 0)
    }

    /// Removes records that began before `time`, and allocation records from before `allocations`,
    /// nanoseconds of CUPTI's clock. Records of kernels, copies and memsets without times are kept,
    /// because readers count them.
    pub(super) fn remove_records_before(&mut self, time: u64, allocations: u64) {
        let is_kept = |start, end| start >= time || (start, end) == (0, 0);
        self.kernels.retain(|record| is_kept(record.start_ns, record.end_ns));
        self.copies.retain(|record| is_kept(record.start_ns, record.end_ns));
        self.memsets.retain(|record| is_kept(record.start_ns, record.end_ns));
        self.calls.retain(|record| record.start_ns >= time);
        self.synchronizations.retain(|record| record.start_ns >= time);
        self.ranges.retain(|record| record.start_ns >= time);
        self.device_memory_changes.retain(|record| record.time_ns >= allocations);
        self.overhead.retain(|[start, _]| *start >= time);
    }

    /// Sorts every list of records by start time; an outer range comes before the ranges inside it.
    pub(super) fn sort_records_by_time(&mut self) {
        self.kernels.sort_by_key(|record| record.start_ns);
        self.copies.sort_by_key(|record| record.start_ns);
        self.memsets.sort_by_key(|record| record.start_ns);
        self.calls.sort_by_key(|record| record.start_ns);
        self.synchronizations.sort_by_key(|record| record.start_ns);
        self.ranges.sort_by_key(|record| (record.start_ns, std::cmp::Reverse(record.end_ns)));
        self.device_memory_changes.sort_by_key(|record| record.time_ns);
        self.overhead.sort_unstable();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_before_a_time_are_removed_unless_without_times() {
        let kernel =
            |start, end| KernelRecord { start_ns: start, end_ns: end, ..KernelRecord::default() };
        let range =
            |start| NamedRangeRecord { start_ns: start, end_ns: 99, ..NamedRangeRecord::default() };
        let allocation = |time| DeviceMemoryChangeRecord {
            time_ns: time,
            ..DeviceMemoryChangeRecord::default()
        };
        let mut activity = CuptiRecordedActivity {
            kernels: vec![kernel(50, 60), kernel(0, 0), kernel(9, 30)],
            ranges: vec![range(20), range(5), range(10)],
            overhead: vec![[30, 40], [3, 50]],
            device_memory_changes: [7, 4].map(allocation).to_vec(),
            ..CuptiRecordedActivity::default()
        };
        activity.remove_records_before(10, 5);
        activity.sort_records_by_time();
        assert_eq!(activity.kernels, [kernel(0, 0), kernel(50, 60)]);
        assert_eq!(activity.ranges, [range(10), range(20)]);
        assert_eq!(activity.overhead, [[30, 40]]);
        assert_eq!(activity.device_memory_changes, [allocation(7)]);
    }
}
