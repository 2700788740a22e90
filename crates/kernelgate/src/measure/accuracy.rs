//! How good event timing is here: against spins of known length, against the hardware's own record
//! of the same launches, of copies and of a bench's cases, and cold against hot.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::audit::cupti::CuptiRecording;
use super::events::EventTimer;
use super::{CacheState, launch_queue, plausibility};
use crate::backend::{BackendError, Executable};
use crate::stats::median;
use crate::workload::random;
use kernelgate_cuda::instruments::bandwidth::BandwidthPasses;
use kernelgate_cuda::instruments::spin_kernel::SpinKernel;
use kernelgate_cuda::instruments::timing::{StreamBlocker, TimingInstruments};
use kernelgate_cuda::observe::activity::{KernelRecord, RecordedActivity};
use kernelgate_cuda::observe::cupti::RecordingExtent;

/// A spin, timed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TimedSpinRow {
    /// Requested length of the spin kernel, nanoseconds.
    pub wanted_ns: u64,
    /// Median length of the spin kernel by the device's own timer, nanoseconds.
    pub spent_ns: f64,
    /// Median length of the spin kernel by CUDA events, nanoseconds.
    pub events_ns: f64,
    /// Length by the events of a spin that ends at once: the time to begin and end a kernel, plus
    /// the error of the overhead.
    pub offset_ns: f64,
}

/// A kernel's time, measured by events and by CUPTI's hardware timestamps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventAndCuptiTimeRow {
    /// Name of the operation that was measured.
    pub what: String,
    /// "hot" or "cold".
    pub cache: String,
    /// Median time of a launch by events without a recorder, as results are timed, nanoseconds.
    pub events_ns: f64,
    /// Time by events around the launches that CUPTI recorded, nanoseconds.
    pub events_recorded_ns: f64,
    /// Time of the launches in CUPTI's record, nanoseconds.
    pub cupti_ns: f64,
}

impl TimedSpinRow {
    /// Checks that the times of a spin kernel are plausible.
    pub fn validate(&self) -> Result<(), String> {
        plausibility::check_launch_ns("a spin", self.spent_ns)?;
        [self.wanted_ns as f64, self.events_ns, self.offset_ns]
            .into_iter()
            .try_for_each(plausibility::check_cost_ns)
    }
}

impl HotAndColdReadRow {
    /// Checks that the times of a memory pass are plausible.
    pub fn validate(&self) -> Result<(), String> {
        plausibility::check_bytes("a pass", self.bytes)?;
        [("a hot pass", self.hot_ns), ("a cold pass", self.cold_ns), ("memory", self.memory_ns)]
            .into_iter()
            .try_for_each(|(pass, ns)| plausibility::check_launch_ns(pass, ns))
    }
}

impl EventAndCuptiTimeRow {
    /// Checks that the times of a kernel are plausible.
    pub fn validate(&self) -> Result<(), String> {
        [self.events_ns, self.events_recorded_ns, self.cupti_ns]
            .into_iter()
            .try_for_each(|ns| plausibility::check_launch_ns("a kernel", ns))
    }

    /// Returns by how many per cent the recorded launches took longer by events than in CUPTI's
    /// record.
    pub fn event_excess_percent(&self) -> f64 {
        100.0 * (self.events_recorded_ns - self.cupti_ns) / self.cupti_ns
    }
}

/// Time of one read of memory with hot caches, and of one with cold caches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HotAndColdReadRow {
    /// Bytes read.
    pub bytes: u64,
    /// Hot, nanoseconds: median.
    pub hot_ns: f64,
    /// Cold, nanoseconds: median.
    pub cold_ns: f64,
    /// Time for the bytes at the best memory rate, nanoseconds: a faster cold pass was not cold.
    pub memory_ns: f64,
}

/// Lengths of the timed spin kernels, nanoseconds.
const SPIN_LENGTHS_NS: [u64; 8] =
    [20_000, 50_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 100_000_000];
const LAUNCHES_PER_ROW: usize = 15;
/// Bytes of the copies that are timed both ways: from some microseconds to about a millisecond.
const COPY_SIZES_BYTES: [u64; 7] =
    [8 << 20, 16 << 20, 48 << 20, 96 << 20, 256 << 20, 1 << 30, 4 << 30];
/// Numbers of bytes that are read with hot and with cold caches; all fit into L2.
const READ_SIZES_BYTES: [u64; 3] = [4 << 20, 16 << 20, 32 << 20];
/// Bytes of a read that comes from memory: far more than any L2.
const READ_BYTES_BEYOND_CACHES: u64 = 2 << 30;

