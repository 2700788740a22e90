//! The judgement of one case by `gate` or `compare`: verdict, time ratio with interval, detectable
//! change, reasons and evidence. The modules `baseline` and `paired` decide verdicts; this module
//! only stores them.

use super::inconclusive_reason::{InconclusiveReason, join_reason_texts};
use super::limits::{CaseLimits, LimitWithSource};
use super::outputs::verification::VerificationLoss;
use super::paired::{
    ComparisonTestPlan, PairedDecisionOnCase, TimedBlocksByCase, decide_cases_with_one_plan,
};
use super::ratio_interval::{AssumedSpreadOfSingleRun, TimeIntervalOfSide, TimeRatioWithInterval};
use super::verdict::VerdictOnCase;

/// The verdict on one case, with its times, reasons and evidence.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseJudgement {
    pub case: String,
    /// The final verdict.
    pub verdict: VerdictOnCase,
    /// Reasons why the case is inconclusive; empty for every other verdict.
    pub reasons: Vec<InconclusiveReason>,
    /// Smallest relative slow-down that counts as a regression of the case, with its source.
    pub threshold: LimitWithSource,
    /// Time of the base, nanoseconds per launch; 0 if the base has no usable time.
    pub base_ns: f64,
    /// Time of the head, nanoseconds per launch; 0 if the head has no usable time.
    pub head_ns: f64,
    /// Time of the head divided by the time of the base, with its confidence interval.
    pub ratio: TimeRatioWithInterval,
    /// Smallest relative slow-down that the measurement would have detected; `None` if it can
    /// detect none.
    pub detectable_change: Option<f64>,
    /// Measurements of the method.
    pub evidence: JudgementEvidence,
}

/// Measurements on which a judgement is based: runs for `gate`, or pairs of processes for
/// `compare`.
#[derive(Debug, Clone, PartialEq)]
pub enum JudgementEvidence {
    /// Process runs of a baseline and of the judged measurement, for `gate`.
    Runs(Box<BaselineRunEvidence>),
    /// Pairs of base and head processes, for `compare`.
    Pairs(Box<PairedRoundsEvidence>),
}

/// Numbers of process runs of baseline and head on which `gate` based a judgement.
#[derive(Debug, Clone, PartialEq)]
pub struct BaselineRunEvidence {
    /// Whether all compared runs are known to be from one and the same device.
    pub same_device: bool,
    /// Name of the card whose runs were compared, if baseline or head also have runs of other
    /// cards.
    pub card: Option<String>,
    /// Runs of the baseline.
    pub base: RunCountAndSpreadOfSide,
    /// Runs that are judged.
    pub head: RunCountAndSpreadOfSide,
}

/// Number and spread of one case's process runs on one side (baseline or head).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunCountAndSpreadOfSide {
    /// Number of runs.
    pub runs: usize,
    /// Relative half-width of the range of the runs' times; `None` with one run.
    pub spread: Option<f64>,
    /// Allowance of a single run for the variance between processes; `None` with several runs.
    pub single_run_spread: Option<AssumedSpreadOfSingleRun>,
    /// Share of the host's CPU time that other processes used; 0 if unknown or without effect on
    /// the times.
    pub contention: f64,
}

impl RunCountAndSpreadOfSide {
    /// Takes number, spread and CPU contention of one side's process runs from their time interval.
    /// The argument `single` is the allowance for the variance between processes if the side has
    /// only one run.
    pub const fn from_time_interval(
        times: &TimeIntervalOfSide,
        single: Option<AssumedSpreadOfSingleRun>,
    ) -> Self {
        Self {
            runs: times.runs,
            spread: times.spread,
            single_run_spread: single,
            contention: times.contention,
        }
    }
}

/// Decisions of both rounds.
#[derive(Debug, Clone, PartialEq)]
pub struct PairedRoundsEvidence {
    /// Decision of the first round.
    pub decision: PairedDecisionOnCase,
    /// Decision of the second round, with new blocks; `None` unless the first round found a
    /// regression.
    pub confirmation: Option<PairedDecisionOnCase>,
}

