//! Device memory over time: how much a process held on a GPU, its peak, and its use by phase, from
//! recorded allocations and frees. Memory that was allocated before the recording began, and the
//! driver's own memory, are not counted.

use hashbrown::HashMap;

use super::host::OutermostNamedRange;
use crate::model::Trace;
use crate::model::interned_names::replace_digits_by_number_sign;

/// Device memory that one process held on one GPU during a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessMemoryOnGpu {
    /// Process id in the operating system.
    pub pid: i64,
    pub gpu_ordinal: u32,
    /// Times at which the held memory changed, nanoseconds of the trace's clock, and the bytes that
    /// were held from then on.
    pub held_bytes_over_time: Vec<(i64, u64)>,
    /// First time at which the most bytes were held, nanoseconds, and the number of bytes.
    pub peak_time_ns_and_bytes: (i64, u64),
    /// Allocations.
    pub allocation_count: usize,
    /// Number of recorded frees of device memory.
    pub free_count: usize,
    /// Number of frees whose allocation is not in the trace; their bytes are not counted.
    pub frees_without_allocation: usize,
    /// Memory by phase; phases are outermost ranges in order of their first start, and the first
    /// entry is the time before all ranges.
    pub phases: Vec<DeviceMemoryDuringPhase>,
}

/// Memory during one phase: outermost ranges whose names differ only in numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceMemoryDuringPhase {
    /// Name of the phase's ranges; `#` stands for numbers in which their names differ.
    pub phase_name: String,
    /// Number of ranges that form the phase.
    pub range_count: usize,
    /// Most bytes of device memory that the process held during one range of the phase.
    pub peak_bytes: u64,
    /// Bytes allocated minus bytes freed during the phase.
    pub held_bytes_change: i64,
}

impl DeviceMemoryDuringPhase {
    /// Printed label of the phase before the first range.
    pub const LABEL_BEFORE_FIRST_RANGE: &str = "before the first range";
}

impl ProcessMemoryOnGpu {
    /// Bytes of device memory that were still held at the end of the trace.
    pub fn bytes_held_at_end_of_trace(&self) -> u64 {
        self.held_bytes_over_time.last().map_or(0, |&(_, bytes)| bytes)
    }

    /// Returns at most `most` pairs of time and bytes held; of each group of neighbouring pairs,
    /// the pair with the most bytes. The last pair of time and bytes is always kept.
    pub fn thinned_bytes_over_time(&self, most: usize) -> Vec<(i64, u64)> {
        let together = self.held_bytes_over_time.len().div_ceil(most.max(2) - 1).max(1);
        let fullest = |part: &[(i64, u64)]| part.iter().copied().max_by_key(|&(_, bytes)| bytes);
        let mut kept: Vec<(i64, u64)> =
            self.held_bytes_over_time.chunks(together).filter_map(fullest).collect();
        let last =
            self.held_bytes_over_time.last().copied().filter(|last| kept.last() != Some(last));
        kept.extend(last);
        kept
    }

    /// Bytes of device memory that were held at `time`.
    fn held_bytes_at(&self, time: i64) -> u64 {
        let after = self.held_bytes_over_time.partition_point(|&(at, _)| at <= time);
        after.checked_sub(1).map_or(0, |last| self.held_bytes_over_time[last].1)
    }

    /// Most bytes of device memory that were held during a span, its end included.
    fn most_bytes_held_during(&self, (start, end): (i64, i64)) -> u64 {
        let from = self.held_bytes_over_time.partition_point(|&(at, _)| at < start);
        let inside = self.held_bytes_over_time[from..].iter().take_while(|&&(at, _)| at <= end);
        inside.map(|&(_, bytes)| bytes).max().unwrap_or(0).max(self.held_bytes_at(start))
    }
}

/// Returns the device memory of each process on each GPU for which the trace records allocations.
pub(super) fn device_memory_by_process_and_gpu(
    trace: &Trace,
    outermost: &[OutermostNamedRange],
) -> Vec<ProcessMemoryOnGpu> {
    let rows = &trace.allocations;
    let mut order: Vec<usize> = (0..rows.time_ns.len()).collect();
    order.sort_by_key(|&row| rows.time_ns[row]);
    let mut uses: Vec<HeldMemoryInTimeOrder> = Vec::new();
    let mut index: HashMap<(u32, u32), usize> = HashMap::new();
    for row in order {
        let place = &trace.places[rows.place[row].0 as usize];
        let new = uses.len();
        let number = *index.entry((place.process_index, place.device)).or_insert(new);
        if number == new {
            let pid = trace.processes[place.process_index as usize].pid;
            uses.push(HeldMemoryInTimeOrder::start_without_allocations(
                place.process_index,
                pid,
                place.device,
            ));
        }
        let (time, address) = (rows.time_ns[row], rows.address[row]);
        match rows.is_free[row] {
            true => uses[number].add_free(time, address),
            false => uses[number].add_allocation(time, address, rows.allocated_or_freed_bytes[row]),
        }
    }
    uses.into_iter().map(|held| held.into_process_memory_with_phases(trace, outermost)).collect()
}

