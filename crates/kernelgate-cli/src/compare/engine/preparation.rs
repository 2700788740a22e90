//! Runs the first process of each executable, which verifies its cases, or lists them if nothing
//! verifies them, and finds the cases that both sides have.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::rounds;
use super::{ComparisonEngine, index};
use crate::compare::session::{ComparedBench, PreparedSides};
use crate::compare::sides::copy_benches::{BenchDriver, InstalledBench};
use crate::compare::trials::by_criterion::{self, CaseListFailure};
use crate::compare::trials::expected_record::ExpectedRun;
use crate::compare::{CompareError, ComparisonRequest};
use crate::gate::comparison::CriterionOnlyBench;
use crate::gate::inconclusive_reason::{BuildFailure, InconclusiveReason};
use crate::gate::paired::Arm;
use kernelgate::measure::power::PowerState;
use kernelgate::record::{
    ProcessRun, Shard, ShardPartition, TrialRequest, TrialSampling, VerificationExtent, file,
};

/// Timeout of a process that only verifies: references may take long.
pub(super) const VERIFY_TIMEOUT: Duration = Duration::from_secs(1800);
/// Timeout of a process that only lists its cases.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of a measuring process beyond ten times the time of the verification.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(60);

/// A process run that verified an executable, or showed that a bench measures.
struct VerificationRun {
    run: ProcessRun,
    path: PathBuf,
    took: Duration,
    driver: BenchDriver,
    /// Number of cases that all shards have together.
    planned: usize,
}

/// Reason why an executable has no verification run.
enum UnverifiedReason {
    /// Base or head does not have the bench.
    Absent,
    /// The bench failed, which was reported; the ids of the cases that it listed before.
    Broke(BTreeSet<String>),
    /// The bench has none of the requested cases; the text is its message.
    NoCase(String),
    /// The bench has neither kernelgate's nor Criterion's flags; the text states the reason.
    Undrivable(String),
}

