//! Decides whether the head's outputs lost accuracy: compares the errors of base and head against
//! the reference, with further seeds if necessary.
//!
//! The processes that verified base and head record, for one seed, each case's error against the
//! reference and a hash of its outputs. Cases with bit-identical outputs or with an error that did
//! not grow need no further seed; other cases are verified again on both sides with further seeds,
//! untimed. The launch times of the processes with further seeds do not count, because `host_time`
//! measures a suspected growth of launch time again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{ComparisonEngine, index_of_side};
use crate::compare::session::{ComparedBench, PreparedSides};
use crate::compare::sides::copy_benches::BenchControlMethod;
use crate::compare::trials::trial_driver;
use crate::compare::{CompareError, InjectedHeadChanges};
use crate::gate::costs::{self, LaunchCostGrowthOfCase, LaunchCostLimitOfCase};
use crate::gate::kernels::code::CaseKernelComparison;
use crate::gate::limits::{CaseTimeAndErrorLimits, RequestedLimits};
use crate::gate::outputs::numerics::{self, OutputErrorReport};
use crate::gate::paired::ComparedArm;
use crate::gate::rules::PackageGateRules;
use kernelgate::record::numerics::VerifiedDataSetsByCase;
use kernelgate::record::run::OutputVerificationRecord;
use kernelgate::record::{
    BenchProcessRun, CaseOutputErrorsBySeed, TrialRequestToBench, TrialSamplingPlan, file,
};
use kernelgate_cuda::CaseFailureReason;

/// Findings from the processes that verified base and head, apart from the timing verdicts:
/// accuracy, costs, machine code and failures.
#[derive(Debug, Default)]
pub struct VerificationFindings {
    /// Output errors of base and head against the reference.
    pub numerics: OutputErrorReport,
    /// Costs that grew.
    pub grown_costs: Vec<LaunchCostGrowthOfCase>,
    /// The package's upper bounds on costs, each with the reason if it could not be judged.
    pub cost_limits: Vec<LaunchCostLimitOfCase>,
    /// Comparison of the kernels' machine code of each case between base and head.
    pub kernel_comparisons_by_case: BTreeMap<String, CaseKernelComparison>,
    /// Cases whose verification fails in the head with a further seed, each with the error.
    pub failed_cases: BTreeMap<String, CaseFailureReason>,
}

/// Errors of base and head against the reference, by case.
type BaseAndHeadErrorsByCase = BTreeMap<String, [CaseOutputErrorsBySeed; 2]>;

