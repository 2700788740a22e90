//! The collectives of all ranks as one job: clocks aligned, waiting separated from transfer.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::clock::{ClockDifference, RankClock};
use super::joined_collective::{CollectiveMeeting, RankArrival};
use super::rank_summary::{self, RankCollective, RankCommunicator, RankTimeParts, RankTrace};
use super::what_if::{self, JobCriticalPath};
use crate::analyze::classes::CollectiveKind;
use crate::analyze::work::bus_bandwidth;
use crate::diagnose::finding::FindingSeverity;

/// Collectives that one recording may lack at its start and another one has.
const MAX_COLLECTIVE_SHIFT: i64 = 64;
/// Collectives that are compared to find out by how many two recordings differ.
const MAX_COMPARED_COLLECTIVES: usize = 512;
/// Part of the collectives that must agree in kind and size.
const MIN_AGREEING_SHARE: f64 = 0.98;
/// Part of the collectives of a rank that must have a partner.
const MIN_PARTNERED_SHARE: f64 = 0.5;
/// Clocks that differ by less than this count as one clock.
const MAX_SAME_CLOCK_DIFFERENCE_NS: i64 = 1_000_000;

/// Something that limits what can be concluded from the traces of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobProblem {
    /// The trace ends early and could not be read completely.
    Cut {
        trace: String,
        /// Place and reason where the file ends too early.
        why: String,
    },
    /// A trace without communication.
    NoCommunication { trace: String },
    /// A trace whose collectives belong to another job.
    OtherJob {
        trace: String,
        /// The facts that differ.
        why: String,
    },
    /// Two traces of one rank; the second is not used.
    Duplicate {
        trace: String,
        /// The trace that has the rank already.
        other: String,
    },
    /// Ranks of the job without a trace.
    Missing {
        /// Numbers of the missing ranks, if the traces declare ranks.
        ranks: Vec<u32>,
        /// How many.
        count: u32,
    },
    /// A rank's clock differs from the first rank's clock.
    Clock {
        trace: String,
        /// Nanoseconds by which the clock is ahead.
        ahead_ns: i64,
    },
    /// A rank that recorded fewer collectives than others: another number of iterations.
    Unequal {
        trace: String,
        communicator: String,
        /// Collectives with a partner on every rank.
        joined: usize,
        /// Collectives of this rank.
        own: usize,
    },
    /// The ranks of a communicator recorded different collectives.
    NotJoined { communicator: String, trace: String },
}

