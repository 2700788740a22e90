//! Joins the traces of a job's ranks by their collectives: aligns clocks, and separates waiting for
//! other ranks from transfer.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::clock::{ClockOfRank, LinearClockOffset};
use super::joined_collective::{CollectiveOnAllRanks, CollectiveOnRank};
use super::rank_summary::{
    self, CommunicatorOfRank, RankTimeByActivity, RecordedRankCollective, TraceOfRank,
};
use super::what_if::{self, CriticalPathOfJob};
use crate::analyze::classes::CollectiveKind;
use crate::analyze::work::bus_bandwidth;
use crate::diagnose::finding::FindingSeverity;

/// Largest number of collectives that the recording of one rank may lack at its start and another
/// rank's recording has.
const MAX_MISSING_COLLECTIVES_AT_START: i64 = 64;
/// Largest number of pairs of collectives that are compared to test one shift between two
/// recordings.
const MAX_COMPARED_COLLECTIVE_PAIRS: usize = 512;
/// Smallest share of the compared pairs of collectives that must agree in kind and bytes.
const MIN_SHARE_OF_AGREEING_PAIRS: f64 = 0.98;
/// Smallest share of a rank's collectives that must have a partner in another rank's trace.
const MIN_SHARE_OF_COLLECTIVES_WITH_PARTNER: f64 = 0.5;
/// Smallest clock difference, nanoseconds, that is reported; smaller differences count as one
/// clock.
const MIN_REPORTED_CLOCK_DIFFERENCE_NS: i64 = 1_000_000;

/// A problem that limits what can be concluded from the traces of a job's ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProblemOfJobTraces {
    /// The trace file of a rank ends early and could not be read completely.
    TraceCutOff {
        trace_name: String,
        /// Reason why reading stopped, with the place in the file.
        why_reading_stopped: String,
    },
    /// A trace without communication.
    NoCommunication { trace: String },
    /// The collectives of a trace show that the trace belongs to another job.
    TraceOfOtherJob {
        trace: String,
        /// The facts in which the trace differs from the traces of the job.
        why: String,
    },
    /// Two traces declare the same rank; the second trace is not used.
    DuplicateRank {
        trace: String,
        /// Name of the first trace that declares this rank.
        first_trace_name: String,
    },
    /// The job has ranks for which no trace was given.
    MissingRanks {
        /// Numbers of the ranks without a trace, if all traces declare their ranks.
        missing_ranks: Vec<u32>,
        /// Number of ranks without a trace.
        missing_rank_count: u32,
    },
    /// A rank's clock differs from the first rank's clock by at least 1 ms.
    ClockDiffersFromFirstRank {
        trace: String,
        /// Nanoseconds by which the rank's clock is ahead of the first rank's clock.
        clock_ahead_ns: i64,
    },
    /// A rank recorded fewer collectives of a communicator than other ranks, for example because it
    /// recorded another number of iterations.
    FewerCollectivesThanOtherRanks {
        trace: String,
        communicator_name: String,
        /// Number of collectives of the communicator that were recorded on every rank.
        joined_collective_count: usize,
        /// Number of collectives of the communicator that this rank recorded.
        rank_collective_count: usize,
    },
    /// The ranks of a communicator recorded collectives that do not match in order, kind or bytes.
    CollectivesNotJoined { communicator: String, trace: String },
}

impl ProblemOfJobTraces {
    /// Returns the problem as a sentence for reports.
    pub fn problem_as_sentence(&self) -> String {
        match self {
            Self::TraceCutOff { trace_name: trace, why_reading_stopped: why } => {
                format!("{trace}: read in part only: {why}")
            }
            Self::NoCommunication { trace } => {
                format!("{trace}: no operation communicates; the trace is not used")
            }
            Self::TraceOfOtherJob { trace, why } => {
                format!("{trace}: a rank of another job ({why}); the trace is not used")
            }
            Self::DuplicateRank { trace, first_trace_name: other } => {
                format!("{trace}: the same rank as {other}; the trace is not used")
            }
            Self::MissingRanks { missing_ranks: ranks, missing_rank_count: count }
                if ranks.is_empty() =>
            {
                format!(
                    "{count} ranks of the job have no trace: waiting for them counts as transfer"
                )
            }
            Self::MissingRanks { missing_ranks: ranks, .. } => {
                let follow = |a: &u32, b: &u32| *b == a + 1;
                let runs = ranks.chunk_by(follow).map(|run| match run {
                    [first, .., last] => format!("{first} to {last}"),
                    [one] => one.to_string(),
                    [] => String::new(),
                });
                let runs: Vec<String> = runs.collect();
                format!(
                    "ranks without a trace: {}; waiting for them counts as transfer",
                    runs.join(", ")
                )
            }
            #[allow(clippy::cast_precision_loss)]
            Self::ClockDiffersFromFirstRank { trace, clock_ahead_ns: ahead_ns } => format!(
                "{trace}: its clock is {:.3} ms {}; aligned by the ends of collectives",
                ahead_ns.abs() as f64 / 1e6,
                if *ahead_ns < 0 { "behind" } else { "ahead" }
            ),
            Self::FewerCollectivesThanOtherRanks {
                trace,
                communicator_name: communicator,
                joined_collective_count: joined,
                rank_collective_count: own,
            } => format!(
                "{trace}: {joined} of its {own} collectives of {communicator} have a partner on \
                 every rank; the others are not used"
            ),
            Self::CollectivesNotJoined { communicator, trace } => format!(
                "{trace}: its collectives of {communicator} differ in order, kind or size from \
                 those of the other ranks and are not joined"
            ),
        }
    }
}

