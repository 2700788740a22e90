//! The outcome of `compare`: what was decided of each case, what could not be judged and why, and
//! the exit code.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::code::{CodeComparison, KernelsCompared};
use super::costs::CostGrowth;
use super::explanation::Explanation;
use super::numerics::NumericsReport;
use super::paired::{Decision, Observed, Reason, TestPlan, decide};
use super::rules::RulesReport;
use super::verification::VerificationLoss;
use super::{Refusal, Verdict};
use kernelgate::exit::Exit;

/// Two builds, compared.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// What was compared with: "main (1a2b3c4d)".
    pub base: String,
    /// What was judged.
    pub head: String,
    /// Where.
    pub device: String,
    /// What counted as slower.
    pub plan: TestPlan,
    /// Wall time that a round could take, seconds.
    pub budget_s: f64,
    /// Which calibration of the device the plan comes from; none where there is none.
    pub calibration: Option<String>,
    /// Cases that were asked for and that a comparison could be expected of, worst verdict first,
    /// then by id. One that could not be measured is inconclusive and says why.
    pub judged: Vec<Compared>,
    /// Differences that forbid a comparison, with the cases concerned.
    pub refused: Vec<Refusal>,
    /// Cases that only the head has.
    pub new: Vec<String>,
    /// Cases that only the base has.
    pub removed: Vec<String>,
    /// Cases that the base timed and the head skipped, with the reason.
    pub skipped: BTreeMap<String, String>,
    /// Cases that failed in the head, with the error.
    pub failed: BTreeMap<String, String>,
    /// Cases that failed in the base only, when it was verified: the head mended them, and there
    /// is nothing to compare with.
    pub failed_in_base: BTreeMap<String, String>,
    /// Processes that failed.
    pub broken: Vec<Broken>,
    /// Bench binaries that cannot be driven: left alone.
    pub foreign: Vec<String>,
    /// The same, with the reason.
    pub left_alone: BTreeMap<String, String>,
    /// Judged cases whose outputs are compared with nothing in either build: only their time is
    /// known.
    pub unverified: Vec<String>,
    /// Cases of both builds that the head verifies less, timed or not.
    pub verification: Vec<VerificationLoss>,
    /// Bench binaries that use Criterion alone.
    pub criterion: Vec<CriterionBench>,
    /// Bench binaries that are the same in both, byte by byte: what differs between them is noise.
    pub identical: Vec<String>,
    /// Cases of these that were verified and not timed: they are as fast as they were.
    pub untimed: Vec<String>,
    /// Whether the code was optimised.
    pub optimised: bool,
    /// Delays added to launches of the head on purpose: its times are not the code's.
    pub delays: Option<String>,
    /// What the comparison took, by round.
    pub rounds: Vec<Round>,
    /// Errors against the reference, of base and head.
    pub numerics: NumericsReport,
    /// What a launch takes besides time and the package does not allow.
    pub costs: Vec<CostGrowth>,
    /// What the package's rules did.
    pub rules: RulesReport,
    /// The kernels of each case in both builds, where the bench tells them.
    pub code: BTreeMap<String, CodeComparison>,
    /// All kernels of both builds, for the architectures that were asked for.
    pub kernels: Vec<KernelsCompared>,
    /// Why cases regressed, as far as a profile of each build tells; says nothing of the verdict.
    pub explanations: BTreeMap<String, Explanation>,
    /// Cases that were verified and not timed, as was asked: their machine code and launches are
    /// the same in both. Host code is not compared.
    pub unaffected: Vec<String>,
}

/// A case of both builds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compared {
    /// What is concluded in the end; a regression that the second round does not confirm is
    /// inconclusive.
    pub verdict: Verdict,
    /// Of the first round.
    pub decision: Decision,
    /// Of the second round, from blocks of its own; only where the first says regressed.
    pub confirmation: Option<Decision>,
    /// What kept it from being measured, or measured to the end; only where it is inconclusive.
    #[serde(rename = "setback")]
    pub case_error: Option<String>,
}

impl Compared {
    /// From both rounds. A case with an error was undecided when it came: the blocks before are
    /// too few for a verdict, unless both rounds call it slower.
    pub fn new(
        mut decision: Decision,
        confirmation: Option<Decision>,
        case_error: Option<String>,
    ) -> Self {
        let again =
            confirmation.as_ref().is_some_and(|decision| decision.verdict == Verdict::Regressed);
        let verdict = match decision.verdict {
            Verdict::Regressed if again => Verdict::Regressed,
            Verdict::Regressed => Verdict::Inconclusive,
            _ if case_error.is_some() => Verdict::Inconclusive,
            verdict => verdict,
        };
        let case_error = case_error.filter(|_| verdict == Verdict::Inconclusive);
        if case_error.is_some() {
            // More pairs are not what it lacks.
            decision.pairs_needed = None;
        }
        Self { verdict, decision, confirmation, case_error }
    }