impl ComparisonEngine<'_> {
    /// Compares the records of the processes that verified base and head, and verifies cases with
    /// further seeds if necessary. The function `compare_verification_records` is long because one
    /// loop over the cases compares machine code, costs and errors, and the loop over seeds
    /// follows.
    #[expect(clippy::too_many_lines)]
    pub(super) fn compare_verification_records(
        &self,
        prepared: &PreparedSides,
        (of_all, rules): (&CaseTimeAndErrorLimits, &PackageGateRules),
    ) -> Result<VerificationFindings, CompareError> {
        let started = Instant::now();
        let mut findings = VerificationFindings::default();
        let (mut errors, mut same) = (BaseAndHeadErrorsByCase::new(), 0);
        let mut inputs = InputsVerifiedSoFar::default();
        let mut seeds = BTreeMap::new();
        let ours = |bench: &&ComparedBench| {
            matches!(bench.control_method, BenchControlMethod::ProtocolVersion(_))
        };
        for bench in prepared.benches.iter().filter(ours) {
            let base = file::read_record::<BenchProcessRun>(&bench.verified[0])?;
            let head = file::read_record::<BenchProcessRun>(&bench.verified[1])?;
            seeds.insert(bench.bench_name.clone(), base.seed);
            for id in &bench.compared_cases {
                let (Some(before), Some(now)) = (base.cases.get(id), head.cases.get(id)) else {
                    continue;
                };
                let costs = [before, now].map(|case| case.samples.launch_costs_with_energy());
                let mut code =
                    CaseKernelComparison::compare_used_kernels(&before.kernels, &now.kernels);
                code.add_command_count_difference(
                    before.samples.costs.gpu_commands,
                    now.samples.costs.gpu_commands,
                );
                // No comparison of machine code is stored for cases on the CPU and for cases whose
                // code does not list its kernels.
                if code != CaseKernelComparison::default() {
                    findings.kernel_comparisons_by_case.insert(id.clone(), code);
                }
                // Energy is not judged in a comparison, because its trials are too short for the
                // GPU's energy counter.
                let limits = RequestedLimits {
                    energy_growth_threshold: None,
                    ..rules.threshold_limits_for_case(id)
                };
                let (sides, on_host) = ([&costs[..1], &costs[1..]], head.environment.is_cpu_run());
                findings.grown_costs.extend(costs::costs_grown_beyond_limits(id, sides, &limits));
                findings
                    .cost_limits
                    .extend(costs::cost_limits_of_case(id, sides, &limits, on_host));
                if are_outputs_bit_identical(&before.verification, &now.verification) {
                    same += 1;
                    continue;
                }
                let numerics_of = |found: &OutputVerificationRecord| {
                    let mut numerics = CaseOutputErrorsBySeed::default();
                    numerics.add_errors_of_verified_case(base.seed, found);
                    numerics
                };
                inputs.add_if_both_inputs_are_new(id, [&before.verification, &now.verification]);
                errors.insert(
                    id.clone(),
                    [numerics_of(&before.verification), numerics_of(&now.verification)],
                );
            }
        }
        // A bench that uses Criterion without kernelgate records no costs.
        for bench in prepared.benches.iter().filter(|bench| !ours(bench)) {
            let none = |id: &String| {
                costs::cost_limits_of_criterion_case(
                    id,
                    &RequestedLimits {
                        energy_growth_threshold: None,
                        ..rules.threshold_limits_for_case(id)
                    },
                )
            };
            findings.cost_limits.extend(bench.compared_cases.iter().flat_map(none));
        }
        let judge = |errors: &BaseAndHeadErrorsByCase| {
            let cases = errors.iter().map(|(id, [base, head])| (id.as_str(), base, head));
            numerics::compare_output_errors(cases, |case| {
                rules.limits_of_case(case, of_all).output_error_growth_threshold.limit_value
            })
        };
        let mut report = judge(&errors);
        let needed = numerics::seeds_needed_for_changed_outputs(report.outputs_with_changed_errors);
        for more in 1..needed as u64 {
            let more_to_know =
                report.error_growths.iter().filter(|it| !it.seeds_share_one_data_set);
            let open: BTreeSet<String> = more_to_know.map(|it| it.case_id.clone()).collect();
            if open.is_empty() || started.elapsed() > self.request.round_time_budget {
                break;
            }
            self.progress.print_detail(&format!(
                "{} cases may be less accurate: seed {} of {needed}",
                open.len(),
                more + 1
            ));
            for bench in prepared.benches.iter().filter(ours) {
                let cases: BTreeSet<String> =
                    bench.compared_cases.intersection(&open).cloned().collect();
                if !cases.is_empty() {
                    let seed = seeds[&bench.bench_name].wrapping_add(more);
                    self.verify_both_sides_with_seed(
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
        for id in &inputs.cases_with_repeated_inputs {
            let one = ["base", "head"].iter().any(|arm| {
                inputs.data_sets.has_equal_data_for_all_seeds(&key_of_side_and_case(arm, id))
            });
            let both = errors.get_mut(id).into_iter().flatten();
            both.for_each(|it| it.seeds_have_equal_data |= one);
        }
        report = judge(&errors);
        report.compared_cases += same;
        findings.numerics = report;
        findings.grown_costs =
            self.confirm_grown_host_launch_times(prepared, findings.grown_costs, started);
        Ok(findings)
    }

    /// Verifies these cases on both sides with another seed and adds their errors, unless the seed
    /// gave the same inputs as an earlier seed. A case that one side cannot verify with this seed
    /// gets no errors; a case that fails in the head only is reported as failed.
    fn verify_both_sides_with_seed(
        &self,
        bench: &ComparedBench,
        cases: &BTreeSet<String>,
        seed: u64,
        errors: &mut BaseAndHeadErrorsByCase,
        findings: &mut VerificationFindings,
        inputs: &mut InputsVerifiedSoFar,
    ) {
        let runs = [ComparedArm::BaseBuild, ComparedArm::HeadBuild]
            .map(|arm| self.verify_one_side_with_seed(arm, bench, cases, seed));
        for id in cases {
            let found = |arm: ComparedArm| {
                let run = runs[index_of_side(arm)].as_ref()?;
                Some(&run.cases.get(id)?.verification)
            };
            if let (Some(base), Some(head), Some(known)) =
                (found(ComparedArm::BaseBuild), found(ComparedArm::HeadBuild), errors.get_mut(id))
            {
                if inputs.add_if_both_inputs_are_new(id, [base, head]) {
                    known[0].add_errors_of_verified_case(seed, base);
                    known[1].add_errors_of_verified_case(seed, head);
                } else {
                    inputs.cases_with_repeated_inputs.insert(id.clone());
                }
            }
            let wrong = runs[1].as_ref().and_then(|run| run.failed.get(id));
            let wrong_before = runs[0].as_ref().is_none_or(|run| run.failed.contains_key(id));
            if let Some(why) = wrong.filter(|_| !wrong_before) {
                errors.remove(id);
                let text = format!("with seed {seed}: {why}");
                findings.failed_cases.insert(id.clone(), why.clone().with_failure_sentence(text));
            }
        }
    }

    /// Runs one process of one side (base or head) that verifies these cases with the given seed.
    /// If the process that verifies with this seed fails, prints its error and returns `None`.
    fn verify_one_side_with_seed(
        &self,
        arm: ComparedArm,
        bench: &ComparedBench,
        cases: &BTreeSet<String>,
        seed: u64,
    ) -> Option<BenchProcessRun> {
        let request = TrialRequestToBench {
            case_ids_to_run: Some(cases.clone()),
            ..TrialRequestToBench::for_all_selected_cases(
                format!("verify-seed-{seed}"),
                self.session.trial_files_folder.join("seed.json"),
                TrialSamplingPlan::ONE_SAMPLE_FOR_VERIFICATION,
            )
        };
        let mut settings = self.request.bench_variables.clone();
        settings.insert("KERNELGATE_SEED".to_owned(), seed.to_string());
        let run = self
            .describe_trial_process(arm, &bench.bench_name, &request, bench.process_timeout)
            .and_then(|mut trial| {
                trial.injection = InjectedHeadChanges::default();
                trial_driver::run_trial(
                    &crate::compare::trials::process::SharedTrialSettings {
                        bench_variables: &settings,
                        ..self.shared_trial_setup()
                    },
                    &trial,
                )
            });
        run.unwrap_or_else(|why| {
            self.progress
                .print_line(&format!("error: {arm} {} with seed {seed}: {why}", bench.bench_name));
            None
        })
    }
}

fn key_of_side_and_case(arm: &str, id: &str) -> String {
    format!("{arm} {id}")
}

/// Hashes of the inputs with which the cases of base and head were verified so far, to detect seeds
/// that change no input.
#[derive(Default)]
struct InputsVerifiedSoFar {
    /// Inputs with which each side verified each case, by the key of [`key_of_side_and_case`].
    data_sets: VerifiedDataSetsByCase,
    /// Cases whose inputs stayed equal although the seed changed.
    cases_with_repeated_inputs: BTreeSet<String>,
}

impl InputsVerifiedSoFar {
    /// Records the inputs with which base and head verified a case; returns whether both differ
    /// from the inputs of all earlier seeds.
    fn add_if_both_inputs_are_new(
        &mut self,
        id: &str,
        verified: [&OutputVerificationRecord; 2],
    ) -> bool {
        let note = |(arm, found): (&str, &OutputVerificationRecord)| {
            self.data_sets.record_data_set_and_check_if_new(
                &key_of_side_and_case(arm, id),
                found.verified_data_set.as_deref(),
            )
        };
        ["base", "head"].into_iter().zip(verified).map(note).fold(true, |all, new| all & new)
    }
}

/// Returns whether base and head computed bit-identical outputs of a case from equal inputs.
fn are_outputs_bit_identical(
    base: &OutputVerificationRecord,
    head: &OutputVerificationRecord,
) -> bool {
    base.output_bits_hash.is_some() && base.output_bits_hash == head.output_bits_hash
}
