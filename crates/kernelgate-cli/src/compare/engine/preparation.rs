//! Runs the first process of each bench executable, which verifies (kernelgate) or lists
//! (Criterion) its cases, and finds the cases that both sides have.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::rounds;
use super::{ComparisonEngine, index_of_side};
use crate::compare::session::{ComparedBench, PreparedSides};
use crate::compare::sides::copy_benches::{BenchControlMethod, CopiedBenchExecutable};
use crate::compare::trials::by_criterion::{self, CriterionListFailure};
use crate::compare::trials::expected_record::FactsOfVerifiedRun;
use crate::compare::{BuildComparisonRequest, CompareError};
use crate::gate::comparison::CriterionOnlyBench;
use crate::gate::inconclusive_reason::{InconclusiveReason, MeasurementFailureOnSide};
use crate::gate::paired::ComparedArm;
use kernelgate::measure::power::PowerStateOfSamples;
use kernelgate::record::{
    BenchProcessRun, OutputVerificationExtent, ProblemsDividedAmongShards, ShardOfWork,
    TrialRequestToBench, TrialSamplingPlan, file,
};

/// Timeout of a process that only verifies; the CPU reference may take long.
pub(super) const VERIFICATION_TIMEOUT: Duration = Duration::from_secs(1800);
/// Timeout of a process that only lists its cases.
const CASE_LISTING_TIMEOUT: Duration = Duration::from_secs(60);
/// The timeout of a timing process is `MIN_TIMING_PROCESS_TIMEOUT` plus ten times the duration of
/// the process that verified the bench.
const MIN_TIMING_PROCESS_TIMEOUT: Duration = Duration::from_secs(60);

/// The run record of an executable's first process, which verified its cases, or for Criterion
/// measured them once.
struct FirstProcessRun {
    run: BenchProcessRun,
    run_record_path: PathBuf,
    process_wall_time: Duration,
    control_method: BenchControlMethod,
    /// Number of cases that all shards of the comparison have together.
    cases_of_all_shards: usize,
}

/// Reason why the first process of an executable gave no run record.
enum FirstProcessFailure {
    /// This side (base or head) does not have the bench.
    SideLacksBench,
    /// The bench failed, and its failure was already recorded; the set holds the ids of the cases
    /// that it listed before.
    BenchFailedWithListedCases(BTreeSet<String>),
    /// The bench has none of the requested cases; the text is the bench's message.
    NoMatchingCase(String),
    /// The bench understands neither kernelgate's bench protocol nor Criterion's flags; the text
    /// states the reason.
    UnsupportedHarness(String),
}

