//! Facts about a comparison of two builds (`kernelgate compare`) besides the verdicts: both builds,
//! the test plan, and the cases that were not timed, with the reasons.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::inconclusive_reason::{FailureInBuild, InconclusiveReason};
use super::kernels::code::CaseKernelComparison;
use super::kernels::explanation::SlowdownExplanation;
use super::paired::{ComparedArm, ComparisonTestPlan};
use super::rules::RemovedCasesMeaning;
use super::verdicts::{MethodFactsForExit, VerdictsAndFindings};
use kernelgate_cuda::CaseFailureReason;

/// The outcome of `compare`.
pub type Comparison = VerdictsAndFindings<BuildComparisonFacts>;

/// Facts about a comparison of two builds that belong to the whole comparison and not to single
/// verdicts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BuildComparisonFacts {
    /// Revision of the base build, as name and commit: "main (1a2b3c4d)".
    pub base: String,
    /// Revision that is judged.
    pub head: String,
    /// Thresholds and error rates.
    pub plan: ComparisonTestPlan,
    /// Largest wall time of each round of the comparison, seconds.
    pub budget_s: f64,
    /// Description of the device's calibration from which the test plan comes; `None` without a
    /// calibration.
    pub calibration: Option<String>,
    /// Ids of the cases that only the base build has.
    pub removed: Vec<String>,
    /// Cases whose verification failed in the base but not in the head, each with the error; they
    /// get no verdict.
    pub failed_in_base: BTreeMap<String, CaseFailureReason>,
    /// Processes that failed.
    pub broken: Vec<FailedBenchProcess>,
    /// Names of bench executables that kernelgate cannot run, each with the reason.
    pub left_alone: BTreeMap<String, String>,
    /// Benches that use Criterion without kernelgate, with the cost of their processes.
    pub criterion: Vec<CriterionOnlyBench>,
    /// Names of the benches whose executables are byte-identical in both builds, so that measured
    /// differences are noise.
    pub identical: Vec<String>,
    /// Ids of the cases that were not timed because both builds have a byte-identical executable
    /// for them.
    pub untimed: Vec<String>,
    /// Whether both builds were compiled with optimisation.
    pub optimised: bool,
    /// Delays that a calibration injected into launches of the head, as text; `None` without
    /// injected delays.
    pub delays: Option<String>,
    /// Number of blocks and processes and the wall time of each of the comparison's one or two
    /// rounds.
    pub rounds: Vec<ComparisonRoundCounts>,
    /// Comparison of the machine code and launches of each case's kernels, for benches that list
    /// their kernels.
    pub code: BTreeMap<String, CaseKernelComparison>,
    /// Explanations why cases regressed, from one profile of each build; they change no verdict.
    pub explanations: BTreeMap<String, SlowdownExplanation>,
    /// Ids of the cases that `--affected` verified but did not time, because their machine code and
    /// launches are identical in both builds. For `--affected`, code that runs on the host is not
    /// compared.
    pub unaffected: Vec<String>,
    /// Names of the shards that a merged comparison lacks.
    #[serde(default)]
    pub missing_shards: Vec<String>,
}

impl BuildComparisonFacts {
    /// Returns the names of the benches whose cases the comparison abandoned because their
    /// processes failed on this side.
    pub fn benches_abandoned_on_side(&self, side: ComparedArm) -> BTreeSet<&str> {
        let of_side = self.broken.iter().filter(|it| it.abandoned && it.side == side);
        of_side.map(|it| it.bench.as_str()).collect()
    }
}

impl MethodFactsForExit for BuildComparisonFacts {
    // A bench that fails in both builds does not count as a regression of the head.
    fn has_regression_beside_cases(comparison: &Comparison) -> bool {
        let facts = &comparison.facts;
        !facts
            .benches_abandoned_on_side(ComparedArm::Head)
            .is_subset(&facts.benches_abandoned_on_side(ComparedArm::Base))
            || has_unaccepted_removed_cases(comparison, RemovedCasesMeaning::Fail)
    }

    fn lacks_requested_measurement(comparison: &Comparison) -> bool {
        !comparison.facts.benches_abandoned_on_side(ComparedArm::Base).is_empty()
            || has_unaccepted_removed_cases(comparison, RemovedCasesMeaning::Inconclusive)
            || !comparison.facts.missing_shards.is_empty()
    }

    fn number_of_cases_unchanged_without_timing(&self) -> usize {
        self.untimed.len() + self.unaffected.len()
    }
}

/// Returns whether any case was removed without an accepted reason, while the package's rules give
/// removed cases this meaning (fail or inconclusive).
fn has_unaccepted_removed_cases(
    Comparison { facts, rules, .. }: &Comparison,
    meaning: RemovedCasesMeaning,
) -> bool {
    rules.removed == meaning
        && facts.removed.iter().any(|case| !rules.accepts_removal_of_case(case))
}

