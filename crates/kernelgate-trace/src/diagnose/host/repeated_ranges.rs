//! Ranges and marks that may be iterations, kept while ranges are read: the longest ones only, so
//! that a trace of any length takes no more memory.

use hashbrown::HashMap;

use crate::analyze::ranges::paths::{RangePathId, RangePathTree};
use crate::analyze::timeline::iterations::{self, IterationCandidate, IterationEvidence};
use crate::model::Trace;
use crate::model::interned_names::without_numbers_in_name;
use crate::model::packed_columns::PackedColumn;
use crate::read::RangeRow;

/// Ranges that are kept; of more the shorter half is dropped.
const MAX_KEPT_RANGES: usize = 1 << 16;
/// Largest number of ranges around a range that is kept.
const MAX_KEPT_DEPTH: u32 = 3;

/// Iterations of a process in time of the host.
#[derive(Debug, Clone)]
pub struct HostIterationFinder {
    /// The sign by which iterations were found: a range or a mark.
    pub sign: IterationEvidence,
    /// Start time of each iteration on the host, nanoseconds.
    pub starts: Vec<i64>,
    /// End of the last iteration in host time.
    pub end: i64,
}

#[derive(Debug, Clone, Copy)]
struct LongRange {
    path: RangePathId,
    thread: u32,
    depth: u32,
    start: i64,
    end: i64,
}

#[derive(Debug, Default)]
pub(in crate::diagnose) struct LongestRanges(Vec<LongRange>);

/// Candidates of one thread and pattern belong together.
type ThreadAndPattern = (u32, usize);

impl LongestRanges {
    /// The next range.
    pub fn add(&mut self, path: RangePathId, row: RangeRow, depth: u32) {
        if depth > MAX_KEPT_DEPTH {
            return;
        }
        if self.0.len() == MAX_KEPT_RANGES {
            let length = |of: &LongRange| std::cmp::Reverse(of.end - of.start);
            self.0.select_nth_unstable_by_key(MAX_KEPT_RANGES / 2, length);
            self.0.truncate(MAX_KEPT_RANGES / 2);
        }
        let RangeRow { start, end, thread, .. } = row;
        self.0.push(LongRange { path, thread, depth, start, end });
    }

    /// Finds the iterations of each process in host time. `launch_times` gives the times at which a
    /// process launched, in order.
    pub fn host_iterations(
        &self,
        trace: &Trace,
        paths: &RangePathTree,
        now_is: impl Fn(RangePathId) -> RangePathId,
        launch_times: impl Fn(u32) -> PackedColumn<i64>,
    ) -> Vec<Option<HostIterationFinder>> {
        let mut patterns = NamePatterns::default();
        let ranges: Vec<IterationCandidate<ThreadAndPattern>> = self
            .0
            .iter()
            .map(|of| {
                let name = trace.names.text(paths.name(now_is(of.path)));
                let key = (of.thread, patterns.number_of_name(name));
                IterationCandidate { key, depth: of.depth, start: of.start, end: of.end }
            })
            .collect();
        let marks = iteration_marks(trace, &mut patterns);
        let of_process = |process: u32| {
            let own = |of: &&IterationCandidate<ThreadAndPattern>| {
                trace.threads[of.key.0 as usize].process == process
            };
            let mut launches: Option<PackedColumn<i64>> = None;
            let mut among = |candidates: &[IterationCandidate<ThreadAndPattern>]| {
                let own: Vec<IterationCandidate<ThreadAndPattern>> =
                    candidates.iter().filter(own).copied().collect();
                if own.is_empty() {
                    return None;
                }
                let launches = launches.get_or_insert_with(|| launch_times(process));
                iterations::find_iteration_candidates(
                    &own,
                    |(_, pattern)| patterns.names[pattern].clone(),
                    launches,
                )
            };
            let by_range = among(&ranges)
                .map(|found| (found, IterationEvidence::Range as fn(String) -> IterationEvidence));
            let found = by_range.or_else(|| {
                Some((among(&marks)?, IterationEvidence::Mark as fn(String) -> IterationEvidence))
            });
            found.map(|(found, sign)| HostIterationFinder {
                sign: sign(patterns.names[found.key.1].clone()),
                starts: found.starts,
                end: found.end,
            })
        };
        (0u32..).take(trace.processes.len()).map(of_process).collect()
    }
}

/// An iteration lasts from a mark to the next mark of the same thread and pattern.
fn iteration_marks(
    trace: &Trace,
    patterns: &mut NamePatterns,
) -> Vec<IterationCandidate<ThreadAndPattern>> {
    let marks = &trace.marks;
    let mut rows: Vec<(ThreadAndPattern, i64)> = (0..marks.time.len())
        .map(|row| {
            let pattern = patterns.number_of_name(trace.names.text(marks.name[row]));
            ((marks.thread[row], pattern), marks.time[row])
        })
        .collect();
    rows.sort_unstable();
    let next = rows.windows(2).filter(|pair| pair[0].0 == pair[1].0 && pair[0].1 < pair[1].1);
    next.map(|pair| IterationCandidate {
        key: pair[0].0,
        depth: 0,
        start: pair[0].1,
        end: pair[1].1,
    })
    .collect()
}

/// Names without their numbers, each held once.
#[derive(Default)]
struct NamePatterns {
    names: Vec<String>,
    numbers: HashMap<String, usize>,
}

impl NamePatterns {
    fn number_of_name(&mut self, name: &str) -> usize {
        let new = self.names.len();
        let number = *self.numbers.entry(without_numbers_in_name(name)).or_insert(new);
        if number == new {
            self.names.push(without_numbers_in_name(name));
        }
        number
    }
}
