//! Facts about a comparison of two builds (`kernelgate compare`) besides the verdicts: both builds,
//! the test plan, and the cases that were not timed, with the reasons.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::inconclusive_reason::{InconclusiveReason, MeasurementFailureOnSide};
use super::kernels::code::CaseKernelComparison;
use super::kernels::explanation::SlowdownExplanation;
use super::paired::{ComparedArm, ComparisonTestPlan};
use super::rules::RemovedCasesEffect;
use super::verdicts::{ExitFactsOfGateOrCompare, VerdictsAndFindings};
use kernelgate_cuda::CaseFailureReason;

/// Verdicts and findings of `kernelgate compare`, with the facts that only `compare` has.
pub type Comparison = VerdictsAndFindings<BuildComparisonFacts>;

/// Facts about a comparison of two builds that belong to the whole comparison and not to single
/// verdicts.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BuildComparisonFacts {
    /// Revision of the base build, as name and commit: "main (1a2b3c4d)".
    #[serde(rename = "base")]
    pub base_revision: String,
    /// Revision of the head build, which is judged.
    #[serde(rename = "head")]
    pub head_revision: String,
    /// Test plan of the comparison: thresholds, error rates and numbers of blocks.
    pub plan: ComparisonTestPlan,
    /// Largest wall time of each round of the comparison, seconds.
    #[serde(rename = "budget_s")]
    pub round_budget_s: f64,
    /// Description of the device's calibration from which the test plan comes; `None` without a
    /// calibration.
    #[serde(rename = "calibration")]
    pub calibration_description: Option<String>,
    /// Ids of the cases that only the base build has.
    #[serde(rename = "removed")]
    pub removed_cases: Vec<String>,
    /// Cases whose verification failed in the base but not in the head, each with the error; they
    /// get no verdict.
    pub failed_in_base: BTreeMap<String, CaseFailureReason>,
    /// Processes that failed.
    #[serde(rename = "broken")]
    pub failed_processes: Vec<FailedBenchProcess>,
    /// Names of bench executables that kernelgate cannot run, each with the reason.
    #[serde(rename = "left_alone")]
    pub unusable_benches: BTreeMap<String, String>,
    /// Benches that use Criterion without kernelgate, with the cost of their processes.
    #[serde(rename = "criterion")]
    pub criterion_benches: Vec<CriterionOnlyBench>,
    /// Names of the benches whose executables are byte-identical in both builds, so that measured
    /// differences are noise.
    #[serde(rename = "identical")]
    pub benches_with_identical_executables: Vec<String>,
    /// Ids of the cases that were not timed because both builds have a byte-identical executable
    /// for them.
    #[serde(rename = "untimed")]
    pub cases_with_identical_executable: Vec<String>,
    /// Whether both builds were compiled with optimisation.
    #[serde(rename = "optimised")]
    pub optimised_build: bool,
    /// Delays that a calibration injected into launches of the head, as text; `None` without
    /// injected delays.
    #[serde(rename = "delays")]
    pub injected_delays_text: Option<String>,
    /// Number of blocks and processes and the wall time of each of the comparison's one or two
    /// rounds.
    pub rounds: Vec<ComparisonRoundCounts>,
    /// Comparison of the machine code and launches of each case's kernels, for benches that list
    /// their kernels.
    #[serde(rename = "code")]
    pub kernel_comparisons_by_case: BTreeMap<String, CaseKernelComparison>,
    /// Explanations why cases regressed, from one profile of each build; they change no verdict.
    pub explanations: BTreeMap<String, SlowdownExplanation>,
    /// Ids of the cases that `--affected` verified but did not time, because their machine code and
    /// launches are identical in both builds. For `--affected`, code that runs on the host is not
    /// compared.
    #[serde(rename = "unaffected")]
    pub unaffected_cases: Vec<String>,
    /// Names of the shards that a merged comparison lacks.
    #[serde(default)]
    pub missing_shards: Vec<String>,
}

