//! Activity of the GPU as CUPTI records it in this process: kernels, copies, sets, calls, waits,
//! allocations, with the named ranges of the host, including those of graph nodes. Nsight is not
//! needed. Deliberately absent: hardware counters.

mod api;
mod collected_records;
mod graph_nodes;
mod record_layout;

use api::{CuptiApi, cupti_api};
use collected_records::{
    ALLOCATION_ACTIVITY, COPY_ACTIVITY, DRIVER_CALL_ACTIVITY, KERNEL_ACTIVITY, MEMSET_ACTIVITY,
    PEER_COPY_ACTIVITY, PROFILER_OVERHEAD_ACTIVITY, RUNTIME_CALL_ACTIVITY,
    SYNCHRONIZATION_ACTIVITY, give_cupti_buffer, lock_collected, take_cupti_buffer,
};
use graph_nodes::CuptiSubscription;

use super::activity::{GraphNodeRecord, RangeRecord, RecordedActivity};
use super::range;
use crate::BackendError;

/// Which activities CUPTI records; more activities change the times more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordingExtent {
    /// Kernels only.
    Kernels,
    /// Operations on a GPU: kernels, copies and memory sets.
    Operations,
    /// Operations, and the calls of the driver and of the runtime.
    Calls,
    /// All that [`RecordedActivity`] has.
    Everything,
}

impl RecordingExtent {
    /// CUPTI's kinds. The list has neither the kind that serialises kernels nor whole graphs, which
    /// would hide their kernels.
    const fn cupti_kinds(self) -> &'static [u32] {
        let count = match self {
            Self::Kernels => 1,
            Self::Operations => 4,
            Self::Calls => 6,
            Self::Everything => RECORDED_KINDS.len(),
        };
        RECORDED_KINDS.split_at(count).0
    }
}

/// CUPTI's kinds of activity; each extent of a recording begins with those of the one before.
const RECORDED_KINDS: &[u32] = &[
    KERNEL_ACTIVITY,
    COPY_ACTIVITY,
    PEER_COPY_ACTIVITY,
    MEMSET_ACTIVITY,
    DRIVER_CALL_ACTIVITY,
    RUNTIME_CALL_ACTIVITY,
    SYNCHRONIZATION_ACTIVITY,
    PROFILER_OVERHEAD_ACTIVITY,
    ALLOCATION_ACTIVITY,
];

/// CUPTI's name for the system's ids of threads.
const SYSTEM_THREAD_ID_TYPE: u32 = 1;
/// Flag of a flush that includes buffers that are not full.
const FLUSH_EVERY_BUFFER: u32 = 1;

/// Records the activity of the process until this value is dropped; only one recorder may exist.
/// Recording slows launches, so it must not run while results are timed. Graphs that were captured
/// before have no ranges.
pub struct ActivityRecorder {
    kinds: RecordingExtent,
    _graphs: Option<CuptiSubscription>,
}

impl ActivityRecorder {
    /// Starts recording with CUPTI; `None` if CUPTI is missing.
    ///
    /// # Errors
    /// Fails if CUPTI refuses, for example because another profiler has the process.
    pub fn start(recorded: RecordingExtent) -> Result<Option<ActivityRecorder>, BackendError> {
        let Some(api) = cupti_api() else { return Ok(None) };
        let everything = recorded == RecordingExtent::Everything;
        // The recorder subscribes first, because subscribing fails if another profiler is attached.
        let subscribed = recorded != RecordingExtent::Kernels;
        let graphs = subscribed.then(|| graph_nodes::subscribe_to_cupti(api)).transpose()?;
        // SAFETY: the callbacks live as long as the process, and the value is one that every
        // version has.
        let begun = unsafe {
            (api.thread_ids)(SYSTEM_THREAD_ID_TYPE);
            (api.register)(give_cupti_buffer, take_cupti_buffer)
        };
        api.check(begun, "begin")?;
        let recorder = Self { kinds: recorded, _graphs: graphs };
        for &kind in recorded.cupti_kinds() {
            // SAFETY: every version of CUPTI has this kind of record.
            api.check(unsafe { (api.enable)(kind) }, "record")?;
        }
        if everything {
            range::record_ranges(cupti_clock_ns);
        }
        recorder.take_records()?;
        Ok(Some(recorder))
    }

    /// Returns the records since the start or the last call. Unfinished operations and open ranges
    /// are in a later result, so wait for the device before.
    pub fn take_records(&self) -> Result<RecordedActivity, BackendError> {
        self.take_records_since(0, 0)
    }

    /// Returns the collected records except those that began before a given time of CUPTI's clock
    /// ([`Self::clock_ns`]), and allocations before another given time, because earlier allocations
    /// are still held. After a call CUPTI allocates new buffers for the first records, which takes
    /// a third of a millisecond; so a measurement that must not be disturbed begins at a time, not
    /// behind a call.
    pub fn take_records_since(
        &self,
        time: u64,
        allocations: u64,
    ) -> Result<RecordedActivity, BackendError> {
        if let Some(api) = cupti_api() {
            // SAFETY: the CUPTI callbacks were registered before.
            api.check(unsafe { (api.flush)(FLUSH_EVERY_BUFFER) }, "hand over its records")?;
            count_dropped_records(api);
        }
        let mut collected = std::mem::take(&mut *lock_collected());
        for ended in range::take_ranges() {
            let name = collected.name(&ended.name);
            let range::EndedRange { start, end, thread, .. } = ended;
            collected.activity.ranges.push(RangeRecord { name, start, end, thread });
        }
        collected.activity.forget_records_before(time, allocations);
        let mut nodes: Vec<u64> = collected.activity.used_graph_nodes().collect();
        nodes.sort_unstable();
        nodes.dedup();
        for id in nodes {
            let Some(ranges) = graph_nodes::ranges_of(id) else { continue };
            let ranges = ranges.iter().map(|name| collected.name(name)).collect();
            collected.activity.graph_nodes.push(GraphNodeRecord { id, ranges });
        }
        let mut activity = collected.activity;
        activity.pid = std::process::id();
        activity.sort_by_time();
        Ok(activity)
    }

    /// Ends the recording, and detaches CUPTI from the process, so that later launches are not
    /// slowed. Wait for the context before: nothing may run while CUPTI is detached.
    pub fn detach_cupti(self) -> Result<(), BackendError> {
        drop(self);
        let Some(api) = cupti_api() else { return Ok(()) };
        // SAFETY: every record was taken or is given up, and the caller launches nothing during the
        // call.
        api.check(unsafe { (api.finalize)() }, "leave the process")
    }

    /// Current time of CUPTI's clock, nanoseconds.
    pub fn clock_ns(&self) -> u64 {
        cupti_clock_ns()
    }
}

impl Drop for ActivityRecorder {
    fn drop(&mut self) {
        range::stop_ranges();
        for &kind in self.kinds.cupti_kinds() {
            // SAFETY: every version of CUPTI has this kind of record.
            let _ = cupti_api().map(|api| unsafe { (api.disable)(kind) });
        }
    }
}

fn cupti_clock_ns() -> u64 {
    cupti_api().map_or(0, CuptiApi::record_clock_ns)
}

/// Records that were lost without a buffer.
fn count_dropped_records(api: &CuptiApi) {
    let mut dropped = 0;
    // SAFETY: no context stands for the queue that all share; the address is valid.
    let has_count = unsafe { (api.dropped)(std::ptr::null_mut(), 0, &raw mut dropped) } == 0;
    if has_count {
        lock_collected().activity.dropped += dropped as u64;
    }
}

#[cfg(test)]
mod tests;
