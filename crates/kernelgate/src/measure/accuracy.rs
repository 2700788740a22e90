//! How accurate CUDA-event timing is on this GPU: compared with spin kernels of known length, and
//! with CUPTI's timestamps of copies and of a bench's cases.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::audit::cupti::CuptiRecordingOfProcess;
use super::events::CudaEventTimer;
use super::{CacheState, launch_queue, plausibility};
use crate::backend::{BackendError, LaunchableProblem};
use crate::stats::median;
use crate::workload::random;
use kernelgate_cuda::instruments::bandwidth::BandwidthKernelsAndBuffer;
use kernelgate_cuda::instruments::spin_kernel::SpinKernel;
use kernelgate_cuda::instruments::timing::{ClockProbeAndL2Flush, StreamBlocker};
use kernelgate_cuda::observe::activity::{CuptiRecordedActivity, KernelRecord};
use kernelgate_cuda::observe::cupti::CuptiRecordingExtent;

/// A spin, timed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SpinTimedByEventsRow {
    /// Length that the spin kernel was asked to last, nanoseconds.
    #[serde(rename = "wanted_ns")]
    pub requested_spin_ns: u64,
    /// Median time that the spin kernel lasted by the GPU's own nanosecond timer.
    #[serde(rename = "spent_ns")]
    pub gpu_timer_spin_ns: f64,
    /// Median time of the spin kernel by CUDA events, nanoseconds.
    #[serde(rename = "events_ns")]
    pub event_spin_ns: f64,
    /// Event time minus the GPU timer's time, for a spin of length zero, nanoseconds: the cost to
    /// begin and end a kernel.
    #[serde(rename = "offset_ns")]
    pub kernel_begin_and_end_ns: f64,
}

/// Time of an operation on the GPU, measured by CUDA events and by CUPTI's timestamps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventAndCuptiTimeRow {
    /// Name of the timed operation, such as `copy 8 MiB`.
    #[serde(rename = "what")]
    pub operation: String,
    /// "hot" or "cold".
    #[serde(rename = "cache")]
    pub cache_state: String,
    /// Median time of a launch by CUDA events without CUPTI, as a bench run times it, nanoseconds.
    #[serde(rename = "events_ns")]
    pub event_ns_without_cupti: f64,
    /// Median time of a launch by CUDA events while CUPTI recorded it, nanoseconds.
    #[serde(rename = "events_recorded_ns")]
    pub event_ns_under_cupti: f64,
    /// Median time of a launch by CUPTI's timestamps, from its first operation's start to its last
    /// operation's end, nanoseconds.
    #[serde(rename = "cupti_ns")]
    pub cupti_launch_ns: f64,
}

impl SpinTimedByEventsRow {
    /// Fails if a time of the spin kernel in this row is negative, not finite or implausibly large.
    pub fn check_spin_times_plausible(&self) -> Result<(), String> {
        plausibility::check_launch_ns_plausible("a spin", self.gpu_timer_spin_ns)?;
        [self.requested_spin_ns as f64, self.event_spin_ns, self.kernel_begin_and_end_ns]
            .into_iter()
            .try_for_each(plausibility::check_overhead_ns_plausible)
    }
}

impl HotAndColdReadTimesRow {
    /// Fails if a time of a hot or cold read in this row, or its number of bytes, is implausible.
    pub fn check_read_times_plausible(&self) -> Result<(), String> {
        plausibility::check_bytes_plausible("a pass", self.read_bytes)?;
        [
            ("a hot pass", self.hot_read_ns),
            ("a cold pass", self.cold_read_ns),
            ("memory", self.device_memory_read_ns),
        ]
        .into_iter()
        .try_for_each(|(pass, ns)| plausibility::check_launch_ns_plausible(pass, ns))
    }
}

impl EventAndCuptiTimeRow {
    /// Fails if an event time or a CUPTI time in this row is implausible.
    pub fn check_event_and_cupti_times_plausible(&self) -> Result<(), String> {
        [self.event_ns_without_cupti, self.event_ns_under_cupti, self.cupti_launch_ns]
            .into_iter()
            .try_for_each(|ns| plausibility::check_launch_ns_plausible("a kernel", ns))
    }

