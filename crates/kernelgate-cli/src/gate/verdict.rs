//! The five possible verdicts on a case.

use serde::{Deserialize, Serialize};

/// The verdict on a case; the order is from worst to best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The whole interval is slower by more than the threshold.
    Regressed,
    /// The estimate is slower by more than the threshold, and by no more than the package accepts.
    Accepted,
    /// Inconclusive: a relevant change is neither shown nor excluded.
    Inconclusive,
    /// The whole interval is faster by more than the threshold.
    Improved,
    /// The estimate is within the threshold, and the interval is narrow enough.
    Unchanged,
}

impl Verdict {
    /// The name for tables.
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
