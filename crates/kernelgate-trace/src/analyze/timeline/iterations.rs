//! Finds the iterations of a traced run by ranges, marks or repeating kernels; on the GPU an
//! iteration starts where its first operation starts. This module does not decide whether an
//! iteration takes too long.

use hashbrown::HashMap;

use crate::analyze::operations::{AllGpuOperations, GpuOperationId, GpuOperationKind};
use crate::analyze::time_order::OperationsInOrder;
use crate::model::Trace;
use crate::model::packed_columns::BitPackedColumn;

/// Fewest iterations.
const MIN_ITERATIONS_OF_A_RUN: usize = 3;
/// Words that show that NVTX ranges whose names contain them are iterations.
const ITERATION_NAME_WORDS: &[&str] = &["profilerstep", "step", "iter", "batch"];
/// Ranges without a word for iterations must fill this share of the time from the first to the last
/// of them, and contain this share of the launches.
const MIN_SHARE_COVERED_BY_ITERATIONS: f64 = 0.5;
/// Smallest share of the iterations whose number of launched operations is within a quarter of the
/// median.
const MIN_SHARE_OF_REGULAR_ITERATIONS: f64 = 0.7;
/// Largest number of operation names that are tried as the first operation of an iteration.
const MAX_FIRST_OPERATION_CANDIDATES: usize = 24;
/// Largest number of operations that are compared to test one candidate for the first operation of
/// an iteration.
const MAX_OPERATIONS_COMPARED_PER_CANDIDATE: usize = 200_000;
/// Smallest share of an iteration's operations that the next iteration must repeat.
const MIN_REPEATED_SHARE_OF_ITERATION: f64 = 0.9;

/// The kind of evidence by which the iterations of a run were found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EvidenceOfIterations {
    /// Iterations are NVTX ranges of this name, in which `#` stands for a number.
    RangesNamed(String),
    /// Iterations begin at NVTX marks of this name, in which `#` stands for a number.
    MarksNamed(String),
    /// Iterations begin with an operation of this name, which occurs once in each iteration.
    RepeatedOperationNamed(String),
}

impl EvidenceOfIterations {
    /// Returns the printed text about the evidence by which iterations were found.
    pub fn printed_iteration_evidence(&self) -> String {
        match self {
            Self::RangesNamed(name) => format!("range {name}"),
            Self::MarksNamed(name) => format!("mark {name}"),
            Self::RepeatedOperationNamed(name) => format!("repetition of {name}"),
        }
    }
}

/// A candidate for an iteration of the run: an NVTX range, or the time from one NVTX mark to the
/// next.
#[derive(Debug, Clone, Copy)]
pub struct IterationCandidate<K> {
    /// Key of the candidate's name; candidates with equal keys form one group.
    pub name_key: K,
    /// Number of NVTX ranges that enclose the candidate.
    pub enclosing_range_count: u32,
    /// Start of the candidate on the host, nanoseconds.
    pub start_ns: i64,
    /// Exclusive end of the candidate: the first nanosecond after its last one.
    pub end_ns: i64,
}

/// Start times of a process's iterations on the host, and the end of the last iteration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IterationStartsOnHost<K> {
    /// Key of the name of the ranges or marks that are the iterations.
    pub iteration_name_key: K,
    /// Start time of each iteration on the host, nanoseconds.
    pub iteration_starts_ns: Vec<i64>,
    /// End of the process's last iteration on the host, nanoseconds.
    pub last_iteration_end_ns: i64,
}

