//! State at the start of a comparison: sides that were built, verified and matched, and the trials
//! of an interrupted comparison.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use super::engine::rounds;
use super::matched_cases::MatchedCases;
use super::progress::ComparisonProgress;
use super::sides::ComparisonSide;
use super::sides::SideBuilder;
use super::sides::comparison_folder::LockedFolder;
use super::sides::copy_benches::{BenchDriver, InstalledBench};
use super::sides::leftover_files;
use super::test_plan::identity_text;
use super::trials::expected_record::ExpectedRun;
use super::{CompareError, ComparisonRequest, SideSource};
use crate::benches::child_process::ChildProcess;
use crate::gate::calibration::first_differing_name;
use crate::gate::comparison::CriterionOnlyBench;
use crate::gate::inconclusive_reason::joined;
use crate::gate::kernels::code::CodeComparison;
use crate::gate::paired::Arm;
use crate::gate::rules::rules_file;
use crate::gate::rules::{PackageRules, RULES_FILE};
use kernelgate::exit::ExitReason;
use kernelgate::measure::anchors::AnchorRecord;
use kernelgate::record::{
    ComparisonTrials, Environment, Provenance, Shard, TrialSampling, VerificationExtent, file,
};

/// Name of the file with a comparison's trials, in its folder.
pub const TRIALS_FILE: &str = "trials.json";

/// A bench that both sides have.
#[derive(Clone)]
pub struct ComparedBench {
    pub name: String,
    /// Paths of the runs that verified base and head.
    pub verified: [PathBuf; 2],
    /// Facts that every later process of base and head must share with the process that verified
    /// its side.
    pub expected: [ExpectedRun; 2],
    /// Cases to compare.
    pub cases: BTreeSet<String>,
    /// Cases that a process times first, because their code changed.
    pub first: BTreeSet<String>,
    /// Timeout of a process.
    pub timeout: Duration,
    /// Time for which a process times a case.
    pub sampling: TrialSampling,
    /// How the bench's processes get their request, on both sides where it has cases to compare.
    pub driver: BenchDriver,
}

/// Base and head after verification, with the cases to compare.
#[derive(Clone)]
pub struct PreparedSides {
    /// The cases of base and head, matched by their ids.
    pub matched: MatchedCases,
    /// Benches that have at least one case to compare.
    pub benches: Vec<ComparedBench>,
    /// Whether the builds were compiled with optimisation.
    pub optimised: bool,
    /// The device and the build; `None` if no process ran to its end.
    pub environment: Option<Environment>,
    /// Code of the head.
    pub provenance: Provenance,
    /// Nanoseconds per launch of each case, measured at the single launch that verified it.
    pub verification_ns: BTreeMap<String, f64>,
    /// Those of the compared benches that use Criterion alone.
    pub criterion: Vec<CriterionOnlyBench>,
    /// How far both sides verified each common case, base first.
    pub verification: BTreeMap<String, [VerificationExtent; 2]>,
    /// Number of cases of all shards together.
    pub planned_cases: usize,
    /// Digests of the plans of both builds' benches, if the comparison is a shard.
    pub plans: Vec<String>,
    /// Rates of fixed work, if the comparison is a shard.
    pub anchors: Option<AnchorRecord>,
    /// The bench of each case, including cases that are not compared.
    pub owners: BTreeMap<String, String>,
}

impl Default for PreparedSides {
    fn default() -> Self {
        Self {
            matched: MatchedCases::default(),
            benches: Vec::new(),
            optimised: true,
            environment: None,
            provenance: Provenance::default(),
            verification: BTreeMap::new(),
            verification_ns: BTreeMap::new(),
            criterion: Vec::new(),
            planned_cases: 0,
            plans: Vec::new(),
            anchors: None,
            owners: BTreeMap::new(),
        }
    }
}

/// A shard of a comparison before its cases are timed.
pub struct PlannedShard {
    pub shard: Shard,
    /// Hash of all cases of both builds, equal in all shards.
    pub plan: String,
    /// Number of cases of all shards together.
    pub cases: usize,
    /// Device and build.
    pub environment: Environment,
    /// Anchors: rates of fixed work on the device of the shard.
    pub anchors: Option<AnchorRecord>,
}

