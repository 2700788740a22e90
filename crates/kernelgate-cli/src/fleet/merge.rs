//! Merges the records of shards: reads them from files and folders, checks that they belong
//! together, and writes merged runs as one session.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::counted_shards::{
    MaxAnchorRateDifference, ShardMergeAccount, ShardRecordWithFile, choose_records_to_merge,
};
use super::verification::VerificationShardRecord;
use crate::gate::calibration::{GateCalibration, anchors};
use crate::gate::comparison_shard::ComparisonShardRecord;
use kernelgate::protocol::CaseVerificationResponse;
use kernelgate::record::file::{self, RecordFileType};
use kernelgate::record::run::NOT_RUN_REASON_PREFIX;
use kernelgate::record::{
    BenchProcessRun, DifferingFactOfRuns, MeasurementOfRuns, RecordFileError, ShardOfWork,
};
use rayon::prelude::*;

/// Error: shard records cannot be merged.
#[derive(Debug, thiserror::Error)]
pub enum RecordMergeError {
    /// Error: a record file to merge cannot be read, or the merged record cannot be written.
    #[error(transparent)]
    RecordFile(#[from] RecordFileError),
    /// Error: a folder of records cannot be listed, or the folder of merged runs cannot be written.
    #[error("failed to {action} {}: {cause}", folder_path.display())]
    FolderAccess {
        /// The action that failed on the folder: "list", "write".
        action: &'static str,
        folder_path: PathBuf,
        cause: std::io::Error,
    },
    /// Error: the given paths contain no record file to merge.
    #[error("no record in {}", paths_on_one_line(.0))]
    NoRecordInPaths(Vec<PathBuf>),
    /// Error: a file to merge is not the record of a shard.
    #[error(
        "{}: not a shard of a run, a comparison, a calibration or a verification",
        .0.display()
    )]
    NotMergeableRecord(PathBuf),
    /// Error: the records to merge are of different kinds, such as a run and a comparison.
    #[error(
        "{} is a {one}, {} is a {other}: merge them one after the other", first.display(),
        second.display()
    )]
    Kinds { first: PathBuf, one: &'static str, second: PathBuf, other: &'static str },
    /// Error: a record to merge was measured without `--shard`, so it already contains all cases.
    #[error("{}: measured without --shard: it is the whole, not a part", .0.display())]
    MeasuredWithoutShard(PathBuf),
    /// Error: the output folder for the merged runs contains other files.
    #[error("--output {}: the folder is not empty", .0.display())]
    OutputFolderNotEmpty(PathBuf),
    /// Error: the records to merge differ in a fact that all shards of one work must share.
    #[error(
        "refused: {field} is `{left}` in {} and `{right}` in {}", files[0].display(),
        files[1].display()
    )]
    RecordsDifferInField { field: String, left: String, right: String, files: [PathBuf; 2] },
}

pub fn paths_on_one_line(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergedRecordKind {
    /// Runs of benches.
    BenchRuns,
    /// Records to merge that are comparisons of two builds.
    BuildComparisons,
    /// Records to merge that are parts of a calibration.
    CalibrationParts,
    /// Records of verifications, which compare outputs with their references.
    OutputVerifications,
}

impl MergedRecordKind {
    const fn record_kind_name(self) -> &'static str {
        match self {
            Self::BenchRuns => BenchProcessRun::FILE_KIND,
            Self::BuildComparisons => ComparisonShardRecord::FILE_KIND,
            Self::CalibrationParts => GateCalibration::FILE_KIND,
            Self::OutputVerifications => VerificationShardRecord::FILE_KIND,
        }
    }

    fn from_record_schema(schema: &str) -> Option<Self> {
        match schema {
            BenchProcessRun::SCHEMA => Some(Self::BenchRuns),
            ComparisonShardRecord::SCHEMA => Some(Self::BuildComparisons),
            GateCalibration::SCHEMA => Some(Self::CalibrationParts),
            VerificationShardRecord::SCHEMA => Some(Self::OutputVerifications),
            _ => None,
        }
    }
}

