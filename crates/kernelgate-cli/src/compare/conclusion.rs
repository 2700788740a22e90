//! What is concluded of a comparison: the verdicts, and every case without one with its reason.

use std::collections::BTreeMap;

use super::engine::{Engine, Facts};
use super::matched::Matched;
use super::rounds;
use super::session::{Bench, delays_text};
use crate::gate::Verdict;
use crate::gate::comparison::{Compared, Comparison, Round};
use crate::gate::numerics::NumericsReport;
use crate::gate::paired::{Decision, Outcome};
use crate::gate::rules::RulesReport;
use crate::gate::verification::VerificationLoss;
use kernelgate::record::Verification;

impl Engine<'_> {
    /// The outcome of both rounds.
    pub(super) fn conclude(
        &self,
        (mut matched, benches): (Matched, &[Bench]),
        first: Outcome,
        second: Option<&Outcome>,
        facts: Facts,
    ) -> Comparison {
        matched.failed.extend(rounds::failures(&self.trials.trials));
        let mut unmeasured = self.without_block(&matched, benches, &first);
        unmeasured.append(&mut matched.unmeasured);
        unmeasured.retain(|id, _| !matched.failed.contains_key(id));
        let stopped = rounds::stopped(&self.trials.trials);
        // A bench that was abandoned explains what is open; what was decided before stays decided.
        let open = |decision: &Decision| {
            matches!(decision.verdict, Verdict::Inconclusive | Verdict::Regressed)
        };
        let case_error = |decision: &Decision| {
            let abandoned = || self.abandoned(benches, &decision.case).filter(|_| open(decision));
            stopped.get(&decision.case).cloned().or_else(abandoned)
        };
        let again =
            |decision: &Decision| second.and_then(|second| second.of(&decision.case)).cloned();
        let losses: BTreeMap<String, VerificationLoss> = facts
            .verification
            .iter()
            .filter(|(id, _)| !self.rules.accepts_less_verified(id))
            .filter_map(|(id, [base, head])| {
                Some((id.clone(), VerificationLoss::between(id, *base, *head)?))
            })
            .collect();
        let mut judged: Vec<Compared> = first
            .decisions
            .into_iter()
            .filter(|decision| !matched.failed.contains_key(&decision.case))
            .map(|decision| {
                let confirmation =
                    again(&decision).filter(|_| decision.verdict == Verdict::Regressed);
                let case_error = case_error(&decision);
                let mut compared = Compared::new(decision, confirmation, case_error);
                compared.verdict =
                    self.plan.told(compared.verdict, &compared.decision, &self.rules);
                match losses.get(&compared.decision.case) {
                    Some(loss) => compared.less_verified(loss),
                    None => compared,
                }
            })
            .collect();
        judged.extend(
            unmeasured.into_iter().map(|(id, why)| Compared::unmeasured(id, why, &self.plan)),
        );
        judged.sort_by(|a, b| {
            a.verdict.cmp(&b.verdict).then_with(|| a.decision.case.cmp(&b.decision.case))
        });
        let [base, head] = &self.session.sides;
        let sides = self.session.sides.iter();
        let mut left_alone: BTreeMap<String, String> =
            sides.flat_map(|side| side.executables.foreign.clone()).collect();
        left_alone.extend(self.undrivable.clone());
        let is_unverified = |[base, head]: &[Verification; 2]| {
            !base.is_verified() && *head == Verification::Unverified
        };
        let unverified = judged
            .iter()
            .map(|compared| &compared.decision.case)
            .filter(|case| facts.verification.get(*case).is_some_and(is_unverified))
            .cloned()
            .collect();
        Comparison {
            base: base.label.clone(),
            head: head.label.clone(),
            device: facts.device,
            plan: self.plan,
            budget_s: self.request.budget.as_secs_f64(),
            calibration: None,
            judged,
            refused: matched.refusals(),
            new: matched.new,
            removed: matched.removed,
            skipped: matched.skipped,
            failed: matched.failed,
            failed_in_base: matched.failed_in_base,
            broken: self.broken.clone(),
            foreign: left_alone.keys().cloned().collect(),
            left_alone,
            unverified,
            verification: losses.into_values().collect(),
            criterion: facts.criterion,
            identical: self.session.identical().into_iter().collect(),
            untimed: facts.untimed,
            optimised: facts.optimised,
            delays: delays_text(&self.request.planted.delays_ns),
            rounds: [1, 2].into_iter().filter_map(|round| self.facts_of(round)).collect(),
            numerics: NumericsReport::default(),
            costs: Vec::new(),
            rules: RulesReport::default(),
            code: BTreeMap::new(),
            kernels: Vec::new(),
            explanations: BTreeMap::new(),
            unaffected: Vec::new(),
        }
    }

    /// Cases that were to be compared and got no block, with the reason.
    fn without_block(
        &self,
        matched: &Matched,
        benches: &[Bench],
        first: &Outcome,
    ) -> BTreeMap<String, String> {
        let stopped = rounds::stopped(&self.trials.trials);
        let limits = (self.request.budget.as_secs_f64(), self.plan.max_blocks);
        let why = |id: &String| {
            let reason = stopped.get(id).cloned().or_else(|| self.abandoned(benches, id));
            reason.unwrap_or_else(|| {
                format!("no block of it ended within {:.0} s and {} blocks", limits.0, limits.1)
            })
        };
        let without = matched.judged.iter().filter(|id| first.of(id).is_none());
        without.map(|id| (id.clone(), why(id))).collect()
    }

    /// Why the bench of a case was abandoned.
    fn abandoned(&self, benches: &[Bench], id: &str) -> Option<String> {
        let bench = benches.iter().find(|bench| bench.cases.contains(id))?;
        let broken =
            self.broken.iter().find(|broken| broken.abandoned && broken.bench == bench.name)?;
        Some(broken.case_error())
    }

    /// What a round took so far; none before its first process.
    pub(super) fn facts_of(&self, round: u32) -> Option<Round> {
        let trials = || self.trials.trials.iter().filter(move |trial| trial.round == round);
        let blocks = trials().map(|trial| trial.block + 1).max()?;
        Some(Round {
            blocks,
            processes: trials().count(),
            wall_s: trials().map(|trial| trial.wall_s).sum(),
        })
    }
}
