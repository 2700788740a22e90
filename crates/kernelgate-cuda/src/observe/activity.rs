//! Records of CUPTI as plain data: one list for each kind of record, names by their index.
//!
//! The response to the program and the file of a recording hold this type, so its fields are a
//! format: fields are added, never changed. Times are nanoseconds of CUPTI's clock, which is common
//! to the host and every device. Deliberately absent: the meaning of the records, and which belong
//! together.

use serde::{Deserialize, Serialize};

use crate::{BackendError, Device};
use cudarc::driver::sys::CUdevice_attribute as Attribute;

/// Everything that CUPTI recorded during a stretch of time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedActivity {
    /// The process.
    pub pid: u32,
    /// Texts of the record; every `name` is an index into this list.
    pub names: Vec<String>,
    /// Records of kernels, in order of their start.
    pub kernels: Vec<KernelRecord>,
    /// Copies between memories.
    pub copies: Vec<CopyRecord>,
    /// Records of memory sets.
    pub sets: Vec<MemsetRecord>,
    /// Calls of the driver and of the runtime.
    pub calls: Vec<CallRecord>,
    /// Waits of the host for the GPU, and of streams for events.
    pub waits: Vec<WaitRecord>,
    /// Named ranges that ended.
    pub ranges: Vec<RangeRecord>,
    /// Graph nodes that launched operations, if CUPTI recorded the creation of the node.
    pub graph_nodes: Vec<GraphNodeRecord>,
    /// Records of device memory that was allocated or freed.
    pub allocations: Vec<AllocationRecord>,
    /// Spans in which CUPTI itself was working: first nanosecond, and the nanosecond after the last
    /// one.
    pub overhead: Vec<[u64; 2]>,
    /// Records that CUPTI lost.
    pub dropped: u64,
}

/// Place of an operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamId {
    /// Ordinal of the GPU in this process.
    pub device: u32,
    /// The CUDA context.
    pub context: u32,
    /// The stream.
    pub stream: u32,
}

/// Record of one run of a kernel, with the hardware's times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelRecord {
    /// Symbol of the kernel: an index into [`RecordedActivity::names`].
    pub name: u32,
    /// Time at which the kernel began, nanoseconds; 0 with `end`: CUPTI does not know.
    pub start: u64,
    /// Time at which the kernel had finished, nanoseconds.
    pub end: u64,
    /// Device, context and stream.
    pub on: StreamId,
    /// Number that joins the kernel record with the call that launched the kernel.
    pub correlation: u32,
    /// Grid size of the kernel in blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of shared memory that the kernel declares.
    pub static_shared: u32,
    /// Bytes of shared memory that the launch adds.
    pub dynamic_shared: u32,
    /// Bytes of local memory of a thread.
    pub local: u32,
    /// Number of the graph node that launched the operation; 0 without a graph.
    pub graph_node: u64,
}

impl KernelRecord {
    /// Duration of the kernel, nanoseconds.
    pub const fn elapsed_ns(&self) -> u64 {
        self.end.saturating_sub(self.start)
    }
}

/// A copy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyRecord {
    /// Time at which the copy began, nanoseconds.
    pub start: u64,
    /// Time at which the copy had finished, nanoseconds.
    pub end: u64,
    /// Device, context and stream.
    pub on: StreamId,
    /// Number that joins the copy record with its host call.
    pub correlation: u32,
    /// Bytes.
    pub bytes: u64,
    /// Direction of the copy, as CUPTI numbers them: 1 to the device, 2 to the host, 8 on the
    /// device, 10 from device to device.
    pub kind: u8,
    /// Kind of the memory that the copy reads, by CUPTI's numbers: 1 pageable, 2 pinned, 3 device,
    /// 4 array, 5 managed.
    pub source: u8,
    /// Kind of the memory that the copy writes.
    pub target: u8,
    /// The graph node that launched the operation; 0 if no graph did.
    pub graph_node: u64,
}

/// Record of a memset on the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemsetRecord {
    /// Time at which the set began, nanoseconds.
    pub start: u64,
    /// Time at which the memory set had finished, nanoseconds.
    pub end: u64,
    /// Device, context and stream.
    pub on: StreamId,
    /// Number that joins the memory-set record with its host call.
    pub correlation: u32,
    /// Bytes.
    pub bytes: u64,
    /// The node of the graph that launched it; 0: none.
    pub graph_node: u64,
}

/// Record of a host call of a driver or runtime function.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallRecord {
    /// Name of the called function: an index into [`RecordedActivity::names`].
    pub name: u32,
    /// Time at which the host entered the call, nanoseconds.
    pub start: u64,
    /// Time at which the call returned, nanoseconds.
    pub end: u64,
    /// Operating-system id of the thread that made the call.
    pub thread: u32,
    /// Id that joins the call with the operations that it launched.
    pub correlation: u32,
}

/// A wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitRecord {
    /// Time at which the wait began, nanoseconds.
    pub start: u64,
    /// Time at which the wait ended, nanoseconds.
    pub end: u64,
    /// The context and, if the wait is for a stream, the stream.
    pub on: StreamId,
    /// Number that joins the wait with its host call.
    pub correlation: u32,
    /// CUPTI's number: 1 for an event, 2 of a stream for an event, 3 for a stream, 4 for a context.
    pub kind: u32,
}

