//! Iterations of a run: found by ranges, by marks, or by kernels that repeat, and cut on the device
//! where their first operation starts. This module does not judge whether an iteration takes too
//! long.

use hashbrown::HashMap;

use crate::analyze::operations::{AllOperations, OperationId, OperationKind};
use crate::analyze::time_order::SortedOperations;
use crate::model::Trace;
use crate::model::packed_columns::PackedColumn;

/// Fewest iterations.
const MIN_ITERATIONS: usize = 3;
/// Words by which names of ranges show that the ranges are iterations.
const ITERATION_WORDS: &[&str] = &["profilerstep", "step", "iter", "batch"];
/// Share of the time between the first and the last iteration that ranges without an iteration's
/// name must fill, and of the launches that they must contain.
const MIN_COVERED_SHARE: f64 = 0.5;
/// Part of the iterations whose number of operations is near the median.
const MIN_REGULAR_SHARE: f64 = 0.7;
/// Kernels that are tried as the first one of an iteration.
const MAX_FIRST_KERNEL_CANDIDATES: usize = 24;
/// Largest number of operations that are compared to find one period.
const MAX_COMPARED_OPERATIONS: usize = 200_000;
/// Part of an iteration's operations that the next one repeats.
const REPEATED_SHARE: f64 = 0.9;

/// A sign by which iterations were found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IterationEvidence {
    /// Ranges of this name; `#` stands for numbers.
    Range(String),
    /// Marks of this name; `#` stands for numbers.
    Mark(String),
    /// An operation of this name, which each iteration has once, at the same place.
    Repetition(String),
}

impl IterationEvidence {
    /// Label in printed output.
    pub fn label(&self) -> String {
        match self {
            Self::Range(name) => format!("range {name}"),
            Self::Mark(name) => format!("mark {name}"),
            Self::Repetition(name) => format!("repetition of {name}"),
        }
    }
}

/// A candidate for an iteration: a range, or the time from one mark to the next.
#[derive(Debug, Clone, Copy)]
pub struct IterationCandidate<K> {
    /// Candidates with equal keys form one group of iterations.
    pub key: K,
    /// Ranges around the candidate.
    pub depth: u32,
    /// Start of the iteration in host time, nanoseconds.
    pub start: i64,
    /// Nanosecond after the last.
    pub end: i64,
}

/// Start times of iterations on the host, and the end of the last iteration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostIterations<K> {
    /// Key of the ranges or marks that are the iterations.
    pub key: K,
    /// Start time of each iteration on the host, nanoseconds.
    pub starts: Vec<i64>,
    /// End of the process's last iteration in host time.
    pub end: i64,
}

/// Finds the candidates that are iterations: at least three of one key that follow each other,
/// fill most of the time and launch about the same number of operations each. `launches` are the
/// times of all launch calls of the process, in order.
pub fn find_iteration_candidates<K: Copy + Eq + std::hash::Hash + Ord>(
    candidates: &[IterationCandidate<K>],
    name: impl Fn(K) -> String,
    launches: &PackedColumn<i64>,
) -> Option<HostIterations<K>> {
    let mut groups: HashMap<K, Vec<IterationCandidate<K>>> = HashMap::new();
    for candidate in candidates {
        groups.entry(candidate.key).or_default().push(*candidate);
    }
    let mut ranked: Vec<CandidateGroup<K>> = groups
        .into_iter()
        .filter(|(_, group)| group.len() >= MIN_ITERATIONS)
        .filter_map(|(key, mut candidates)| {
            candidates.sort_by_key(|of| (of.start, of.end));
            let name = name(key).to_ascii_lowercase();
            let named = ITERATION_WORDS.iter().any(|word| name.contains(word));
            // Names with namespaces are operators of frameworks, and a framework operator is not an
            // iteration.
            (named || !name.contains("::")).then(|| CandidateGroup {
                key,
                named,
                depth: candidates.iter().map(|of| of.depth).min().unwrap_or(0),
                total: candidates.iter().map(|of| of.end - of.start).sum(),
                candidates,
            })
        })
        .collect();
    ranked.sort_by_key(|of| (!of.named, of.depth, -of.total, of.key));
    ranked.into_iter().find_map(|group| {
        let candidates = &group.candidates;
        let overlap = candidates.windows(2).any(|pair| pair[1].start < pair[0].end);
        let (first, last) = (candidates.first()?.start, candidates.last()?.end);
        // Layers with numbers follow each other, too, but launch a part of the work only.
        let inside = launches.partition_point(|launch| launch < last)
            - launches.partition_point(|launch| launch < first);
        #[allow(clippy::cast_precision_loss)]
        let covered = group.named
            || (group.total as f64 >= MIN_COVERED_SHARE * (last - first) as f64
                && inside as f64 >= MIN_COVERED_SHARE * launches.len() as f64);
        let starts: Vec<i64> = candidates.iter().map(|of| of.start).collect();
        (!overlap && covered && is_launch_count_regular(&starts, last, launches))
            .then_some(HostIterations { key: group.key, starts, end: last })
    })
}

