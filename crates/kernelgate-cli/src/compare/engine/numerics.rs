//! Decides whether the head lost accuracy, from the errors of both sides, for more seeds if
//! necessary.
//!
//! The processes that verified both sides record the errors of one seed and a hash of the outputs.
//! Outputs with the same bits on both sides are equally accurate, and an error that did not grow
//! for one seed is decided; all other cases are verified again on both sides with further seeds,
//! without timing. The additional verifying processes do not decide about the host time of a
//! launch: a suspected growth is measured again (`host_time`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{ComparisonEngine, index};
use crate::compare::session::{ComparedBench, PreparedSides};
use crate::compare::sides::copy_benches::BenchDriver;
use crate::compare::trials::trial_driver;
use crate::compare::{CompareError, SideInjection};
use crate::gate::costs::{self, CostBound, CostGrowth};
use crate::gate::kernels::code::CodeComparison;
use crate::gate::limits::{AskedLimits, CaseLimits};
use crate::gate::outputs::numerics::{self, NumericsReport};
use crate::gate::paired::Arm;
use crate::gate::rules::PackageRules;
use kernelgate::record::numerics::DataSetsByCase;
use kernelgate::record::run::VerificationRecord;
use kernelgate::record::{CaseNumerics, ProcessRun, TrialRequest, TrialSampling, file};
use kernelgate_cuda::CaseFailure;

/// Findings of both builds' verification other than times.
#[derive(Debug, Default)]
pub struct VerificationFindings {
    /// Errors against the reference.
    pub numerics: NumericsReport,
    /// Costs that grew.
    pub costs: Vec<CostGrowth>,
    /// The package's bounds on costs, each with the reason if it could not be judged.
    pub bounds: Vec<CostBound>,
    /// Comparison of the kernels of each case in both builds.
    pub code: BTreeMap<String, CodeComparison>,
    /// Cases that fail in the head with another seed, with the error.
    pub failed: BTreeMap<String, CaseFailure>,
}

/// Output errors of base and head, by case.
type ErrorsOfSides = BTreeMap<String, [CaseNumerics; 2]>;

