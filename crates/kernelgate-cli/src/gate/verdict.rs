//! The five possible verdicts on a case: regressed, accepted, inconclusive, improved, unchanged.

use serde::{Deserialize, Serialize};

/// The verdict on a case; the order of the variants is from the worst to the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VerdictOnCase {
    /// Regressed: the whole confidence interval of the time ratio is slower than the threshold.
    Regressed,
    /// Accepted: the estimated slow-down exceeds the threshold, but not what the package's rules
    /// accept.
    #[serde(rename = "accepted")]
    AcceptedSlowdown,
    /// Inconclusive: the measurement neither shows nor excludes a relevant change.
    Inconclusive,
    /// Improved: the whole confidence interval of the time ratio is faster than the threshold.
    Improved,
    /// Unchanged: the estimated change is within the threshold, and the confidence interval is
    /// narrow enough.
    Unchanged,
}

impl VerdictOnCase {
    /// Returns the verdict's name for tables.
    pub const fn verdict_name(self) -> &'static str {
        match self {
            Self::Regressed => "regressed",
            Self::AcceptedSlowdown => "accepted",
            Self::Inconclusive => "inconclusive",
            Self::Improved => "improved",
            Self::Unchanged => "unchanged",
        }
    }
}
