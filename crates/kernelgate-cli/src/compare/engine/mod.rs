//! The engine of a comparison: verifies both builds, then runs rounds of interleaved base and head
//! processes until every case is decided or the budget ends.

pub mod conclusion;
pub mod explanation;
pub mod host_time;
pub mod kernels;
pub mod numerics;
pub mod preparation;
pub mod resumed_trials;
pub mod rounds;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rounds::EstimatedRoundTimeLeft;

use super::progress::{self, ComparisonProgressDisplay};
use super::session::{
    ComparedBench, ComparisonSession, ComparisonShardPlan, PreparedSides,
    ProgressAndChildProcesses, SAVED_TRIALS_FILE, resume_or_create_trials,
};
use super::test_plan::TestPlanForDevice;
use super::trials::artificial_load::{ArtificialCoRunningLoad, SpinningLoadThreads};
use super::trials::process::{SharedTrialSettings, TrialProcessToRun};
use super::trials::trial_driver;
use super::{BuildComparisonRequest, CompareError, InjectedHeadChanges};
use crate::gate::calibration::CaseBlocksAsColumns;
use crate::gate::comparison::{Comparison, CriterionOnlyBench, FailedBenchProcess};
use crate::gate::comparison_shard::ComparisonShardRecord;
use crate::gate::costs;
use crate::gate::limits::{CaseTimeAndErrorLimits, LimitSource};
use crate::gate::paired::{
    CaseTimeInTrial, ComparedArm, ComparisonTestPlan, ErrorRateFamily, PairedDecisionsOfRound,
    decide_cases_with_own_thresholds,
};
use crate::gate::rules::{PackageGateRules, RULES_FILE_NAME};
use crate::gate::verdict::VerdictOnCase;
use kernelgate::record::{
    BenchProcessRun, ComparisonTrialsFile, OutputVerificationExtent, TrialOfComparison,
    TrialRequestToBench, TrialSamplingPlan, current_time_for_records, file,
};

/// Number of blocks after which the variance between pairs of base and head is known well enough to
/// estimate the time left.
const MIN_BLOCKS_FOR_TIME_LEFT: usize = 4;

/// Number of failed processes of a bench on one side after which the comparison abandons the bench.
const MAX_FAILED_PROCESSES_PER_BENCH_AND_SIDE: usize = 2;

/// A running comparison of two builds.
pub struct ComparisonEngine<'a> {
    pub(super) request: &'a BuildComparisonRequest,
    pub(super) session: &'a ComparisonSession,
    pub(super) progress: ComparisonProgressDisplay,
    pub(super) plan: ComparisonTestPlan,
    /// Limits (thresholds) of every case for which the package's rules set none.
    pub(super) default_case_limits: CaseTimeAndErrorLimits,
    /// Thresholds and accepted changes from the head package's `kernelgate.toml`.
    pub(super) rules: PackageGateRules,
    /// The number of cases over which the error rates of the test are divided: those of this
    /// process or those of all shards.
    family: ErrorRateFamily,
    /// Artificial load that runs while the head's processes are timed; only a calibration uses it.
    co_running: ArtificialCoRunningLoad,
    /// Records of all processes that the comparison has run so far.
    pub trials_file: ComparisonTrialsFile,
    pub(super) failed_benches: Vec<FailedBenchProcess>,
    /// Benches that neither kernelgate nor Criterion's flags can run, each with the reason.
    pub(super) unusable_benches: BTreeMap<String, String>,
}

/// State of the progress display of a comparison's round.
#[derive(Default)]
struct RoundProgressDisplay {
    /// Estimate of the time left in the round, which was shown last, and the moment when it was
    /// made.
    estimate: Option<EstimatedRoundTimeLeft>,
    last_estimate_time: Option<Instant>,
    /// Number of decided cases that was shown last; `None` before the first line was printed.
    last_shown_decided_cases: Option<usize>,
}

/// Facts about a comparison that belong to the whole comparison and not to its verdicts.
pub struct WholeComparisonFacts {
    pub device: String,
    /// Whether both builds were compiled with optimisation.
    pub both_builds_optimised: bool,
    /// Compared benches that use Criterion without kernelgate.
    pub criterion_benches: Vec<CriterionOnlyBench>,
    /// To what extent base (first) and head (second) verified each case that both have.
    pub verification: BTreeMap<String, [OutputVerificationExtent; 2]>,
    /// Cases that are not timed because base and head have a byte-identical executable for them.
    pub cases_with_identical_executable: Vec<String>,
}

