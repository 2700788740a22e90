//! The record of how a case's outputs compared with the reference.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::verify::{
    self, ComparisonWithReference, ErrorBoundsOfOutputs, ErrorsRelativeToReference,
};
use crate::workload::Tolerance;

/// Recorded result of the comparison of a case's outputs with the reference.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OutputVerificationRecord {
    /// Largest absolute error, |out - ref|, divided by the largest |ref| of all outputs.
    pub max_error: f64,
    /// Relative L2 error ‖out - ref‖₂ / ‖ref‖₂ of the outputs.
    pub relative_l2: f64,
    /// Number of output elements that were compared with the reference.
    #[serde(rename = "checked")]
    pub compared_elements: u64,
    /// Number of elements of all outputs.
    #[serde(rename = "total")]
    pub total_elements: u64,
    /// Whether the outputs were compared with those of the base build instead of a reference,
    /// because the case has no reference.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "with_base")]
    pub compared_with_base: bool,
    /// Relative L2 error that only rounding the reference to the outputs' dtypes causes; 0 if
    /// rounding changes nothing.
    #[serde(default, skip_serializing_if = "verify::is_zero_error")]
    #[serde(rename = "rounding")]
    pub rounding_error: f64,
    /// Errors by output name, if several outputs are compared within error bounds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub by_output: BTreeMap<String, ErrorsRelativeToReference>,
    /// Allowed errors of the output with the widest tolerance.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed: Option<AllowedOutputErrors>,
    /// Hash of the bits of all outputs; recorded only in trials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "digest")]
    pub output_bits_hash: Option<String>,
    /// Data set of the verification: a hash of the inputs (only in trials), or
    /// [`DATA_SET_EQUAL_FOR_ALL_SEEDS`].
    ///
    /// [`DATA_SET_EQUAL_FOR_ALL_SEEDS`]: super::numerics::DATA_SET_EQUAL_FOR_ALL_SEEDS
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "data_set")]
    pub verified_data_set: Option<String>,
    /// Result of the second comparison, after timing; absent if nothing was timed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "after")]
    pub after_timing: Option<VerificationAfterTiming>,
    /// Key of the earlier run whose comparison is reused because its outputs have equal bits;
    /// absent if this run compared the outputs itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "by")]
    pub reused_from_run: Option<String>,
}

impl OutputVerificationRecord {
    /// Fails if more elements were compared than exist, or if an error is implausible or larger
    /// than allowed.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_verification_plausible(&self) -> Result<(), String> {
        let Self { compared_elements: checked, total_elements: total, .. } = *self;
        if checked > total {
            return Err(format!("{checked} elements compared of {total}"));
        }
        let after = self.after_timing.map(|after| [after.max_error, after.relative_l2]);
        let [max_error, relative_l2] = after.unwrap_or_default();
        let after = ErrorsRelativeToReference { max_error, relative_l2, rounding_error: 0.0 };
        let allowed = self.allowed.map(|allowed| ErrorsRelativeToReference {
            max_error: allowed.max_error,
            relative_l2: allowed.max_relative_l2_error,
            rounding_error: 0.0,
        });
        let mut all = self
            .by_output
            .values()
            .copied()
            .chain([self.errors_of_all_outputs(), after])
            .chain(allowed);
        all.try_for_each(|errors| errors.check_errors_plausible())?;
        // A record with larger errors than allowed is refused, because such a case fails and gets
        // no record.
        let Some(allowed) = allowed.map(|allowed| allowed.max_error) else { return Ok(()) };
        let beyond = |error: f64, when: &str| match error > allowed {
            true => Err(format!("a maximum error of {error}{when} where {allowed} is allowed")),
            false => Ok(()),
        };
        beyond(self.max_error, "")?;
        beyond(after.max_error, " after timing")
    }

    /// Returns which part of the outputs was verified, and against what.
    pub const fn verification_extent(&self) -> OutputVerificationExtent {
        let Self { compared_elements: checked, total_elements, .. } = *self;
        match (checked, self.compared_with_base) {
            (0, _) => OutputVerificationExtent::Unverified,
            (_, true) => OutputVerificationExtent::ComparedWithBase {
                compared_elements: checked,
                total_elements,
            },
            (_, false) => {
                OutputVerificationExtent::Verified { compared_elements: checked, total_elements }
            }
        }
    }

    /// Returns the maximum error, the relative L2 error and the rounding error over all outputs.
    pub const fn errors_of_all_outputs(&self) -> ErrorsRelativeToReference {
        let Self { max_error, relative_l2, rounding_error, .. } = *self;
        ErrorsRelativeToReference { max_error, relative_l2, rounding_error }
    }
}

