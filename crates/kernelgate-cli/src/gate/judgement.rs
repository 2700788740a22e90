//! The judgement of one case by `gate` or `compare`: verdict, time ratio with interval, detectable
//! change, reasons and evidence. The modules `baseline` and `paired` decide verdicts; the module
//! `judgement` only stores them.

use super::inconclusive_reason::{InconclusiveReason, join_reason_texts};
use super::limits::{CaseTimeAndErrorLimits, LimitWithSource};
use super::outputs::verification::VerificationLoss;
use super::paired::{
    ComparisonTestPlan, PairedDecisionOnCase, TimedTrialBlocksByCase, decide_cases_with_one_plan,
};
use super::ratio_interval::{AssumedSpreadOfSingleRun, TimeIntervalOfSide, TimeRatioWithInterval};
use super::verdict::VerdictOnCase;

/// The verdict on one case, with its times, reasons and evidence.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseJudgement {
    pub case_id: String,
    /// The final verdict.
    pub verdict: VerdictOnCase,
    /// Reasons why the case is inconclusive; empty for every other verdict.
    pub reasons: Vec<InconclusiveReason>,
    /// Smallest relative slow-down that counts as a regression of the case, with its source.
    pub regression_threshold: LimitWithSource,
    /// Time of the case in the base, nanoseconds per launch; 0 if the base has no usable time.
    pub base_launch_ns: f64,
    /// Time of the case in the head, nanoseconds per launch; 0 if the head has no usable time.
    pub head_launch_ns: f64,
    /// Time of the head divided by the time of the base, with its confidence interval.
    pub ratio: TimeRatioWithInterval,
    /// Smallest relative slow-down that the measurement would have detected; `None` if it can
    /// detect none.
    pub detectable_change: Option<f64>,
    /// Measurements on which the verdict is based: process runs for `gate`, pairs of processes for
    /// `compare`.
    pub evidence: JudgementEvidence,
}

/// Measurements on which a judgement is based: runs for `gate`, or pairs of processes for
/// `compare`.
#[derive(Debug, Clone, PartialEq)]
pub enum JudgementEvidence {
    /// Process runs of a baseline and of the judged measurement, for `gate`.
    Runs(Box<BaselineRunEvidence>),
    /// The evidence is pairs of base and head processes, for `compare`.
    Pairs(Box<PairedRoundsEvidence>),
}

/// Numbers of process runs of baseline and head on which `gate` based a judgement.
#[derive(Debug, Clone, PartialEq)]
pub struct BaselineRunEvidence {
    /// Whether all compared runs are known to be from one and the same device.
    pub same_device: bool,
    /// Name of the card whose runs were compared, if baseline or head also have runs of other
    /// cards.
    pub compared_card: Option<String>,
    /// Number and spread of the compared process runs of the baseline.
    pub base: RunCountAndSpreadOfSide,
    /// Number and spread of the judged process runs of the head.
    pub head: RunCountAndSpreadOfSide,
}

/// Number and spread of one case's process runs on one side (baseline or head).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunCountAndSpreadOfSide {
    /// Number of runs.
    pub run_count: usize,
    /// Relative half-width of the range of the runs' times; `None` with one run.
    pub relative_half_range: Option<f64>,
    /// Allowance of a single run for the variance between processes; `None` with several runs.
    pub single_run_spread: Option<AssumedSpreadOfSingleRun>,
    /// Share of the host's CPU time that other processes used; 0 if unknown or without effect on
    /// the times.
    pub cpu_contention_share: f64,
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
            run_count: times.run_count,
            relative_half_range: times.relative_half_range,
            single_run_spread: single,
            cpu_contention_share: times.median_cpu_contention,
        }
    }
}

/// Decisions on one case after the first and the second round of a comparison.
#[derive(Debug, Clone, PartialEq)]
pub struct PairedRoundsEvidence {
    /// Decision on the case after the first round of a comparison.
    pub first_round_decision: PairedDecisionOnCase,
    /// Decision of the second round, with new blocks; `None` unless the first round found a
    /// regression.
    pub second_round_decision: Option<PairedDecisionOnCase>,
}