/// Device memory that a process holds on a GPU, while allocations and frees are added in order of
/// time.
struct HeldMemoryInTimeOrder {
    process_index: u32,
    process_memory: ProcessMemoryOnGpu,
    held_bytes: u64,
    /// Bytes by address.
    held_bytes_by_address: HashMap<u64, u64>,
}

impl HeldMemoryInTimeOrder {
    fn start_without_allocations(process: u32, pid: i64, device: u32) -> Self {
        let memory_use = ProcessMemoryOnGpu {
            pid,
            gpu_ordinal: device,
            held_bytes_over_time: Vec::new(),
            peak_time_ns_and_bytes: (0, 0),
            allocation_count: 0,
            free_count: 0,
            frees_without_allocation: 0,
            phases: Vec::new(),
        };
        Self {
            process_index: process,
            process_memory: memory_use,
            held_bytes: 0,
            held_bytes_by_address: HashMap::new(),
        }
    }

    fn add_allocation(&mut self, time: i64, address: u64, bytes: u64) {
        self.process_memory.allocation_count += 1;
        // If the address is still held, its free was not recorded, so its bytes are subtracted.
        self.held_bytes -= self.held_bytes_by_address.insert(address, bytes).unwrap_or(0);
        self.held_bytes += bytes;
        self.append_held_bytes(time);
    }

    /// The freed bytes are looked up by address, because some recorders do not record the size of a
    /// free.
    fn add_free(&mut self, time: i64, address: u64) {
        let Some(bytes) = self.held_bytes_by_address.remove(&address) else {
            self.process_memory.frees_without_allocation += 1;
            return;
        };
        self.process_memory.free_count += 1;
        self.held_bytes -= bytes;
        self.append_held_bytes(time);
    }

    fn append_held_bytes(&mut self, time: i64) {
        self.process_memory.held_bytes_over_time.push((time, self.held_bytes));
        if self.held_bytes > self.process_memory.peak_time_ns_and_bytes.1 {
            self.process_memory.peak_time_ns_and_bytes = (time, self.held_bytes);
        }
    }

    fn into_process_memory_with_phases(
        mut self,
        trace: &Trace,
        outermost: &[OutermostNamedRange],
    ) -> ProcessMemoryOnGpu {
        let own = || outermost.iter().filter(|range| range.process_index == self.process_index);
        let first = own().map(|range| range.start_ns).next().unwrap_or(i64::MAX);
        let before =
            self.process_memory.most_bytes_held_during((i64::MIN, first.saturating_sub(1)));
        let mut phases = vec![DeviceMemoryDuringPhase {
            phase_name: DeviceMemoryDuringPhase::LABEL_BEFORE_FIRST_RANGE.to_owned(),
            range_count: 1,
            peak_bytes: before,
            held_bytes_change: signed_byte_difference(
                0,
                self.process_memory.held_bytes_at(first.saturating_sub(1)),
            ),
        }];
        let mut known: HashMap<String, usize> = HashMap::new();
        for range in own() {
            let span = (range.start_ns, range.end_ns);
            let name = trace.names.text_of_name(range.range_name);
            let index = *known.entry(replace_digits_by_number_sign(name)).or_insert_with(|| {
                let name = name.to_owned();
                phases.push(DeviceMemoryDuringPhase {
                    phase_name: name,
                    range_count: 0,
                    peak_bytes: 0,
                    held_bytes_change: 0,
                });
                phases.len() - 1
            });
            let phase = &mut phases[index];
            if phase.phase_name != name {
                phase.phase_name = replace_digits_by_number_sign(name);
            }
            phase.range_count += 1;
            phase.peak_bytes =
                phase.peak_bytes.max(self.process_memory.most_bytes_held_during(span));
            phase.held_bytes_change += signed_byte_difference(
                self.process_memory.held_bytes_at(span.0.saturating_sub(1)),
                self.process_memory.held_bytes_at(span.1),
            );
        }
        self.process_memory.phases = phases;
        self.process_memory
    }
}

fn signed_byte_difference(before: u64, after: u64) -> i64 {
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    signed(after) - signed(before)
}