/// A bench process of a comparison that failed, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedBenchProcess {
    /// Name of the bench executable.
    pub bench: String,
    /// The build that failed: base or head.
    pub side: ComparedArm,
    /// Reason for this entry, as a text.
    pub reason: String,
    /// Whether the bench was abandoned because of this failure, so that its undecided cases stay
    /// undecided.
    pub abandoned: bool,
}

impl FailedBenchProcess {
    /// Returns the reason that each undecided case of the failed bench gets.
    pub fn inconclusive_reason_for_cases(&self) -> InconclusiveReason {
        InconclusiveReason::BenchBroke(FailureInBuild::in_side_with_reason(
            self.side,
            self.reason.as_str(),
        ))
    }
}

/// A bench that uses Criterion without kernelgate, with its cost; its source may override the
/// sampling that kernelgate requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CriterionOnlyBench {
    /// Name of the bench executable.
    pub bench: String,
    /// Ids of the bench's cases that are compared.
    pub cases: Vec<String>,
    /// Wall time of one process that measured all of the bench's cases, seconds.
    pub process_s: f64,
    /// Cases whose source overrides the sampling that Criterion's flags request, each with the
    /// values that the source sets.
    pub overridden: BTreeMap<String, Vec<String>>,
}

impl CriterionOnlyBench {
    /// Describes a Criterion bench in one sentence: unverified cases, time per process and block,
    /// and overridden sampling.
    pub fn describe_cost(&self) -> String {
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

/// Number of blocks and processes of one round of a comparison, and the round's wall time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ComparisonRoundCounts {
    /// Largest number of blocks that any bench had in the round.
    pub blocks: usize,
    /// Number of processes.
    pub processes: usize,
    /// Sum of the wall times of the round's processes, seconds.
    pub wall_s: f64,
}

#[cfg(test)]
mod tests {
    use super::super::outputs::numerics::OutputErrorReport;
    use super::*;
    use crate::gate::costs::{CostGrowthOfCase, GrowthConfirmationPairs, LaunchCostKind};
    use crate::gate::judgement::CaseJudgement;
    use crate::gate::judgement::tests::test_judgement;
    use crate::gate::limits::CaseLimits;
    use crate::gate::rules::RulesEffectReport;
    use crate::gate::verdict::VerdictOnCase;
    use crate::gate::verdicts::ComparisonRefusal;
    use kernelgate::exit::ProcessExitReason;

    fn test_comparison_with_judgements(
        judged: Vec<CaseJudgement>,
        facts: BuildComparisonFacts,
    ) -> Comparison {
        Comparison {
            device: "c".to_owned(),
            limits: CaseLimits::default_with_relative_limit(0.01),
            judged_cases: judged,
            refused: vec![],
            new_cases: vec![],
            skipped: BTreeMap::new(),
            failed: BTreeMap::new(),
            unverified_cases: vec![],
            verification: vec![],
            numerics: OutputErrorReport::default(),
            costs: vec![],
            rules: RulesEffectReport::default(),
            facts,
        }
    }

    fn test_comparison_with_unchanged_case() -> Comparison {
        test_comparison_with_judgements(
            vec![test_judgement("x", VerdictOnCase::Unchanged)],
            BuildComparisonFacts::default(),
        )
    }

    fn exit_of_test_comparison(
        judged: Vec<CaseJudgement>,
        facts: BuildComparisonFacts,
    ) -> ProcessExitReason {
        test_comparison_with_judgements(judged, facts).exit_reason()
    }

    fn test_map_with_one_reason<T: From<&'static str>>() -> BTreeMap<String, T> {
        BTreeMap::from([("y".to_owned(), "why".into())])
    }

    #[test]
    fn a_removed_case_is_accepted_or_has_the_meaning_that_the_package_sets() {
        use crate::gate::rules::AcceptanceAppliedToCase;
        let with = |removed, accepted: Vec<AcceptanceAppliedToCase>| {
            let facts = BuildComparisonFacts {
                removed: vec!["y".to_owned()],
                ..BuildComparisonFacts::default()
            };
            let judged = vec![test_judgement("x", VerdictOnCase::Unchanged)];
            let rules = RulesEffectReport { removed, accepted, ..RulesEffectReport::default() };
            Comparison { rules, ..test_comparison_with_judgements(judged, facts) }.exit_reason()
        };
        assert_eq!(with(RemovedCasesMeaning::default(), vec![]), ProcessExitReason::Inconclusive);
        assert_eq!(with(RemovedCasesMeaning::Fail, vec![]), ProcessExitReason::Regression);
        assert_eq!(with(RemovedCasesMeaning::Ignore, vec![]), ProcessExitReason::Fine);
        let accepted = |case: &str, removed| AcceptanceAppliedToCase {
            case: case.to_owned(),
            slower: Some(0.1),
            growth: None,
            less_verified: false,
            removed,
            reason: "r".to_owned(),
        };
        for meaning in [RemovedCasesMeaning::Inconclusive, RemovedCasesMeaning::Fail] {
            assert_eq!(with(meaning, vec![accepted("y", true)]), ProcessExitReason::Fine);
            assert_ne!(with(meaning, vec![accepted("y", false)]), ProcessExitReason::Fine);
            assert_ne!(with(meaning, vec![accepted("z", true)]), ProcessExitReason::Fine);
        }
    }