/// Times spins.
pub fn time_spins(events: &mut EventTimer) -> Result<Vec<TimedSpinRow>, BackendError> {
    let spin = SpinKernel::new(events.device())?;
    let mut time = |wanted_ns| -> Result<(f64, f64), BackendError> {
        let (mut spent, mut timed) = (Vec::new(), Vec::new());
        for _ in 0..LAUNCHES_PER_ROW {
            timed.extend(events.launches_ns(1, CacheState::Hot, &mut || spin.launch(wanted_ns))?);
            spent.push(spin.spent_time_ns()? as f64);
        }
        Ok((median(&spent), median(&timed)))
    };
    let (spent_ns, events_ns) = time(0)?;
    let offset_ns = events_ns - spent_ns;
    SPIN_LENGTHS_NS
        .into_iter()
        .map(|wanted_ns| {
            time(wanted_ns).map(|(spent_ns, events_ns)| TimedSpinRow {
                wanted_ns,
                spent_ns,
                events_ns,
                offset_ns,
            })
        })
        .collect()
}

/// Times copies by events and by CUPTI, which is detached afterwards; `None` if CUPTI is missing.
pub fn time_copies_by_events_and_cupti(
    events: &mut EventTimer,
) -> Result<Option<Vec<EventAndCuptiTimeRow>>, BackendError> {
    let passes = measured_passes(events)?;
    let each = [CacheState::Hot, CacheState::Cold]
        .into_iter()
        .flat_map(|cache| COPY_SIZES_BYTES.map(|it| (cache, it)));
    each.map(|(cache, bytes)| {
        let what = format!("copy {} MiB", bytes >> 20);
        time_with_and_without_cupti(events, &what, cache, &mut || passes.enqueue_copy(bytes))
    })
    .collect()
}

/// Times hot launches of a case, each a few kernels or a graph of the row's own, by events and by
/// CUPTI, which is detached afterwards; `None` if CUPTI is missing.
///
/// # Errors
/// Fails if the device or CUPTI fails, a launch has too many commands to queue ahead, or the
/// records of launches cannot be separated.
pub fn time_case_by_events_and_cupti(
    events: &mut EventTimer,
    what: &str,
    executable: &mut dyn Executable,
) -> Result<Option<EventAndCuptiTimeRow>, BackendError> {
    if executable.carries_state() {
        let why = "launches that carry state on cannot follow each other";
        return Err(BackendError::NotTimed(why.into()));
    }
    launch_queue::check_launches_fit_queue(events.device(), LAUNCHES_PER_ROW, executable)?;
    time_with_and_without_cupti(events, what, CacheState::Hot, &mut || executable.launch())
}

/// Times a launch with CUDA events alone, and again while CUPTI records it.
fn time_with_and_without_cupti(
    events: &mut EventTimer,
    what: &str,
    cache: CacheState,
    launch: &mut dyn FnMut() -> Result<(), BackendError>,
) -> Result<Option<EventAndCuptiTimeRow>, BackendError> {
    events.launches_ns(3, cache, launch)?;
    let events_ns = median(&events.launches_ns(LAUNCHES_PER_ROW, cache, launch)?);
    let device = Arc::clone(events.device());
    let Some(recording) = CuptiRecording::attach_and_start(&device, RecordingExtent::Operations)?
    else {
        return Ok(None);
    };
    events.launches_ns(3, cache, launch)?;
    let events_recorded_ns = median(&events.launches_ns(LAUNCHES_PER_ROW, cache, launch)?);
    let spans_ns = recorded_launch_times_ns(&recording.detach_and_take(0)?, LAUNCHES_PER_ROW)
        .map_err(|why| BackendError::Launch(format!("CUPTI's record of {what}: {why}")))?;
    Ok(Some(EventAndCuptiTimeRow {
        what: what.to_owned(),
        cache: cache.name().to_owned(),
        events_ns,
        events_recorded_ns,
        cupti_ns: median(&spans_ns),
    }))
}

