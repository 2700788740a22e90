//! Reads a trace file: the whole trace, only the work inside `--range`, or its GPUs as ranks of a
//! job.

use std::path::Path;

use kernelgate_trace::analyze::ranges::restricted_reading;
use kernelgate_trace::diagnose::TraceDiagnosis;
use kernelgate_trace::diagnose::ranks::{self, JobOfJoinedRanks};
use kernelgate_trace::model::Trace;
use kernelgate_trace::read::{self, WantedTraceParts};

/// Reads the requested parts of a trace; with `range`, only operations that were launched inside
/// this range.
pub fn read_trace_inside_range(
    path: &Path,
    wanted: &WantedTraceParts,
    range: Option<&str>,
) -> anyhow::Result<Trace> {
    let failed = |error| anyhow::anyhow!("failed to {error}");
    let Some(range) = range else {
        return read::open_trace_file(path, wanted).map_err(failed);
    };
    restricted_reading::open_trace_inside_ranges(path, wanted, range).map_err(failed)?.ok_or_else(
        || anyhow::anyhow!("--range {range}: no range of {} has this path", path.display()),
    )
}

/// Joins the GPUs of a trace as ranks of a job; `None` unless several GPUs communicate.
pub fn gpus_as_ranks(
    name: &str,
    path: &Path,
    diagnosis: &TraceDiagnosis,
) -> anyhow::Result<Option<JobOfJoinedRanks>> {
    if diagnosis.gpu_use_by_process.len() < 2 {
        return Ok(None);
    }
    let job = ranks::join_gpus_of_one_trace(name, path)
        .map_err(|error| anyhow::anyhow!("failed to {error}"))?;
    Ok(job.filter(|job| job.joined_collectives > 0))
}
