//! The reason why a launch does not return while its stream is held, by CUPTI's record of its
//! calls: the queue has no room for more commands, or the launch waits for the GPU.

use std::collections::BTreeSet;
use std::time::Duration;

use super::cupti::CuptiRecording;
use crate::backend::{BackendError, Executable};
use crate::measure::launch_queue::MAX_QUEUED_COMMANDS;
use kernelgate_cuda::Device;
use kernelgate_cuda::driver::stream::stream_hold::StreamHold;
use kernelgate_cuda::observe::activity::{CallRecord, CopyRecord, RecordedActivity};
use kernelgate_cuda::observe::cupti::RecordingExtent;

/// The reason why a launch did not return while its stream was held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LaunchStall {
    /// The queue was full.
    Queue,
    /// A call of the driver or of the runtime that waits for the GPU, by its name.
    Call(String),
    /// No known call: the host polls, or the driver waits inside of a launch.
    Unknown,
}

/// Launches once more while the stream is held, recorded by CUPTI, which is detached afterwards.
/// The launch's calls, recorded by CUPTI; `None` if CUPTI is missing or lost records. Recording
/// changes times, so calls are recorded before any sample, and only for a launch that would be
/// refused otherwise.
pub fn record_launch_calls(
    device: &Device,
    stream: &mut dyn StreamHold,
    executable: &mut dyn Executable,
    hold: Duration,
) -> Result<Option<LaunchStall>, BackendError> {
    executable.reset_and_wait()?;
    let Ok(Some(recording)) = CuptiRecording::attach_and_start(device, RecordingExtent::Calls)
    else {
        return Ok(None);
    };
    stream.hold(hold)?;
    let begun = recording.now_ns();
    let launched = executable.launch();
    let returned = recording.now_ns();
    stream.release();
    launched?;
    executable.synchronize()?;
    let Ok(mut record) = recording.detach_and_take(begun) else { return Ok(None) };
    // Calls after the launch has returned are dropped, because they may wait.
    record.calls.retain(|call| call.start < returned);
    Ok(find_host_stall(&record, hold))
}

/// The reason why a recorded launch did not return, on a stream that was held for `hold`. Returns
/// `None` if CUPTI lost records.
fn find_host_stall(record: &RecordedActivity, hold: Duration) -> Option<LaunchStall> {
    if record.dropped > 0 {
        return None;
    }
    let name = |call: &CallRecord| record.names.get(call.name as usize).map_or("", String::as_str);
    let half_ns = (hold / 2).as_nanos();
    let held_up = |call: &&CallRecord| u128::from(call.end.saturating_sub(call.start)) > half_ns;
    let mut copies = record.copies.clone();
    copies.sort_by_key(|copy| copy.correlation);
    let copy_of = |call: &CallRecord| {
        let found = copies.binary_search_by_key(&call.correlation, |copy| copy.correlation);
        found.ok().map(|found| &copies[found])
    };
    // After the device's queue was full, a wait for room in it may be short, because the stream has
    // made progress. Waits before the launch began belong to earlier launches.
    let first = record.calls.iter().find(|call| held_up(call));
    let is_behind = |call: &CallRecord| {
        first.is_some_and(|first| call.thread == first.thread && call.start >= first.end)
    };
    let waits = record.calls.iter().find(|call| {
        let (name, copy) = (name(call), copy_of(call));
        (is_behind(call) && call_waits(name, copy))
            || (held_up(call) && !call_enqueues_work(name, copy))
    });
    if let Some(call) = waits {
        return Some(LaunchStall::Call(name(call).to_owned()));
    }
    // Fewer commands than this fit any queue.
    let enqueued = record.calls.iter().filter(|call| call_enqueues_work(name(call), copy_of(call)));
    let many =
        enqueued.map(|call| call.correlation).collect::<BTreeSet<_>>().len() > MAX_QUEUED_COMMANDS;
    Some(if many && first.is_some() { LaunchStall::Queue } else { LaunchStall::Unknown })
}

