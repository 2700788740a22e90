//! The judgement of one case, the same for `gate` and `compare`: verdict, effect with its interval,
//! detectable change, reasons, and the evidence of the method. This module contains neither the two
//! methods (`baseline`, `paired`) nor printing (`report`).

use super::inconclusive_reason::{InconclusiveReason, joined};
use super::limits::{CaseLimits, SourcedLimit};
use super::outputs::verification::VerificationLoss;
use super::paired::{BlocksByCase, PairedDecision, TestPlan, decide_all};
use super::ratio_interval::{SideTimeInterval, SingleRunSpread, TimeRatio};
use super::verdict::Verdict;

/// The verdict on one case, with its evidence.
#[derive(Debug, Clone, PartialEq)]
pub struct Judgement {
    pub case: String,
    /// The final verdict.
    pub verdict: Verdict,
    /// Reasons why the case is inconclusive; empty for other verdicts.
    pub reasons: Vec<InconclusiveReason>,
    /// Smallest relative change that fails the case.
    pub threshold: SourcedLimit,
    /// Time of the base, nanoseconds a launch; 0 without a usable time.
    pub base_ns: f64,
    /// Time of the head, nanoseconds a launch; 0 without a usable time.
    pub head_ns: f64,
    /// Time of the head over that of the base, with its interval.
    pub ratio: TimeRatio,
    /// Smallest relative slow-down that would have been found; absent if none can be found.
    pub detectable: Option<f64>,
    /// Measurements of the method.
    pub evidence: JudgementEvidence,
}

/// Measurements on which a judgement is based: pairs of processes or runs.
#[derive(Debug, Clone, PartialEq)]
pub enum JudgementEvidence {
    /// Process runs of a baseline and of the judged measurement.
    Runs(Box<RunEvidence>),
    /// Pairs of processes of two builds (of a comparison).
    Pairs(Box<PairEvidence>),
}

/// Process runs of baseline and head (of the gate).
#[derive(Debug, Clone, PartialEq)]
pub struct RunEvidence {
    /// Whether all runs are known to be from one device.
    pub same_device: bool,
    /// The card whose runs were compared, if a side also has runs of other cards.
    pub card: Option<String>,
    /// Runs of the baseline.
    pub base: SideRunCounts,
    /// Runs that are judged.
    pub head: SideRunCounts,
}

/// Number and spread of the process runs of one side.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SideRunCounts {
    /// Number of runs.
    pub runs: usize,
    /// Relative half-width of the range of the runs; absent with one run.
    pub spread: Option<f64>,
    /// Allowance of the only run for the difference between runs; absent with several.
    pub single: Option<SingleRunSpread>,
    /// Share of the host's CPU time that co-running processes took; 0 if unknown or without effect.
    pub contention: f64,
}

impl SideRunCounts {
    /// Number, spread and CPU contention of one side's process runs, taken from their time interval.
    /// `single` is the allowance if there is only one run.
    pub const fn new(times: &SideTimeInterval, single: Option<SingleRunSpread>) -> Self {
        Self { runs: times.runs, spread: times.spread, single, contention: times.contention }
    }
}

/// Decisions of both rounds.
#[derive(Debug, Clone, PartialEq)]
pub struct PairEvidence {
    /// First round.
    pub decision: PairedDecision,
    /// Second round, with new blocks; only if the first round found a regression.
    pub confirmation: Option<PairedDecision>,
}