impl CaseJudgement {
    /// Judges a case by the decisions of the first and second round of a comparison. If errors
    /// stopped the measurement of the case, it is inconclusive, unless both rounds found a
    /// regression.
    pub fn from_both_rounds(
        mut decision: PairedDecisionOnCase,
        confirmation: Option<PairedDecisionOnCase>,
        case_errors: Vec<InconclusiveReason>,
        limits: &CaseLimits,
    ) -> CaseJudgement {
        let confirmed =
            confirmation.as_ref().is_some_and(|second| second.verdict == VerdictOnCase::Regressed);
        let verdict = match decision.verdict {
            VerdictOnCase::Regressed if confirmed => VerdictOnCase::Regressed,
            VerdictOnCase::Regressed => VerdictOnCase::Inconclusive,
            _ if !case_errors.is_empty() => VerdictOnCase::Inconclusive,
            verdict => limits.verdict_with_acceptance(
                verdict,
                decision.ratio.center,
                decision.base_ns,
                0.0,
            ),
        };
        let mut reasons = Vec::new();
        if verdict == VerdictOnCase::Inconclusive {
            let of_pairs = match decision.verdict {
                VerdictOnCase::Regressed => Some(InconclusiveReason::NotConfirmed),
                _ => InconclusiveReason::from_paired_decision(&decision),
            };
            // With no pair at all, the error is the only reason; with an error, more pairs would
            // not help, so none are requested.
            reasons.extend(of_pairs.filter(|_| decision.pairs > 0 || case_errors.is_empty()));
            if !case_errors.is_empty() {
                decision.pairs_needed = None;
            }
            reasons.extend(case_errors);
        }
        let faster_ns = decision.base_ns.min(decision.head_ns);
        let source = limits.smallest_failing_slowdown(faster_ns, 0.0).source;
        Self {
            case: decision.case.clone(),
            verdict,
            reasons,
            threshold: LimitWithSource { value: decision.threshold, source },
            base_ns: decision.base_ns,
            head_ns: decision.head_ns,
            ratio: decision.ratio,
            detectable_change: decision.detectable,
            evidence: JudgementEvidence::Pairs(Box::new(PairedRoundsEvidence {
                decision,
                confirmation,
            })),
        }
    }

    /// Judges a case of a comparison for which no block was measured: it is inconclusive, with the
    /// given reasons.
    pub fn for_case_without_blocks(
        case: String,
        why: Vec<InconclusiveReason>,
        plan: &ComparisonTestPlan,
        limits: &CaseLimits,
    ) -> CaseJudgement {
        // The case without blocks is decided by itself, so that it does not change the error rates
        // of the measured cases.
        let alone =
            decide_cases_with_one_plan(&TimedBlocksByCase::from([(case, Vec::new())]), plan, true);
        let decision = alone.decisions.into_iter().next().expect("a case that goes in comes out");
        Self::from_both_rounds(decision, None, why, limits)
    }

    /// Changes the judgement of a case that the head verified less than the base to inconclusive,
    /// unless the case regressed.
    pub fn with_verification_loss(mut self, loss: VerificationLoss) -> Self {
        if self.verdict == VerdictOnCase::Regressed {
            return self;
        }
        self.verdict = VerdictOnCase::Inconclusive;
        self.reasons.retain(|reason| !reason.is_measurement_error());
        self.reasons.push(InconclusiveReason::LessVerified(loss));
        if let JudgementEvidence::Pairs(pairs) = &mut self.evidence {
            pairs.decision.pairs_needed = None;
        }
        self
    }

    /// Returns whether the case has measured times; a case that could not be measured has none.
    pub const fn has_times(&self) -> bool {
        self.base_ns > 0.0
    }

    /// Returns all reasons for an inconclusive verdict as one text; `None` if there is no reason.
    pub fn joined_reasons(&self) -> Option<String> {
        Some(join_reason_texts(&self.reasons)).filter(|words| !words.is_empty())
    }

    /// Returns the errors that prevented the complete measurement of the case as one text; `None`
    /// without errors.
    pub fn joined_measurement_errors(&self) -> Option<String> {
        let words =
            join_reason_texts(self.reasons.iter().filter(|reason| reason.is_measurement_error()));
        Some(words).filter(|words| !words.is_empty())
    }

    /// Returns the decisions from pairs of processes, if two builds were compared; `None` for a
    /// baseline.
    pub fn paired_evidence(&self) -> Option<&PairedRoundsEvidence> {
        match &self.evidence {
            JudgementEvidence::Pairs(pairs) => Some(pairs),
            JudgementEvidence::Runs(_) => None,
        }
    }

