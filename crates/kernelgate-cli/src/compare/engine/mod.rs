//! The comparison: verify, then rounds of interleaved processes until every case is decided or the
//! budget ends.

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

use rounds::RoundTimeLeft;

use super::progress::{self, ComparisonProgress};
use super::session::{
    ComparedBench, ComparisonSession, PlannedShard, PreparedSides, SessionTools, TRIALS_FILE,
    open_trials,
};
use super::test_plan::ResolvedPlan;
use super::trials::artificial_load::{BusyLoadThreads, CoRunningLoad};
use super::trials::process::{TrialProcess, TrialSetup};
use super::trials::trial_driver;
use super::{CompareError, ComparisonRequest, SideInjection};
use crate::gate::calibration::BlockSeries;
use crate::gate::comparison::{Comparison, CriterionOnlyBench, FailedProcess};
use crate::gate::comparison_shard::ComparisonShard;
use crate::gate::costs;
use crate::gate::limits::{CaseLimits, LimitSource};
use crate::gate::paired::{
    Arm, CaseTiming, ErrorRateFamily, PairedOutcome, TestPlan, decide_cases,
};
use crate::gate::rules::{PackageRules, RULES_FILE};
use crate::gate::verdict::Verdict;
use kernelgate::record::{
    ComparisonTrials, ProcessRun, TrialRecord, TrialRequest, TrialSampling, VerificationExtent,
    current_timestamp, file,
};

/// Blocks after which the variance between pairs is known well enough to estimate the time left.
const MIN_BLOCKS_FOR_TIME_LEFT: usize = 4;

/// Failed processes of a side after which its bench is abandoned.
const MAX_FAILED_PROCESSES: usize = 2;

/// A comparison that runs.
pub struct ComparisonEngine<'a> {
    pub(super) request: &'a ComparisonRequest,
    pub(super) session: &'a ComparisonSession,
    pub(super) progress: ComparisonProgress,
    pub(super) plan: TestPlan,
    /// Limits of every case that the package says nothing about.
    pub(super) limits: CaseLimits,
    /// Smallest relevant changes and accepted cases, as the head's package states them.
    pub(super) rules: PackageRules,
    /// The family of cases among which the error rates are divided.
    family: ErrorRateFamily,
    /// Artificial load that runs beside the processes of the head.
    co_running: CoRunningLoad,
    /// Every process so far.
    pub trials: ComparisonTrials,
    pub(super) broken: Vec<FailedProcess>,
    /// Benches that Criterion's flags do not drive, with the reason.
    pub(super) undrivable: BTreeMap<String, String>,
}

/// Progress of a comparison's round, as it was shown last.
#[derive(Default)]
struct RoundProgress {
    /// Estimate of the time left, and the time when it was made.
    estimate: Option<RoundTimeLeft>,
    estimated: Option<Instant>,
    /// Number of decided cases; `None` before the first line was printed.
    decided: Option<usize>,
}

/// Facts of a comparison besides its cases.
pub struct ComparisonFacts {
    pub device: String,
    /// Whether the builds were compiled with optimisation.
    pub optimised: bool,
    /// Benches of Criterion alone.
    pub criterion: Vec<CriterionOnlyBench>,
    /// How far both sides verified each common case, base first.
    pub verification: BTreeMap<String, [VerificationExtent; 2]>,
    /// Cases that are not timed because base and head have the same executable.
    pub untimed: Vec<String>,
}

/// The result of a comparison before it is reported.
pub struct ComparisonOutcome {
    /// Verdicts and facts.
    pub comparison: Comparison,
    /// Record of this shard for [`merge`](crate::gate::comparison_shard::merge), if the comparison
    /// is a shard.
    pub shard: Option<Box<ComparisonShard>>,
}

