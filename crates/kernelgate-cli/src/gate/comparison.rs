//! Facts of `compare` besides the verdicts: both builds, the plan, and cases that were not timed,
//! with the reason.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::inconclusive_reason::{BuildFailure, InconclusiveReason};
use super::kernels::code::CodeComparison;
use super::kernels::explanation::ChangeExplanation;
use super::paired::{Arm, TestPlan};
use super::rules::RemovedCasesMeaning;
use super::verdicts::{ExitFacts, Verdicts};
use kernelgate_cuda::CaseFailure;

/// The outcome of `compare`.
pub type Comparison = Verdicts<BuildFacts>;

/// Facts of a comparison of two builds.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BuildFacts {
    /// Revision of the base build: "main (1a2b3c4d)".
    pub base: String,
    /// Revision that is judged.
    pub head: String,
    /// Thresholds and error rates.
    pub plan: TestPlan,
    /// Largest wall time of a round, seconds.
    pub budget_s: f64,
    /// Calibration of the device that the plan comes from; absent without a calibration.
    pub calibration: Option<String>,
    /// Cases that only the base build has.
    pub removed: Vec<String>,
    /// Cases that failed only in the base, during verification: the head has nothing to be compared
    /// with.
    pub failed_in_base: BTreeMap<String, CaseFailure>,
    /// Processes that failed.
    pub broken: Vec<FailedProcess>,
    /// Bench executables that cannot be run, with the reason.
    pub left_alone: BTreeMap<String, String>,
    /// Benches that use Criterion alone.
    pub criterion: Vec<CriterionOnlyBench>,
    /// Benches whose executables are byte-identical in both builds: differences of their times are
    /// noise.
    pub identical: Vec<String>,
    /// Cases of identical binaries that were verified and not timed.
    pub untimed: Vec<String>,
    /// Whether the builds were compiled with optimisation.
    pub optimised: bool,
    /// Delays that were injected into launches of the head, whose times therefore do not describe
    /// its code.
    pub delays: Option<String>,
    /// Number of blocks, processes and seconds of each round.
    pub rounds: Vec<ComparisonRound>,
    /// Comparison of each case's kernels in both builds, if the bench lists its kernels.
    pub code: BTreeMap<String, CodeComparison>,
    /// Explanations of regressed cases, from a profile of each build; they change no verdict.
    pub explanations: BTreeMap<String, ChangeExplanation>,
    /// Cases that `--affected` verified but did not time: their machine code and launches are
    /// identical in both builds. The comparison of machine code excludes code that runs on the
    /// host.
    pub unaffected: Vec<String>,
    /// Shards without a record in a merged comparison.
    #[serde(default)]
    pub missing_shards: Vec<String>,
}

impl BuildFacts {
    /// Returns the benches whose cases were abandoned on one side.
    pub fn abandoned_benches(&self, side: Arm) -> BTreeSet<&str> {
        let of_side = self.broken.iter().filter(|it| it.abandoned && it.side == side);
        of_side.map(|it| it.bench.as_str()).collect()
    }
}

impl ExitFacts for BuildFacts {
    // A bench that fails in both builds is not a regression of the head.
    fn is_regression(comparison: &Comparison) -> bool {
        let facts = &comparison.facts;
        !facts.abandoned_benches(Arm::Head).is_subset(&facts.abandoned_benches(Arm::Base))
            || has_removed_cases(comparison, RemovedCasesMeaning::Fail)
    }

    fn is_incomplete(comparison: &Comparison) -> bool {
        !comparison.facts.abandoned_benches(Arm::Base).is_empty()
            || has_removed_cases(comparison, RemovedCasesMeaning::Inconclusive)
            || !comparison.facts.missing_shards.is_empty()
    }

    fn identical_case_count(&self) -> usize {
        self.untimed.len() + self.unaffected.len()
    }
}

/// Returns whether a case was removed without acceptance, and the package's rules give removed
/// cases this meaning.
fn has_removed_cases(
    Comparison { facts, rules, .. }: &Comparison,
    meaning: RemovedCasesMeaning,
) -> bool {
    rules.removed == meaning && facts.removed.iter().any(|case| !rules.accepts_removed(case))
}

