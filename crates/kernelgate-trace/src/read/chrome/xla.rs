//! Reads events of JAX and XLA (`*.trace.json.gz` of `jax.profiler.trace`): they have no category,
//! so process and thread names show what they are.

use hashbrown::HashMap;

use crate::model::gpu::{CopiedMemoryKind, KernelLaunchShape};

/// The kind of a thread of a device process in XLA's trace: a CUDA stream, or spans that XLA
/// derived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum XlaDeviceThreadKind {
    /// The thread shows a CUDA stream; the number is the stream number.
    CudaStream(u64),
    /// The thread shows spans that XLA derived from streams: modules, operations or steps.
    DerivedSpans,
}

/// Device and host processes of a trace that XLA wrote, and the kinds of the devices' threads.
#[derive(Debug, Default)]
pub(super) struct XlaProcessesAndThreads {
    device_of_process: HashMap<i64, u32>,
    kind_of_thread: HashMap<(i64, i64), XlaDeviceThreadKind>,
    /// Process id of the host process that launched the GPU operations.
    pub host_process_pid: Option<i64>,
}

impl XlaProcessesAndThreads {
    /// Stores a process as a GPU or as the host if its name has the form that XLA uses.
    pub fn record_process_by_name(&mut self, pid: i64, name: &str) {
        if let Some(number) = name.strip_prefix("/device:GPU:") {
            let digits = number.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
            self.device_of_process.insert(pid, digits.parse().unwrap_or(0));
        } else if name.starts_with("/host:CPU") {
            self.host_process_pid = Some(pid);
        }
    }

    /// Stores the kind of a device's thread by its name, such as `Stream #14(Compute)` or `XLA
    /// Modules`.
    pub fn record_device_thread_by_name(&mut self, pid: i64, tid: i64, name: &str) {
        if !self.device_of_process.contains_key(&pid) {
            return;
        }
        let line =
            name.strip_prefix("Stream #").map_or(XlaDeviceThreadKind::DerivedSpans, |rest| {
                let digits = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
                XlaDeviceThreadKind::CudaStream(digits.parse().unwrap_or(tid.cast_unsigned()))
            });
        self.kind_of_thread.insert((pid, tid), line);
    }

    /// Whether the trace contains a GPU process of XLA.
    pub fn has_xla_devices(&self) -> bool {
        !self.device_of_process.is_empty()
    }

    /// The device number of a process, and whether the thread is a stream or derived; `None` if the
    /// process is not a GPU.
    pub fn device_and_thread_kind(&self, pid: i64, tid: i64) -> Option<(u32, XlaDeviceThreadKind)> {
        let device = *self.device_of_process.get(&pid)?;
        let unnamed = XlaDeviceThreadKind::CudaStream(tid.cast_unsigned());
        Some((device, self.kind_of_thread.get(&(pid, tid)).copied().unwrap_or(unnamed)))
    }
}

/// Returns the value of a key in the text of details, such as `regs:32 grid:4,1,1`.
fn value_in_details<'a>(details: &'a str, key: &str) -> Option<&'a str> {
    details.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix(':'))
}

fn number_in_details_or_default<T: std::str::FromStr + Default>(details: &str, key: &str) -> T {
    value_in_details(details, key).and_then(|text| text.parse().ok()).unwrap_or_default()
}

/// Parses grid, block, registers and shared memory from XLA's `kernel_details`.
pub(super) fn launch_shape_from_kernel_details(details: &str) -> KernelLaunchShape {
    let dimensions = |key| {
        let mut numbers = value_in_details(details, key).unwrap_or_default().split(',');
        std::array::from_fn(|_| numbers.next().and_then(|n| n.parse().ok()).unwrap_or(0))
    };
    KernelLaunchShape {
        grid: dimensions("grid"),
        block: dimensions("block"),
        registers_per_thread: number_in_details_or_default(details, "regs"),
        static_shared_bytes: number_in_details_or_default(details, "static_shared"),
        dynamic_shared_bytes: number_in_details_or_default(details, "dynamic_shared"),
        local_bytes_per_thread: 0,
    }
}

/// Parses the number of copied or set bytes from XLA's `memcpy_details` or `memset_details`.
pub(super) fn byte_count_from_details(details: &str) -> u64 {
    number_in_details_or_default(details, "size")
}

/// Parses source and target memory kind of a copy from XLA's details, such as `kind_src:pinned
/// kind_dst:device`.
pub(super) fn source_and_target_memory_from_details(details: &str) -> [CopiedMemoryKind; 2] {
    ["kind_src", "kind_dst"].map(|key| match value_in_details(details, key).unwrap_or_default() {
        "pageable" => CopiedMemoryKind::Pageable,
        "pinned" => CopiedMemoryKind::Pinned,
        "device" | "device_static" => CopiedMemoryKind::DeviceMemory,
        "array" => CopiedMemoryKind::CudaArray,
        "managed" | "managed_static" => CopiedMemoryKind::Managed,
        _ => CopiedMemoryKind::Unknown,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xla_threads_are_streams_or_derived_spans() {
        let mut lines = XlaProcessesAndThreads::default();
        lines.record_process_by_name(3, "/device:GPU:1");
        lines.record_process_by_name(701, "/host:CPU");
        lines.record_device_thread_by_name(3, 14, "Stream #22(MemcpyD2H,Compute)");
        lines.record_device_thread_by_name(3, 99, "XLA Modules");
        lines.record_device_thread_by_name(701, 14, "python");
        assert_eq!(
            lines.device_and_thread_kind(3, 14),
            Some((1, XlaDeviceThreadKind::CudaStream(22)))
        );
        assert_eq!(
            lines.device_and_thread_kind(3, 99),
            Some((1, XlaDeviceThreadKind::DerivedSpans))
        );
        assert_eq!(lines.device_and_thread_kind(701, 14), None);
        assert_eq!(lines.host_process_pid, Some(701));
    }

    #[test]
    fn kernel_details_are_parsed_as_words_with_values() {
        let shape = launch_shape_from_kernel_details(
            "regs:32 static_shared:16 dynamic_shared:8 grid:4,2,1 block:128,1,1",
        );
        assert_eq!((shape.grid, shape.block), ([4, 2, 1], [128, 1, 1]));
        assert_eq!(
            (shape.registers_per_thread, shape.static_shared_bytes, shape.dynamic_shared_bytes),
            (32, 16, 8)
        );
        let copy = "kind_src:pinned kind_dst:device size:64 dest:0 async:1";
        assert_eq!(
            (byte_count_from_details(copy), source_and_target_memory_from_details(copy)),
            (64, [CopiedMemoryKind::Pinned, CopiedMemoryKind::DeviceMemory])
        );
    }
}