/// One rank of a job: its times, and its sums over the collectives that were joined across ranks.
#[derive(Debug, Clone)]
pub struct RankWithCollectiveSums {
    /// Name of the rank in reports: the declared rank, otherwise the trace.
    pub rank_name: String,
    pub rank_trace: TraceOfRank,
    /// Times of the rank in the span in which all ranks were recorded.
    pub times_in_common_span: RankTimeByActivity,
    /// Nanoseconds in which this rank waited inside collectives for ranks that arrived later.
    pub waited_in_collectives_ns: i64,
    /// Number of collectives at which this rank arrived last.
    pub last_arrivals: usize,
    /// Nanoseconds from the arrival of the second-last rank to the arrival of this rank, summed
    /// over collectives at which it arrived last.
    pub delayed_other_ranks_ns: i64,
    /// Nanoseconds between the collectives of this rank.
    pub ns_between_collectives: i64,
    /// Nanoseconds by which the replayed job is shorter if this rank's kernels and host are as fast
    /// as those of the median rank.
    pub gain_at_median_speed_ns: i64,
}

/// Sums over the joined collectives of one kind and size.
#[derive(Debug, Clone, PartialEq)]
pub struct CollectivesOfKindAndSize {
    /// Kind of these collectives.
    pub collective: CollectiveKind,
    /// Bytes of each of these collectives; 0 if the bytes were not recorded.
    pub bytes_per_collective: u64,
    /// Number of ranks that take part.
    pub ranks: usize,
    /// Number of collectives of this kind and size.
    pub collective_count: usize,
    /// Time from the arrival of the last rank to the end of the collective, summed over these
    /// collectives, nanoseconds.
    pub total_transfer_ns: i64,
    /// Time from a rank's arrival to the arrival of the last rank, as mean over the ranks, summed
    /// over these collectives, nanoseconds.
    pub total_arrival_skew_ns: i64,
    /// Bus bandwidth of the transfers in GB/s; `None` if the bytes were not recorded.
    pub bus_bandwidth_gb_per_s: Option<f64>,
}

/// A job: the traces of several ranks, joined by their collectives.
#[derive(Debug, Clone)]
pub struct JobOfJoinedRanks {
    /// Ranks of the job, in the order of their traces.
    pub ranks: Vec<RankWithCollectiveSums>,
    /// Joined collectives summed by kind and size, most time first.
    pub collectives: Vec<CollectivesOfKindAndSize>,
    /// For each rank (outer index), the nanoseconds that it waited for each other rank (inner
    /// index).
    pub wait_ns_between_ranks: Vec<Vec<i64>>,
    /// Number of collectives that were joined across all ranks.
    pub joined_collectives: usize,
    /// Time from the start of the first joined collective to the end of the last, nanoseconds.
    pub collectives_span_ns: i64,
    /// Precision of the alignment of the ranks' clocks, nanoseconds: the largest median deviation
    /// of the ends of collectives.
    pub clock_alignment_precision_ns: i64,
    /// Link between the GPUs of one host, if all GPUs have the same known link: bandwidth of the
    /// link in each direction in GB/s, and the link's name.
    pub link_bandwidth_and_name: Option<(f64, &'static str)>,
    /// Critical path through all ranks of the job, and the gains of hypothetical changes.
    pub critical_path: CriticalPathOfJob,
    /// Problems of the ranks' traces that limit what can be concluded about the job.
    pub problems: Vec<ProblemOfJobTraces>,
}

impl JobOfJoinedRanks {
    /// Severity of the worst straggler of the job; severe if its delay is at least 10 % of the
    /// span.
    pub fn severity_of_worst_straggler(&self) -> Option<FindingSeverity> {
        let straggler = self.straggler_ranks_slowest_first().into_iter().next()?;
        Some(FindingSeverity::severity_from_possible_saving(
            self.unhidden_delay_by_rank_ns(straggler),
            self.collectives_span_ns,
        ))
    }

