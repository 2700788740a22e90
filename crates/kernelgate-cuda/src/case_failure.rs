//! The reason why a case has no result, as a sentence for people and as named facts for programs.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The reason why a case was skipped or failed: a sentence, and the facts in the sentence by name.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CaseFailureReason {
    /// The reason as a whole sentence.
    #[serde(rename = "text")]
    pub failure_sentence: String,
    /// Kind of the failure as a word such as "too_short"; empty for errors of a workload's own
    /// code. The list of facts is empty for errors of a workload's own code.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[serde(rename = "kind")]
    pub failure_kind: String,
    /// Numbers in the sentence, by name; the end of a name is the unit, as in `limit_ns`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "numbers")]
    pub numbers_in_failure_sentence: BTreeMap<String, f64>,
    /// Names in the failure's sentence, such as that of an output or a CUDA function, by the kind
    /// of thing named.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "names")]
    pub names_in_failure_sentence: BTreeMap<String, String>,
}

impl CaseFailureReason {
    /// Makes a failure of this kind with a sentence and without facts.
    pub fn failure_with_kind_and_sentence(kind: &str, text: impl fmt::Display) -> Self {
        Self {
            failure_sentence: text.to_string(),
            failure_kind: kind.to_owned(),
            ..Self::default()
        }
    }

    /// Replaces the sentence of the failure and keeps its kind and facts.
    #[must_use]
    pub fn with_failure_sentence(self, text: impl Into<String>) -> Self {
        Self { failure_sentence: text.into(), ..self }
    }

    /// Adds a number to the facts of the failure, unless the number is infinite or NaN.
    #[must_use]
    pub fn with_number_fact(mut self, name: &str, number: f64) -> Self {
        if number.is_finite() {
            self.numbers_in_failure_sentence.insert(name.to_owned(), number);
        }
        self
    }

    /// Adds a count.
    #[must_use]
    pub fn with_count_fact(self, name: &str, count: impl TryInto<u64>) -> Self {
        self.with_number_fact(name, count.try_into().map_or(f64::NAN, |count| count as f64))
    }

    /// Adds a name.
    #[must_use]
    pub fn with_name_fact(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.names_in_failure_sentence.insert(name.to_owned(), value.to_string());
        self
    }
}

impl From<String> for CaseFailureReason {
    fn from(text: String) -> Self {
        Self { failure_sentence: text, ..Self::default() }
    }
}

impl From<&str> for CaseFailureReason {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl fmt::Display for CaseFailureReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.failure_sentence)
    }
}
