//! Tests of CUPTI recordings on a GPU.

use std::time::Instant;

use super::api::{ANOTHER_CLIENT_STATUS, cupti_refusal};
use super::*;
use crate::Device;
use crate::driver::graph::ExecutableGraph;
use crate::instruments::bandwidth::BandwidthPasses;
use crate::observe::activity::StreamId;
use crate::observe::range::RangeGuard;
use crate::testing::lock_first_gpu;

const COPIED_TEST_BYTES: u64 = 64 << 20;

fn bandwidth_passes(device: &std::sync::Arc<Device>) -> BandwidthPasses {
    BandwidthPasses::new(device, COPIED_TEST_BYTES as usize, &[1; 256]).unwrap()
}

fn recorder_or_skip() -> Option<ActivityRecorder> {
    let recorder = ActivityRecorder::start(RecordingExtent::Everything).unwrap();
    if recorder.is_none() {
        eprintln!("skipped: CUPTI is missing");
    }
    recorder
}

/// Names of the activity's records with the given name indices.
fn record_names(activity: &RecordedActivity, of: impl IntoIterator<Item = u32>) -> Vec<&str> {
    of.into_iter().map(|name| activity.names[name as usize].as_str()).collect()
}

#[test]
fn a_recorded_launch_is_joined_with_its_call_range_and_kernel() {
    let Some((device, _one)) = lock_first_gpu() else { return };
    let Some(recorder) = recorder_or_skip() else { return };
    let passes = bandwidth_passes(&device);
    device.synchronize().unwrap();
    recorder.take_records().unwrap();
    {
        let _outer = RangeGuard::new("outer");
        let _inner = RangeGuard::new("inner");
        passes.enqueue_copy(COPIED_TEST_BYTES).unwrap();
        device.synchronize().unwrap();
    }
    let activity = recorder.take_records().unwrap();
    assert_eq!((activity.kernels.len(), activity.dropped), (1, 0));
    let kernel = activity.kernels[0];
    assert!(kernel.start > 0 && kernel.end > kernel.start, "{kernel:?}");
    assert_ne!(kernel.on, StreamId::default());
    assert!(kernel.grid[0] > 0 && kernel.block[0] > 0 && kernel.registers > 0, "{kernel:?}");
    let call = activity.calls.iter().find(|call| call.correlation == kernel.correlation).unwrap();
    assert!(record_names(&activity, [call.name])[0].starts_with("cuLaunchKernel"), "{activity:?}");
    assert_eq!(
        record_names(&activity, activity.ranges.iter().map(|range| range.name)),
        ["outer", "inner"]
    );
    for range in &activity.ranges {
        assert!(range.start <= call.start && call.end <= range.end, "{range:?} {call:?}");
        assert_eq!(range.thread, call.thread);
    }
    assert!(call.start < kernel.start && kernel.end <= activity.ranges[0].end + 1_000_000);
    assert!(!activity.waits.is_empty(), "{activity:?}");
    let later = recorder.clock_ns();
    passes.enqueue_copy(COPIED_TEST_BYTES).unwrap();
    device.synchronize().unwrap();
    assert_eq!(recorder.take_records_since(later, later).unwrap().kernels.len(), 1);
    passes.enqueue_copy(COPIED_TEST_BYTES).unwrap();
    device.synchronize().unwrap();
    assert_eq!(recorder.take_records_since(recorder.clock_ns(), 0).unwrap().kernels, []);
}

#[test]
fn graph_nodes_belong_to_the_ranges_open_during_capture() {
    let Some((device, _one)) = lock_first_gpu() else { return };
    let Some(recorder) = recorder_or_skip() else { return };
    let passes = bandwidth_passes(&device);
    let graph = ExecutableGraph::capture_graph(&device, || {
        for name in ["first", "second"] {
            let _step = RangeGuard::new("step");
            let _range = RangeGuard::new(name);
            passes.enqueue_copy(COPIED_TEST_BYTES)?;
        }
        passes.enqueue_read(COPIED_TEST_BYTES)
    })
    .unwrap();
    device.synchronize().unwrap();
    recorder.take_records().unwrap();
    for _ in 0..2 {
        graph.launch().unwrap();
    }
    device.synchronize().unwrap();
    let activity = recorder.take_records().unwrap();
    assert_eq!(activity.kernels.len(), 6, "{activity:?}");
    let ranges = |node: u64| {
        let node = activity.graph_nodes.iter().find(|known| known.id == node);
        node.map_or(Vec::new(), |node| record_names(&activity, node.ranges.iter().copied()))
    };
    let found: Vec<Vec<&str>> =
        activity.kernels.iter().map(|kernel| ranges(kernel.graph_node)).collect();
    let once = [vec!["step", "first"], vec!["step", "second"], vec![]];
    assert_eq!(found, [once.clone(), once].concat());
    assert!(activity.kernels.iter().all(|kernel| kernel.graph_node != 0));
}

