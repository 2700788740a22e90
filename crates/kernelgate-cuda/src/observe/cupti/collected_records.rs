//! Collects the records from CUPTI's filled buffers until the activity recorder takes them.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use cudarc::cupti::sys::{
    CUpti_ActivityKind as ActivityKind, CUpti_ActivityMemoryKind as MemoryKind,
    CUpti_ActivityMemoryOperationType as MemoryOperation, CUpti_CallbackDomain as Domain,
};

use super::api::{cupti_functions, text_of_c_string};
use super::record_layout::{
    RawCopyRecord, RawDeviceAllocationRecord, RawHostCallRecord, RawKernelRecord, RawMemsetRecord,
    RawPeerCopyRecord, RawProfilerOverheadRecord, RawSynchronizationRecord,
};
use crate::observe::activity::{
    CuptiRecordedActivity, DeviceMemoryChangeRecord, GpuContextStreamIds, HostCallRecord,
    KernelRecord, MemoryCopyRecord, MemsetRecord, SynchronizationRecord,
};

pub const KERNEL_ACTIVITY: u32 = ActivityKind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL as u32;
pub const COPY_ACTIVITY: u32 = ActivityKind::CUPTI_ACTIVITY_KIND_MEMCPY as u32;
pub const PEER_COPY_ACTIVITY: u32 = ActivityKind::CUPTI_ACTIVITY_KIND_MEMCPY2 as u32;
pub const MEMSET_ACTIVITY: u32 = ActivityKind::CUPTI_ACTIVITY_KIND_MEMSET as u32;
pub const DRIVER_CALL_ACTIVITY: u32 = ActivityKind::CUPTI_ACTIVITY_KIND_DRIVER as u32;
pub const RUNTIME_CALL_ACTIVITY: u32 = ActivityKind::CUPTI_ACTIVITY_KIND_RUNTIME as u32;
pub const SYNCHRONIZATION_ACTIVITY: u32 = ActivityKind::CUPTI_ACTIVITY_KIND_SYNCHRONIZATION as u32;
pub const PROFILER_OVERHEAD_ACTIVITY: u32 = ActivityKind::CUPTI_ACTIVITY_KIND_OVERHEAD as u32;
pub const ALLOCATION_ACTIVITY: u32 = ActivityKind::CUPTI_ACTIVITY_KIND_MEMORY2 as u32;

/// Size in bytes of each buffer that CUPTI fills with records.
const CUPTI_BUFFER_BYTES: usize = 4 << 20;
const CUPTI_BUFFER_ALIGNMENT: usize = 8;

/// Records that CUPTI has delivered and that the activity recorder has not taken yet.
#[derive(Default)]
pub struct CollectedCuptiRecords {
    pub activity: CuptiRecordedActivity,
    name_indices: HashMap<String, u32>,
    /// Name index of each called CUDA function, by CUPTI's callback domain and function number.
    function_name_indices: HashMap<(u32, u32), u32>,
}

/// Locks the records of this process; they are global, because CUPTI's buffer callbacks get no
/// pointer from the user.
pub fn lock_collected_cupti_records() -> MutexGuard<'static, CollectedCuptiRecords> {
    static COLLECTED_RECORDS: LazyLock<Mutex<CollectedCuptiRecords>> =
        LazyLock::new(Mutex::default);
    COLLECTED_RECORDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Converts a CUPTI record of a copy within one GPU or between two GPUs: the two record layouts
/// differ, but their field names agree.
macro_rules! copy_record {
    ($raw:expr) => {
        MemoryCopyRecord {
            start_ns: $raw.start_ns,
            end_ns: $raw.end_ns,
            device_context_stream: GpuContextStreamIds {
                device_ordinal: $raw.device_id,
                context_id: $raw.context_id,
                stream_id: $raw.stream_id,
            },
            correlation_id: $raw.correlation_id,
            copied_bytes: $raw.copied_bytes,
            copy_direction: $raw.copy_direction,
            source_memory_kind: $raw.source_memory_kind,
            target_memory_kind: $raw.target_memory_kind,
            graph_node_id: $raw.graph_node_id,
        }
    };
}

impl CollectedCuptiRecords {
    /// Returns the index of a name in the recording's list of names; adds the name if it is new.
    pub fn index_of_name_added_if_new(&mut self, text: &str) -> u32 {
        if let Some(&known) = self.name_indices.get(text) {
            return known;
        }
        let new = u32::try_from(self.activity.interned_names.len()).unwrap_or(u32::MAX);
        self.activity.interned_names.push(text.to_owned());
        self.name_indices.insert(text.to_owned(), new);
        new
    }

