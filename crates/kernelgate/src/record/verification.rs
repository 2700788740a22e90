//! How the outputs of a case compared with the reference, as stored.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::verify::{self, ErrorBounds, OutputComparison, OutputErrors};
use crate::workload::Tolerance;

/// Stored result of the comparison of outputs with the reference.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VerificationRecord {
    /// Largest |out - ref| over the largest |ref| of all outputs.
    pub max_error: f64,
    /// Relative L2 error ‖out - ref‖₂ / ‖ref‖₂ of the outputs.
    pub relative_l2: f64,
    /// Number of output elements that were compared with the reference.
    pub checked: u64,
    /// Elements of the outputs.
    pub total: u64,
    /// Whether the elements were compared with the base build's outputs because there is no
    /// reference.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub with_base: bool,
    /// Relative error from rounding the outputs to their dtypes; 0 if rounding is exact.
    #[serde(default, skip_serializing_if = "verify::is_zero_error")]
    pub rounding: f64,
    /// Errors of each output, by name, if several outputs are compared within bounds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub by_output: BTreeMap<String, OutputErrors>,
    /// Errors that were allowed, for the output with the widest tolerance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed: Option<AllowedErrors>,
    /// Hash of the bits of all outputs; only in trials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Identity of the inputs: a hash, or [`CONSTANT_DATA_SET`]; the hash only in trials.
    ///
    /// [`CONSTANT_DATA_SET`]: super::numerics::CONSTANT_DATA_SET
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_set: Option<String>,
    /// Result of the comparison after timing; absent if nothing was timed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<AfterTiming>,
    /// Key of the earlier run whose comparison with the reference applies, because the outputs have
    /// equal bits; absent if this run compared them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}

impl VerificationRecord {
    /// Checks the facts that deserialising does not enforce.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn validate(&self) -> Result<(), String> {
        let Self { checked, total, .. } = *self;
        if checked > total {
            return Err(format!("{checked} elements compared of {total}"));
        }
        let after = self.after.map(|after| [after.max_error, after.relative_l2]);
        let [max_error, relative_l2] = after.unwrap_or_default();
        let after = OutputErrors { max_error, relative_l2, rounding: 0.0 };
        let allowed = self.allowed.map(|allowed| OutputErrors {
            max_error: allowed.max_error,
            relative_l2: allowed.relative_l2,
            rounding: 0.0,
        });
        let mut all = self.by_output.values().copied().chain([self.errors(), after]).chain(allowed);
        all.try_for_each(|errors| errors.validate())?;
        // A case with larger errors than allowed has failed and has no record.
        let Some(allowed) = allowed.map(|allowed| allowed.max_error) else { return Ok(()) };
        let beyond = |error: f64, when: &str| match error > allowed {
            true => Err(format!("a maximum error of {error}{when} where {allowed} is allowed")),
            false => Ok(()),
        };
        beyond(self.max_error, "")?;
        beyond(after.max_error, " after timing")
    }

    /// Returns which part of the outputs was verified.
    pub const fn value(&self) -> VerificationExtent {
        let Self { checked, total, .. } = *self;
        match (checked, self.with_base) {
            (0, _) => VerificationExtent::Unverified,
            (_, true) => VerificationExtent::ComparedWithBase { checked, total },
            (_, false) => VerificationExtent::Verified { checked, total },
        }
    }

    /// The maximum and the relative L2 error of all outputs.
    pub const fn errors(&self) -> OutputErrors {
        let Self { max_error, relative_l2, rounding, .. } = *self;
        OutputErrors { max_error, relative_l2, rounding }
    }
}

/// Extent to which the outputs of a case were verified.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum VerificationExtent {
    /// Compared with the reference.
    Verified {
        /// Elements that were compared.
        checked: u64,
        /// Elements of the outputs.
        total: u64,
    },
    /// The outputs were compared with the base build's outputs, because there is no reference.
    ComparedWithBase {
        /// Elements that were compared.
        checked: u64,
        /// Elements of the outputs.
        total: u64,
    },
    /// Compared with nothing.
    Unverified,
    /// No record states whether the outputs were compared.
    #[default]
    Unknown,
}

impl VerificationExtent {
    /// Returns whether the outputs were compared with the reference, at least in part.
    pub const fn is_verified(self) -> bool {
        matches!(self, Self::Verified { .. })
    }

    /// Returns whether it is unknown if the outputs were verified.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    pub fn is_unknown(&self) -> bool {
        *self == Self::Unknown
    }

    /// Whether a smaller share of the outputs was compared than in another verification.
    pub fn compares_less_than(self, other: Self) -> bool {
        let (kind, checked, total) = self.verification_order();
        let (other_kind, other_checked, other_total) = other.verification_order();
        let shares = [checked * other_total, other_checked * total];
        kind < other_kind || (kind == other_kind && shares[0] < shares[1])
    }

    /// Returns the weaker of two verifications, the one that compared fewer outputs.
    pub fn weaker_verification(self, other: Self) -> Self {
        if other.compares_less_than(self) { other } else { self }
    }

    /// Rank, elements compared, elements.
    fn verification_order(self) -> (u8, u128, u128) {
        match self {
            Self::Unknown => (0, 0, 1),
            Self::Unverified => (1, 0, 1),
            Self::ComparedWithBase { checked, total } => (2, checked.into(), total.into()),
            Self::Verified { checked, total } => (3, checked.into(), total.into()),
        }
    }

    /// Checks the facts that deserialising does not enforce.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn validate(self) -> Result<(), String> {
        match self {
            Self::Verified { checked, total } | Self::ComparedWithBase { checked, total }
                if checked == 0 || checked > total =>
            {
                Err(format!("{checked} elements compared of {total}"))
            }
            _ => Ok(()),
        }
    }
}