impl PreparedSides {
    /// Describes the cases of this comparison as a shard; `None` if no process ran to its end.
    pub fn planned_shard(&self, shard: Shard) -> Option<PlannedShard> {
        Some(PlannedShard {
            shard,
            plan: file::hash_of_all(self.plans.iter().map(String::as_str)),
            cases: self.planned_cases,
            environment: self.environment.clone()?,
            anchors: self.anchors.clone(),
        })
    }

    /// Returns the ids of the cases that both sides have.
    pub const fn cases(&self) -> &BTreeSet<String> {
        &self.matched.judged
    }

    /// Returns the cases that failed or were skipped, with the reason.
    pub fn case_errors(&self) -> impl Iterator<Item = (&String, String)> {
        let MatchedCases { failed, skipped, unmeasured, .. } = &self.matched;
        let failed = failed.iter().map(|(id, why)| (id, why.text.clone()));
        let others = failed.chain(skipped.iter().map(|(id, why)| (id, why.clone())));
        others.chain(unmeasured.iter().map(|(id, why)| (id, joined(why))))
    }

    /// Removes and returns the cases of these benches.
    pub fn remove_benches(&mut self, benches: &BTreeSet<String>) -> Vec<String> {
        let is_selected = |bench: &&ComparedBench| benches.contains(&bench.name);
        let removed: BTreeSet<String> =
            self.benches.iter().filter(is_selected).flat_map(|bench| bench.cases.clone()).collect();
        self.keep(&self.cases().difference(&removed).cloned().collect());
        removed.into_iter().collect()
    }

    /// The number of cases that `--affected` cannot judge: no kernels are listed, or one cannot be
    /// compared.
    pub fn unknown_code_cases(&self, code: &BTreeMap<String, CodeComparison>) -> String {
        let is_known = |case: &&String| code.get(*case).is_some_and(CodeComparison::is_known);
        let (all, known) = (self.cases().len(), self.cases().iter().filter(is_known).count());
        match all - known {
            0 => format!("--affected: the machine code of all {all} cases is known"),
            unknown => format!(
                "--affected: the machine code of {unknown} of {all} cases is unknown, and they are \
                 timed: benches of Criterion alone and rows on the CPU list no kernels"
            ),
        }
    }

    /// Removes and returns the cases whose machine code and launches are identical in both builds.
    pub fn remove_unaffected(&mut self, code: &BTreeMap<String, CodeComparison>) -> Vec<String> {
        let same = |case: &&String| code.get(*case).is_some_and(CodeComparison::is_same);
        let (unaffected, rest): (Vec<&String>, Vec<&String>) =
            self.cases().iter().partition(|case| same(case));
        let unaffected = unaffected.into_iter().cloned().collect();
        let rest = rest.into_iter().cloned().collect();
        self.keep(&rest);
        unaffected
    }

    /// Moves the changed cases to the front: benches with a change in machine code or launches come
    /// first, and within each process of a bench so do the changed cases, unless it uses Criterion
    /// alone. All cases of one bench are timed by the same processes, because all of them count in
    /// each verdict.
    pub fn put_changed_first(&mut self, code: &BTreeMap<String, CodeComparison>) {
        let changed = |case: &&String| code.get(*case).is_some_and(CodeComparison::has_changed);
        self.benches.sort_by_key(|bench| !bench.cases.iter().any(|case| changed(&case)));
        for bench in &mut self.benches {
            if bench.driver != BenchDriver::Criterion {
                bench.first = bench.cases.iter().filter(changed).cloned().collect();
            }
        }
    }

    /// Keeps the given cases and removes all others.
    pub fn keep(&mut self, cases: &BTreeSet<String>) {
        self.matched.judged.retain(|id| cases.contains(id));
        for bench in &mut self.benches {
            bench.cases.retain(|id| cases.contains(id));
        }
        self.benches.retain(|bench| !bench.cases.is_empty());
        for bench in &mut self.criterion {
            bench.cases.retain(|id| cases.contains(id));
        }
        self.criterion.retain(|bench| !bench.cases.is_empty());
    }
}

/// Output for a person, and the processes that an interrupt ends.
#[derive(Clone)]
pub struct SessionTools {
    progress: ComparisonProgress,
    running: ChildProcess,
    co_running: ChildProcess,
}

