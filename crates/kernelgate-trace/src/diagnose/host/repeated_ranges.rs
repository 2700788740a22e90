//! Keeps the longest ranges that may be iterations while a trace's ranges are read, in bounded
//! memory, and finds the host's iterations.

use hashbrown::HashMap;

use crate::analyze::ranges::paths::{RangePathId, RangePathTree};
use crate::analyze::timeline::iterations::{self, EvidenceOfIterations, IterationCandidate};
use crate::model::Trace;
use crate::model::interned_names::replace_digits_by_number_sign;
use crate::model::packed_columns::BitPackedColumn;
use crate::read::StreamedRangeRow;

/// Largest number of ranges that are kept; when the number is reached, the shorter half is dropped.
const MAX_KEPT_LONG_RANGES: usize = 1 << 16;
/// Largest number of enclosing ranges that a kept range may have.
const MAX_DEPTH_OF_KEPT_RANGE: u32 = 3;

/// Iterations of one process: start times on the host, and the evidence by which they were found.
#[derive(Debug, Clone)]
pub struct HostIterationsOfProcess {
    /// The evidence by which the iterations were found: ranges or marks of one name.
    pub evidence: EvidenceOfIterations,
    /// Start time of each iteration on the host, nanoseconds.
    pub iteration_starts_ns: Vec<i64>,
    /// End of the last iteration on the host, nanoseconds.
    pub last_iteration_end_ns: i64,
}

#[derive(Debug, Clone, Copy)]
struct LongNamedRange {
    path: RangePathId,
    thread_index: u32,
    depth: u32,
    start_ns: i64,
    end_ns: i64,
}

#[derive(Debug, Default)]
pub(in crate::diagnose) struct LongestRangesSoFar(Vec<LongNamedRange>);

/// Thread and number of a name pattern; candidates for iterations with equal keys form a group.
type ThreadAndNamePattern = (u32, usize);

impl LongestRangesSoFar {
    /// The next range.
    pub fn add_range_if_long(&mut self, path: RangePathId, row: StreamedRangeRow, depth: u32) {
        if depth > MAX_DEPTH_OF_KEPT_RANGE {
            return;
        }
        if self.0.len() == MAX_KEPT_LONG_RANGES {
            let length = |of: &LongNamedRange| std::cmp::Reverse(of.end_ns - of.start_ns);
            self.0.select_nth_unstable_by_key(MAX_KEPT_LONG_RANGES / 2, length);
            self.0.truncate(MAX_KEPT_LONG_RANGES / 2);
        }
        let StreamedRangeRow { start_ns: start, end_ns: end, thread_index, .. } = row;
        self.0.push(LongNamedRange { path, thread_index, depth, start_ns: start, end_ns: end });
    }

    /// Finds the iterations of each process on the host. `launch_times` returns the launch times of
    /// a process in ascending order.
    pub fn find_host_iterations_of_processes(
        &self,
        trace: &Trace,
        paths: &RangePathTree,
        now_is: impl Fn(RangePathId) -> RangePathId,
        launch_times: impl Fn(u32) -> BitPackedColumn<i64>,
    ) -> Vec<Option<HostIterationsOfProcess>> {
        let mut patterns = DistinctNamePatterns::default();
        let ranges: Vec<IterationCandidate<ThreadAndNamePattern>> = self
            .0
            .iter()
            .map(|of| {
                let name = trace.names.text_of_name(paths.last_name_of_path(now_is(of.path)));
                let key = (of.thread_index, patterns.index_of_name_pattern(name));
                IterationCandidate {
                    name_key: key,
                    enclosing_range_count: of.depth,
                    start_ns: of.start_ns,
                    end_ns: of.end_ns,
                }
            })
            .collect();
        let marks = iteration_candidates_between_marks(trace, &mut patterns);
        let of_process = |process: u32| {
            let own = |of: &&IterationCandidate<ThreadAndNamePattern>| {
                trace.threads[of.name_key.0 as usize].process_index == process
            };
            let mut launches: Option<BitPackedColumn<i64>> = None;
            let mut among = |candidates: &[IterationCandidate<ThreadAndNamePattern>]| {
                let own: Vec<IterationCandidate<ThreadAndNamePattern>> =
                    candidates.iter().filter(own).copied().collect();
                if own.is_empty() {
                    return None;
                }
                let launches = launches.get_or_insert_with(|| launch_times(process));
                iterations::find_iterations_among_candidates(
                    &own,
                    |(_, pattern)| patterns.name_patterns[pattern].clone(),
                    launches,
                )
            };
            let by_range = among(&ranges).map(|found| {
                (found, EvidenceOfIterations::RangesNamed as fn(String) -> EvidenceOfIterations)
            });
            let found = by_range.or_else(|| {
                Some((
                    among(&marks)?,
                    EvidenceOfIterations::MarksNamed as fn(String) -> EvidenceOfIterations,
                ))
            });
            found.map(|(found, sign)| HostIterationsOfProcess {
                evidence: sign(patterns.name_patterns[found.iteration_name_key.1].clone()),
                iteration_starts_ns: found.iteration_starts_ns,
                last_iteration_end_ns: found.last_iteration_end_ns,
            })
        };
        (0u32..).take(trace.processes.len()).map(of_process).collect()
    }
}

/// Returns candidates for iterations that last from one mark to the next mark of the same thread
/// and name pattern.
fn iteration_candidates_between_marks(
    trace: &Trace,
    patterns: &mut DistinctNamePatterns,
) -> Vec<IterationCandidate<ThreadAndNamePattern>> {
    let marks = &trace.host_marks;
    let mut rows: Vec<(ThreadAndNamePattern, i64)> = (0..marks.time_ns.len())
        .map(|row| {
            let pattern =
                patterns.index_of_name_pattern(trace.names.text_of_name(marks.mark_name[row]));
            ((marks.thread_index[row], pattern), marks.time_ns[row])
        })
        .collect();
    rows.sort_unstable();
    let next = rows.windows(2).filter(|pair| pair[0].0 == pair[1].0 && pair[0].1 < pair[1].1);
    next.map(|pair| IterationCandidate {
        name_key: pair[0].0,
        enclosing_range_count: 0,
        start_ns: pair[0].1,
        end_ns: pair[1].1,
    })
    .collect()
}

/// Distinct name patterns: names in which `#` replaces numbers.
#[derive(Default)]
struct DistinctNamePatterns {
    name_patterns: Vec<String>,
    index_by_name_pattern: HashMap<String, usize>,
}

impl DistinctNamePatterns {
    fn index_of_name_pattern(&mut self, name: &str) -> usize {
        let new = self.name_patterns.len();
        let number =
            *self.index_by_name_pattern.entry(replace_digits_by_number_sign(name)).or_insert(new);
        if number == new {
            self.name_patterns.push(replace_digits_by_number_sign(name));
        }
        number
    }
}