/// The result of a comparison of two builds, before it is printed and written to files.
pub struct ComparisonOutcome {
    /// The comparison with its verdicts and facts.
    pub comparison: Comparison,
    /// Record of this shard for
    /// [`merge_comparison_shard_records`](crate::gate::comparison_shard::merge_comparison_shard_records),
    /// if the comparison runs one shard of the cases.
    pub shard: Option<Box<ComparisonShardRecord>>,
}

/// Builds base and head, and copies their bench executables into the subfolders `base` and `head`
/// of an output folder, for later comparisons without builds.
///
/// # Errors
/// Fails if base or head cannot be built, or an executable cannot be copied.
pub fn build_sides_into_folder(
    request: &BuildComparisonRequest,
    output: &Path,
) -> Result<(), CompareError> {
    let session = ComparisonSession::prepare_sides_in_locked_folder(
        request,
        false,
        ProgressAndChildProcesses::with_interrupt_handler()?,
    )?;
    for (arm, side) in
        [ComparedArm::BaseBuild, ComparedArm::HeadBuild].into_iter().zip(&session.sides)
    {
        let folder = output.join(arm.arm_name());
        std::fs::create_dir_all(&folder).map_err(CompareError::file_error("make", &folder))?;
        for bench in side.executables.runnable_benches.keys() {
            let built = session.folder.side_folder_path(arm).join("bin").join(bench);
            let copied = std::fs::copy(&built, folder.join(bench));
            copied.map_err(CompareError::file_error("copy", &built))?;
        }
    }
    session.progress.clear_progress_line();
    Ok(())
}

pub fn run_comparison(request: &BuildComparisonRequest) -> Result<ComparisonOutcome, CompareError> {
    request.plan.check_calibrations_are_readable()?;
    let session = ComparisonSession::prepare_sides_in_locked_folder(
        request,
        false,
        ProgressAndChildProcesses::with_interrupt_handler()?,
    )?;
    let (rules, expired) = session.rules_of_head_package(request)?;
    let mut identity = session.facts_that_identify_comparison(request)?;
    identity
        .extend(rules.text_that_identifies_rules().map(|hash| (RULES_FILE_NAME.to_owned(), hash)));
    let shared = identity.clone();
    let trials = resume_or_create_trials(request, &session, identity)?;
    let mut engine = ComparisonEngine {
        rules: rules.clone(),
        ..ComparisonEngine::engine_with_trials(request, &session, trials)
    };
    let outcome = engine.verify_and_match_sides().and_then(|mut prepared| {
        let note = engine.resolve_test_plan_for_device(&prepared)?;
        let planned = request.shard.and_then(|shard| prepared.describe_as_shard(shard));
        if let Some(planned) = &planned {
            engine.family = ErrorRateFamily::CasesOfAllShards(planned.cases_of_all_shards);
        }
        let listed = prepared.matched_cases.all_case_ids().into_iter().collect();
        let (trials, plan) = (&engine.trials_file.trials, &engine.plan);
        resumed_trials::check_saved_trials_fit_plan(
            trials,
            &prepared.benches,
            &listed,
            plan.max_trial_blocks,
        )
        .map_err(|why| CompareError::SavedTrialsDoNotFit {
            trials_file: session.folder.path_of_file(SAVED_TRIALS_FILE),
            why_trials_do_not_fit: why,
        })?;
        let findings = engine
            .compare_verification_records(&prepared, (&engine.default_case_limits, &rules))?;
        prepared.time_changed_cases_first(&findings.kernel_comparisons_by_case);
        let benches = prepared.benches.clone();
        let unaffected = match request.only_affected_cases {
            true => {
                engine.progress.print_detail(
                    &prepared.unknown_machine_code_note(&findings.kernel_comparisons_by_case),
                );
                prepared.remove_cases_with_identical_code(&findings.kernel_comparisons_by_case)
            }
            false => Vec::new(),
        };
        let in_part = !request.bench_names.is_empty() || request.criterion_filter.is_some();
        let all_ids = (!in_part).then(|| prepared.matched_cases.all_case_ids());
        let ids: Option<Vec<&str>> =
            all_ids.as_ref().map(|ids| ids.iter().map(String::as_str).collect());
        let mut comparison = engine.run_both_rounds(prepared)?;
        comparison.judged_cases.retain(|it| !findings.failed_cases.contains_key(&it.case_id));
        comparison.failed_in_head.extend(findings.failed_cases);
        comparison.method_facts.kernel_comparisons_by_case = findings.kernel_comparisons_by_case;
        if request.profiles_slower_cases {
            comparison.method_facts.explanations =
                engine.explain_regressed_cases(&comparison, &benches);
        }
        let removed = comparison.method_facts.removed_cases.iter().map(String::as_str);
        let cases: Vec<&str> = comparison.judged_case_ids().into_iter().chain(removed).collect();
        let mut of_rules = rules.report_effects(&cases, ids.as_deref());
        if request.shard.is_some() {
            of_rules.notes_on_unmatched_patterns =
                std::mem::take(&mut of_rules.notes_on_rules_without_effect).into_iter().collect();
        }
        of_rules.notes_on_rules_without_effect.extend(expired);
        let of_costs = costs::report_unjudged_cost_limits(&rules, &findings.cost_limits);
        of_rules.notes_on_rules_without_effect.extend(of_costs.notes_on_rules_without_effect);
        of_rules.notes_on_unjudged_limits.extend(of_costs.notes_on_unjudged_limits);
        comparison.method_facts.calibration_description = note;
        comparison.method_facts.unaffected_cases = unaffected;
        let (numerics, costs) = (findings.numerics, findings.grown_costs);
        let comparison = Comparison { numerics, grown_costs: costs, rules: of_rules, ..comparison };
        let shard =
            planned.map(|planned| engine.record_of_compared_shard(planned, shared, &comparison));
        Ok(ComparisonOutcome { comparison, shard })
    });
    session.progress.clear_progress_line();
    outcome
}

