//! Concludes a comparison: the verdicts, and every case without one with its reason.

use std::collections::BTreeMap;

use super::rounds;
use super::{ComparisonEngine, ComparisonFacts};
use crate::compare::matched_cases::MatchedCases;
use crate::compare::session::{ComparedBench, delays_text};
use crate::gate::comparison::{BuildFacts, Comparison, ComparisonRound};
use crate::gate::inconclusive_reason::InconclusiveReason;
use crate::gate::judgement::Judgement;
use crate::gate::outputs::numerics::NumericsReport;
use crate::gate::outputs::verification::VerificationLoss;
use crate::gate::paired::{PairedDecision, PairedOutcome};
use crate::gate::rules::RulesReport;
use crate::gate::verdict::Verdict;
use kernelgate::record::VerificationExtent;

impl ComparisonEngine<'_> {
    /// Derives the conclusion of a comparison from the outcomes of both rounds.
    pub(super) fn conclude_comparison(
        &self,
        (mut matched, benches): (MatchedCases, &[ComparedBench]),
        first: PairedOutcome,
        second: Option<&PairedOutcome>,
        facts: ComparisonFacts,
    ) -> Comparison {
        matched.failed.extend(rounds::failure_reasons(&self.trials.trials));
        let mut unmeasured = self.cases_without_block(&matched, benches, &first);
        unmeasured.append(&mut matched.unmeasured);
        unmeasured.retain(|id, _| !matched.failed.contains_key(id));
        let losses: BTreeMap<String, VerificationLoss> = facts
            .verification
            .iter()
            .filter(|(id, _)| !self.rules.accepts_less_verified(id))
            .filter_map(|(id, [base, head])| {
                Some((id.clone(), VerificationLoss::from_extents(id, *base, *head)?))
            })
            .collect();
        let decisions = first.decisions.into_iter();
        let decisions = decisions.filter(|decision| !matched.failed.contains_key(&decision.case));
        let mut judged = self.judgements_of_cases(decisions, benches, second, &losses);
        judged.extend(unmeasured.into_iter().map(|(id, why)| {
            let limits = self.rules.resolve(&id, &self.limits);
            Judgement::unmeasured(id, why, &self.plan, &limits)
        }));
        let [base, head] = &self.session.sides;
        let sides = self.session.sides.iter();
        let mut left_alone: BTreeMap<String, String> =
            sides.flat_map(|side| side.executables.foreign.clone()).collect();
        left_alone.extend(self.undrivable.clone());
        let is_unverified = |[base, head]: &[VerificationExtent; 2]| {
            !base.is_verified() && *head == VerificationExtent::Unverified
        };
        let unverified = judged
            .iter()
            .map(|judged| &judged.case)
            .filter(|case| facts.verification.get(*case).is_some_and(is_unverified))
            .cloned()
            .collect();
        let refused = matched.comparison_refusals();
        let facts_of_builds = BuildFacts {
            base: base.label.clone(),
            head: head.label.clone(),
            plan: self.plan,
            budget_s: self.request.budget.as_secs_f64(),
            calibration: None,
            removed: matched.removed,
            failed_in_base: matched.failed_in_base,
            broken: self.broken.clone(),
            left_alone,
            criterion: facts.criterion,
            identical: self.session.identical().into_iter().collect(),
            untimed: facts.untimed,
            optimised: facts.optimised,
            delays: delays_text(&self.request.injection.delays_ns),
            rounds: [1, 2].into_iter().filter_map(|round| self.facts_of(round)).collect(),
            ..BuildFacts::default()
        };
        let mut comparison = Comparison {
            device: facts.device,
            limits: self.limits,
            judged,
            refused,
            new: matched.new,
            skipped: matched.skipped,
            failed: matched.failed,
            unverified,
            verification: losses.into_values().collect(),
            numerics: NumericsReport::default(),
            costs: Vec::new(),
            rules: RulesReport::default(),
            facts: facts_of_builds,
        };
        comparison.sort();
        comparison
    }

    /// Judges the cases that have a verdict, as confirmed by the second round.
    fn judgements_of_cases(
        &self,
        decisions: impl Iterator<Item = PairedDecision>,
        benches: &[ComparedBench],
        second: Option<&PairedOutcome>,
        losses: &BTreeMap<String, VerificationLoss>,
    ) -> Vec<Judgement> {
        let stopped = rounds::stop_reasons(&self.trials.trials);
        // An abandoned bench is the reason for open cases; earlier decisions stay.
        let open = |decision: &PairedDecision| {
            matches!(decision.verdict, Verdict::Inconclusive | Verdict::Regressed)
        };
        let case_error = |decision: &PairedDecision| -> Vec<InconclusiveReason> {
            let abandoned = || self.abandoned(benches, &decision.case).filter(|_| open(decision));
            stopped.get(&decision.case).cloned().or_else(abandoned).into_iter().collect()
        };
        let again = |decision: &PairedDecision| {
            second.and_then(|second| second.decision(&decision.case)).cloned()
        };
        decisions
            .map(|decision| {
                let confirmation =
                    again(&decision).filter(|_| decision.verdict == Verdict::Regressed);
                let limits = self.rules.resolve(&decision.case, &self.limits);
                let errors = case_error(&decision);
                let judged = Judgement::from_rounds(decision, confirmation, errors, &limits);
                match losses.get(&judged.case) {
                    Some(loss) => judged.less_verified(loss.clone()),
                    None => judged,
                }
            })
            .collect()
    }

    /// Cases that were selected but got no block, with the reason.
    fn cases_without_block(
        &self,
        matched: &MatchedCases,
        benches: &[ComparedBench],
        first: &PairedOutcome,
    ) -> BTreeMap<String, Vec<InconclusiveReason>> {
        let stopped = rounds::stop_reasons(&self.trials.trials);
        let (budget_s, max_blocks) = (self.request.budget.as_secs_f64(), self.plan.max_blocks);
        let why = |id: &String| {
            let reason = stopped.get(id).cloned().or_else(|| self.abandoned(benches, id));
            vec![reason.unwrap_or(InconclusiveReason::NoBlock { budget_s, max_blocks })]
        };
        let without = matched.judged.iter().filter(|id| first.decision(id).is_none());
        without.map(|id| (id.clone(), why(id))).collect()
    }

    /// The reason why the bench of a case was abandoned.
    fn abandoned(&self, benches: &[ComparedBench], id: &str) -> Option<InconclusiveReason> {
        let bench = benches.iter().find(|bench| bench.cases.contains(id))?;
        let broken =
            self.broken.iter().find(|broken| broken.abandoned && broken.bench == bench.name)?;
        Some(broken.case_error())
    }

    /// Blocks, processes and wall time of a round so far; `None` before its first process.
    pub(super) fn facts_of(&self, round: u32) -> Option<ComparisonRound> {
        let trials = || self.trials.trials.iter().filter(move |trial| trial.round == round);
        let blocks = trials().map(|trial| trial.block + 1).max()?;
        Some(ComparisonRound {
            blocks,
            processes: trials().count(),
            wall_s: trials().map(|trial| trial.wall_s).sum(),
        })
    }
}