impl ComparisonEngine<'_> {
    /// Runs the first process of each bench executable of both sides, and matches the cases of base
    /// and head.
    pub fn verify_and_match_sides(&mut self) -> Result<PreparedSides, CompareError> {
        let mut prepared = PreparedSides::default();
        let names: BTreeSet<String> = self
            .session
            .sides
            .iter()
            .flat_map(|side| side.executables.runnable_benches.keys().cloned())
            .collect();
        let mut errors = Vec::new();
        for name in &names {
            let (mut undrivable, mut listed) = (None, BTreeSet::new());
            let mut verified =
                [ComparedArm::BaseBuild, ComparedArm::HeadBuild].map(|arm| {
                    match self.run_first_process_of_bench(arm, name) {
                        Ok(verified) => Some(verified),
                        Err(FirstProcessFailure::SideLacksBench) => None,
                        Err(FirstProcessFailure::BenchFailedWithListedCases(cases)) => {
                            listed.extend(cases);
                            None
                        }
                        Err(FirstProcessFailure::NoMatchingCase(why)) => {
                            errors.push(why);
                            None
                        }
                        Err(FirstProcessFailure::UnsupportedHarness(why)) => {
                            self.progress
                                .print_line(&format!("left alone: {name} of the {arm}: {why}"));
                            undrivable = Some(InconclusiveReason::UnsupportedBenchHarness(
                                MeasurementFailureOnSide::in_side_with_reason(arm, why.as_str()),
                            ));
                            self.unusable_benches.insert(name.clone(), why);
                            None
                        }
                    }
                });
            for verified in verified.iter().flatten() {
                prepared.store_facts_shared_by_benches(verified);
            }
            self.match_cases_of_bench(&mut prepared, name, &mut verified, undrivable);
            prepared
                .matched_cases
                .record_listed_cases_of_failed_bench(listed, || self.failure_reason_of_bench(name));
        }
        if let Some(note) = settings_without_effect_note(self.request, &prepared) {
            self.progress.print_detail(&note);
        }
        if prepared.environment.is_none() && self.failed_benches.is_empty() {
            let undrivable = self
                .unusable_benches
                .iter()
                .next()
                .map(|(bench, why)| format!("bench `{bench}`: {why}"));
            let why = errors.into_iter().next().or(undrivable);
            return Err(
                why.map_or(CompareError::NoRequestedCase, CompareError::BenchHasNoRequestedCase)
            );
        }
        Ok(prepared)
    }

    /// Matches the cases of one bench in base and head, and keeps the data that its trials need.
    fn match_cases_of_bench(
        &self,
        prepared: &mut PreparedSides,
        name: &str,
        verified: &mut [Option<FirstProcessRun>; 2],
        undrivable: Option<InconclusiveReason>,
    ) {
        let error = self.failure_reason_of_bench(name);
        for run in verified.iter_mut().flatten() {
            prepared.matched_cases.remove_cases_owned_by_other_bench(
                &mut run.run,
                &prepared.bench_of_case,
                name,
            );
        }
        let before = prepared.matched_cases.judged_cases.clone();
        self.verify_head_against_base_outputs(name, verified);
        let [base, head] = [&verified[0], &verified[1]].map(|side| side.as_ref().map(|it| &it.run));
        match error.or(undrivable).as_ref() {
            Some(why) => prepared.matched_cases.record_cases_of_failed_bench(base, head, why),
            None => prepared.matched_cases.match_cases_of_runs(base, head),
        }
        if verified
            .iter()
            .flatten()
            .all(|side| side.control_method == BenchControlMethod::CriterionFlags)
        {
            prepared.matched_cases.record_cases_skipped_by_both(base, head);
        }
        for run in [base, head].into_iter().flatten() {
            let ids = run.cases.keys().chain(run.failed.keys()).chain(run.skipped.keys());
            for id in ids {
                prepared.bench_of_case.entry(id.clone()).or_insert_with(|| name.to_owned());
            }
        }
        let [Some(base), Some(head)] = verified else { return };
        prepared.cases_of_all_shards += base.cases_of_all_shards.min(head.cases_of_all_shards);
        let both = head.run.cases.iter().filter_map(|(id, head)| {
            let values =
                [base.run.cases.get(id)?, head].map(|case| case.verification.verification_extent());
            Some((id.clone(), values))
        });
        prepared.verification.extend(both);
        let requested = self.request.sampling;
        let sampling = if base.run.environment.is_cpu_run() {
            requested.unwrap_or(TrialSamplingPlan::SAMPLING_ON_HOST)
        } else {
            requested.map_or(
                TrialSamplingPlan::SAMPLING_ON_GPU,
                TrialSamplingPlan::with_sample_count_for_gpu,
            )
        };
        let cases: BTreeSet<String> =
            prepared.matched_cases.judged_cases.difference(&before).cloned().collect();
        let burst =
            self.request.bench_variables.get("KERNELGATE_POWER").is_some_and(|it| it == "burst");
        let power = if burst {
            PowerStateOfSamples::BurstsAfterPauses
        } else {
            PowerStateOfSamples::SteadyUnderLoad
        };
        let driver =
            BenchControlMethod::common_to_both_sides(base.control_method, head.control_method);
        let power = (driver != BenchControlMethod::CriterionFlags).then_some(power);
        let timeout =
            MIN_TIMING_PROCESS_TIMEOUT + 10 * base.process_wall_time.max(head.process_wall_time);
        let bench = ComparedBench {
            bench_name: name.to_owned(),
            verified: [base.run_record_path.clone(), head.run_record_path.clone()],
            expected: [&*base, &*head]
                .map(|side| FactsOfVerifiedRun::from_verified_run(&side.run, &cases, power)),
            compared_cases: cases,
            process_timeout: self.request.process_timeout.unwrap_or(timeout),
            sampling,
            control_method: driver,
            cases_timed_first: BTreeSet::new(),
        };
        if bench.control_method == BenchControlMethod::CriterionFlags
            && !bench.compared_cases.is_empty()
        {
            let found = facts_of_criterion_bench(&bench, head);
            self.progress.print_detail(&found.describe_cost());
            prepared.criterion_benches.push(found);
        }
        prepared.benches.push(bench);
    }

    /// Runs the first process of an executable, which verifies every case against the reference. If
    /// base and head have the same executable and the same sources, including files such as golden
    /// tensors, the base's verification also counts for the head.
    fn run_first_process_of_bench(
        &mut self,
        arm: ComparedArm,
        bench: &str,
    ) -> Result<FirstProcessRun, FirstProcessFailure> {
        let Some(executable) =
            self.session.sides[index_of_side(arm)].executables.runnable_benches.get(bench).cloned()
        else {
            return Err(FirstProcessFailure::SideLacksBench);
        };
        let path = self.verification_record_path(arm, bench);
        let driver = executable.control_method;
        let sources = &self.session.sides[index_of_side(arm)].checkout_commit;
        let earlier_run = |path: PathBuf| {
            let run = file::read_record::<BenchProcessRun>(&path).ok()?;
            // Whether the source files that the executable may have read belong to the recorded
            // commit.
            let read = sources.is_none() || run.provenance.commit == *sources;
            let same = read
                && run.ended_normally
                && run.executable_hash.as_ref() == Some(&executable.executable_hash);
            // Duration of the earlier process that verified the outputs.
            let took = Duration::from_secs_f64(
                run.wall_s_by_activity.get("whole").copied().unwrap_or(0.0),
            );
            let planned = case_count_of_all_shards(&run);
            same.then_some(FirstProcessRun {
                run,
                run_record_path: path,
                process_wall_time: took,
                control_method: driver,
                cases_of_all_shards: planned,
            })
        };
        let [base, head] = &self.session.sides;
        let twin = arm == ComparedArm::HeadBuild
            && base.checkout_commit == head.checkout_commit
            && base
                .executables
                .runnable_benches
                .get(bench)
                .is_some_and(|base| base.has_same_contents_and_driver(&executable));
        // Only a resumed comparison accepts an earlier verification of the executable; any other
        // comparison verifies again.
        let earlier = if twin {
            self.verification_record_path(ComparedArm::BaseBuild, bench)
        } else {
            path.clone()
        };
        if (twin || !self.trials_file.trials.is_empty())
            && let Some(found) = earlier_run(earlier)
        {
            return Ok(found);
        }
        match driver {
            BenchControlMethod::ProtocolVersion(_) => {
                self.verify_kernelgate_bench(arm, bench, path, driver)
            }
            BenchControlMethod::CriterionFlags => {
                self.list_and_measure_criterion_bench(arm, &executable, path)
            }
        }
    }

    fn verify_kernelgate_bench(
        &mut self,
        arm: ComparedArm,
        bench: &str,
        path: PathBuf,
        driver: BenchControlMethod,
    ) -> Result<FirstProcessRun, FirstProcessFailure> {
        self.progress.show_current_step(&format!("verifying {arm} {bench}"));
        // The stored outputs must come from the base's current executable, because outputs of
        // another executable are not a reference.
        let of_base = self.session.sides[index_of_side(ComparedArm::BaseBuild)]
            .executables
            .runnable_benches
            .get(bench);
        let outputs = of_base.map(|base| {
            self.session.trial_files_folder.join("outputs").join(&base.executable_hash)
        });
        let request = TrialRequestToBench {
            inputs_folder: Some(self.input_folder_of_side(arm)),
            kept_outputs_folder: outputs.clone().filter(|_| arm == ComparedArm::BaseBuild),
            base_outputs_folder: outputs.filter(|_| arm == ComparedArm::HeadBuild),
            measure_anchor_rates: self.request.shard.is_some(),
            ..TrialRequestToBench::for_all_selected_cases(
                "verify",
                path.clone(),
                TrialSamplingPlan::ONE_SAMPLE_FOR_VERIFICATION,
            )
        };
        let started = Instant::now();
        let timeout = self.request.process_timeout.unwrap_or(VERIFICATION_TIMEOUT);
        match self.run_trial_process(arm, bench, &request, timeout) {
            Ok(Some(run)) => {
                let (took, planned) = (started.elapsed(), case_count_of_all_shards(&run));
                Ok(FirstProcessRun {
                    run,
                    run_record_path: path,
                    process_wall_time: took,
                    control_method: driver,
                    cases_of_all_shards: planned,
                })
            }
            Ok(None) => Err(FirstProcessFailure::SideLacksBench),
            Err(reason) => Err(match reason.find("no case matches") {
                Some(at) => FirstProcessFailure::NoMatchingCase(reason[at..].to_owned()),
                None => self.abandon_failed_bench(arm, bench, reason, BTreeSet::new()),
            }),
        }
    }

    /// Runs the first two processes of a bench that uses Criterion without kernelgate: one lists
    /// its cases, one measures them as later trials do, which shows their duration.
    fn list_and_measure_criterion_bench(
        &mut self,
        arm: ComparedArm,
        executable: &CopiedBenchExecutable,
        path: PathBuf,
    ) -> Result<FirstProcessRun, FirstProcessFailure> {
        let bench = &*executable.bench_name;
        self.progress.show_current_step(&format!("trying {arm} {bench}"));
        let slot = match self.session.folder.link_slot_to_side(arm) {
            Ok(slot) => slot,
            Err(error) => {
                return Err(self.abandon_failed_bench(
                    arm,
                    bench,
                    error.to_string(),
                    BTreeSet::new(),
                ));
            }
        };
        let package = self.session.sides[index_of_side(arm)].package_folder_of_bench(bench).clone();
        let program = slot.join("bin").join(bench);
        let timeout = self.request.process_timeout.unwrap_or(CASE_LISTING_TIMEOUT);
        let listed = match by_criterion::list_criterion_cases(
            &self.shared_trial_setup(),
            (&program, &package),
            timeout,
        ) {
            Ok(listed) => listed,
            Err(CriterionListFailure::UnsupportedHarness(why)) => {
                return Err(FirstProcessFailure::UnsupportedHarness(why));
            }
            Err(CriterionListFailure::ProcessFailed(why)) => {
                return Err(self.abandon_failed_bench(arm, bench, why, BTreeSet::new()));
            }
        };
        let request = TrialRequestToBench::for_all_selected_cases(
            "verify",
            path.clone(),
            self.request.sampling.unwrap_or(TrialSamplingPlan::SAMPLING_ON_HOST),
        );
        let started = Instant::now();
        let timeout = self.request.process_timeout.unwrap_or(VERIFICATION_TIMEOUT);
        let run = self.describe_trial_process(arm, bench, &request, timeout).and_then(|trial| {
            by_criterion::measure_listed_criterion_cases(
                &self.shared_trial_setup(),
                &trial,
                &listed,
            )
        });
        let mut run = match run {
            Ok(run) => run,
            Err(reason) => {
                let cases =
                    listed.case_ids_matching_filter(self.request.criterion_filter.as_deref());
                return Err(self.abandon_failed_bench(arm, bench, reason, cases));
            }
        };
        if run.cases.is_empty() {
            return Err(match (&self.request.criterion_filter, run.skipped.first_key_value()) {
                (Some(filter), None) => {
                    FirstProcessFailure::NoMatchingCase(format!("no case matches `{filter}`"))
                }
                (_, why) => {
                    let why = why.map_or("it left nothing", |(_, why)| why);
                    FirstProcessFailure::UnsupportedHarness(format!("asked to measure, {why}"))
                }
            });
        }
        let planned = run.cases.len();
        if let Some(shard) = self.request.shard {
            keep_cases_of_shard(&mut run, shard);
        }
        if let Err(error) = file::write_record_atomically(&path, &run) {
            let cases = run.cases.into_keys().collect();
            return Err(self.abandon_failed_bench(arm, bench, error.to_string(), cases));
        }
        let driver = executable.control_method;
        Ok(FirstProcessRun {
            run,
            run_record_path: path,
            process_wall_time: started.elapsed(),
            control_method: driver,
            cases_of_all_shards: planned,
        })
    }

    /// For cases that only the base can verify against a reference, compares the head's outputs
    /// with the base's outputs. The base runs the cases a second time to store their outputs,
    /// because the needed outputs are known only after the first processes of both sides. If the
    /// base's or the head's additional process fails, the cases stay unverified.
    fn verify_head_against_base_outputs(
        &self,
        bench: &str,
        verified: &mut [Option<FirstProcessRun>; 2],
    ) {
        let [Some(base), Some(head)] = verified else { return };
        let by_protocol = |side: &FirstProcessRun| {
            matches!(side.control_method, BenchControlMethod::ProtocolVersion(_))
        };
        let of_base = self.session.sides[index_of_side(ComparedArm::BaseBuild)]
            .executables
            .runnable_benches
            .get(bench);
        let Some(executable) = of_base.filter(|_| by_protocol(base) && by_protocol(head)) else {
            return;
        };
        let lost: BTreeSet<String> = head
            .run
            .cases
            .iter()
            .filter(|(_, case)| {
                case.verification.verification_extent() == OutputVerificationExtent::Unverified
            })
            .filter(|(id, _)| {
                base.run.cases.get(*id).is_some_and(|it| {
                    it.verification.verification_extent().is_compared_with_reference()
                })
            })
            .map(|(id, _)| id.clone())
            .collect();
        if lost.is_empty() {
            return;
        }
        self.progress
            .print_detail(&format!("{} cases of {bench} are no longer verified", lost.len()));
        let outputs =
            self.session.trial_files_folder.join("outputs").join(&executable.executable_hash);
        let timeout = self.request.process_timeout.unwrap_or(VERIFICATION_TIMEOUT);
        let process = |arm: ComparedArm| {
            let request = TrialRequestToBench {
                case_ids_to_run: Some(lost.clone()),
                inputs_folder: Some(self.input_folder_of_side(arm)),
                kept_outputs_folder: Some(outputs.clone())
                    .filter(|_| arm == ComparedArm::BaseBuild),
                keep_verified_outputs: arm == ComparedArm::BaseBuild,
                base_outputs_folder: Some(outputs.clone())
                    .filter(|_| arm == ComparedArm::HeadBuild),
                ..TrialRequestToBench::for_all_selected_cases(
                    "verify",
                    self.session.trial_files_folder.join("outputs.json"),
                    TrialSamplingPlan::ONE_SAMPLE_FOR_VERIFICATION,
                )
            };
            self.run_trial_process(arm, bench, &request, timeout).unwrap_or_else(|why| {
                self.progress
                    .print_line(&format!("error: {arm} {bench}, outputs of the base: {why}"));
                None
            })
        };
        let Some(run) =
            process(ComparedArm::BaseBuild).and_then(|_| process(ComparedArm::HeadBuild))
        else {
            return;
        };
        for (id, error) in run.failed {
            if head.run.cases.remove(&id).is_some() {
                head.run.failed.insert(id, error);
            }
        }
        for (id, case) in run.cases {
            if let Some(known) = head.run.cases.get_mut(&id) {
                known.verification = case.verification;
            }
        }
        if let Err(error) = file::write_record_atomically(&head.run_record_path, &head.run) {
            self.progress.print_line(&error.to_string());
        }
    }

    /// Abandons a bench whose first process failed, and returns the cases that it had listed.
    fn abandon_failed_bench(
        &mut self,
        arm: ComparedArm,
        bench: &str,
        reason: String,
        cases: BTreeSet<String>,
    ) -> FirstProcessFailure {
        self.record_failed_process(arm, bench, reason, true);
        FirstProcessFailure::BenchFailedWithListedCases(cases)
    }

    /// Returns the reason why a failed bench's cases have no times; `None` if the bench did not
    /// fail.
    fn failure_reason_of_bench(&self, bench: &str) -> Option<InconclusiveReason> {
        let broken = self.failed_benches.iter().find(|broken| broken.bench_name == *bench);
        broken.map(|broken| broken.inconclusive_reason_for_cases())
    }

    fn verification_record_path(&self, arm: ComparedArm, bench: &str) -> PathBuf {
        self.session.folder.side_folder_path(arm).join("verified").join(format!("{bench}.json"))
    }
}

