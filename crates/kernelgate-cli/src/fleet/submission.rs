//! A submission on disk: its folder, which every machine can read, and its jobs.

use std::collections::BTreeSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::counted_shards::{AnchorTolerance, MergeAccount};
use super::job_commands::SubmissionPlaces;
use super::merge::{self, MergeError, MergedRecordKind};
use kernelgate::record::RecordFileError;
use kernelgate::record::file::{self, RecordType};

/// Jobs of a submission.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSubmission {
    /// Time at which the jobs were submitted, RFC 3339, UTC.
    #[serde(default)]
    pub made: String,
    /// Words of the command that the shards of a submission run.
    pub command: Vec<String>,
    /// Number of shards.
    pub shards: u32,
    /// Job arrays, the current one last: later ones repeat missing shards.
    pub arrays: Vec<u64>,
    /// Job that merges.
    pub merge: Option<u64>,
}

impl RecordType for JobSubmission {
    const SCHEMA: &'static str = "kernelgate-submission";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "submission";
    const FREE_TEXT_FIELDS: &'static [&'static str] = &["command"];

    fn validate(&self) -> Result<(), String> {
        if self.shards == 0 { Err("0 shards".to_owned()) } else { Ok(()) }
    }
}

/// Longest file of a shard's attempts, bytes.
const MAX_ATTEMPTS_FILE_BYTES: u64 = 1 << 20;
/// Name of a submission's file in its folder.
pub const SUBMISSION_FILE: &str = "submission.json";

/// The reason why a folder cannot be used for a submission.
#[derive(Debug, thiserror::Error)]
pub enum SubmissionError {
    /// Error: the file of the submission cannot be read or written.
    #[error(transparent)]
    File(#[from] RecordFileError),
    /// Error: the folder holds another submission.
    #[error(
        "{folder}: a submission is there already: --resume follows it, --folder names another folder"
    )]
    Taken { folder: String },
    /// Error: the submission in the folder has other settings.
    #[error("--resume: the submission in {folder} has {field} `{there}`, not `{asked}`")]
    Other { folder: String, field: &'static str, there: String, asked: String },
    /// Error: the folder has no submission to resume.
    #[error("--resume: no submission in {0}")]
    Nothing(String),
}