/// Returns the given files, and the `.json` files in the given folders and their subfolders,
/// sorted.
pub fn collect_record_files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, RecordMergeError> {
    let mut found = BTreeSet::new();
    let mut open: Vec<PathBuf> = paths.to_vec();
    while let Some(path) = open.pop() {
        if !path.is_dir() {
            found.insert(path);
            continue;
        }
        let failed = |cause| RecordMergeError::FolderAccess {
            action: "list",
            folder_path: path.clone(),
            cause,
        };
        for entry in std::fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let (kind, path) = (entry.file_type().map_err(failed)?, entry.path());
            let is_json = path.extension().is_some_and(|it| it == "json");
            // Hidden files are skipped because they are still being written; symbolic links are
            // skipped too.
            let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
            if !is_hidden && (kind.is_dir() || kind.is_file() && is_json) {
                open.push(path);
            }
        }
    }
    match found.is_empty() {
        true => Err(RecordMergeError::NoRecordInPaths(paths.to_vec())),
        false => Ok(found.into_iter().collect()),
    }
}

/// Returns the kind that all given record files have in common; different kinds are an error.
pub fn common_kind_of_records(files: &[PathBuf]) -> Result<MergedRecordKind, RecordMergeError> {
    let kinds: Vec<(MergedRecordKind, &PathBuf)> = files
        .par_iter()
        .map(|path| {
            let schema = file::read_schema_name_of_file(path)?;
            let kind = schema.as_deref().and_then(MergedRecordKind::from_record_schema);
            Ok((kind.ok_or_else(|| RecordMergeError::NotMergeableRecord(path.clone()))?, path))
        })
        .collect::<Result<_, RecordMergeError>>()?;
    let &(kind, first) =
        kinds.first().ok_or_else(|| RecordMergeError::NoRecordInPaths(files.to_vec()))?;
    match kinds.iter().find(|(other, _)| *other != kind) {
        Some((other, second)) => Err(RecordMergeError::Kinds {
            first: first.clone(),
            one: kind.record_kind_name(),
            second: (*second).clone(),
            other: other.record_kind_name(),
        }),
        None => Ok(kind),
    }
}

/// Reads a run record, and returns the folder name below `baselines/` of the device on which it was
/// measured.
pub fn baseline_folder_of_run_record(path: &Path) -> Result<String, RecordMergeError> {
    Ok(file::read_record::<BenchProcessRun>(path)?
        .environment
        .baseline_folder_of_device_and_count())
}

/// Reads a comparison shard's record, and returns the folder name below `baselines/` of the device
/// on which it was measured.
pub fn baseline_folder_of_comparison_shard(path: &Path) -> Result<String, RecordMergeError> {
    Ok(file::read_record::<ComparisonShardRecord>(path)?
        .environment
        .baseline_folder_of_device_and_count())
}

/// Reads the record of a part of a calibration, and returns the folder name below `baselines/` of
/// the device on which it was measured.
pub fn baseline_folder_of_calibration_part(path: &Path) -> Result<String, RecordMergeError> {
    Ok(file::read_record::<GateCalibration>(path)?
        .environment
        .baseline_folder_of_device_and_count())
}

/// Reads record files of one kind in parallel, and converts each into a shard record with its file.
fn read_shard_records<T: RecordFileType + Send>(
    files: &[PathBuf],
    piece: impl Fn(&PathBuf, String, T) -> Result<ShardRecordWithFile<T>, RecordMergeError> + Sync,
) -> Result<Vec<ShardRecordWithFile<T>>, RecordMergeError> {
    let one =
        |path: &PathBuf| piece(path, file::file_content_hash_hex(path)?, file::read_record(path)?);
    files.par_iter().map(one).collect()
}

/// Merged run records that together form one measurement, with the account of all records that were
/// given.
#[derive(Debug)]
pub struct MergedRunRecords {
    /// Shard records that the merge used.
    pub runs: Vec<ShardRecordWithFile<BenchProcessRun>>,
    /// Lists which of the given shard records were merged, are missing or were not used.
    pub merge_account: ShardMergeAccount,
    /// Number of cases that no process began to measure because its time limit had passed.
    pub cases_not_run: usize,
}

