//! Explains why cases regressed: profiles both builds once for these cases, after all verdicts are
//! final. The explanation of regressed cases costs one profiling process for each bench and side,
//! and changes no verdict.

use std::collections::{BTreeMap, BTreeSet};

use super::ComparisonEngine;
use crate::benches::criterion;
use crate::compare::session::ComparedBench;
use crate::compare::sides::copy_benches::BenchControlMethod;
use crate::compare::trials::by_protocol;
use crate::compare::trials::process::SharedTrialSettings;
use crate::gate::comparison::Comparison;
use crate::gate::judgement::{CaseJudgement, PairedRoundsEvidence};
use crate::gate::kernels::explanation::{SlowdownExplanation, explain_slowdown};
use crate::gate::paired::{ComparedArm, PairedDecisionOnCase};
use crate::gate::verdict::VerdictOnCase;
use kernelgate::protocol::{CaseProfileResponse, RequestedBenchAction, ResponseToBenchAction};

/// Largest number of regressed cases of each bench that are profiled, largest slow-down first;
/// profiling prepares and verifies each case on both sides.
const MAX_PROFILED_CASES_PER_BENCH: usize = 4;

impl ComparisonEngine<'_> {
    /// Explains the regressed cases by profiles of both builds and differences in machine code.
    pub(super) fn explain_regressed_cases(
        &self,
        comparison: &Comparison,
        benches: &[ComparedBench],
    ) -> BTreeMap<String, SlowdownExplanation> {
        let regressed =
            comparison.judged_cases.iter().filter(|it| it.verdict == VerdictOnCase::Regressed);
        let decisions = regressed
            .filter_map(CaseJudgement::paired_evidence)
            .map(|PairedRoundsEvidence { first_round_decision: decision, .. }| decision);
        let mut slower: Vec<&PairedDecisionOnCase> = decisions.collect();
        slower.sort_by(|a, b| b.ratio.estimated_ratio.total_cmp(&a.ratio.estimated_ratio));
        let mut explanations = BTreeMap::new();
        for bench in benches {
            let of_bench = slower.iter().filter(|it| bench.compared_cases.contains(&it.case_id));
            let of_bench: Vec<&PairedDecisionOnCase> =
                of_bench.take(MAX_PROFILED_CASES_PER_BENCH).copied().collect();
            if of_bench.is_empty() {
                continue;
            }
            let cases = of_bench.iter().map(|it| it.case_id.clone()).collect();
            let profiles = self.profile_cases_in_both_builds(bench, &cases);
            for decision in of_bench {
                let case = &decision.case_id;
                let found = match &profiles {
                    Ok([base, head]) => find_profiles_in_both_builds(case, base, head),
                    Err(why) => Err(why.clone()),
                };
                let code = comparison.method_facts.kernel_comparisons_by_case.get(case);
                explanations.insert(case.clone(), explain_slowdown(decision, code, found));
            }
        }
        explanations
    }

    /// Profiles these cases of a bench in one process of the base and one of the head.
    fn profile_cases_in_both_builds(
        &self,
        bench: &ComparedBench,
        cases: &BTreeSet<String>,
    ) -> Result<[Vec<CaseProfileResponse>; 2], String> {
        if bench.control_method == BenchControlMethod::CriterionFlags {
            return Err("it uses Criterion alone".to_owned());
        }
        self.progress.show_current_step(&format!(
            "profiling {} slower cases of {}",
            cases.len(),
            bench.bench_name
        ));
        let filter = criterion::criterion_filter_for_cases(cases)
            .ok_or("the ids of its cases are too long")?;
        let profiles_of = |arm: ComparedArm| {
            let request =
                self.request_for_one_trial(bench, arm, "profile".to_owned(), cases.clone());
            let setup = SharedTrialSettings {
                criterion_filter: Some(&filter),
                ..self.shared_trial_setup()
            };
            self.describe_trial_process(arm, &bench.bench_name, &request, bench.process_timeout)
                .and_then(|trial| {
                    by_protocol::send_request_other_than_trial(
                        &setup,
                        &trial,
                        RequestedBenchAction::ProfileCases,
                    )
                })
                .and_then(|answer| match answer {
                    ResponseToBenchAction::Profile(cases) => Ok(cases),
                    _ => Err("it answered something else than it was asked".to_owned()),
                })
                .map_err(|why| format!("{arm}: {why}"))
        };
        Ok([profiles_of(ComparedArm::BaseBuild)?, profiles_of(ComparedArm::HeadBuild)?])
    }
}

/// Finds the profiles of a case in base and head, or those of the same implementation with the
/// other cache state (hot or cold).
fn find_profiles_in_both_builds<'a>(
    case: &str,
    base: &'a [CaseProfileResponse],
    head: &'a [CaseProfileResponse],
) -> Result<[&'a CaseProfileResponse; 2], String> {
    let implementation = |id: &str| id.rsplit_once('/').map(|(front, _)| front.to_owned());
    let find = |side: &'a [CaseProfileResponse], name: &str| {
        let same = side.iter().find(|it| it.case_id == case);
        let alike = || side.iter().find(|it| implementation(&it.case_id) == implementation(case));
        same.or_else(alike).ok_or_else(|| format!("the {name} recorded nothing of it"))
    };
    Ok([find(base, "base")?, find(head, "head")?])
}