/// Builds both sides, and copies their executables into the folders `base` and `head` of another.
///
/// # Errors
/// Fails if a side cannot be made ready, or a file cannot be copied.
pub fn build_sides_once(request: &ComparisonRequest, output: &Path) -> Result<(), CompareError> {
    let session = ComparisonSession::open_session(request, false, SessionTools::interruptible()?)?;
    for (arm, side) in [Arm::Base, Arm::Head].into_iter().zip(&session.sides) {
        let folder = output.join(arm.name());
        std::fs::create_dir_all(&folder).map_err(CompareError::io("make", &folder))?;
        for bench in side.executables.driven.keys() {
            let built = session.folder.side_folder_path(arm).join("bin").join(bench);
            let copied = std::fs::copy(&built, folder.join(bench));
            copied.map_err(CompareError::io("copy", &built))?;
        }
    }
    session.progress.end_progress_line();
    Ok(())
}

pub fn run(request: &ComparisonRequest) -> Result<ComparisonOutcome, CompareError> {
    request.plan.check()?;
    let session = ComparisonSession::open_session(request, false, SessionTools::interruptible()?)?;
    let (rules, expired) = session.package_rules(request)?;
    let mut identity = session.comparison_identity(request)?;
    identity.extend(rules.identity().map(|hash| (RULES_FILE.to_owned(), hash)));
    let shared = identity.clone();
    let trials = open_trials(request, &session, identity)?;
    let mut engine = ComparisonEngine {
        rules: rules.clone(),
        ..ComparisonEngine::new(request, &session, trials)
    };
    let outcome = engine.prepare().and_then(|mut prepared| {
        let note = engine.resolve_plan(&prepared)?;
        let planned = request.shard.and_then(|shard| prepared.planned_shard(shard));
        if let Some(planned) = &planned {
            engine.family = ErrorRateFamily::Plan(planned.cases);
        }
        let listed = prepared.matched.ids().into_iter().collect();
        let (trials, plan) = (&engine.trials.trials, &engine.plan);
        resumed_trials::check_trials_fit_plan(trials, &prepared.benches, &listed, plan.max_blocks)
            .map_err(|why| CompareError::TrialsDoNotFit {
                path: session.folder.file(TRIALS_FILE),
                why,
            })?;
        let findings = engine.numerics_findings(&prepared, (&engine.limits, &rules))?;
        prepared.put_changed_first(&findings.code);
        let benches = prepared.benches.clone();
        let unaffected = match request.affected {
            true => {
                engine.progress.detail(&prepared.unknown_code_cases(&findings.code));
                prepared.remove_unaffected(&findings.code)
            }
            false => Vec::new(),
        };
        let in_part = !request.benches.is_empty() || request.filter.is_some();
        let all_ids = (!in_part).then(|| prepared.matched.ids());
        let ids: Option<Vec<&str>> =
            all_ids.as_ref().map(|ids| ids.iter().map(String::as_str).collect());
        let mut comparison = engine.compare(prepared)?;
        comparison.judged.retain(|it| !findings.failed.contains_key(&it.case));
        comparison.failed.extend(findings.failed);
        comparison.facts.code = findings.code;
        if request.profile_slower {
            comparison.facts.explanations = engine.explain_changes(&comparison, &benches);
        }
        let removed = comparison.facts.removed.iter().map(String::as_str);
        let cases: Vec<&str> = comparison.cases().into_iter().chain(removed).collect();
        let mut of_rules = rules.report(&cases, ids.as_deref());
        if request.shard.is_some() {
            of_rules.unmatched = std::mem::take(&mut of_rules.notes).into_iter().collect();
        }
        of_rules.notes.extend(expired);
        let of_costs = costs::unjudged_cost_bounds(&rules, &findings.bounds);
        of_rules.notes.extend(of_costs.notes);
        of_rules.undecided.extend(of_costs.undecided);
        (comparison.facts.calibration, comparison.facts.unaffected) = (note, unaffected);
        let (numerics, costs) = (findings.numerics, findings.costs);
        let comparison = Comparison { numerics, costs, rules: of_rules, ..comparison };
        let shard = planned.map(|planned| engine.shard_record(planned, shared, &comparison));
        Ok(ComparisonOutcome { comparison, shard })
    });
    session.progress.end_progress_line();
    outcome
}

