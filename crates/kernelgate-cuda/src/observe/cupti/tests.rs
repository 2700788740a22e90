//! Tests that record a GPU's activity through CUPTI.

use std::time::Instant;

use super::api::{ANOTHER_CUPTI_CLIENT_STATUS, cupti_refusal_error};
use super::*;
use crate::Device;
use crate::driver::graph::ExecutableCudaGraph;
use crate::instruments::bandwidth::BandwidthKernelsAndBuffer;
use crate::observe::activity::GpuContextStreamIds;
use crate::observe::range::NamedRangeGuard;
use crate::testing::lock_first_gpu;

const TEST_COPY_BYTES: u64 = 64 << 20;

fn bandwidth_passes_for_test_copies(device: &std::sync::Arc<Device>) -> BandwidthKernelsAndBuffer {
    BandwidthKernelsAndBuffer::bandwidth_kernels_with_filled_buffer(
        device,
        TEST_COPY_BYTES as usize,
        &[1; 256],
    )
    .unwrap()
}

fn start_recorder_or_print_skip() -> Option<CuptiActivityRecorder> {
    let recorder =
        CuptiActivityRecorder::start_cupti_recording(CuptiRecordingExtent::AllActivityLists)
            .unwrap();
    if recorder.is_none() {
        eprintln!("skipped: CUPTI is missing");
    }
    recorder
}

/// Looks up the texts of name indices in a recorded activity.
fn texts_of_name_indices(
    activity: &CuptiRecordedActivity,
    of: impl IntoIterator<Item = u32>,
) -> Vec<&str> {
    of.into_iter().map(|name| activity.interned_names[name as usize].as_str()).collect()
}

#[test]
fn a_kernel_record_is_joined_with_its_launch_call_and_ranges() {
    let Some((device, _one)) = lock_first_gpu() else { return };
    let Some(recorder) = start_recorder_or_print_skip() else { return };
    let passes = bandwidth_passes_for_test_copies(&device);
    device.synchronize().unwrap();
    recorder.take_all_new_records().unwrap();
    {
        let _outer = NamedRangeGuard::open_named_range("outer");
        let _inner = NamedRangeGuard::open_named_range("inner");
        passes.enqueue_copy_kernel(TEST_COPY_BYTES).unwrap();
        device.synchronize().unwrap();
    }
    let activity = recorder.take_all_new_records().unwrap();
    assert_eq!((activity.kernels.len(), activity.dropped_records), (1, 0));
    let kernel = activity.kernels[0];
    assert!(kernel.start_ns > 0 && kernel.end_ns > kernel.start_ns, "{kernel:?}");
    assert_ne!(kernel.device_context_stream, GpuContextStreamIds::default());
    assert!(
        kernel.grid[0] > 0 && kernel.block[0] > 0 && kernel.registers_per_thread > 0,
        "{kernel:?}"
    );
    let call =
        activity.calls.iter().find(|call| call.correlation_id == kernel.correlation_id).unwrap();
    assert!(
        texts_of_name_indices(&activity, [call.name_index])[0].starts_with("cuLaunchKernel"),
        "{activity:?}"
    );
    assert_eq!(
        texts_of_name_indices(&activity, activity.ranges.iter().map(|range| range.name_index)),
        ["outer", "inner"]
    );
    for range in &activity.ranges {
        assert!(
            range.start_ns <= call.start_ns && call.end_ns <= range.end_ns,
            "{range:?} {call:?}"
        );
        assert_eq!(range.os_thread_id, call.os_thread_id);
    }
    assert!(
        call.start_ns < kernel.start_ns && kernel.end_ns <= activity.ranges[0].end_ns + 1_000_000
    );
    assert!(!activity.synchronizations.is_empty(), "{activity:?}");
    let later = recorder.record_clock_now_ns();
    passes.enqueue_copy_kernel(TEST_COPY_BYTES).unwrap();
    device.synchronize().unwrap();
    assert_eq!(recorder.take_new_records_since(later, later).unwrap().kernels.len(), 1);
    passes.enqueue_copy_kernel(TEST_COPY_BYTES).unwrap();
    device.synchronize().unwrap();
    assert_eq!(
        recorder.take_new_records_since(recorder.record_clock_now_ns(), 0).unwrap().kernels,
        []
    );
}

#[test]
fn graph_node_records_have_the_ranges_open_during_capture() {
    let Some((device, _one)) = lock_first_gpu() else { return };
    let Some(recorder) = start_recorder_or_print_skip() else { return };
    let passes = bandwidth_passes_for_test_copies(&device);
    let graph = ExecutableCudaGraph::capture_from_device_stream(&device, || {
        for name in ["first", "second"] {
            let _step = NamedRangeGuard::open_named_range("step");
            let _range = NamedRangeGuard::open_named_range(name);
            passes.enqueue_copy_kernel(TEST_COPY_BYTES)?;
        }
        passes.enqueue_read_kernel(TEST_COPY_BYTES)
    })
    .unwrap();
    device.synchronize().unwrap();
    recorder.take_all_new_records().unwrap();
    for _ in 0..2 {
        graph.launch_graph_on_stream().unwrap();
    }
    device.synchronize().unwrap();
    let activity = recorder.take_all_new_records().unwrap();
    assert_eq!(activity.kernels.len(), 6, "{activity:?}");
    let ranges = |node: u64| {
        let node = activity.graph_nodes.iter().find(|known| known.graph_node_id == node);
        node.map_or(Vec::new(), |node| {
            texts_of_name_indices(&activity, node.range_name_indices.iter().copied())
        })
    };
    let found: Vec<Vec<&str>> =
        activity.kernels.iter().map(|kernel| ranges(kernel.graph_node_id)).collect();
    let once = [vec!["step", "first"], vec!["step", "second"], vec![]];
    assert_eq!(found, [once.clone(), once].concat());
    assert!(activity.kernels.iter().all(|kernel| kernel.graph_node_id != 0));
}