impl ComparisonEngine<'_> {
    /// Runs the first process of each executable, and matches the cases of both sides.
    pub fn prepare(&mut self) -> Result<PreparedSides, CompareError> {
        let mut prepared = PreparedSides::default();
        let names: BTreeSet<String> = self
            .session
            .sides
            .iter()
            .flat_map(|side| side.executables.driven.keys().cloned())
            .collect();
        let mut errors = Vec::new();
        for name in &names {
            let (mut undrivable, mut listed) = (None, BTreeSet::new());
            let mut verified = [Arm::Base, Arm::Head].map(|arm| match self.verify(arm, name) {
                Ok(verified) => Some(verified),
                Err(UnverifiedReason::Absent) => None,
                Err(UnverifiedReason::Broke(cases)) => {
                    listed.extend(cases);
                    None
                }
                Err(UnverifiedReason::NoCase(why)) => {
                    errors.push(why);
                    None
                }
                Err(UnverifiedReason::Undrivable(why)) => {
                    self.progress.say(&format!("left alone: {name} of the {arm}: {why}"));
                    undrivable =
                        Some(InconclusiveReason::Undrivable(BuildFailure::new(arm, why.as_str())));
                    self.undrivable.insert(name.clone(), why);
                    None
                }
            });
            for verified in verified.iter().flatten() {
                prepared.note_shared_facts(verified);
            }
            self.match_cases(&mut prepared, name, &mut verified, undrivable);
            prepared.matched.abandon_listed_cases(listed, || self.bench_failure(name));
        }
        if let Some(note) = no_effect_reason(self.request, &prepared) {
            self.progress.detail(&note);
        }
        if prepared.environment.is_none() && self.broken.is_empty() {
            let undrivable =
                self.undrivable.iter().next().map(|(bench, why)| format!("bench `{bench}`: {why}"));
            let why = errors.into_iter().next().or(undrivable);
            return Err(why.map_or(CompareError::NoCase, CompareError::NothingSelected));
        }
        Ok(prepared)
    }

    /// Sorts the cases of a bench, and keeps the data that its trials need.
    fn match_cases(
        &self,
        prepared: &mut PreparedSides,
        name: &str,
        verified: &mut [Option<VerificationRun>; 2],
        undrivable: Option<InconclusiveReason>,
    ) {
        let error = self.bench_failure(name);
        for run in verified.iter_mut().flatten() {
            prepared.matched.remove_duplicate_cases(&mut run.run, &prepared.owners, name);
        }
        let before = prepared.matched.judged.clone();
        self.compare_with_base(name, verified);
        let [base, head] = [&verified[0], &verified[1]].map(|side| side.as_ref().map(|it| &it.run));
        match error.or(undrivable).as_ref() {
            Some(why) => prepared.matched.abandon_cases(base, head, why),
            None => prepared.matched.add(base, head),
        }
        if verified.iter().flatten().all(|side| side.driver == BenchDriver::Criterion) {
            prepared.matched.keep_skipped_cases(base, head);
        }
        for run in [base, head].into_iter().flatten() {
            let ids = run.cases.keys().chain(run.failed.keys()).chain(run.skipped.keys());
            for id in ids {
                prepared.owners.entry(id.clone()).or_insert_with(|| name.to_owned());
            }
        }
        let [Some(base), Some(head)] = verified else { return };
        prepared.planned_cases += base.planned.min(head.planned);
        let both = head.run.cases.iter().filter_map(|(id, head)| {
            let values = [base.run.cases.get(id)?, head].map(|case| case.verification.value());
            Some((id.clone(), values))
        });
        prepared.verification.extend(both);
        let requested = self.request.sampling;
        let sampling = if base.run.environment.is_on_host() {
            requested.unwrap_or(TrialSampling::HOST_SAMPLING)
        } else {
            requested.map_or(TrialSampling::GPU_SAMPLING, TrialSampling::sampling_on_gpu)
        };
        let cases: BTreeSet<String> =
            prepared.matched.judged.difference(&before).cloned().collect();
        let burst = self.request.settings.get("KERNELGATE_POWER").is_some_and(|it| it == "burst");
        let power = if burst { PowerState::Burst } else { PowerState::Steady };
        let driver = BenchDriver::for_both_sides(base.driver, head.driver);
        let power = (driver != BenchDriver::Criterion).then_some(power);
        let timeout = PROCESS_TIMEOUT + 10 * base.took.max(head.took);
        let bench = ComparedBench {
            name: name.to_owned(),
            verified: [base.path.clone(), head.path.clone()],
            expected: [&*base, &*head]
                .map(|side| ExpectedRun::from_verified(&side.run, &cases, power)),
            cases,
            timeout: self.request.wait.unwrap_or(timeout),
            sampling,
            driver,
            first: BTreeSet::new(),
        };
        if bench.driver == BenchDriver::Criterion && !bench.cases.is_empty() {
            let found = criterion_bench(&bench, head);
            self.progress.detail(&found.words());
            prepared.criterion.push(found);
        }
        prepared.benches.push(bench);
    }

    /// Runs the first process of an executable, which compares every case with the reference. An
    /// executable that is the same on both sides is verified once, if the files that it may read
    /// are the same too: golden tensors, for example.
    fn verify(&mut self, arm: Arm, bench: &str) -> Result<VerificationRun, UnverifiedReason> {
        let Some(executable) =
            self.session.sides[index(arm)].executables.driven.get(bench).cloned()
        else {
            return Err(UnverifiedReason::Absent);
        };
        let path = self.verification_record_path(arm, bench);
        let driver = executable.driver;
        let sources = &self.session.sides[index(arm)].sources;
        let earlier_run = |path: PathBuf| {
            let run = file::read::<ProcessRun>(&path).ok()?;
            // Whether the source files that the executable read belong to the recorded commit.
            let read = sources.is_none() || run.provenance.commit == *sources;
            let same = read && run.complete && run.executable.as_ref() == Some(&executable.hash);
            // Duration of the process that verified the outputs earlier.
            let took = Duration::from_secs_f64(run.spent_s.get("whole").copied().unwrap_or(0.0));
            let planned = planned_cases(&run);
            same.then_some(VerificationRun { run, path, took, driver, planned })
        };
        let [base, head] = &self.session.sides;
        let twin = arm == Arm::Head
            && base.sources == head.sources
            && base
                .executables
                .driven
                .get(bench)
                .is_some_and(|base| base.has_same_contents(&executable));
        // A resumed comparison accepts an earlier verification of the executable; otherwise only
        // the verification by this process counts.
        let earlier =
            if twin { self.verification_record_path(Arm::Base, bench) } else { path.clone() };
        if (twin || !self.trials.trials.is_empty())
            && let Some(found) = earlier_run(earlier)
        {
            return Ok(found);
        }
        match driver {
            BenchDriver::Protocol(_) => self.verify_kernelgate_bench(arm, bench, path, driver),
            BenchDriver::Criterion => self.try_criterion(arm, &executable, path),
        }
    }

    fn verify_kernelgate_bench(
        &mut self,
        arm: Arm,
        bench: &str,
        path: PathBuf,
        driver: BenchDriver,
    ) -> Result<VerificationRun, UnverifiedReason> {
        self.progress.show_step(&format!("verifying {arm} {bench}"));
        // Stored outputs must come from the base's executable, because outputs of another
        // executable are not a reference.
        let of_base = self.session.sides[index(Arm::Base)].executables.driven.get(bench);
        let outputs = of_base.map(|base| self.session.work.join("outputs").join(&base.hash));
        let request = TrialRequest {
            inputs: Some(self.inputs(arm)),
            keep_outputs: outputs.clone().filter(|_| arm == Arm::Base),
            base_outputs: outputs.filter(|_| arm == Arm::Head),
            anchors: self.request.shard.is_some(),
            ..TrialRequest::new("verify", path.clone(), TrialSampling::VERIFICATION_SAMPLING)
        };
        let started = Instant::now();
        let timeout = self.request.wait.unwrap_or(VERIFY_TIMEOUT);
        match self.run_process(arm, bench, &request, timeout) {
            Ok(Some(run)) => {
                let (took, planned) = (started.elapsed(), planned_cases(&run));
                Ok(VerificationRun { run, path, took, driver, planned })
            }
            Ok(None) => Err(UnverifiedReason::Absent),
            Err(reason) => Err(match reason.find("no case matches") {
                Some(at) => UnverifiedReason::NoCase(reason[at..].to_owned()),
                None => self.abandon_failed_bench(arm, bench, reason, BTreeSet::new()),
            }),
        }
    }

    /// Runs the first processes of a bench of Criterion alone: one that lists its cases, and one
    /// that measures as all later ones do, which shows their cost.
    fn try_criterion(
        &mut self,
        arm: Arm,
        executable: &InstalledBench,
        path: PathBuf,
    ) -> Result<VerificationRun, UnverifiedReason> {
        let bench = &*executable.bench;
        self.progress.show_step(&format!("trying {arm} {bench}"));
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
        let package = self.session.sides[index(arm)].package_folder_of(bench).clone();
        let program = slot.join("bin").join(bench);
        let timeout = self.request.wait.unwrap_or(LIST_TIMEOUT);
        let listed = match by_criterion::list_criterion_cases(
            &self.setup(),
            (&program, &package),
            timeout,
        ) {
            Ok(listed) => listed,
            Err(CaseListFailure::Undrivable(why)) => return Err(UnverifiedReason::Undrivable(why)),
            Err(CaseListFailure::Broken(why)) => {
                return Err(self.abandon_failed_bench(arm, bench, why, BTreeSet::new()));
            }
        };
        let request = TrialRequest::new(
            "verify",
            path.clone(),
            self.request.sampling.unwrap_or(TrialSampling::HOST_SAMPLING),
        );
        let started = Instant::now();
        let timeout = self.request.wait.unwrap_or(VERIFY_TIMEOUT);
        let run = self
            .describe_trial(arm, bench, &request, timeout)
            .and_then(|trial| by_criterion::measure_listed_cases(&self.setup(), &trial, &listed));
        let mut run = match run {
            Ok(run) => run,
            Err(reason) => {
                let cases = listed.ids(self.request.filter.as_deref());
                return Err(self.abandon_failed_bench(arm, bench, reason, cases));
            }
        };
        if run.cases.is_empty() {
            return Err(match (&self.request.filter, run.skipped.first_key_value()) {
                (Some(filter), None) => {
                    UnverifiedReason::NoCase(format!("no case matches `{filter}`"))
                }
                (_, why) => {
                    let why = why.map_or("it left nothing", |(_, why)| why);
                    UnverifiedReason::Undrivable(format!("asked to measure, {why}"))
                }
            });
        }
        let planned = run.cases.len();
        if let Some(shard) = self.request.shard {
            keep_shard(&mut run, shard);
        }
        if let Err(error) = file::write(&path, &run) {
            let cases = run.cases.into_keys().collect();
            return Err(self.abandon_failed_bench(arm, bench, error.to_string(), cases));
        }
        let driver = executable.driver;
        Ok(VerificationRun { run, path, took: started.elapsed(), driver, planned })
    }

    /// For cases that only the base can verify, compares the head's outputs with those of the base.
    /// The base runs these cases once more to store their outputs, because it was not known before
    /// which are needed. If one of these processes fails, the cases stay unverified.
    fn compare_with_base(&self, bench: &str, verified: &mut [Option<VerificationRun>; 2]) {
        let [Some(base), Some(head)] = verified else { return };
        let by_protocol = |side: &VerificationRun| matches!(side.driver, BenchDriver::Protocol(_));
        let of_base = self.session.sides[index(Arm::Base)].executables.driven.get(bench);
        let Some(executable) = of_base.filter(|_| by_protocol(base) && by_protocol(head)) else {
            return;
        };
        let lost: BTreeSet<String> = head
            .run
            .cases
            .iter()
            .filter(|(_, case)| case.verification.value() == VerificationExtent::Unverified)
            .filter(|(id, _)| {
                base.run.cases.get(*id).is_some_and(|it| it.verification.value().is_verified())
            })
            .map(|(id, _)| id.clone())
            .collect();
        if lost.is_empty() {
            return;
        }
        self.progress.detail(&format!("{} cases of {bench} are no longer verified", lost.len()));
        let outputs = self.session.work.join("outputs").join(&executable.hash);
        let timeout = self.request.wait.unwrap_or(VERIFY_TIMEOUT);
        let process = |arm: Arm| {
            let request = TrialRequest {
                cases: Some(lost.clone()),
                inputs: Some(self.inputs(arm)),
                keep_outputs: Some(outputs.clone()).filter(|_| arm == Arm::Base),
                keep_verified: arm == Arm::Base,
                base_outputs: Some(outputs.clone()).filter(|_| arm == Arm::Head),
                ..TrialRequest::new(
                    "verify",
                    self.session.work.join("outputs.json"),
                    TrialSampling::VERIFICATION_SAMPLING,
                )
            };
            self.run_process(arm, bench, &request, timeout).unwrap_or_else(|why| {
                self.progress.say(&format!("error: {arm} {bench}, outputs of the base: {why}"));
                None
            })
        };
        let Some(run) = process(Arm::Base).and_then(|_| process(Arm::Head)) else {
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
        if let Err(error) = file::write(&head.path, &head.run) {
            self.progress.say(&error.to_string());
        }
    }

    /// Abandons a bench that failed in its first process, with the cases that it had listed.
    fn abandon_failed_bench(
        &mut self,
        arm: Arm,
        bench: &str,
        reason: String,
        cases: BTreeSet<String>,
    ) -> UnverifiedReason {
        self.record_failed_process(arm, bench, reason, true);
        UnverifiedReason::Broke(cases)
    }

    /// The reason why the cases of a failed bench have no times.
    fn bench_failure(&self, bench: &str) -> Option<InconclusiveReason> {
        let broken = self.broken.iter().find(|broken| broken.bench == *bench);
        broken.map(|broken| broken.case_error())
    }

    fn verification_record_path(&self, arm: Arm, bench: &str) -> PathBuf {
        self.session.folder.side_folder_path(arm).join("verified").join(format!("{bench}.json"))
    }
}

