//! The reason why a case has no result: a sentence for people, and facts for programs.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The reason why a case has no result: a sentence, and the facts that it states.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CaseFailure {
    /// The sentence.
    pub text: String,
    /// Kind of the failure as a word: "too_short". The list of facts is empty for errors of a
    /// workload's own code.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// Numbers in the sentence, by name; the unit is the name's end.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub numbers: BTreeMap<String, f64>,
    /// Names in the sentence, for example of an output or of a call.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub names: BTreeMap<String, String>,
}

impl CaseFailure {
    /// Makes a failure of a kind with a sentence, without facts.
    pub fn new(kind: &str, text: impl fmt::Display) -> Self {
        Self { text: text.to_string(), kind: kind.to_owned(), ..Self::default() }
    }

    /// Replaces the sentence of the failure and keeps its facts.
    #[must_use]
    pub fn with_text(self, text: impl Into<String>) -> Self {
        Self { text: text.into(), ..self }
    }

    /// Adds a number to the facts; a number that is not finite appears only in the sentence.
    #[must_use]
    pub fn with_number(mut self, name: &str, number: f64) -> Self {
        if number.is_finite() {
            self.numbers.insert(name.to_owned(), number);
        }
        self
    }

    /// Adds a count.
    #[must_use]
    pub fn with_count(self, name: &str, count: impl TryInto<u64>) -> Self {
        self.with_number(name, count.try_into().map_or(f64::NAN, |count| count as f64))
    }

    /// Adds a name.
    #[must_use]
    pub fn with_name(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.names.insert(name.to_owned(), value.to_string());
        self
    }
}

impl From<String> for CaseFailure {
    fn from(text: String) -> Self {
        Self { text, ..Self::default() }
    }
}

impl From<&str> for CaseFailure {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

impl fmt::Display for CaseFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
