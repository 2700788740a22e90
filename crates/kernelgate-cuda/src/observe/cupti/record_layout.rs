//! Layouts of the records in CUPTI's buffers, as far as this crate reads them; enumerations are
//! integers, because a later CUPTI may have more values. Later CUPTI versions only append fields to
//! these records, so a prefix of a record stays valid.

use std::ffi::{c_char, c_void};

/// First fields of `CUpti_ActivityKernel9`, up to its graph-node field.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawKernelRecord {
    pub activity_kind: u32,
    pub cache_config: u8,
    pub shared_memory_config: u8,
    pub registers_per_thread: u16,
    pub cache_config_requested: u32,
    pub cache_config_executed: u32,
    pub start_ns: u64,
    pub end_ns: u64,
    pub completed_ns: u64,
    pub device_id: u32,
    pub context_id: u32,
    pub stream_id: u32,
    pub grid: [i32; 3],
    pub block: [i32; 3],
    pub static_shared_bytes: i32,
    pub dynamic_shared_bytes: i32,
    pub local_memory_per_thread_bytes: u32,
    pub local_memory_total_bytes: u32,
    pub correlation_id: u32,
    pub grid_id: i64,
    pub kernel_name: *const c_char,
    pub reserved: *mut c_void,
    pub queued_ns: u64,
    pub submitted_ns: u64,
    pub launch: [u8; 4],
    pub shared_memory_set_by_driver_bytes: u32,
    pub graph_node_id: u64,
}

/// First fields of `CUpti_ActivityMemcpy5`, up to its graph-node field.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawCopyRecord {
    pub activity_kind: u32,
    pub copy_direction: u8,
    pub source_memory_kind: u8,
    pub target_memory_kind: u8,
    pub copy_flags: u8,
    pub copied_bytes: u64,
    pub start_ns: u64,
    pub end_ns: u64,
    pub device_id: u32,
    pub context_id: u32,
    pub stream_id: u32,
    pub correlation_id: u32,
    pub runtime_correlation_id: u32,
    pub pad: u32,
    pub reserved: *mut c_void,
    pub graph_node_id: u64,
}

/// First fields of `CUpti_ActivityMemcpyPtoP4`, up to its graph-node field.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawPeerCopyRecord {
    pub activity_kind: u32,
    pub copy_direction: u8,
    pub source_memory_kind: u8,
    pub target_memory_kind: u8,
    pub copy_flags: u8,
    pub copied_bytes: u64,
    pub start_ns: u64,
    pub end_ns: u64,
    pub device_id: u32,
    pub context_id: u32,
    pub stream_id: u32,
    /// Source device, source context, destination device and destination context of the copy.
    pub ends: [u32; 4],
    pub correlation_id: u32,
    pub reserved: *mut c_void,
    pub graph_node_id: u64,
}

/// First fields of `CUpti_ActivityMemset4`, up to its graph-node field.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawMemsetRecord {
    pub activity_kind: u32,
    pub fill_value: u32,
    pub filled_bytes: u64,
    pub start_ns: u64,
    pub end_ns: u64,
    pub device_id: u32,
    pub context_id: u32,
    pub stream_id: u32,
    pub correlation_id: u32,
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
    pub activity_kind: u32,
    pub callback_id: u32,
    pub start_ns: u64,
    pub end_ns: u64,
    pub process_id: u32,
    pub os_thread_id: u32,
    pub correlation_id: u32,
    pub return_code: u32,
}

/// `CUpti_ActivitySynchronization`.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawSynchronizationRecord {
    pub activity_kind: u32,
    pub synchronization_kind: u32,
    pub start_ns: u64,
    pub end_ns: u64,
    pub correlation_id: u32,
    pub context_id: u32,
    pub stream_id: u32,
    pub event_id: u32,
}

/// `CUpti_ActivityOverhead`.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawProfilerOverheadRecord {
    pub activity_kind: u32,
    pub overhead_kind: u32,
    pub overhead_object_kind: u32,
    pub object: [u32; 3],
    pub start_ns: u64,
    pub end_ns: u64,
}

/// First fields of `CUpti_ActivityMemory3`, up to its stream field.
#[repr(C, packed(8))]
#[derive(Clone, Copy)]
pub struct RawDeviceAllocationRecord {
    pub activity_kind: u32,
    pub memory_operation_kind: u32,
    pub memory_kind: u32,
    pub correlation_id: u32,
    pub allocation_address: u64,
    pub allocation_bytes: u64,
    pub time_ns: u64,
    pub program_counter: u64,
    pub process_id: u32,
    pub device_id: u32,
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
            activity_kind = kind,
            registers_per_thread = registersPerThread,
            start_ns = start,
            end_ns = end,
            device_id = deviceId,
            context_id = contextId,
            stream_id = streamId,
            grid = gridX,
            block = blockX,
            static_shared_bytes = staticSharedMemory,
            dynamic_shared_bytes = dynamicSharedMemory,
            local_memory_per_thread_bytes = localMemoryPerThread,
            correlation_id = correlationId,
            kernel_name = name,
            graph_node_id = graphNodeId
        );
        same!(
            RawCopyRecord,
            sys::CUpti_ActivityMemcpy5,
            activity_kind = kind,
            copy_direction = copyKind,
            source_memory_kind = srcKind,
            target_memory_kind = dstKind,
            copied_bytes = bytes,
            start_ns = start,
            end_ns = end,
            device_id = deviceId,
            context_id = contextId,
            stream_id = streamId,
            correlation_id = correlationId,
            graph_node_id = graphNodeId
        );
        same!(
            RawPeerCopyRecord,
            sys::CUpti_ActivityMemcpyPtoP4,
            activity_kind = kind,
            copy_direction = copyKind,
            source_memory_kind = srcKind,
            target_memory_kind = dstKind,
            copied_bytes = bytes,
            start_ns = start,
            end_ns = end,
            device_id = deviceId,
            context_id = contextId,
            stream_id = streamId,
            ends = srcDeviceId,
            correlation_id = correlationId,
            graph_node_id = graphNodeId
        );
        same!(
            RawMemsetRecord,
            sys::CUpti_ActivityMemset4,
            activity_kind = kind,
            filled_bytes = bytes,
            start_ns = start,
            end_ns = end,
            device_id = deviceId,
            context_id = contextId,
            stream_id = streamId,
            correlation_id = correlationId,
            graph_node_id = graphNodeId
        );
        same!(
            RawHostCallRecord,
            sys::CUpti_ActivityAPI,
            activity_kind = kind,
            callback_id = cbid,
            start_ns = start,
            end_ns = end,
            os_thread_id = threadId,
            correlation_id = correlationId
        );
        same!(
            RawSynchronizationRecord,
            sys::CUpti_ActivitySynchronization,
            activity_kind = kind,
            synchronization_kind = type_,
            start_ns = start,
            end_ns = end,
            correlation_id = correlationId,
            context_id = contextId,
            stream_id = streamId
        );
        same!(
            RawProfilerOverheadRecord,
            sys::CUpti_ActivityOverhead,
            activity_kind = kind,
            start_ns = start,
            end_ns = end
        );
        same!(
            RawDeviceAllocationRecord,
            sys::CUpti_ActivityMemory3,
            activity_kind = kind,
            memory_operation_kind = memoryOperationType,
            memory_kind = memoryKind,
            allocation_address = address,
            allocation_bytes = bytes,
            time_ns = timestamp,
            device_id = deviceId,
            context_id = contextId,
            stream_id = streamId
        );
    }
}