    /// Returns by how many per cent the event time of the launches that CUPTI recorded exceeds
    /// their time in CUPTI's record.
    pub fn event_time_excess_over_cupti_percent(&self) -> f64 {
        100.0 * (self.event_ns_under_cupti - self.cupti_launch_ns) / self.cupti_launch_ns
    }
}

/// Time of one read of device memory by a kernel with hot caches, and of one with cold caches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HotAndColdReadTimesRow {
    /// Bytes read.
    #[serde(rename = "bytes")]
    pub read_bytes: u64,
    /// Hot, nanoseconds: median.
    #[serde(rename = "hot_ns")]
    pub hot_read_ns: f64,
    /// Cold, nanoseconds: median.
    #[serde(rename = "cold_ns")]
    pub cold_read_ns: f64,
    /// Time to read the bytes at the rate of a 2 GiB read from device memory, nanoseconds; a cold
    /// read that is faster found data in caches.
    #[serde(rename = "memory_ns")]
    pub device_memory_read_ns: f64,
}

/// Requested lengths of the spin kernels that are timed, nanoseconds.
const SPIN_LENGTHS_NS: [u64; 8] =
    [20_000, 50_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 100_000_000];
const TIMED_LAUNCHES_PER_ACCURACY_ROW: usize = 15;
/// Sizes of the device-memory copies that are timed by events and by CUPTI, bytes; the copies last
/// from microseconds to milliseconds.
const TIMED_COPY_SIZES_BYTES: [u64; 7] =
    [8 << 20, 16 << 20, 48 << 20, 96 << 20, 256 << 20, 1 << 30, 4 << 30];
/// Numbers of bytes that a kernel reads with hot and with cold caches; each fits into the L2 cache.
const HOT_AND_COLD_READ_SIZES_BYTES: [u64; 3] = [4 << 20, 16 << 20, 32 << 20];
/// Bytes of a read whose data comes from device memory, because they far exceed any L2 cache.
const READ_BYTES_BEYOND_L2: u64 = 2 << 30;

/// Times spins.
pub fn time_spins_by_events_and_gpu_timer(
    events: &mut CudaEventTimer,
) -> Result<Vec<SpinTimedByEventsRow>, BackendError> {
    let spin = SpinKernel::compile_and_allocate_report(events.first_gpu())?;
    let mut time = |wanted_ns| -> Result<(f64, f64), BackendError> {
        let (mut spent, mut timed) = (Vec::new(), Vec::new());
        for _ in 0..TIMED_LAUNCHES_PER_ACCURACY_ROW {
            timed.extend(events.time_single_command_launches_ns(
                1,
                CacheState::HotCaches,
                &mut || spin.enqueue_spin(wanted_ns),
            )?);
            spent.push(spin.reported_ns_of_last_spin()? as f64);
        }
        Ok((median(&spent), median(&timed)))
    };
    let (spent_ns, events_ns) = time(0)?;
    let offset_ns = events_ns - spent_ns;
    SPIN_LENGTHS_NS
        .into_iter()
        .map(|wanted_ns| {
            time(wanted_ns).map(|(spent_ns, events_ns)| SpinTimedByEventsRow {
                requested_spin_ns: wanted_ns,
                gpu_timer_spin_ns: spent_ns,
                event_spin_ns: events_ns,
                kernel_begin_and_end_ns: offset_ns,
            })
        })
        .collect()
}

/// Times device-memory copies, hot and cold, by CUDA events and by CUPTI, then detaches CUPTI;
/// returns `None` if CUPTI is missing.
pub fn time_copies_by_events_and_cupti(
    events: &mut CudaEventTimer,
) -> Result<Option<Vec<EventAndCuptiTimeRow>>, BackendError> {
    let passes = bandwidth_passes_for_accuracy_test(events)?;
    let each = [CacheState::HotCaches, CacheState::ColdCaches]
        .into_iter()
        .flat_map(|cache| TIMED_COPY_SIZES_BYTES.map(|it| (cache, it)));
    each.map(|(cache, bytes)| {
        let what = format!("copy {} MiB", bytes >> 20);
        time_by_events_then_under_cupti(events, &what, cache, &mut || {
            passes.enqueue_copy_kernel(bytes)
        })
    })
    .collect()
}