/// Merges the run records of shards of bench runs.
pub fn merge_run_shards(
    files: &[PathBuf],
    tolerance: MaxAnchorRateDifference,
) -> Result<MergedRunRecords, RecordMergeError> {
    let pieces = read_shard_records(files, |path, hash, run: BenchProcessRun| {
        let shard =
            run.shard.ok_or_else(|| RecordMergeError::MeasuredWithoutShard(path.clone()))?;
        Ok(ShardRecordWithFile {
            record_path: path.clone(),
            record_hash: hash,
            divided_work_name: bench_and_package_name(&run),
            shard,
            shard_ran_to_end: run.ended_normally,
            start_or_end_time: run.start_time.clone(),
            environment: run.environment.clone(),
            anchors: run.anchors.clone(),
            record: run,
        })
    })?;
    let pieces = check_runs_belong_together(pieces)?;
    let (runs, account) = choose_records_to_merge(pieces, tolerance);
    refuse_cases_in_two_shards(&runs, |run| run.cases.keys())?;
    let not_run = runs.iter().flat_map(|piece| piece.record.skipped.values());
    let not_run = not_run.filter(|why| why.starts_with(NOT_RUN_REASON_PREFIX)).count();
    Ok(MergedRunRecords { runs, merge_account: account, cases_not_run: not_run })
}

/// Returns the name of the work that a run's shards divide: "bench attention", with the package if
/// the record names one.
fn bench_and_package_name(run: &BenchProcessRun) -> String {
    match &run.package {
        Some(package) => format!("bench {} of {}", run.bench, package.name),
        None => format!("bench {}", run.bench),
    }
}

/// Returns the run records unchanged if they belong to one measurement; otherwise an error with the
/// first differing fact.
fn check_runs_belong_together(
    pieces: Vec<ShardRecordWithFile<BenchProcessRun>>,
) -> Result<Vec<ShardRecordWithFile<BenchProcessRun>>, RecordMergeError> {
    let refused = |pieces: &[ShardRecordWithFile<BenchProcessRun>],
                   differing: &DifferingFactOfRuns| {
        let file = |key: &String| {
            let of_key = pieces.iter().find(|piece| piece.record.key_in_baseline() == *key);
            of_key.map(|piece| piece.record_path.clone()).unwrap_or_default()
        };
        let case = differing.case_id.as_ref().map(|case| format!(" of {case}")).unwrap_or_default();
        RecordMergeError::RecordsDifferInField {
            field: format!("{}{case}", differing.fact_name),
            left: differing.first_run_value.clone(),
            right: differing.second_run_value.clone(),
            files: [file(&differing.runs[0]), file(&differing.runs[1])],
        }
    };
    match MeasurementOfRuns::check_runs_form_one_measurement(
        pieces.iter().map(|piece| &piece.record),
    ) {
        Err(differing) => Err(refused(&pieces, &differing)),
        Ok(()) => Ok(pieces),
    }
}

/// Copies the merged run records unchanged into a new folder, which appears complete or not at all.
pub fn write_merged_runs_into_folder(
    folder: &Path,
    runs: &[ShardRecordWithFile<BenchProcessRun>],
) -> Result<(), RecordMergeError> {
    let failed = |path: &Path, cause| RecordMergeError::FolderAccess {
        action: "write",
        folder_path: path.to_owned(),
        cause,
    };
    let mut names: BTreeMap<String, &Path> = BTreeMap::new();
    for piece in runs {
        let process = piece.record.bench_name_with_shard();
        let numbered = (2..).map(|number| format!("{process}-{number}.json"));
        let mut free = std::iter::once(format!("{process}.json")).chain(numbered);
        let name = free.find(|name| !names.contains_key(name)).unwrap_or_default();
        names.insert(name, &piece.record_path);
    }
    if folder.exists() {
        return match folder_holds_exactly_these_files(folder, &names) {
            true => Ok(()),
            false => Err(RecordMergeError::OutputFolderNotEmpty(folder.to_owned())),
        };
    }
    let parent = folder.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(|cause| failed(parent, cause))?;
    let temporary = file::create_temporary_folder_in(parent);
    let (temporary, _held) = temporary.map_err(|cause| failed(parent, cause))?;
    for (name, path) in names {
        let copied = std::fs::copy(path, temporary.path().join(&name));
        copied.map_err(|cause| failed(&folder.join(name), cause))?;
    }
    let written = temporary.keep();
    std::fs::rename(&written, folder).map_err(|cause| failed(folder, cause))
}

