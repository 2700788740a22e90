//! Records GPU activity of this process through CUPTI: kernels, copies, memsets, calls, waits and
//! allocations, with the host's named ranges, also of graph nodes. The recording does not need
//! Nsight, and deliberately has no hardware counters.

mod api;
mod collected_records;
mod graph_nodes;
mod record_layout;

use api::{CuptiFunctions, cupti_functions};
use collected_records::{
    ALLOCATION_ACTIVITY, COPY_ACTIVITY, DRIVER_CALL_ACTIVITY, KERNEL_ACTIVITY, MEMSET_ACTIVITY,
    PEER_COPY_ACTIVITY, PROFILER_OVERHEAD_ACTIVITY, RUNTIME_CALL_ACTIVITY,
    SYNCHRONIZATION_ACTIVITY, allocate_cupti_buffer_callback, collect_cupti_buffer_callback,
    lock_collected_cupti_records,
};
use graph_nodes::GraphNodeEventSubscription;

use super::activity::{CuptiRecordedActivity, GraphNodeRangesRecord, NamedRangeRecord};
use super::range;
use crate::BackendError;

/// Kinds of activity that CUPTI records; recording more kinds slows the process more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CuptiRecordingExtent {
    /// Kernels only.
    KernelsOnly,
    /// Operations on a GPU: kernels, copies and memsets.
    GpuOperations,
    /// GPU operations, and the host's calls of the CUDA driver and CUDA runtime.
    GpuOperationsAndCalls,
    /// CUPTI records all kinds of activity for which [`CuptiRecordedActivity`] has a list.
    AllActivityLists,
}

impl CuptiRecordingExtent {
    /// CUPTI's kinds. The list omits CUPTI's kind that serialises kernels, and its kind for whole
    /// graphs, which would hide the graph's kernels.
    const fn cupti_activity_kinds(self) -> &'static [u32] {
        let count = match self {
            Self::KernelsOnly => 1,
            Self::GpuOperations => 4,
            Self::GpuOperationsAndCalls => 6,
            Self::AllActivityLists => ACTIVITY_KINDS_BY_EXTENT.len(),
        };
        ACTIVITY_KINDS_BY_EXTENT.split_at(count).0
    }
}