impl CaseJudgement {
    /// Judges a case by the decisions of the first and second round of a comparison. If errors
    /// stopped the measurement of the case, it is inconclusive, unless both rounds found a
    /// regression.
    pub fn from_both_rounds(
        mut decision: PairedDecisionOnCase,
        confirmation: Option<PairedDecisionOnCase>,
        case_errors: Vec<InconclusiveReason>,
        limits: &CaseTimeAndErrorLimits,
    ) -> CaseJudgement {
        let confirmed =
            confirmation.as_ref().is_some_and(|second| second.verdict == VerdictOnCase::Regressed);
        let verdict = match decision.verdict {
            VerdictOnCase::Regressed if confirmed => VerdictOnCase::Regressed,
            VerdictOnCase::Regressed => VerdictOnCase::Inconclusive,
            _ if !case_errors.is_empty() => VerdictOnCase::Inconclusive,
            verdict => limits.verdict_with_acceptance(
                verdict,
                decision.ratio.estimated_ratio,
                decision.base_median_launch_ns,
                0.0,
            ),
        };
        let mut reasons = Vec::new();
        if verdict == VerdictOnCase::Inconclusive {
            let of_pairs = match decision.verdict {
                VerdictOnCase::Regressed => Some(InconclusiveReason::RegressionNotConfirmed),
                _ => InconclusiveReason::from_paired_decision(&decision),
            };
            // With no pair at all, the error is the only reason; with an error, more pairs would
            // not help, so none are requested.
            reasons
                .extend(of_pairs.filter(|_| decision.usable_pairs > 0 || case_errors.is_empty()));
            if !case_errors.is_empty() {
                decision.pairs_needed = None;
            }
            reasons.extend(case_errors);
        }
        let faster_ns = decision.base_median_launch_ns.min(decision.head_median_launch_ns);
        let source = limits.smallest_failing_slowdown(faster_ns, 0.0).source;
        Self {
            case_id: decision.case_id.clone(),
            verdict,
            reasons,
            regression_threshold: LimitWithSource {
                limit_value: decision.relative_threshold,
                source,
            },
            base_launch_ns: decision.base_median_launch_ns,
            head_launch_ns: decision.head_median_launch_ns,
            ratio: decision.ratio,
            detectable_change: decision.smallest_detectable_slowdown,
            evidence: JudgementEvidence::Pairs(Box::new(PairedRoundsEvidence {
                first_round_decision: decision,
                second_round_decision: confirmation,
            })),
        }
    }

    /// Judges a case of a comparison for which no block was measured: it is inconclusive, with the
    /// given reasons.
    pub fn judge_case_without_blocks(
        case: String,
        why: Vec<InconclusiveReason>,
        plan: &ComparisonTestPlan,
        limits: &CaseTimeAndErrorLimits,
    ) -> CaseJudgement {
        // The case without blocks is decided by itself, so that it does not change the error rates
        // of the measured cases.
        let alone = decide_cases_with_one_plan(
            &TimedTrialBlocksByCase::from([(case, Vec::new())]),
            plan,
            true,
        );
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
            pairs.first_round_decision.pairs_needed = None;
        }
        self
    }

    /// Returns whether the case has measured times; a case that could not be measured has none.
    pub const fn has_times(&self) -> bool {
        self.base_launch_ns > 0.0
    }

    /// Returns all reasons for an inconclusive verdict as one text; `None` if there is no reason.
    pub fn joined_inconclusive_reasons(&self) -> Option<String> {
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
    use crate::gate::inconclusive_reason::MeasurementFailureOnSide;
    use crate::gate::paired::{ComparedArm, tests::test_decision};
    use kernelgate::record::OutputVerificationExtent;

    const TEST_LIMITS: CaseTimeAndErrorLimits =
        CaseTimeAndErrorLimits::default_with_relative_limit(0.01);

    /// Makes a test judgement of paired processes with this verdict and default values otherwise.
    pub fn test_judgement(case: &str, verdict: VerdictOnCase) -> CaseJudgement {
        let decision = PairedDecisionOnCase {
            reason: Some(crate::gate::paired::CauseOfInconclusiveDecision::IntervalTooWide),
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
            base_launch_ns: base_ns,
            head_launch_ns: base_ns * ratio.estimated_ratio,
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
        assert_eq!((confirmed.verdict, confirmed.joined_inconclusive_reasons()), (Regressed, None));
        for second in [None, Some(Unchanged), Some(Inconclusive)] {
            let open = judge(Regressed, second);
            assert_eq!(
                (open.verdict, open.reasons),
                (Inconclusive, vec![InconclusiveReason::RegressionNotConfirmed])
            );
        }
    }

    #[test]
    fn an_error_of_a_case_makes_it_inconclusive_with_the_reason() {
        use VerdictOnCase::{Improved, Inconclusive, Regressed, Unchanged};
        let why = || {
            vec![InconclusiveReason::CaseSkipped(MeasurementFailureOnSide::in_side_with_reason(
                ComparedArm::HeadBuild,
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
        assert_eq!(open.joined_inconclusive_reasons().as_deref(), Some(words));
        let unmeasured = CaseJudgement::judge_case_without_blocks(
            "x".to_owned(),
            why(),
            &ComparisonTestPlan::default(),
            &TEST_LIMITS,
        );
        assert_eq!((unmeasured.verdict, unmeasured.reasons), (Inconclusive, why()));
        assert!(unmeasured.base_launch_ns == 0.0);
    }

    #[test]
    fn a_case_verified_less_than_before_does_not_count_as_unchanged() {
        let all =
            OutputVerificationExtent::Verified { compared_elements: 1600, total_elements: 1600 };
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