impl JobSubmission {
    /// Claims a folder for a new submission: if two programs try at once, only one succeeds.
    ///
    /// # Errors
    /// Fails if the folder has a submission, or cannot be written.
    pub fn claim_folder(self, folder: &Path) -> Result<Self, SubmissionError> {
        match file::write_new(&folder.join(SUBMISSION_FILE), &self) {
            Ok(()) => Ok(self),
            Err(error) if error.is_already_there() && folder.is_dir() => {
                Err(SubmissionError::Taken { folder: folder.display().to_string() })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Reads the submission in a folder, if it has the same settings as this one.
    ///
    /// # Errors
    /// Fails if the folder has no submission, or a submission with other settings.
    pub fn resume_in_folder(self, folder: &Path) -> Result<Self, SubmissionError> {
        let name = folder.display().to_string();
        let there: Self = match file::read(&folder.join(SUBMISSION_FILE)) {
            Err(error) if error.is_not_found() => return Err(SubmissionError::Nothing(name)),
            read => read?,
        };
        let facts =
            |of: &Self| [("the command", of.command.join(" ")), ("shards", of.shards.to_string())];
        let mut both = facts(&there).into_iter().zip(facts(&self));
        match both.find(|(there, asked)| there != asked) {
            Some(((field, there), (_, asked))) => {
                Err(SubmissionError::Other { folder: name, field, there, asked })
            }
            None => Ok(there),
        }
    }

    /// Returns the comment by which the submission's jobs are found in Slurm's queue.
    pub fn comment(&self, folder: &Path) -> String {
        format!("kernelgate {} {}", self.made, folder.display())
    }

    pub fn save(&self, folder: &Path) -> Result<(), RecordFileError> {
        file::write(&folder.join(SUBMISSION_FILE), self)
    }

    /// Shards without a complete record that counts.
    ///
    /// # Errors
    /// Fails if a record cannot be read, or records do not belong together.
    pub fn missing_shards(
        &self,
        places: &SubmissionPlaces,
        tolerance: AnchorTolerance,
    ) -> Result<BTreeSet<u32>, MergeError> {
        let files = match merge::record_files(&[places.records_folder()]) {
            Err(MergeError::Nothing(_)) => return Ok((1..=self.shards).collect()),
            files => files?,
        };
        let account: MergeAccount = match merge::kind(&files)? {
            MergedRecordKind::Runs => merge::merge_runs(&files, tolerance)?.account,
            MergedRecordKind::Comparisons => {
                merge::merge_comparison_shards(&files, tolerance)?.account
            }
            MergedRecordKind::Calibrations => {
                merge::merge_calibration_records(&files, tolerance)?.account
            }
            MergedRecordKind::Verifications => merge::merge_verification_shards(&files)?.account,
        };
        Ok(account.lacking)
    }
}

/// Returns the number of further attempts of each shard, as the shards' tasks recorded them.
pub fn shard_retries(places: &SubmissionPlaces, shards: u32) -> Vec<(u32, usize)> {
    let attempts = places.folder.join("attempts");
    let used = |shard: u32| {
        let noted =
            file::read_untrusted_text(&attempts.join(shard.to_string()), MAX_ATTEMPTS_FILE_BYTES)
                .unwrap_or_default();
        noted.lines().count().saturating_sub(1)
    };
    (1..=shards).map(|shard| (shard, used(shard))).filter(|(_, used)| *used > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_submission(shards: u32) -> JobSubmission {
        let command = vec!["bench".to_owned()];
        JobSubmission { made: String::new(), command, shards, arrays: vec![7], merge: Some(8) }
    }

    #[test]
    fn a_folder_holds_one_submission_which_only_its_own_command_resumes() {
        let folder = tempfile::tempdir().unwrap();
        let message = |error: String| error.replace(&folder.path().display().to_string(), "FOLDER");
        let nothing = test_submission(4).resume_in_folder(folder.path()).unwrap_err().to_string();
        insta::assert_snapshot!(message(nothing), @"--resume: no submission in FOLDER");
        test_submission(4).claim_folder(folder.path()).unwrap();
        let refused = test_submission(4).claim_folder(folder.path()).unwrap_err().to_string();
        insta::assert_snapshot!(message(refused), @"FOLDER: a submission is there already: --resume follows it, --folder names another folder");
        assert_eq!(test_submission(4).resume_in_folder(folder.path()).unwrap().arrays, [7]);
        let file = folder.path().join(SUBMISSION_FILE);
        let no_folder = test_submission(4).claim_folder(&file).unwrap_err().to_string();
        insta::assert_snapshot!(message(no_folder), @"failed to write FOLDER/submission.json/submission.json: File exists (os error 17)");
        let other = test_submission(5).resume_in_folder(folder.path()).unwrap_err().to_string();
        insta::assert_snapshot!(message(other), @"--resume: the submission in FOLDER has shards `4`, not `5`");
    }

    #[test]
    fn attempts_of_a_shard_after_the_first_are_counted_as_retries() {
        let folder = tempfile::tempdir().unwrap();
        let places = SubmissionPlaces {
            program: "k".into(),
            package: ".".into(),
            folder: folder.path().to_owned(),
        };
        std::fs::create_dir(folder.path().join("attempts")).unwrap();
        std::fs::write(folder.path().join("attempts/2"), "0 n1\n1 n2\n").unwrap();
        std::fs::write(folder.path().join("attempts/3"), "0 n1\n").unwrap();
        assert_eq!(shard_retries(&places, 4), [(2, 1)]);
    }
}
