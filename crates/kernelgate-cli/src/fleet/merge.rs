//! Merges shards: records are read from files and folders, checked to be of one plan, and written
//! as one session.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::counted_shards::{AnchorTolerance, MergeAccount, RecordPiece, choose_pieces};
use super::verification::VerificationShard;
use crate::gate::calibration::{Calibration, anchors};
use crate::gate::comparison_shard::ComparisonShard;
use kernelgate::protocol::VerifiedCase;
use kernelgate::record::file::{self, RecordType};
use kernelgate::record::run::NOT_RUN_PREFIX;
use kernelgate::record::{DifferingRunFact, Measurement, ProcessRun, RecordFileError, Shard};
use rayon::prelude::*;

/// Error: the records of shards cannot be merged.
#[derive(Debug, thiserror::Error)]
pub enum MergeError {
    /// Error: a record or folder cannot be read or written.
    #[error(transparent)]
    File(#[from] RecordFileError),
    /// Error: a folder cannot be listed or written.
    #[error("failed to {action} {}: {cause}", path.display())]
    Folder {
        /// The action that failed: "list", "write".
        action: &'static str,
        path: PathBuf,
        cause: std::io::Error,
    },
    /// There are no records.
    #[error("no record in {}", paths_on_one_line(.0))]
    Nothing(Vec<PathBuf>),
    /// Error: a file is not the record of a shard.
    #[error(
        "{}: not a shard of a run, a comparison, a calibration or a verification",
        .0.display()
    )]
    Foreign(PathBuf),
    /// Error: the records to merge are of different kinds.
    #[error(
        "{} is a {one}, {} is a {other}: merge them one after the other", first.display(),
        second.display()
    )]
    Kinds { first: PathBuf, one: &'static str, second: PathBuf, other: &'static str },
    /// A run is not a shard: it has all cases.
    #[error("{}: measured without --shard: it is the whole, not a part", .0.display())]
    NoShard(PathBuf),
    /// Error: the folder for the merged session has other files.
    #[error("--output {}: the folder is not empty", .0.display())]
    NotEmpty(PathBuf),
    /// Error: the records to merge do not belong together.
    #[error(
        "refused: {field} is `{left}` in {} and `{right}` in {}", files[0].display(),
        files[1].display()
    )]
    Refused { field: String, left: String, right: String, files: [PathBuf; 2] },
}

pub fn paths_on_one_line(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergedRecordKind {
    /// Runs of benches.
    Runs,
    /// Comparisons of two builds.
    Comparisons,
    /// Parts of a calibration.
    Calibrations,
    /// Records of comparisons of outputs with their references.
    Verifications,
}

impl MergedRecordKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Runs => ProcessRun::FILE_KIND,
            Self::Comparisons => ComparisonShard::FILE_KIND,
            Self::Calibrations => Calibration::FILE_KIND,
            Self::Verifications => VerificationShard::FILE_KIND,
        }
    }

    fn from_record_schema(schema: &str) -> Option<Self> {
        match schema {
            ProcessRun::SCHEMA => Some(Self::Runs),
            ComparisonShard::SCHEMA => Some(Self::Comparisons),
            Calibration::SCHEMA => Some(Self::Calibrations),
            VerificationShard::SCHEMA => Some(Self::Verifications),
            _ => None,
        }
    }
}

/// The named files, and the `.json` files of named folders, sorted.
pub fn record_files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, MergeError> {
    let mut found = BTreeSet::new();
    let mut open: Vec<PathBuf> = paths.to_vec();
    while let Some(path) = open.pop() {
        if !path.is_dir() {
            found.insert(path);
            continue;
        }
        let failed = |cause| MergeError::Folder { action: "list", path: path.clone(), cause };
        for entry in std::fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let (kind, path) = (entry.file_type().map_err(failed)?, entry.path());
            let is_json = path.extension().is_some_and(|it| it == "json");
            // Hidden files, which are still being written, and links do not count.
            let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
            if !is_hidden && (kind.is_dir() || kind.is_file() && is_json) {
                open.push(path);
            }
        }
    }
    match found.is_empty() {
        true => Err(MergeError::Nothing(paths.to_vec())),
        false => Ok(found.into_iter().collect()),
    }
}