/// Times hot launches of a case by CUDA events and by CUPTI, then detaches CUPTI; returns `None` if
/// CUPTI is missing.
///
/// # Errors
/// Fails if the device or CUPTI fails, a launch has too many commands to queue ahead, or the
/// records of launches cannot be separated.
pub fn time_case_by_events_and_cupti(
    events: &mut CudaEventTimer,
    what: &str,
    executable: &mut dyn LaunchableProblem,
) -> Result<Option<EventAndCuptiTimeRow>, BackendError> {
    if executable.launches_carry_state() {
        let why = "launches that carry state on cannot follow each other";
        return Err(BackendError::NotTimed(why.into()));
    }
    launch_queue::refuse_launches_beyond_queue(
        events.first_gpu(),
        TIMED_LAUNCHES_PER_ACCURACY_ROW,
        executable,
    )?;
    time_by_events_then_under_cupti(events, what, CacheState::HotCaches, &mut || {
        executable.launch_once()
    })
}

/// Times launches by CUDA events without CUPTI, then again by CUDA events while CUPTI records them.
fn time_by_events_then_under_cupti(
    events: &mut CudaEventTimer,
    what: &str,
    cache: CacheState,
    launch: &mut dyn FnMut() -> Result<(), BackendError>,
) -> Result<Option<EventAndCuptiTimeRow>, BackendError> {
    events.time_single_command_launches_ns(3, cache, launch)?;
    let events_ns = median(&events.time_single_command_launches_ns(
        TIMED_LAUNCHES_PER_ACCURACY_ROW,
        cache,
        launch,
    )?);
    let device = Arc::clone(events.first_gpu());
    let Some(recording) = CuptiRecordingOfProcess::attach_cupti_and_start(
        &device,
        CuptiRecordingExtent::GpuOperations,
    )?
    else {
        return Ok(None);
    };
    events.time_single_command_launches_ns(3, cache, launch)?;
    let events_recorded_ns = median(&events.time_single_command_launches_ns(
        TIMED_LAUNCHES_PER_ACCURACY_ROW,
        cache,
        launch,
    )?);
    let spans_ns = launch_times_from_cupti_record_ns(
        &recording.detach_cupti_and_take_records(0)?,
        TIMED_LAUNCHES_PER_ACCURACY_ROW,
    )
    .map_err(|why| BackendError::ComputationFailed(format!("CUPTI's record of {what}: {why}")))?;
    Ok(Some(EventAndCuptiTimeRow {
        operation: what.to_owned(),
        cache_state: cache.cache_state_name().to_owned(),
        event_ns_without_cupti: events_ns,
        event_ns_under_cupti: events_recorded_ns,
        cupti_launch_ns: median(&spans_ns),
    }))
}

/// Returns the time of each launch in CUPTI's record, nanoseconds: from the start of its first
/// operation to the end of its last operation. The timed launches lie between the last two
/// clock-probe kernels in CUPTI's record. The copies that read the clock probes' results do not
/// count as operations of a launch.
///
/// # Errors
/// A fragment that explains why the record does not hold the same number of operations for each
/// launch.
fn launch_times_from_cupti_record_ns(
    record: &CuptiRecordedActivity,
    launches: usize,
) -> Result<Vec<f64>, String> {
    let name = |kernel: u32| record.interned_names[kernel as usize].as_str();
    let (probes, kernels): (Vec<&KernelRecord>, Vec<&KernelRecord>) = record
        .kernels
        .iter()
        .partition(|kernel| name(kernel.name_index) == ClockProbeAndL2Flush::CLOCK_PROBE_SYMBOL);
    let mut probes: Vec<u64> = probes.iter().map(|probe| probe.start_ns).collect();
    probes.sort_unstable();
    let [.., first, last] = probes[..] else {
        return Err(format!("{} of 2 probes around the launches", probes.len()));
    };
    let own = [StreamBlocker::BLOCKING_KERNEL_SYMBOL, ClockProbeAndL2Flush::FLUSH_L2_SYMBOL];
    let kernels = kernels.iter().filter(|kernel| !own.contains(&name(kernel.name_index)));
    let mut spans: Vec<(u64, u64)> =
        kernels.map(|kernel| (kernel.start_ns, kernel.end_ns)).collect();
    spans.extend(record.copies.iter().map(|copy| (copy.start_ns, copy.end_ns)));
    spans.extend(record.memsets.iter().map(|set| (set.start_ns, set.end_ns)));
    spans.retain(|&(start, _)| first < start && start < last);
    spans.sort_unstable();
    let each = spans.len() / launches;
    if each == 0 || each * launches != spans.len() {
        return Err(format!(
            "{} operations in {launches} launches, {} records lost",
            spans.len(),
            record.dropped_records
        ));
    }
    let span_ns = |launch: &[(u64, u64)]| {
        let end = launch.iter().map(|&(_, end)| end).max().unwrap_or_default();
        end.saturating_sub(launch[0].0) as f64
    };
    Ok(spans.chunks(each).map(span_ns).collect())
}

