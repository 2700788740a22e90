//! The stored state of a submission of shards to Slurm: its command, job ids and folder, which all
//! machines of the cluster can read.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::counted_shards::{MaxAnchorRateDifference, ShardMergeAccount};
use super::job_commands::ClusterSubmissionPaths;
use super::merge::{self, MergedRecordKind, RecordMergeError};
use kernelgate::record::RecordFileError;
use kernelgate::record::file::{self, RecordFileType};

/// State of a submission of shards to Slurm: its command and the ids of its jobs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterSubmission {
    /// Time at which the Slurm jobs were submitted, RFC 3339, UTC.
    #[serde(default)]
    #[serde(rename = "made")]
    pub submission_time: String,
    /// Words of the kernelgate command that the shards of the submission run.
    #[serde(rename = "command")]
    pub shard_command_words: Vec<String>,
    /// Number of shards.
    #[serde(rename = "shards")]
    pub shard_count: u32,
    /// Ids of the submission's Slurm job arrays; the last one is current, and later ones repeat
    /// shards that were missing.
    #[serde(rename = "arrays")]
    pub slurm_job_array_ids: Vec<u64>,
    /// Id of the Slurm job that merges the shards.
    #[serde(rename = "merge")]
    pub slurm_merge_job_id: Option<u64>,
}

impl RecordFileType for ClusterSubmission {
    const SCHEMA: &'static str = "kernelgate-submission";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "submission";
    const FIELDS_WITH_ANY_CHARACTERS: &'static [&'static str] = &["command"];

    fn check_record_plausible(&self) -> Result<(), String> {
        if self.shard_count == 0 { Err("0 shards".to_owned()) } else { Ok(()) }
    }
}

/// Largest file with the attempts of one shard that kernelgate reads, bytes.
const MAX_ATTEMPTS_FILE_BYTES: u64 = 1 << 20;
/// Name of the file that stores a submission, in the submission's folder.
pub const SUBMISSION_FILE_NAME: &str = "submission.json";

/// The reason why a folder cannot be used for a submission of shards.
#[derive(Debug, thiserror::Error)]
pub enum ClusterSubmissionError {
    /// Error: the submission's file cannot be read or written.
    #[error(transparent)]
    SubmissionFile(#[from] RecordFileError),
    /// Error: the folder already holds another submission.
    #[error(
        "{folder}: a submission is there already: --resume follows it, --folder names another folder"
    )]
    FolderHoldsOtherSubmission { folder: String },
    /// Error: the submission in the folder has another command or number of shards than the one to
    /// resume.
    #[error("--resume: the submission in {folder} has {field} `{there}`, not `{asked}`")]
    Other { folder: String, field: &'static str, there: String, asked: String },
    /// Error: the folder holds no submission that could be resumed.
    #[error("--resume: no submission in {0}")]
    NoSubmissionToResume(String),
}

