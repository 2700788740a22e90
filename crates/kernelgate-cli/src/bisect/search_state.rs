//! State file of a bisection: stores the answer of each comparison, and is written after each
//! answer.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::search::BisectionAnswer;
use crate::compare::CompareError;
use crate::gate::calibration::first_differing_name;
use kernelgate::record::file::{self, RecordFileError, RecordFileType};

/// State of a bisection, which is saved to a JSON file so that the bisection can continue.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedBisectionState {
    /// Facts that must be unchanged for the bisection to continue, by name: good and bad commit,
    /// case, settings.
    #[serde(rename = "identity")]
    pub bisection_identity_facts: BTreeMap<String, String>,
    /// Answers by question.
    #[serde(rename = "answers")]
    pub answers_by_question: BTreeMap<String, BisectionAnswer>,
    /// The pair of commits that was being compared when the state was written; `None` between two
    /// comparisons.
    #[serde(rename = "asking")]
    pub question_in_progress: Option<String>,
}

impl RecordFileType for SavedBisectionState {
    const SCHEMA: &'static str = "kernelgate-bisection";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "bisection";
    const FIELDS_WITH_ANY_CHARACTERS: &'static [&'static str] =
        &["identity", "undecided", "unusable"];

    fn check_record_plausible(&self) -> Result<(), String> {
        self.answers_by_question.iter().try_for_each(|(question, answer)| match answer {
            BisectionAnswer::Slower(times) | BisectionAnswer::NotSlower(times) => {
                times.check_time_ratio_plausibility().map_err(|why| format!("{question}: {why}"))
            }
            BisectionAnswer::UndecidedWithReason(_)
            | BisectionAnswer::UnmeasurableWithReason(_) => Ok(()),
        })
    }
}

impl SavedBisectionState {
    /// Opens the state of the interrupted bisection, or starts a new state file.
    pub fn resume_or_begin_bisection(
        path: &Path,
        identity: BTreeMap<String, String>,
        resume: bool,
    ) -> Result<SavedBisectionState, CompareError> {
        let fresh = Self { bisection_identity_facts: identity, ..Self::default() };
        if !resume {
            return Ok(fresh);
        }
        match file::read_record::<Self>(path) {
            Ok(earlier) => match first_differing_name(
                &earlier.bisection_identity_facts,
                &fresh.bisection_identity_facts,
            ) {
                None => Ok(earlier),
                Some(differs) => Err(CompareError::SavedStateOfOtherRequest {
                    what: "search",
                    differing_fact: differs,
                }),
            },
            Err(error) if error.is_because_file_is_missing() => Ok(fresh),
            Err(error) => Err(error.into()),
        }
    }

    pub fn write_bisection_state_file(&self, path: &Path) -> Result<(), RecordFileError> {
        file::write_record_atomically(path, self)
    }
}
