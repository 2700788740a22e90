//! Determines whether the head verified the outputs of a case less completely than the base or
//! baseline. A case whose outputs are no longer compared with a reference is not reported as
//! unchanged, whatever its time.
//!
//! Comparing outputs with the reference and judging grown errors ([`numerics`](super::numerics))
//! are not part of the module `verification`.

use kernelgate::record::OutputVerificationExtent;
use serde::{Deserialize, Serialize};

/// A case whose outputs the head verified less completely than the base or baseline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerificationLoss {
    /// Id of the case, in the form `workload/problem/implementation/cache`.
    #[serde(rename = "case")]
    pub case_id: String,
    /// To what extent the base or baseline verified the outputs of the case.
    pub base: OutputVerificationExtent,
    /// To what extent the head verified the outputs of the case.
    pub head: OutputVerificationExtent,
}

impl VerificationLoss {
    /// Returns the loss of verification of a case; `None` if the head verified it at least as
    /// completely as the base. If the baseline does not record how far it verified the case, an
    /// unverified head counts as a possible loss.
    pub fn from_extents(
        case: &str,
        base: OutputVerificationExtent,
        head: OutputVerificationExtent,
    ) -> Option<VerificationLoss> {
        let lost = match base {
            OutputVerificationExtent::ComparisonNotRecorded => {
                head == OutputVerificationExtent::Unverified
            }
            base => head.is_weaker_than(base),
        };
        lost.then(|| Self { case_id: case.to_owned(), base, head })
    }

    /// Returns whether a case that the base verified is no longer verified at all in the head,
    /// which fails the comparison. A head that compares fewer elements, or only with the base's
    /// outputs, makes the case inconclusive but does not fail.
    pub const fn is_complete_loss(&self) -> bool {
        self.base.is_compared_with_reference()
            && matches!(
                self.head,
                OutputVerificationExtent::Unverified
                    | OutputVerificationExtent::ComparisonNotRecorded
            )
    }

    /// Describes the loss of verification: "no longer verified (before: every element verified)".
    pub fn describe_verification_loss(&self) -> String {
        let Self { base, head, .. } = self;
        match self.is_complete_loss() {
            true => format!("no longer verified (before: {base})"),
            false => format!("less verified: {head} (before: {base})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use OutputVerificationExtent::{ComparedWithBase, ComparisonNotRecorded, Unverified, Verified};

    const ALL_ELEMENTS_VERIFIED: OutputVerificationExtent =
        Verified { compared_elements: 1600, total_elements: 1600 };
    const ONE_ELEMENT_VERIFIED: OutputVerificationExtent =
        Verified { compared_elements: 1, total_elements: 1600 };
    const ALL_ELEMENTS_COMPARED_WITH_BASE: OutputVerificationExtent =
        ComparedWithBase { compared_elements: 1600, total_elements: 1600 };

    #[test]
    fn a_case_that_is_no_longer_verified_is_a_failure() {
        for (base, head) in [
            (ALL_ELEMENTS_VERIFIED, Unverified),
            (ONE_ELEMENT_VERIFIED, Unverified),
            (ALL_ELEMENTS_VERIFIED, ComparisonNotRecorded),
        ] {
            let loss = VerificationLoss::from_extents("a", base, head).unwrap();
            assert!(loss.is_complete_loss(), "{base} {head}");
            assert_eq!(
                loss.describe_verification_loss(),
                format!("no longer verified (before: {base})")
            );
        }
    }

    #[test]
    fn a_case_that_is_now_verified_only_in_part_is_inconclusive() {
        for (base, head) in [
            (ALL_ELEMENTS_VERIFIED, ONE_ELEMENT_VERIFIED),
            (ALL_ELEMENTS_VERIFIED, ALL_ELEMENTS_COMPARED_WITH_BASE),
            (ALL_ELEMENTS_COMPARED_WITH_BASE, Unverified),
        ] {
            let loss = VerificationLoss::from_extents("a", base, head).unwrap();
            assert!(!loss.is_complete_loss(), "{base} {head}");
        }
        let words =
            VerificationLoss::from_extents("a", ALL_ELEMENTS_VERIFIED, ONE_ELEMENT_VERIFIED)
                .unwrap()
                .describe_verification_loss();
        assert_eq!(
            words,
            "less verified: 1 of 1600 elements verified (before: every element verified)"
        );
        assert!(
            !VerificationLoss::from_extents("a", ComparisonNotRecorded, Unverified)
                .unwrap()
                .is_complete_loss()
        );
    }

    #[test]
    fn equal_or_better_verification_does_not_count_as_a_loss() {
        let same = [
            (ALL_ELEMENTS_VERIFIED, ALL_ELEMENTS_VERIFIED),
            (Unverified, Unverified),
            (ComparisonNotRecorded, ComparisonNotRecorded),
        ];
        let more = [
            (ONE_ELEMENT_VERIFIED, ALL_ELEMENTS_VERIFIED),
            (Unverified, ALL_ELEMENTS_VERIFIED),
            (Unverified, ALL_ELEMENTS_COMPARED_WITH_BASE),
            (ComparisonNotRecorded, ALL_ELEMENTS_VERIFIED),
        ];
        for (base, head) in same.into_iter().chain(more) {
            assert_eq!(VerificationLoss::from_extents("a", base, head), None, "{base} {head}");
        }
    }
}