/// Returns the kind that all records have in common.
pub fn kind(files: &[PathBuf]) -> Result<MergedRecordKind, MergeError> {
    let kinds: Vec<(MergedRecordKind, &PathBuf)> = files
        .par_iter()
        .map(|path| {
            let schema = file::schema_of_file(path)?;
            let kind = schema.as_deref().and_then(MergedRecordKind::from_record_schema);
            Ok((kind.ok_or_else(|| MergeError::Foreign(path.clone()))?, path))
        })
        .collect::<Result<_, MergeError>>()?;
    let &(kind, first) = kinds.first().ok_or_else(|| MergeError::Nothing(files.to_vec()))?;
    match kinds.iter().find(|(other, _)| *other != kind) {
        Some((other, second)) => Err(MergeError::Kinds {
            first: first.clone(),
            one: kind.name(),
            second: (*second).clone(),
            other: other.name(),
        }),
        None => Ok(kind),
    }
}

/// Returns the folder name of a run's device below `baselines/`.
pub fn device_of_run(path: &Path) -> Result<String, MergeError> {
    Ok(file::read::<ProcessRun>(path)?.environment.baseline_folder_name())
}

/// Returns the folder name of the device below `baselines/`, from a shard of a comparison.
pub fn device_of_comparison(path: &Path) -> Result<String, MergeError> {
    Ok(file::read::<ComparisonShard>(path)?.environment.baseline_folder_name())
}

/// Returns the folder name of the device below `baselines/`, from a part of a calibration.
pub fn device_of_calibration(path: &Path) -> Result<String, MergeError> {
    Ok(file::read::<Calibration>(path)?.environment.baseline_folder_name())
}

/// Reads record files of one kind.
fn read_records<T: RecordType + Send>(
    files: &[PathBuf],
    piece: impl Fn(&PathBuf, String, T) -> Result<RecordPiece<T>, MergeError> + Sync,
) -> Result<Vec<RecordPiece<T>>, MergeError> {
    let one = |path: &PathBuf| piece(path, file::content_hash_of_file(path)?, file::read(path)?);
    files.par_iter().map(one).collect()
}

/// Runs that are one measurement, with the fate of all records.
#[derive(Debug)]
pub struct MergedRuns {
    /// The records that count.
    pub runs: Vec<RecordPiece<ProcessRun>>,
    /// Lists of records that count, that are missing and that do not count.
    pub account: MergeAccount,
    /// Number of cases that no process began, because time was over.
    pub not_run: usize,
}

/// Merges runs of benches.
pub fn merge_runs(files: &[PathBuf], tolerance: AnchorTolerance) -> Result<MergedRuns, MergeError> {
    let pieces = read_records(files, |path, hash, run: ProcessRun| {
        let shard = run.shard.ok_or_else(|| MergeError::NoShard(path.clone()))?;
        Ok(RecordPiece {
            path: path.clone(),
            hash,
            work: bench_and_package_name(&run),
            shard,
            complete: run.complete,
            time: run.started.clone(),
            environment: run.environment.clone(),
            anchors: run.anchors.clone(),
            record: run,
        })
    })?;
    let pieces = checked_together(pieces)?;
    let (runs, account) = choose_pieces(pieces, tolerance);
    refuse_repeated_cases(&runs, |run| run.cases.keys())?;
    let not_run = runs.iter().flat_map(|piece| piece.record.skipped.values());
    let not_run = not_run.filter(|why| why.starts_with(NOT_RUN_PREFIX)).count();
    Ok(MergedRuns { runs, account, not_run })
}

/// Name of the merged work: "bench attention", with the package if the record names one.
fn bench_and_package_name(run: &ProcessRun) -> String {
    match &run.package {
        Some(package) => format!("bench {} of {}", run.bench, package.name),
        None => format!("bench {}", run.bench),
    }
}