/// Finds the group of candidates that are iterations: at least three that do not overlap, fill most
/// of the time, and launch about equally many operations each. `launches` are the times of all
/// launch calls of the process, in ascending order.
pub fn find_iterations_among_candidates<K: Copy + Eq + std::hash::Hash + Ord>(
    candidates: &[IterationCandidate<K>],
    name: impl Fn(K) -> String,
    launches: &BitPackedColumn<i64>,
) -> Option<IterationStartsOnHost<K>> {
    let mut groups: HashMap<K, Vec<IterationCandidate<K>>> = HashMap::new();
    for candidate in candidates {
        groups.entry(candidate.name_key).or_default().push(*candidate);
    }
    let mut ranked: Vec<IterationCandidatesOfOneKey<K>> = groups
        .into_iter()
        .filter(|(_, group)| group.len() >= MIN_ITERATIONS_OF_A_RUN)
        .filter_map(|(key, mut candidates)| {
            candidates.sort_by_key(|of| (of.start_ns, of.end_ns));
            let name = name(key).to_ascii_lowercase();
            let named = ITERATION_NAME_WORDS.iter().any(|word| name.contains(word));
            // A name with `::` names a framework operator, and a framework operator is not an
            // iteration.
            (named || !name.contains("::")).then(|| IterationCandidatesOfOneKey {
                candidate_key: key,
                name_contains_iteration_word: named,
                enclosing_range_count: candidates
                    .iter()
                    .map(|of| of.enclosing_range_count)
                    .min()
                    .unwrap_or(0),
                candidates_total_ns: candidates.iter().map(|of| of.end_ns - of.start_ns).sum(),
                candidates,
            })
        })
        .collect();
    ranked.sort_by_key(|of| {
        (
            !of.name_contains_iteration_word,
            of.enclosing_range_count,
            -of.candidates_total_ns,
            of.candidate_key,
        )
    });
    ranked.into_iter().find_map(|group| {
        let candidates = &group.candidates;
        let overlap = candidates.windows(2).any(|pair| pair[1].start_ns < pair[0].end_ns);
        let (first, last) = (candidates.first()?.start_ns, candidates.last()?.end_ns);
        // Numbered layers of one run follow each other like iterations, but contain only a part of
        // the run's launches.
        let inside = launches.first_row_that_fails_condition(|launch| launch < last)
            - launches.first_row_that_fails_condition(|launch| launch < first);
        #[allow(clippy::cast_precision_loss)]
        let covered = group.name_contains_iteration_word
            || (group.candidates_total_ns as f64
                >= MIN_SHARE_COVERED_BY_ITERATIONS * (last - first) as f64
                && inside as f64 >= MIN_SHARE_COVERED_BY_ITERATIONS * launches.row_count() as f64);
        let starts: Vec<i64> = candidates.iter().map(|of| of.start_ns).collect();
        (!overlap && covered && do_iterations_launch_about_equally_many(&starts, last, launches))
            .then_some(IterationStartsOnHost {
                iteration_name_key: group.candidate_key,
                iteration_starts_ns: starts,
                last_iteration_end_ns: last,
            })
    })
}

/// Candidates for iterations whose names have one key.
struct IterationCandidatesOfOneKey<K> {
    candidate_key: K,
    /// Whether the name of the ranges or marks contains a word for iterations.
    name_contains_iteration_word: bool,
    enclosing_range_count: u32,
    candidates_total_ns: i64,
    candidates: Vec<IterationCandidate<K>>,
}

/// Returns whether most iterations launch about the median number of operations, and the median is
/// not zero.
fn do_iterations_launch_about_equally_many(
    starts: &[i64],
    end: i64,
    launches: &BitPackedColumn<i64>,
) -> bool {
    let at = |time: i64| launches.first_row_that_fails_condition(|launch| launch < time);
    let bounds: Vec<usize> = starts.iter().copied().chain([end]).map(at).collect();
    let counts: Vec<usize> = bounds.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let mut sorted = counts.clone();
    sorted.sort_unstable();
    let median = sorted[sorted.len() / 2];
    let near = counts.iter().filter(|count| count.abs_diff(median) * 4 <= median).count();
    #[allow(clippy::cast_precision_loss)]
    let share = near as f64 / counts.len() as f64;
    median > 0 && share >= MIN_SHARE_OF_REGULAR_ITERATIONS
}

/// Returns the start times of the host's iterations on a GPU: `operations` gives the launch time
/// and the start time of each operation on the GPU, in any order. The last returned time is the end
/// of the last iteration; an iteration without operations has the same start as the next.
pub fn start_times_of_iterations_on_gpu(
    starts: &[i64],
    end: i64,
    device_end: i64,
    operations: impl Iterator<Item = (i64, i64)>,
) -> Vec<i64> {
    let mut cuts = vec![device_end; starts.len() + 1];
    for (launch, start) in operations {
        let index = match launch >= end {
            true => starts.len(),
            false => match starts.partition_point(|&first| first <= launch) {
                0 => continue,
                after => after - 1,
            },
        };
        cuts[index] = cuts[index].min(start);
    }
    for index in (0..starts.len()).rev() {
        cuts[index] = cuts[index].min(cuts[index + 1]);
    }
    cuts
}