impl SessionTools {
    /// Makes tools whose processes an interrupt ends, and then the program. To be called once.
    pub fn interruptible() -> Result<SessionTools, CompareError> {
        let tools = Self {
            progress: ComparisonProgress::default(),
            running: ChildProcess::in_process_groups(),
            co_running: ChildProcess::in_process_groups(),
        };
        stop_on_interrupt([&tools.running, &tools.co_running], &tools.progress)?;
        Ok(tools)
    }

    /// Tools of a part of a task: their progress is shown as a detail, after the label.
    pub fn with_progress_label(&self, label: &str) -> Self {
        Self { progress: self.progress.progress_of_part(label), ..self.clone() }
    }

    /// Prints a line above the progress bar.
    pub fn say(&self, text: &str) {
        self.progress.say(text);
    }

    /// Ends the progress line; nothing may be printed afterwards.
    pub fn end_progress_line(&self) {
        self.progress.end_progress_line();
    }
}

/// Sides that are ready to run, in a folder that is locked.
pub struct ComparisonSession {
    pub folder: LockedFolder,
    /// Folder for the request, the run and the messages of a process.
    pub work: PathBuf,
    /// Base and head.
    pub sides: [ComparisonSide; 2],
    /// Handle of the running process that is measured.
    pub running: ChildProcess,
    /// Handle of the process that runs beside the head's processes as artificial load, if
    /// requested.
    pub co_running: ChildProcess,
    /// Progress on standard error.
    pub progress: ComparisonProgress,
    /// Environment that is recorded for benches without their own environment record.
    pub environment: Environment,
}

impl ComparisonSession {
    /// Makes both sides ready. With `twins`, both sides are copies of the base's executables,
    /// whatever the head.
    pub fn open_session(
        request: &ComparisonRequest,
        twins: bool,
        tools: SessionTools,
    ) -> Result<ComparisonSession, CompareError> {
        let folder = LockedFolder::open_and_lock(&request.folder)?;
        let SessionTools { progress, running, co_running } = tools;
        let builder =
            SideBuilder { request, folder: &folder, progress: &progress, running: &running };
        let sides = if twins { builder.prepare_identical_sides()? } else { builder.sides()? };
        let work = folder.file("work");
        leftover_files::clean_folder(&work, &["outputs"])
            .map_err(CompareError::io("empty", &work))?;
        // Executables that were built elsewhere, or by a profile with another name, count as
        // optimised.
        let optimised = !["dev", "test"].contains(&request.profile.as_str());
        let environment = Environment { optimised, ..Environment::cpu() };
        Ok(Self { folder, work, sides, running, co_running, progress, environment })
    }

    /// Returns the benches whose executable is byte by byte equal on both sides.
    pub fn identical(&self) -> BTreeSet<String> {
        let [base, head] = [0, 1].map(|side| &self.sides[side].executables.driven);
        let same = |name: &String| {
            let hash = |side: &BTreeMap<String, InstalledBench>| {
                side.get(name).map(|executable| executable.hash.clone())
            };
            hash(base).is_some() && hash(base) == hash(head)
        };
        base.keys().filter(|name| same(name)).cloned().collect()
    }

    /// Checks that an executable was not changed since it was installed. The executable is read
    /// again only if its size or times changed.
    ///
    /// # Errors
    /// Fails with [`CompareError::Changed`] if the executable was replaced.
    pub fn check_executable(&self, arm: Arm, bench: &str) -> Result<(), CompareError> {
        let side = &self.sides[usize::from(arm == Arm::Head)];
        let Some(executable) = side.executables.driven.get(bench) else { return Ok(()) };
        executable.check_untouched(&self.folder.side_folder_path(arm))
    }

    /// Hashes every executable again.
    ///
    /// # Errors
    /// Fails with [`CompareError::Changed`] if one is not the file that was installed: the trials,
    /// which timed unknown code, are removed.
    pub fn check_executables(&self) -> Result<(), CompareError> {
        for (arm, side) in [Arm::Base, Arm::Head].into_iter().zip(&self.sides) {
            for executable in side.executables.driven.values() {
                executable.check_unchanged(&self.folder.side_folder_path(arm)).inspect_err(
                    |_| {
                        let _ = leftover_files::remove_path(&self.folder.file(TRIALS_FILE));
                    },
                )?;
            }
        }
        Ok(())
    }