impl BuildComparisonFacts {
    /// Returns the names of the benches whose cases the comparison abandoned because their
    /// processes failed on this side.
    pub fn benches_abandoned_on_side(&self, side: ComparedArm) -> BTreeSet<&str> {
        let of_side =
            self.failed_processes.iter().filter(|it| it.bench_abandoned && it.side == side);
        of_side.map(|it| it.bench_name.as_str()).collect()
    }
}

impl ExitFactsOfGateOrCompare for BuildComparisonFacts {
    // A bench that fails in both builds does not count as a regression of the head.
    fn has_regression_beside_cases(comparison: &Comparison) -> bool {
        let facts = &comparison.method_facts;
        !facts
            .benches_abandoned_on_side(ComparedArm::HeadBuild)
            .is_subset(&facts.benches_abandoned_on_side(ComparedArm::BaseBuild))
            || has_unaccepted_removed_cases(comparison, RemovedCasesEffect::FailComparison)
    }

    fn lacks_requested_measurement(comparison: &Comparison) -> bool {
        !comparison.method_facts.benches_abandoned_on_side(ComparedArm::BaseBuild).is_empty()
            || has_unaccepted_removed_cases(comparison, RemovedCasesEffect::MakeInconclusive)
            || !comparison.method_facts.missing_shards.is_empty()
    }

    fn number_of_cases_unchanged_without_timing(&self) -> usize {
        self.cases_with_identical_executable.len() + self.unaffected_cases.len()
    }
}

/// Returns whether any case was removed without an accepted reason, while the package's rules give
/// removed cases this meaning (fail or inconclusive).
fn has_unaccepted_removed_cases(
    Comparison { method_facts: facts, rules, .. }: &Comparison,
    meaning: RemovedCasesEffect,
) -> bool {
    rules.removed == meaning
        && facts.removed_cases.iter().any(|case| !rules.accepts_removal_of_case(case))
}

/// A bench process of a comparison that failed, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedBenchProcess {
    /// Name of the bench executable.
    #[serde(rename = "bench")]
    pub bench_name: String,
    /// The side (base or head) whose bench process failed.
    pub side: ComparedArm,
    /// Reason why the bench process failed, as a text.
    #[serde(rename = "reason")]
    pub failure_reason: String,
    /// Whether the bench was abandoned because of this failure, so that its undecided cases stay
    /// undecided.
    #[serde(rename = "abandoned")]
    pub bench_abandoned: bool,
}

impl FailedBenchProcess {
    /// Returns the reason that each undecided case of the failed bench gets.
    pub fn inconclusive_reason_for_cases(&self) -> InconclusiveReason {
        InconclusiveReason::BenchFailed(MeasurementFailureOnSide::in_side_with_reason(
            self.side,
            self.failure_reason.as_str(),
        ))
    }
}

/// A bench that uses Criterion without kernelgate, with its cost; its source may override the
/// sampling that kernelgate requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CriterionOnlyBench {
    /// Name of the bench executable.
    #[serde(rename = "bench")]
    pub bench_name: String,
    /// Ids of the bench's cases that are compared.
    #[serde(rename = "cases")]
    pub compared_cases: Vec<String>,
    /// Wall time of one process that measured all of the bench's cases, seconds.
    #[serde(rename = "process_s")]
    pub process_wall_s: f64,
    /// Cases whose source overrides the sampling that Criterion's flags request, each with the
    /// values that the source sets.
    #[serde(rename = "overridden")]
    pub overridden_sampling_by_case: BTreeMap<String, Vec<String>>,
}