    /// Adds a raw CUPTI record to the list of its kind; ignores records of unknown kinds.
    ///
    /// # Safety
    /// The address points to a whole CUPTI record, which begins with its kind.
    pub unsafe fn add_raw_cupti_record(&mut self, record: *const u32) {
        // SAFETY: a record that begins with this kind has the layout of the matching `Raw` struct,
        // and is whole.
        unsafe {
            match record.read() {
                KERNEL_ACTIVITY => {
                    self.add_raw_kernel_record(&record.cast::<RawKernelRecord>().read_unaligned())
                }
                COPY_ACTIVITY => {
                    self.add_raw_copy_record(&record.cast::<RawCopyRecord>().read_unaligned())
                }
                PEER_COPY_ACTIVITY => self
                    .add_raw_peer_copy_record(&record.cast::<RawPeerCopyRecord>().read_unaligned()),
                MEMSET_ACTIVITY => {
                    self.add_raw_memset_record(&record.cast::<RawMemsetRecord>().read_unaligned())
                }
                DRIVER_CALL_ACTIVITY | RUNTIME_CALL_ACTIVITY => self
                    .add_raw_host_call_record(&record.cast::<RawHostCallRecord>().read_unaligned()),
                SYNCHRONIZATION_ACTIVITY => self.add_raw_synchronization_record(
                    &record.cast::<RawSynchronizationRecord>().read_unaligned(),
                ),
                PROFILER_OVERHEAD_ACTIVITY => {
                    let raw = record.cast::<RawProfilerOverheadRecord>().read_unaligned();
                    self.activity.overhead.push([raw.start_ns, raw.end_ns]);
                }
                ALLOCATION_ACTIVITY => self.add_raw_device_allocation_record(
                    &record.cast::<RawDeviceAllocationRecord>().read_unaligned(),
                ),
                _ => {}
            }
        }
    }

    fn add_raw_kernel_record(&mut self, raw: &RawKernelRecord) {
        // SAFETY: a kernel's name lives as long as its module, and records are taken before modules
        // are unloaded.
        let name = unsafe { text_of_c_string(raw.kernel_name) };
        let name = self.index_of_name_added_if_new(&name);
        let positive = |value: i32| value.max(0).unsigned_abs();
        self.activity.kernels.push(KernelRecord {
            name_index: name,
            start_ns: raw.start_ns,
            end_ns: raw.end_ns,
            device_context_stream: GpuContextStreamIds {
                device_ordinal: raw.device_id,
                context_id: raw.context_id,
                stream_id: raw.stream_id,
            },
            correlation_id: raw.correlation_id,
            grid: { raw.grid }.map(positive),
            block: { raw.block }.map(positive),
            registers_per_thread: u32::from(raw.registers_per_thread),
            static_shared_bytes: positive(raw.static_shared_bytes),
            dynamic_shared_bytes: positive(raw.dynamic_shared_bytes),
            local_bytes_per_thread: raw.local_memory_per_thread_bytes,
            graph_node_id: raw.graph_node_id,
        });
    }

    fn add_raw_copy_record(&mut self, raw: &RawCopyRecord) {
        self.activity.copies.push(copy_record!(raw));
    }

    fn add_raw_peer_copy_record(&mut self, raw: &RawPeerCopyRecord) {
        self.activity.copies.push(copy_record!(raw));
    }

    fn add_raw_memset_record(&mut self, raw: &RawMemsetRecord) {
        self.activity.memsets.push(MemsetRecord {
            start_ns: raw.start_ns,
            end_ns: raw.end_ns,
            device_context_stream: GpuContextStreamIds {
                device_ordinal: raw.device_id,
                context_id: raw.context_id,
                stream_id: raw.stream_id,
            },
            correlation_id: raw.correlation_id,
            bytes: raw.filled_bytes,
            graph_node_id: raw.graph_node_id,
        });
    }

    fn add_raw_host_call_record(&mut self, raw: &RawHostCallRecord) {
        let name = self.name_index_of_called_function(raw.activity_kind, raw.callback_id);
        self.activity.calls.push(HostCallRecord {
            name_index: name,
            start_ns: raw.start_ns,
            end_ns: raw.end_ns,
            os_thread_id: raw.os_thread_id,
            correlation_id: raw.correlation_id,
        });
    }