    /// Limits and acceptances of the head's package; acceptances that the base has already are
    /// excluded, and expired ones are returned as sentences.
    pub fn package_rules(
        &self,
        request: &ComparisonRequest,
    ) -> Result<(PackageRules, Vec<String>), CompareError> {
        let rules_of = |arm: Arm| -> Result<PackageRules, CompareError> {
            // The packages of both sides are linked at one path, one after the other.
            self.folder.link_slot_to_side(arm)?;
            let shown = format!("{RULES_FILE} of the {arm}");
            let side = &self.sides[usize::from(arm == Arm::Head)];
            Ok(rules_file::read(&side.package.join(RULES_FILE), &shown)?)
        };
        let head = rules_of(Arm::Head)?;
        match request.base {
            // Executables come without sources.
            SideSource::Folder(_) if head.accepted.is_empty() => Ok((head, Vec::new())),
            SideSource::Folder(_) => {
                let note = "the base is a folder of executables, which does not record what it \
                            accepts: `[[accept]]` holds and does not expire";
                Ok((head, vec![note.to_owned()]))
            }
            // If the base's rules cannot be read, no change of them is accepted.
            _ => Ok(head.rules_added_since(&rules_of(Arm::Base).unwrap_or_default())),
        }
    }

    /// Facts that must be equal for measurements to be combined.
    pub fn comparison_identity(
        &self,
        request: &ComparisonRequest,
    ) -> Result<BTreeMap<String, String>, CompareError> {
        let mut identity: BTreeMap<String, String> = request.settings.clone();
        let delays = delays_text(&request.injection.delays_ns).unwrap_or_default();
        identity.insert("delays".to_owned(), delays);
        identity.insert("filter".to_owned(), request.filter.clone().unwrap_or_default());
        identity.insert("thresholds".to_owned(), request.plan.identity()?);
        if let Some(sampling) = request.sampling {
            identity.insert("time a case".to_owned(), identity_text("TrialSampling", &sampling));
        }
        for (side, name) in self.sides.iter().zip(["base", "head"]) {
            let executables = side.executables.driven.values();
            identity.extend(executables.map(|executable| {
                (format!("{name} {}", executable.bench), executable.hash.clone())
            }));
        }
        Ok(identity)
    }
}

impl Drop for ComparisonSession {
    fn drop(&mut self) {
        // The input files are large, and a later comparison draws its own inputs.
        for arm in [Arm::Base, Arm::Head] {
            let _ = leftover_files::remove_path(&self.folder.side_folder_path(arm).join("inputs"));
        }
    }
}

/// Describes injected delays on one line; `None` without delays.
pub fn delays_text(delays_ns: &BTreeMap<String, f64>) -> Option<String> {
    let each: Vec<String> =
        delays_ns.iter().map(|(id, delay_ns)| format!("{id}={delay_ns}")).collect();
    (!each.is_empty()).then(|| each.join(","))
}

/// Opens the trials of an interrupted comparison of these sides, or starts without trials.
pub fn open_trials(
    request: &ComparisonRequest,
    session: &ComparisonSession,
    identity: BTreeMap<String, String>,
) -> Result<ComparisonTrials, CompareError> {
    let (path, progress) = (session.folder.file(TRIALS_FILE), &session.progress);
    let fresh = ComparisonTrials { identity, trials: Vec::new() };
    let earlier =
        if request.resume { file::read::<ComparisonTrials>(&path) } else { Ok(fresh.clone()) };
    let mut trials = match earlier {
        Ok(earlier) if earlier.identity == fresh.identity => earlier,
        Ok(earlier) => {
            let differs =
                first_differing_name(&earlier.identity, &fresh.identity).unwrap_or_default();
            let (what, differs) = ("comparison", identity_fact_words(&differs));
            return Err(CompareError::ResumesAnother { what, differs });
        }
        Err(error) if error.is_not_found() => {
            progress.say("--resume: no comparison was interrupted here: starting anew");
            fresh
        }
        Err(error) => return Err(error.into()),
    };
    rounds::drop_unfinished_blocks(&mut trials.trials);
    trials.trials.retain(|trial| trial.broke.is_none());
    if !trials.trials.is_empty() {
        progress.say(&format!("resuming with {} processes", trials.trials.len()));
    }
    file::write(&path, &trials)?;
    Ok(trials)
}