impl<'a> ComparisonEngine<'a> {
    /// Makes a comparison engine that continues from the trials of an interrupted comparison, or
    /// starts without trials.
    pub fn engine_with_trials(
        request: &'a BuildComparisonRequest,
        session: &'a ComparisonSession,
        trials: ComparisonTrialsFile,
    ) -> Self {
        let progress = session.progress.clone();
        Self {
            request,
            session,
            progress,
            plan: ComparisonTestPlan::default(),
            default_case_limits: ComparisonTestPlan::default()
                .limits_with_source(LimitSource::ProgramDefault),
            rules: PackageGateRules::default(),
            family: ErrorRateFamily::CasesOfThisDecision,
            co_running: ArtificialCoRunningLoad::NoLoad,
            trials_file: trials,
            failed_benches: Vec::new(),
            unusable_benches: BTreeMap::new(),
        }
    }

    /// Makes an engine for one comparison of a calibration, with this test plan, and with
    /// artificial load while the head is timed. The progress of the calibration's comparison is
    /// shown as a detail after `label`.
    pub fn engine_for_calibration(
        request: &'a BuildComparisonRequest,
        session: &'a ComparisonSession,
        plan: ComparisonTestPlan,
        co_running: ArtificialCoRunningLoad,
        label: &str,
    ) -> ComparisonEngine<'a> {
        let progress = session.progress.for_part_of_task(label);
        let limits = plan.limits_with_source(LimitSource::ProgramDefault);
        let fresh = Self::engine_with_trials(request, session, ComparisonTrialsFile::default());
        Self { plan, default_case_limits: limits, co_running, progress, ..fresh }
    }

    /// Determines the test plan (thresholds and error rates) for the device on which the benches
    /// ran, and prints which calibration it comes from.
    pub(super) fn resolve_test_plan_for_device(
        &mut self,
        prepared: &PreparedSides,
    ) -> Result<Option<String>, CompareError> {
        let Some(environment) = &prepared.environment else { return Ok(None) };
        let sampling = Self::sampling_of_first_bench(prepared);
        let TestPlanForDevice { plan, limits, calibration_note: note } =
            self.request.plan.plan_for_device(environment, &prepared.head_provenance, sampling)?;
        note.iter().for_each(|note| self.progress.print_line(note));
        (self.plan, self.default_case_limits) = (plan, limits);
        Ok(note)
    }

    /// Returns for how long each process of the first bench warms up and times a case.
    pub fn sampling_of_first_bench(prepared: &PreparedSides) -> TrialSamplingPlan {
        prepared.benches.first().map_or(TrialSamplingPlan::SAMPLING_ON_HOST, |bench| bench.sampling)
    }

    /// Makes the record of a comparison that ran one shard of the cases.
    fn record_of_compared_shard(
        &self,
        planned: ComparisonShardPlan,
        identity: BTreeMap<String, String>,
        comparison: &Comparison,
    ) -> Box<ComparisonShardRecord> {
        let ComparisonShardPlan { shard, plan_hash, cases_of_all_shards, environment, anchors } =
            planned;
        let [base, head] = &self.session.sides;
        let [first, second] = [1, 2].map(|round| {
            let observed = rounds::complete_blocks_by_case(&self.trials_file.trials, round);
            observed
                .iter()
                .map(|(case, blocks)| {
                    (case.clone(), CaseBlocksAsColumns::from_trial_blocks(blocks))
                })
                .collect()
        });
        let mut kept = ComparisonShardRecord {
            shard,
            plan_hash,
            cases_of_all_shards,
            shard_end_time: current_time_for_records(),
            environment,
            anchors,
            comparison_identity_facts: identity,
            sources: base
                .checkout_commit
                .clone()
                .zip(head.checkout_commit.clone())
                .map(<[String; 2]>::from),
            limits_by_case: BTreeMap::new(),
            first_round_times: first,
            second_round_times: second,
            measurement_errors_by_case: BTreeMap::new(),
            findings_without_verdicts: Comparison {
                judged_cases: Vec::new(),
                ..comparison.clone()
            },
        };
        kept.record_limits_and_errors_of_cases(comparison, |case| {
            self.rules.limits_of_case(case, &self.default_case_limits)
        });
        Box::new(kept)
    }

    /// Runs both rounds of a comparison: the second confirms regressions of the first.
    pub fn run_both_rounds(
        &mut self,
        mut prepared: PreparedSides,
    ) -> Result<Comparison, CompareError> {
        let untimed = if self.request.times_identical_executables {
            Vec::new()
        } else {
            prepared.remove_cases_of_benches(&self.session.benches_with_identical_executables())
        };
        let PreparedSides {
            matched_cases: matched,
            benches,
            optimised_build: optimised,
            environment,
            criterion_benches,
            verification,
            ..
        } = prepared;
        let device =
            environment.map(|environment| environment.description_of_device()).unwrap_or_default();
        let selected = matched.judged_cases.clone();
        let first = self.run_comparison_round(1, &benches, &selected)?;
        let slower: BTreeSet<String> = first
            .decisions
            .iter()
            .filter(|decision| decision.verdict == VerdictOnCase::Regressed)
            .map(|decision| decision.case_id.clone())
            .collect();
        let second = if slower.is_empty() {
            None
        } else {
            self.progress
                .print_detail(&format!("round 2: are {} slower cases slower again?", slower.len()));
            Some(self.run_comparison_round(2, &benches, &slower)?)
        };
        self.session.check_all_executables_unchanged()?;
        let facts = WholeComparisonFacts {
            device,
            both_builds_optimised: optimised,
            criterion_benches,
            verification,
            cases_with_identical_executable: untimed,
        };
        Ok(self.conclude_comparison((matched, &benches), first, second.as_ref(), facts))
    }

    pub(super) fn input_folder_of_side(&self, arm: ComparedArm) -> PathBuf {
        self.session.folder.side_folder_path(arm).join("inputs")
    }

    /// Returns the settings that all bench processes of the comparison share.
    pub(super) fn shared_trial_setup(&self) -> SharedTrialSettings<'_> {
        SharedTrialSettings {
            bench_variables: &self.request.bench_variables,
            criterion_filter: self.request.criterion_filter.as_deref(),
            trial_files_folder: &self.session.trial_files_folder,
            running_child: &self.session.running_child,
            environment: &self.session.environment_of_criterion_runs,
            progress: &self.progress,
        }
    }

    /// Describes one bench process (trial) to run: executable, request, environment and timeout.
    pub(super) fn describe_trial_process<'r>(
        &'r self,
        arm: ComparedArm,
        bench: &str,
        request: &'r TrialRequestToBench,
        timeout: Duration,
    ) -> Result<TrialProcessToRun<'r>, String> {
        let side = &self.session.sides[index_of_side(arm)];
        let slot = self.session.folder.link_slot_to_side(arm).map_err(|error| error.to_string())?;
        let Some(executable) = side.executables.runnable_benches.get(bench) else {
            return Err("it has no such bench".to_owned());
        };
        let mut injection = match arm {
            ComparedArm::BaseBuild => InjectedHeadChanges::default(),
            ComparedArm::HeadBuild => self.request.injection.clone(),
        };
        injection.injected_delays_ns.retain(|id, _| {
            request.case_ids_to_run.as_ref().is_none_or(|cases| cases.contains(id))
        });
        Ok(TrialProcessToRun {
            control_method: executable.control_method,
            bench_executable: slot.join("bin").join(bench),
            executable_hash: &executable.executable_hash,
            package_folder: side.package_folder_of_bench(bench).clone(),
            source_commit: side.recorded_commit.clone(),
            injection,
            request,
            process_timeout: timeout,
        })
    }

    /// Runs one bench process and returns its run record; `None` if the bench has none of the
    /// requested cases.
    pub(super) fn run_trial_process(
        &self,
        arm: ComparedArm,
        bench: &str,
        request: &TrialRequestToBench,
        timeout: Duration,
    ) -> Result<Option<BenchProcessRun>, String> {
        let trial = self.describe_trial_process(arm, bench, request, timeout)?;
        let setup = self.shared_trial_setup();
        let busy = (arm == ComparedArm::HeadBuild)
            .then(|| self.start_load_beside_head(&setup, &trial))
            .transpose()?;
        let outcome = trial_driver::run_trial(&setup, &trial);
        drop(busy);
        if arm == ComparedArm::HeadBuild
            && matches!(self.co_running, ArtificialCoRunningLoad::GpuProcessWithLeadTime(_))
            && !self.session.co_running_child.kill_child_and_wait()
        {
            return Err("the co-running load ended by itself".to_owned());
        }
        outcome
    }

    /// Starts the artificial load that runs while a trial of the head is timed.
    fn start_load_beside_head(
        &self,
        setup: &SharedTrialSettings<'_>,
        trial: &TrialProcessToRun<'_>,
    ) -> Result<Option<SpinningLoadThreads>, String> {
        match self.co_running {
            ArtificialCoRunningLoad::NoLoad => Ok(None),
            ArtificialCoRunningLoad::SpinningThreads(count) => {
                Ok(Some(SpinningLoadThreads::start_spinning_threads(count)))
            }
            ArtificialCoRunningLoad::GpuProcessWithLeadTime(after) => {
                let one = trial.request.case_ids_to_run.iter().flatten().next().cloned();
                let request = TrialRequestToBench {
                    session_name: "co-running".to_owned(),
                    run_record_path: self.session.trial_files_folder.join("co-running-run.json"),
                    case_ids_to_run: Some(one.into_iter().collect()),
                    sampling: TrialSamplingPlan::SAMPLING_UNTIL_PROCESS_IS_ENDED,
                    ..trial.request.clone()
                };
                let other = TrialProcessToRun { request: &request, ..trial.clone() };
                trial_driver::start_trial_as_background_load(
                    setup,
                    &other,
                    &self.session.co_running_child,
                )?;
                std::thread::sleep(after);
                Ok(None)
            }
        }
    }

    /// Prints that a bench process failed, and records the failure.
    pub(super) fn record_failed_process(
        &mut self,
        arm: ComparedArm,
        bench: &str,
        reason: String,
        abandoned: bool,
    ) {
        self.progress.print_line(&format!("error: {arm} {bench}: {reason}"));
        self.failed_benches.push(FailedBenchProcess {
            bench_name: bench.to_owned(),
            side: arm,
            failure_reason: reason,
            bench_abandoned: abandoned,
        });
    }

    /// Runs blocks of trials until every selected case is decided, the budget is spent, or the
    /// plan's number of blocks is reached.
    fn run_comparison_round(
        &mut self,
        round: u32,
        benches: &[ComparedBench],
        selected: &BTreeSet<String>,
    ) -> Result<PairedDecisionsOfRound, CompareError> {
        let plan = self.plan;
        let mut shown = RoundProgressDisplay::default();
        loop {
            let spent = self
                .block_and_process_counts_of_round(round)
                .map_or(0.0, |facts| facts.total_process_wall_s);
            let left =
                self.request.round_time_budget.saturating_sub(Duration::from_secs_f64(spent));
            let observed = rounds::complete_blocks_by_case(&self.trials_file.trials, round);
            let of_case = |case: &str| {
                plan.with_thresholds_of_case(
                    &self.rules.limits_of_case(case, &self.default_case_limits),
                )
            };
            let outcome =
                decide_cases_with_own_thresholds(&observed, &plan, &of_case, self.family, false);
            let mut todo = rounds::cases_that_need_more_blocks(selected, &observed, &outcome);
            let (failed, stopped) = (
                rounds::failures_in_head_processes(&self.trials_file.trials),
                rounds::reasons_to_stop_timing_cases(&self.trials_file.trials),
            );
            todo.retain(|id| !failed.contains_key(id) && !stopped.contains_key(id));
            let done = |bench: &ComparedBench| {
                rounds::next_block_of_bench(&self.trials_file.trials, round, &bench.bench_name)
            };
            let alive: Vec<&ComparedBench> = benches
                .iter()
                .filter(|bench| {
                    done(bench) < plan.max_trial_blocks
                        && bench.compared_cases.iter().any(|id| todo.contains(id))
                })
                .filter(|bench| {
                    !self.failed_benches.iter().any(|broken| {
                        broken.bench_name == bench.bench_name && broken.bench_abandoned
                    })
                })
                .collect();
            // The round stops when less than half a block of budget is left, so that its duration
            // is as close to the budget as whole blocks allow.
            let block = self.mean_block_wall_time(round);
            if alive.is_empty() || left.is_zero() || left < block / 2 {
                return Ok(decide_cases_with_own_thresholds(
                    &observed,
                    &plan,
                    &of_case,
                    self.family,
                    true,
                ));
            }
            self.show_round_progress(round, (selected.len(), &todo), &outcome, left, &mut shown);
            for bench in alive {
                self.run_block_of_trials(round, bench, &todo)?;
            }
        }
    }

    /// Mean wall time of one block of trials over the round so far, where one block covers every
    /// bench.
    fn mean_block_wall_time(&self, round: u32) -> Duration {
        self.block_and_process_counts_of_round(round).map_or(Duration::ZERO, |facts| {
            Duration::from_secs_f64(
                facts.total_process_wall_s / facts.most_trial_blocks.max(1) as f64,
            )
        })
    }

    /// Shows the progress of a comparison's round: decided cases, blocks and the estimated time
    /// left.
    fn show_round_progress(
        &self,
        round: u32,
        (selected, todo): (usize, &BTreeSet<String>),
        outcome: &PairedDecisionsOfRound,
        left: Duration,
        shown: &mut RoundProgressDisplay,
    ) {
        let trials = &self.trials_file.trials;
        let blocks = self
            .block_and_process_counts_of_round(round)
            .map_or(0, |facts| facts.most_trial_blocks);
        let estimate = rounds::estimate_round_time_left(trials, round, todo, outcome, &self.plan);
        let most_s = if blocks == 0 { f64::INFINITY } else { estimate.max_time_left_s };
        let at_most = |seconds: f64| {
            progress::duration(Duration::try_from_secs_f64(seconds).unwrap_or(left).min(left))
        };
        let most = at_most(most_s);
        let ahead = if blocks < MIN_BLOCKS_FOR_TIME_LEFT {
            format!("at most {most} left")
        } else {
            let passed_s = shown.last_estimate_time.map_or(0.0, |at| at.elapsed().as_secs_f64());
            let smoothed = estimate.smoothed_with_previous_estimate(shown.estimate, passed_s);
            (shown.estimate, shown.last_estimate_time) = (Some(smoothed), Some(Instant::now()));
            format!("about {} left, at most {most}", at_most(smoothed.likely_time_left_s))
        };
        let decided = selected.saturating_sub(todo.len());
        let text = format!(
            "round {round}: {blocks} blocks done, {decided} of {selected} cases decided, {ahead}"
        );
        match shown.last_shown_decided_cases.replace(decided) == Some(decided) {
            true => self.progress.show_frequent_step(&text),
            false => self.progress.show_current_step(&text),
        }
    }

    pub(super) fn request_for_one_trial(
        &self,
        bench: &ComparedBench,
        arm: ComparedArm,
        session: String,
        cases: BTreeSet<String>,
    ) -> TrialRequestToBench {
        TrialRequestToBench {
            case_ids_to_run_first: bench.cases_timed_first.intersection(&cases).cloned().collect(),
            case_ids_to_run: Some(cases),
            verified_run_record: Some(bench.verified[index_of_side(arm)].clone()),
            inputs_folder: Some(self.input_folder_of_side(arm)),
            ..TrialRequestToBench::for_all_selected_cases(
                session,
                self.session.trial_files_folder.join("run.json"),
                bench.sampling,
            )
        }
    }

    /// Returns the median time of each case in one process's run. If the user set a threshold in
    /// nanoseconds, that threshold also applies to averaged times of Criterion benches.
    fn case_timings_of_run(&self, run: &BenchProcessRun) -> BTreeMap<String, CaseTimeInTrial> {
        let mut timings = rounds::median_timings_by_case(run);
        let for_all =
            self.request.plan.requested_limits.absolute_time_change_threshold_ns.is_some();
        timings.values_mut().for_each(|timing| timing.time_is_mean &= !for_all);
        timings
    }

    /// Runs one block of a bench: four processes, two of the base and two of the head, which time
    /// equal cases.
    fn run_block_of_trials(
        &mut self,
        round: u32,
        bench: &ComparedBench,
        todo: &BTreeSet<String>,
    ) -> Result<(), CompareError> {
        let block = rounds::next_block_of_bench(&self.trials_file.trials, round, &bench.bench_name);
        let cases: BTreeSet<String> = bench.compared_cases.intersection(todo).cloned().collect();
        for place in 0..rounds::PROCESSES_PER_BLOCK {
            let arm = rounds::arm_at_place_of_block(block, place);
            let request = self.request_for_one_trial(
                bench,
                arm,
                format!("r{round}-b{block}-p{place}"),
                cases.clone(),
            );
            let started = Instant::now();
            let expected = &bench.expected[index_of_side(arm)];
            let outcome = self
                .run_trial_process(arm, &bench.bench_name, &request, bench.process_timeout)
                .and_then(|run| {
                    run.as_ref().map_or(Ok(()), |run| expected.check_later_run_agrees(run))?;
                    Ok(run)
                });
            // The executables are checked for changes before the block's trials are saved, because
            // a resumed comparison uses saved trials.
            self.session.check_executable_unchanged(arm, &bench.bench_name)?;
            let mut trial = TrialOfComparison {
                round,
                bench: bench.bench_name.clone(),
                block_in_round: block,
                position_in_block: place,
                ran_head_build: arm == ComparedArm::HeadBuild,
                wall_s: started.elapsed().as_secs_f64(),
                cases: BTreeMap::new(),
                failed: BTreeMap::new(),
                skipped: BTreeMap::new(),
                reason_of_early_end: None,
            };
            match outcome {
                Ok(run) => {
                    trial.skipped = rounds::reasons_of_untimed_cases(&cases, run.as_ref());
                    trial.cases =
                        run.as_ref().map(|run| self.case_timings_of_run(run)).unwrap_or_default();
                    trial.failed = run.map(|run| run.failed).unwrap_or_default();
                }
                Err(reason) => trial.reason_of_early_end = Some(reason),
            }
            let broke = trial.reason_of_early_end.clone();
            self.trials_file.trials.push(trial);
            if let Some(reason) = broke {
                let before = self
                    .failed_benches
                    .iter()
                    .filter(|broken| broken.bench_name == bench.bench_name)
                    .count();
                self.record_failed_process(
                    arm,
                    &bench.bench_name,
                    reason,
                    before + 1 >= MAX_FAILED_PROCESSES_PER_BENCH_AND_SIDE,
                );
                break;
            }
        }
        // Trials are saved after each complete block, because a resumed comparison uses complete
        // blocks only.
        Ok(file::write_record_atomically(
            &self.session.folder.path_of_file(SAVED_TRIALS_FILE),
            &self.trials_file,
        )?)
    }
}

/// Index of a build in an array of base and head: 0 for the base, 1 for the head.
pub(super) const fn index_of_side(arm: ComparedArm) -> usize {
    match arm {
        ComparedArm::BaseBuild => 0,
        ComparedArm::HeadBuild => 1,
    }
}
