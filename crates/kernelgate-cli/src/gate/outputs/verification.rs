//! Determines whether a case was verified less completely than before. If nobody compared the
//! outputs any more, the time of a case is not "unchanged".
//!
//! Deliberately absent: how outputs are compared, and errors that grew
//! ([`numerics`](super::numerics)).

use kernelgate::record::VerificationExtent;
use serde::{Deserialize, Serialize};

/// A case that was verified less than its base or baseline.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerificationLoss {
    /// The case.
    pub case: String,
    /// Extent to which the base or the baseline was verified.
    pub base: VerificationExtent,
    /// Extent to which the outputs of the head were verified.
    pub head: VerificationExtent,
}

impl VerificationLoss {
    /// The loss of verification of a case, if the head verifies less than the base. If the baseline
    /// does not record how far the case was verified, an unverified head may have lost
    /// verification.
    pub fn from_extents(
        case: &str,
        base: VerificationExtent,
        head: VerificationExtent,
    ) -> Option<VerificationLoss> {
        let lost = match base {
            VerificationExtent::Unknown => head == VerificationExtent::Unverified,
            base => head.compares_less_than(base),
        };
        lost.then(|| Self { case: case.to_owned(), base, head })
    }

    /// Returns whether a case that was verified before is now compared with nothing, which is a
    /// failure. Fewer compared elements, and a comparison with the base's outputs only, are
    /// inconclusive.
    pub const fn is_failure(&self) -> bool {
        self.base.is_verified()
            && matches!(self.head, VerificationExtent::Unverified | VerificationExtent::Unknown)
    }

    /// The loss in words: "no longer verified (before: every element verified)".
    pub fn words(&self) -> String {
        let Self { base, head, .. } = self;
        match self.is_failure() {
            true => format!("no longer verified (before: {base})"),
            false => format!("less verified: {head} (before: {base})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use VerificationExtent::{ComparedWithBase, Unknown, Unverified, Verified};

    const ALL: VerificationExtent = Verified { checked: 1600, total: 1600 };
    const ONE: VerificationExtent = Verified { checked: 1, total: 1600 };
    const COMPARED_WITH_BASE: VerificationExtent = ComparedWithBase { checked: 1600, total: 1600 };

    #[test]
    fn a_case_that_is_no_longer_verified_is_a_failure() {
        for (base, head) in [(ALL, Unverified), (ONE, Unverified), (ALL, Unknown)] {
            let loss = VerificationLoss::from_extents("a", base, head).unwrap();
            assert!(loss.is_failure(), "{base} {head}");
            assert_eq!(loss.words(), format!("no longer verified (before: {base})"));
        }
    }

    #[test]
    fn a_case_that_is_now_verified_only_in_part_is_inconclusive() {
        for (base, head) in
            [(ALL, ONE), (ALL, COMPARED_WITH_BASE), (COMPARED_WITH_BASE, Unverified)]
        {
            let loss = VerificationLoss::from_extents("a", base, head).unwrap();
            assert!(!loss.is_failure(), "{base} {head}");
        }
        let words = VerificationLoss::from_extents("a", ALL, ONE).unwrap().words();
        assert_eq!(
            words,
            "less verified: 1 of 1600 elements verified (before: every element verified)"
        );
        assert!(!VerificationLoss::from_extents("a", Unknown, Unverified).unwrap().is_failure());
    }

    #[test]
    fn equal_or_better_verification_does_not_count_as_a_loss() {
        let same = [(ALL, ALL), (Unverified, Unverified), (Unknown, Unknown)];
        let more =
            [(ONE, ALL), (Unverified, ALL), (Unverified, COMPARED_WITH_BASE), (Unknown, ALL)];
        for (base, head) in same.into_iter().chain(more) {
            assert_eq!(VerificationLoss::from_extents("a", base, head), None, "{base} {head}");
        }
    }
}