/// CUPTI's activity kinds in order of [`CuptiRecordingExtent`]: each extent records a prefix of
/// this list.
const ACTIVITY_KINDS_BY_EXTENT: &[u32] = &[
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

/// CUPTI's number for thread ids that are the operating system's.
const CUPTI_SYSTEM_THREAD_ID_TYPE: u32 = 1;
/// Flag with which CUPTI also hands over buffers that are not full.
const CUPTI_FLUSH_PARTIAL_BUFFERS: u32 = 1;

/// Records this process's GPU activity through CUPTI until the value is dropped; only one recorder
/// may exist at a time. Recording slows launches, so no recorder may exist while results are timed.
/// A recording has no ranges for graphs that were captured before it started.
pub struct CuptiActivityRecorder {
    kinds: CuptiRecordingExtent,
    _graph_node_events: Option<GraphNodeEventSubscription>,
}

impl CuptiActivityRecorder {
    /// Starts recording with CUPTI; returns `None` if the CUPTI library is missing.
    ///
    /// # Errors
    /// Fails if CUPTI refuses, for example because another profiler has the process.
    pub fn start_cupti_recording(
        recorded: CuptiRecordingExtent,
    ) -> Result<Option<CuptiActivityRecorder>, BackendError> {
        let Some(api) = cupti_functions() else { return Ok(None) };
        let everything = recorded == CuptiRecordingExtent::AllActivityLists;
        // `start_cupti_recording` subscribes first, because subscribing fails if another profiler
        // is attached to this process.
        let subscribed = recorded != CuptiRecordingExtent::KernelsOnly;
        let graphs =
            subscribed.then(|| graph_nodes::subscribe_to_graph_node_events(api)).transpose()?;
        // SAFETY: the callbacks live as long as the process, and every version of CUPTI knows this
        // thread-id type.
        let begun = unsafe {
            (api.set_thread_id_type)(CUPTI_SYSTEM_THREAD_ID_TYPE);
            (api.register_buffer_callbacks)(
                allocate_cupti_buffer_callback,
                collect_cupti_buffer_callback,
            )
        };
        api.check_cupti_status(begun, "begin")?;
        let recorder = Self { kinds: recorded, _graph_node_events: graphs };
        for &kind in recorded.cupti_activity_kinds() {
            // SAFETY: every version of CUPTI has this activity kind.
            api.check_cupti_status(unsafe { (api.activity_enable)(kind) }, "record")?;
        }
        if everything {
            range::start_recording_ranges(cupti_clock_ns_or_zero);
        }
        recorder.take_all_new_records()?;
        Ok(Some(recorder))
    }

    /// Returns the activity that CUPTI recorded since the start of the recording or the last call.
    /// Operations and ranges that have not ended appear in a later result, so callers synchronize
    /// the device before this call.
    pub fn take_all_new_records(&self) -> Result<CuptiRecordedActivity, BackendError> {
        self.take_new_records_since(0, 0)
    }

    /// Returns new records except those that began before `time` on CUPTI's clock; allocation
    /// records have a separate limit, because earlier allocations are still held. After this call
    /// CUPTI allocates buffers for the next records, which takes a third of a millisecond; a
    /// measurement that must not be disturbed passes a start time instead.
    pub fn take_new_records_since(
        &self,
        time: u64,
        allocations: u64,
    ) -> Result<CuptiRecordedActivity, BackendError> {
        if let Some(api) = cupti_functions() {
            // SAFETY: the CUPTI callbacks were registered when the recording started.
            api.check_cupti_status(
                unsafe { (api.flush_activity_buffers)(CUPTI_FLUSH_PARTIAL_BUFFERS) },
                "hand over its records",
            )?;
            add_count_of_dropped_records(api);
        }
        let mut collected = std::mem::take(&mut *lock_collected_cupti_records());
        for ended in range::take_ended_ranges() {
            let name = collected.index_of_name_added_if_new(&ended.range_name);
            let range::EndedNamedRange { start_ns, end_ns, os_thread_id, .. } = ended;
            collected.activity.ranges.push(NamedRangeRecord {
                name_index: name,
                start_ns,
                end_ns,
                os_thread_id,
            });
        }
        collected.activity.remove_records_before(time, allocations);
        let mut nodes: Vec<u64> = collected.activity.graph_nodes_that_launched_work().collect();
        nodes.sort_unstable();
        nodes.dedup();
        for id in nodes {
            let Some(ranges) = graph_nodes::ranges_open_when_node_was_created(id) else { continue };
            let ranges =
                ranges.iter().map(|name| collected.index_of_name_added_if_new(name)).collect();
            collected
                .activity
                .graph_nodes
                .push(GraphNodeRangesRecord { graph_node_id: id, range_name_indices: ranges });
        }
        let mut activity = collected.activity;
        activity.pid = std::process::id();
        activity.sort_records_by_time();
        Ok(activity)
    }

    /// Ends the recording, and detaches CUPTI from the process, so that later launches run at full
    /// speed. Callers synchronize the context before this call, because no work may run on it while
    /// CUPTI is detached.
    pub fn end_recording_and_detach_cupti(self) -> Result<(), BackendError> {
        drop(self);
        let Some(api) = cupti_functions() else { return Ok(()) };
        // SAFETY: all records were taken or are given up, and the caller launches nothing during
        // the call.
        api.check_cupti_status(unsafe { (api.cupti_finalize)() }, "leave the process")
    }

    /// Current time of CUPTI's clock, nanoseconds.
    pub fn record_clock_now_ns(&self) -> u64 {
        cupti_clock_ns_or_zero()
    }
}

impl Drop for CuptiActivityRecorder {
    fn drop(&mut self) {
        range::stop_recording_ranges();
        for &kind in self.kinds.cupti_activity_kinds() {
            // SAFETY: every version of CUPTI has this activity kind.
            let _ = cupti_functions().map(|api| unsafe { (api.activity_disable)(kind) });
        }
    }
}

fn cupti_clock_ns_or_zero() -> u64 {
    cupti_functions().map_or(0, CuptiFunctions::cupti_record_clock_ns)
}

/// Adds the number of records that CUPTI lost because it got no buffer.
fn add_count_of_dropped_records(api: &CuptiFunctions) {
    let mut dropped = 0;
    // SAFETY: a null context means the queue that all contexts share; the address of the count is
    // valid.
    let has_count =
        unsafe { (api.get_num_dropped_records)(std::ptr::null_mut(), 0, &raw mut dropped) } == 0;
    if has_count {
        lock_collected_cupti_records().activity.dropped_records += dropped as u64;
    }
}

#[cfg(test)]
mod tests;