impl CriterionOnlyBench {
    /// Describes a Criterion bench in one sentence: unverified cases, time per process and block,
    /// and overridden sampling.
    pub fn describe_cost(&self) -> String {
        let plural = |count: usize| if count == 1 { "case" } else { "cases" };
        let cost = format!(
            "bench {}: Criterion alone, {} unverified {}; a process takes {:.1} s, a block of \
             four {:.0} s",
            self.bench_name,
            self.compared_cases.len(),
            plural(self.compared_cases.len()),
            self.process_wall_s,
            4.0 * self.process_wall_s
        );
        let Some((case, set)) = self.overridden_sampling_by_case.first_key_value() else {
            return cost;
        };
        let more = match self.overridden_sampling_by_case.len() {
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
    #[serde(rename = "blocks")]
    pub most_trial_blocks: usize,
    /// Number of processes.
    #[serde(rename = "processes")]
    pub process_count: usize,
    /// Sum of the wall times of the round's processes, seconds.
    #[serde(rename = "wall_s")]
    pub total_process_wall_s: f64,
}

#[cfg(test)]
mod tests {
    use super::super::outputs::numerics::OutputErrorReport;
    use super::*;
    use crate::gate::costs::{GrowthConfirmationPairs, LaunchCostGrowthOfCase, LaunchCostKind};
    use crate::gate::judgement::CaseJudgement;
    use crate::gate::judgement::tests::test_judgement;
    use crate::gate::limits::CaseTimeAndErrorLimits;
    use crate::gate::rules::GateRulesEffectReport;
    use crate::gate::verdict::VerdictOnCase;
    use crate::gate::verdicts::ComparisonRefusal;
    use kernelgate::exit::ProcessExitReason;

    fn test_comparison_with_judgements(
        judged: Vec<CaseJudgement>,
        facts: BuildComparisonFacts,
    ) -> Comparison {
        Comparison {
            device: "c".to_owned(),
            default_case_limits: CaseTimeAndErrorLimits::default_with_relative_limit(0.01),
            judged_cases: judged,
            refused: vec![],
            new_cases: vec![],
            skipped_in_head: BTreeMap::new(),
            failed_in_head: BTreeMap::new(),
            unverified_cases: vec![],
            verification_losses: vec![],
            numerics: OutputErrorReport::default(),
            grown_costs: vec![],
            rules: GateRulesEffectReport::default(),
            method_facts: facts,
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
                removed_cases: vec!["y".to_owned()],
                ..BuildComparisonFacts::default()
            };
            let judged = vec![test_judgement("x", VerdictOnCase::Unchanged)];
            let rules =
                GateRulesEffectReport { removed, accepted, ..GateRulesEffectReport::default() };
            Comparison { rules, ..test_comparison_with_judgements(judged, facts) }.exit_reason()
        };
        assert_eq!(with(RemovedCasesEffect::default(), vec![]), ProcessExitReason::Inconclusive);
        assert_eq!(with(RemovedCasesEffect::FailComparison, vec![]), ProcessExitReason::Regression);
        assert_eq!(with(RemovedCasesEffect::ListOnly, vec![]), ProcessExitReason::Success);
        let accepted = |case: &str, removed| AcceptanceAppliedToCase {
            case_id: case.to_owned(),
            max_accepted_relative_slowdown: Some(0.1),
            max_accepted_error_ratio: None,
            allows_less_verification: false,
            allows_removal: removed,
            acceptance_reason: "r".to_owned(),
        };
        for meaning in [RemovedCasesEffect::MakeInconclusive, RemovedCasesEffect::FailComparison] {
            assert_eq!(with(meaning, vec![accepted("y", true)]), ProcessExitReason::Success);
            assert_ne!(with(meaning, vec![accepted("y", false)]), ProcessExitReason::Success);
            assert_ne!(with(meaning, vec![accepted("z", true)]), ProcessExitReason::Success);
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
        assert_eq!(exit(VerdictOnCase::Unchanged), ProcessExitReason::Success);
        assert_eq!(exit(VerdictOnCase::Regressed), ProcessExitReason::Regression);
        assert_eq!(exit(VerdictOnCase::Inconclusive), ProcessExitReason::Inconclusive);
        assert_eq!(
            Comparison {
                failed_in_head: test_map_with_one_reason(),
                ..test_comparison_with_unchanged_case()
            }
            .exit_reason(),
            ProcessExitReason::Regression
        );
        assert_eq!(
            Comparison {
                skipped_in_head: test_map_with_one_reason(),
                ..test_comparison_with_unchanged_case()
            }
            .exit_reason(),
            ProcessExitReason::Inconclusive
        );
        let refusal = ComparisonRefusal {
            differing_field: "seed".to_owned(),
            base_value: "1".to_owned(),
            head_value: "2".to_owned(),
            affected_cases: vec![],
        };
        let refused = Comparison {
            refused: vec![refusal],
            failed_in_head: test_map_with_one_reason(),
            ..test_comparison_with_unchanged_case()
        };
        assert_eq!(refused.exit_reason(), ProcessExitReason::ResultsNotComparable);
    }

    #[test]
    fn a_bench_that_fails_only_in_the_head_is_a_regression() {
        let broken = |side, abandoned| FailedBenchProcess {
            bench_name: "b".to_owned(),
            side,
            failure_reason: "r".to_owned(),
            bench_abandoned: abandoned,
        };
        let exit = |broken: Vec<FailedBenchProcess>| {
            let facts = BuildComparisonFacts {
                failed_processes: broken,
                ..BuildComparisonFacts::default()
            };
            exit_of_test_comparison(vec![test_judgement("x", VerdictOnCase::Unchanged)], facts)
        };
        assert_eq!(exit(vec![broken(ComparedArm::HeadBuild, true)]), ProcessExitReason::Regression);
        assert_eq!(
            exit(vec![broken(ComparedArm::BaseBuild, true)]),
            ProcessExitReason::Inconclusive
        );
        assert_eq!(exit(vec![broken(ComparedArm::HeadBuild, false)]), ProcessExitReason::Success);
        let both = vec![broken(ComparedArm::BaseBuild, true), broken(ComparedArm::HeadBuild, true)];
        assert_eq!(exit(both), ProcessExitReason::Inconclusive);
    }

    #[test]
    fn a_cost_that_grew_significantly_is_a_regression() {
        let grown = |further| {
            let cost = LaunchCostGrowthOfCase {
                case_id: "x".to_owned(),
                cost: LaunchCostKind::HostEnqueueTime,
                base_cost: 4e3,
                head_cost: 6e3,
                allowed_relative_growth: 0.1,
                growth_confirmation: further,
            };
            Comparison { grown_costs: vec![cost], ..test_comparison_with_unchanged_case() }
                .exit_reason()
        };
        assert_eq!(grown(None), ProcessExitReason::Regression);
        let further =
            GrowthConfirmationPairs { pair_count: 8, pairs_with_growth: 8, growth_confirmed: true };
        assert_eq!(grown(Some(further)), ProcessExitReason::Regression);
        let unclear =
            GrowthConfirmationPairs { pairs_with_growth: 6, growth_confirmed: false, ..further };
        assert_eq!(grown(Some(unclear)), ProcessExitReason::Inconclusive);
    }

    #[test]
    fn a_comparison_without_judged_cases_passes_only_if_nothing_can_have_changed() {
        assert_eq!(
            exit_of_test_comparison(vec![], BuildComparisonFacts::default()),
            ProcessExitReason::Inconclusive
        );
        let untimed = BuildComparisonFacts {
            cases_with_identical_executable: vec!["x".to_owned()],
            ..BuildComparisonFacts::default()
        };
        assert_eq!(exit_of_test_comparison(vec![], untimed), ProcessExitReason::Success);
        let unaffected = BuildComparisonFacts {
            unaffected_cases: vec!["x".to_owned()],
            ..BuildComparisonFacts::default()
        };
        assert_eq!(exit_of_test_comparison(vec![], unaffected), ProcessExitReason::Success);
        let mended = BuildComparisonFacts {
            failed_in_base: test_map_with_one_reason(),
            ..BuildComparisonFacts::default()
        };
        assert_eq!(
            exit_of_test_comparison(vec![test_judgement("x", VerdictOnCase::Unchanged)], mended),
            ProcessExitReason::Success
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
