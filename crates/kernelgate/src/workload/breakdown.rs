//! Named parts of a problem for the tables of a profile: ranges and the work done in each.
//!
//! Deliberately absent: times.

use serde::{Deserialize, Serialize};

use super::Work;

/// Parts of a problem and its launches.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Breakdown {
    /// Number of samples that one execution computes, for its throughput.
    pub samples: Option<u64>,
    /// Unit of the workload's samples, such as images or tokens.
    pub unit: SampleUnit,
    /// Parts of the problem, in the order of the tables.
    pub parts: Vec<BreakdownPart>,
}

/// The unit in which throughput is counted, such as images or tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SampleUnit {
    /// Images, or other items of a batch.
    #[default]
    Samples,
    /// Tokens of text.
    Tokens,
}

impl SampleUnit {
    /// Formats a rate of samples a second as text.
    pub fn per_second(self, rate: f64) -> String {
        match self {
            Self::Samples => format!("{rate:.0} samples/s"),
            Self::Tokens => format!("{rate:.0} tokens/s"),
        }
    }

    /// Returns whether this is the unit of records that name no unit.
    pub fn is_default_unit(&self) -> bool {
        *self == Self::default()
    }
}

/// A named part of a problem's execution, such as a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct BreakdownPart {
    /// Name of the table in which the part is a row, such as `component` or `layer`.
    pub table: &'static str,
    /// Label in the table.
    pub label: String,
    /// Path of the named ranges of this part: names separated by `/`; a longer path that ends with
    /// it counts too. Rows open these ranges around their launches; work outside of every range
    /// belongs to no part.
    pub range: String,
    /// Work that the mathematics needs; empty if nothing bounds the part.
    pub work: Work,
}