    #[test]
    fn the_worst_verdict_of_all_cases_sets_the_exit_code() {
        let exit = |verdict| {
            exit_of_test_comparison(
                vec![test_judgement("x", verdict)],
                BuildComparisonFacts::default(),
            )
        };
        assert_eq!(exit(VerdictOnCase::Unchanged), ProcessExitReason::Fine);
        assert_eq!(exit(VerdictOnCase::Regressed), ProcessExitReason::Regression);
        assert_eq!(exit(VerdictOnCase::Inconclusive), ProcessExitReason::Inconclusive);
        assert_eq!(
            Comparison {
                failed: test_map_with_one_reason(),
                ..test_comparison_with_unchanged_case()
            }
            .exit_reason(),
            ProcessExitReason::Regression
        );
        assert_eq!(
            Comparison {
                skipped: test_map_with_one_reason(),
                ..test_comparison_with_unchanged_case()
            }
            .exit_reason(),
            ProcessExitReason::Inconclusive
        );
        let refusal = ComparisonRefusal {
            field: "seed".to_owned(),
            base: "1".to_owned(),
            head: "2".to_owned(),
            cases: vec![],
        };
        let refused = Comparison {
            refused: vec![refusal],
            failed: test_map_with_one_reason(),
            ..test_comparison_with_unchanged_case()
        };
        assert_eq!(refused.exit_reason(), ProcessExitReason::Refused);
    }

    #[test]
    fn a_bench_that_fails_only_in_the_head_is_a_regression() {
        let broken = |side, abandoned| FailedBenchProcess {
            bench: "b".to_owned(),
            side,
            reason: "r".to_owned(),
            abandoned,
        };
        let exit = |broken: Vec<FailedBenchProcess>| {
            let facts = BuildComparisonFacts { broken, ..BuildComparisonFacts::default() };
            exit_of_test_comparison(vec![test_judgement("x", VerdictOnCase::Unchanged)], facts)
        };
        assert_eq!(exit(vec![broken(ComparedArm::Head, true)]), ProcessExitReason::Regression);
        assert_eq!(exit(vec![broken(ComparedArm::Base, true)]), ProcessExitReason::Inconclusive);
        assert_eq!(exit(vec![broken(ComparedArm::Head, false)]), ProcessExitReason::Fine);
        let both = vec![broken(ComparedArm::Base, true), broken(ComparedArm::Head, true)];
        assert_eq!(exit(both), ProcessExitReason::Inconclusive);
    }

    #[test]
    fn a_cost_that_grew_significantly_is_a_regression() {
        let grown = |further| {
            let cost = CostGrowthOfCase {
                case: "x".to_owned(),
                cost: LaunchCostKind::HostTime,
                base: 4e3,
                head: 6e3,
                allowed: 0.1,
                further,
            };
            Comparison { costs: vec![cost], ..test_comparison_with_unchanged_case() }.exit_reason()
        };
        assert_eq!(grown(None), ProcessExitReason::Regression);
        let further = GrowthConfirmationPairs { pairs: 8, grown: 8, found: true };
        assert_eq!(grown(Some(further)), ProcessExitReason::Regression);
        let unclear = GrowthConfirmationPairs { grown: 6, found: false, ..further };
        assert_eq!(grown(Some(unclear)), ProcessExitReason::Inconclusive);
    }

    #[test]
    fn a_comparison_without_judged_cases_passes_only_if_nothing_can_have_changed() {
        assert_eq!(
            exit_of_test_comparison(vec![], BuildComparisonFacts::default()),
            ProcessExitReason::Inconclusive
        );
        let untimed = BuildComparisonFacts {
            untimed: vec!["x".to_owned()],
            ..BuildComparisonFacts::default()
        };
        assert_eq!(exit_of_test_comparison(vec![], untimed), ProcessExitReason::Fine);
        let unaffected = BuildComparisonFacts {
            unaffected: vec!["x".to_owned()],
            ..BuildComparisonFacts::default()
        };
        assert_eq!(exit_of_test_comparison(vec![], unaffected), ProcessExitReason::Fine);
        let mended = BuildComparisonFacts {
            failed_in_base: test_map_with_one_reason(),
            ..BuildComparisonFacts::default()
        };
        assert_eq!(
            exit_of_test_comparison(vec![test_judgement("x", VerdictOnCase::Unchanged)], mended),
            ProcessExitReason::Fine
        );
    }

    #[test]
    fn an_explanation_does_not_excuse_a_regression() {
        let explained =
            SlowdownExplanation { identical_code: true, ..SlowdownExplanation::default() };
        let explanations = BTreeMap::from([("x".to_owned(), explained)]);
        let facts = BuildComparisonFacts { explanations, ..BuildComparisonFacts::default() };
        assert_eq!(
            exit_of_test_comparison(vec![test_judgement("x", VerdictOnCase::Regressed)], facts),
            ProcessExitReason::Regression
        );
    }
}
