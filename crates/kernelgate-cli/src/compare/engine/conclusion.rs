//! Draws the conclusion of a comparison: each case's verdict, or the reason why a case has none.

use std::collections::BTreeMap;

use super::rounds;
use super::{ComparisonEngine, WholeComparisonFacts};
use crate::compare::matched_cases::CasesMatchedBetweenSides;
use crate::compare::session::{ComparedBench, injected_delays_text};
use crate::gate::comparison::{BuildComparisonFacts, Comparison, ComparisonRoundCounts};
use crate::gate::inconclusive_reason::InconclusiveReason;
use crate::gate::judgement::CaseJudgement;
use crate::gate::outputs::numerics::OutputErrorReport;
use crate::gate::outputs::verification::VerificationLoss;
use crate::gate::paired::{PairedDecisionOnCase, PairedDecisionsOfRound};
use crate::gate::rules::GateRulesEffectReport;
use crate::gate::verdict::VerdictOnCase;
use kernelgate::record::OutputVerificationExtent;

impl ComparisonEngine<'_> {
    /// Draws the conclusion of a comparison from the outcome of its first round and of its second
    /// round, which confirms regressions.
    pub(super) fn conclude_comparison(
        &self,
        (mut matched, benches): (CasesMatchedBetweenSides, &[ComparedBench]),
        first: PairedDecisionsOfRound,
        second: Option<&PairedDecisionsOfRound>,
        facts: WholeComparisonFacts,
    ) -> Comparison {
        matched.failed_in_head.extend(rounds::failures_in_head_processes(&self.trials_file.trials));
        let mut unmeasured = self.reasons_of_cases_without_block(&matched, benches, &first);
        unmeasured.append(&mut matched.unmeasured_cases);
        unmeasured.retain(|id, _| !matched.failed_in_head.contains_key(id));
        let losses: BTreeMap<String, VerificationLoss> = facts
            .verification
            .iter()
            .filter(|(id, _)| !self.rules.accepts_less_verification(id))
            .filter_map(|(id, [base, head])| {
                Some((id.clone(), VerificationLoss::from_extents(id, *base, *head)?))
            })
            .collect();
        let decisions = first.decisions.into_iter();
        let decisions =
            decisions.filter(|decision| !matched.failed_in_head.contains_key(&decision.case_id));
        let mut judged = self.judge_decided_cases(decisions, benches, second, &losses);
        judged.extend(unmeasured.into_iter().map(|(id, why)| {
            let limits = self.rules.limits_of_case(&id, &self.default_case_limits);
            CaseJudgement::judge_case_without_blocks(id, why, &self.plan, &limits)
        }));
        let [base, head] = &self.session.sides;
        let sides = self.session.sides.iter();
        let mut left_alone: BTreeMap<String, String> =
            sides.flat_map(|side| side.executables.benches_not_run.clone()).collect();
        left_alone.extend(self.unusable_benches.clone());
        let is_unverified = |[base, head]: &[OutputVerificationExtent; 2]| {
            !base.is_compared_with_reference() && *head == OutputVerificationExtent::Unverified
        };
        let unverified = judged
            .iter()
            .map(|judged| &judged.case_id)
            .filter(|case| facts.verification.get(*case).is_some_and(is_unverified))
            .cloned()
            .collect();
        let refused = matched.comparison_refusals_by_field();
        let facts_of_builds = BuildComparisonFacts {
            base_revision: base.revision_label.clone(),
            head_revision: head.revision_label.clone(),
            plan: self.plan,
            round_budget_s: self.request.round_time_budget.as_secs_f64(),
            calibration_description: None,
            removed_cases: matched.removed_cases,
            failed_in_base: matched.failed_in_base,
            failed_processes: self.failed_benches.clone(),
            unusable_benches: left_alone,
            criterion_benches: facts.criterion_benches,
            benches_with_identical_executables: self
                .session
                .benches_with_identical_executables()
                .into_iter()
                .collect(),
            cases_with_identical_executable: facts.cases_with_identical_executable,
            optimised_build: facts.both_builds_optimised,
            injected_delays_text: injected_delays_text(&self.request.injection.injected_delays_ns),
            rounds: [1, 2]
                .into_iter()
                .filter_map(|round| self.block_and_process_counts_of_round(round))
                .collect(),
            ..BuildComparisonFacts::default()
        };
        let mut comparison = Comparison {
            device: facts.device,
            default_case_limits: self.default_case_limits,
            judged_cases: judged,
            refused,
            new_cases: matched.new_cases,
            skipped_in_head: matched.skipped_in_head,
            failed_in_head: matched.failed_in_head,
            unverified_cases: unverified,
            verification_losses: losses.into_values().collect(),
            numerics: OutputErrorReport::default(),
            grown_costs: Vec::new(),
            rules: GateRulesEffectReport::default(),
            method_facts: facts_of_builds,
        };
        comparison.sort_judgements();
        comparison
    }

    /// Judges the cases that were decided in the first round; a regression counts only if the
    /// second round confirms it.
    fn judge_decided_cases(
        &self,
        decisions: impl Iterator<Item = PairedDecisionOnCase>,
        benches: &[ComparedBench],
        second: Option<&PairedDecisionsOfRound>,
        losses: &BTreeMap<String, VerificationLoss>,
    ) -> Vec<CaseJudgement> {
        let stopped = rounds::reasons_to_stop_timing_cases(&self.trials_file.trials);
        // If a bench was abandoned, its inconclusive and regressed cases get the failure as their
        // reason; other verdicts stay.
        let open = |decision: &PairedDecisionOnCase| {
            matches!(decision.verdict, VerdictOnCase::Inconclusive | VerdictOnCase::Regressed)
        };
        let case_error = |decision: &PairedDecisionOnCase| -> Vec<InconclusiveReason> {
            let abandoned = || {
                self.reason_bench_was_abandoned(benches, &decision.case_id)
                    .filter(|_| open(decision))
            };
            stopped.get(&decision.case_id).cloned().or_else(abandoned).into_iter().collect()
        };
        let again = |decision: &PairedDecisionOnCase| {
            second.and_then(|second| second.decision_on_case(&decision.case_id)).cloned()
        };
        decisions
            .map(|decision| {
                let confirmation =
                    again(&decision).filter(|_| decision.verdict == VerdictOnCase::Regressed);
                let limits =
                    self.rules.limits_of_case(&decision.case_id, &self.default_case_limits);
                let errors = case_error(&decision);
                let judged =
                    CaseJudgement::from_both_rounds(decision, confirmation, errors, &limits);
                match losses.get(&judged.case_id) {
                    Some(loss) => judged.with_verification_loss(loss.clone()),
                    None => judged,
                }
            })
            .collect()
    }

    /// Returns the cases that were selected for timing but got no complete block, each with the
    /// reason.
    fn reasons_of_cases_without_block(
        &self,
        matched: &CasesMatchedBetweenSides,
        benches: &[ComparedBench],
        first: &PairedDecisionsOfRound,
    ) -> BTreeMap<String, Vec<InconclusiveReason>> {
        let stopped = rounds::reasons_to_stop_timing_cases(&self.trials_file.trials);
        let (budget_s, max_blocks) =
            (self.request.round_time_budget.as_secs_f64(), self.plan.max_trial_blocks);
        let why = |id: &String| {
            let reason =
                stopped.get(id).cloned().or_else(|| self.reason_bench_was_abandoned(benches, id));
            vec![reason.unwrap_or(InconclusiveReason::NoCompleteBlock {
                round_budget_s: budget_s,
                max_trial_blocks: max_blocks,
            })]
        };
        let without = matched.judged_cases.iter().filter(|id| first.decision_on_case(id).is_none());
        without.map(|id| (id.clone(), why(id))).collect()
    }

    /// Returns the reason why the bench of this case was abandoned; `None` if it was not abandoned.
    fn reason_bench_was_abandoned(
        &self,
        benches: &[ComparedBench],
        id: &str,
    ) -> Option<InconclusiveReason> {
        let bench = benches.iter().find(|bench| bench.compared_cases.contains(id))?;
        let broken = self
            .failed_benches
            .iter()
            .find(|broken| broken.bench_abandoned && broken.bench_name == bench.bench_name)?;
        Some(broken.inconclusive_reason_for_cases())
    }

    /// Returns the number of blocks and processes and the wall time of a comparison's round so far;
    /// `None` before the round's first process.
    pub(super) fn block_and_process_counts_of_round(
        &self,
        round: u32,
    ) -> Option<ComparisonRoundCounts> {
        let trials = || self.trials_file.trials.iter().filter(move |trial| trial.round == round);
        let blocks = trials().map(|trial| trial.block_in_round + 1).max()?;
        Some(ComparisonRoundCounts {
            most_trial_blocks: blocks,
            process_count: trials().count(),
            total_process_wall_s: trials().map(|trial| trial.wall_s).sum(),
        })
    }
}