impl JobProblem {
    /// Text of the problem as a sentence.
    pub fn problem_text(&self) -> String {
        match self {
            Self::Cut { trace, why } => format!("{trace}: read in part only: {why}"),
            Self::NoCommunication { trace } => {
                format!("{trace}: no operation communicates; the trace is not used")
            }
            Self::OtherJob { trace, why } => {
                format!("{trace}: a rank of another job ({why}); the trace is not used")
            }
            Self::Duplicate { trace, other } => {
                format!("{trace}: the same rank as {other}; the trace is not used")
            }
            Self::Missing { ranks, count } if ranks.is_empty() => {
                format!(
                    "{count} ranks of the job have no trace: waiting for them counts as transfer"
                )
            }
            Self::Missing { ranks, .. } => {
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
            Self::Clock { trace, ahead_ns } => format!(
                "{trace}: its clock is {:.3} ms {}; aligned by the ends of collectives",
                ahead_ns.abs() as f64 / 1e6,
                if *ahead_ns < 0 { "behind" } else { "ahead" }
            ),
            Self::Unequal { trace, communicator, joined, own } => format!(
                "{trace}: {joined} of its {own} collectives of {communicator} have a partner on \
                 every rank; the others are not used"
            ),
            Self::NotJoined { communicator, trace } => format!(
                "{trace}: its collectives of {communicator} differ in order, kind or size from \
                 those of the other ranks and are not joined"
            ),
        }
    }
}

/// A rank in the collectives that all ranks joined.
#[derive(Debug, Clone)]
pub struct RankCollectiveSum {
    /// Name of the rank: the declared rank, else the trace.
    pub name: String,
    pub part: RankTrace,
    /// Time of the rank while all ranks were recorded.
    pub times: RankTimeParts,
    /// Nanoseconds in which the rank waited for others inside collectives.
    pub waited_ns: i64,
    /// Collectives to which the rank came last.
    pub last: usize,
    /// Nanoseconds by which the rank alone delayed collectives.
    pub delayed_ns: i64,
    /// Nanoseconds between the collectives of the rank.
    pub between_ns: i64,
    /// Nanoseconds by which the job would be shorter if this rank and its host worked as fast as
    /// the median rank, replayed over the operations of all ranks.
    pub gain_ns: i64,
}

/// Sum over the collectives of one kind and size.
#[derive(Debug, Clone, PartialEq)]
pub struct CollectiveKindSum {
    /// Which.
    pub collective: CollectiveKind,
    /// Bytes of each collective; 0 if the bytes were not recorded.
    pub bytes: u64,
    /// Ranks that take part.
    pub ranks: usize,
    /// How many.
    pub count: usize,
    /// Total time from the arrival of the last rank to the end of the collective, nanoseconds.
    pub transfer_ns: i64,
    /// Time from the arrival of each rank to the arrival of the last one: mean over the ranks,
    /// summed over collectives, nanoseconds.
    pub skew_ns: i64,
    /// Bus bandwidth of the transfer in GB/s.
    pub bus: Option<f64>,
}

/// A job: the joined traces of several ranks.
#[derive(Debug, Clone)]
pub struct JoinedJob {
    /// Ranks of the job, in the order of their numbers or traces.
    pub ranks: Vec<RankCollectiveSum>,
    /// Collectives summed by kind and size, the most expensive first.
    pub collectives: Vec<CollectiveKindSum>,
    /// Nanoseconds that each rank (outer) waited for each other one (inner).
    pub waits: Vec<Vec<i64>>,
    /// Collectives that were joined.
    pub joined: usize,
    /// Time from the first to the last joined collective, nanoseconds.
    pub span_ns: i64,
    /// How exactly clocks are aligned, nanoseconds: the median difference of the ends.
    pub precision_ns: i64,
    /// The link within a host, where the devices are known: The link's GB/s in each direction, and
    /// its name.
    pub link: Option<(f64, &'static str)>,
    /// The critical path through the ranks, and what changes would gain.
    pub path: JobCriticalPath,
    /// Limits of the conclusions.
    pub problems: Vec<JobProblem>,
}

impl JoinedJob {
    /// The severity of the slowest straggler: from a tenth of the span on it is severe.
    pub fn worst_severity(&self) -> Option<FindingSeverity> {
        let straggler = self.straggler_ranks().into_iter().next()?;
        Some(FindingSeverity::from_saving(self.felt_rank_delay_ns(straggler), self.span_ns))
    }

    /// The least and the greatest share of exposed communication in the time of a rank.
    #[allow(clippy::cast_precision_loss)]
    pub fn exposed_share_range(&self) -> Option<(f64, f64)> {
        let share =
            |of: &RankCollectiveSum| of.times.exposed_ns as f64 / of.times.total_ns().max(1) as f64;
        let shares = self.ranks.iter().map(share);
        let least = shares.clone().reduce(f64::min)?;
        Some((least, shares.fold(0.0, f64::max)))
    }

    /// Nanoseconds by which a rank delays the others where they have nothing else to do: waiting
    /// that compute hides costs nothing.
    fn felt_rank_delay_ns(&self, rank: &RankCollectiveSum) -> i64 {
        let others = self.ranks.iter().filter(|other| other.name != rank.name);
        let exposed = others.map(|other| other.times.exposed_ns).max().unwrap_or(0);
        rank.delayed_ns.min(exposed)
    }

