//! Several traces of one job, joined by their collectives: the order, kind and size of what a
//! communicator did is the same on every rank, and a collective ends on all of them at nearly one
//! time, whatever their clocks show.

mod clock;
mod join_ranks;
mod joined_collective;
mod json;
mod rank_summary;
mod recorded;
mod text;
mod what_if;

pub use join_ranks::{CollectiveKindSum, JobProblem, JoinedJob, RankCollectiveSum, join_ranks};
pub use rank_summary::{RankCollective, RankCommunicator, RankTimeParts, RankTrace};
pub use what_if::{JobChangeGain, JobCriticalPath};

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::TraceError;
use crate::read::{self, WantedTraceParts};

type RankTraces = Result<Vec<RankTrace>, TraceError>;

/// Whether the parts declare different ranks of jobs of one size.
pub fn have_different_ranks(parts: &[RankTrace]) -> bool {
    let declared: Option<Vec<(u32, u32)>> = parts.iter().map(|of| of.rank.zip(of.world)).collect();
    declared.is_some_and(|mut declared| {
        declared.sort_unstable();
        declared.windows(2).all(|pair| pair[0].0 != pair[1].0 && pair[0].1 == pair[1].1)
    })
}

/// The GPUs of one trace as the ranks of a job; `None` if fewer than two of them communicate.
pub fn ranks_of_trace(name: &str, path: &Path) -> Result<Option<JoinedJob>, TraceError> {
    let parts = read_rank_traces(&[(name.to_owned(), path.to_owned())])?;
    Ok((parts.len() > 1).then(|| join_ranks(parts)))
}

/// Reads the traces of a job, several at a time, and keeps only the data that joins them.
///
/// # Errors
/// Fails with the errors of [`read::open_trace_file`], for the first trace that cannot be read.
pub fn read_rank_traces(traces: &[(String, PathBuf)]) -> Result<Vec<RankTrace>, TraceError> {
    let columns = WantedTraceParts { operations: true, calls: true, ..WantedTraceParts::default() };
    let read = |(name, path): &(String, PathBuf)| {
        Ok(RankTrace::extract_ranks(name, read::open_trace_file(Path::new(path), &columns)?))
    };
    let results: Vec<Mutex<Option<RankTraces>>> = traces.iter().map(|_| Mutex::new(None)).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(index) = Some(next.fetch_add(1, Ordering::Relaxed))
            && let Some(trace) = traces.get(index)
        {
            *results[index].lock().expect("no reader panics") = Some(read(trace));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        (0..threads.min(traces.len())).for_each(|_| {
            scope.spawn(work);
        });
    });
    let mut parts = Vec::new();
    for result in results {
        let result = result.into_inner().expect("no reader panics");
        parts.extend(result.expect("every trace was read")?);
    }
    Ok(parts)
}