impl Judgement {
    /// Judges a case by both rounds of a comparison. If case errors stopped the case before it was
    /// decided, its blocks are too few for a verdict, unless both rounds find a regression.
    pub fn from_rounds(
        mut decision: PairedDecision,
        confirmation: Option<PairedDecision>,
        case_errors: Vec<InconclusiveReason>,
        limits: &CaseLimits,
    ) -> Judgement {
        let confirmed =
            confirmation.as_ref().is_some_and(|second| second.verdict == Verdict::Regressed);
        let verdict = match decision.verdict {
            Verdict::Regressed if confirmed => Verdict::Regressed,
            Verdict::Regressed => Verdict::Inconclusive,
            _ if !case_errors.is_empty() => Verdict::Inconclusive,
            verdict => limits.reported(verdict, decision.ratio.center, decision.base_ns, 0.0),
        };
        let mut reasons = Vec::new();
        if verdict == Verdict::Inconclusive {
            let of_pairs = match decision.verdict {
                Verdict::Regressed => Some(InconclusiveReason::NotConfirmed),
                _ => InconclusiveReason::from_decision(&decision),
            };
            // Without a pair the error is the whole reason; with an error more pairs do not help.
            reasons.extend(of_pairs.filter(|_| decision.pairs > 0 || case_errors.is_empty()));
            if !case_errors.is_empty() {
                decision.pairs_needed = None;
            }
            reasons.extend(case_errors);
        }
        let faster_ns = decision.base_ns.min(decision.head_ns);
        let source = limits.failing_limit(faster_ns, 0.0).source;
        Self {
            case: decision.case.clone(),
            verdict,
            reasons,
            threshold: SourcedLimit { value: decision.threshold, source },
            base_ns: decision.base_ns,
            head_ns: decision.head_ns,
            ratio: decision.ratio,
            detectable: decision.detectable,
            evidence: JudgementEvidence::Pairs(Box::new(PairEvidence { decision, confirmation })),
        }
    }

    /// Judges a case of a comparison that has no block.
    pub fn unmeasured(
        case: String,
        why: Vec<InconclusiveReason>,
        plan: &TestPlan,
        limits: &CaseLimits,
    ) -> Judgement {
        // The case is decided separately, because the other cases' error rates hold only for
        // measured cases.
        let alone = decide_all(&BlocksByCase::from([(case, Vec::new())]), plan, true);
        let decision = alone.decisions.into_iter().next().expect("a case that goes in comes out");
        Self::from_rounds(decision, None, why, limits)
    }

    /// The judgement of a case whose outputs were verified less than the base's: unless it
    /// regressed, it is inconclusive, whatever its time.
    pub fn less_verified(mut self, loss: VerificationLoss) -> Self {
        if self.verdict == Verdict::Regressed {
            return self;
        }
        self.verdict = Verdict::Inconclusive;
        self.reasons.retain(|reason| !reason.is_case_error());
        self.reasons.push(InconclusiveReason::LessVerified(loss));
        if let JudgementEvidence::Pairs(pairs) = &mut self.evidence {
            pairs.decision.pairs_needed = None;
        }
        self
    }

    /// Returns whether the case has times; a case that could not be measured has none.
    pub const fn is_timed(&self) -> bool {
        self.base_ns > 0.0
    }

    /// Returns all reasons for an inconclusive verdict as text; `None` without a reason.
    pub fn reason(&self) -> Option<String> {
        Some(joined(&self.reasons)).filter(|words| !words.is_empty())
    }

    /// The errors that kept the case from being measured to the end, in words.
    pub fn case_error(&self) -> Option<String> {
        let words = joined(self.reasons.iter().filter(|reason| reason.is_case_error()));
        Some(words).filter(|words| !words.is_empty())
    }

    /// Pairs of processes behind the judgement, if builds were compared.
    pub fn pairs(&self) -> Option<&PairEvidence> {
        match &self.evidence {
            JudgementEvidence::Pairs(pairs) => Some(pairs),
            JudgementEvidence::Runs(_) => None,
        }
    }