/// Returns whether a folder contains exactly the named files with contents equal to the source
/// files.
fn folder_holds_exactly_these_files(folder: &Path, names: &BTreeMap<String, &Path>) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let there: BTreeSet<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    there.iter().eq(names.keys())
        && names.iter().all(|(name, path)| {
            file::file_content_hash_hex(&folder.join(name)).ok()
                == file::file_content_hash_hex(path).ok()
        })
}

/// Comparison shards that together form one comparison, with the account of all records that were
/// given.
#[derive(Debug)]
pub struct MergedComparisonShards {
    /// Records that the merge used.
    pub shards: Vec<ComparisonShardRecord>,
    /// Account of the given records: merged, missing and not used.
    pub merge_account: ShardMergeAccount,
}

pub fn merge_comparison_shards(
    files: &[PathBuf],
    tolerance: MaxAnchorRateDifference,
) -> Result<MergedComparisonShards, RecordMergeError> {
    let pieces = read_shard_records(files, |path, hash, shard: ComparisonShardRecord| {
        Ok(ShardRecordWithFile {
            record_path: path.clone(),
            record_hash: hash,
            divided_work_name: "comparison".to_owned(),
            shard: shard.shard,
            shard_ran_to_end: true,
            start_or_end_time: shard.shard_end_time.clone(),
            environment: shard.environment.clone(),
            anchors: shard.anchors.clone(),
            record: shard,
        })
    })?;
    refuse_records_of_different_works(
        &pieces,
        ComparisonShardRecord::first_fact_that_prevents_merging,
    )?;
    let (pieces, account) = choose_records_to_merge(pieces, tolerance);
    refuse_cases_in_two_shards(&pieces, |shard| shard.first_round_times.keys())?;
    let shards = pieces.into_iter().map(|piece| piece.record).collect();
    Ok(MergedComparisonShards { shards, merge_account: account })
}

