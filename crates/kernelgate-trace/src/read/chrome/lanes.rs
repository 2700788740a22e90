//! Finds the host process that launched the GPU operations of each GPU process id, for Chrome
//! traces of several ranks in one file.

use std::cmp::Reverse;

use hashbrown::HashMap;

use crate::model::Trace;
use crate::model::gpu::{GpuOperationColumns, OperationStreamIndex, ProcessDeviceContextAndStream};

/// Process numbers from here on stand for the pid fields of GPU operations, until all launch calls
/// are read and show the real process.
pub(super) const FIRST_PLACEHOLDER_PROCESS: u32 = 1 << 31;

/// How well a host process fits a GPU pid: the number of operations that its calls may have
/// launched, and the negated sum of time distances.
type MatchedOperationsAndNegatedDistance = (usize, i64);

/// Maximum number of launch calls with the same correlation id that are compared.
const MAX_CALLS_PER_CORRELATION_ID: usize = 64;

/// For each GPU pid, the host process whose calls launched most of its operations; if several are
/// equal, the one whose calls are nearest in time.
pub(super) fn host_process_of_each_gpu_pid(trace: &Trace, lanes: usize, busiest: u32) -> Vec<u32> {
    let calls = &trace.calls;
    let process_of = |call: usize| trace.threads[calls.thread_index[call] as usize].process_index;
    let mut processes: Vec<u32> = (0..calls.call_count()).map(process_of).collect();
    processes.sort_unstable();
    processes.dedup();
    if processes.len() < 2 {
        return vec![busiest; lanes];
    }
    let mut launches: HashMap<u32, Vec<(u32, i64)>> = HashMap::new();
    for call in (0..calls.call_count()).filter(|&call| calls.correlation[call] != 0) {
        let same = launches.entry(calls.correlation[call]).or_default();
        if same.len() < MAX_CALLS_PER_CORRELATION_ID {
            same.push((process_of(call), calls.start_ns[call]));
        }
    }
    let mut fits: HashMap<(usize, u32), MatchedOperationsAndNegatedDistance> = HashMap::new();
    let mut add = |operations: &GpuOperationColumns| {
        for row in 0..operations.operation_count() {
            let process = trace.places[operations.place.at(row).0 as usize].process_index;
            let Some(lane) = process.checked_sub(FIRST_PLACEHOLDER_PROCESS) else { continue };
            let calls = launches.get(&operations.correlation.at(row));
            for &(process, start) in calls.into_iter().flatten() {
                let (count, near) = fits.entry((lane as usize, process)).or_default();
                *count += 1;
                let apart = operations.start_ns.at(row).saturating_sub(start).saturating_abs();
                *near = near.saturating_sub(apart);
            }
        }
    };
    add(&trace.kernels.on_gpu);
    add(&trace.copies.on_gpu);
    add(&trace.memsets.on_gpu);
    add(&trace.graphs.on_gpu);
    let owner = |lane: usize| {
        let fit = |process: u32| fits.get(&(lane, process)).copied();
        let most = processes.iter().filter_map(|&process| Some(fit(process)?.0)).max();
        let fitting = processes.iter().copied();
        let mut fitting: Vec<(i64, u32)> = fitting
            .filter_map(|process| Some((fit(process).filter(|of| Some(of.0) == most)?.1, process)))
            .collect();
        // If ranks have equal correlation ids and ran at the same time, the order of GPU pids and
        // of processes decides.
        fitting.sort_by_key(|&(near, _)| Reverse(near));
        match fitting[..] {
            [] => busiest,
            [(nearest, _), (next, _), ..] if nearest < next / 2 && fitting.len() == lanes => {
                fitting.sort_by_key(|&(_, process)| process);
                fitting[lane].1
            }
            [(_, process), ..] => process,
        }
    };
    (0..lanes).map(owner).collect()
}

/// Merges places (process, device, context, stream) that became equal when placeholder processes
/// were replaced.
pub(super) fn merge_equal_places(trace: &mut Trace) {
    let mut numbers: HashMap<ProcessDeviceContextAndStream, OperationStreamIndex> = HashMap::new();
    let first: Vec<OperationStreamIndex> = (0u32..)
        .zip(&trace.places)
        .map(|(number, place)| *numbers.entry(*place).or_insert(OperationStreamIndex(number)))
        .collect();
    if numbers.len() == trace.places.len() {
        return;
    }
    let parts = [
        &mut trace.kernels.on_gpu,
        &mut trace.copies.on_gpu,
        &mut trace.memsets.on_gpu,
        &mut trace.graphs.on_gpu,
        &mut trace.synchronisation_waits.on_gpu,
    ];
    for part in parts {
        part.place = part.place.iter_decoded_rows().map(|place| first[place.0 as usize]).collect();
    }
}
