//! Reads a trace from a file: the whole trace, or the part that `--range` selects.

use std::path::Path;

use kernelgate_trace::analyze::ranges::inside;
use kernelgate_trace::model::Trace;
use kernelgate_trace::read::{self, Wanted};

/// Reads the wanted tables of a trace; with a `range` only what was launched inside it.
pub fn open(path: &Path, wanted: &Wanted, range: Option<&str>) -> anyhow::Result<Trace> {
    let failed = |error| anyhow::anyhow!("failed to {error}");
    let Some(range) = range else {
        return read::open(path, wanted).map_err(failed);
    };
    inside::open(path, wanted, range).map_err(failed)?.ok_or_else(|| {
        anyhow::anyhow!("--range {range}: no range of {} has this path", path.display())
    })
}