/// The name of a function without the prefix of the runtime or the driver.
fn function_without_prefix(name: &str) -> &str {
    name.strip_prefix("cuda").or_else(|| name.strip_prefix("cu")).unwrap_or(name)
}

/// Whether a copy is between the GPU and pageable host memory, which the driver copies itself.
const fn is_pageable_copy(copy: &CopyRecord) -> bool {
    copy.source == 1 || copy.target == 1
}

/// Returns whether a driver call waits for a stream's work, however long the call took.
fn call_waits(name: &str, copy: Option<&CopyRecord>) -> bool {
    let (function, to_host) =
        (function_without_prefix(name), copy.is_some_and(|copy| copy.kind == 2));
    let frees = ["MemFree", "Free"].iter().any(|free| function.starts_with(free));
    function.contains("Synchronize")
        || (frees && !function.contains("Async"))
        || (to_host && (!function.contains("Async") || copy.is_some_and(is_pageable_copy)))
}

/// Returns whether a driver call only enqueues work, and waits for nothing but room in the device's
/// queue.
fn call_enqueues_work(name: &str, copy: Option<&CopyRecord>) -> bool {
    const ENQUEUING_CALLS: [&str; 9] = [
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
    let function = function_without_prefix(name);
    ENQUEUING_CALLS.iter().any(|enqueue| function.starts_with(enqueue))
        || (function.contains("Async") && !copy.is_some_and(is_pageable_copy))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM_HOLD_TIME: Duration = Duration::from_millis(200);
    const MIN_HELD_UP_NS: u64 = 150_000_000;

    /// Makes an activity record of a launch with the given runtime calls, each with name and
    /// duration, and the given number of kernels.
    fn calls_record(calls: &[(&str, u64)], kernels: usize) -> RecordedActivity {
        let mut record = RecordedActivity::default();
        for (number, &(name, took)) in (0..).zip(calls) {
            record.names.push(name.to_owned());
            let correlation = 1_000_000 + number;
            let start = record.calls.last().map_or(10, |before| before.end + 10);
            let end = start + took;
            record.calls.push(CallRecord { name: number, start, end, thread: 1, correlation });
        }
        // In this record a runtime call and the driver call inside it have the same number, so they
        // count as one call.
        for name in ["cudaLaunchKernel_v7000", "cuLaunchKernel"] {
            let number = record.names.len() as u32;
            record.names.push(name.to_owned());
            let call = |correlation| CallRecord { name: number, correlation, ..Default::default() };
            record.calls.extend((0..kernels as u32).map(call));
        }
        record
    }

    fn by(record: &RecordedActivity) -> LaunchStall {
        find_host_stall(record, STREAM_HOLD_TIME).unwrap()
    }

    fn stall_of_call(name: &str) -> LaunchStall {
        LaunchStall::Call(name.to_owned())
    }

    #[test]
    fn a_launch_held_up_by_a_full_queue_counts_as_no_wait() {
        for name in ["cuLaunchKernelEx", "cudaLaunchKernel_v7000", "cuGraphLaunch", "cuEventRecord"]
        {
            let calls = [(name, MIN_HELD_UP_NS), ("cuLaunchKernel", 5_000)];
            assert_eq!(by(&calls_record(&calls, MAX_QUEUED_COMMANDS + 1)), LaunchStall::Queue);
            // This record has so few commands that they fit into any queue, so the launch stalled
            // for another reason.
            assert_eq!(by(&calls_record(&calls, MAX_QUEUED_COMMANDS - 2)), LaunchStall::Unknown);
        }
    }

    #[test]
    fn a_wait_is_found_before_and_after_the_queue_is_full() {
        for name in [
            "cuStreamSynchronize",
            "cudaDeviceSynchronize_v3020",
            "cuEventSynchronize",
            "cuMemFree_v2",
            "cudaFree_v3020",
            "cuMemHostUnregister",
        ] {
            for kernels in [2, MAX_QUEUED_COMMANDS + 100] {
                let calls = [("cuLaunchKernel", 5_000), (name, MIN_HELD_UP_NS)];
                assert_eq!(by(&calls_record(&calls, kernels)), stall_of_call(name));
            }
        }
        // A full launch queue blocked the host although the GPU had little work left.
        for name in ["cuStreamSynchronize", "cuMemFree_v2", "cudaFree_v3020"] {
            let calls = [("cuLaunchKernel", MIN_HELD_UP_NS), (name, 5_000)];
            assert_eq!(by(&calls_record(&calls, 1500)), stall_of_call(name));
        }
        let calls = [("cuLaunchKernel", MIN_HELD_UP_NS), ("cuMemFreeAsync", 5_000)];
        assert_eq!(by(&calls_record(&calls, 1500)), LaunchStall::Queue);
        // A wait for an earlier launch, and one of a thread that launches nothing.
        let earlier = [("cuEventSynchronize", 5_000), ("cuMemcpyDtoD_v2", MIN_HELD_UP_NS)];
        assert_eq!(by(&calls_record(&earlier, 1500)), LaunchStall::Queue);
        let calls = [("cuLaunchKernel", MIN_HELD_UP_NS), ("cuStreamSynchronize", 5_000)];
        let mut other = calls_record(&calls, 1500);
        other.calls[1].thread = 2;
        assert_eq!(by(&other), LaunchStall::Queue);
    }

    #[test]
    fn copies_to_host_or_from_pageable_memory_count_as_waits() {
        const COPY_HOST_TO_DEVICE: u8 = 1;
        const COPY_DEVICE_TO_HOST: u8 = 2;
        const COPY_DEVICE_TO_DEVICE: u8 = 8;
        const PAGEABLE_MEMORY: u8 = 1;
        const PINNED_MEMORY: u8 = 2;
        const DEVICE_MEMORY: u8 = 3;
        let stall_of_copy = |name, took, [kind, source, target]: [u8; 3]| {
            let calls = [("cuLaunchKernel", MIN_HELD_UP_NS), (name, took)];
            let mut record = calls_record(&calls, 1500);
            let correlation = record.calls[1].correlation;
            record.copies.push(CopyRecord {
                kind,
                source,
                target,
                correlation,
                ..CopyRecord::default()
            });
            by(&record)
        };
        let to_host = [COPY_DEVICE_TO_HOST, DEVICE_MEMORY, PINNED_MEMORY];
        let to_pageable = [COPY_DEVICE_TO_HOST, DEVICE_MEMORY, PAGEABLE_MEMORY];
        let from_pageable = [COPY_HOST_TO_DEVICE, PAGEABLE_MEMORY, DEVICE_MEMORY];
        let (sync, asynchronous) = ("cuMemcpyDtoH_v2", "cuMemcpyDtoHAsync_v2");
        assert_eq!(stall_of_copy(sync, 5_000, to_host), stall_of_call(sync));
        assert_eq!(stall_of_copy(asynchronous, 5_000, to_pageable), stall_of_call(asynchronous));
        assert_eq!(stall_of_copy(asynchronous, MIN_HELD_UP_NS, to_host), LaunchStall::Queue);
        assert_eq!(
            stall_of_copy(
                "cuMemcpyAsync",
                MIN_HELD_UP_NS,
                [COPY_DEVICE_TO_DEVICE, DEVICE_MEMORY, DEVICE_MEMORY]
            ),
            LaunchStall::Queue
        );
        let upload = "cuMemcpyHtoDAsync_v2";
        assert_eq!(stall_of_copy(upload, MIN_HELD_UP_NS, from_pageable), stall_of_call(upload));
        assert_eq!(stall_of_copy(upload, 5_000, from_pageable), LaunchStall::Queue);
    }

    #[test]
    fn a_stall_without_a_slow_call_has_an_unknown_cause() {
        let calls = [("cuLaunchKernel", 5_000), ("cuStreamQuery", 5_000)];
        assert_eq!(by(&calls_record(&calls, MAX_QUEUED_COMMANDS + 100)), LaunchStall::Unknown);
        let lost = RecordedActivity { dropped: 1, ..calls_record(&calls, 2) };
        assert_eq!(find_host_stall(&lost, STREAM_HOLD_TIME), None);
    }
}