    /// Ranks that delay the others by 5 % of the span or more, where no compute hides that, and by
    /// more than their clocks may differ in each collective, the slowest first.
    pub fn straggler_ranks(&self) -> Vec<&RankCollectiveSum> {
        let mut late: Vec<&RankCollectiveSum> = self
            .ranks
            .iter()
            .filter(|rank| {
                let clocks = i64::try_from(rank.last).unwrap_or(i64::MAX);
                let clocks = self.precision_ns.saturating_mul(clocks.max(1));
                let delay = self.felt_rank_delay_ns(rank);
                delay > clocks && delay * 20 >= self.span_ns
            })
            .collect();
        late.sort_by_key(|rank| std::cmp::Reverse(rank.delayed_ns));
        late
    }
}

/// Joins the traces of several ranks to one job. Traces that do not belong to the job are reported
/// and not used.
pub fn join_ranks(parts: Vec<RankTrace>) -> JoinedJob {
    let mut problems: Vec<JobProblem> = parts.iter().filter_map(problem_if_cut_short).collect();
    let mut parts = parts_of_one_job(parts, &mut problems);
    rank_summary::label(&mut parts);
    let links = CommunicatorLinks::new(&parts, &mut problems);
    let (parts, clocks) = links.rank_clocks(parts, &mut problems);
    let meetings = collective_meetings(&parts, &clocks, &mut problems);
    note_missing_ranks(&parts, &mut problems);
    sum_job(parts, &clocks, &meetings, problems)
}

/// Whether the trace of a part could not be read to its end.
fn problem_if_cut_short(part: &RankTrace) -> Option<JobProblem> {
    let why = part.recorded.trace.quality.unreadable.first()?.clone();
    Some(JobProblem::Cut { trace: part.name.clone(), why })
}

/// The parts that may belong to one job.
fn parts_of_one_job(parts: Vec<RankTrace>, problems: &mut Vec<JobProblem>) -> Vec<RankTrace> {
    let mut worlds: BTreeMap<u32, usize> = BTreeMap::new();
    parts.iter().filter_map(|of| of.world).for_each(|world| *worlds.entry(world).or_default() += 1);
    let world = worlds.iter().max_by_key(|&(world, count)| (count, world)).map(|(&world, _)| world);
    let mut kept: Vec<RankTrace> = Vec::new();
    for part in parts {
        let twin = kept.iter().find(|other| match part.rank.zip(other.rank) {
            Some((rank, other)) => rank == other,
            None => part.span == other.span && part.communicators == other.communicators,
        });
        if part.communicators.is_empty() {
            problems.push(JobProblem::NoCommunication { trace: part.name });
        } else if let (Some(own), Some(world)) = (part.world, world)
            && own != world
        {
            let why = format!("{own} ranks, the others {world}");
            problems.push(JobProblem::OtherJob { trace: part.name, why });
        } else if let Some(twin) = twin {
            problems.push(JobProblem::Duplicate { trace: part.name, other: twin.name.clone() });
        } else {
            kept.push(part);
        }
    }
    kept.sort_by_key(|part| part.rank.unwrap_or(u32::MAX));
    kept
}

/// Correspondence between a rank's collectives and another rank's in one communicator.
#[derive(Debug, Clone, Copy)]
struct RankLink {
    communicator: usize,
    rank: usize,
    reference: usize,
    /// Number that the rank's first collective has on the reference rank.
    shift: i64,
    /// Time of the rank's clock minus the time of the reference clock.
    ahead: ClockDifference,
    matched: usize,
    spread_ns: i64,
}

/// Links between the ranks' communicators, and communicators by name.
struct CommunicatorLinks {
    links: Vec<RankLink>,
}

impl CommunicatorLinks {
    fn new(parts: &[RankTrace], problems: &mut Vec<JobProblem>) -> Self {
        let mut links = Vec::new();
        for (communicator, (name, members)) in ranks_by_communicator(parts).into_iter().enumerate()
        {
            let length = |&(_, of): &(usize, &RankCommunicator)| of.entries.len();
            let reference = members.iter().max_by_key(|of| (length(of), std::cmp::Reverse(of.0)));
            let Some(&(reference, longest)) = reference else { continue };
            for &(rank, own) in members.iter().filter(|of| of.0 != reference) {
                match find_collective_shift(&own.entries, &longest.entries) {
                    Some((shift, ahead, matched, spread_ns)) => {
                        let one = parts[rank].is_same_trace(&parts[reference]);
                        let ahead = if one { ClockDifference::default() } else { ahead };
                        links.push(RankLink {
                            communicator,
                            rank,
                            reference,
                            shift,
                            ahead,
                            matched,
                            spread_ns,
                        });
                    }
                    None => problems.push(JobProblem::NotJoined {
                        communicator: name.clone(),
                        trace: parts[rank].name.clone(),
                    }),
                }
            }
        }
        Self { links }
    }