#[test]
fn allocations_and_frees_of_device_memory_are_recorded() {
    let Some((device, _one)) = lock_first_gpu() else { return };
    let Some(recorder) = recorder_or_skip() else { return };
    let begun = recorder.clock_ns();
    let buffer = device.allocate(3 << 20).unwrap();
    let address = buffer.address();
    device.synchronize().unwrap();
    let later = recorder.clock_ns();
    drop(buffer);
    device.synchronize().unwrap();
    let allocations = recorder.take_records_since(later, begun).unwrap().allocations;
    let of_it: Vec<i64> = allocations
        .iter()
        .filter(|record| record.address == address)
        .map(|record| record.bytes.signum())
        .collect();
    assert_eq!(of_it, [1, -1], "{allocations:?}");
    assert!(allocations.iter().any(|record| record.bytes >= 3 << 20), "{allocations:?}");
}

#[test]
fn a_second_cupti_client_is_refused_and_the_first_continues() {
    let Some((device, _one)) = lock_first_gpu() else { return };
    let Some(recorder) = recorder_or_skip() else { return };
    let refused = ActivityRecorder::start(RecordingExtent::Everything).err().unwrap();
    assert_eq!(refused, cupti_refusal(ANOTHER_CLIENT_STATUS, "record", ""));
    let passes = bandwidth_passes(&device);
    device.synchronize().unwrap();
    recorder.take_records().unwrap();
    passes.enqueue_copy(COPIED_TEST_BYTES).unwrap();
    device.synchronize().unwrap();
    assert_eq!(recorder.take_records().unwrap().kernels.len(), 1);
}

/// Prints the time that recording adds to a launch; asserts only that no record is lost.
#[test]
fn no_cupti_record_of_many_launches_is_lost() {
    const BURST_TEST_LAUNCHES: usize = 20_000;
    let Some((device, _one)) = lock_first_gpu() else { return };
    let passes = bandwidth_passes(&device);
    let fastest_ns = || {
        let mut fastest = f64::INFINITY;
        for _ in 0..5 {
            device.synchronize().unwrap();
            let clock = Instant::now();
            // The test launches so few copies that the queue is never full.
            (0..400).for_each(|_| passes.enqueue_copy(4096).unwrap());
            fastest = fastest.min(clock.elapsed().as_nanos() as f64 / 400.0);
        }
        device.synchronize().unwrap();
        fastest
    };
    let without = fastest_ns();
    let Some(recorder) = recorder_or_skip() else { return };
    let with = fastest_ns();
    recorder.take_records().unwrap();
    (0..BURST_TEST_LAUNCHES).for_each(|_| passes.enqueue_copy(4096).unwrap());
    device.synchronize().unwrap();
    let activity = recorder.take_records().unwrap();
    assert_eq!((activity.kernels.len(), activity.dropped), (BURST_TEST_LAUNCHES, 0));
    assert!(activity.calls.len() >= BURST_TEST_LAUNCHES);
    eprintln!("a launch takes {without:.0} ns, recorded {with:.0} ns");
}

/// Prints the time of attaching and of a launch after it; asserts that CUPTI can attach again.
#[test]
fn cupti_can_be_detached_and_attached_again() {
    let Some((device, _one)) = lock_first_gpu() else { return };
    let passes = bandwidth_passes(&device);
    let fastest_ns = || {
        let mut fastest = f64::INFINITY;
        for _ in 0..5 {
            let clock = Instant::now();
            (0..400).for_each(|_| passes.enqueue_copy(4096).unwrap());
            fastest = fastest.min(clock.elapsed().as_nanos() as f64 / 400.0);
            device.synchronize().unwrap();
        }
        fastest
    };
    let before_ns = fastest_ns();
    for _ in 0..3 {
        let clock = Instant::now();
        let Some(recorder) = ActivityRecorder::start(RecordingExtent::Operations).unwrap() else {
            eprintln!("skipped: CUPTI is missing");
            return;
        };
        let started = clock.elapsed();
        passes.enqueue_copy(COPIED_TEST_BYTES).unwrap();
        device.synchronize_context().unwrap();
        let kernels = recorder.take_records().unwrap().kernels.len();
        assert_eq!(kernels, 1);
        let clock = Instant::now();
        recorder.detach_cupti().unwrap();
        let (ended, after_ns) = (clock.elapsed(), fastest_ns());
        eprintln!(
            "CUPTI began in {started:?} and left in {ended:?}; a launch took {before_ns:.0} ns on \
             the host before, {after_ns:.0} ns after"
        );
    }
}
