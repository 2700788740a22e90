//! The dialect of JAX and XLA (`*.trace.json.gz` of `jax.profiler.trace`): events have no category,
//! the names of their process and thread say what they are.

use hashbrown::HashMap;

use crate::model::gpu::{LaunchShape, MemoryKind};

/// A line of a device in XLA's trace: a stream or derived spans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum XlaDeviceLine {
    /// A CUDA stream with its number.
    Stream(u64),
    /// Lines that XLA derives from streams: modules, operations, steps.
    Derived,
}

/// The processes and threads of a trace that XLA wrote.
#[derive(Debug, Default)]
pub(super) struct XlaLines {
    devices: HashMap<i64, u32>,
    lines: HashMap<(i64, i64), XlaDeviceLine>,
    /// The process that launched.
    pub host: Option<i64>,
}

impl XlaLines {
    /// Notes a process by the name that the trace gives it.
    pub fn note_process_name(&mut self, pid: i64, name: &str) {
        if let Some(number) = name.strip_prefix("/device:GPU:") {
            let digits = number.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
            self.devices.insert(pid, digits.parse().unwrap_or(0));
        } else if name.starts_with("/host:CPU") {
            self.host = Some(pid);
        }
    }

    /// Notes a thread by its name, such as `Stream #14(Compute)` or `XLA Modules`.
    pub fn note_xla_thread(&mut self, pid: i64, tid: i64, name: &str) {
        if !self.devices.contains_key(&pid) {
            return;
        }
        let line = name.strip_prefix("Stream #").map_or(XlaDeviceLine::Derived, |rest| {
            let digits = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
            XlaDeviceLine::Stream(digits.parse().unwrap_or(tid.cast_unsigned()))
        });
        self.lines.insert((pid, tid), line);
    }

    /// Returns whether the trace has an XLA device.
    pub fn has_xla_devices(&self) -> bool {
        !self.devices.is_empty()
    }

    /// The device of a process and the line of its thread.
    pub fn device_and_line_kind(&self, pid: i64, tid: i64) -> Option<(u32, XlaDeviceLine)> {
        let device = *self.devices.get(&pid)?;
        let unnamed = XlaDeviceLine::Stream(tid.cast_unsigned());
        Some((device, self.lines.get(&(pid, tid)).copied().unwrap_or(unnamed)))
    }
}

/// The value of a key in text such as `regs:32 grid:4,1,1`.
fn value_of_detail<'a>(details: &'a str, key: &str) -> Option<&'a str> {
    details.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix(':'))
}

fn detail_number<T: std::str::FromStr + Default>(details: &str, key: &str) -> T {
    value_of_detail(details, key).and_then(|text| text.parse().ok()).unwrap_or_default()
}

/// The launch shape that `kernel_details` states.
pub(super) fn shape(details: &str) -> LaunchShape {
    let dimensions = |key| {
        let mut numbers = value_of_detail(details, key).unwrap_or_default().split(',');
        std::array::from_fn(|_| numbers.next().and_then(|n| n.parse().ok()).unwrap_or(0))
    };
    LaunchShape {
        grid: dimensions("grid"),
        block: dimensions("block"),
        registers: detail_number(details, "regs"),
        static_shared: detail_number(details, "static_shared"),
        dynamic_shared: detail_number(details, "dynamic_shared"),
        local: 0,
    }
}

/// Returns the number of bytes that `memcpy_details` or `memset_details` states.
pub(super) fn bytes_of_details(details: &str) -> u64 {
    detail_number(details, "size")
}

/// The memories that a copy reads and writes, as in `kind_src:pinned kind_dst:device`.
pub(super) fn copied_memory_kinds(details: &str) -> [MemoryKind; 2] {
    ["kind_src", "kind_dst"].map(|key| match value_of_detail(details, key).unwrap_or_default() {
        "pageable" => MemoryKind::Pageable,
        "pinned" => MemoryKind::Pinned,
        "device" | "device_static" => MemoryKind::Device,
        "array" => MemoryKind::Array,
        "managed" | "managed_static" => MemoryKind::Managed,
        _ => MemoryKind::Unknown,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_device_are_classified_as_streams_or_derived_lines() {
        let mut lines = XlaLines::default();
        lines.note_process_name(3, "/device:GPU:1");
        lines.note_process_name(701, "/host:CPU");
        lines.note_xla_thread(3, 14, "Stream #22(MemcpyD2H,Compute)");
        lines.note_xla_thread(3, 99, "XLA Modules");
        lines.note_xla_thread(701, 14, "python");
        assert_eq!(lines.device_and_line_kind(3, 14), Some((1, XlaDeviceLine::Stream(22))));
        assert_eq!(lines.device_and_line_kind(3, 99), Some((1, XlaDeviceLine::Derived)));
        assert_eq!(lines.device_and_line_kind(701, 14), None);
        assert_eq!(lines.host, Some(701));
    }

    #[test]
    fn kernel_details_are_parsed_as_words_with_values() {
        let shape = shape("regs:32 static_shared:16 dynamic_shared:8 grid:4,2,1 block:128,1,1");
        assert_eq!((shape.grid, shape.block), ([4, 2, 1], [128, 1, 1]));
        assert_eq!((shape.registers, shape.static_shared, shape.dynamic_shared), (32, 16, 8));
        let copy = "kind_src:pinned kind_dst:device size:64 dest:0 async:1";
        assert_eq!(
            (bytes_of_details(copy), copied_memory_kinds(copy)),
            (64, [MemoryKind::Pinned, MemoryKind::Device])
        );
    }
}
