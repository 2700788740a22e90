//! The collectives of all ranks replayed with other times between them: a collective starts when its
//! last rank arrives, and a rank goes on when it ends.

use super::meeting::Meeting;

/// Time of each rank between its collectives, and what the job gains if each rank took the median
/// time of all ranks where it took longer.
pub(super) fn gains(ranks: usize, meetings: &[Meeting]) -> (Vec<i64>, Vec<i64>) {
    let recorded = replay(ranks, meetings, |_, own, _| own);
    let mut between = vec![0i64; ranks];
    let mut until: Vec<Option<i64>> = vec![None; ranks];
    for meeting in meetings {
        for &(rank, start, end) in &meeting.ranks {
            between[rank] += until[rank].map_or(0, |until| start - until);
            until[rank] = Some(end);
        }
    }
    let mut sorted = between.clone();
    sorted.sort_unstable();
    let median = sorted.get(sorted.len() / 2).copied().unwrap_or(0);
    let gain = |rank: usize| {
        // Only a rank that takes longer than most can be made as fast as they are.
        if between[rank] <= median {
            return 0;
        }
        recorded
            - replay(
                ranks,
                meetings,
                |of, own, median| {
                    if of == rank { own.min(median) } else { own }
                },
            )
    };
    let gains = (0..ranks).map(gain).collect();
    (between, gains)
}

/// The end of the last collective. `length` gives the time of a rank from one collective to the next
/// from its own and the median of the ranks of that collective.
fn replay(ranks: usize, meetings: &[Meeting], length: impl Fn(usize, i64, i64) -> i64) -> i64 {
    // Recorded and replayed end of each rank's last collective.
    let mut until: Vec<Option<(i64, i64)>> = vec![None; ranks];
    let mut last = 0;
    let mut lengths: Vec<i64> = Vec::new();
    for meeting in meetings {
        let own = |&(rank, start, _): &(usize, i64, i64)| Some(start - until[rank]?.0);
        lengths.clear();
        lengths.extend(meeting.ranks.iter().filter_map(own));
        lengths.sort_unstable();
        let median = lengths.get(lengths.len() / 2).copied().unwrap_or(0);
        let arrival = |of: &(usize, i64, i64)| match until[of.0] {
            Some((recorded, replayed)) => replayed + length(of.0, of.1 - recorded, median),
            None => of.1,
        };
        let ready = meeting.ranks.iter().map(arrival).max().unwrap_or(0);
        let (recorded, _) = meeting.ready();
        for &(rank, _, end) in &meeting.ranks {
            let replayed = ready + (end - recorded);
            until[rank] = Some((end, replayed));
            last = last.max(replayed);
        }
    }
    last
}
