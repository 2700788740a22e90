//! Profiles both builds once for the cases that regressed, after all verdicts are final, to explain
//! why these cases are slower. The explanation costs one process for each bench and side, and
//! changes no verdict.

use std::collections::{BTreeMap, BTreeSet};

use super::ComparisonEngine;
use crate::benches::criterion;
use crate::compare::session::ComparedBench;
use crate::compare::sides::copy_benches::BenchDriver;
use crate::compare::trials::by_protocol;
use crate::compare::trials::process::TrialSetup;
use crate::gate::comparison::Comparison;
use crate::gate::judgement::{Judgement, PairEvidence};
use crate::gate::kernels::explanation::{ChangeExplanation, explain_change};
use crate::gate::paired::{Arm, PairedDecision};
use crate::gate::verdict::Verdict;
use kernelgate::protocol::{BenchResponseBody, ProfiledCase, RequestedAction};

/// Maximum number of cases of a bench that are profiled, the slowest changes first: each case is
/// prepared and verified on both sides.
const MAX_PROFILED_CASES: usize = 4;

impl ComparisonEngine<'_> {
    /// Explains the cases that regressed, by profiles of both builds.
    pub(super) fn explain_changes(
        &self,
        comparison: &Comparison,
        benches: &[ComparedBench],
    ) -> BTreeMap<String, ChangeExplanation> {
        let regressed = comparison.judged.iter().filter(|it| it.verdict == Verdict::Regressed);
        let decisions =
            regressed.filter_map(Judgement::pairs).map(|PairEvidence { decision, .. }| decision);
        let mut slower: Vec<&PairedDecision> = decisions.collect();
        slower.sort_by(|a, b| b.ratio.center.total_cmp(&a.ratio.center));
        let mut explanations = BTreeMap::new();
        for bench in benches {
            let of_bench = slower.iter().filter(|it| bench.cases.contains(&it.case));
            let of_bench: Vec<&PairedDecision> =
                of_bench.take(MAX_PROFILED_CASES).copied().collect();
            if of_bench.is_empty() {
                continue;
            }
            let cases = of_bench.iter().map(|it| it.case.clone()).collect();
            let profiles = self.profile_cases(bench, &cases);
            for decision in of_bench {
                let case = &decision.case;
                let found = match &profiles {
                    Ok([base, head]) => profiles_of_case(case, base, head),
                    Err(why) => Err(why.clone()),
                };
                let code = comparison.facts.code.get(case);
                explanations.insert(case.clone(), explain_change(decision, code, found));
            }
        }
        explanations
    }

    /// Profiles the cases of a bench in base and head.
    fn profile_cases(
        &self,
        bench: &ComparedBench,
        cases: &BTreeSet<String>,
    ) -> Result<[Vec<ProfiledCase>; 2], String> {
        if bench.driver == BenchDriver::Criterion {
            return Err("it uses Criterion alone".to_owned());
        }
        self.progress.show_step(&format!(
            "profiling {} slower cases of {}",
            cases.len(),
            bench.name
        ));
        let filter =
            criterion::regex_for_cases(cases).ok_or("the ids of its cases are too long")?;
        let profiles_of = |arm: Arm| {
            let request = self.trial_request(bench, arm, "profile".to_owned(), cases.clone());
            let setup = TrialSetup { filter: Some(&filter), ..self.setup() };
            self.describe_trial(arm, &bench.name, &request, bench.timeout)
                .and_then(|trial| {
                    by_protocol::ask_executable(&setup, &trial, RequestedAction::Profile)
                })
                .and_then(|answer| match answer {
                    BenchResponseBody::Profile(cases) => Ok(cases),
                    _ => Err("it answered something else than it was asked".to_owned()),
                })
                .map_err(|why| format!("{arm}: {why}"))
        };
        Ok([profiles_of(Arm::Base)?, profiles_of(Arm::Head)?])
    }
}

/// Returns both builds' profiles of a case, or of its implementation with the other cache state.
fn profiles_of_case<'a>(
    case: &str,
    base: &'a [ProfiledCase],
    head: &'a [ProfiledCase],
) -> Result<[&'a ProfiledCase; 2], String> {
    let implementation = |id: &str| id.rsplit_once('/').map(|(front, _)| front.to_owned());
    let find = |side: &'a [ProfiledCase], name: &str| {
        let same = side.iter().find(|it| it.case == case);
        let alike = || side.iter().find(|it| implementation(&it.case) == implementation(case));
        same.or_else(alike).ok_or_else(|| format!("the {name} recorded nothing of it"))
    };
    Ok([find(base, "base")?, find(head, "head")?])
}
