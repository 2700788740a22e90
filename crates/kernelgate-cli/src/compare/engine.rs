//! The comparison: verify, then rounds of interleaved processes until every case is decided or the
//! budget ends.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::folder;
use super::load::{BusyThreads, CoRunning};
use super::process::{self, TrialSetup};
use super::progress::{self, ComparisonProgress};
use super::session::{Bench, Prepared, Session, open_trials};
use super::sides::{Matched, Side};
use super::{CompareError, ComparisonRequest, rounds};
use crate::gate::Verdict;
use crate::gate::comparison::{Broken, Compared, Comparison, Round};
use crate::gate::paired::{Arm, Decision, Outcome, TestPlan, decide};
use kernelgate::record::{
    FileError, Provenance, Run, TrialRecord, TrialRequest, TrialSampling, Trials, file,
};

/// A process that only verifies: references may take long.
const VERIFY_TIMEOUT: Duration = Duration::from_secs(1800);
/// What a measuring process may take beyond ten times what verifying took.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(60);
/// Failed processes of a side after which its bench is abandoned.
const MAX_BROKEN: usize = 2;

/// A comparison while it runs.
pub struct Engine<'a> {
    request: &'a ComparisonRequest,
    session: &'a Session,
    progress: ComparisonProgress,
    plan: TestPlan,
    /// What is co-running while the head's processes run.
    co_running: CoRunning,
    /// Every process so far.
    pub trials: Trials,
    broken: Vec<Broken>,
}

/// Compares.
///
/// # Errors
/// When a side cannot be made ready, or what is measured cannot be written.
pub fn run(request: &ComparisonRequest) -> Result<Comparison, CompareError> {
    let session = Session::open(request, false)?;
    let identity = session.identity(request)?;
    let trials = open_trials(request, &session, identity)?;
    let mut engine = Engine::new(request, &session, trials);
    let outcome = engine.prepare().and_then(|prepared| {
        let (plan, note) = match &prepared.environment {
            Some(environment) => request.thresholds.on(
                environment,
                &prepared.provenance,
                Engine::sampling(&prepared),
            )?,
            None => (TestPlan::default(), None),
        };
        note.iter().for_each(|note| session.progress.say(note));
        engine.plan = plan;
        Ok(Comparison { calibration: note, ..engine.compare(prepared)? })
    });
    session.progress.end();
    outcome
}

impl<'a> Engine<'a> {
    /// With the trials of an interrupted comparison of the same things, or none.
    pub fn new(request: &'a ComparisonRequest, session: &'a Session, trials: Trials) -> Self {
        let progress = session.progress.clone();
        Self {
            request,
            session,
            progress,
            plan: TestPlan::default(),
            co_running: CoRunning::Nothing,
            trials,
            broken: Vec::new(),
        }
    }

    /// As one of many comparisons: with this plan and co-running load on the head, its progress a
    /// detail of `label`.
    pub fn of_many(
        request: &'a ComparisonRequest,
        session: &'a Session,
        plan: TestPlan,
        co_running: CoRunning,
        label: &str,
    ) -> Self {
        let progress = session.progress.within(label);
        Self { plan, co_running, progress, ..Self::new(request, session, Trials::default()) }
    }