impl ClusterSubmission {
    /// Stores a new submission in a folder that has none; if two programs try at once, only one
    /// succeeds.
    ///
    /// # Errors
    /// Fails if the folder already holds a submission, or cannot be written.
    pub fn claim_submission_folder(self, folder: &Path) -> Result<Self, ClusterSubmissionError> {
        match file::create_record_exclusively(&folder.join(SUBMISSION_FILE_NAME), &self) {
            Ok(()) => Ok(self),
            Err(error) if error.is_because_file_exists() && folder.is_dir() => {
                Err(ClusterSubmissionError::FolderHoldsOtherSubmission {
                    folder: folder.display().to_string(),
                })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the submission stored in a folder, if it has the same command and number of shards as
    /// this one.
    ///
    /// # Errors
    /// Fails if the folder holds no submission, or one with another command or number of shards.
    pub fn resume_from_folder(self, folder: &Path) -> Result<Self, ClusterSubmissionError> {
        let name = folder.display().to_string();
        let there: Self = match file::read_record(&folder.join(SUBMISSION_FILE_NAME)) {
            Err(error) if error.is_because_file_is_missing() => {
                return Err(ClusterSubmissionError::NoSubmissionToResume(name));
            }
            read => read?,
        };
        let facts = |of: &Self| {
            [
                ("the command", of.shard_command_words.join(" ")),
                ("shards", of.shard_count.to_string()),
            ]
        };
        let mut both = facts(&there).into_iter().zip(facts(&self));
        match both.find(|(there, asked)| there != asked) {
            Some(((field, there), (_, asked))) => {
                Err(ClusterSubmissionError::Other { folder: name, field, there, asked })
            }
            None => Ok(there),
        }
    }

    /// Returns the comment that marks the submission's jobs, by which kernelgate finds them in
    /// Slurm's queue.
    pub fn slurm_job_comment(&self, folder: &Path) -> String {
        format!("kernelgate {} {}", self.submission_time, folder.display())
    }

    pub fn save_in_folder(&self, folder: &Path) -> Result<(), RecordFileError> {
        file::write_record_atomically(&folder.join(SUBMISSION_FILE_NAME), self)
    }

    /// Returns the numbers of the shards that have no complete record that a merge would use.
    ///
    /// # Errors
    /// Fails if a shard's record cannot be read, or the shards' records do not belong together.
    pub fn shards_to_repeat(
        &self,
        places: &ClusterSubmissionPaths,
        tolerance: MaxAnchorRateDifference,
    ) -> Result<BTreeSet<u32>, RecordMergeError> {
        let files = match merge::collect_record_files(&[places.shard_records_folder()]) {
            Err(RecordMergeError::NoRecordInPaths(_)) => {
                return Ok((1..=self.shard_count).collect());
            }
            files => files?,
        };
        let account: ShardMergeAccount = match merge::common_kind_of_records(&files)? {
            MergedRecordKind::BenchRuns => {
                merge::merge_run_shards(&files, tolerance)?.merge_account
            }
            MergedRecordKind::BuildComparisons => {
                merge::merge_comparison_shards(&files, tolerance)?.merge_account
            }
            MergedRecordKind::CalibrationParts => {
                merge::merge_calibration_records(&files, tolerance)?.merge_account
            }
            MergedRecordKind::OutputVerifications => {
                merge::merge_verification_shards(&files)?.merge_account
            }
        };
        Ok(account.shard_numbers_to_repeat)
    }
}

/// Returns, for each shard with more than one attempt, its number and its count of repetitions,
/// from the files that its tasks wrote.
pub fn repetitions_of_shards(places: &ClusterSubmissionPaths, shards: u32) -> Vec<(u32, usize)> {
    let attempts = places.submission_folder.join("attempts");
    let used = |shard: u32| {
        let noted = file::read_untrusted_text_up_to(
            &attempts.join(shard.to_string()),
            MAX_ATTEMPTS_FILE_BYTES,
        )
        .unwrap_or_default();
        noted.lines().count().saturating_sub(1)
    };
    (1..=shards).map(|shard| (shard, used(shard))).filter(|(_, used)| *used > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_cluster_submission(shards: u32) -> ClusterSubmission {
        let command = vec!["bench".to_owned()];
        ClusterSubmission {
            submission_time: String::new(),
            shard_command_words: command,
            shard_count: shards,
            slurm_job_array_ids: vec![7],
            slurm_merge_job_id: Some(8),
        }
    }

    #[test]
    fn a_folder_holds_one_submission_which_only_its_own_command_resumes() {
        let folder = tempfile::tempdir().unwrap();
        let message = |error: String| error.replace(&folder.path().display().to_string(), "FOLDER");
        let nothing =
            test_cluster_submission(4).resume_from_folder(folder.path()).unwrap_err().to_string();
        insta::assert_snapshot!(message(nothing), @"--resume: no submission in FOLDER");
        test_cluster_submission(4).claim_submission_folder(folder.path()).unwrap();
        let refused = test_cluster_submission(4)
            .claim_submission_folder(folder.path())
            .unwrap_err()
            .to_string();
        insta::assert_snapshot!(message(refused), @"FOLDER: a submission is there already: --resume follows it, --folder names another folder");
        assert_eq!(
            test_cluster_submission(4)
                .resume_from_folder(folder.path())
                .unwrap()
                .slurm_job_array_ids,
            [7]
        );
        let file = folder.path().join(SUBMISSION_FILE_NAME);
        let no_folder =
            test_cluster_submission(4).claim_submission_folder(&file).unwrap_err().to_string();
        insta::assert_snapshot!(message(no_folder), @"failed to write FOLDER/submission.json/submission.json: File exists (os error 17)");
        let other =
            test_cluster_submission(5).resume_from_folder(folder.path()).unwrap_err().to_string();
        insta::assert_snapshot!(message(other), @"--resume: the submission in FOLDER has shards `4`, not `5`");
    }

    #[test]
    fn attempts_of_a_shard_after_the_first_count_as_repetitions() {
        let folder = tempfile::tempdir().unwrap();
        let places = ClusterSubmissionPaths {
            kernelgate_program: "k".into(),
            package_folder: ".".into(),
            submission_folder: folder.path().to_owned(),
        };
        std::fs::create_dir(folder.path().join("attempts")).unwrap();
        std::fs::write(folder.path().join("attempts/2"), "0 n1\n1 n2\n").unwrap();
        std::fs::write(folder.path().join("attempts/3"), "0 n1\n").unwrap();
        assert_eq!(repetitions_of_shards(&places, 4), [(2, 1)]);
    }
}