    /// Process runs behind the judgement, if a baseline was compared.
    pub fn runs(&self) -> Option<&RunEvidence> {
        match &self.evidence {
            JudgementEvidence::Runs(runs) => Some(runs),
            JudgementEvidence::Pairs(_) => None,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::gate::inconclusive_reason::BuildFailure;
    use crate::gate::paired::{Arm, tests::decision};
    use kernelgate::record::VerificationExtent;

    const TEST_LIMITS: CaseLimits = CaseLimits::default_limit(0.01);

    /// A judgement of pairs with a verdict and nothing else.
    pub fn judgement(case: &str, verdict: Verdict) -> Judgement {
        let decision = PairedDecision {
            reason: Some(crate::gate::paired::InconclusiveCause::Wide),
            ..decision(case, verdict)
        };
        let again = (verdict == Verdict::Regressed).then(|| decision.clone());
        Judgement::from_rounds(decision, again, Vec::new(), &TEST_LIMITS)
    }

    /// Makes a judgement of a case with these times, for tests.
    pub fn timed(case: &str, verdict: Verdict, ratio: TimeRatio) -> Judgement {
        let base_ns = 1e6;
        Judgement { base_ns, head_ns: base_ns * ratio.center, ratio, ..judgement(case, verdict) }
    }

    #[test]
    fn a_regression_counts_only_if_a_second_round_confirms_it() {
        use Verdict::{Inconclusive, Regressed, Unchanged};
        let judge = |first, second: Option<Verdict>| {
            let second = second.map(|verdict| decision("x", verdict));
            Judgement::from_rounds(decision("x", first), second, Vec::new(), &TEST_LIMITS)
        };
        assert_eq!(judge(Unchanged, None).verdict, Unchanged);
        let confirmed = judge(Regressed, Some(Regressed));
        assert_eq!((confirmed.verdict, confirmed.reason()), (Regressed, None));
        for second in [None, Some(Unchanged), Some(Inconclusive)] {
            let open = judge(Regressed, second);
            assert_eq!(
                (open.verdict, open.reasons),
                (Inconclusive, vec![InconclusiveReason::NotConfirmed])
            );
        }
    }

    #[test]
    fn an_error_of_a_case_makes_it_inconclusive_with_the_reason() {
        use Verdict::{Improved, Inconclusive, Regressed, Unchanged};
        let why = || vec![InconclusiveReason::Skipped(BuildFailure::new(Arm::Head, "no memory"))];
        for first in [Unchanged, Improved, Inconclusive] {
            let judged = Judgement::from_rounds(decision("x", first), None, why(), &TEST_LIMITS);
            assert_eq!((judged.verdict, judged.reasons), (Inconclusive, why()));
        }
        let confirmed = Judgement::from_rounds(
            decision("x", Regressed),
            Some(decision("x", Regressed)),
            why(),
            &TEST_LIMITS,
        );
        assert_eq!((confirmed.verdict, confirmed.reasons), (Regressed, vec![]));
        let open = Judgement::from_rounds(decision("x", Regressed), None, why(), &TEST_LIMITS);
        let words = "not confirmed by a second round; skipped in the head: no memory";
        assert_eq!(open.reason().as_deref(), Some(words));
        let unmeasured =
            Judgement::unmeasured("x".to_owned(), why(), &TestPlan::default(), &TEST_LIMITS);
        assert_eq!((unmeasured.verdict, unmeasured.reasons), (Inconclusive, why()));
        assert!(unmeasured.base_ns == 0.0);
    }

    #[test]
    fn a_case_that_is_verified_less_than_before_is_not_unchanged() {
        let all = VerificationExtent::Verified { checked: 1600, total: 1600 };
        let loss =
            VerificationLoss::from_extents("a", all, VerificationExtent::Unverified).unwrap();
        let judged = judgement("a", Verdict::Unchanged).less_verified(loss.clone());
        assert_eq!(judged.verdict, Verdict::Inconclusive);
        let words = "no longer verified (before: every element verified)";
        assert_eq!(judged.case_error().as_deref(), Some(words));
        let slower = judgement("a", Verdict::Regressed).less_verified(loss);
        assert_eq!((slower.verdict, slower.reasons), (Verdict::Regressed, vec![]));
    }
}