impl PreparedSides {
    /// Stores the device, the build and other facts that all benches share; a bench with
    /// kernelgate's harness takes precedence over one of Criterion.
    fn store_facts_shared_by_benches(
        &mut self,
        FirstProcessRun { run, control_method: driver, .. }: &FirstProcessRun,
    ) {
        self.plan_digests.extend(run.plan.iter().map(|plan| plan.hash_of_cases_and_shards.clone()));
        self.anchors = self.anchors.take().or_else(|| run.anchors.clone());
        if self.environment.is_none() || *driver != BenchControlMethod::CriterionFlags {
            self.environment = Some(run.environment.clone());
            self.head_provenance = run.provenance.clone();
        }
        self.optimised_build &= run.environment.built_with_optimisation;
        self.verification_launch_ns.extend(
            rounds::median_timings_by_case(run)
                .into_iter()
                .map(|(id, timing)| (id, timing.median_time_ns)),
        );
    }
}

/// Number of cases of all shards together, of which this run verified the cases of one shard.
fn case_count_of_all_shards(run: &BenchProcessRun) -> usize {
    run.plan.as_ref().map_or(run.cases.len(), |plan| plan.case_count)
}

/// Keeps only the cases of one shard in the run of a bench that uses Criterion without kernelgate.
/// A Criterion bench does not group its cases into problems, so each case counts as one problem
/// when cases are divided among shards.
fn keep_cases_of_shard(run: &mut BenchProcessRun, shard: ShardOfWork) {
    let partition = ProblemsDividedAmongShards::by_hash_of_problem_ids(shard);
    let ids = run.cases.keys().map(|id| (id.clone(), vec![id.as_str()]));
    run.plan = Some(partition.summarize_division_into_shards(&run.bench, ids));
    run.shard = Some(shard);
    run.cases.retain(|id, _| partition.contains_problem(id));
    run.skipped.retain(|id, _| partition.contains_problem(id));
    run.failed.retain(|id, _| partition.contains_problem(id));
}