#[test]
fn allocations_and_frees_of_device_memory_are_recorded() {
    let Some((device, _one)) = lock_first_gpu() else { return };
    let Some(recorder) = start_recorder_or_print_skip() else { return };
    let begun = recorder.record_clock_now_ns();
    let buffer = device.allocate(3 << 20).unwrap();
    let address = buffer.device_address();
    device.synchronize().unwrap();
    let later = recorder.record_clock_now_ns();
    drop(buffer);
    device.synchronize().unwrap();
    let allocations = recorder.take_new_records_since(later, begun).unwrap().device_memory_changes;
    let of_it: Vec<i64> = allocations
        .iter()
        .filter(|record| record.allocation_address == address)
        .map(|record| record.memory_change_bytes.signum())
        .collect();
    assert_eq!(of_it, [1, -1], "{allocations:?}");
    assert!(
        allocations.iter().any(|record| record.memory_change_bytes >= 3 << 20),
        "{allocations:?}"
    );
}

#[test]
fn a_second_cupti_client_is_refused_and_the_first_goes_on() {
    let Some((device, _one)) = lock_first_gpu() else { return };
    let Some(recorder) = start_recorder_or_print_skip() else { return };
    let refused =
        CuptiActivityRecorder::start_cupti_recording(CuptiRecordingExtent::AllActivityLists)
            .err()
            .unwrap();
    assert_eq!(refused, cupti_refusal_error(ANOTHER_CUPTI_CLIENT_STATUS, "record", ""));
    let passes = bandwidth_passes_for_test_copies(&device);
    device.synchronize().unwrap();
    recorder.take_all_new_records().unwrap();
    passes.enqueue_copy_kernel(TEST_COPY_BYTES).unwrap();
    device.synchronize().unwrap();
    assert_eq!(recorder.take_all_new_records().unwrap().kernels.len(), 1);
}

/// Prints the host time that CUPTI recording adds to a launch; asserts only that no record is lost.
#[test]
fn no_cupti_record_of_20000_launches_is_lost() {
    const LAUNCHES_WITHOUT_LOST_RECORDS: usize = 20_000;
    let Some((device, _one)) = lock_first_gpu() else { return };
    let passes = bandwidth_passes_for_test_copies(&device);
    let fastest_ns = || {
        let mut fastest = f64::INFINITY;
        for _ in 0..5 {
            device.synchronize().unwrap();
            let clock = Instant::now();
            // The test enqueues only 400 copies between two synchronizations, so that the stream's
            // queue is never full.
            (0..400).for_each(|_| passes.enqueue_copy_kernel(4096).unwrap());
            fastest = fastest.min(clock.elapsed().as_nanos() as f64 / 400.0);
        }
        device.synchronize().unwrap();
        fastest
    };
    let without = fastest_ns();
    let Some(recorder) = start_recorder_or_print_skip() else { return };
    let with = fastest_ns();
    recorder.take_all_new_records().unwrap();
    (0..LAUNCHES_WITHOUT_LOST_RECORDS).for_each(|_| passes.enqueue_copy_kernel(4096).unwrap());
    device.synchronize().unwrap();
    let activity = recorder.take_all_new_records().unwrap();
    assert_eq!(
        (activity.kernels.len(), activity.dropped_records),
        (LAUNCHES_WITHOUT_LOST_RECORDS, 0)
    );
    assert!(activity.calls.len() >= LAUNCHES_WITHOUT_LOST_RECORDS);
    eprintln!("a launch takes {without:.0} ns, recorded {with:.0} ns");
}

/// Prints the time to attach CUPTI and the launch time after detaching; asserts that CUPTI can
/// attach again.
#[test]
fn cupti_can_be_detached_and_attached_again() {
    let Some((device, _one)) = lock_first_gpu() else { return };
    let passes = bandwidth_passes_for_test_copies(&device);
    let fastest_ns = || {
        let mut fastest = f64::INFINITY;
        for _ in 0..5 {
            let clock = Instant::now();
            (0..400).for_each(|_| passes.enqueue_copy_kernel(4096).unwrap());
            fastest = fastest.min(clock.elapsed().as_nanos() as f64 / 400.0);
            device.synchronize().unwrap();
        }
        fastest
    };
    let before_ns = fastest_ns();
    for _ in 0..3 {
        let clock = Instant::now();
        let Some(recorder) =
            CuptiActivityRecorder::start_cupti_recording(CuptiRecordingExtent::GpuOperations)
                .unwrap()
        else {
            eprintln!("skipped: CUPTI is missing");
            return;
        };
        let started = clock.elapsed();
        passes.enqueue_copy_kernel(TEST_COPY_BYTES).unwrap();
        device.synchronize_all_streams().unwrap();
        let kernels = recorder.take_all_new_records().unwrap().kernels.len();
        assert_eq!(kernels, 1);
        let clock = Instant::now();
        recorder.end_recording_and_detach_cupti().unwrap();
        let (ended, after_ns) = (clock.elapsed(), fastest_ns());
        eprintln!(
            "CUPTI began in {started:?} and left in {ended:?}; a launch took {before_ns:.0} ns on \
             the host before, {after_ns:.0} ns after"
        );
    }
}