/// A process of a comparison that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedProcess {
    /// The bench binary.
    pub bench: String,
    /// The build.
    pub side: Arm,
    /// The reason.
    pub reason: String,
    /// Whether the cases of the bench are undecided, because it failed and was abandoned.
    pub abandoned: bool,
}

impl FailedProcess {
    /// The reason that each case of the failed bench gets.
    pub fn case_error(&self) -> InconclusiveReason {
        InconclusiveReason::BenchBroke(BuildFailure::new(self.side, self.reason.as_str()))
    }
}

/// A bench binary that uses Criterion alone; its source decides in the end how long a process
/// takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CriterionOnlyBench {
    /// The bench binary.
    pub bench: String,
    /// The bench's cases that were being compared.
    pub cases: Vec<String>,
    /// Time of a process that measured all its cases, seconds.
    pub process_s: f64,
    /// Cases whose source overrides settings that Criterion's flags make, with the values of the
    /// source.
    pub overridden: BTreeMap<String, Vec<String>>,
}

impl CriterionOnlyBench {
    /// Describes the abandoned bench and its cost as a sentence.
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

/// Numbers of blocks and processes of a round, and its wall time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ComparisonRound {
    /// Largest number of blocks that any bench had in the round.
    pub blocks: usize,
    /// Number of processes.
    pub processes: usize,
    /// Wall time of the processes of the round, seconds.
    pub wall_s: f64,
}

#[cfg(test)]
mod tests {
    use super::super::outputs::numerics::NumericsReport;
    use super::*;
    use crate::gate::costs::{CaseCost, ConfirmationPairs, CostGrowth};
    use crate::gate::judgement::Judgement;
    use crate::gate::judgement::tests::judgement;
    use crate::gate::limits::CaseLimits;
    use crate::gate::rules::RulesReport;
    use crate::gate::verdict::Verdict;
    use crate::gate::verdicts::RefusedBench;
    use kernelgate::exit::ExitReason;

    fn judged_comparison(judged: Vec<Judgement>, facts: BuildFacts) -> Comparison {
        Comparison {
            device: "c".to_owned(),
            limits: CaseLimits::default_limit(0.01),
            judged,
            refused: vec![],
            new: vec![],
            skipped: BTreeMap::new(),
            failed: BTreeMap::new(),
            unverified: vec![],
            verification: vec![],
            numerics: NumericsReport::default(),
            costs: vec![],
            rules: RulesReport::default(),
            facts,
        }
    }

    fn unchanged_comparison() -> Comparison {
        judged_comparison(vec![judgement("x", Verdict::Unchanged)], BuildFacts::default())
    }

    fn exit_of_judgements(judged: Vec<Judgement>, facts: BuildFacts) -> ExitReason {
        judged_comparison(judged, facts).exit()
    }