    /// A case without a block.
    pub fn unmeasured(case: String, case_error: String, plan: &TestPlan) -> Self {
        // Decided apart from the others, whose error rates hold for the cases that were measured.
        let alone = decide(&Observed::from([(case, Vec::new())]), plan, true);
        let decision = alone.decisions.into_iter().next().expect("a case that goes in comes out");
        Self::new(decision, None, Some(case_error))
    }

    /// The same with outputs that were verified less than the base's: whatever its time, it is not
    /// unchanged.
    pub fn less_verified(mut self, loss: &VerificationLoss) -> Self {
        if self.verdict != Verdict::Regressed {
            self.verdict = Verdict::Inconclusive;
            self.case_error = Some(loss.words());
            self.decision.pairs_needed = None;
        }
        self
    }

    /// Why it is inconclusive.
    pub fn reason(&self) -> Option<String> {
        let of_pairs = match self.decision.verdict {
            Verdict::Regressed if self.verdict == Verdict::Inconclusive => {
                Some("not confirmed by a second round")
            }
            _ => self.decision.reason.map(Reason::words),
        };
        // Without a pair the error is all there is to say.
        let of_pairs = of_pairs.filter(|_| self.decision.pairs > 0 || self.case_error.is_none());
        let reasons: Vec<&str> = of_pairs.into_iter().chain(self.case_error.as_deref()).collect();
        (!reasons.is_empty()).then(|| reasons.join("; "))
    }
}

/// A process that did not get to its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Broken {
    /// The bench binary.
    pub bench: String,
    /// "base" or "head".
    pub side: String,
    /// How.
    pub reason: String,
    /// Whether its cases were abandoned because of it, and are undecided.
    #[serde(rename = "given_up")]
    pub abandoned: bool,
}

impl Broken {
    /// What it means for a case of the bench.
    pub fn case_error(&self) -> String {
        format!("its bench broke in the {}: {}", self.side, self.reason)
    }
}

/// A bench binary that uses Criterion alone, whose source has the last word on how long a process
/// takes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CriterionBench {
    /// The bench binary.
    pub bench: String,
    /// Its cases that are compared.
    pub cases: Vec<String>,
    /// What a process took that measured all its cases, seconds.
    pub process_s: f64,
    /// Cases whose source sets what a flag of Criterion asks for otherwise, with what it sets.
    pub overridden: BTreeMap<String, Vec<String>>,
}

impl CriterionBench {
    /// What it is and costs, a sentence.
    pub fn words(&self) -> String {
        let plural = |count: usize| if count == 1 { "case" } else { "cases" };
        let cost = format!(
            "bench {}: Criterion alone, {} unverified {}; a process takes {:.1} s, a block of \
             four {:.0} s",
            self.bench,
            self.cases.len(),
            plural(self.cases.len()),
            self.process_s,
            4.0 * self.process_s
        );
        let Some((case, set)) = self.overridden.first_key_value() else { return cost };
        let more = match self.overridden.len() {
            1 => String::new(),
            count => format!(", and the like in {} more {}", count - 1, plural(count - 1)),
        };
        format!("{cost}; its source sets {} for {case}{more}", set.join(" and "))
    }
}

/// What a round took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Round {
    /// Most blocks that a bench binary went through.
    pub blocks: usize,
    /// Processes.
    pub processes: usize,
    /// Their wall time, seconds.
    pub wall_s: f64,
}

impl Comparison {
    /// The exit code: refusal before regression before doubt. Where nothing was judged:
    /// inconclusive.
    pub fn exit(&self) -> Exit {
        let abandoned = |side: &str| -> BTreeSet<&str> {
            let of_side = self.broken.iter().filter(|it| it.abandoned && it.side == side);
            of_side.map(|it| it.bench.as_str()).collect()
        };
        let (in_base, in_head) = (abandoned("base"), abandoned("head"));
        if !self.refused.is_empty() {
            Exit::Refused
        } else if self.count(Verdict::Regressed) > 0
            || !self.failed.is_empty()
            // What breaks in both is not the head's doing.
            || !in_head.is_subset(&in_base)
            || self.numerics.shown().next().is_some()
            || self.costs.iter().any(CostGrowth::is_shown)
            || self.verification.iter().any(VerificationLoss::is_shown)
        {
            Exit::Regression
        } else if self.count(Verdict::Inconclusive) > 0
            || self.numerics.suspected().next().is_some()
            || !self.costs.is_empty()
            || !self.verification.is_empty()
            || !self.skipped.is_empty()
            || !self.rules.undecided.is_empty()
            || !in_base.is_empty()
            || (self.judged.is_empty() && self.untimed.is_empty() && self.unaffected.is_empty())
        {
            Exit::Inconclusive
        } else {
            Exit::Fine
        }
    }