impl ComparisonEngine<'_> {
    /// Compares the records of both verifications, and verifies with more seeds if necessary. Long
    /// because one pass over the cases compares code, costs and errors, and the seeds follow.
    #[expect(clippy::too_many_lines)]
    pub(super) fn numerics_findings(
        &self,
        prepared: &PreparedSides,
        (of_all, rules): (&CaseLimits, &PackageRules),
    ) -> Result<VerificationFindings, CompareError> {
        let started = Instant::now();
        let mut findings = VerificationFindings::default();
        let (mut errors, mut same) = (ErrorsOfSides::new(), 0);
        let mut inputs = VerifiedInputs::default();
        let mut seeds = BTreeMap::new();
        let ours = |bench: &&ComparedBench| matches!(bench.driver, BenchDriver::Protocol(_));
        for bench in prepared.benches.iter().filter(ours) {
            let base = file::read::<ProcessRun>(&bench.verified[0])?;
            let head = file::read::<ProcessRun>(&bench.verified[1])?;
            seeds.insert(bench.name.clone(), base.seed);
            for id in &bench.cases {
                let (Some(before), Some(now)) = (base.cases.get(id), head.cases.get(id)) else {
                    continue;
                };
                let costs = [before, now].map(|case| case.samples.costs_with_energy());
                let mut code = CodeComparison::compare_code(&before.kernels, &now.kernels);
                code.compare_command_counts(
                    before.samples.costs.commands,
                    now.samples.costs.commands,
                );
                // Cases on the host and cases of other code record no kernels.
                if code != CodeComparison::default() {
                    findings.code.insert(id.clone(), code);
                }
                // Energy is not judged, because trials are too short for the energy counter.
                let limits = AskedLimits { energy: None, ..rules.limits(id) };
                let (sides, on_host) = ([&costs[..1], &costs[1..]], head.environment.is_on_host());
                findings.costs.extend(costs::grown_costs(id, sides, &limits));
                findings.bounds.extend(costs::cost_bounds(id, sides, &limits, on_host));
                if have_identical_outputs(&before.verification, &now.verification) {
                    same += 1;
                    continue;
                }
                let numerics_of = |found: &VerificationRecord| {
                    let mut numerics = CaseNumerics::default();
                    numerics.insert_verified_case(base.seed, found);
                    numerics
                };
                inputs.is_new(id, [&before.verification, &now.verification]);
                errors.insert(
                    id.clone(),
                    [numerics_of(&before.verification), numerics_of(&now.verification)],
                );
            }
        }
        // A bench that uses Criterion alone records no costs.
        for bench in prepared.benches.iter().filter(|bench| !ours(bench)) {
            let none = |id: &String| {
                costs::criterion_cost_bounds(id, &AskedLimits { energy: None, ..rules.limits(id) })
            };
            findings.bounds.extend(bench.cases.iter().flat_map(none));
        }
        let judge = |errors: &ErrorsOfSides| {
            let cases = errors.iter().map(|(id, [base, head])| (id.as_str(), base, head));
            numerics::compare_numerics(cases, |case| rules.resolve(case, of_all).growth.value)
        };
        let mut report = judge(&errors);
        let needed = numerics::necessary_seeds(report.changed_outputs);
        for more in 1..needed as u64 {
            let more_to_know = report.grown.iter().filter(|it| !it.one_data_set);
            let open: BTreeSet<String> = more_to_know.map(|it| it.case.clone()).collect();
            if open.is_empty() || started.elapsed() > self.request.budget {
                break;
            }
            self.progress.detail(&format!(
                "{} cases may be less accurate: seed {} of {needed}",
                open.len(),
                more + 1
            ));
            for bench in prepared.benches.iter().filter(ours) {
                let cases: BTreeSet<String> = bench.cases.intersection(&open).cloned().collect();
                if !cases.is_empty() {
                    let seed = seeds[&bench.name].wrapping_add(more);
                    self.verify_with_another_seed(
                        bench,
                        &cases,
                        seed,
                        &mut errors,
                        &mut findings,
                        &mut inputs,
                    );
                }
            }
            report = judge(&errors);
        }
        for id in &inputs.repeated {
            let one = ["base", "head"]
                .iter()
                .any(|arm| inputs.sets.has_one_data_set(&arm_and_case_id(arm, id)));
            let both = errors.get_mut(id).into_iter().flatten();
            both.for_each(|it| it.one_data_set |= one);
        }
        report = judge(&errors);
        report.compared += same;
        findings.numerics = report;
        findings.costs = self.measure_host_time_again(prepared, findings.costs, started);
        Ok(findings)
    }

    /// Verifies both sides with another seed and adds the errors, unless the seed's inputs equal
    /// those of an earlier seed. A case that one side cannot verify gets no errors; if the head
    /// fails, its verdict is final.
    fn verify_with_another_seed(
        &self,
        bench: &ComparedBench,
        cases: &BTreeSet<String>,
        seed: u64,
        errors: &mut ErrorsOfSides,
        findings: &mut VerificationFindings,
        inputs: &mut VerifiedInputs,
    ) {
        let runs =
            [Arm::Base, Arm::Head].map(|arm| self.verify_arm_with_seed(arm, bench, cases, seed));
        for id in cases {
            let found = |arm: Arm| {
                let run = runs[index(arm)].as_ref()?;
                Some(&run.cases.get(id)?.verification)
            };
            if let (Some(base), Some(head), Some(known)) =
                (found(Arm::Base), found(Arm::Head), errors.get_mut(id))
            {
                if inputs.is_new(id, [base, head]) {
                    known[0].insert_verified_case(seed, base);
                    known[1].insert_verified_case(seed, head);
                } else {
                    inputs.repeated.insert(id.clone());
                }
            }
            let wrong = runs[1].as_ref().and_then(|run| run.failed.get(id));
            let wrong_before = runs[0].as_ref().is_none_or(|run| run.failed.contains_key(id));
            if let Some(why) = wrong.filter(|_| !wrong_before) {
                errors.remove(id);
                let text = format!("with seed {seed}: {why}");
                findings.failed.insert(id.clone(), why.clone().with_text(text));
            }
        }
    }

    /// Runs a process that verifies some cases with a seed. If the process fails, prints the error
    /// and returns `None`.
    fn verify_arm_with_seed(
        &self,
        arm: Arm,
        bench: &ComparedBench,
        cases: &BTreeSet<String>,
        seed: u64,
    ) -> Option<ProcessRun> {
        let request = TrialRequest {
            cases: Some(cases.clone()),
            ..TrialRequest::new(
                format!("verify-seed-{seed}"),
                self.session.work.join("seed.json"),
                TrialSampling::VERIFICATION_SAMPLING,
            )
        };
        let mut settings = self.request.settings.clone();
        settings.insert("KERNELGATE_SEED".to_owned(), seed.to_string());
        let run =
            self.describe_trial(arm, &bench.name, &request, bench.timeout).and_then(|mut trial| {
                trial.injection = SideInjection::default();
                trial_driver::run(
                    &crate::compare::trials::process::TrialSetup {
                        settings: &settings,
                        ..self.setup()
                    },
                    &trial,
                )
            });
        run.unwrap_or_else(|why| {
            self.progress.say(&format!("error: {arm} {} with seed {seed}: {why}", bench.name));
            None
        })
    }
}

fn arm_and_case_id(arm: &str, id: &str) -> String {
    format!("{arm} {id}")
}

/// Inputs with which the cases of both sides were verified so far.
#[derive(Default)]
struct VerifiedInputs {
    /// Inputs of the cases of each arm, by [`arm_and_case_id`].
    sets: DataSetsByCase,
    /// Cases whose inputs did not change with another seed.
    repeated: BTreeSet<String>,
}

impl VerifiedInputs {
    /// Records the inputs of both sides; returns whether both differ from the inputs of earlier
    /// seeds.
    fn is_new(&mut self, id: &str, verified: [&VerificationRecord; 2]) -> bool {
        let note = |(arm, found): (&str, &VerificationRecord)| {
            self.sets.is_new_data_set(&arm_and_case_id(arm, id), found.data_set.as_deref())
        };
        ["base", "head"].into_iter().zip(verified).map(note).fold(true, |all, new| all & new)
    }
}

/// Returns whether both sides computed bit-identical outputs from equal inputs.
fn have_identical_outputs(base: &VerificationRecord, head: &VerificationRecord) -> bool {
    base.digest.is_some() && base.digest == head.digest
}