/// Returns the records of the shards if their runs belong together.
fn checked_together(
    pieces: Vec<RecordPiece<ProcessRun>>,
) -> Result<Vec<RecordPiece<ProcessRun>>, MergeError> {
    let refused = |pieces: &[RecordPiece<ProcessRun>], differing: &DifferingRunFact| {
        let file = |key: &String| {
            let of_key = pieces.iter().find(|piece| piece.record.baseline_key() == *key);
            of_key.map(|piece| piece.path.clone()).unwrap_or_default()
        };
        let case = differing.case.as_ref().map(|case| format!(" of {case}")).unwrap_or_default();
        MergeError::Refused {
            field: format!("{}{case}", differing.field),
            left: differing.left.clone(),
            right: differing.right.clone(),
            files: [file(&differing.runs[0]), file(&differing.runs[1])],
        }
    };
    match Measurement::check_runs_match(pieces.iter().map(|piece| &piece.record)) {
        Err(differing) => Err(refused(&pieces, &differing)),
        Ok(()) => Ok(pieces),
    }
}

/// Writes the runs into a folder in one step, each file as it was read.
pub fn write_session(folder: &Path, runs: &[RecordPiece<ProcessRun>]) -> Result<(), MergeError> {
    let failed =
        |path: &Path, cause| MergeError::Folder { action: "write", path: path.to_owned(), cause };
    let mut names: BTreeMap<String, &Path> = BTreeMap::new();
    for piece in runs {
        let process = piece.record.process_name_of_run();
        let numbered = (2..).map(|number| format!("{process}-{number}.json"));
        let mut free = std::iter::once(format!("{process}.json")).chain(numbered);
        let name = free.find(|name| !names.contains_key(name)).unwrap_or_default();
        names.insert(name, &piece.path);
    }
    if folder.exists() {
        return match folder_holds_exactly(folder, &names) {
            true => Ok(()),
            false => Err(MergeError::NotEmpty(folder.to_owned())),
        };
    }
    let parent = folder.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(|cause| failed(parent, cause))?;
    let temporary = file::temporary_folder(parent);
    let (temporary, _held) = temporary.map_err(|cause| failed(parent, cause))?;
    for (name, path) in names {
        let copied = std::fs::copy(path, temporary.path().join(&name));
        copied.map_err(|cause| failed(&folder.join(name), cause))?;
    }
    let written = temporary.keep();
    std::fs::rename(&written, folder).map_err(|cause| failed(folder, cause))
}

/// Returns whether a folder contains exactly the named files.
fn folder_holds_exactly(folder: &Path, names: &BTreeMap<String, &Path>) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let there: BTreeSet<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    there.iter().eq(names.keys())
        && names.iter().all(|(name, path)| {
            file::content_hash_of_file(&folder.join(name)).ok()
                == file::content_hash_of_file(path).ok()
        })
}

/// Shards that are one comparison, with the fate of all records.
#[derive(Debug)]
pub struct MergedComparisons {
    /// The records that count.
    pub shards: Vec<ComparisonShard>,
    /// Lists of records that count, that are missing and that do not count.
    pub account: MergeAccount,
}

pub fn merge_comparison_shards(
    files: &[PathBuf],
    tolerance: AnchorTolerance,
) -> Result<MergedComparisons, MergeError> {
    let pieces = read_records(files, |path, hash, shard: ComparisonShard| {
        Ok(RecordPiece {
            path: path.clone(),
            hash,
            work: "comparison".to_owned(),
            shard: shard.shard,
            complete: true,
            time: shard.ended.clone(),
            environment: shard.environment.clone(),
            anchors: shard.anchors.clone(),
            record: shard,
        })
    })?;
    refuse_different_records(&pieces, ComparisonShard::mismatch)?;
    let (pieces, account) = choose_pieces(pieces, tolerance);
    refuse_repeated_cases(&pieces, |shard| shard.first.keys())?;
    let shards = pieces.into_iter().map(|piece| piece.record).collect();
    Ok(MergedComparisons { shards, account })
}

