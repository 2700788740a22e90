//! The five verdicts on a case.

use serde::{Deserialize, Serialize};

/// What the measurements say about a case, worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Slower by more than the threshold, whole interval.
    Regressed,
    /// Slower by more than the threshold by its estimate, and by no more than the package accepts.
    Accepted,
    /// A change that matters is neither shown nor excluded.
    Inconclusive,
    /// Faster by more than the threshold, whole interval.
    Improved,
    /// The estimate is within the threshold, from an interval that is not too wide for that.
    Unchanged,
}

impl Verdict {
    /// The word for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Regressed => "regressed",
            Self::Accepted => "accepted",
            Self::Inconclusive => "inconclusive",
            Self::Improved => "improved",
            Self::Unchanged => "unchanged",
        }
    }
}