/// Times reads of 4 to 32 MiB that fit into the L2 cache, with hot and with cold caches.
pub fn time_reads_with_hot_and_cold_caches(
    events: &mut CudaEventTimer,
) -> Result<Vec<HotAndColdReadTimesRow>, BackendError> {
    let passes = bandwidth_passes_for_accuracy_test(events)?;
    let memory_ns = events.settled_time_of_single_command_launch_ns(&mut || {
        passes.enqueue_read_kernel(READ_BYTES_BEYOND_L2)
    })?;
    let ns_per_byte = memory_ns / READ_BYTES_BEYOND_L2 as f64;
    let mut rows = Vec::new();
    for bytes in HOT_AND_COLD_READ_SIZES_BYTES {
        let read = &mut || passes.enqueue_read_kernel(bytes);
        events.time_single_command_launches_ns(3, CacheState::HotCaches, read)?;
        rows.push(HotAndColdReadTimesRow {
            read_bytes: bytes,
            hot_read_ns: median(&events.time_single_command_launches_ns(
                TIMED_LAUNCHES_PER_ACCURACY_ROW,
                CacheState::HotCaches,
                read,
            )?),
            cold_read_ns: median(&events.time_single_command_launches_ns(
                TIMED_LAUNCHES_PER_ACCURACY_ROW,
                CacheState::ColdCaches,
                read,
            )?),
            device_memory_read_ns: bytes as f64 * ns_per_byte,
        });
    }
    Ok(rows)
}

fn bandwidth_passes_for_accuracy_test(
    events: &CudaEventTimer,
) -> Result<BandwidthKernelsAndBuffer, BackendError> {
    let pattern = random::normal_values(0, "accuracy", 1 << 20);
    BandwidthKernelsAndBuffer::bandwidth_kernels_with_filled_buffer(
        events.first_gpu(),
        TIMED_COPY_SIZES_BYTES[TIMED_COPY_SIZES_BYTES.len() - 1] as usize,
        bytemuck::cast_slice(&pattern),
    )
}

#[cfg(test)]
mod tests {
    use kernelgate_cuda::observe::activity::MemoryCopyRecord;

    use super::*;

    #[test]
    fn cupti_operations_are_divided_evenly_among_launches() {
        let names = [ClockProbeAndL2Flush::CLOCK_PROBE_SYMBOL, "a", "b"].map(str::to_owned).into();
        let kernel = |name, start, end| KernelRecord {
            name_index: name,
            start_ns: start,
            end_ns: end,
            ..Default::default()
        };
        // CUPTI's record in this test: two launches, each of overlapping kernels `a` and `b`,
        // between two clock probes.
        let kernels = vec![
            kernel(0, 1, 2),
            kernel(1, 10, 40),
            kernel(2, 20, 30),
            kernel(1, 50, 60),
            kernel(2, 55, 75),
            kernel(0, 90, 91),
        ];
        // The memory copy that reads the clock probes' results belongs to no launch.
        let copies = vec![MemoryCopyRecord { start_ns: 95, end_ns: 96, ..Default::default() }];
        let record = CuptiRecordedActivity {
            interned_names: names,
            kernels,
            copies,
            ..CuptiRecordedActivity::default()
        };
        assert_eq!(launch_times_from_cupti_record_ns(&record, 2), Ok(vec![30.0, 25.0]));
        let uneven = "4 operations in 3 launches, 0 records lost".to_owned();
        assert_eq!(launch_times_from_cupti_record_ns(&record, 3), Err(uneven));
        let empty = "0 of 2 probes around the launches".to_owned();
        assert_eq!(
            launch_times_from_cupti_record_ns(&CuptiRecordedActivity::default(), 2),
            Err(empty)
        );
    }
}