/// Returns a note that some requested settings have no effect in benches that use Criterion without
/// kernelgate, if the comparison has such benches.
fn settings_without_effect_note(
    request: &BuildComparisonRequest,
    prepared: &PreparedSides,
) -> Option<String> {
    let benches: Vec<&str> =
        prepared.criterion_benches.iter().map(|it| it.bench_name.as_str()).collect();
    let flag = |variable: &String| {
        let name = variable.strip_prefix("KERNELGATE_").unwrap_or(variable);
        format!("--{} ({variable})", name.to_lowercase())
    };
    let without_shard = request.bench_variables.keys().filter(|name| *name != "KERNELGATE_SHARD");
    let settings: Vec<String> = without_shard.map(flag).collect();
    (!benches.is_empty() && !settings.is_empty()).then(|| {
        format!(
            "without effect on benches that use Criterion alone ({}): {}",
            benches.join(", "),
            settings.join(", ")
        )
    })
}

/// Returns what one process of a Criterion bench costs, and the measurement settings that its
/// source sets.
fn facts_of_criterion_bench(bench: &ComparedBench, head: &FirstProcessRun) -> CriterionOnlyBench {
    let mut overridden =
        by_criterion::sampling_overridden_by_bench_source(&head.run, &bench.sampling);
    overridden.retain(|id, _| bench.compared_cases.contains(id));
    CriterionOnlyBench {
        bench_name: bench.bench_name.clone(),
        compared_cases: bench.compared_cases.iter().cloned().collect(),
        process_wall_s: head.process_wall_time.as_secs_f64(),
        overridden_sampling_by_case: overridden,
    }
}