    fn one_reason<T: From<&'static str>>() -> BTreeMap<String, T> {
        BTreeMap::from([("y".to_owned(), "why".into())])
    }

    #[test]
    fn a_removed_case_is_accepted_or_has_the_meaning_that_the_package_sets() {
        use crate::gate::rules::AppliedAcceptance;
        let with = |removed, accepted: Vec<AppliedAcceptance>| {
            let facts = BuildFacts { removed: vec!["y".to_owned()], ..BuildFacts::default() };
            let judged = vec![judgement("x", Verdict::Unchanged)];
            let rules = RulesReport { removed, accepted, ..RulesReport::default() };
            Comparison { rules, ..judged_comparison(judged, facts) }.exit()
        };
        assert_eq!(with(RemovedCasesMeaning::default(), vec![]), ExitReason::Inconclusive);
        assert_eq!(with(RemovedCasesMeaning::Fail, vec![]), ExitReason::Regression);
        assert_eq!(with(RemovedCasesMeaning::Ignore, vec![]), ExitReason::Fine);
        let accepted = |case: &str, removed| AppliedAcceptance {
            case: case.to_owned(),
            slower: Some(0.1),
            growth: None,
            less_verified: false,
            removed,
            reason: "r".to_owned(),
        };
        for meaning in [RemovedCasesMeaning::Inconclusive, RemovedCasesMeaning::Fail] {
            assert_eq!(with(meaning, vec![accepted("y", true)]), ExitReason::Fine);
            assert_ne!(with(meaning, vec![accepted("y", false)]), ExitReason::Fine);
            assert_ne!(with(meaning, vec![accepted("z", true)]), ExitReason::Fine);
        }
    }

    #[test]
    fn the_worst_verdict_of_all_cases_sets_the_exit_code() {
        let exit =
            |verdict| exit_of_judgements(vec![judgement("x", verdict)], BuildFacts::default());
        assert_eq!(exit(Verdict::Unchanged), ExitReason::Fine);
        assert_eq!(exit(Verdict::Regressed), ExitReason::Regression);
        assert_eq!(exit(Verdict::Inconclusive), ExitReason::Inconclusive);
        assert_eq!(
            Comparison { failed: one_reason(), ..unchanged_comparison() }.exit(),
            ExitReason::Regression
        );
        assert_eq!(
            Comparison { skipped: one_reason(), ..unchanged_comparison() }.exit(),
            ExitReason::Inconclusive
        );
        let refusal = RefusedBench {
            field: "seed".to_owned(),
            base: "1".to_owned(),
            head: "2".to_owned(),
            cases: vec![],
        };
        let refused =
            Comparison { refused: vec![refusal], failed: one_reason(), ..unchanged_comparison() };
        assert_eq!(refused.exit(), ExitReason::Refused);
    }

    #[test]
    fn a_bench_that_fails_only_in_the_head_is_a_regression() {
        let broken = |side, abandoned| FailedProcess {
            bench: "b".to_owned(),
            side,
            reason: "r".to_owned(),
            abandoned,
        };
        let exit = |broken: Vec<FailedProcess>| {
            let facts = BuildFacts { broken, ..BuildFacts::default() };
            exit_of_judgements(vec![judgement("x", Verdict::Unchanged)], facts)
        };
        assert_eq!(exit(vec![broken(Arm::Head, true)]), ExitReason::Regression);
        assert_eq!(exit(vec![broken(Arm::Base, true)]), ExitReason::Inconclusive);
        assert_eq!(exit(vec![broken(Arm::Head, false)]), ExitReason::Fine);
        let both = vec![broken(Arm::Base, true), broken(Arm::Head, true)];
        assert_eq!(exit(both), ExitReason::Inconclusive);
    }

    #[test]
    fn a_cost_that_grew_significantly_is_a_regression() {
        let grown = |further| {
            let cost = CostGrowth {
                case: "x".to_owned(),
                cost: CaseCost::HostTime,
                base: 4e3,
                head: 6e3,
                allowed: 0.1,
                further,
            };
            Comparison { costs: vec![cost], ..unchanged_comparison() }.exit()
        };
        assert_eq!(grown(None), ExitReason::Regression);
        let further = ConfirmationPairs { pairs: 8, grown: 8, found: true };
        assert_eq!(grown(Some(further)), ExitReason::Regression);
        let unclear = ConfirmationPairs { grown: 6, found: false, ..further };
        assert_eq!(grown(Some(unclear)), ExitReason::Inconclusive);
    }

    #[test]
    fn a_comparison_without_judged_cases_passes_only_if_nothing_can_have_changed() {
        assert_eq!(exit_of_judgements(vec![], BuildFacts::default()), ExitReason::Inconclusive);
        let untimed = BuildFacts { untimed: vec!["x".to_owned()], ..BuildFacts::default() };
        assert_eq!(exit_of_judgements(vec![], untimed), ExitReason::Fine);
        let unaffected = BuildFacts { unaffected: vec!["x".to_owned()], ..BuildFacts::default() };
        assert_eq!(exit_of_judgements(vec![], unaffected), ExitReason::Fine);
        let mended = BuildFacts { failed_in_base: one_reason(), ..BuildFacts::default() };
        assert_eq!(
            exit_of_judgements(vec![judgement("x", Verdict::Unchanged)], mended),
            ExitReason::Fine
        );
    }

    #[test]
    fn an_explanation_does_not_excuse_a_regression() {
        let explained = ChangeExplanation { identical_code: true, ..ChangeExplanation::default() };
        let explanations = BTreeMap::from([("x".to_owned(), explained)]);
        let facts = BuildFacts { explanations, ..BuildFacts::default() };
        assert_eq!(
            exit_of_judgements(vec![judgement("x", Verdict::Regressed)], facts),
            ExitReason::Regression
        );
    }
}