    /// Difference between each rank's clock and the first rank's clock, through the communicators
    /// that join them. Ranks that no communicator joins with the largest part are reported and
    /// dropped.
    fn rank_clocks(
        &self,
        parts: Vec<RankTrace>,
        problems: &mut Vec<JobProblem>,
    ) -> (Vec<RankTrace>, Vec<RankClock>) {
        let mut order: Vec<&RankLink> = self.links.iter().collect();
        order.sort_by_key(|link| std::cmp::Reverse(link.matched));
        // The largest set of ranks that are joined, from each possible first rank.
        let reach = |first: usize| {
            let mut clocks: Vec<Option<RankClock>> = vec![None; parts.len()];
            if let Some(clock) = clocks.get_mut(first) {
                *clock = Some(RankClock::default());
            }
            while let Some((rank, clock)) =
                order.iter().find_map(|link| match (clocks[link.reference], clocks[link.rank]) {
                    (Some(reference), None) => Some((
                        link.rank,
                        reference.clock_behind_link(link.ahead, link.spread_ns, 1),
                    )),
                    (None, Some(rank)) => Some((
                        link.reference,
                        rank.clock_behind_link(link.ahead, link.spread_ns, -1),
                    )),
                    _ => None,
                })
            {
                clocks[rank] = Some(clock);
            }
            clocks
        };
        let reached = |clocks: &Vec<Option<RankClock>>| clocks.iter().flatten().count();
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
                        |of| !matches!(of, JobProblem::NotJoined { trace, .. } if *trace == part.name),
                    );
                    problems.push(JobProblem::OtherJob {
                        trace: part.name,
                        why: "its collectives differ in order, kind or size".to_owned(),
                    });
                }
            }
        }
        for (part, clock) in kept.iter().zip(&clocks) {
            let ahead_ns = clock.ns_ahead_of_job_clock(part.span.0);
            if ahead_ns.abs() >= MAX_SAME_CLOCK_DIFFERENCE_NS {
                problems.push(JobProblem::Clock { trace: part.name.clone(), ahead_ns });
            }
        }
        (kept, clocks)
    }
}

/// The ranks that belong to each communicator.
fn ranks_by_communicator(parts: &[RankTrace]) -> BTreeMap<String, Vec<(usize, &RankCommunicator)>> {
    let mut members: BTreeMap<String, Vec<(usize, &RankCommunicator)>> = BTreeMap::new();
    for (rank, part) in parts.iter().enumerate() {
        for communicator in &part.communicators {
            members.entry(communicator.name.clone()).or_default().push((rank, communicator));
        }
    }
    members
}

fn collective_and_bytes(entry: &RankCollective) -> (CollectiveKind, u64) {
    (entry.collective, entry.bytes)
}

/// Finds the shift at which a rank's collectives match a longer list: kinds and sizes must agree,
/// and the ends must differ least; of several such shifts the smallest.
fn find_collective_shift(
    own: &[RankCollective],
    longest: &[RankCollective],
) -> Option<(i64, ClockDifference, usize, i64)> {
    let length = |entries: &[RankCollective]| i64::try_from(entries.len()).unwrap_or(i64::MAX);
    let extra = length(longest) - length(own);
    let mut shifts: Vec<i64> = (-MAX_COLLECTIVE_SHIFT..=MAX_COLLECTIVE_SHIFT)
        .chain(extra - MAX_COLLECTIVE_SHIFT..=extra + MAX_COLLECTIVE_SHIFT)
        .collect();
    shifts.sort_by_key(|shift| (shift.abs(), *shift));
    shifts.dedup();
    let candidates: Vec<(i64, ClockOffsets, i64)> = shifts
        .into_iter()
        .filter_map(|shift| {
            let pairs = matching_pairs(own, longest, shift)?;
            let offsets =
                sampled_pairs(&pairs).map(|(a, b)| (b.end, a.end - b.end)).collect::<Vec<_>>();
            let spread = offset_spread(&offsets);
            Some((shift, offsets, spread))
        })
        .collect();
    let least = candidates.iter().map(|&(.., spread)| spread).min()?;
    let best = candidates.into_iter().find(|&(.., spread)| spread <= 2 * least + 1000)?;
    let (shift, offsets, spread) = best;
    let matched = matching_pairs(own, longest, shift)?.len();
    Some((shift, fit_clock_line(&offsets), matched, spread))
}