impl<'a> ComparisonEngine<'a> {
    /// Makes an engine with the trials of an interrupted comparison of these sides, or without
    /// trials.
    pub fn new(
        request: &'a ComparisonRequest,
        session: &'a ComparisonSession,
        trials: ComparisonTrials,
    ) -> Self {
        let progress = session.progress.clone();
        Self {
            request,
            session,
            progress,
            plan: TestPlan::default(),
            limits: TestPlan::default().limits(LimitSource::Default),
            rules: PackageRules::default(),
            family: ErrorRateFamily::Given,
            co_running: CoRunningLoad::Nothing,
            trials,
            broken: Vec::new(),
            undrivable: BTreeMap::new(),
        }
    }

    /// Makes an engine for one comparison of a calibration, with this plan, and with artificial
    /// load beside the head. The progress of the comparison is printed after `label`.
    pub fn for_calibration(
        request: &'a ComparisonRequest,
        session: &'a ComparisonSession,
        plan: TestPlan,
        co_running: CoRunningLoad,
        label: &str,
    ) -> ComparisonEngine<'a> {
        let progress = session.progress.progress_of_part(label);
        let limits = plan.limits(LimitSource::Default);
        let fresh = Self::new(request, session, ComparisonTrials::default());
        Self { plan, limits, co_running, progress, ..fresh }
    }

    /// Resolves the plan for the device on which the benches ran, and prints which calibration it
    /// comes from.
    pub(super) fn resolve_plan(
        &mut self,
        prepared: &PreparedSides,
    ) -> Result<Option<String>, CompareError> {
        let Some(environment) = &prepared.environment else { return Ok(None) };
        let sampling = Self::sampling(prepared);
        let ResolvedPlan { plan, limits, note } =
            self.request.plan.on(environment, &prepared.provenance, sampling)?;
        note.iter().for_each(|note| self.progress.say(note));
        (self.plan, self.limits) = (plan, limits);
        Ok(note)
    }

    /// Determines for how long a process times a case.
    pub fn sampling(prepared: &PreparedSides) -> TrialSampling {
        prepared.benches.first().map_or(TrialSampling::HOST_SAMPLING, |bench| bench.sampling)
    }

    /// Makes the record of a compared shard.
    fn shard_record(
        &self,
        planned: PlannedShard,
        identity: BTreeMap<String, String>,
        comparison: &Comparison,
    ) -> Box<ComparisonShard> {
        let PlannedShard { shard, plan, cases, environment, anchors } = planned;
        let [base, head] = &self.session.sides;
        let [first, second] = [1, 2].map(|round| {
            let observed = rounds::whole_blocks_by_case(&self.trials.trials, round);
            observed
                .iter()
                .map(|(case, blocks)| (case.clone(), BlockSeries::from_blocks(blocks)))
                .collect()
        });
        let mut kept = ComparisonShard {
            shard,
            plan,
            planned: cases,
            ended: current_timestamp(),
            environment,
            anchors,
            identity,
            sources: base.sources.clone().zip(head.sources.clone()).map(<[String; 2]>::from),
            limits: BTreeMap::new(),
            first,
            second,
            errors: BTreeMap::new(),
            findings: Comparison { judged: Vec::new(), ..comparison.clone() },
        };
        kept.keep(comparison, |case| self.rules.resolve(case, &self.limits));
        Box::new(kept)
    }

    /// Runs both rounds.
    pub fn compare(&mut self, mut prepared: PreparedSides) -> Result<Comparison, CompareError> {
        let untimed = if self.request.time_identical {
            Vec::new()
        } else {
            prepared.remove_benches(&self.session.identical())
        };
        let PreparedSides {
            matched, benches, optimised, environment, criterion, verification, ..
        } = prepared;
        let device =
            environment.map(|environment| environment.device_description()).unwrap_or_default();
        let selected = matched.judged.clone();
        let first = self.run_round(1, &benches, &selected)?;
        let slower: BTreeSet<String> = first
            .decisions
            .iter()
            .filter(|decision| decision.verdict == Verdict::Regressed)
            .map(|decision| decision.case.clone())
            .collect();
        let second = if slower.is_empty() {
            None
        } else {
            self.progress
                .detail(&format!("round 2: are {} slower cases slower again?", slower.len()));
            Some(self.run_round(2, &benches, &slower)?)
        };
        self.session.check_executables()?;
        let facts = ComparisonFacts { device, optimised, criterion, verification, untimed };
        Ok(self.conclude_comparison((matched, &benches), first, second.as_ref(), facts))
    }

    pub(super) fn inputs(&self, arm: Arm) -> PathBuf {
        self.session.folder.side_folder_path(arm).join("inputs")
    }

    /// Returns the settings that all processes of the comparison share.
    pub(super) fn setup(&self) -> TrialSetup<'_> {
        TrialSetup {
            settings: &self.request.settings,
            filter: self.request.filter.as_deref(),
            work: &self.session.work,
            running: &self.session.running,
            environment: &self.session.environment,
            progress: &self.progress,
        }
    }

    /// Describes one process (trial) to run.
    pub(super) fn describe_trial<'r>(
        &'r self,
        arm: Arm,
        bench: &str,
        request: &'r TrialRequest,
        timeout: Duration,
    ) -> Result<TrialProcess<'r>, String> {
        let side = &self.session.sides[index(arm)];
        let slot = self.session.folder.link_slot_to_side(arm).map_err(|error| error.to_string())?;
        let Some(executable) = side.executables.driven.get(bench) else {
            return Err("it has no such bench".to_owned());
        };
        let mut injection = match arm {
            Arm::Base => SideInjection::default(),
            Arm::Head => self.request.injection.clone(),
        };
        injection
            .delays_ns
            .retain(|id, _| request.cases.as_ref().is_none_or(|cases| cases.contains(id)));
        Ok(TrialProcess {
            driver: executable.driver,
            program: slot.join("bin").join(bench),
            hash: &executable.hash,
            package: side.package_folder_of(bench).clone(),
            commit: side.commit.clone(),
            injection,
            request,
            timeout,
        })
    }

    /// Runs a process and returns its run; `None` if it has no requested case.
    pub(super) fn run_process(
        &self,
        arm: Arm,
        bench: &str,
        request: &TrialRequest,
        timeout: Duration,
    ) -> Result<Option<ProcessRun>, String> {
        let trial = self.describe_trial(arm, bench, request, timeout)?;
        let setup = self.setup();
        let busy = (arm == Arm::Head).then(|| self.start_co_running(&setup, &trial)).transpose()?;
        let outcome = trial_driver::run(&setup, &trial);
        drop(busy);
        if arm == Arm::Head
            && matches!(self.co_running, CoRunningLoad::Process(_))
            && !self.session.co_running.kill_and_wait()
        {
            return Err("the co-running load ended by itself".to_owned());
        }
        outcome
    }

    /// Starts the artificial load that runs beside a trial.
    fn start_co_running(
        &self,
        setup: &TrialSetup<'_>,
        trial: &TrialProcess<'_>,
    ) -> Result<Option<BusyLoadThreads>, String> {
        match self.co_running {
            CoRunningLoad::Nothing => Ok(None),
            CoRunningLoad::Threads(count) => Ok(Some(BusyLoadThreads::start_on_threads(count))),
            CoRunningLoad::Process(after) => {
                let one = trial.request.cases.iter().flatten().next().cloned();
                let request = TrialRequest {
                    session: "co-running".to_owned(),
                    record: self.session.work.join("co-running-run.json"),
                    cases: Some(one.into_iter().collect()),
                    sampling: TrialSampling::ENDLESS_SAMPLING,
                    ..trial.request.clone()
                };
                let other = TrialProcess { request: &request, ..trial.clone() };
                trial_driver::start_co_running(setup, &other, &self.session.co_running)?;
                std::thread::sleep(after);
                Ok(None)
            }
        }
    }

    /// Prints and records that a process failed.
    pub(super) fn record_failed_process(
        &mut self,
        arm: Arm,
        bench: &str,
        reason: String,
        abandoned: bool,
    ) {
        self.progress.say(&format!("error: {arm} {bench}: {reason}"));
        self.broken.push(FailedProcess { bench: bench.to_owned(), side: arm, reason, abandoned });
    }

    /// Runs blocks until every selected case is decided or the budget or the plan's blocks are used
    /// up.
    fn run_round(
        &mut self,
        round: u32,
        benches: &[ComparedBench],
        selected: &BTreeSet<String>,
    ) -> Result<PairedOutcome, CompareError> {
        let plan = self.plan;
        let mut shown = RoundProgress::default();
        loop {
            let spent = self.facts_of(round).map_or(0.0, |facts| facts.wall_s);
            let left = self.request.budget.saturating_sub(Duration::from_secs_f64(spent));
            let observed = rounds::whole_blocks_by_case(&self.trials.trials, round);
            let of_case = |case: &str| plan.within(&self.rules.resolve(case, &self.limits));
            let outcome = decide_cases(&observed, &plan, &of_case, self.family, false);
            let mut todo = rounds::undecided_cases(selected, &observed, &outcome);
            let (failed, stopped) = (
                rounds::failure_reasons(&self.trials.trials),
                rounds::stop_reasons(&self.trials.trials),
            );
            todo.retain(|id| !failed.contains_key(id) && !stopped.contains_key(id));
            let done =
                |bench: &ComparedBench| rounds::next_block(&self.trials.trials, round, &bench.name);
            let alive: Vec<&ComparedBench> = benches
                .iter()
                .filter(|bench| {
                    done(bench) < plan.max_blocks && bench.cases.iter().any(|id| todo.contains(id))
                })
                .filter(|bench| {
                    !self.broken.iter().any(|broken| broken.bench == bench.name && broken.abandoned)
                })
                .collect();
            // Half a block over the budget is closer to the budget than half a block less.
            let block = self.block_time(round);
            if alive.is_empty() || left.is_zero() || left < block / 2 {
                return Ok(decide_cases(&observed, &plan, &of_case, self.family, true));
            }
            self.show_progress(round, (selected.len(), &todo), &outcome, left, &mut shown);
            for bench in alive {
                self.run_block(round, bench, &todo)?;
            }
        }
    }

    /// Wall time of one block of trials, averaged over the blocks so far: each block runs every
    /// bench.
    fn block_time(&self, round: u32) -> Duration {
        self.facts_of(round).map_or(Duration::ZERO, |facts| {
            Duration::from_secs_f64(facts.wall_s / facts.blocks.max(1) as f64)
        })
    }

    /// Shows the progress of a round and the time left.
    fn show_progress(
        &self,
        round: u32,
        (selected, todo): (usize, &BTreeSet<String>),
        outcome: &PairedOutcome,
        left: Duration,
        shown: &mut RoundProgress,
    ) {
        let trials = &self.trials.trials;
        let blocks = self.facts_of(round).map_or(0, |facts| facts.blocks);
        let estimate = rounds::time_left(trials, round, todo, outcome, &self.plan);
        let most_s = if blocks == 0 { f64::INFINITY } else { estimate.most_s };
        let at_most = |seconds: f64| {
            progress::duration(Duration::try_from_secs_f64(seconds).unwrap_or(left).min(left))
        };
        let most = at_most(most_s);
        let ahead = if blocks < MIN_BLOCKS_FOR_TIME_LEFT {
            format!("at most {most} left")
        } else {
            let passed_s = shown.estimated.map_or(0.0, |at| at.elapsed().as_secs_f64());
            let smoothed = estimate.smoothed_estimate(shown.estimate, passed_s);
            (shown.estimate, shown.estimated) = (Some(smoothed), Some(Instant::now()));
            format!("about {} left, at most {most}", at_most(smoothed.likely_s))
        };
        let decided = selected.saturating_sub(todo.len());
        let text = format!(
            "round {round}: {blocks} blocks done, {decided} of {selected} cases decided, {ahead}"
        );
        match shown.decided.replace(decided) == Some(decided) {
            true => self.progress.print_often(&text),
            false => self.progress.show_step(&text),
        }
    }

    pub(super) fn trial_request(
        &self,
        bench: &ComparedBench,
        arm: Arm,
        session: String,
        cases: BTreeSet<String>,
    ) -> TrialRequest {
        TrialRequest {
            first: bench.first.intersection(&cases).cloned().collect(),
            cases: Some(cases),
            verified: Some(bench.verified[index(arm)].clone()),
            inputs: Some(self.inputs(arm)),
            ..TrialRequest::new(session, self.session.work.join("run.json"), bench.sampling)
        }
    }

    /// Returns the time of each case in a process's run. A threshold in nanoseconds that was asked
    /// for is meant for every time.
    fn timings(&self, run: &ProcessRun) -> BTreeMap<String, CaseTiming> {
        let mut timings = rounds::timings_by_case(run);
        let for_all = self.request.plan.asked.absolute_ns.is_some();
        timings.values_mut().for_each(|timing| timing.averaged &= !for_all);
        timings
    }

    /// Runs a block: four processes of a bench with equal cases.
    fn run_block(
        &mut self,
        round: u32,
        bench: &ComparedBench,
        todo: &BTreeSet<String>,
    ) -> Result<(), CompareError> {
        let block = rounds::next_block(&self.trials.trials, round, &bench.name);
        let cases: BTreeSet<String> = bench.cases.intersection(todo).cloned().collect();
        for place in 0..rounds::PROCESSES_PER_BLOCK {
            let arm = rounds::arm(block, place);
            let request = self.trial_request(
                bench,
                arm,
                format!("r{round}-b{block}-p{place}"),
                cases.clone(),
            );
            let started = Instant::now();
            let expected = &bench.expected[index(arm)];
            let outcome =
                self.run_process(arm, &bench.name, &request, bench.timeout).and_then(|run| {
                    run.as_ref().map_or(Ok(()), |run| expected.check(run))?;
                    Ok(run)
                });
            // The executable is checked before the block is saved, because a resumed comparison
            // uses saved blocks.
            self.session.check_executable(arm, &bench.name)?;
            let mut trial = TrialRecord {
                round,
                bench: bench.name.clone(),
                block,
                place,
                head: arm == Arm::Head,
                wall_s: started.elapsed().as_secs_f64(),
                cases: BTreeMap::new(),
                failed: BTreeMap::new(),
                skipped: BTreeMap::new(),
                broke: None,
            };
            match outcome {
                Ok(run) => {
                    trial.skipped = rounds::skip_reasons(&cases, run.as_ref());
                    trial.cases = run.as_ref().map(|run| self.timings(run)).unwrap_or_default();
                    trial.failed = run.map(|run| run.failed).unwrap_or_default();
                }
                Err(reason) => trial.broke = Some(reason),
            }
            let broke = trial.broke.clone();
            self.trials.trials.push(trial);
            if let Some(reason) = broke {
                let before = self.broken.iter().filter(|broken| broken.bench == bench.name).count();
                self.record_failed_process(
                    arm,
                    &bench.name,
                    reason,
                    before + 1 >= MAX_FAILED_PROCESSES,
                );
                break;
            }
        }
        // A resumed comparison reads whole blocks only, so trials are saved after each block.
        Ok(file::write(&self.session.folder.file(TRIALS_FILE), &self.trials)?)
    }
}

/// Index of a side in pairs of base and head.
pub(super) const fn index(arm: Arm) -> usize {
    match arm {
        Arm::Base => 0,
        Arm::Head => 1,
    }
}
