//! Finds, in CUPTI's record of API calls, why a launch does not return while its stream is blocked:
//! the launch queue is full, or the launch waits for the GPU.

use std::collections::BTreeSet;
use std::time::Duration;

use super::cupti::CuptiRecordingOfProcess;
use crate::backend::{BackendError, LaunchableProblem};
use crate::measure::launch_queue::MAX_COMMANDS_BEHIND_BLOCKER;
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;
use kernelgate_cuda::observe::activity::{CuptiRecordedActivity, HostCallRecord, MemoryCopyRecord};
use kernelgate_cuda::observe::cupti::CuptiRecordingExtent;

/// The reason why a launch call did not return while its stream was blocked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockedLaunchCause {
    /// The GPU's launch queue was full.
    LaunchQueueFull,
    /// Name of the CUDA driver or runtime function in which the host waited for the GPU.
    WaitingCudaCall(String),
    /// No known waiting call in CUPTI's record: the host polls, or the driver waits inside of a
    /// launch call.
    UnknownCause,
}

/// Launches once more on a blocked stream while CUPTI records API calls, then detaches CUPTI, and
/// returns why the launch was delayed. Returns `None` if CUPTI is missing or lost records.
/// Recording slows launches, so calls are recorded before any sample is timed, and only for a
/// launch that would otherwise be refused.
pub fn find_blocked_launch_cause_with_cupti(
    device: &Device,
    stream: &mut dyn StreamHold,
    executable: &mut dyn LaunchableProblem,
    hold: Duration,
) -> Result<Option<BlockedLaunchCause>, BackendError> {
    executable.reset_state_and_wait()?;
    let Ok(Some(recording)) = CuptiRecordingOfProcess::attach_cupti_and_start(
        device,
        CuptiRecordingExtent::GpuOperationsAndCalls,
    ) else {
        return Ok(None);
    };
    stream.enqueue_hold(hold)?;
    let begun = recording.cupti_clock_ns();
    let launched = executable.launch_once();
    let returned = recording.cupti_clock_ns();
    stream.release_stream();
    launched?;
    executable.wait_for_launches()?;
    let Ok(mut record) = recording.detach_cupti_and_take_records(begun) else { return Ok(None) };
    // Calls that began after the launch had returned are dropped, because they may wait.
    record.calls.retain(|call| call.start_ns < returned);
    Ok(find_blocked_launch_cause_in_record(&record, hold))
}

/// Returns the reason why a launch in CUPTI's record did not return while its stream was blocked
/// for the duration `hold`. Returns `None` if CUPTI's record lost calls.
fn find_blocked_launch_cause_in_record(
    record: &CuptiRecordedActivity,
    hold: Duration,
) -> Option<BlockedLaunchCause> {
    if record.dropped_records > 0 {
        return None;
    }
    let name = |call: &HostCallRecord| {
        record.interned_names.get(call.name_index as usize).map_or("", String::as_str)
    };
    let half_ns = (hold / 2).as_nanos();
    let held_up =
        |call: &&HostCallRecord| u128::from(call.end_ns.saturating_sub(call.start_ns)) > half_ns;
    let mut copies = record.copies.clone();
    copies.sort_by_key(|copy| copy.correlation_id);
    let copy_of = |call: &HostCallRecord| {
        let found = copies.binary_search_by_key(&call.correlation_id, |copy| copy.correlation_id);
        found.ok().map(|found| &copies[found])
    };
    // After the launch queue was full, a wait for the GPU may be short, because the stream has made
    // progress. A wait before the first delayed call of a launch belongs to earlier launches.
    let first = record.calls.iter().find(|call| held_up(call));
    let is_behind = |call: &HostCallRecord| {
        first.is_some_and(|first| {
            call.os_thread_id == first.os_thread_id && call.start_ns >= first.end_ns
        })
    };
    let waits = record.calls.iter().find(|call| {
        let (name, copy) = (name(call), copy_of(call));
        (is_behind(call) && cuda_call_waits_for_stream(name, copy))
            || (held_up(call) && !cuda_call_only_enqueues_work(name, copy))
    });
    if let Some(call) = waits {
        return Some(BlockedLaunchCause::WaitingCudaCall(name(call).to_owned()));
    }
    // If CUPTI recorded no more calls than `MAX_COMMANDS_BEHIND_BLOCKER`, the launch queue cannot
    // have been full.
    let enqueued =
        record.calls.iter().filter(|call| cuda_call_only_enqueues_work(name(call), copy_of(call)));
    let many = enqueued.map(|call| call.correlation_id).collect::<BTreeSet<_>>().len()
        > MAX_COMMANDS_BEHIND_BLOCKER;
    Some(if many && first.is_some() {
        BlockedLaunchCause::LaunchQueueFull
    } else {
        BlockedLaunchCause::UnknownCause
    })
}

