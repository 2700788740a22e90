//! Layouts of the records in CUPTI's buffers, as far as this crate reads them; enumerations are
//! integers, because a later CUPTI may have more values. Later CUPTI versions only append fields to
//! these records, so a prefix of a record stays valid.

use std::ffi::{c_char, c_void};

/// First fields of `CUpti_ActivityKernel9`, up to its graph-node field.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawKernelRecord {
    pub kind: u32,
    pub cache_config: u8,
    pub shared_config: u8,
    pub registers: u16,
    pub cache_requested: u32,
    pub cache_executed: u32,
    pub start_ns: u64,
    pub end_ns: u64,
    pub completed: u64,
    pub device: u32,
    pub context_id: u32,
    pub stream_id: u32,
    pub grid: [i32; 3],
    pub block: [i32; 3],
    pub static_shared: i32,
    pub dynamic_shared: i32,
    pub local: u32,
    pub local_total: u32,
    pub correlation: u32,
    pub grid_id: i64,
    pub name: *const c_char,
    pub reserved: *mut c_void,
    pub queued_ns: u64,
    pub submitted: u64,
    pub launch: [u8; 4],
    pub shared_executed: u32,
    pub graph_node_id: u64,
}

/// First fields of `CUpti_ActivityMemcpy5`, up to its graph-node field.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawCopyRecord {
    pub kind: u32,
    pub direction: u8,
    pub source: u8,
    pub target: u8,
    pub flags: u8,
    pub bytes: u64,
    pub start_ns: u64,
    pub end_ns: u64,
    pub device: u32,
    pub context_id: u32,
    pub stream_id: u32,
    pub correlation: u32,
    pub runtime_correlation: u32,
    pub pad: u32,
    pub reserved: *mut c_void,
    pub graph_node_id: u64,
}

/// First fields of `CUpti_ActivityMemcpyPtoP4`, up to its graph-node field.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawPeerCopyRecord {
    pub kind: u32,
    pub direction: u8,
    pub source: u8,
    pub target: u8,
    pub flags: u8,
    pub bytes: u64,
    pub start_ns: u64,
    pub end_ns: u64,
    pub device: u32,
    pub context_id: u32,
    pub stream_id: u32,
    /// Source device, source context, destination device and destination context of the copy.
    pub ends: [u32; 4],
    pub correlation: u32,
    pub reserved: *mut c_void,
    pub graph_node_id: u64,
}

/// First fields of `CUpti_ActivityMemset4`, up to its graph-node field.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawMemsetRecord {
    pub kind: u32,
    pub value: u32,
    pub bytes: u64,
    pub start_ns: u64,
    pub end_ns: u64,
    pub device: u32,
    pub context_id: u32,
    pub stream_id: u32,
    pub correlation: u32,
    pub memset_flags: u16,
    pub memory_kind: u16,
    pub pad: u32,
    pub reserved: *mut c_void,
    pub graph_node_id: u64,
}

/// `CUpti_ActivityAPI`.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawHostCallRecord {
    pub kind: u32,
    pub function: u32,
    pub start_ns: u64,
    pub end_ns: u64,
    pub process: u32,
    pub os_thread_id: u32,
    pub correlation: u32,
    pub result: u32,
}

/// `CUpti_ActivitySynchronization`.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawSynchronizationRecord {
    pub kind: u32,
    pub waits_for: u32,
    pub start_ns: u64,
    pub end_ns: u64,
    pub correlation: u32,
    pub context_id: u32,
    pub stream_id: u32,
    pub event: u32,
}

/// `CUpti_ActivityOverhead`.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawProfilerOverheadRecord {
    pub kind: u32,
    pub work: u32,
    pub object_kind: u32,
    pub object: [u32; 3],
    pub start_ns: u64,
    pub end_ns: u64,
}

/// First fields of `CUpti_ActivityMemory3`, up to its stream field.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawDeviceAllocationRecord {
    pub kind: u32,
    pub operation: u32,
    pub memory: u32,
    pub correlation: u32,
    pub address: u64,
    pub bytes: u64,
    pub time: u64,
    pub counter: u64,
    pub process: u32,
    pub device: u32,
    pub context_id: u32,
    pub stream_id: u32,
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use cudarc::cupti::sys;

    use super::*;

    macro_rules! same {
        ($ours:ty, $theirs:ty, $($field:tt = $their_field:ident),+ $(,)?) => {
            $(assert_eq!(
                offset_of!($ours, $field),
                offset_of!($theirs, $their_field),
                "{}.{}", stringify!($ours), stringify!($field)
            );)+
        };
    }

    /// This test function is long because it is a table of record fields.
    #[test]
    #[expect(clippy::too_many_lines)]
    fn raw_cupti_records_have_the_field_offsets_of_cuptis_header() {
        same!(
            RawKernelRecord,
            sys::CUpti_ActivityKernel9,
            kind = kind,
            registers = registersPerThread,
            start_ns = start,
            end_ns = end,
            device = deviceId,
            context_id = contextId,
            stream_id = streamId,
            grid = gridX,
            block = blockX,
            static_shared = staticSharedMemory,
            dynamic_shared = dynamicSharedMemory,
            local = localMemoryPerThread,
            correlation = correlationId,
            name = name,
            graph_node_id = graphNodeId
        );
        same!(
            RawCopyRecord,
            sys::CUpti_ActivityMemcpy5,
            kind = kind,
            direction = copyKind,
            source = srcKind,
            target = dstKind,
            bytes = bytes,
            start_ns = start,
            end_ns = end,
            device = deviceId,
            context_id = contextId,
            stream_id = streamId,
            correlation = correlationId,
            graph_node_id = graphNodeId
        );
        same!(
            RawPeerCopyRecord,
            sys::CUpti_ActivityMemcpyPtoP4,
            kind = kind,
            direction = copyKind,
            source = srcKind,
            target = dstKind,
            bytes = bytes,
            start_ns = start,
            end_ns = end,
            device = deviceId,
            context_id = contextId,
            stream_id = streamId,
            ends = srcDeviceId,
            correlation = correlationId,
            graph_node_id = graphNodeId
        );
        same!(
            RawMemsetRecord,
            sys::CUpti_ActivityMemset4,
            kind = kind,
            bytes = bytes,
            start_ns = start,
            end_ns = end,
            device = deviceId,
            context_id = contextId,
            stream_id = streamId,
            correlation = correlationId,
            graph_node_id = graphNodeId
        );
        same!(
            RawHostCallRecord,
            sys::CUpti_ActivityAPI,
            kind = kind,
            function = cbid,
            start_ns = start,
            end_ns = end,
            os_thread_id = threadId,
            correlation = correlationId
        );
        same!(
            RawSynchronizationRecord,
            sys::CUpti_ActivitySynchronization,
            kind = kind,
            waits_for = type_,
            start_ns = start,
            end_ns = end,
            correlation = correlationId,
            context_id = contextId,
            stream_id = streamId
        );
        same!(
            RawProfilerOverheadRecord,
            sys::CUpti_ActivityOverhead,
            kind = kind,
            start_ns = start,
            end_ns = end
        );
        same!(
            RawDeviceAllocationRecord,
            sys::CUpti_ActivityMemory3,
            kind = kind,
            operation = memoryOperationType,
            memory = memoryKind,
            address = address,
            bytes = bytes,
            time = timestamp,
            device = deviceId,
            context_id = contextId,
            stream_id = streamId
        );
    }
}