/// Returns a number that is equal for all operations of one kind and name.
fn key_of_operation_kind_and_name(
    trace: &Trace,
    all: &AllGpuOperations<'_>,
    id: GpuOperationId,
) -> u64 {
    let (kind, row) = all.kind_and_table_row(id);
    let name = match kind {
        GpuOperationKind::Kernel => trace.kernels.function_index.at(row),
        GpuOperationKind::Copy => trace.copies.direction_label[row].0,
        GpuOperationKind::Memset => 0,
        GpuOperationKind::CudaGraphLaunch => trace.graphs.executable_graph_id[row],
    };
    (kind as u64) << 32 | u64::from(name)
}

/// Returns the operations of a GPU, all of one name and in order of start, with each of which a
/// repetition of nearly the same operations begins; `None` without three repetitions.
pub fn first_operations_of_repeated_sequences(
    trace: &Trace,
    all: &AllGpuOperations<'_>,
    operations: &OperationsInOrder,
) -> Option<Vec<GpuOperationId>> {
    let mut numbers: HashMap<u64, u32> = HashMap::new();
    let mut sequence: BitPackedColumn<u32> = BitPackedColumn::default();
    for id in operations.iter() {
        let new = u32::try_from(numbers.len()).expect("fewer than 2^32 names");
        sequence.push_row(
            *numbers.entry(key_of_operation_kind_and_name(trace, all, id)).or_insert(new),
        );
    }
    let names = numbers.len();
    let mut count = vec![0usize; names];
    sequence.iter_decoded_rows().for_each(|name| count[name as usize] += 1);
    // One name is tried for each number of occurrences, rare names first, so that the longest
    // period is found first.
    let mut anchors: Vec<(usize, u32)> = (0u32..)
        .zip(&count)
        .filter(|&(_, &count)| count >= MIN_ITERATIONS_OF_A_RUN && count * 2 <= operations.len())
        .map(|(name, &count)| (count, name))
        .collect();
    anchors.sort_unstable();
    anchors.dedup_by_key(|&mut (count, _)| count);
    anchors.truncate(MAX_FIRST_OPERATION_CANDIDATES);
    let scored: Vec<(f64, u32)> = anchors
        .iter()
        .map(|&(_, name)| (share_repeated_after_next_anchor(&sequence, names, name), name))
        .collect();
    let best = scored.iter().map(|&(score, _)| score).fold(0.0, f64::max);
    if best < MIN_REPEATED_SHARE_OF_ITERATION {
        return None;
    }
    // If several periods have about the best score, the shortest is chosen.
    let &(_, anchor) = scored.iter().rev().find(|&&(score, _)| score >= best - 0.01)?;
    let named = sequence.iter_decoded_rows().zip(operations.iter());
    Some(named.filter(|&(name, _)| name == anchor).map(|(_, id)| id).collect())
}