/// Pairs of a time and the difference of two clocks at it.
type ClockOffsets = Vec<(i64, i64)>;

type CollectivePair<'a> = (&'a RankCollective, &'a RankCollective);

/// The pairs of collectives at a shift, if most of the pairs agree.
fn matching_pairs<'a>(
    own: &'a [RankCollective],
    longest: &'a [RankCollective],
    shift: i64,
) -> Option<Vec<CollectivePair<'a>>> {
    let skip = |by: i64| usize::try_from(by.max(0)).unwrap_or(usize::MAX);
    let pairs: Vec<CollectivePair<'a>> =
        own.iter().skip(skip(-shift)).zip(longest.iter().skip(skip(shift))).collect();
    #[allow(clippy::cast_precision_loss)]
    let enough = !pairs.is_empty() && pairs.len() as f64 >= MIN_PARTNERED_SHARE * own.len() as f64;
    // A few matching pairs of collectives can agree by chance.
    if !enough || (shift != 0 && pairs.len() < 3) {
        return None;
    }
    let agree = sampled_pairs(&pairs)
        .filter(|(a, b)| collective_and_bytes(a) == collective_and_bytes(b))
        .count();
    #[allow(clippy::cast_precision_loss)]
    let share = agree as f64 / sampled_pairs(&pairs).count() as f64;
    (share >= MIN_AGREEING_SHARE).then_some(pairs)
}

fn sampled_pairs<'a, 'b>(
    pairs: &'b [CollectivePair<'a>],
) -> impl Iterator<Item = CollectivePair<'a>> + use<'a, 'b> {
    pairs.iter().step_by(pairs.len().div_ceil(MAX_COMPARED_COLLECTIVES).max(1)).copied()
}