/// Name of an identity fact in words for the user.
fn identity_fact_words(name: &str) -> String {
    let flag = match name {
        "filter" => "the filter",
        "thresholds" => {
            "--relative, --absolute, --tolerated, --max-blocks or the device's calibration"
        }
        "time a case" => "--case-time",
        other => match (other.strip_prefix("KERNELGATE_"), other.split_once(' ')) {
            (Some(flag), _) => return format!("--{} ({other})", flag.to_lowercase()),
            (_, Some((side, bench))) => {
                return format!("the executable of bench `{bench}` in the {side}");
            }
            _ => other,
        },
    };
    flag.to_owned()
}

/// Makes Ctrl-C end the running trial and this program. Each block is saved when it ends, so an
/// interrupt loses less than one block of a bench.
fn stop_on_interrupt(
    running: [&ChildProcess; 2],
    progress: &ComparisonProgress,
) -> Result<(), CompareError> {
    let (running, progress) = (running.map(ChildProcess::clone), progress.clone());
    let handler = move || {
        running.iter().for_each(ChildProcess::kill_all);
        progress.end_progress_line();
        eprintln!("\ninterrupted: the same command with --resume goes on from here");
        std::process::exit(ExitReason::INTERRUPTED_EXIT_CODE);
    };
    ctrlc::set_handler(handler).map_err(CompareError::Interrupt)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::measure::power::PowerState;
    use kernelgate::record::ProcessRun;

    #[test]
    fn changed_cases_are_timed_first_and_only_cases_known_to_be_identical_are_skipped() {
        let ids = ["changed", "same", "unknown", "unlisted"].map(str::to_owned);
        let mut prepared = PreparedSides::default();
        prepared.matched.judged = ids.into();
        let code = [
            ("changed", CodeComparison { code: vec!["k".to_owned()], ..CodeComparison::default() }),
            ("same", CodeComparison { same: 2, ..CodeComparison::default() }),
            ("unknown", CodeComparison { same: 2, unknown: 1, ..CodeComparison::default() }),
        ];
        let code = code.map(|(case, code)| (case.to_owned(), code)).into();
        let empty = ProcessRun::start_now("b", "verify", Environment::cpu(), Provenance::default());
        let bench = |name: &str, cases: &[&str], driver: BenchDriver| ComparedBench {
            name: name.to_owned(),
            verified: [PathBuf::new(), PathBuf::new()],
            expected: [&empty, &empty].map(|run| {
                ExpectedRun::from_verified(run, &BTreeSet::new(), Some(PowerState::Steady))
            }),
            cases: cases.iter().map(|&case| case.to_owned()).collect(),
            first: BTreeSet::new(),
            timeout: Duration::ZERO,
            sampling: TrialSampling::HOST_SAMPLING,
            driver,
        };
        let newest = BenchDriver::Protocol(1);
        prepared.benches = vec![
            bench("a", &["same"], newest),
            bench("b", &["unknown"], newest),
            bench(
                "c",
                &["changed", "same", "unknown"],
                BenchDriver::for_both_sides(newest, newest),
            ),
            bench("d", &["changed", "same"], BenchDriver::Criterion),
        ];
        prepared.put_changed_first(&code);
        let order: Vec<&str> = prepared.benches.iter().map(|bench| &*bench.name).collect();
        assert_eq!(order, ["c", "d", "a", "b"]);
        let first = |bench: &ComparedBench| bench.first.iter().cloned().collect::<Vec<_>>();
        assert_eq!(first(&prepared.benches[0]), ["changed"]);
        // Criterion runs the cases of a bench in its own order.
        assert!(prepared.benches[1..].iter().all(|bench| bench.first.is_empty()));
        assert_eq!(prepared.remove_unaffected(&code), ["same"]);
        assert_eq!(prepared.cases().iter().collect::<Vec<_>>(), ["changed", "unknown", "unlisted"]);
    }
}
