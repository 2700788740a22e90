//! Collects records from CUPTI's buffers, until the recorder takes them.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use cudarc::cupti::sys::{
    CUpti_ActivityKind as ActivityKind, CUpti_ActivityMemoryKind as MemoryKind,
    CUpti_ActivityMemoryOperationType as MemoryOperation, CUpti_CallbackDomain as Domain,
};

use super::api::{cupti_api, text_of};
use super::record_layout::{
    RawAllocationRecord, RawCallRecord, RawCopyRecord, RawKernelRecord, RawMemsetRecord,
    RawOverheadRecord, RawPeerCopyRecord, RawWaitRecord,
};
use crate::observe::activity::{
    AllocationRecord, CallRecord, CopyRecord, KernelRecord, MemsetRecord, RecordedActivity,
    StreamId, WaitRecord,
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

/// Size of the buffers that CUPTI fills and returns.
const CUPTI_BUFFER_BYTES: usize = 4 << 20;
const CUPTI_BUFFER_ALIGNMENT: usize = 8;

/// Records that CUPTI delivered and no caller took yet.
#[derive(Default)]
pub struct CollectedCuptiRecords {
    pub activity: RecordedActivity,
    names: HashMap<String, u32>,
    /// The names of functions, by domain and number.
    functions: HashMap<(u32, u32), u32>,
}

/// The records of the process; CUPTI's callbacks have one target a process.
pub fn lock_collected() -> MutexGuard<'static, CollectedCuptiRecords> {
    static COLLECTED_RECORDS: LazyLock<Mutex<CollectedCuptiRecords>> =
        LazyLock::new(Mutex::default);
    COLLECTED_RECORDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Converts a CUPTI record of a copy on one GPU or between two: the two record layouts differ, but
/// their field names agree.
macro_rules! copy_record {
    ($raw:expr) => {
        CopyRecord {
            start: $raw.start,
            end: $raw.end,
            on: StreamId { device: $raw.device, context: $raw.context, stream: $raw.stream },
            correlation: $raw.correlation,
            bytes: $raw.bytes,
            kind: $raw.direction,
            source: $raw.source,
            target: $raw.target,
            graph_node: $raw.graph_node,
        }
    };
}

impl CollectedCuptiRecords {
    /// Number of a name in the table of names, which is added if new.
    pub fn name(&mut self, text: &str) -> u32 {
        if let Some(&known) = self.names.get(text) {
            return known;
        }
        let new = u32::try_from(self.activity.names.len()).unwrap_or(u32::MAX);
        self.activity.names.push(text.to_owned());
        self.names.insert(text.to_owned(), new);
        new
    }

    /// Adds a record and ignores records of unknown kinds.
    ///
    /// # Safety
    /// The address points to a whole CUPTI record, which begins with its kind.
    pub unsafe fn add(&mut self, record: *const u32) {
        // SAFETY: a record of that kind has that layout (`layout`), and is whole.
        unsafe {
            match record.read() {
                KERNEL_ACTIVITY => {
                    self.add_kernel(&record.cast::<RawKernelRecord>().read_unaligned())
                }
                COPY_ACTIVITY => self.add_copy(&record.cast::<RawCopyRecord>().read_unaligned()),
                PEER_COPY_ACTIVITY => {
                    self.add_peer_copy(&record.cast::<RawPeerCopyRecord>().read_unaligned())
                }
                MEMSET_ACTIVITY => {
                    self.add_memset(&record.cast::<RawMemsetRecord>().read_unaligned())
                }
                DRIVER_CALL_ACTIVITY | RUNTIME_CALL_ACTIVITY => {
                    self.call(&record.cast::<RawCallRecord>().read_unaligned())
                }
                SYNCHRONIZATION_ACTIVITY => {
                    self.add_wait(&record.cast::<RawWaitRecord>().read_unaligned())
                }
                PROFILER_OVERHEAD_ACTIVITY => {
                    let raw = record.cast::<RawOverheadRecord>().read_unaligned();
                    self.activity.overhead.push([raw.start, raw.end]);
                }
                ALLOCATION_ACTIVITY => {
                    self.add_allocation(&record.cast::<RawAllocationRecord>().read_unaligned())
                }
                _ => {}
            }
        }
    }

    fn add_kernel(&mut self, raw: &RawKernelRecord) {
        // SAFETY: a kernel's name lives as long as its module; records are taken before modules go.
        let name = unsafe { text_of(raw.name) };
        let name = self.name(&name);
        let positive = |value: i32| value.max(0).unsigned_abs();
        self.activity.kernels.push(KernelRecord {
            name,
            start: raw.start,
            end: raw.end,
            on: StreamId { device: raw.device, context: raw.context, stream: raw.stream },
            correlation: raw.correlation,
            grid: { raw.grid }.map(positive),
            block: { raw.block }.map(positive),
            registers: u32::from(raw.registers),
            static_shared: positive(raw.static_shared),
            dynamic_shared: positive(raw.dynamic_shared),
            local: raw.local,
            graph_node: raw.graph_node,
        });
    }

    fn add_copy(&mut self, raw: &RawCopyRecord) {
        self.activity.copies.push(copy_record!(raw));
    }

    fn add_peer_copy(&mut self, raw: &RawPeerCopyRecord) {
        self.activity.copies.push(copy_record!(raw));
    }

    fn add_memset(&mut self, raw: &RawMemsetRecord) {
        self.activity.sets.push(MemsetRecord {
            start: raw.start,
            end: raw.end,
            on: StreamId { device: raw.device, context: raw.context, stream: raw.stream },
            correlation: raw.correlation,
            bytes: raw.bytes,
            graph_node: raw.graph_node,
        });
    }

    fn call(&mut self, raw: &RawCallRecord) {
        let name = self.call_name(raw.kind, raw.function);
        self.activity.calls.push(CallRecord {
            name,
            start: raw.start,
            end: raw.end,
            thread: raw.thread,
            correlation: raw.correlation,
        });
    }

    fn add_wait(&mut self, raw: &RawWaitRecord) {
        self.activity.waits.push(WaitRecord {
            start: raw.start,
            end: raw.end,
            // CUPTI's wait records name no GPU; the GPU of the context is known from its kernels.
            on: StreamId { device: 0, context: raw.context, stream: raw.stream },
            correlation: raw.correlation,
            kind: raw.waits_for,
        });
    }

    fn add_allocation(&mut self, raw: &RawAllocationRecord) {
        if raw.memory != MemoryKind::CUPTI_ACTIVITY_MEMORY_KIND_DEVICE as u32 {
            return;
        }
        let released =
            MemoryOperation::CUPTI_ACTIVITY_MEMORY_OPERATION_TYPE_RELEASE as u32 == raw.operation;
        let bytes = i64::try_from(raw.bytes).unwrap_or(i64::MAX);
        self.activity.allocations.push(AllocationRecord {
            time: raw.time,
            on: StreamId { device: raw.device, context: raw.context, stream: raw.stream },
            address: raw.address,
            bytes: if released { -bytes } else { bytes },
        });
    }

    /// The name of a function of the driver or of the runtime.
    fn call_name(&mut self, kind: u32, function: u32) -> u32 {
        let domain = match kind {
            DRIVER_CALL_ACTIVITY => Domain::CUPTI_CB_DOMAIN_DRIVER_API,
            _ => Domain::CUPTI_CB_DOMAIN_RUNTIME_API,
        } as u32;
        if let Some(&known) = self.functions.get(&(domain, function)) {
            return known;
        }
        let mut text = std::ptr::null();
        // SAFETY: the address is valid; CUPTI's names live as long as the library.
        let named = cupti_api().map(|api| unsafe {
            ((api.call_name)(domain, function, &raw mut text) == 0).then(|| text_of(text))
        });
        let text = named.flatten().filter(|text| !text.is_empty());
        let name = self.name(&text.unwrap_or_else(|| format!("function {function}")));
        self.functions.insert((domain, function), name);
        name
    }
}

fn record_layout() -> Layout {
    Layout::from_size_align(CUPTI_BUFFER_BYTES, CUPTI_BUFFER_ALIGNMENT)
        .expect("the size and alignment are constants")
}

pub extern "C" fn give_cupti_buffer(
    buffer: *mut *mut u8,
    size: *mut usize,
    most_records: *mut usize,
) {
    // SAFETY: CUPTI calls this function with three valid addresses. A null buffer is its documented
    // response to a lack of memory; lost records are counted as dropped. The CUPTI buffer is freed
    // in `take_cupti_buffer`.
    unsafe {
        *buffer = alloc(record_layout());
        *size = if (*buffer).is_null() { 0 } else { CUPTI_BUFFER_BYTES };
        // Zero makes CUPTI write as many records as fit into the buffer.
        *most_records = 0;
    }
}

/// Takes a filled buffer from CUPTI and adds its records.
pub extern "C" fn take_cupti_buffer(
    context: *mut c_void,
    stream: u32,
    buffer: *mut u8,
    _: usize,
    valid_bytes: usize,
) {
    let (false, Some(api)) = (buffer.is_null(), cupti_api()) else { return };
    let mut collected = lock_collected();
    let mut record: *mut u32 = std::ptr::null_mut();
    let mut dropped = 0;
    // SAFETY: the buffer is one of ours with `valid_bytes` of records, which this walks until CUPTI
    // reports the end; the context is CUPTI's own.
    unsafe {
        while (api.next)(buffer, valid_bytes, &raw mut record) == 0 {
            collected.add(record);
        }
        if (api.dropped)(context, stream, &raw mut dropped) == 0 {
            collected.activity.dropped += dropped as u64;
        }
        dealloc(buffer, record_layout());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A structure with all bytes 0, which is valid for each of its fields.
    fn zeroed_record<T>() -> T {
        // SAFETY: integers and pointers may be all zero bits.
        unsafe { std::mem::zeroed() }
    }

    fn add_records<T>(records: &[T]) -> RecordedActivity {
        let mut collected = CollectedCuptiRecords::default();
        for record in records {
            // SAFETY: the buffer holds whole records that begin with their kind.
            unsafe { collected.add(std::ptr::from_ref(record).cast()) };
        }
        collected.activity
    }

    #[test]
    fn kernel_records_keep_name_shape_and_graph_node() {
        let kernel = |name: &'static std::ffi::CStr, start| RawKernelRecord {
            kind: KERNEL_ACTIVITY,
            name: name.as_ptr(),
            start,
            end: start + 5,
            registers: 32,
            grid: [7, 2, 1],
            block: [128, 1, 1],
            dynamic_shared: 4096,
            correlation: 9,
            graph_node: 0x7_0000_0001,
            ..zeroed_record()
        };
        let nameless = RawKernelRecord { kind: KERNEL_ACTIVITY, ..zeroed_record() };
        let activity =
            add_records(&[kernel(c"a", 10), kernel(c"b", 20), kernel(c"a", 30), nameless]);
        assert_eq!(activity.names, ["a", "b", ""]);
        let names: Vec<u32> = activity.kernels.iter().map(|kernel| kernel.name).collect();
        assert_eq!(names, [0, 1, 0, 2]);
        let first = activity.kernels[0];
        assert_eq!((first.grid, first.block, first.registers), ([7, 2, 1], [128, 1, 1], 32));
        assert_eq!((first.elapsed_ns(), first.dynamic_shared), (5, 4096));
        assert_eq!((first.correlation, first.graph_node), (9, 0x7_0000_0001));
    }

    #[test]
    fn every_kind_of_cupti_record_has_its_list_and_unknown_kinds_have_none() {
        let copy = RawCopyRecord {
            kind: COPY_ACTIVITY,
            direction: 1,
            source: 1,
            target: 3,
            ..zeroed_record()
        };
        assert_eq!(
            (add_records(&[copy]).copies[0].source, add_records(&[copy]).copies[0].target),
            (1, 3)
        );
        let between = RawPeerCopyRecord {
            kind: PEER_COPY_ACTIVITY,
            direction: 10,
            device: 1,
            bytes: 9,
            ..zeroed_record()
        };
        let between = add_records(&[between]).copies[0];
        assert_eq!((between.kind, between.on.device, between.bytes), (10, 1, 9));
        assert_eq!(
            add_records(&[RawMemsetRecord { kind: MEMSET_ACTIVITY, bytes: 64, ..zeroed_record() }])
                .sets[0]
                .bytes,
            64
        );
        let wait = RawWaitRecord {
            kind: SYNCHRONIZATION_ACTIVITY,
            waits_for: 3,
            stream: 7,
            ..zeroed_record()
        };
        assert_eq!(
            (add_records(&[wait]).waits[0].kind, add_records(&[wait]).waits[0].on.stream),
            (3, 7)
        );
        let overhead = RawOverheadRecord {
            kind: PROFILER_OVERHEAD_ACTIVITY,
            start: 3,
            end: 9,
            ..zeroed_record()
        };
        assert_eq!(add_records(&[overhead]).overhead, [[3, 9]]);
        let memory = |memory, operation| RawAllocationRecord {
            kind: ALLOCATION_ACTIVITY,
            memory,
            operation,
            bytes: 100,
            ..zeroed_record()
        };
        let kept = add_records(&[memory(3, 1), memory(3, 2), memory(1, 1)]).allocations;
        assert_eq!(kept.iter().map(|kept| kept.bytes).collect::<Vec<_>>(), [100, -100]);
        assert_eq!(
            add_records(&[RawCallRecord { kind: 9999, ..zeroed_record() }]),
            RecordedActivity::default()
        );
    }
}