impl PreparedSides {
    /// Records facts that all benches share, taken from a bench with kernelgate's harness if there
    /// is one.
    fn note_shared_facts(&mut self, VerificationRun { run, driver, .. }: &VerificationRun) {
        self.plans.extend(run.plan.iter().map(|plan| plan.digest.clone()));
        self.anchors = self.anchors.take().or_else(|| run.anchors.clone());
        if self.environment.is_none() || *driver != BenchDriver::Criterion {
            self.environment = Some(run.environment.clone());
            self.provenance = run.provenance.clone();
        }
        self.optimised &= run.environment.optimised;
        self.verification_ns.extend(
            rounds::timings_by_case(run).into_iter().map(|(id, timing)| (id, timing.time_ns)),
        );
    }
}

/// Number of cases of all shards together; a run verified the cases of one shard.
fn planned_cases(run: &ProcessRun) -> usize {
    run.plan.as_ref().map_or(run.cases.len(), |plan| plan.cases)
}

/// Keeps the cases of a shard in a run of Criterion alone. A run of Criterion has no problems, so
/// each case counts as one problem.
fn keep_shard(run: &mut ProcessRun, shard: Shard) {
    let partition = ShardPartition::divide_by_hash(shard);
    let ids = run.cases.keys().map(|id| (id.clone(), vec![id.as_str()]));
    run.plan = Some(partition.plan_of_problems(&run.bench, ids));
    run.shard = Some(shard);
    run.cases.retain(|id, _| partition.has(id));
    run.skipped.retain(|id, _| partition.has(id));
    run.failed.retain(|id, _| partition.has(id));
}