/// Refuses shards of one work that share a case, because a plan has each case in one shard.
fn refuse_repeated_cases<'a, T, C: Iterator<Item = &'a String>>(
    pieces: &'a [RecordPiece<T>],
    cases: impl Fn(&'a T) -> C,
) -> Result<(), MergeError> {
    let mut found: BTreeMap<(&str, &String), &RecordPiece<T>> = BTreeMap::new();
    for piece in pieces {
        for case in cases(&piece.record) {
            let earlier = found.insert((&piece.work, case), piece);
            if let Some(earlier) = earlier.filter(|earlier| earlier.shard != piece.shard) {
                return Err(MergeError::Refused {
                    field: format!("shard of {case}"),
                    left: earlier.shard.to_string(),
                    right: piece.shard.to_string(),
                    files: [earlier.path.clone(), piece.path.clone()],
                });
            }
        }
    }
    Ok(())
}

/// A fact in which two records differ, with both values.
type DifferentFact = Option<(String, [String; 2])>;

/// Refuses records that differ from the record of the first shard.
fn refuse_different_records<T>(
    pieces: &[RecordPiece<T>],
    mismatch: impl Fn(&T, &T) -> DifferentFact,
) -> Result<(), MergeError> {
    let key = |piece: &&RecordPiece<T>| -> (Shard, PathBuf) { (piece.shard, piece.path.clone()) };
    let Some(first) = pieces.iter().min_by_key(key) else { return Ok(()) };
    for piece in pieces {
        if let Some((field, [left, right])) = mismatch(&first.record, &piece.record) {
            let files = [first.path.clone(), piece.path.clone()];
            return Err(MergeError::Refused { field, left, right, files });
        }
    }
    Ok(())
}

/// A merged calibration, with how each record was used.
#[derive(Debug)]
pub struct MergedCalibrations {
    /// The merged calibration; absent if no record could be used.
    pub calibration: Option<Calibration>,
    /// Lists of records that count, that are missing and that do not count.
    pub account: MergeAccount,
}

/// Merges the parts of a calibration. Whole calibrations count as repetitions: all their
/// comparisons are used.
pub fn merge_calibration_records(
    files: &[PathBuf],
    tolerance: AnchorTolerance,
) -> Result<MergedCalibrations, MergeError> {
    let whole = Shard { index: 1, count: 1 };
    let pieces = read_records(files, |path, hash, record: Calibration| {
        Ok(RecordPiece {
            path: path.clone(),
            hash,
            work: "calibration".to_owned(),
            shard: record.part.as_ref().map_or(whole, |part| part.shard),
            complete: record.is_complete(),
            time: record.started.clone(),
            environment: record.environment.clone(),
            anchors: anchors::median_anchors(&record.comparisons),
            record,
        })
    })?;
    refuse_different_records(&pieces, Calibration::mismatch)?;
    let is_part = |piece: &RecordPiece<Calibration>| piece.record.part.is_some();
    let (kept, account) = match pieces.iter().find(|piece| !is_part(piece)) {
        Some(sitting) if pieces.iter().any(is_part) => {
            return Err(MergeError::NoShard(sitting.path.clone()));
        }
        Some(_) => (pieces, MergeAccount::default()),
        None => choose_pieces(pieces, tolerance),
    };
    let mut kept = kept.into_iter().map(|piece| piece.record);
    let mut calibration = kept.next();
    if let Some(calibration) = &mut calibration {
        for other in kept {
            calibration.add(other);
        }
        calibration.part = None;
        calibration.derive_thresholds();
    }
    Ok(MergedCalibrations { calibration, account })
}

/// Verified cases of all shards, with the fate of all records.
#[derive(Debug)]
pub struct MergedVerifications {
    /// The cases, by id.
    pub rows: Vec<VerifiedCase>,
    /// Lists of records that count, that are missing and that do not count.
    pub account: MergeAccount,
}

/// Merges verifications of shards. Output errors do not depend on the speed of a card, so this
/// merge checks no anchor rates.
pub fn merge_verification_shards(files: &[PathBuf]) -> Result<MergedVerifications, MergeError> {
    let pieces = read_records(files, |path, hash, record: VerificationShard| {
        Ok(RecordPiece {
            path: path.clone(),
            hash,
            work: "verification".to_owned(),
            shard: record.shard,
            complete: record.complete,
            time: record.ended.clone(),
            environment: record.environment.clone(),
            anchors: None,
            record,
        })
    })?;
    refuse_different_records(&pieces, VerificationShard::mismatch)?;
    let (pieces, account) = choose_pieces(pieces, AnchorTolerance::default());
    refuse_repeated_cases(&pieces, |shard| shard.rows.iter().map(|row| &row.case))?;
    let mut rows: Vec<VerifiedCase> =
        pieces.into_iter().flat_map(|piece| piece.record.rows).collect();
    rows.sort_by(|one, other| one.case.cmp(&other.case));
    Ok(MergedVerifications { rows, account })
}