/// Time of each of consecutive launches, nanoseconds: from the start of its first operation to the
/// end of its last. The launches lie between the last two probes of the clocks. Copies that read
/// the probes are excluded.
///
/// # Errors
/// A fragment that explains why the record does not hold the same number of operations for each
/// launch.
fn recorded_launch_times_ns(
    record: &RecordedActivity,
    launches: usize,
) -> Result<Vec<f64>, String> {
    let name = |kernel: u32| record.names[kernel as usize].as_str();
    let (probes, kernels): (Vec<&KernelRecord>, Vec<&KernelRecord>) = record
        .kernels
        .iter()
        .partition(|kernel| name(kernel.name) == TimingInstruments::CLOCK_PROBE_SYMBOL);
    let mut probes: Vec<u64> = probes.iter().map(|probe| probe.start).collect();
    probes.sort_unstable();
    let [.., first, last] = probes[..] else {
        return Err(format!("{} of 2 probes around the launches", probes.len()));
    };
    let own = [StreamBlocker::BLOCKING_KERNEL_SYMBOL, TimingInstruments::FLUSH_L2_SYMBOL];
    let kernels = kernels.iter().filter(|kernel| !own.contains(&name(kernel.name)));
    let mut spans: Vec<(u64, u64)> = kernels.map(|kernel| (kernel.start, kernel.end)).collect();
    spans.extend(record.copies.iter().map(|copy| (copy.start, copy.end)));
    spans.extend(record.sets.iter().map(|set| (set.start, set.end)));
    spans.retain(|&(start, _)| first < start && start < last);
    spans.sort_unstable();
    let each = spans.len() / launches;
    if each == 0 || each * launches != spans.len() {
        return Err(format!(
            "{} operations in {launches} launches, {} records lost",
            spans.len(),
            record.dropped
        ));
    }
    let span_ns = |launch: &[(u64, u64)]| {
        let end = launch.iter().map(|&(_, end)| end).max().unwrap_or_default();
        end.saturating_sub(launch[0].0) as f64
    };
    Ok(spans.chunks(each).map(span_ns).collect())
}

/// Times reads of memory that fits into L2, with hot and with cold caches.
pub fn time_hot_and_cold_reads(
    events: &mut EventTimer,
) -> Result<Vec<HotAndColdReadRow>, BackendError> {
    let passes = measured_passes(events)?;
    let memory_ns = events.typical_ns(&mut || passes.enqueue_read(READ_BYTES_BEYOND_CACHES))?;
    let ns_per_byte = memory_ns / READ_BYTES_BEYOND_CACHES as f64;
    let mut rows = Vec::new();
    for bytes in READ_SIZES_BYTES {
        let read = &mut || passes.enqueue_read(bytes);
        events.launches_ns(3, CacheState::Hot, read)?;
        rows.push(HotAndColdReadRow {
            bytes,
            hot_ns: median(&events.launches_ns(LAUNCHES_PER_ROW, CacheState::Hot, read)?),
            cold_ns: median(&events.launches_ns(LAUNCHES_PER_ROW, CacheState::Cold, read)?),
            memory_ns: bytes as f64 * ns_per_byte,
        });
    }
    Ok(rows)
}

fn measured_passes(events: &EventTimer) -> Result<BandwidthPasses, BackendError> {
    let pattern = random::normal_values(0, "accuracy", 1 << 20);
    BandwidthPasses::new(
        events.device(),
        COPY_SIZES_BYTES[COPY_SIZES_BYTES.len() - 1] as usize,
        bytemuck::cast_slice(&pattern),
    )
}

#[cfg(test)]
mod tests {
    use kernelgate_cuda::observe::activity::CopyRecord;

    use super::*;

    #[test]
    fn recorded_launches_are_distinguished_by_their_number_of_operations() {
        let names = [TimingInstruments::CLOCK_PROBE_SYMBOL, "a", "b"].map(str::to_owned).into();
        let kernel = |name, start, end| KernelRecord { name, start, end, ..Default::default() };
        // Two launches of `a` and `b`, which overlap, between two probes.
        let kernels = vec![
            kernel(0, 1, 2),
            kernel(1, 10, 40),
            kernel(2, 20, 30),
            kernel(1, 50, 60),
            kernel(2, 55, 75),
            kernel(0, 90, 91),
        ];
        // The copy that reads the probes belongs to no launch.
        let copies = vec![CopyRecord { start: 95, end: 96, ..Default::default() }];
        let record = RecordedActivity { names, kernels, copies, ..RecordedActivity::default() };
        assert_eq!(recorded_launch_times_ns(&record, 2), Ok(vec![30.0, 25.0]));
        let uneven = "4 operations in 3 launches, 0 records lost".to_owned();
        assert_eq!(recorded_launch_times_ns(&record, 3), Err(uneven));
        let empty = "0 of 2 probes around the launches".to_owned();
        assert_eq!(recorded_launch_times_ns(&RecordedActivity::default(), 2), Err(empty));
    }
}
