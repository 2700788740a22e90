//! Which ids to run.

use std::collections::BTreeSet;

use regex::Regex;

use crate::harness::error::HarnessError;

/// Which ids to run.
#[derive(Debug, Clone)]
pub enum CaseIdFilter {
    /// Every one.
    All,
    /// No case: libtest's `--ignored`.
    None,
    /// Selects only the case with exactly this id.
    Exact(String),
    /// Cases that match.
    Matching(Regex),
    /// Cases of these ids.
    OneOf(BTreeSet<String>),
}

impl CaseIdFilter {
    /// Parses the filter of the command line.
    ///
    /// # Errors
    /// Fails if the text is not a regular expression.
    pub fn parse_exact_or_regex(
        text: Option<&str>,
        exact: bool,
    ) -> Result<CaseIdFilter, HarnessError> {
        match text {
            None => Ok(Self::All),
            Some(id) if exact => Ok(Self::Exact(id.to_owned())),
            Some(text) => Regex::new(text).map(Self::Matching).map_err(|error| {
                let error = error.to_string();
                let problem = error.lines().last().unwrap_or_default();
                let problem = problem.trim_start_matches("error: ").to_owned();
                HarnessError::Filter { filter: text.to_owned(), problem }
            }),
        }
    }

    /// Whether the filter selects the case with this id.
    pub fn selects_case_id(&self, id: &str) -> bool {
        match self {
            Self::All => true,
            Self::None => false,
            Self::Exact(exact) => id == exact,
            Self::Matching(regex) => regex.is_match(id),
            Self::OneOf(ids) => ids.contains(id),
        }
    }

    /// The filter as the user wrote it; `None` if there is no such text.
    pub fn user_filter_text(&self) -> Option<&str> {
        match self {
            Self::All | Self::None | Self::OneOf(_) => None,
            Self::Exact(text) => Some(text),
            Self::Matching(regex) => Some(regex.as_str()),
        }
    }
}