    /// The first process of each executable, and what there is to compare.
    ///
    /// # Errors
    /// When there is nothing.
    pub fn prepare(&mut self) -> Result<Prepared, CompareError> {
        let mut prepared = Prepared {
            matched: Matched::default(),
            benches: Vec::new(),
            optimised: true,
            environment: None,
            provenance: Provenance::default(),
            verification_ns: BTreeMap::new(),
        };
        let names: BTreeSet<String> = self
            .session
            .sides
            .iter()
            .flat_map(|side| side.executables.ours.keys().cloned())
            .collect();
        let mut errors = Vec::new();
        for name in &names {
            let (base, head) = (self.verify(Arm::Base, name), self.verify(Arm::Head, name));
            let mut of = |verified: Result<Option<Verified>, String>| match verified {
                Ok(found) => found,
                Err(error) => {
                    errors.push(error);
                    None
                }
            };
            let (base, head) = (of(base), of(head));
            for verified in base.iter().chain(&head) {
                prepared.environment = Some(verified.run.environment.clone());
                prepared.provenance = verified.run.provenance.clone();
                prepared.optimised &= verified.run.environment.optimised;
                prepared.verification_ns.extend(
                    rounds::timings(&verified.run)
                        .into_iter()
                        .map(|(id, timing)| (id, timing.time_ns)),
                );
            }
            let before = prepared.matched.judged.clone();
            let runs =
                [&base, &head].map(|verified| verified.as_ref().map(|verified| &verified.run));
            match self.broken.iter().find(|broken| broken.bench == *name) {
                Some(broken) => prepared.matched.abandon(runs[0], runs[1], &broken.case_error()),
                None => prepared.matched.add(runs[0], runs[1]),
            }
            if let (Some(base), Some(head)) = (base, head) {
                let timeout = PROCESS_TIMEOUT + 10 * base.took.max(head.took);
                let usual = if base.run.environment.on_host() {
                    TrialSampling::MEASURED
                } else {
                    TrialSampling::MEASURED_ON_GPU
                };
                let sampling = self.request.sampling.unwrap_or(usual);
                let cases = prepared.matched.judged.difference(&before).cloned().collect();
                prepared.benches.push(Bench {
                    name: name.clone(),
                    verified: [base.path, head.path],
                    cases,
                    timeout,
                    sampling,
                });
            }
        }
        if prepared.environment.is_none() && self.broken.is_empty() {
            return Err(CompareError::Usage(match errors.first() {
                Some(error) => error.clone(),
                None => "no bench of this harness has a case that was asked for".to_owned(),
            }));
        }
        Ok(prepared)
    }

    /// One process of the base a bench, timed as any other: nanoseconds a launch by case, and how
    /// long the cases were timed.
    ///
    /// # Errors
    /// When one breaks.
    pub fn probe(&self, prepared: &Prepared) -> Result<BTreeMap<String, f64>, CompareError> {
        let mut times_ns = BTreeMap::new();
        for bench in &prepared.benches {
            let request =
                self.trial_request(bench, Arm::Base, "probe".to_owned(), bench.cases.clone());
            let run = self.process(Arm::Base, &bench.name, &request, bench.timeout);
            let run = run.map_err(|reason| {
                CompareError::Usage(format!("bench `{}` broke: {reason}", bench.name))
            })?;
            times_ns.extend(
                run.iter().flat_map(rounds::timings).map(|(id, timing)| (id, timing.time_ns)),
            );
        }
        Ok(times_ns)
    }

    /// How long a process times a case.
    pub fn sampling(prepared: &Prepared) -> TrialSampling {
        prepared.benches.first().map_or(TrialSampling::MEASURED, |bench| bench.sampling)
    }

