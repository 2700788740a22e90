//! Reads a trace from a file: the whole trace, the part that `--range` selects, or its GPUs as
//! ranks.

use std::path::Path;

use kernelgate_trace::analyze::ranges::restricted_reading;
use kernelgate_trace::diagnose::TraceDiagnosis;
use kernelgate_trace::diagnose::ranks::{self, JoinedJob};
use kernelgate_trace::model::Trace;
use kernelgate_trace::read::{self, WantedTraceParts};

/// Reads the needed tables of a trace; with a `range`, only operations launched inside it.
pub fn read_trace_tables(
    path: &Path,
    wanted: &WantedTraceParts,
    range: Option<&str>,
) -> anyhow::Result<Trace> {
    let failed = |error| anyhow::anyhow!("failed to {error}");
    let Some(range) = range else {
        return read::open_trace_file(path, wanted).map_err(failed);
    };
    restricted_reading::open_inside_ranges(path, wanted, range).map_err(failed)?.ok_or_else(|| {
        anyhow::anyhow!("--range {range}: no range of {} has this path", path.display())
    })
}

/// The GPUs of a trace as ranks of a job, if several of them communicate.
pub fn gpus(
    name: &str,
    path: &Path,
    diagnosis: &TraceDiagnosis,
) -> anyhow::Result<Option<JoinedJob>> {
    if diagnosis.devices.len() < 2 {
        return Ok(None);
    }
    let job =
        ranks::ranks_of_trace(name, path).map_err(|error| anyhow::anyhow!("failed to {error}"))?;
    Ok(job.filter(|job| job.joined > 0))
}
