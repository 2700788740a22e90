//! Device memory over time: what a process held on a device, at most and in which phase, as far as
//! the trace saw it being taken. Absent: what was taken before the recording began, and memory of
//! the driver itself.

use hashbrown::HashMap;

use super::host::OutermostRange;
use crate::model::Trace;
use crate::model::interned_names::without_numbers_in_name;

/// Device memory of a process on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryUse {
    /// Process id in the operating system.
    pub pid: i64,
    pub device: u32,
    /// Each time at which the held memory changed, nanoseconds of the trace, and the bytes that
    /// were held from then on.
    pub held: Vec<(i64, u64)>,
    /// The most bytes that were held, and when for the first time.
    pub peak: (i64, u64),
    /// Allocations.
    pub taken: usize,
    /// Number of allocations that were freed.
    pub given_back: usize,
    /// Freed memory whose allocation is not in the trace; its bytes are not counted.
    pub unknown: usize,
    /// Memory of the outermost ranges in order of their first start; the first entry is the time
    /// before all ranges.
    pub phases: Vec<OutermostRangeMemory>,
}

/// Memory of outermost ranges whose names differ only in numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutermostRangeMemory {
    /// Name of the ranges; `#` stands for numbers in which they differ.
    pub name: String,
    /// How many there are.
    pub times: usize,
    /// The most bytes that were held during one of these ranges.
    pub peak_bytes: u64,
    /// Bytes taken less those given back in the phase.
    pub change_bytes: i64,
}

impl OutermostRangeMemory {
    /// Label of the phase before the first range.
    pub const BEFORE_FIRST_RANGE_LABEL: &str = "before the first range";
}

impl MemoryUse {
    /// Bytes held at the end of the trace.
    pub fn bytes_at_end(&self) -> u64 {
        self.held.last().map_or(0, |&(_, bytes)| bytes)
    }

    /// Returns at most `most` pairs of time and bytes held; of neighbouring pairs only the pair
    /// with more bytes is kept. The last one stays.
    pub fn bytes_over_time(&self, most: usize) -> Vec<(i64, u64)> {
        let together = self.held.len().div_ceil(most.max(2) - 1).max(1);
        let fullest = |part: &[(i64, u64)]| part.iter().copied().max_by_key(|&(_, bytes)| bytes);
        let mut kept: Vec<(i64, u64)> = self.held.chunks(together).filter_map(fullest).collect();
        let last = self.held.last().copied().filter(|last| kept.last() != Some(last));
        kept.extend(last);
        kept
    }

    /// Bytes that were held at a time.
    fn at(&self, time: i64) -> u64 {
        let after = self.held.partition_point(|&(at, _)| at <= time);
        after.checked_sub(1).map_or(0, |last| self.held[last].1)
    }

    /// The most bytes held in a span, which includes its end.
    fn most_bytes_in_span(&self, (start, end): (i64, i64)) -> u64 {
        let from = self.held.partition_point(|&(at, _)| at < start);
        let inside = self.held[from..].iter().take_while(|&&(at, _)| at <= end);
        inside.map(|&(_, bytes)| bytes).max().unwrap_or(0).max(self.at(start))
    }
}

/// Memory of each process on each device that allocates.
pub(super) fn memory_by_device(trace: &Trace, outermost: &[OutermostRange]) -> Vec<MemoryUse> {
    let rows = &trace.allocations;
    let mut order: Vec<usize> = (0..rows.time.len()).collect();
    order.sort_by_key(|&row| rows.time[row]);
    let mut uses: Vec<HeldDeviceMemory> = Vec::new();
    let mut index: HashMap<(u32, u32), usize> = HashMap::new();
    for row in order {
        let place = &trace.places[rows.place[row].0 as usize];
        let new = uses.len();
        let number = *index.entry((place.process, place.device)).or_insert(new);
        if number == new {
            let pid = trace.processes[place.process as usize].pid;
            uses.push(HeldDeviceMemory::new(place.process, pid, place.device));
        }
        let (time, address) = (rows.time[row], rows.address[row]);
        match rows.given_back[row] {
            true => uses[number].release_bytes(time, address),
            false => uses[number].add_allocation(time, address, rows.bytes[row]),
        }
    }
    uses.into_iter().map(|held| held.into_memory_use(trace, outermost)).collect()
}

/// The held device memory of a trace, while allocations are added in time order.
struct HeldDeviceMemory {
    process: u32,
    of: MemoryUse,
    bytes: u64,
    /// Bytes by address.
    live: HashMap<u64, u64>,
}

impl HeldDeviceMemory {
    fn new(process: u32, pid: i64, device: u32) -> Self {
        let memory_use = MemoryUse {
            pid,
            device,
            held: Vec::new(),
            peak: (0, 0),
            taken: 0,
            given_back: 0,
            unknown: 0,
            phases: Vec::new(),
        };
        Self { process, of: memory_use, bytes: 0, live: HashMap::new() }
    }

    fn add_allocation(&mut self, time: i64, address: u64, bytes: u64) {
        self.of.taken += 1;
        // An earlier entry at the address was freed without a record.
        self.bytes -= self.live.insert(address, bytes).unwrap_or(0);
        self.bytes += bytes;
        self.note_held_bytes(time);
    }

    /// Some recorders do not record the size of a freed allocation, which follows from its address.
    fn release_bytes(&mut self, time: i64, address: u64) {
        let Some(bytes) = self.live.remove(&address) else {
            self.of.unknown += 1;
            return;
        };
        self.of.given_back += 1;
        self.bytes -= bytes;
        self.note_held_bytes(time);
    }

    fn note_held_bytes(&mut self, time: i64) {
        self.of.held.push((time, self.bytes));
        if self.bytes > self.of.peak.1 {
            self.of.peak = (time, self.bytes);
        }
    }

    fn into_memory_use(mut self, trace: &Trace, outermost: &[OutermostRange]) -> MemoryUse {
        let own = || outermost.iter().filter(|range| range.process == self.process);
        let first = own().map(|range| range.start).next().unwrap_or(i64::MAX);
        let before = self.of.most_bytes_in_span((i64::MIN, first.saturating_sub(1)));
        let mut phases = vec![OutermostRangeMemory {
            name: OutermostRangeMemory::BEFORE_FIRST_RANGE_LABEL.to_owned(),
            times: 1,
            peak_bytes: before,
            change_bytes: byte_change(0, self.of.at(first.saturating_sub(1))),
        }];
        let mut known: HashMap<String, usize> = HashMap::new();
        for range in own() {
            let span = (range.start, range.end);
            let name = trace.names.text(range.name);
            let index = *known.entry(without_numbers_in_name(name)).or_insert_with(|| {
                let name = name.to_owned();
                phases.push(OutermostRangeMemory {
                    name,
                    times: 0,
                    peak_bytes: 0,
                    change_bytes: 0,
                });
                phases.len() - 1
            });
            let phase = &mut phases[index];
            if phase.name != name {
                phase.name = without_numbers_in_name(name);
            }
            phase.times += 1;
            phase.peak_bytes = phase.peak_bytes.max(self.of.most_bytes_in_span(span));
            phase.change_bytes +=
                byte_change(self.of.at(span.0.saturating_sub(1)), self.of.at(span.1));
        }
        self.of.phases = phases;
        self.of
    }
}

fn byte_change(before: u64, after: u64) -> i64 {
    let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
    signed(after) - signed(before)
}