    /// The judged cases.
    pub fn cases(&self) -> Vec<&str> {
        self.judged.iter().map(|compared| compared.decision.case.as_str()).collect()
    }

    /// Cases with that verdict.
    pub fn count(&self, verdict: Verdict) -> usize {
        self.judged.iter().filter(|compared| compared.verdict == verdict).count()
    }
}

#[cfg(test)]
mod tests {
    use kernelgate::record::Verification;

    use super::*;
    use crate::gate::costs::{Cost, FurtherPairs};
    use crate::gate::interval::Ratio;

    fn decision(case: &str, verdict: Verdict) -> Decision {
        let ratio = Ratio { center: 1.0, low: 0.9, high: 1.1 };
        Decision {
            case: case.to_owned(),
            verdict,
            reason: None,
            base_ns: 1.0,
            head_ns: 1.0,
            ratio,
            cycles: None,
            null: ratio,
            threshold: 0.01,
            p_slower: 1.0,
            p_faster: 1.0,
            detectable: None,
            pairs: 8,
            pairs_needed: None,
            decided_at: None,
            base_contention: None,
            head_contention: None,
        }
    }

    fn comparison(judged: Vec<Compared>) -> Comparison {
        Comparison {
            base: "a".to_owned(),
            head: "b".to_owned(),
            device: "c".to_owned(),
            plan: TestPlan::default(),
            budget_s: 600.0,
            calibration: None,
            judged,
            refused: vec![],
            new: vec![],
            removed: vec![],
            skipped: BTreeMap::new(),
            failed: BTreeMap::new(),
            failed_in_base: BTreeMap::new(),
            broken: vec![],
            foreign: vec![],
            left_alone: BTreeMap::new(),
            unverified: vec![],
            verification: vec![],
            criterion: vec![],
            identical: vec![],
            untimed: vec![],
            optimised: true,
            delays: None,
            rounds: vec![],
            numerics: NumericsReport::default(),
            costs: vec![],
            rules: RulesReport::default(),
            code: BTreeMap::new(),
            kernels: vec![],
            explanations: BTreeMap::new(),
            unaffected: vec![],
        }
    }

    #[test]
    fn a_regression_counts_when_a_second_round_finds_it_again() {
        use Verdict::{Inconclusive, Regressed, Unchanged};
        let exit = |first, second: Option<Verdict>| {
            let compared = Compared::new(
                decision("x", first),
                second.map(|verdict| decision("x", verdict)),
                None,
            );
            (compared.verdict, compared.reason(), comparison(vec![compared]).exit())
        };
        assert_eq!(exit(Unchanged, None), (Unchanged, None, Exit::Fine));
        assert_eq!(exit(Regressed, Some(Regressed)), (Regressed, None, Exit::Regression));
        for second in [None, Some(Unchanged), Some(Inconclusive)] {
            let (verdict, reason, code) = exit(Regressed, second);
            assert_eq!((verdict, code), (Inconclusive, Exit::Inconclusive));
            assert_eq!(reason.as_deref(), Some("not confirmed by a second round"));
        }
    }

    #[test]
    fn a_case_that_could_not_be_measured_to_the_end_is_inconclusive_and_says_why() {
        use Verdict::{Improved, Inconclusive, Regressed, Unchanged};
        let why = || Some("skipped in the head: no memory".to_owned());
        for first in [Unchanged, Improved, Inconclusive] {
            let compared = Compared::new(decision("x", first), None, why());
            assert_eq!((compared.verdict, compared.reason()), (Inconclusive, why()));
            assert_eq!(comparison(vec![compared]).exit(), Exit::Inconclusive);
        }
        let confirmed =
            Compared::new(decision("x", Regressed), Some(decision("x", Regressed)), why());
        assert_eq!(
            (confirmed.verdict, confirmed.reason(), confirmed.case_error),
            (Regressed, None, None)
        );
        let unconfirmed = Compared::new(decision("x", Regressed), None, why()).reason().unwrap();
        assert_eq!(unconfirmed, "not confirmed by a second round; skipped in the head: no memory");
        let unmeasured =
            Compared::unmeasured("x".to_owned(), "why".to_owned(), &TestPlan::default());
        assert_eq!((unmeasured.decision.case.as_str(), unmeasured.decision.pairs), ("x", 0));
        assert_eq!(
            (unmeasured.verdict, unmeasured.reason().as_deref()),
            (Inconclusive, Some("why"))
        );
        let fine = Compared::new(decision("y", Unchanged), None, None);
        assert_eq!(comparison(vec![unmeasured, fine]).exit(), Exit::Inconclusive);
    }

