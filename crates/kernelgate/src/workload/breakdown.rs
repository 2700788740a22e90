//! Defines the named parts of a problem, such as layers of a network, for the tables of `kernelgate
//! profile`.
//!
//! Deliberately absent: times.

use serde::{Deserialize, Serialize};

use super::Work;

/// The parts of a problem for the tables of a profile, and the number of data items for a
/// throughput.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ProblemPartsForProfile {
    /// Number of data items (such as images or tokens) that one execution computes; `None` if no
    /// throughput is stated.
    pub data_items_per_execution: Option<u64>,
    /// Unit of the data items of a throughput.
    pub unit: ThroughputItemUnit,
    /// Named parts of the problem, in the order in which tables list them.
    pub parts: Vec<ProblemPartForProfile>,
}

/// Unit of the data items by which throughput is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ThroughputItemUnit {
    /// Items of a batch, such as images.
    #[default]
    #[serde(rename = "samples")]
    BatchItems,
    /// Tokens of text.
    Tokens,
}

impl ThroughputItemUnit {
    /// Formats a throughput, data items a second, as text with its unit.
    pub fn throughput_as_text(self, rate: f64) -> String {
        match self {
            Self::BatchItems => format!("{rate:.0} samples/s"),
            Self::Tokens => format!("{rate:.0} tokens/s"),
        }
    }

    /// Returns whether this is the default unit, which record files omit.
    pub fn is_default_unit(&self) -> bool {
        *self == Self::default()
    }
}

/// A named part of a problem's execution, such as a layer of a network.
#[derive(Debug, Clone, PartialEq)]
pub struct ProblemPartForProfile {
    /// Name of the profile table in which the part is a row, such as `component` or `layer`.
    pub profile_table: &'static str,
    /// Label of the part in the profile table.
    pub label: String,
    /// Path of the named ranges that belong to this part, with names separated by `/`; a longer
    /// path that ends with it belongs to it too. Implementations open these ranges around their
    /// launches; GPU work outside of all ranges belongs to no part.
    pub range_path: String,
    /// Declared bytes and operations of the part; empty if no limit is shown for it.
    pub work: Work,
}