/// Returns the name of a CUDA function without the prefix `cuda` or `cu`.
fn strip_cuda_function_prefix(name: &str) -> &str {
    name.strip_prefix("cuda").or_else(|| name.strip_prefix("cu")).unwrap_or(name)
}

/// Returns whether a copy is between the GPU and pageable host memory, which the driver stages
/// through the host.
const fn is_copy_of_pageable_memory(copy: &MemoryCopyRecord) -> bool {
    copy.source_memory_kind == 1 || copy.target_memory_kind == 1
}

/// Returns whether a CUDA call waits for the work of a stream, however short the recorded call was.
fn cuda_call_waits_for_stream(name: &str, copy: Option<&MemoryCopyRecord>) -> bool {
    let (function, to_host) =
        (strip_cuda_function_prefix(name), copy.is_some_and(|copy| copy.copy_direction == 2));
    let frees = ["MemFree", "Free"].iter().any(|free| function.starts_with(free));
    function.contains("Synchronize")
        || (frees && !function.contains("Async"))
        || (to_host
            && (!function.contains("Async") || copy.is_some_and(is_copy_of_pageable_memory)))
}

/// Returns whether a CUDA call only enqueues work, so that it can wait for nothing but room in the
/// launch queue.
fn cuda_call_only_enqueues_work(name: &str, copy: Option<&MemoryCopyRecord>) -> bool {
    const PREFIXES_OF_ENQUEUING_CALLS: [&str; 9] = [
        "Launch",
        "GraphLaunch",
        "EventRecord",
        "StreamWaitEvent",
        "StreamWaitValue",
        "StreamWriteValue",
        "StreamBatchMemOp",
        "Memset",
        "MemcpyDtoD",
    ];
    let function = strip_cuda_function_prefix(name);
    PREFIXES_OF_ENQUEUING_CALLS.iter().any(|enqueue| function.starts_with(enqueue))
        || (function.contains("Async") && !copy.is_some_and(is_copy_of_pageable_memory))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST_STREAM_HOLD: Duration = Duration::from_millis(200);
    const MIN_DELAYED_CALL_NS: u64 = 150_000_000;

    /// Makes a CUPTI record with the given API calls, each a name and a duration in nanoseconds,
    /// and the given number of kernel launches.
    fn recorded_calls_and_launches(calls: &[(&str, u64)], kernels: usize) -> CuptiRecordedActivity {
        let mut record = CuptiRecordedActivity::default();
        for (number, &(name, took)) in (0..).zip(calls) {
            record.interned_names.push(name.to_owned());
            let correlation = 1_000_000 + number;
            let start = record.calls.last().map_or(10, |before| before.end_ns + 10);
            let end = start + took;
            record.calls.push(HostCallRecord {
                name_index: number,
                start_ns: start,
                end_ns: end,
                os_thread_id: 1,
                correlation_id: correlation,
            });
        }
        // In this CUPTI record, a runtime call and the driver call inside it have the same
        // correlation number, so they count as one call.
        for name in ["cudaLaunchKernel_v7000", "cuLaunchKernel"] {
            let number = record.interned_names.len() as u32;
            record.interned_names.push(name.to_owned());
            let call = |correlation| HostCallRecord {
                name_index: number,
                correlation_id: correlation,
                ..Default::default()
            };
            record.calls.extend((0..kernels as u32).map(call));
        }
        record
    }

    fn cause_in_record(record: &CuptiRecordedActivity) -> BlockedLaunchCause {
        find_blocked_launch_cause_in_record(record, TEST_STREAM_HOLD).unwrap()
    }

    fn blocked_launch_in_call(name: &str) -> BlockedLaunchCause {
        BlockedLaunchCause::WaitingCudaCall(name.to_owned())
    }

    #[test]
    fn a_launch_delayed_by_a_full_queue_is_no_gpu_wait() {
        for name in ["cuLaunchKernelEx", "cudaLaunchKernel_v7000", "cuGraphLaunch", "cuEventRecord"]
        {
            let calls = [(name, MIN_DELAYED_CALL_NS), ("cuLaunchKernel", 5_000)];
            assert_eq!(
                cause_in_record(&recorded_calls_and_launches(
                    &calls,
                    MAX_COMMANDS_BEHIND_BLOCKER + 1
                )),
                BlockedLaunchCause::LaunchQueueFull
            );
            // This CUPTI record has so few commands that they fit into any launch queue, so another
            // cause delayed the launch.
            assert_eq!(
                cause_in_record(&recorded_calls_and_launches(
                    &calls,
                    MAX_COMMANDS_BEHIND_BLOCKER - 2
                )),
                BlockedLaunchCause::UnknownCause
            );
        }
    }

    #[test]
    fn a_waiting_call_is_found_before_or_after_a_full_queue() {
        for name in [
            "cuStreamSynchronize",
            "cudaDeviceSynchronize_v3020",
            "cuEventSynchronize",
            "cuMemFree_v2",
            "cudaFree_v3020",
            "cuMemHostUnregister",
        ] {
            for kernels in [2, MAX_COMMANDS_BEHIND_BLOCKER + 100] {
                let calls = [("cuLaunchKernel", 5_000), (name, MIN_DELAYED_CALL_NS)];
                assert_eq!(
                    cause_in_record(&recorded_calls_and_launches(&calls, kernels)),
                    blocked_launch_in_call(name)
                );
            }
        }
        // In this CUPTI record the full launch queue delayed the host; the later wait is short
        // because little work was left.
        for name in ["cuStreamSynchronize", "cuMemFree_v2", "cudaFree_v3020"] {
            let calls = [("cuLaunchKernel", MIN_DELAYED_CALL_NS), (name, 5_000)];
            assert_eq!(
                cause_in_record(&recorded_calls_and_launches(&calls, 1500)),
                blocked_launch_in_call(name)
            );
        }
        let calls = [("cuLaunchKernel", MIN_DELAYED_CALL_NS), ("cuMemFreeAsync", 5_000)];
        assert_eq!(
            cause_in_record(&recorded_calls_and_launches(&calls, 1500)),
            BlockedLaunchCause::LaunchQueueFull
        );
        // Neither a wait before the delayed launch nor a wait in a thread that launches nothing
        // counts as a wait of the launch.
        let earlier = [("cuEventSynchronize", 5_000), ("cuMemcpyDtoD_v2", MIN_DELAYED_CALL_NS)];
        assert_eq!(
            cause_in_record(&recorded_calls_and_launches(&earlier, 1500)),
            BlockedLaunchCause::LaunchQueueFull
        );
        let calls = [("cuLaunchKernel", MIN_DELAYED_CALL_NS), ("cuStreamSynchronize", 5_000)];
        let mut other = recorded_calls_and_launches(&calls, 1500);
        other.calls[1].os_thread_id = 2;
        assert_eq!(cause_in_record(&other), BlockedLaunchCause::LaunchQueueFull);
    }

    #[test]
    fn copies_to_host_and_pageable_uploads_count_as_waits() {
        const CUPTI_COPY_HOST_TO_DEVICE: u8 = 1;
        const CUPTI_COPY_DEVICE_TO_HOST: u8 = 2;
        const CUPTI_COPY_DEVICE_TO_DEVICE: u8 = 8;
        const CUPTI_PAGEABLE_MEMORY_KIND: u8 = 1;
        const CUPTI_PINNED_MEMORY_KIND: u8 = 2;
        const CUPTI_DEVICE_MEMORY_KIND: u8 = 3;
        let stall_of_copy = |name, took, [kind, source, target]: [u8; 3]| {
            let calls = [("cuLaunchKernel", MIN_DELAYED_CALL_NS), (name, took)];
            let mut record = recorded_calls_and_launches(&calls, 1500);
            let correlation = record.calls[1].correlation_id;
            record.copies.push(MemoryCopyRecord {
                copy_direction: kind,
                source_memory_kind: source,
                target_memory_kind: target,
                correlation_id: correlation,
                ..MemoryCopyRecord::default()
            });
            cause_in_record(&record)
        };
        let to_host =
            [CUPTI_COPY_DEVICE_TO_HOST, CUPTI_DEVICE_MEMORY_KIND, CUPTI_PINNED_MEMORY_KIND];
        let to_pageable =
            [CUPTI_COPY_DEVICE_TO_HOST, CUPTI_DEVICE_MEMORY_KIND, CUPTI_PAGEABLE_MEMORY_KIND];
        let from_pageable =
            [CUPTI_COPY_HOST_TO_DEVICE, CUPTI_PAGEABLE_MEMORY_KIND, CUPTI_DEVICE_MEMORY_KIND];
        let (sync, asynchronous) = ("cuMemcpyDtoH_v2", "cuMemcpyDtoHAsync_v2");
        assert_eq!(stall_of_copy(sync, 5_000, to_host), blocked_launch_in_call(sync));
        assert_eq!(
            stall_of_copy(asynchronous, 5_000, to_pageable),
            blocked_launch_in_call(asynchronous)
        );
        assert_eq!(
            stall_of_copy(asynchronous, MIN_DELAYED_CALL_NS, to_host),
            BlockedLaunchCause::LaunchQueueFull
        );
        assert_eq!(
            stall_of_copy(
                "cuMemcpyAsync",
                MIN_DELAYED_CALL_NS,
                [CUPTI_COPY_DEVICE_TO_DEVICE, CUPTI_DEVICE_MEMORY_KIND, CUPTI_DEVICE_MEMORY_KIND]
            ),
            BlockedLaunchCause::LaunchQueueFull
        );
        let upload = "cuMemcpyHtoDAsync_v2";
        assert_eq!(
            stall_of_copy(upload, MIN_DELAYED_CALL_NS, from_pageable),
            blocked_launch_in_call(upload)
        );
        assert_eq!(
            stall_of_copy(upload, 5_000, from_pageable),
            BlockedLaunchCause::LaunchQueueFull
        );
    }

    #[test]
    fn a_delayed_launch_without_slow_call_has_unknown_cause() {
        let calls = [("cuLaunchKernel", 5_000), ("cuStreamQuery", 5_000)];
        assert_eq!(
            cause_in_record(&recorded_calls_and_launches(
                &calls,
                MAX_COMMANDS_BEHIND_BLOCKER + 100
            )),
            BlockedLaunchCause::UnknownCause
        );
        let lost =
            CuptiRecordedActivity { dropped_records: 1, ..recorded_calls_and_launches(&calls, 2) };
        assert_eq!(find_blocked_launch_cause_in_record(&lost, TEST_STREAM_HOLD), None);
    }
}