/// Which part of a case's outputs was compared, and whether with the reference or with the base
/// build's outputs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum OutputVerificationExtent {
    /// The outputs were compared with the reference.
    Verified {
        /// Number of output elements that were compared.
        #[serde(rename = "checked")]
        compared_elements: u64,
        /// Elements of the outputs.
        #[serde(rename = "total")]
        total_elements: u64,
    },
    /// The outputs were compared with the base build's outputs, because there is no reference.
    ComparedWithBase {
        /// Elements that were compared.
        #[serde(rename = "checked")]
        compared_elements: u64,
        /// Elements of the outputs.
        #[serde(rename = "total")]
        total_elements: u64,
    },
    /// The outputs were compared with nothing.
    Unverified,
    /// No record states whether the outputs of the case were compared.
    #[default]
    #[serde(rename = "unknown")]
    ComparisonNotRecorded,
}

impl OutputVerificationExtent {
    /// Returns whether at least a part of the outputs was compared with the reference.
    pub const fn is_compared_with_reference(self) -> bool {
        matches!(self, Self::Verified { .. })
    }

    /// Returns whether no record states if the outputs were compared.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    pub fn is_comparison_not_recorded(&self) -> bool {
        *self == Self::ComparisonNotRecorded
    }

    /// Returns whether this verification is weaker than another: by kind, or because it compared a
    /// smaller share of the outputs.
    pub fn is_weaker_than(self, other: Self) -> bool {
        let (kind, checked, total) = self.strength_and_compared_elements();
        let (other_kind, other_checked, other_total) = other.strength_and_compared_elements();
        let shares = [checked * other_total, other_checked * total];
        kind < other_kind || (kind == other_kind && shares[0] < shares[1])
    }

    /// Returns the weaker of two verifications, by kind and by share of compared outputs.
    pub fn weaker_of_both(self, other: Self) -> Self {
        if other.is_weaker_than(self) { other } else { self }
    }

    /// Returns a number that is larger for a stronger kind of verification, the number of compared
    /// elements and the number of all elements.
    fn strength_and_compared_elements(self) -> (u8, u128, u128) {
        match self {
            Self::ComparisonNotRecorded => (0, 0, 1),
            Self::Unverified => (1, 0, 1),
            Self::ComparedWithBase { compared_elements: checked, total_elements: total } => {
                (2, checked.into(), total.into())
            }
            Self::Verified { compared_elements: checked, total_elements: total } => {
                (3, checked.into(), total.into())
            }
        }
    }

    /// Fails if no elements were compared, or more than exist.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_element_counts(self) -> Result<(), String> {
        match self {
            Self::Verified { compared_elements: checked, total_elements: total }
            | Self::ComparedWithBase { compared_elements: checked, total_elements: total }
                if checked == 0 || checked > total =>
            {
                Err(format!("{checked} elements compared of {total}"))
            }
            _ => Ok(()),
        }
    }
}

/// Prints which part of the outputs was verified, such as "1 of 1600 elements verified".
impl fmt::Display for OutputVerificationExtent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Verified { compared_elements: checked, total_elements: total }
                if checked == total =>
            {
                write!(f, "every element verified")
            }
            Self::Verified { compared_elements: checked, total_elements: total } => {
                write!(f, "{checked} of {total} elements verified")
            }
            Self::ComparedWithBase { .. } => write!(f, "compared with the base's outputs only"),
            Self::Unverified => write!(f, "unverified"),
            Self::ComparisonNotRecorded => write!(f, "verification not recorded"),
        }
    }
}

/// Largest allowed errors of the outputs, by the workload's tolerance and the precision that the
/// implementation declares.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct AllowedOutputErrors {
    /// Largest allowed absolute error, |out - ref|, divided by the largest |ref|.
    pub max_error: f64,
    /// Largest allowed relative L2 error, ‖out - ref‖₂ / ‖ref‖₂.
    #[serde(rename = "relative_l2")]
    pub max_relative_l2_error: f64,
}

impl From<&ErrorBoundsOfOutputs> for AllowedOutputErrors {
    fn from(bounds: &ErrorBoundsOfOutputs) -> Self {
        let Tolerance { max_error, relative_l2 } = bounds.largest_errors_allowed_for_any_output();
        Self { max_error, max_relative_l2_error: relative_l2 }
    }
}