    /// Smallest and largest share of exposed communication in the time of a rank.
    #[allow(clippy::cast_precision_loss)]
    pub fn exposed_communication_share_range(&self) -> Option<(f64, f64)> {
        let share = |of: &RankWithCollectiveSums| {
            of.times_in_common_span.exposed_communication_ns as f64
                / of.times_in_common_span.total_ns_of_all_activities().max(1) as f64
        };
        let shares = self.ranks.iter().map(share);
        let least = shares.clone().reduce(f64::min)?;
        Some((least, shares.fold(0.0, f64::max)))
    }

    /// Nanoseconds by which a rank delays the other ranks while these have nothing else to do;
    /// waiting that compute hides costs nothing.
    fn unhidden_delay_by_rank_ns(&self, rank: &RankWithCollectiveSums) -> i64 {
        let others = self.ranks.iter().filter(|other| other.rank_name != rank.rank_name);
        let exposed = others
            .map(|other| other.times_in_common_span.exposed_communication_ns)
            .max()
            .unwrap_or(0);
        rank.delayed_other_ranks_ns.min(exposed)
    }

    /// Returns the stragglers, the slowest first: ranks whose unhidden delay of others is at least
    /// 5 % of the span, and more than the clocks' precision.
    pub fn straggler_ranks_slowest_first(&self) -> Vec<&RankWithCollectiveSums> {
        let mut late: Vec<&RankWithCollectiveSums> = self
            .ranks
            .iter()
            .filter(|rank| {
                let clocks = i64::try_from(rank.last_arrivals).unwrap_or(i64::MAX);
                let clocks = self.clock_alignment_precision_ns.saturating_mul(clocks.max(1));
                let delay = self.unhidden_delay_by_rank_ns(rank);
                delay > clocks && delay * 20 >= self.collectives_span_ns
            })
            .collect();
        late.sort_by_key(|rank| std::cmp::Reverse(rank.delayed_other_ranks_ns));
        late
    }
}

/// Joins the traces of several ranks to one job by their collectives. Traces that do not belong to
/// the job are reported as problems and not used.
pub fn join_ranks_to_job(parts: Vec<TraceOfRank>) -> JobOfJoinedRanks {
    let mut problems: Vec<ProblemOfJobTraces> =
        parts.iter().filter_map(problem_of_incomplete_trace).collect();
    let mut parts = traces_that_may_be_of_one_job(parts, &mut problems);
    rank_summary::set_report_names_of_ranks(&mut parts);
    let links = LinksBetweenRanks::find_links_between_ranks(&parts, &mut problems);
    let (parts, clocks) = links.clocks_of_linked_ranks(parts, &mut problems);
    let meetings = join_collectives_across_ranks(&parts, &clocks, &mut problems);
    report_ranks_without_trace(&parts, &mut problems);
    summarise_job(parts, &clocks, &meetings, problems)
}

/// Returns a problem if the rank's trace could not be read to its end.
fn problem_of_incomplete_trace(part: &TraceOfRank) -> Option<ProblemOfJobTraces> {
    let why = part.shared_trace.trace.quality.unreadable_parts.first()?.clone();
    Some(ProblemOfJobTraces::TraceCutOff {
        trace_name: part.trace_name.clone(),
        why_reading_stopped: why,
    })
}

/// Returns the traces that may belong to one job, and reports the others as problems.
fn traces_that_may_be_of_one_job(
    parts: Vec<TraceOfRank>,
    problems: &mut Vec<ProblemOfJobTraces>,
) -> Vec<TraceOfRank> {
    let mut worlds: BTreeMap<u32, usize> = BTreeMap::new();
    parts
        .iter()
        .filter_map(|of| of.world_size)
        .for_each(|world| *worlds.entry(world).or_default() += 1);
    let world = worlds.iter().max_by_key(|&(world, count)| (count, world)).map(|(&world, _)| world);
    let mut kept: Vec<TraceOfRank> = Vec::new();
    for part in parts {
        let twin = kept.iter().find(|other| match part.rank.zip(other.rank) {
            Some((rank, other)) => rank == other,
            None => {
                part.first_start_and_last_end_ns == other.first_start_and_last_end_ns
                    && part.communicators == other.communicators
            }
        });
        if part.communicators.is_empty() {
            problems.push(ProblemOfJobTraces::NoCommunication { trace: part.trace_name });
        } else if let (Some(own), Some(world)) = (part.world_size, world)
            && own != world
        {
            let why = format!("{own} ranks, the others {world}");
            problems.push(ProblemOfJobTraces::TraceOfOtherJob { trace: part.trace_name, why });
        } else if let Some(twin) = twin {
            problems.push(ProblemOfJobTraces::DuplicateRank {
                trace: part.trace_name,
                first_trace_name: twin.trace_name.clone(),
            });
        } else {
            kept.push(part);
        }
    }
    kept.sort_by_key(|part| part.rank.unwrap_or(u32::MAX));
    kept
}

/// How the collectives of a rank correspond to those of the reference rank of a communicator, and
/// how their clocks differ.
#[derive(Debug, Clone, Copy)]
struct RankToReferenceLink {
    communicator_index: usize,
    rank_index: usize,
    reference_rank_index: usize,
    /// Index, among the reference rank's collectives, of the rank's first collective.
    index_of_first_collective: i64,
    /// Time of the rank's clock minus time of the reference rank's clock.
    offset_from_reference_clock: LinearClockOffset,
    matched_collectives: usize,
    alignment_deviation_ns: i64,
}

/// Links between the ranks of all communicators of a job; communicators are numbered in order of
/// their names.
struct LinksBetweenRanks {
    links: Vec<RankToReferenceLink>,
}

impl LinksBetweenRanks {
    fn find_links_between_ranks(
        parts: &[TraceOfRank],
        problems: &mut Vec<ProblemOfJobTraces>,
    ) -> Self {
        let mut links = Vec::new();
        for (communicator, (name, members)) in
            ranks_and_collectives_by_communicator(parts).into_iter().enumerate()
        {
            let length = |&(_, of): &(usize, &CommunicatorOfRank)| of.collectives.len();
            let reference = members.iter().max_by_key(|of| (length(of), std::cmp::Reverse(of.0)));
            let Some(&(reference, longest)) = reference else { continue };
            for &(rank, own) in members.iter().filter(|of| of.0 != reference) {
                match find_shift_between_recordings(&own.collectives, &longest.collectives) {
                    Some((shift, ahead, matched, spread_ns)) => {
                        let one = parts[rank].is_from_same_trace(&parts[reference]);
                        let ahead = if one { LinearClockOffset::default() } else { ahead };
                        links.push(RankToReferenceLink {
                            communicator_index: communicator,
                            rank_index: rank,
                            reference_rank_index: reference,
                            index_of_first_collective: shift,
                            offset_from_reference_clock: ahead,
                            matched_collectives: matched,
                            alignment_deviation_ns: spread_ns,
                        });
                    }
                    None => problems.push(ProblemOfJobTraces::CollectivesNotJoined {
                        communicator: name.clone(),
                        trace: parts[rank].trace_name.clone(),
                    }),
                }
            }
        }
        Self { links }
    }