    fn add_raw_synchronization_record(&mut self, raw: &RawSynchronizationRecord) {
        self.activity.synchronizations.push(SynchronizationRecord {
            start_ns: raw.start_ns,
            end_ns: raw.end_ns,
            // CUPTI's synchronization records contain no GPU; a reader finds the GPU of a context
            // in its kernel records.
            device_context_stream: GpuContextStreamIds {
                device_ordinal: 0,
                context_id: raw.context_id,
                stream_id: raw.stream_id,
            },
            correlation_id: raw.correlation_id,
            synchronization_kind: raw.synchronization_kind,
        });
    }

    fn add_raw_device_allocation_record(&mut self, raw: &RawDeviceAllocationRecord) {
        if raw.memory_kind != MemoryKind::CUPTI_ACTIVITY_MEMORY_KIND_DEVICE as u32 {
            return;
        }
        let released = MemoryOperation::CUPTI_ACTIVITY_MEMORY_OPERATION_TYPE_RELEASE as u32
            == raw.memory_operation_kind;
        let bytes = i64::try_from(raw.allocation_bytes).unwrap_or(i64::MAX);
        self.activity.device_memory_changes.push(DeviceMemoryChangeRecord {
            time_ns: raw.time_ns,
            device_context_stream: GpuContextStreamIds {
                device_ordinal: raw.device_id,
                context_id: raw.context_id,
                stream_id: raw.stream_id,
            },
            allocation_address: raw.allocation_address,
            memory_change_bytes: if released { -bytes } else { bytes },
        });
    }

    /// Returns the name index of a function of the CUDA driver or the CUDA runtime.
    fn name_index_of_called_function(&mut self, kind: u32, function: u32) -> u32 {
        let domain = match kind {
            DRIVER_CALL_ACTIVITY => Domain::CUPTI_CB_DOMAIN_DRIVER_API,
            _ => Domain::CUPTI_CB_DOMAIN_RUNTIME_API,
        } as u32;
        if let Some(&known) = self.function_name_indices.get(&(domain, function)) {
            return known;
        }
        let mut text = std::ptr::null();
        // SAFETY: the address for the name is valid; CUPTI's function names live as long as the
        // library.
        let named = cupti_functions().map(|api| unsafe {
            ((api.get_callback_name)(domain, function, &raw mut text) == 0)
                .then(|| text_of_c_string(text))
        });
        let text = named.flatten().filter(|text| !text.is_empty());
        let name = self
            .index_of_name_added_if_new(&text.unwrap_or_else(|| format!("function {function}")));
        self.function_name_indices.insert((domain, function), name);
        name
    }
}

fn cupti_buffer_layout() -> Layout {
    Layout::from_size_align(CUPTI_BUFFER_BYTES, CUPTI_BUFFER_ALIGNMENT)
        .expect("the size and alignment are constants")
}

pub extern "C" fn allocate_cupti_buffer_callback(
    buffer: *mut *mut u8,
    size: *mut usize,
    most_records: *mut usize,
) {
    // SAFETY: CUPTI calls this function with three valid addresses. A null buffer is the documented
    // response to a lack of memory; CUPTI counts the records that it then loses as dropped.
    // `collect_cupti_buffer_callback` frees the buffer.
    unsafe {
        *buffer = alloc(cupti_buffer_layout());
        *size = if (*buffer).is_null() { 0 } else { CUPTI_BUFFER_BYTES };
        // A limit of 0 records makes CUPTI write as many records as fit into the buffer.
        *most_records = 0;
    }
}