/// Returns the share of the operations between two occurrences of the `anchor` name that occur
/// again before its next occurrence; 0 if the occurrences span too little.
#[allow(clippy::cast_precision_loss)]
fn share_repeated_after_next_anchor(
    sequence: &BitPackedColumn<u32>,
    names: usize,
    anchor: u32,
) -> f64 {
    let mut at = (0..sequence.row_count()).filter(|&index| sequence.at(index) == anchor);
    let last = sequence.iter_decoded_rows().rposition(|name| name == anchor);
    let (Some(first), Some(last), Some(mut start)) = (at.next(), last, at.next()) else {
        return 0.0;
    };
    let (mut same, mut all, mut bag) = (0usize, 0usize, vec![0i32; names]);
    let mut before = first..start;
    for end in at {
        let pair = [before, start..end];
        (before, start) = (pair[1].clone(), end);
        let name = |index: usize| sequence.at(index) as usize;
        pair[0].clone().for_each(|index| bag[name(index)] += 1);
        for index in pair[1].clone() {
            let left = &mut bag[name(index)];
            same += usize::from(*left > 0);
            *left -= 1;
        }
        pair.iter().cloned().flatten().for_each(|index| bag[name(index)] = 0);
        all += pair[0].len().max(pair[1].len());
        if all > MAX_OPERATIONS_COMPARED_PER_CANDIDATE {
            break;
        }
    }
    let spanned = (last - first) as f64 / sequence.row_count() as f64;
    // The occurrences of the anchor name must span at least half of the operations.
    if spanned < 0.5 { 0.0 } else { same as f64 / all.max(1) as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates_of_one_key_from_spans(
        key: u32,
        depth: u32,
        spans: &[(i64, i64)],
    ) -> Vec<IterationCandidate<u32>> {
        spans
            .iter()
            .map(|&(start, end)| IterationCandidate {
                name_key: key,
                enclosing_range_count: depth,
                start_ns: start,
                end_ns: end,
            })
            .collect()
    }

    #[test]
    fn the_outermost_regular_ranges_are_taken_as_iterations() {
        let launches: BitPackedColumn<i64> = (0..300).collect();
        let steps: Vec<(i64, i64)> = (0..3).map(|i| (i * 100, i * 100 + 95)).collect();
        let layers: Vec<(i64, i64)> = (0..30).map(|i| (i * 10, i * 10 + 9)).collect();
        let mut all = candidates_of_one_key_from_spans(1, 1, &layers);
        all.extend(candidates_of_one_key_from_spans(0, 0, &steps));
        let name = |key| ["run_#", "layer_#"][key as usize].to_owned();
        let found = find_iterations_among_candidates(&all, name, &launches);
        assert_eq!(
            found.as_ref().map(|of| of.iteration_starts_ns.clone()),
            Some(vec![0, 100, 200])
        );
        // Ranges whose name contains a word for iterations are preferred to ranges that enclose
        // them.
        let name = |key| ["run_#", "batch_#"][key as usize].to_owned();
        assert_eq!(
            find_iterations_among_candidates(&all, name, &launches)
                .map(|of| of.iteration_starts_ns.len()),
            Some(30)
        );
        assert_eq!(
            find_iterations_among_candidates(&all, |_| "aten::mm".to_owned(), &launches),
            None,
            "operators"
        );
    }

    #[test]
    fn numbered_layers_of_a_single_run_are_not_iterations() {
        let launches: BitPackedColumn<i64> = (0..100).collect();
        let layers: Vec<(i64, i64)> = (0..4).map(|i| (10 + i * 10, 19 + i * 10)).collect();
        let found = |launches: &BitPackedColumn<i64>| {
            find_iterations_among_candidates(
                &candidates_of_one_key_from_spans(0, 0, &layers),
                |_| "conv_#".to_owned(),
                launches,
            )
        };
        assert_eq!(found(&launches), None);
        assert!(found(&(5..55).collect()).is_some(), "these hold most of the work");
    }

    #[test]
    fn ranges_that_launch_unequal_work_are_not_iterations() {
        let launches: BitPackedColumn<i64> = (0..20).collect();
        let ranges = candidates_of_one_key_from_spans(0, 0, &[(0, 18), (20, 38), (40, 58)]);
        assert_eq!(
            find_iterations_among_candidates(&ranges, |_| "part".to_owned(), &launches),
            None
        );
        let overlapping = candidates_of_one_key_from_spans(0, 0, &[(0, 8), (5, 12), (12, 20)]);
        assert_eq!(
            find_iterations_among_candidates(&overlapping, |_| "part".to_owned(), &launches),
            None
        );
    }

    #[test]
    fn an_iteration_starts_on_the_gpu_with_its_first_operation() {
        let operations = [(5, 50), (12, 60), (15, 55), (25, 90), (40, 120)];
        // An operation that was launched before the first iteration belongs to no iteration.
        let cuts = start_times_of_iterations_on_gpu(&[10, 20], 30, 200, operations.into_iter());
        assert_eq!(cuts, [55, 90, 120]);
    }

    #[test]
    fn repeated_steps_are_found_as_iterations_and_layers_are_not() {
        // The synthetic trace has 5 steps of one embedding kernel, 8 layers of two kernels, and one
        // loss kernel.
        let mut sequence = BitPackedColumn::default();
        for _ in 0..5 {
            sequence.push_row(0);
            (0..8).for_each(|_| sequence.extend([1, 2]));
            sequence.push_row(3);
        }
        assert!(share_repeated_after_next_anchor(&sequence, 4, 0) > 0.99);
        assert!(
            share_repeated_after_next_anchor(&sequence, 4, 1) < 0.9,
            "{}",
            share_repeated_after_next_anchor(&sequence, 4, 1)
        );
    }
}