/// Reports our settings that have no effect in benches of Criterion alone, if the comparison has
/// both kinds.
fn no_effect_reason(request: &ComparisonRequest, prepared: &PreparedSides) -> Option<String> {
    let benches: Vec<&str> = prepared.criterion.iter().map(|it| it.bench.as_str()).collect();
    let flag = |variable: &String| {
        let name = variable.strip_prefix("KERNELGATE_").unwrap_or(variable);
        format!("--{} ({variable})", name.to_lowercase())
    };
    let without_shard = request.settings.keys().filter(|name| *name != "KERNELGATE_SHARD");
    let settings: Vec<String> = without_shard.map(flag).collect();
    (!benches.is_empty() && !settings.is_empty()).then(|| {
        format!(
            "without effect on benches that use Criterion alone ({}): {}",
            benches.join(", "),
            settings.join(", ")
        )
    })
}

/// Cost of a process of a bench of Criterion alone, and the settings of its source.
fn criterion_bench(bench: &ComparedBench, head: &VerificationRun) -> CriterionOnlyBench {
    let mut overridden = by_criterion::overridden_sampling(&head.run, &bench.sampling);
    overridden.retain(|id, _| bench.cases.contains(id));
    CriterionOnlyBench {
        bench: bench.name.clone(),
        cases: bench.cases.iter().cloned().collect(),
        process_s: head.took.as_secs_f64(),
        overridden,
    }
}