/// Result of running the timed graph or launch once more after timing, and comparing its outputs
/// with the reference.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct VerificationAfterTiming {
    /// How the inputs were changed before this launch after timing.
    pub inputs: InputChangeAfterTiming,
    /// Largest |out - ref| divided by the largest |ref|; 0 if the output bits equal those verified
    /// before.
    pub max_error: f64,
    /// Relative L2 error ‖out - ref‖₂ / ‖ref‖₂; 0 if the output bits equal those verified before.
    pub relative_l2: f64,
}

impl VerificationAfterTiming {
    /// Result for unchanged inputs whose output bits equal the bits verified before timing.
    pub const EQUAL_BITS_FOR_UNCHANGED_INPUTS: Self =
        Self { inputs: InputChangeAfterTiming::InputsUnchanged, max_error: 0.0, relative_l2: 0.0 };
}

/// How the inputs were changed between timing and the verification after timing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InputChangeAfterTiming {
    /// The inputs were rotated along an axis whose order does not influence the computation.
    #[serde(rename = "rolled")]
    InputsRotated,
    /// The inputs were negated, because the computation is linear.
    #[serde(rename = "negated")]
    InputsNegated,
    /// The values of the inputs were drawn anew from another seed.
    #[serde(rename = "redrawn")]
    InputsDrawnAnew,
    /// The inputs were not changed, so a launch that returned remembered results would pass.
    #[serde(rename = "same")]
    InputsUnchanged,
}

impl InputChangeAfterTiming {
    /// "with inputs rolled".
    pub const fn description_for_messages(self) -> &'static str {
        match self {
            Self::InputsRotated => "with inputs rolled",
            Self::InputsNegated => "with inputs negated",
            Self::InputsDrawnAnew => "with inputs drawn anew",
            Self::InputsUnchanged => "with the same inputs",
        }
    }
}

impl From<ComparisonWithReference> for OutputVerificationRecord {
    fn from(comparison: ComparisonWithReference) -> Self {
        let ComparisonWithReference {
            errors,
            by_output,
            compared_elements,
            all_elements: total,
            compared_with_base,
        } = comparison;
        let ErrorsRelativeToReference { max_error, relative_l2, rounding_error } = errors;
        Self {
            max_error,
            relative_l2,
            rounding_error,
            by_output,
            compared_elements,
            total_elements: total,
            compared_with_base,
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use OutputVerificationExtent::{ComparedWithBase, ComparisonNotRecorded, Unverified, Verified};

    #[test]
    fn a_verification_of_fewer_elements_counts_as_weaker() {
        let verified =
            |checked, total| Verified { compared_elements: checked, total_elements: total };
        let based = ComparedWithBase { compared_elements: 4, total_elements: 4 };
        for (less, more) in [
            (verified(1, 1600), verified(1600, 1600)),
            (verified(1, 3), verified(2, 4)),
            (based, verified(1, 1600)),
            (Unverified, based),
            (ComparisonNotRecorded, Unverified),
        ] {
            assert!(less.is_weaker_than(more) && !more.is_weaker_than(less), "{less} {more}");
            assert_eq!([less.weaker_of_both(more), more.weaker_of_both(less)], [less; 2]);
        }
        assert!(!verified(2, 4).is_weaker_than(verified(1, 2)));
        assert!(!verified(u64::MAX, u64::MAX).is_weaker_than(verified(1, 1)));
    }

    #[test]
    fn a_record_without_compared_elements_is_unverified() {
        let record = |checked, with_base| OutputVerificationRecord {
            compared_elements: checked,
            total_elements: 4,
            compared_with_base: with_base,
            ..OutputVerificationRecord::default()
        };
        assert_eq!(record(0, true).verification_extent(), Unverified);
        assert_eq!(
            record(4, true).verification_extent(),
            ComparedWithBase { compared_elements: 4, total_elements: 4 }
        );
        assert_eq!(
            record(3, false).verification_extent(),
            Verified { compared_elements: 3, total_elements: 4 }
        );
    }

    #[test]
    fn a_verification_of_no_or_too_many_elements_is_refused() {
        for (checked, total) in [(0, 4), (5, 4)] {
            let why = Err(format!("{checked} elements compared of {total}"));
            assert_eq!(
                Verified { compared_elements: checked, total_elements: total }
                    .check_element_counts(),
                why
            );
            assert_eq!(
                ComparedWithBase { compared_elements: checked, total_elements: total }
                    .check_element_counts(),
                why
            );
        }
        assert_eq!(
            Verified { compared_elements: 4, total_elements: 4 }.check_element_counts(),
            Ok(())
        );
    }
}