    /// Returns for each rank its clock's difference from the first rank's clock, found through
    /// links between ranks. Ranks that no communicator links with the largest group of ranks are
    /// reported as problems and dropped.
    fn clocks_of_linked_ranks(
        &self,
        parts: Vec<TraceOfRank>,
        problems: &mut Vec<ProblemOfJobTraces>,
    ) -> (Vec<TraceOfRank>, Vec<ClockOfRank>) {
        let mut order: Vec<&RankToReferenceLink> = self.links.iter().collect();
        order.sort_by_key(|link| std::cmp::Reverse(link.matched_collectives));
        // The search for linked ranks starts from one rank after another; the largest group of
        // linked ranks is kept.
        let reach = |first: usize| {
            let mut clocks: Vec<Option<ClockOfRank>> = vec![None; parts.len()];
            if let Some(clock) = clocks.get_mut(first) {
                *clock = Some(ClockOfRank::default());
            }
            while let Some((rank, clock)) = order.iter().find_map(|link| {
                match (clocks[link.reference_rank_index], clocks[link.rank_index]) {
                    (Some(reference), None) => Some((
                        link.rank_index,
                        reference.clock_of_linked_rank(
                            link.offset_from_reference_clock,
                            link.alignment_deviation_ns,
                            1,
                        ),
                    )),
                    (None, Some(rank)) => Some((
                        link.reference_rank_index,
                        rank.clock_of_linked_rank(
                            link.offset_from_reference_clock,
                            link.alignment_deviation_ns,
                            -1,
                        ),
                    )),
                    _ => None,
                }
            }) {
                clocks[rank] = Some(clock);
            }
            clocks
        };
        let reached = |clocks: &Vec<Option<ClockOfRank>>| clocks.iter().flatten().count();
        let mut best = reach(0);
        for first in 1..parts.len() {
            if reached(&best) * 2 > parts.len() {
                break;
            }
            let other = reach(first);
            if reached(&other) > reached(&best) {
                best = other;
            }
        }
        let (mut kept, mut clocks) = (Vec::new(), Vec::new());
        for (part, clock) in parts.into_iter().zip(best) {
            match clock {
                Some(clock) => {
                    kept.push(part);
                    clocks.push(clock);
                }
                None => {
                    problems.retain(
                        |of| !matches!(of, ProblemOfJobTraces::CollectivesNotJoined { trace, .. } if *trace == part.trace_name),
                    );
                    problems.push(ProblemOfJobTraces::TraceOfOtherJob {
                        trace: part.trace_name,
                        why: "its collectives differ in order, kind or size".to_owned(),
                    });
                }
            }
        }
        for (part, clock) in kept.iter().zip(&clocks) {
            let ahead_ns = clock.ns_ahead_of_job_clock(part.first_start_and_last_end_ns.0);
            if ahead_ns.abs() >= MIN_REPORTED_CLOCK_DIFFERENCE_NS {
                problems.push(ProblemOfJobTraces::ClockDiffersFromFirstRank {
                    trace: part.trace_name.clone(),
                    clock_ahead_ns: ahead_ns,
                });
            }
        }
        (kept, clocks)
    }
}

/// Returns for each communicator name the ranks that recorded collectives in it.
fn ranks_and_collectives_by_communicator(
    parts: &[TraceOfRank],
) -> BTreeMap<String, Vec<(usize, &CommunicatorOfRank)>> {
    let mut members: BTreeMap<String, Vec<(usize, &CommunicatorOfRank)>> = BTreeMap::new();
    for (rank, part) in parts.iter().enumerate() {
        for communicator in &part.communicators {
            members
                .entry(communicator.communicator_name.clone())
                .or_default()
                .push((rank, communicator));
        }
    }
    members
}

fn kind_and_bytes_of_collective(entry: &RecordedRankCollective) -> (CollectiveKind, u64) {
    (entry.collective, entry.larger_buffer_bytes)
}

/// Finds by how many collectives a rank's recording is shifted against a longer list: kinds and
/// bytes must agree, and end times differ least; of several shifts the smallest.
fn find_shift_between_recordings(
    own: &[RecordedRankCollective],
    longest: &[RecordedRankCollective],
) -> Option<(i64, LinearClockOffset, usize, i64)> {
    let length =
        |entries: &[RecordedRankCollective]| i64::try_from(entries.len()).unwrap_or(i64::MAX);
    let extra = length(longest) - length(own);
    let mut shifts: Vec<i64> = (-MAX_MISSING_COLLECTIVES_AT_START
        ..=MAX_MISSING_COLLECTIVES_AT_START)
        .chain(extra - MAX_MISSING_COLLECTIVES_AT_START..=extra + MAX_MISSING_COLLECTIVES_AT_START)
        .collect();
    shifts.sort_by_key(|shift| (shift.abs(), *shift));
    shifts.dedup();
    let candidates: Vec<(i64, ClockDifferencesOverTime, i64)> = shifts
        .into_iter()
        .filter_map(|shift| {
            let pairs = collective_pairs_at_shift(own, longest, shift)?;
            let offsets = evenly_sampled_pairs(&pairs)
                .map(|(a, b)| (b.end_ns, a.end_ns - b.end_ns))
                .collect::<Vec<_>>();
            let spread = median_distance_from_fitted_line(&offsets);
            Some((shift, offsets, spread))
        })
        .collect();
    let least = candidates.iter().map(|&(.., spread)| spread).min()?;
    let best = candidates.into_iter().find(|&(.., spread)| spread <= 2 * least + 1000)?;
    let (shift, offsets, spread) = best;
    let matched = collective_pairs_at_shift(own, longest, shift)?.len();
    Some((shift, fit_clock_difference_line(&offsets), matched, spread))
}

/// Pairs of a time and the difference of two clocks at that time, nanoseconds.
type ClockDifferencesOverTime = Vec<(i64, i64)>;

type SameCollectiveOnTwoRanks<'a> = (&'a RecordedRankCollective, &'a RecordedRankCollective);

/// Returns the pairs of collectives that a shift gives, if enough of them agree in kind and bytes.
fn collective_pairs_at_shift<'a>(
    own: &'a [RecordedRankCollective],
    longest: &'a [RecordedRankCollective],
    shift: i64,
) -> Option<Vec<SameCollectiveOnTwoRanks<'a>>> {
    let skip = |by: i64| usize::try_from(by.max(0)).unwrap_or(usize::MAX);
    let pairs: Vec<SameCollectiveOnTwoRanks<'a>> =
        own.iter().skip(skip(-shift)).zip(longest.iter().skip(skip(shift))).collect();
    #[allow(clippy::cast_precision_loss)]
    let enough = !pairs.is_empty()
        && pairs.len() as f64 >= MIN_SHARE_OF_COLLECTIVES_WITH_PARTNER * own.len() as f64;
    // Fewer than three pairs of collectives can agree by chance, so they count only if the
    // recordings are not shifted.
    if !enough || (shift != 0 && pairs.len() < 3) {
        return None;
    }
    let agree = evenly_sampled_pairs(&pairs)
        .filter(|(a, b)| kind_and_bytes_of_collective(a) == kind_and_bytes_of_collective(b))
        .count();
    #[allow(clippy::cast_precision_loss)]
    let share = agree as f64 / evenly_sampled_pairs(&pairs).count() as f64;
    (share >= MIN_SHARE_OF_AGREEING_PAIRS).then_some(pairs)
}