    /// Both rounds.
    ///
    /// # Errors
    /// When what is measured cannot be written.
    pub fn compare(&mut self, prepared: Prepared) -> Result<Comparison, CompareError> {
        let Prepared { matched, benches, optimised, environment, .. } = prepared;
        let device = environment.map(|environment| environment.describe()).unwrap_or_default();
        let wanted = matched.judged.clone();
        let first = self.round(1, &benches, &wanted)?;
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
            Some(self.round(2, &benches, &slower)?)
        };
        Ok(self.conclude((matched, &benches), first, second.as_ref(), (device, optimised)))
    }

    fn conclude(
        &self,
        (mut matched, benches): (Matched, &[Bench]),
        first: Outcome,
        second: Option<&Outcome>,
        facts: (String, bool),
    ) -> Comparison {
        matched.failed.extend(rounds::failures(&self.trials.trials));
        let mut unmeasured = self.without_block(&matched, benches, &first);
        unmeasured.append(&mut matched.unmeasured);
        unmeasured.retain(|id, _| !matched.failed.contains_key(id));
        let stopped = rounds::stopped(&self.trials.trials);
        // A bench that was abandoned explains what is open; what was decided before stays decided.
        let open = |decision: &Decision| {
            matches!(decision.verdict, Verdict::Inconclusive | Verdict::Regressed)
        };
        let case_error = |decision: &Decision| {
            let abandoned = || self.abandoned(benches, &decision.case).filter(|_| open(decision));
            stopped.get(&decision.case).cloned().or_else(abandoned)
        };
        let again =
            |decision: &Decision| second.and_then(|second| second.of(&decision.case)).cloned();
        let mut judged: Vec<Compared> = first
            .decisions
            .into_iter()
            .filter(|decision| !matched.failed.contains_key(&decision.case))
            .map(|decision| {
                let confirmation =
                    again(&decision).filter(|_| decision.verdict == Verdict::Regressed);
                let case_error = case_error(&decision);
                Compared::new(decision, confirmation, case_error)
            })
            .collect();
        judged.extend(
            unmeasured.into_iter().map(|(id, why)| Compared::unmeasured(id, why, &self.plan)),
        );
        judged.sort_by(|a, b| {
            a.verdict.cmp(&b.verdict).then_with(|| a.decision.case.cmp(&b.decision.case))
        });
        let [base, head] = &self.session.sides;
        let same = |name: &String| {
            let hash = |side: &Side| {
                side.executables.ours.get(name).map(|executable| executable.hash.clone())
            };
            hash(base).is_some() && hash(base) == hash(head)
        };
        let foreign: BTreeSet<&String> =
            self.session.sides.iter().flat_map(|side| side.executables.foreign.keys()).collect();
        Comparison {
            base: base.label.clone(),
            head: head.label.clone(),
            device: facts.0,
            plan: self.plan,
            budget_s: self.request.budget.as_secs_f64(),
            calibration: None,
            judged,
            refused: matched.refusals(),
            new: matched.new,
            removed: matched.removed,
            skipped: matched.skipped,
            failed: matched.failed,
            failed_in_base: matched.failed_in_base,
            broken: self.broken.clone(),
            foreign: foreign.into_iter().cloned().collect(),
            identical: base.executables.ours.keys().filter(|name| same(name)).cloned().collect(),
            optimised: facts.1,
            delays: self.request.head_delays.clone(),
            rounds: [1, 2].into_iter().filter_map(|round| self.facts_of(round)).collect(),
        }
    }

    /// Cases that were to be compared and got no block, with the reason.
    fn without_block(
        &self,
        matched: &Matched,
        benches: &[Bench],
        first: &Outcome,
    ) -> BTreeMap<String, String> {
        let stopped = rounds::stopped(&self.trials.trials);
        let limits = (self.request.budget.as_secs_f64(), self.plan.max_blocks);
        let why = |id: &String| {
            let reason = stopped.get(id).cloned().or_else(|| self.abandoned(benches, id));
            reason.unwrap_or_else(|| {
                format!("no block of it ended within {:.0} s and {} blocks", limits.0, limits.1)
            })
        };
        let without = matched.judged.iter().filter(|id| first.of(id).is_none());
        without.map(|id| (id.clone(), why(id))).collect()
    }

    /// Why the bench of a case was abandoned.
    fn abandoned(&self, benches: &[Bench], id: &str) -> Option<String> {
        let bench = benches.iter().find(|bench| bench.cases.contains(id))?;
        let broken =
            self.broken.iter().find(|broken| broken.given_up && broken.bench == bench.name)?;
        Some(broken.case_error())
    }

    fn facts_of(&self, round: u32) -> Option<Round> {
        let trials = || self.trials.trials.iter().filter(move |trial| trial.round == round);
        let blocks = trials().map(|trial| trial.block + 1).max()?;
        Some(Round {
            blocks,
            processes: trials().count(),
            wall_s: trials().map(|trial| trial.wall_s).sum(),
        })
    }

    /// The first process of an executable: every case against the reference. An executable that is
    /// the same on both sides is verified once.
    fn verify(&mut self, arm: Arm, bench: &str) -> Result<Option<Verified>, String> {
        let Some(executable) = self.session.sides[index(arm)].executables.ours.get(bench).cloned()
        else {
            return Ok(None);
        };
        let path = self.verified_path(arm, bench);
        let known = |path: PathBuf| {
            let run = file::read::<Run>(&path).ok()?;
            let same = run.complete && run.executable.as_ref() == Some(&executable.hash);
            same.then_some(Verified { run, path, took: Duration::ZERO })
        };
        let twin = self.session.sides[0]
            .executables
            .ours
            .get(bench)
            .is_some_and(|other| arm == Arm::Head && *other == executable);
        // On resuming, what verified the same executable stands; else only what verified it just
        // now.
        let earlier = if twin { self.verified_path(Arm::Base, bench) } else { path.clone() };
        if (twin || !self.trials.trials.is_empty())
            && let Some(found) = known(earlier)
        {
            return Ok(Some(found));
        }
        self.progress.now(&format!("verifying {} {bench}", folder::name(arm)));
        let request = TrialRequest {
            session: "verify".to_owned(),
            record: path.clone(),
            cases: None,
            verified: None,
            inputs: Some(self.inputs(arm)),
            pace: TrialSampling::VERIFICATION_PASS,
        };
        let started = Instant::now();
        match self.process(arm, bench, &request, VERIFY_TIMEOUT) {
            Ok(run) => Ok(run.map(|run| Verified { run, path, took: started.elapsed() })),
            Err(reason) if reason.contains("no case matches") => Err(reason),
            Err(reason) => {
                self.broke(arm, bench, reason, true);
                Ok(None)
            }
        }
    }

    fn verified_path(&self, arm: Arm, bench: &str) -> PathBuf {
        self.session.folder.side(arm).join("verified").join(format!("{bench}.json"))
    }

    fn inputs(&self, arm: Arm) -> PathBuf {
        self.session.folder.side(arm).join("inputs")
    }

    fn process(
        &self,
        arm: Arm,
        bench: &str,
        request: &TrialRequest,
        timeout: Duration,
    ) -> Result<Option<Run>, String> {
        let side = &self.session.sides[index(arm)];
        let slot = self.session.folder.point_slot(arm).map_err(|error| error.to_string())?;
        let Some(executable) = side.executables.ours.get(bench) else {
            return Err("it has no such bench".to_owned());
        };
        let trial = process::TrialProcess {
            version: executable.version,
            program: slot.join("bin").join(bench),
            package: side.package.clone(),
            commit: side.commit.clone(),
            delays: self.request.head_delays.as_deref().filter(|_| arm == Arm::Head),
            request,
            timeout,
        };
        let setup = TrialSetup {
            settings: &self.request.settings,
            filter: self.request.filter.as_deref(),
            work: &self.session.work,
            running: &self.session.running,
        };
        let busy = (arm == Arm::Head).then(|| self.start_co_running(&setup, &trial)).transpose()?;
        let outcome = process::run(&setup, &trial);
        drop(busy);
        if arm == Arm::Head
            && matches!(self.co_running, CoRunning::Process(_))
            && !self.session.co_running.end()
        {
            return Err("the load beside it ended by itself".to_owned());
        }
        outcome
    }

    /// Starts what is to be co-running with a trial.
    fn start_co_running(
        &self,
        setup: &TrialSetup<'_>,
        trial: &process::TrialProcess<'_>,
    ) -> Result<Option<BusyThreads>, String> {
        match self.co_running {
            CoRunning::Nothing => Ok(None),
            CoRunning::Threads(count) => Ok(Some(BusyThreads::start(count))),
            CoRunning::Process(after) => {
                let one = trial.request.cases.iter().flatten().next().cloned();
                let request = TrialRequest {
                    session: "beside".to_owned(),
                    record: self.session.work.join("beside-run.json"),
                    cases: Some(one.into_iter().collect()),
                    pace: TrialSampling::ENDLESS,
                    ..trial.request.clone()
                };
                let other = process::TrialProcess {
                    program: trial.program.clone(),
                    package: trial.package.clone(),
                    commit: trial.commit.clone(),
                    request: &request,
                    ..*trial
                };
                process::start_co_running(setup, &other, &self.session.co_running)?;
                std::thread::sleep(after);
                Ok(None)
            }
        }
    }

    fn broke(&mut self, arm: Arm, bench: &str, reason: String, given_up: bool) {
        self.progress.say(&format!("error: {} {bench}: {reason}", folder::name(arm)));
        self.broken.push(Broken {
            bench: bench.to_owned(),
            side: folder::name(arm).to_owned(),
            reason,
            given_up,
        });
    }

    /// Blocks until every wanted case is decided or the budget or the plan's blocks are used up.
    fn round(
        &mut self,
        round: u32,
        benches: &[Bench],
        wanted: &BTreeSet<String>,
    ) -> Result<Outcome, CompareError> {
        let plan = self.plan;
        loop {
            let spent = self.facts_of(round).map_or(0.0, |facts| facts.wall_s);
            let left = self.request.budget.saturating_sub(Duration::from_secs_f64(spent));
            let observed = rounds::observed(&self.trials.trials, round);
            let outcome = decide(&observed, &plan, false);
            let mut todo = rounds::undecided(wanted, &observed, &outcome);
            let (failed, stopped) =
                (rounds::failures(&self.trials.trials), rounds::stopped(&self.trials.trials));
            todo.retain(|id| !failed.contains_key(id) && !stopped.contains_key(id));
            let done = |bench: &Bench| rounds::next_block(&self.trials.trials, round, &bench.name);
            let alive: Vec<&Bench> = benches
                .iter()
                .filter(|bench| {
                    done(bench) < plan.max_blocks && bench.cases.iter().any(|id| todo.contains(id))
                })
                .filter(|bench| {
                    !self.broken.iter().any(|broken| broken.bench == bench.name && broken.given_up)
                })
                .collect();
            // Half a block over the budget is nearer to it than half a block short of it.
            let block = self.block_time(round);
            if alive.is_empty() || left.is_zero() || left < block / 2 {
                return Ok(decide(&observed, &plan, true));
            }
            self.tell(round, wanted.len(), &todo, &outcome, left);
            for bench in alive {
                self.block(round, bench, &todo)?;
            }
        }
    }

    /// What a block of every bench takes, on average.
    fn block_time(&self, round: u32) -> Duration {
        self.facts_of(round).map_or(Duration::ZERO, |facts| {
            Duration::from_secs_f64(facts.wall_s / facts.blocks.max(1) as f64)
        })
    }

    fn tell(
        &self,
        round: u32,
        wanted: usize,
        todo: &BTreeSet<String>,
        outcome: &Outcome,
        left: Duration,
    ) {
        let facts = self.facts_of(round);
        let blocks = facts.map_or(0, |facts| facts.blocks);
        let block = self.block_time(round);
        let ahead = match blocks {
            0 => format!("at most {} ahead", progress::duration(left)),
            _ => format!(
                "about {} left",
                progress::duration(rounds::time_left(outcome, blocks, &self.plan, block, left))
            ),
        };
        let decided = wanted.saturating_sub(todo.len());
        self.progress.now(&format!(
            "round {round}: {blocks} blocks done, {decided} of {wanted} cases decided, {ahead}"
        ));
    }

    fn trial_request(
        &self,
        bench: &Bench,
        arm: Arm,
        session: String,
        cases: BTreeSet<String>,
    ) -> TrialRequest {
        TrialRequest {
            session,
            record: self.session.work.join("run.json"),
            cases: Some(cases),
            verified: Some(bench.verified[index(arm)].clone()),
            inputs: Some(self.inputs(arm)),
            pace: bench.sampling,
        }
    }

    /// Four processes of a bench, all with the same cases.
    fn block(
        &mut self,
        round: u32,
        bench: &Bench,
        todo: &BTreeSet<String>,
    ) -> Result<(), CompareError> {
        let block = rounds::next_block(&self.trials.trials, round, &bench.name);
        let cases: BTreeSet<String> = bench.cases.intersection(todo).cloned().collect();
        for place in 0..rounds::PLACES {
            let arm = rounds::arm(block, place);
            let request = self.trial_request(
                bench,
                arm,
                format!("r{round}-b{block}-p{place}"),
                cases.clone(),
            );
            let started = Instant::now();
            let outcome = self.process(arm, &bench.name, &request, bench.timeout);
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
                    trial.skipped = rounds::skips(&cases, run.as_ref());
                    trial.cases = run.as_ref().map(rounds::timings).unwrap_or_default();
                    trial.failed = run.map(|run| run.failed).unwrap_or_default();
                }
                Err(reason) => trial.broke = Some(reason),
            }
            let broke = trial.broke.clone();
            self.trials.trials.push(trial);
            file::write(&self.session.folder.file("trials.json"), &self.trials)
                .map_err(|error| failed_to(&error))?;
            if let Some(reason) = broke {
                let before = self.broken.iter().filter(|broken| broken.bench == bench.name).count();
                self.broke(arm, &bench.name, reason, before + 1 >= MAX_BROKEN);
                return Ok(());
            }
        }
        Ok(())
    }
}

/// A run that verified an executable.
struct Verified {
    run: Run,
    path: PathBuf,
    took: Duration,
}

const fn index(arm: Arm) -> usize {
    match arm {
        Arm::Base => 0,
        Arm::Head => 1,
    }
}

fn failed_to(error: &FileError) -> CompareError {
    CompareError::Usage(format!("failed to {error}"))
}
