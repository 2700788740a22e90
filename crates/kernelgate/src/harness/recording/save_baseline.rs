//! Merges the run of a bench process into a baseline (`--save-baseline`).

use std::path::{Path, PathBuf};

use crate::harness::error::HarnessError;
use crate::harness::selection::cases::SelectedAndSkippedCases;
use crate::record::baseline::ReplacedBaselineRuns;
use crate::record::{BaselineFile, BenchProcessRun, RecordFileError, RecordFoldersOfPackage, file};

/// Opens the baseline before anything is measured, so that an unreadable file or an unwritable
/// folder is found early. Also reports which runs of the baseline the new run will replace, while
/// the user can still stop the process.
pub fn check_baseline_before_measuring(
    store: &RecordFoldersOfPackage,
    name: &str,
    run: &BenchProcessRun,
    selection: &SelectedAndSkippedCases<'_>,
) -> Result<PathBuf, HarnessError> {
    let path =
        store.path_of_baseline(&run.environment.baseline_folder_of_device_and_count(), name)?;
    let baseline = BaselineFile::read_or_create_empty(&path, name)?;
    file::check_file_is_writable(&path)?;
    let cases = selection.problems_with_cases.iter().flat_map(|group| &group.cases);
    print_replaced_baseline_runs(
        name,
        "will replace",
        &baseline.runs_that_merge_would_replace(run, cases.map(|case| case.case_id.as_str())),
    );
    Ok(path)
}

/// Merges the run. Merges the run into the baseline's file; the caller must hold the lock of the
/// file.
pub fn merge_run_into_baseline_file(
    path: &Path,
    name: &str,
    run: &BenchProcessRun,
) -> Result<(), RecordFileError> {
    let mut baseline = BaselineFile::read_or_create_empty(path, name)?;
    let replaced =
        baseline.runs_that_merge_would_replace(run, run.cases.keys().map(String::as_str));
    baseline.merge_run_replacing_other_code(run);
    file::write_record_atomically(path, &baseline)?;
    print_replaced_baseline_runs(name, "replaced", &replaced);
    let of_case = |id| baseline.cases.get(id).map_or(0, |case| case.runs.len());
    let most = run.cases.keys().map(of_case).max().unwrap_or_default();
    if most > 1 {
        eprintln!("baseline `{name}`: this run adds to others of the same build, now {most}");
    }
    Ok(())
}

fn print_replaced_baseline_runs(name: &str, what: &str, replaced: &[ReplacedBaselineRuns]) {
    for runs in replaced {
        let kept = if runs.max_replaced_runs_per_case > 1 {
            "; the gate keeps how they differed"
        } else {
            ""
        };
        eprintln!("baseline `{name}`: this run {what} {runs}{kept}");
    }
}