    /// Returns the evidence from process runs, if a baseline was compared; `None` for two builds.
    pub fn baseline_run_evidence(&self) -> Option<&BaselineRunEvidence> {
        match &self.evidence {
            JudgementEvidence::Runs(runs) => Some(runs),
            JudgementEvidence::Pairs(_) => None,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::gate::inconclusive_reason::FailureInBuild;
    use crate::gate::paired::{ComparedArm, tests::test_decision};
    use kernelgate::record::OutputVerificationExtent;

    const TEST_LIMITS: CaseLimits = CaseLimits::default_with_relative_limit(0.01);

    /// Makes a test judgement of paired processes with this verdict and default values otherwise.
    pub fn test_judgement(case: &str, verdict: VerdictOnCase) -> CaseJudgement {
        let decision = PairedDecisionOnCase {
            reason: Some(crate::gate::paired::CauseOfInconclusiveDecision::Wide),
            ..test_decision(case, verdict)
        };
        let again = (verdict == VerdictOnCase::Regressed).then(|| decision.clone());
        CaseJudgement::from_both_rounds(decision, again, Vec::new(), &TEST_LIMITS)
    }

    /// Makes a test judgement of a case with this verdict and time ratio.
    pub fn test_judgement_with_ratio(
        case: &str,
        verdict: VerdictOnCase,
        ratio: TimeRatioWithInterval,
    ) -> CaseJudgement {
        let base_ns = 1e6;
        CaseJudgement {
            base_ns,
            head_ns: base_ns * ratio.center,
            ratio,
            ..test_judgement(case, verdict)
        }
    }

    #[test]
    fn a_regression_counts_only_if_a_second_round_confirms_it() {
        use VerdictOnCase::{Inconclusive, Regressed, Unchanged};
        let judge = |first, second: Option<VerdictOnCase>| {
            let second = second.map(|verdict| test_decision("x", verdict));
            CaseJudgement::from_both_rounds(
                test_decision("x", first),
                second,
                Vec::new(),
                &TEST_LIMITS,
            )
        };
        assert_eq!(judge(Unchanged, None).verdict, Unchanged);
        let confirmed = judge(Regressed, Some(Regressed));
        assert_eq!((confirmed.verdict, confirmed.joined_reasons()), (Regressed, None));
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
        use VerdictOnCase::{Improved, Inconclusive, Regressed, Unchanged};
        let why = || {
            vec![InconclusiveReason::Skipped(FailureInBuild::in_side_with_reason(
                ComparedArm::Head,
                "no memory",
            ))]
        };
        for first in [Unchanged, Improved, Inconclusive] {
            let judged = CaseJudgement::from_both_rounds(
                test_decision("x", first),
                None,
                why(),
                &TEST_LIMITS,
            );
            assert_eq!((judged.verdict, judged.reasons), (Inconclusive, why()));
        }
        let confirmed = CaseJudgement::from_both_rounds(
            test_decision("x", Regressed),
            Some(test_decision("x", Regressed)),
            why(),
            &TEST_LIMITS,
        );
        assert_eq!((confirmed.verdict, confirmed.reasons), (Regressed, vec![]));
        let open = CaseJudgement::from_both_rounds(
            test_decision("x", Regressed),
            None,
            why(),
            &TEST_LIMITS,
        );
        let words = "not confirmed by a second round; skipped in the head: no memory";
        assert_eq!(open.joined_reasons().as_deref(), Some(words));
        let unmeasured = CaseJudgement::for_case_without_blocks(
            "x".to_owned(),
            why(),
            &ComparisonTestPlan::default(),
            &TEST_LIMITS,
        );
        assert_eq!((unmeasured.verdict, unmeasured.reasons), (Inconclusive, why()));
        assert!(unmeasured.base_ns == 0.0);
    }

    #[test]
    fn a_case_verified_less_than_before_does_not_count_as_unchanged() {
        let all = OutputVerificationExtent::Verified { checked: 1600, total: 1600 };
        let loss =
            VerificationLoss::from_extents("a", all, OutputVerificationExtent::Unverified).unwrap();
        let judged =
            test_judgement("a", VerdictOnCase::Unchanged).with_verification_loss(loss.clone());
        assert_eq!(judged.verdict, VerdictOnCase::Inconclusive);
        let words = "no longer verified (before: every element verified)";
        assert_eq!(judged.joined_measurement_errors().as_deref(), Some(words));
        let slower = test_judgement("a", VerdictOnCase::Regressed).with_verification_loss(loss);
        assert_eq!((slower.verdict, slower.reasons), (VerdictOnCase::Regressed, vec![]));
    }
}
