//! `--save-baseline`: the run of a bench process becomes part of a baseline.

use std::path::{Path, PathBuf};

use crate::harness::error::HarnessError;
use crate::harness::selection::cases::CaseSelectionResult;
use crate::record::baseline::ReplacedRuns;
use crate::record::{Baseline, BaselineStore, ProcessRun, RecordFileError, file};

/// Opens the baseline that the run will be merged into, before anything is measured, so that an
/// unreadable file or an unwritable folder is found early. The check also reports the runs that
/// will be replaced, while there is time to stop.
pub fn open_pending_baseline(
    store: &BaselineStore,
    name: &str,
    run: &ProcessRun,
    selection: &CaseSelectionResult<'_>,
) -> Result<PathBuf, HarnessError> {
    let path = store.baseline_path(&run.environment.baseline_folder_name(), name)?;
    let baseline = Baseline::open_or_empty(&path, name)?;
    file::check_writable(&path)?;
    let cases = selection.groups.iter().flat_map(|group| &group.cases);
    print_saved_baseline(
        name,
        "will replace",
        &baseline.runs_replaced_by(run, cases.map(|case| case.id.as_str())),
    );
    Ok(path)
}

/// Merges the run. The caller must hold the lock of the baseline's file.
pub fn save_to_baseline(path: &Path, name: &str, run: &ProcessRun) -> Result<(), RecordFileError> {
    let mut baseline = Baseline::open_or_empty(path, name)?;
    let replaced = baseline.runs_replaced_by(run, run.cases.keys().map(String::as_str));
    baseline.merge_run(run);
    file::write(path, &baseline)?;
    print_saved_baseline(name, "replaced", &replaced);
    let of_case = |id| baseline.cases.get(id).map_or(0, |case| case.runs.len());
    let most = run.cases.keys().map(of_case).max().unwrap_or_default();
    if most > 1 {
        eprintln!("baseline `{name}`: this run adds to others of the same build, now {most}");
    }
    Ok(())
}

fn print_saved_baseline(name: &str, what: &str, replaced: &[ReplacedRuns]) {
    for runs in replaced {
        let kept = if runs.runs > 1 { "; the gate keeps how they differed" } else { "" };
        eprintln!("baseline `{name}`: this run {what} {runs}{kept}");
    }
}