fn evenly_sampled_pairs<'a, 'b>(
    pairs: &'b [SameCollectiveOnTwoRanks<'a>],
) -> impl Iterator<Item = SameCollectiveOnTwoRanks<'a>> + use<'a, 'b> {
    pairs.iter().step_by(pairs.len().div_ceil(MAX_COMPARED_COLLECTIVE_PAIRS).max(1)).copied()
}

fn median_of_numbers(values: impl Iterator<Item = i64>) -> i64 {
    let mut values: Vec<i64> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

/// Returns the median distance of the clock differences from the line that is fitted to them,
/// nanoseconds.
fn median_distance_from_fitted_line(offsets: &[(i64, i64)]) -> i64 {
    let line = fit_clock_difference_line(offsets);
    median_of_numbers(
        offsets.iter().map(|&(time, offset)| (offset - line.clock_offset_at(time)).abs()),
    )
}

/// Fits a line to clock differences, through the medians of the first third and of the last third.
#[allow(clippy::cast_precision_loss)]
fn fit_clock_difference_line(offsets: &[(i64, i64)]) -> LinearClockOffset {
    let third = offsets.len() / 3;
    let medians = |part: &[(i64, i64)]| {
        (
            median_of_numbers(part.iter().map(|of| of.0)),
            median_of_numbers(part.iter().map(|of| of.1)),
        )
    };
    if third < 3 {
        let (at, offset) = medians(offsets);
        return LinearClockOffset {
            reference_time_ns: at,
            offset_at_reference_ns: offset,
            drift_ns_per_ns: 0.0,
        };
    }
    let ((t0, o0), (t1, o1)) =
        (medians(&offsets[..third]), medians(&offsets[offsets.len() - third..]));
    // A change of the clock difference of less than 1 µs over the recording is taken as noise, so
    // the line has no slope.
    let slope =
        if (o1 - o0).abs() < 1000 { 0.0 } else { (o1 - o0) as f64 / (t1 - t0).max(1) as f64 };
    let (at, offset) = if slope == 0.0 { medians(offsets) } else { (t0, o0) };
    LinearClockOffset {
        reference_time_ns: at,
        offset_at_reference_ns: offset,
        drift_ns_per_ns: slope,
    }
}

/// Returns the joined collectives of all communicators, in order of the arrival of their last
/// ranks.
fn join_collectives_across_ranks(
    parts: &[TraceOfRank],
    clocks: &[ClockOfRank],
    problems: &mut Vec<ProblemOfJobTraces>,
) -> Vec<CollectiveOnAllRanks> {
    let mut all: Vec<CollectiveOnAllRanks> = Vec::new();
    let links = LinksBetweenRanks::find_links_between_ranks(parts, &mut Vec::new()).links;
    for (number, (name, members)) in
        ranks_and_collectives_by_communicator(parts).into_iter().enumerate()
    {
        let own: Vec<&RankToReferenceLink> =
            links.iter().filter(|link| link.communicator_index == number).collect();
        let Some(first) = own.first() else { continue };
        let reference = first.reference_rank_index;
        let shift_of: HashMap<usize, i64> = own
            .iter()
            .map(|link| (link.rank_index, link.index_of_first_collective))
            .chain([(reference, 0)])
            .collect();
        // Indices of those collectives of the reference rank that every rank has recorded.
        let joined: Vec<(usize, &CommunicatorOfRank, i64)> = members
            .iter()
            .filter_map(|&(rank, of)| Some((rank, of, *shift_of.get(&rank)?)))
            .collect();
        let count =
            |of: &CommunicatorOfRank| i64::try_from(of.collectives.len()).unwrap_or(i64::MAX);
        let from = joined.iter().map(|&(.., shift)| shift).max().unwrap_or(0).max(0);
        let until = joined.iter().map(|&(_, of, shift)| count(of) + shift).min().unwrap_or(0);
        let meetings = usize::try_from(until - from).unwrap_or(0);
        for &(rank, of, _) in &joined {
            if of.collectives.len() > meetings {
                problems.push(ProblemOfJobTraces::FewerCollectivesThanOtherRanks {
                    trace: parts[rank].trace_name.clone(),
                    communicator_name: name.clone(),
                    joined_collective_count: meetings,
                    rank_collective_count: of.collectives.len(),
                });
            }
        }
        for index in from..until {
            let entries = joined.iter().map(|&(rank, of, shift)| {
                let at = usize::try_from(index - shift).expect("every rank has this number");
                (rank, of.collectives[at])
            });
            let entries: Vec<(usize, RecordedRankCollective)> = entries.collect();
            let first = entries[0].1;
            if entries.iter().any(|(_, entry)| {
                kind_and_bytes_of_collective(entry) != kind_and_bytes_of_collective(&first)
            }) {
                continue;
            }
            all.push(CollectiveOnAllRanks {
                collective: first.collective,
                larger_buffer_bytes: first.larger_buffer_bytes,
                bus_bytes: first.bus_bytes,
                ranks: entries
                    .iter()
                    .map(
                        |&(
                            rank,
                            RecordedRankCollective {
                                start_ns: start, end_ns: end, operation, ..
                            },
                        )| {
                            let clock = &clocks[rank];
                            let (start, end) = (
                                clock.rank_time_to_job_time(start),
                                clock.rank_time_to_job_time(end),
                            );
                            CollectiveOnRank {
                                rank_index: rank,
                                operation,
                                start_ns: start,
                                end_ns: end,
                            }
                        },
                    )
                    .collect(),
            });
        }
    }
    all.sort_by_key(|meeting| meeting.time_and_rank_of_last_arrival().0);
    all
}

/// Adds a problem if the job has ranks for which no trace was given.
fn report_ranks_without_trace(parts: &[TraceOfRank], problems: &mut Vec<ProblemOfJobTraces>) {
    let Some(world) = parts.iter().filter_map(|of| of.world_size).max() else { return };
    let have: Vec<u32> = parts.iter().filter_map(|of| of.rank).collect();
    let count = world.saturating_sub(u32::try_from(parts.len()).unwrap_or(u32::MAX));
    if count > 0 {
        let all_declared = have.len() == parts.len();
        let ranks = (0..world).filter(|rank| all_declared && !have.contains(rank));
        problems.push(ProblemOfJobTraces::MissingRanks {
            missing_ranks: ranks.collect(),
            missing_rank_count: count,
        });
    }
}

/// Returns for each rank the total time between its collectives, nanoseconds.
fn total_ns_between_collectives_per_rank(
    ranks: usize,
    meetings: &[CollectiveOnAllRanks],
) -> Vec<i64> {
    let mut between = vec![0i64; ranks];
    let mut until: Vec<Option<i64>> = vec![None; ranks];
    for of in meetings.iter().flat_map(|meeting| &meeting.ranks) {
        between[of.rank_index] += until[of.rank_index].map_or(0, |until| of.start_ns - until);
        until[of.rank_index] = Some(of.end_ns);
    }
    between
}

/// Returns the collectives by kind and size with their bus bandwidth, most time first.
fn collectives_sorted_by_time(
    by_kind: HashMap<(CollectiveKind, u64), CollectivesOfKindAndSize>,
    bus: &HashMap<(CollectiveKind, u64), f64>,
) -> Vec<CollectivesOfKindAndSize> {
    let mut collectives: Vec<CollectivesOfKindAndSize> = by_kind
        .into_iter()
        .map(|(key, sum)| {
            #[allow(clippy::cast_precision_loss)]
            let bus =
                Some(bus[&key] / sum.total_transfer_ns.max(1) as f64).filter(|&bus| bus > 0.0);
            CollectivesOfKindAndSize { bus_bandwidth_gb_per_s: bus, ..sum }
        })
        .collect();
    collectives.sort_by_key(|of| {
        (
            std::cmp::Reverse(of.total_transfer_ns + of.total_arrival_skew_ns),
            of.collective,
            of.bytes_per_collective,
        )
    });
    collectives
}

fn summarise_job(
    parts: Vec<TraceOfRank>,
    clocks: &[ClockOfRank],
    meetings: &[CollectiveOnAllRanks],
    problems: Vec<ProblemOfJobTraces>,
) -> JobOfJoinedRanks {
    let count = parts.len();
    let mut waits = vec![vec![0i64; count]; count];
    let mut by_kind: HashMap<(CollectiveKind, u64), CollectivesOfKindAndSize> = HashMap::new();
    let mut bus: HashMap<(CollectiveKind, u64), f64> = HashMap::new();
    let (mut last_count, mut delayed) = (vec![0usize; count], vec![0i64; count]);
    // The actions of a rank before its recording began are unknown, so waiting for it is
    // counted only from the start of its recording.
    let of_part = |(part, clock): (&TraceOfRank, &ClockOfRank)| {
        let (first, last) = part.first_start_and_last_end_ns;
        (clock.rank_time_to_job_time(first), clock.rank_time_to_job_time(last))
    };
    let (begun, ended): (Vec<i64>, Vec<i64>) = parts.iter().zip(clocks).map(of_part).unzip();
    for meeting in meetings {
        let (ready, last) = meeting.time_and_rank_of_last_arrival();
        let begun = begun[last].min(ready);
        let mut skew = 0;
        for collective in &meeting.ranks {
            let (rank, start, end) =
                (collective.rank_index, collective.start_ns, collective.end_ns);
            let wait = (ready - start.max(begun)).clamp(0, end - start);
            waits[rank][last] += wait;
            skew += wait;
        }
        let others = meeting.ranks.iter().filter(|of| of.rank_index != last).map(|of| of.start_ns);
        if let Some(second) = others.max() {
            last_count[last] += 1;
            delayed[last] += ready - second.max(begun);
        }
        let key = (meeting.collective, meeting.larger_buffer_bytes);
        let sum = by_kind.entry(key).or_insert(CollectivesOfKindAndSize {
            collective: meeting.collective,
            bytes_per_collective: meeting.larger_buffer_bytes,
            ranks: meeting.ranks.len(),
            collective_count: 0,
            total_transfer_ns: 0,
            total_arrival_skew_ns: 0,
            bus_bandwidth_gb_per_s: None,
        });
        sum.collective_count += 1;
        sum.total_transfer_ns += meeting.transfer_after_last_arrival_ns();
        sum.total_arrival_skew_ns += skew / i64::try_from(meeting.ranks.len()).unwrap_or(1);
        *bus.entry(key).or_default() += meeting.bus_bytes;
    }
    let collectives = collectives_sorted_by_time(by_kind, &bus);
    let times = || meetings.iter().flat_map(|of| &of.ranks);
    let end = times().map(|of| of.end_ns).max().unwrap_or(0);
    // Start of the span in which all ranks are recorded, in the job's common time.
    let all_begun = begun.iter().copied().max().unwrap_or(0).min(end);
    let all_ended = ended.into_iter().max().unwrap_or(0).max(all_begun);
    let first = times().map(|of| of.start_ns).min().unwrap_or(0).max(all_begun);
    let between = total_ns_between_collectives_per_rank(count, meetings);
    let (path, gains) = what_if::replay_job_with_changes(&parts, clocks, meetings);
    let devices: Vec<Option<(f64, &'static str)>> = parts
        .iter()
        .map(|part| bus_bandwidth::link_bandwidth_and_name_of_gpu(part.gpu_name.as_deref()?))
        .collect();
    let hosts: Vec<&Option<String>> = parts.iter().map(|part| &part.host_name).collect();
    let one_host = hosts.windows(2).all(|pair| pair[0] == pair[1]);
    let same = devices.windows(2).all(|pair| pair[0] == pair[1]);
    let common_span = (all_begun, all_ended);
    let deviations = clocks.iter().map(|clock| clock.alignment_deviation_ns);
    let ranks = parts.into_iter().enumerate().map(|(index, part)| RankWithCollectiveSums {
        rank_name: part.rank_label.clone(),
        times_in_common_span: part.rank_time_inside_job_span(&clocks[index], common_span),
        waited_in_collectives_ns: waits[index].iter().sum(),
        last_arrivals: last_count[index],
        delayed_other_ranks_ns: delayed[index],
        ns_between_collectives: between[index],
        gain_at_median_speed_ns: gains[index],
        rank_trace: part,
    });
    JobOfJoinedRanks {
        ranks: ranks.collect(),
        collectives,
        wait_ns_between_ranks: waits,
        joined_collectives: meetings.len(),
        collectives_span_ns: end - first,
        clock_alignment_precision_ns: deviations.max().unwrap_or(0),
        link_bandwidth_and_name: devices.first().copied().flatten().filter(|_| same && one_host),
        critical_path: path,
        problems,
    }
}
