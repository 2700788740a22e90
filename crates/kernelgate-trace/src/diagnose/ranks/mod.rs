//! Joins traces of one job's ranks by collectives: these have the same order, kind and size on
//! every rank, and end on all ranks at nearly the same time.

mod clock;
mod join_ranks;
mod joined_collective;
mod json;
mod rank_summary;
mod recorded;
mod text;
mod what_if;

pub use join_ranks::{
    CollectivesOfKindAndSize, JobOfJoinedRanks, ProblemOfJobTraces, RankWithCollectiveSums,
    join_ranks_to_job,
};
pub use rank_summary::{
    CommunicatorOfRank, RankTimeByActivity, RecordedRankCollective, TraceOfRank,
};
pub use what_if::{CriticalPathOfJob, JobChangeWithGain};

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::TraceError;
use crate::read::{self, WantedTraceParts};

type ReadRankTraces = Result<Vec<TraceOfRank>, TraceError>;

/// Whether all traces declare jobs of the same size and ranks that differ from each other.
pub fn do_traces_declare_different_ranks(parts: &[TraceOfRank]) -> bool {
    let declared: Option<Vec<(u32, u32)>> =
        parts.iter().map(|of| of.rank.zip(of.world_size)).collect();
    declared.is_some_and(|mut declared| {
        declared.sort_unstable();
        declared.windows(2).all(|pair| pair[0].0 != pair[1].0 && pair[0].1 == pair[1].1)
    })
}

/// Joins the GPUs of one trace as the ranks of a job; returns `None` if fewer than two of them
/// communicate.
pub fn join_gpus_of_one_trace(
    name: &str,
    path: &Path,
) -> Result<Option<JobOfJoinedRanks>, TraceError> {
    let parts = read_traces_of_ranks(&[(name.to_owned(), path.to_owned())])?;
    Ok((parts.len() > 1).then(|| join_ranks_to_job(parts)))
}

/// Reads the traces of a job's ranks, several at a time, and keeps only the data that joining and
/// replaying need.
///
/// # Errors
/// Fails with the errors of [`read::open_trace_file`], for the first trace that cannot be read.
pub fn read_traces_of_ranks(traces: &[(String, PathBuf)]) -> Result<Vec<TraceOfRank>, TraceError> {
    let columns = WantedTraceParts {
        reads_operations: true,
        reads_api_calls: true,
        ..WantedTraceParts::default()
    };
    let read = |(name, path): &(String, PathBuf)| {
        Ok(TraceOfRank::split_trace_into_ranks(
            name,
            read::open_trace_file(Path::new(path), &columns)?,
        ))
    };
    let results: Vec<Mutex<Option<ReadRankTraces>>> =
        traces.iter().map(|_| Mutex::new(None)).collect();
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