    #[test]
    fn a_build_that_verifies_less_is_not_unchanged() {
        let all = Verification::Verified { checked: 1600, total: 1600 };
        let with = |head: Verification, verdict: Verdict| {
            let loss = VerificationLoss::between("a", all, head).unwrap();
            let compared = Compared::new(decision("a", verdict), None, None).less_verified(&loss);
            let judged = (compared.verdict, compared.reason());
            let outcome = Comparison { verification: vec![loss], ..comparison(vec![compared]) };
            (judged.0, judged.1, outcome.exit())
        };
        let (verdict, reason, exit) = with(Verification::Unverified, Verdict::Unchanged);
        assert_eq!((verdict, exit), (Verdict::Inconclusive, Exit::Regression));
        assert_eq!(reason.unwrap(), "no longer verified (before: every element verified)");
        let part = Verification::Verified { checked: 1, total: 1600 };
        let (verdict, _, exit) = with(part, Verdict::Improved);
        assert_eq!((verdict, exit), (Verdict::Inconclusive, Exit::Inconclusive));
    }

    #[test]
    fn what_could_not_be_judged_is_never_fine() {
        let fine =
            || comparison(vec![Compared::new(decision("x", Verdict::Unchanged), None, None)]);
        let broken = |side: &str, abandoned| Broken {
            bench: "b".to_owned(),
            side: side.to_owned(),
            reason: "r".to_owned(),
            abandoned,
        };
        let one = || BTreeMap::from([("y".to_owned(), "why".to_owned())]);
        assert_eq!(comparison(vec![]).exit(), Exit::Inconclusive);
        assert_eq!(Comparison { failed: one(), ..fine() }.exit(), Exit::Regression);
        assert_eq!(Comparison { skipped: one(), ..fine() }.exit(), Exit::Inconclusive);
        let both = vec![broken("base", true), broken("head", true)];
        assert_eq!(Comparison { broken: both, ..fine() }.exit(), Exit::Inconclusive);
        let cost = |further| CostGrowth {
            case: "x".to_owned(),
            cost: Cost::HostTime,
            base: 4e3,
            head: 6e3,
            allowed: 0.1,
            further,
        };
        let grown = |further| Comparison { costs: vec![cost(further)], ..fine() }.exit();
        assert_eq!(grown(None), Exit::Regression);
        let further = FurtherPairs { pairs: 8, grown: 8, found: true };
        assert_eq!(grown(Some(further)), Exit::Regression);
        let unclear = FurtherPairs { grown: 6, found: false, ..further };
        assert_eq!(grown(Some(unclear)), Exit::Inconclusive);
        let untimed = Comparison { untimed: vec!["x".to_owned()], ..comparison(vec![]) };
        assert_eq!(untimed.exit(), Exit::Fine, "the same code takes the same time");
        let unaffected = Comparison { unaffected: vec!["x".to_owned()], ..comparison(vec![]) };
        assert_eq!(unaffected.exit(), Exit::Fine, "left out because it was asked for");
        let explained = Compared::new(
            decision("x", Verdict::Regressed),
            Some(decision("x", Verdict::Regressed)),
            None,
        );
        let explanations = BTreeMap::from([(
            "x".to_owned(),
            Explanation { identical_code: true, ..Explanation::default() },
        )]);
        let explained = Comparison { explanations, ..comparison(vec![explained]) };
        assert_eq!(explained.exit(), Exit::Regression, "an explanation is no excuse");
        assert_eq!(comparison(vec![]).exit(), Exit::Inconclusive);
        assert_eq!(Comparison { failed_in_base: one(), ..fine() }.exit(), Exit::Fine);
        assert_eq!(
            Comparison { broken: vec![broken("head", true)], ..fine() }.exit(),
            Exit::Regression
        );
        assert_eq!(
            Comparison { broken: vec![broken("base", true)], ..fine() }.exit(),
            Exit::Inconclusive
        );
        assert_eq!(Comparison { broken: vec![broken("head", false)], ..fine() }.exit(), Exit::Fine);
        let refusal = Refusal {
            field: "seed".to_owned(),
            base: "1".to_owned(),
            head: "2".to_owned(),
            cases: vec![],
        };
        assert_eq!(
            Comparison { refused: vec![refusal], failed: one(), ..fine() }.exit(),
            Exit::Refused
        );
    }
}