fn median_offset(values: impl Iterator<Item = i64>) -> i64 {
    let mut values: Vec<i64> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

/// The median distance from a line through the offsets.
fn offset_spread(offsets: &[(i64, i64)]) -> i64 {
    let line = fit_clock_line(offsets);
    median_offset(offsets.iter().map(|&(time, offset)| (offset - line.offset_at(time)).abs()))
}

/// Fits a line through the median of the first third and the median of the last third of the
/// offsets.
#[allow(clippy::cast_precision_loss)]
fn fit_clock_line(offsets: &[(i64, i64)]) -> ClockDifference {
    let third = offsets.len() / 3;
    let medians = |part: &[(i64, i64)]| {
        (median_offset(part.iter().map(|of| of.0)), median_offset(part.iter().map(|of| of.1)))
    };
    if third < 3 {
        let (at, offset) = medians(offsets);
        return ClockDifference { at, offset, slope: 0.0 };
    }
    let ((t0, o0), (t1, o1)) =
        (medians(&offsets[..third]), medians(&offsets[offsets.len() - third..]));
    // A drift below 1 µs over the recording is noise.
    let slope =
        if (o1 - o0).abs() < 1000 { 0.0 } else { (o1 - o0) as f64 / (t1 - t0).max(1) as f64 };
    let (at, offset) = if slope == 0.0 { medians(offsets) } else { (t0, o0) };
    ClockDifference { at, offset, slope }
}

/// The meetings of all communicators, in the order of their arrival.
fn collective_meetings(
    parts: &[RankTrace],
    clocks: &[RankClock],
    problems: &mut Vec<JobProblem>,
) -> Vec<CollectiveMeeting> {
    let mut all: Vec<CollectiveMeeting> = Vec::new();
    let links = CommunicatorLinks::new(parts, &mut Vec::new()).links;
    for (number, (name, members)) in ranks_by_communicator(parts).into_iter().enumerate() {
        let own: Vec<&RankLink> = links.iter().filter(|link| link.communicator == number).collect();
        let Some(first) = own.first() else { continue };
        let reference = first.reference;
        let shift_of: HashMap<usize, i64> =
            own.iter().map(|link| (link.rank, link.shift)).chain([(reference, 0)]).collect();
        // Numbers of those collectives of the reference that every rank has.
        let joined: Vec<(usize, &RankCommunicator, i64)> = members
            .iter()
            .filter_map(|&(rank, of)| Some((rank, of, *shift_of.get(&rank)?)))
            .collect();
        let count = |of: &RankCommunicator| i64::try_from(of.entries.len()).unwrap_or(i64::MAX);
        let from = joined.iter().map(|&(.., shift)| shift).max().unwrap_or(0).max(0);
        let until = joined.iter().map(|&(_, of, shift)| count(of) + shift).min().unwrap_or(0);
        let meetings = usize::try_from(until - from).unwrap_or(0);
        for &(rank, of, _) in &joined {
            if of.entries.len() > meetings {
                problems.push(JobProblem::Unequal {
                    trace: parts[rank].name.clone(),
                    communicator: name.clone(),
                    joined: meetings,
                    own: of.entries.len(),
                });
            }
        }
        for index in from..until {
            let entries = joined.iter().map(|&(rank, of, shift)| {
                let at = usize::try_from(index - shift).expect("every rank has this number");
                (rank, of.entries[at])
            });
            let entries: Vec<(usize, RankCollective)> = entries.collect();
            let first = entries[0].1;
            if entries
                .iter()
                .any(|(_, entry)| collective_and_bytes(entry) != collective_and_bytes(&first))
            {
                continue;
            }
            all.push(CollectiveMeeting {
                collective: first.collective,
                bytes: first.bytes,
                bus_bytes: first.bus_bytes,
                ranks: entries
                    .iter()
                    .map(|&(rank, RankCollective { start, end, operation, .. })| {
                        let clock = &clocks[rank];
                        let (start, end) = (clock.job_time(start), clock.job_time(end));
                        RankArrival { rank, operation, start, end }
                    })
                    .collect(),
            });
        }
    }
    all.sort_by_key(|meeting| meeting.last_arrival().0);
    all
}

/// Records which ranks the job has without a trace.
fn note_missing_ranks(parts: &[RankTrace], problems: &mut Vec<JobProblem>) {
    let Some(world) = parts.iter().filter_map(|of| of.world).max() else { return };
    let have: Vec<u32> = parts.iter().filter_map(|of| of.rank).collect();
    let count = world.saturating_sub(u32::try_from(parts.len()).unwrap_or(u32::MAX));
    if count > 0 {
        let all_declared = have.len() == parts.len();
        let ranks = (0..world).filter(|rank| all_declared && !have.contains(rank));
        problems.push(JobProblem::Missing { ranks: ranks.collect(), count });
    }
}

/// Time of each rank between its collectives.
fn time_between_collectives(ranks: usize, meetings: &[CollectiveMeeting]) -> Vec<i64> {
    let mut between = vec![0i64; ranks];
    let mut until: Vec<Option<i64>> = vec![None; ranks];
    for of in meetings.iter().flat_map(|meeting| &meeting.ranks) {
        between[of.rank] += until[of.rank].map_or(0, |until| of.start - until);
        until[of.rank] = Some(of.end);
    }
    between
}

/// Collectives with their bus bandwidth, longest total time first.
fn collectives_by_time(
    by_kind: HashMap<(CollectiveKind, u64), CollectiveKindSum>,
    bus: &HashMap<(CollectiveKind, u64), f64>,
) -> Vec<CollectiveKindSum> {
    let mut collectives: Vec<CollectiveKindSum> = by_kind
        .into_iter()
        .map(|(key, sum)| {
            #[allow(clippy::cast_precision_loss)]
            let bus = Some(bus[&key] / sum.transfer_ns.max(1) as f64).filter(|&bus| bus > 0.0);
            CollectiveKindSum { bus, ..sum }
        })
        .collect();
    collectives.sort_by_key(|of| {
        (std::cmp::Reverse(of.transfer_ns + of.skew_ns), of.collective, of.bytes)
    });
    collectives
}

fn sum_job(
    parts: Vec<RankTrace>,
    clocks: &[RankClock],
    meetings: &[CollectiveMeeting],
    problems: Vec<JobProblem>,
) -> JoinedJob {
    let count = parts.len();
    let mut waits = vec![vec![0i64; count]; count];
    let mut by_kind: HashMap<(CollectiveKind, u64), CollectiveKindSum> = HashMap::new();
    let mut bus: HashMap<(CollectiveKind, u64), f64> = HashMap::new();
    let (mut last_count, mut delayed) = (vec![0usize; count], vec![0i64; count]);
    // The time before a rank's recording began is unknown.
    let begun: Vec<i64> =
        parts.iter().zip(clocks).map(|(part, clock)| clock.job_time(part.span.0)).collect();
    for meeting in meetings {
        let (ready, last) = meeting.last_arrival();
        let begun = begun[last].min(ready);
        let mut skew = 0;
        for &RankArrival { rank, start, end, .. } in &meeting.ranks {
            let wait = (ready - start.max(begun)).clamp(0, end - start);
            waits[rank][last] += wait;
            skew += wait;
        }
        let others = meeting.ranks.iter().filter(|of| of.rank != last).map(|of| of.start);
        if let Some(second) = others.max() {
            last_count[last] += 1;
            delayed[last] += ready - second.max(begun);
        }
        let key = (meeting.collective, meeting.bytes);
        let sum = by_kind.entry(key).or_insert(CollectiveKindSum {
            collective: meeting.collective,
            bytes: meeting.bytes,
            ranks: meeting.ranks.len(),
            count: 0,
            transfer_ns: 0,
            skew_ns: 0,
            bus: None,
        });
        sum.count += 1;
        sum.transfer_ns += meeting.collective_transfer_ns();
        sum.skew_ns += skew / i64::try_from(meeting.ranks.len()).unwrap_or(1);
        *bus.entry(key).or_default() += meeting.bus_bytes;
    }
    let collectives = collectives_by_time(by_kind, &bus);
    let times = || meetings.iter().flat_map(|of| &of.ranks);
    let end = times().map(|of| of.end).max().unwrap_or(0);
    // From this time on, all ranks are recorded.
    let all_begun = begun.iter().copied().max().unwrap_or(0).min(end);
    let ended = parts.iter().zip(clocks).map(|(part, clock)| clock.job_time(part.span.1));
    let all_ended = ended.max().unwrap_or(0).max(all_begun);
    let first = times().map(|of| of.start).min().unwrap_or(0).max(all_begun);
    let between = time_between_collectives(count, meetings);
    let (path, gains) = what_if::replay_job(&parts, clocks, meetings);
    let devices: Vec<Option<(f64, &'static str)>> =
        parts.iter().map(|part| bus_bandwidth::link_of_device(part.device.as_deref()?)).collect();
    let hosts: Vec<&Option<String>> = parts.iter().map(|part| &part.host).collect();
    let one_host = hosts.windows(2).all(|pair| pair[0] == pair[1]);
    let same = devices.windows(2).all(|pair| pair[0] == pair[1]);
    let ranks = parts.into_iter().enumerate().map(|(index, part)| RankCollectiveSum {
        name: part.label.clone(),
        times: part.rank_times_inside(&clocks[index], (all_begun, all_ended)),
        waited_ns: waits[index].iter().sum(),
        last: last_count[index],
        delayed_ns: delayed[index],
        between_ns: between[index],
        gain_ns: gains[index],
        part,
    });
    JoinedJob {
        ranks: ranks.collect(),
        collectives,
        waits,
        joined: meetings.len(),
        span_ns: end - first,
        precision_ns: clocks.iter().map(|clock| clock.spread_ns).max().unwrap_or(0),
        link: devices.first().copied().flatten().filter(|_| same && one_host),
        path,
        problems,
    }
}
