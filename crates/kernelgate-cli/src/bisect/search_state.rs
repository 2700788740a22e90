//! The answers of a search, in a file that is written after each answer.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::search::BisectionAnswer;
use crate::compare::CompareError;
use crate::gate::calibration::first_differing_name;
use kernelgate::record::file::{self, RecordFileError, RecordType};

/// State of a bisection that is saved to its file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BisectionState {
    /// Facts that must be the same for the search to go on: ends, case, settings, by name.
    pub identity: BTreeMap<String, String>,
    /// Answers by question.
    pub answers: BTreeMap<String, BisectionAnswer>,
    /// The question that was being answered; `None` between two questions.
    pub asking: Option<String>,
}

impl RecordType for BisectionState {
    const SCHEMA: &'static str = "kernelgate-bisection";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "bisection";
    const FREE_TEXT_FIELDS: &'static [&'static str] = &["identity", "undecided", "unusable"];

    fn validate(&self) -> Result<(), String> {
        self.answers.iter().try_for_each(|(question, answer)| match answer {
            BisectionAnswer::Slower(times) | BisectionAnswer::NotSlower(times) => {
                times.validate().map_err(|why| format!("{question}: {why}"))
            }
            BisectionAnswer::Undecided(_) | BisectionAnswer::Unusable(_) => Ok(()),
        })
    }
}

impl BisectionState {
    /// Opens the state of the interrupted search, or starts a new search.
    pub fn open_or_begin(
        path: &Path,
        identity: BTreeMap<String, String>,
        resume: bool,
    ) -> Result<BisectionState, CompareError> {
        let fresh = Self { identity, ..Self::default() };
        if !resume {
            return Ok(fresh);
        }
        match file::read::<Self>(path) {
            Ok(earlier) => match first_differing_name(&earlier.identity, &fresh.identity) {
                None => Ok(earlier),
                Some(differs) => Err(CompareError::ResumesAnother { what: "search", differs }),
            },
            Err(error) if error.is_not_found() => Ok(fresh),
            Err(error) => Err(error.into()),
        }
    }

    pub fn write(&self, path: &Path) -> Result<(), RecordFileError> {
        file::write(path, self)
    }
}
