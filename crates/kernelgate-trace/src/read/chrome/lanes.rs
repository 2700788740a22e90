//! The process of each lane of operations: traces of several ranks in one file have several of
//! both.

use std::cmp::Reverse;

use hashbrown::HashMap;

use crate::model::Trace;
use crate::model::gpu::{OperationColumns, OperationPlace, PlaceId};

/// Processes of operations from here on are lanes: they are known when all calls are.
pub(super) const FIRST_LANE_PROCESS: u32 = 1 << 31;

/// How well a process fits a lane: operations that one of its calls may have launched, and the time
/// between those calls and the operations, negative.
type LaneFit = (usize, i64);

/// Calls with one correlation id that are compared.
const MAX_CALLS_WITH_ONE_ID: usize = 64;

/// The process of each lane: the one whose calls launched most of its operations; of several, the
/// one whose calls are much closer in time.
pub(super) fn process_of_each_lane(trace: &Trace, lanes: usize, busiest: u32) -> Vec<u32> {
    let calls = &trace.calls;
    let process_of = |call: usize| trace.threads[calls.thread[call] as usize].process;
    let mut processes: Vec<u32> = (0..calls.len()).map(process_of).collect();
    processes.sort_unstable();
    processes.dedup();
    if processes.len() < 2 {
        return vec![busiest; lanes];
    }
    let mut launches: HashMap<u32, Vec<(u32, i64)>> = HashMap::new();
    for call in (0..calls.len()).filter(|&call| calls.correlation[call] != 0) {
        let same = launches.entry(calls.correlation[call]).or_default();
        if same.len() < MAX_CALLS_WITH_ONE_ID {
            same.push((process_of(call), calls.start[call]));
        }
    }
    let mut fits: HashMap<(usize, u32), LaneFit> = HashMap::new();
    let mut add = |operations: &OperationColumns| {
        for row in 0..operations.len() {
            let process = trace.places[operations.place.at(row).0 as usize].process;
            let Some(lane) = process.checked_sub(FIRST_LANE_PROCESS) else { continue };
            let calls = launches.get(&operations.correlation.at(row));
            for &(process, start) in calls.into_iter().flatten() {
                let (count, near) = fits.entry((lane as usize, process)).or_default();
                *count += 1;
                let apart = operations.start.at(row).saturating_sub(start).saturating_abs();
                *near = near.saturating_sub(apart);
            }
        }
    };
    add(&trace.kernels.on_gpu);
    add(&trace.copies.on_gpu);
    add(&trace.sets.on_gpu);
    add(&trace.graphs.on_gpu);
    let owner = |lane: usize| {
        let fit = |process: u32| fits.get(&(lane, process)).copied();
        let most = processes.iter().filter_map(|&process| Some(fit(process)?.0)).max();
        let fitting = processes.iter().copied();
        let mut fitting: Vec<(i64, u32)> = fitting
            .filter_map(|process| Some((fit(process).filter(|of| Some(of.0) == most)?.1, process)))
            .collect();
        // Ranks with the same ids that ran at the same time keep their order.
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

/// Gives places that became equal one number.
pub(super) fn join_equal_places(trace: &mut Trace) {
    let mut numbers: HashMap<OperationPlace, PlaceId> = HashMap::new();
    let first: Vec<PlaceId> = (0u32..)
        .zip(&trace.places)
        .map(|(number, place)| *numbers.entry(*place).or_insert(PlaceId(number)))
        .collect();
    if numbers.len() == trace.places.len() {
        return;
    }
    let parts = [
        &mut trace.kernels.on_gpu,
        &mut trace.copies.on_gpu,
        &mut trace.sets.on_gpu,
        &mut trace.graphs.on_gpu,
        &mut trace.syncs.on_gpu,
    ];
    for part in parts {
        part.place = part.place.iter().map(|place| first[place.0 as usize]).collect();
    }
}
