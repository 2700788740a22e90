//! Named parts of a problem for the tables of a profile: ranges and the work done in each.
//!
//! Deliberately absent: times.

use serde::{Deserialize, Serialize};

use super::Work;

/// Parts of a problem and its launches.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Breakdown {
    /// Samples that one execution computes, for its throughput.
    pub samples: Option<u64>,
    /// Unit of a sample of this workload.
    pub unit: SampleUnit,
    /// The parts, in the order of the tables.
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
    /// A rate of samples a second, as text.
    pub fn per_second(self, rate: f64) -> String {
        match self {
            Self::Samples => format!("{rate:.0} samples/s"),
            Self::Tokens => format!("{rate:.0} tokens/s"),
        }
    }

    /// Whether the unit is the unit of records that name none.
    pub fn is_default_unit(&self) -> bool {
        *self == Self::default()
    }
}

/// A named part of a problem's execution, such as a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct BreakdownPart {
    /// The table that has the part, such as `component` or `layer`.
    pub table: &'static str,
    /// Label in the table.
    pub label: String,
    /// Path of the ranges of this part: names with `/` between them; a longer path that ends with
    /// it counts too. Rows open them around their launches; work outside of them has no range.
    pub range: String,
    /// Work that the mathematics needs; empty if nothing bounds the part.
    pub work: Work,
}