/// Candidates of one key.
struct CandidateGroup<K> {
    key: K,
    /// Whether the name of the ranges says that they are iterations.
    named: bool,
    depth: u32,
    total: i64,
    candidates: Vec<IterationCandidate<K>>,
}

/// Returns whether most iterations launch about the median number of operations, which is not zero.
fn is_launch_count_regular(starts: &[i64], end: i64, launches: &PackedColumn<i64>) -> bool {
    let at = |time: i64| launches.partition_point(|launch| launch < time);
    let bounds: Vec<usize> = starts.iter().copied().chain([end]).map(at).collect();
    let counts: Vec<usize> = bounds.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let mut sorted = counts.clone();
    sorted.sort_unstable();
    let median = sorted[sorted.len() / 2];
    let near = counts.iter().filter(|count| count.abs_diff(median) * 4 <= median).count();
    #[allow(clippy::cast_precision_loss)]
    let share = near as f64 / counts.len() as f64;
    median > 0 && share >= MIN_REGULAR_SHARE
}

/// Start times of the host's iterations on a device: `operations` holds operations with the time of
/// their launch, in any order. The last cut is the end of the last iteration; an iteration that ran
/// no operation is empty.
pub fn device_iteration_starts(
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

/// Returns a number that all operations with one name share.
fn name_key(trace: &Trace, all: &AllOperations<'_>, id: OperationId) -> u64 {
    let (kind, row) = all.kind_and_row(id);
    let name = match kind {
        OperationKind::Kernel => trace.kernels.function.at(row),
        OperationKind::Copy => trace.copies.kind[row].0,
        OperationKind::Set => 0,
        OperationKind::Graph => trace.graphs.executable[row],
    };
    (kind as u64) << 32 | u64::from(name)
}

/// Operations of a device, in the order of their start, that begin an iteration each: all of one
/// name, with about the same operations between them; `None` if nothing repeats three times.
pub fn repeating_first_operations(
    trace: &Trace,
    all: &AllOperations<'_>,
    operations: &SortedOperations,
) -> Option<Vec<OperationId>> {
    let mut numbers: HashMap<u64, u32> = HashMap::new();
    let mut sequence: PackedColumn<u32> = PackedColumn::default();
    for id in operations.iter() {
        let new = u32::try_from(numbers.len()).expect("fewer than 2^32 names");
        sequence.push(*numbers.entry(name_key(trace, all, id)).or_insert(new));
    }
    let names = numbers.len();
    let mut count = vec![0usize; names];
    sequence.iter().for_each(|name| count[name as usize] += 1);
    // One name is tried for each number of occurrences, the rarest first, so that the longest
    // period is found first.
    let mut anchors: Vec<(usize, u32)> = (0u32..)
        .zip(&count)
        .filter(|&(_, &count)| count >= MIN_ITERATIONS && count * 2 <= operations.len())
        .map(|(name, &count)| (count, name))
        .collect();
    anchors.sort_unstable();
    anchors.dedup_by_key(|&mut (count, _)| count);
    anchors.truncate(MAX_FIRST_KERNEL_CANDIDATES);
    let scored: Vec<(f64, u32)> =
        anchors.iter().map(|&(_, name)| (repetition_score(&sequence, names, name), name)).collect();
    let best = scored.iter().map(|&(score, _)| score).fold(0.0, f64::max);
    if best < REPEATED_SHARE {
        return None;
    }
    // The shortest of several periods with equal scores is chosen.
    let &(_, anchor) = scored.iter().rev().find(|&&(score, _)| score >= best - 0.01)?;
    let named = sequence.iter().zip(operations.iter());
    Some(named.filter(|&(name, _)| name == anchor).map(|(_, id)| id).collect())
}

/// Share of the operations between two occurrences of a name that are repeated before the next
/// occurrence, over all of the trace that the occurrences span.
#[allow(clippy::cast_precision_loss)]
fn repetition_score(sequence: &PackedColumn<u32>, names: usize, anchor: u32) -> f64 {
    let mut at = (0..sequence.len()).filter(|&index| sequence.at(index) == anchor);
    let last = sequence.iter().rposition(|name| name == anchor);
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
        if all > MAX_COMPARED_OPERATIONS {
            break;
        }
    }
    let spanned = (last - first) as f64 / sequence.len() as f64;
    // At least half of the operations must lie between occurrences of the anchor.
    if spanned < 0.5 { 0.0 } else { same as f64 / all.max(1) as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates_from_spans(
        key: u32,
        depth: u32,
        spans: &[(i64, i64)],
    ) -> Vec<IterationCandidate<u32>> {
        spans.iter().map(|&(start, end)| IterationCandidate { key, depth, start, end }).collect()
    }

    #[test]
    fn the_outermost_regular_ranges_are_taken_as_iterations() {
        let launches: PackedColumn<i64> = (0..300).collect();
        let steps: Vec<(i64, i64)> = (0..3).map(|i| (i * 100, i * 100 + 95)).collect();
        let layers: Vec<(i64, i64)> = (0..30).map(|i| (i * 10, i * 10 + 9)).collect();
        let mut all = candidates_from_spans(1, 1, &layers);
        all.extend(candidates_from_spans(0, 0, &steps));
        let name = |key| ["run_#", "layer_#"][key as usize].to_owned();
        let found = find_iteration_candidates(&all, name, &launches);
        assert_eq!(found.as_ref().map(|of| of.starts.clone()), Some(vec![0, 100, 200]));
        // A range whose name says that it is an iteration is preferred to an outer one.
        let name = |key| ["run_#", "batch_#"][key as usize].to_owned();
        assert_eq!(
            find_iteration_candidates(&all, name, &launches).map(|of| of.starts.len()),
            Some(30)
        );
        assert_eq!(
            find_iteration_candidates(&all, |_| "aten::mm".to_owned(), &launches),
            None,
            "operators"
        );
    }

    #[test]
    fn numbered_layers_of_a_single_run_are_not_iterations() {
        let launches: PackedColumn<i64> = (0..100).collect();
        let layers: Vec<(i64, i64)> = (0..4).map(|i| (10 + i * 10, 19 + i * 10)).collect();
        let found = |launches: &PackedColumn<i64>| {
            find_iteration_candidates(
                &candidates_from_spans(0, 0, &layers),
                |_| "conv_#".to_owned(),
                launches,
            )
        };
        assert_eq!(found(&launches), None);
        assert!(found(&(5..55).collect()).is_some(), "these hold most of the work");
    }

    #[test]
    fn ranges_of_irregular_work_are_not_iterations() {
        let launches: PackedColumn<i64> = (0..20).collect();
        let ranges = candidates_from_spans(0, 0, &[(0, 18), (20, 38), (40, 58)]);
        assert_eq!(find_iteration_candidates(&ranges, |_| "part".to_owned(), &launches), None);
        let overlapping = candidates_from_spans(0, 0, &[(0, 8), (5, 12), (12, 20)]);
        assert_eq!(find_iteration_candidates(&overlapping, |_| "part".to_owned(), &launches), None);
    }

    #[test]
    fn iterations_start_at_the_start_of_their_first_operation() {
        let operations = [(5, 50), (12, 60), (15, 55), (25, 90), (40, 120)];
        // The operation launched before the first iteration belongs to none.
        let cuts = device_iteration_starts(&[10, 20], 30, 200, operations.into_iter());
        assert_eq!(cuts, [55, 90, 120]);
    }

    #[test]
    fn repeated_steps_are_found_as_iterations_and_layers_are_not() {
        // 5 steps: an embedding, 8 layers of two kernels, a loss.
        let mut sequence = PackedColumn::default();
        for _ in 0..5 {
            sequence.push(0);
            (0..8).for_each(|_| sequence.extend([1, 2]));
            sequence.push(3);
        }
        assert!(repetition_score(&sequence, 4, 0) > 0.99);
        assert!(repetition_score(&sequence, 4, 1) < 0.9, "{}", repetition_score(&sequence, 4, 1));
    }
}
