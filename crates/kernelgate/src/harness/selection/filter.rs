//! Selects cases by their ids.

use std::collections::BTreeSet;

use regex::Regex;

use crate::harness::error::HarnessError;

/// Selects cases by their ids.
#[derive(Debug, Clone)]
pub enum CaseIdFilter {
    /// Every one.
    AllCases,
    /// Selects no case, as libtest's flag `--ignored` requests.
    NoCase,
    /// Selects only the case with exactly this id.
    ExactId(String),
    /// Cases that match.
    IdMatchesRegex(Regex),
    /// Selects the cases with these ids.
    AnyOfIds(BTreeSet<String>),
}

impl CaseIdFilter {
    /// Parses the case filter of the command line: a whole case id or a regular expression.
    ///
    /// # Errors
    /// Fails if the text is not a regular expression.
    pub fn parse_exact_id_or_regex(
        text: Option<&str>,
        exact: bool,
    ) -> Result<CaseIdFilter, HarnessError> {
        match text {
            None => Ok(Self::AllCases),
            Some(id) if exact => Ok(Self::ExactId(id.to_owned())),
            Some(text) => Regex::new(text).map(Self::IdMatchesRegex).map_err(|error| {
                let error = error.to_string();
                let problem = error.lines().last().unwrap_or_default();
                let problem = problem.trim_start_matches("error: ").to_owned();
                HarnessError::InvalidCaseFilter {
                    case_filter: text.to_owned(),
                    regex_fault: problem,
                }
            }),
        }
    }

    /// Whether the filter selects the case with this id.
    pub fn selects_case_id(&self, id: &str) -> bool {
        match self {
            Self::AllCases => true,
            Self::NoCase => false,
            Self::ExactId(exact) => id == exact,
            Self::IdMatchesRegex(regex) => regex.is_match(id),
            Self::AnyOfIds(ids) => ids.contains(id),
        }
    }

    /// The filter as the user wrote it; `None` if there is no such text.
    pub fn user_filter_text(&self) -> Option<&str> {
        match self {
            Self::AllCases | Self::NoCase | Self::AnyOfIds(_) => None,
            Self::ExactId(text) => Some(text),
            Self::IdMatchesRegex(regex) => Some(regex.as_str()),
        }
    }
}