/// Returns an error if two different shards of one work contain the same case, because the plan
/// assigns each case to one shard.
fn refuse_cases_in_two_shards<'a, T, C: Iterator<Item = &'a String>>(
    pieces: &'a [ShardRecordWithFile<T>],
    cases: impl Fn(&'a T) -> C,
) -> Result<(), RecordMergeError> {
    let mut found: BTreeMap<(&str, &String), &ShardRecordWithFile<T>> = BTreeMap::new();
    for piece in pieces {
        for case in cases(&piece.record) {
            let earlier = found.insert((&piece.divided_work_name, case), piece);
            if let Some(earlier) = earlier.filter(|earlier| earlier.shard != piece.shard) {
                return Err(RecordMergeError::RecordsDifferInField {
                    field: format!("shard of {case}"),
                    left: earlier.shard.to_string(),
                    right: piece.shard.to_string(),
                    files: [earlier.record_path.clone(), piece.record_path.clone()],
                });
            }
        }
    }
    Ok(())
}

/// Name of a fact in which two records differ, with both values; `None` if the records may be
/// merged.
type FactThatDiffers = Option<(String, [String; 2])>;

/// Returns an error if any record differs from the first shard's record in a fact that all shards
/// must share.
fn refuse_records_of_different_works<T>(
    pieces: &[ShardRecordWithFile<T>],
    mismatch: impl Fn(&T, &T) -> FactThatDiffers,
) -> Result<(), RecordMergeError> {
    let key = |piece: &&ShardRecordWithFile<T>| -> (ShardOfWork, PathBuf) {
        (piece.shard, piece.record_path.clone())
    };
    let Some(first) = pieces.iter().min_by_key(key) else { return Ok(()) };
    for piece in pieces {
        if let Some((field, [left, right])) = mismatch(&first.record, &piece.record) {
            let files = [first.record_path.clone(), piece.record_path.clone()];
            return Err(RecordMergeError::RecordsDifferInField { field, left, right, files });
        }
    }
    Ok(())
}

/// The calibration that was merged from its parts, with the account of all records that were given.
#[derive(Debug)]
pub struct MergedCalibrationParts {
    /// The merged calibration; `None` if no given record could be used.
    pub calibration: Option<GateCalibration>,
    /// Account of the given records: merged, missing and not used.
    pub merge_account: ShardMergeAccount,
}

/// Merges the parts of a calibration, or several whole calibrations, into one calibration. Whole
/// calibrations are merged as repetitions: all their comparisons are used.
pub fn merge_calibration_records(
    files: &[PathBuf],
    tolerance: MaxAnchorRateDifference,
) -> Result<MergedCalibrationParts, RecordMergeError> {
    let whole = ShardOfWork { index_from_one: 1, shard_count: 1 };
    let pieces = read_shard_records(files, |path, hash, record: GateCalibration| {
        Ok(ShardRecordWithFile {
            record_path: path.clone(),
            record_hash: hash,
            divided_work_name: "calibration".to_owned(),
            shard: record.shard_identity.as_ref().map_or(whole, |part| part.shard),
            shard_ran_to_end: record.has_all_planned_comparisons(),
            start_or_end_time: record.first_comparison_start_time.clone(),
            environment: record.environment.clone(),
            anchors: anchors::median_anchors_of_comparisons(&record.comparisons),
            record,
        })
    })?;
    refuse_records_of_different_works(&pieces, GateCalibration::first_fact_that_prevents_merging)?;
    let is_part =
        |piece: &ShardRecordWithFile<GateCalibration>| piece.record.shard_identity.is_some();
    let (kept, account) = match pieces.iter().find(|piece| !is_part(piece)) {
        Some(sitting) if pieces.iter().any(is_part) => {
            return Err(RecordMergeError::MeasuredWithoutShard(sitting.record_path.clone()));
        }
        Some(_) => (pieces, ShardMergeAccount::default()),
        None => choose_records_to_merge(pieces, tolerance),
    };
    let mut kept = kept.into_iter().map(|piece| piece.record);
    let mut calibration = kept.next();
    if let Some(calibration) = &mut calibration {
        for other in kept {
            calibration.merge_checked_calibration_part(other);
        }
        calibration.shard_identity = None;
        calibration.derive_thresholds_and_anchor_tolerance();
    }
    Ok(MergedCalibrationParts { calibration, merge_account: account })
}

/// The verified cases of all shards of a verification, with the account of all records that were
/// given.
#[derive(Debug)]
pub struct MergedVerificationShards {
    /// Results of the verified cases, sorted by case id.
    pub rows: Vec<CaseVerificationResponse>,
    /// Account of the given records: merged, missing and not used.
    pub merge_account: ShardMergeAccount,
}

/// Merges verifications of shards. The merge of verifications ignores anchor rates, because output
/// errors do not depend on a card's speed.
pub fn merge_verification_shards(
    files: &[PathBuf],
) -> Result<MergedVerificationShards, RecordMergeError> {
    let pieces = read_shard_records(files, |path, hash, record: VerificationShardRecord| {
        Ok(ShardRecordWithFile {
            record_path: path.clone(),
            record_hash: hash,
            divided_work_name: "verification".to_owned(),
            shard: record.shard,
            shard_ran_to_end: record.every_bench_answered,
            start_or_end_time: record.verification_end_time.clone(),
            environment: record.environment.clone(),
            anchors: None,
            record,
        })
    })?;
    refuse_records_of_different_works(
        &pieces,
        VerificationShardRecord::first_fact_that_prevents_merging,
    )?;
    let (pieces, account) = choose_records_to_merge(pieces, MaxAnchorRateDifference::default());
    refuse_cases_in_two_shards(&pieces, |shard| shard.rows.iter().map(|row| &row.case_id))?;
    let mut rows: Vec<CaseVerificationResponse> =
        pieces.into_iter().flat_map(|piece| piece.record.rows).collect();
    rows.sort_by(|one, other| one.case_id.cmp(&other.case_id));
    Ok(MergedVerificationShards { rows, merge_account: account })
}