/// Record of a named range of the host ([`super::range::RangeGuard`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RangeRecord {
    /// Name of the range: an index into [`RecordedActivity::names`].
    pub name: u32,
    /// Time at which the range was opened, nanoseconds.
    pub start: u64,
    /// Time at which the range was closed, nanoseconds.
    pub end: u64,
    /// The operating system's id of the calling thread.
    pub thread: u32,
}

/// Record of the origin of a CUDA-graph node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphNodeRecord {
    /// Id of the node, as in [`KernelRecord::graph_node`]; clones of the node have other ids.
    pub id: u64,
    /// The ranges that were open, the outermost first: indices into [`RecordedActivity::names`].
    pub ranges: Vec<u32>,
}

/// Record of device memory that was allocated or freed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AllocationRecord {
    /// When.
    pub time: u64,
    /// Device, context and stream.
    pub on: StreamId,
    /// Address of the allocation.
    pub address: u64,
    /// Bytes; negative: given back.
    pub bytes: i64,
}

/// Limits of the device that launch shapes are compared with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedDevice {
    /// Number of the device, as the process counts devices.
    pub id: u32,
    /// Name of the GPU model that the device reports.
    pub name: String,
    /// Compute capability of the GPU: major and minor number.
    pub compute: [u32; 2],
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Largest number of threads that a multiprocessor holds.
    pub threads_per_sm: u32,
    /// Registers of a multiprocessor.
    pub registers_per_sm: u32,
    /// Bytes of shared memory of a multiprocessor.
    pub shared_per_sm: u32,
    /// Largest number of blocks that a multiprocessor holds.
    pub blocks_per_sm: u32,
}

impl RecordedDevice {
    /// Reads the resource limits of a GPU.
    pub fn read_device_limits(device: &Device) -> Result<RecordedDevice, BackendError> {
        let ask = |attribute| {
            let value = device.context().attribute(attribute);
            let value = value.map_err(|error| {
                BackendError::Launch(format!("failed to describe the GPU: {error}"))
            })?;
            Ok::<u32, BackendError>(value.unsigned_abs())
        };
        let facts = device.facts();
        Ok(Self {
            id: u32::try_from(facts.ordinal).unwrap_or(u32::MAX),
            name: facts.name.clone(),
            compute: [
                ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ],
            multiprocessors: facts.multiprocessors,
            threads_per_sm: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
            registers_per_sm: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
            shared_per_sm: ask(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?,
            blocks_per_sm: ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR)?,
        })
    }
}

impl RecordedActivity {
    /// Nodes of the graphs that launched something, with repetitions.
    pub(super) fn used_graph_nodes(&self) -> impl Iterator<Item = u64> + '_ {
        let kernels = self.kernels.iter().map(|kernel| kernel.graph_node);
        let copies = self.copies.iter().map(|copy| copy.graph_node);
        let sets = self.sets.iter().map(|set| set.graph_node);
        kernels.chain(copies).chain(sets).filter(|&node| node != 0)
    }

    /// Removes records that began before a time, and allocations before another. Records of
    /// operations without times are kept, because readers count such records.
    pub(super) fn forget_records_before(&mut self, time: u64, allocations: u64) {
        let is_kept = |start, end| start >= time || (start, end) == (0, 0);
        self.kernels.retain(|record| is_kept(record.start, record.end));
        self.copies.retain(|record| is_kept(record.start, record.end));
        self.sets.retain(|record| is_kept(record.start, record.end));
        self.calls.retain(|record| record.start >= time);
        self.waits.retain(|record| record.start >= time);
        self.ranges.retain(|record| record.start >= time);
        self.allocations.retain(|record| record.time >= allocations);
        self.overhead.retain(|[start, _]| *start >= time);
    }

    /// Sorts every list of records by time; outer ranges come before inner ranges.
    pub(super) fn sort_by_time(&mut self) {
        self.kernels.sort_by_key(|record| record.start);
        self.copies.sort_by_key(|record| record.start);
        self.sets.sort_by_key(|record| record.start);
        self.calls.sort_by_key(|record| record.start);
        self.waits.sort_by_key(|record| record.start);
        self.ranges.sort_by_key(|record| (record.start, std::cmp::Reverse(record.end)));
        self.allocations.sort_by_key(|record| record.time);
        self.overhead.sort_unstable();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draining_cupti_removes_earlier_records_except_kernels_without_times() {
        let kernel = |start, end| KernelRecord { start, end, ..KernelRecord::default() };
        let range = |start| RangeRecord { start, end: 99, ..RangeRecord::default() };
        let allocation = |time| AllocationRecord { time, ..AllocationRecord::default() };
        let mut activity = RecordedActivity {
            kernels: vec![kernel(50, 60), kernel(0, 0), kernel(9, 30)],
            ranges: vec![range(20), range(5), range(10)],
            overhead: vec![[30, 40], [3, 50]],
            allocations: [7, 4].map(allocation).to_vec(),
            ..RecordedActivity::default()
        };
        activity.forget_records_before(10, 5);
        activity.sort_by_time();
        assert_eq!(activity.kernels, [kernel(0, 0), kernel(50, 60)]);
        assert_eq!(activity.ranges, [range(10), range(20)]);
        assert_eq!(activity.overhead, [[30, 40]]);
        assert_eq!(activity.allocations, [allocation(7)]);
    }
}