/// Prints a verification as "1 of 1600 elements verified".
impl fmt::Display for VerificationExtent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Verified { checked, total } if checked == total => {
                write!(f, "every element verified")
            }
            Self::Verified { checked, total } => {
                write!(f, "{checked} of {total} elements verified")
            }
            Self::ComparedWithBase { .. } => write!(f, "compared with the base's outputs only"),
            Self::Unverified => write!(f, "unverified"),
            Self::Unknown => write!(f, "verification not recorded"),
        }
    }
}

/// The errors that were allowed: of the workload's tolerance, and of the precision that it
/// declares.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AllowedErrors {
    /// Largest |out - ref| over the largest |ref|.
    pub max_error: f64,
    /// ‖out - ref‖₂ / ‖ref‖₂.
    pub relative_l2: f64,
}

impl From<&ErrorBounds> for AllowedErrors {
    fn from(bounds: &ErrorBounds) -> Self {
        let Tolerance { max_error, relative_l2 } = bounds.largest_allowed_errors();
        Self { max_error, relative_l2 }
    }
}

/// Comparison of the outputs of the timed graph or launch, run once more after timing, with the
/// reference.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AfterTiming {
    /// Change of the inputs before the outputs were compared after timing.
    pub inputs: InputChange,
    /// Largest |out - ref| over the largest |ref|; 0 if the outputs have the bits of the verified
    /// ones.
    pub max_error: f64,
    /// ‖out - ref‖₂ / ‖ref‖₂; 0 if the outputs are equal.
    pub relative_l2: f64,
}

impl AfterTiming {
    /// Verification of outputs that have the same bits as verified outputs of the same inputs.
    pub const SAME_BITS_VERIFICATION: Self =
        Self { inputs: InputChange::Same, max_error: 0.0, relative_l2: 0.0 };
}

/// The way in which inputs were changed between timing and the check after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputChange {
    /// The inputs were rolled along an axis on which the computation does not depend.
    Rolled,
    /// Inputs were negated, because the computation is linear.
    Negated,
    /// Drawn anew.
    Redrawn,
    /// The inputs were not changed: a remembered result would pass.
    Same,
}

impl InputChange {
    /// "with inputs rolled".
    pub const fn words(self) -> &'static str {
        match self {
            Self::Rolled => "with inputs rolled",
            Self::Negated => "with inputs negated",
            Self::Redrawn => "with inputs drawn anew",
            Self::Same => "with the same inputs",
        }
    }
}

impl From<OutputComparison> for VerificationRecord {
    fn from(comparison: OutputComparison) -> Self {
        let OutputComparison { errors, by_output, checked, total, with_base } = comparison;
        let OutputErrors { max_error, relative_l2, rounding } = errors;
        Self {
            max_error,
            relative_l2,
            rounding,
            by_output,
            checked,
            total,
            with_base,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use VerificationExtent::{ComparedWithBase, Unknown, Unverified, Verified};

    #[test]
    fn a_verification_of_fewer_elements_counts_as_weaker() {
        let verified = |checked, total| Verified { checked, total };
        let based = ComparedWithBase { checked: 4, total: 4 };
        for (less, more) in [
            (verified(1, 1600), verified(1600, 1600)),
            (verified(1, 3), verified(2, 4)),
            (based, verified(1, 1600)),
            (Unverified, based),
            (Unknown, Unverified),
        ] {
            assert!(
                less.compares_less_than(more) && !more.compares_less_than(less),
                "{less} {more}"
            );
            assert_eq!([less.weaker_verification(more), more.weaker_verification(less)], [less; 2]);
        }
        assert!(!verified(2, 4).compares_less_than(verified(1, 2)));
        assert!(!verified(u64::MAX, u64::MAX).compares_less_than(verified(1, 1)));
    }

    #[test]
    fn a_record_without_compared_elements_counts_as_unverified() {
        let record = |checked, with_base| VerificationRecord {
            checked,
            total: 4,
            with_base,
            ..VerificationRecord::default()
        };
        assert_eq!(record(0, true).value(), Unverified);
        assert_eq!(record(4, true).value(), ComparedWithBase { checked: 4, total: 4 });
        assert_eq!(record(3, false).value(), Verified { checked: 3, total: 4 });
    }

    #[test]
    fn a_verification_of_no_or_too_many_elements_is_refused() {
        for (checked, total) in [(0, 4), (5, 4)] {
            let why = Err(format!("{checked} elements compared of {total}"));
            assert_eq!(Verified { checked, total }.validate(), why);
            assert_eq!(ComparedWithBase { checked, total }.validate(), why);
        }
        assert_eq!(Verified { checked: 4, total: 4 }.validate(), Ok(()));
    }
}