/// Adds the records of a buffer that CUPTI has filled, and frees the buffer.
pub extern "C" fn collect_cupti_buffer_callback(
    context: *mut c_void,
    stream: u32,
    buffer: *mut u8,
    _: usize,
    valid_bytes: usize,
) {
    let (false, Some(api)) = (buffer.is_null(), cupti_functions()) else { return };
    let mut collected = lock_collected_cupti_records();
    let mut record: *mut u32 = std::ptr::null_mut();
    let mut dropped = 0;
    // SAFETY: the allocation callback made the buffer, `valid_bytes` of which hold records; the
    // loop ends where CUPTI reports the end.
    unsafe {
        while (api.get_next_record)(buffer, valid_bytes, &raw mut record) == 0 {
            collected.add_raw_cupti_record(record);
        }
        if (api.get_num_dropped_records)(context, stream, &raw mut dropped) == 0 {
            collected.activity.dropped_records += dropped as u64;
        }
        dealloc(buffer, cupti_buffer_layout());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a record with all bytes 0, which is valid for its fields.
    fn zeroed_cupti_record<T>() -> T {
        // SAFETY: integers and pointers may be all zero bits.
        unsafe { std::mem::zeroed() }
    }

    fn collect_raw_records<T>(records: &[T]) -> CuptiRecordedActivity {
        let mut collected = CollectedCuptiRecords::default();
        for record in records {
            // SAFETY: each item is a whole CUPTI record that begins with its kind.
            unsafe { collected.add_raw_cupti_record(std::ptr::from_ref(record).cast()) };
        }
        collected.activity
    }

    #[test]
    fn kernel_records_keep_name_launch_shape_and_graph_node() {
        let kernel = |name: &'static std::ffi::CStr, start| RawKernelRecord {
            activity_kind: KERNEL_ACTIVITY,
            kernel_name: name.as_ptr(),
            start_ns: start,
            end_ns: start + 5,
            registers_per_thread: 32,
            grid: [7, 2, 1],
            block: [128, 1, 1],
            dynamic_shared_bytes: 4096,
            correlation_id: 9,
            graph_node_id: 0x7_0000_0001,
            ..zeroed_cupti_record()
        };
        let nameless = RawKernelRecord { activity_kind: KERNEL_ACTIVITY, ..zeroed_cupti_record() };
        let activity =
            collect_raw_records(&[kernel(c"a", 10), kernel(c"b", 20), kernel(c"a", 30), nameless]);
        assert_eq!(activity.interned_names, ["a", "b", ""]);
        let names: Vec<u32> = activity.kernels.iter().map(|kernel| kernel.name_index).collect();
        assert_eq!(names, [0, 1, 0, 2]);
        let first = activity.kernels[0];
        assert_eq!(
            (first.grid, first.block, first.registers_per_thread),
            ([7, 2, 1], [128, 1, 1], 32)
        );
        assert_eq!((first.kernel_duration_ns(), first.dynamic_shared_bytes), (5, 4096));
        assert_eq!((first.correlation_id, first.graph_node_id), (9, 0x7_0000_0001));
    }

    #[test]
    fn each_kind_of_raw_cupti_record_is_added_to_its_list() {
        let copy = RawCopyRecord {
            activity_kind: COPY_ACTIVITY,
            copy_direction: 1,
            source_memory_kind: 1,
            target_memory_kind: 3,
            ..zeroed_cupti_record()
        };
        assert_eq!(
            (
                collect_raw_records(&[copy]).copies[0].source_memory_kind,
                collect_raw_records(&[copy]).copies[0].target_memory_kind
            ),
            (1, 3)
        );
        let between = RawPeerCopyRecord {
            activity_kind: PEER_COPY_ACTIVITY,
            copy_direction: 10,
            device_id: 1,
            copied_bytes: 9,
            ..zeroed_cupti_record()
        };
        let between = collect_raw_records(&[between]).copies[0];
        assert_eq!(
            (
                between.copy_direction,
                between.device_context_stream.device_ordinal,
                between.copied_bytes
            ),
            (10, 1, 9)
        );
        assert_eq!(
            collect_raw_records(&[RawMemsetRecord {
                activity_kind: MEMSET_ACTIVITY,
                filled_bytes: 64,
                ..zeroed_cupti_record()
            }])
            .memsets[0]
                .bytes,
            64
        );
        let wait = RawSynchronizationRecord {
            activity_kind: SYNCHRONIZATION_ACTIVITY,
            synchronization_kind: 3,
            stream_id: 7,
            ..zeroed_cupti_record()
        };
        assert_eq!(
            (
                collect_raw_records(&[wait]).synchronizations[0].synchronization_kind,
                collect_raw_records(&[wait]).synchronizations[0].device_context_stream.stream_id
            ),
            (3, 7)
        );
        let overhead = RawProfilerOverheadRecord {
            activity_kind: PROFILER_OVERHEAD_ACTIVITY,
            start_ns: 3,
            end_ns: 9,
            ..zeroed_cupti_record()
        };
        assert_eq!(collect_raw_records(&[overhead]).overhead, [[3, 9]]);
        let memory = |memory, operation| RawDeviceAllocationRecord {
            activity_kind: ALLOCATION_ACTIVITY,
            memory_kind: memory,
            memory_operation_kind: operation,
            allocation_bytes: 100,
            ..zeroed_cupti_record()
        };
        let kept =
            collect_raw_records(&[memory(3, 1), memory(3, 2), memory(1, 1)]).device_memory_changes;
        assert_eq!(
            kept.iter().map(|kept| kept.memory_change_bytes).collect::<Vec<_>>(),
            [100, -100]
        );
        assert_eq!(
            collect_raw_records(&[RawHostCallRecord {
                activity_kind: 9999,
                ..zeroed_cupti_record()
            }]),
            CuptiRecordedActivity::default()
        );
    }
}
