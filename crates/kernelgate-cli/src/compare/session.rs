//! State of a running comparison: the sides that were built, verified and matched, and the saved
//! trials of an interrupted comparison.

use crate::gate::recorded_names::RECORDED_SAMPLING_NAMES;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use super::engine::rounds;
use super::matched_cases::CasesMatchedBetweenSides;
use super::progress::ComparisonProgressDisplay;
use super::sides::ComparisonSideWithExecutables;
use super::sides::SideBuilder;
use super::sides::comparison_folder::LockedComparisonFolder;
use super::sides::copy_benches::{BenchControlMethod, CopiedBenchExecutable};
use super::sides::leftover_files;
use super::test_plan::recorded_identity_text;
use super::trials::expected_record::FactsOfVerifiedRun;
use super::{BuildComparisonRequest, CompareError, ComparedSideSource};
use crate::benches::child_process::SharedChildProcess;
use crate::gate::calibration::first_differing_name;
use crate::gate::comparison::CriterionOnlyBench;
use crate::gate::inconclusive_reason::join_reason_texts;
use crate::gate::kernels::code::CaseKernelComparison;
use crate::gate::paired::ComparedArm;
use crate::gate::rules::rules_file;
use crate::gate::rules::{PackageGateRules, RULES_FILE_NAME};
use kernelgate::exit::ProcessExitReason;
use kernelgate::measure::anchors::ShardAnchorRecord;
use kernelgate::record::{
    CommitAndChanges, ComparisonTrialsFile, OutputVerificationExtent, RunEnvironment, ShardOfWork,
    TrialSamplingPlan, file,
};

/// Name of the file that holds all trials of a comparison, in the comparison's folder.
pub const SAVED_TRIALS_FILE: &str = "trials.json";

/// A bench that base and head both have, with the data that its trials need.
#[derive(Clone)]
pub struct ComparedBench {
    pub bench_name: String,
    /// Paths of the run records of the processes that verified this bench in base and head.
    pub verified: [PathBuf; 2],
    /// Facts in which every later process of base and head must agree with the process that
    /// verified its side.
    pub expected: [FactsOfVerifiedRun; 2],
    /// Cases to compare.
    pub compared_cases: BTreeSet<String>,
    /// Cases that each process of the bench times first, because their machine code changed.
    pub cases_timed_first: BTreeSet<String>,
    /// Timeout of each process of the bench.
    pub process_timeout: Duration,
    /// How long each process of the bench warms up and times a case.
    pub sampling: TrialSamplingPlan,
    /// How kernelgate controls the bench's processes on both sides: by its bench protocol or by
    /// Criterion's flags.
    pub control_method: BenchControlMethod,
}

/// Base and head after the verification of their benches, with the cases that both have.
#[derive(Clone)]
pub struct PreparedSides {
    /// The cases of base and head, matched by their ids, and the cases that cannot be compared.
    pub matched_cases: CasesMatchedBetweenSides,
    /// Benches that have at least one case to compare.
    pub benches: Vec<ComparedBench>,
    /// Whether both builds were compiled with optimisation.
    pub optimised_build: bool,
    /// Environment of the head's or base's run (device and build); `None` if no bench process ran
    /// to its end.
    pub environment: Option<RunEnvironment>,
    /// Commit of the head's code, and whether files differed from the commit.
    pub head_provenance: CommitAndChanges,
    /// Nanoseconds of the single launch that verified each case.
    pub verification_launch_ns: BTreeMap<String, f64>,
    /// Compared benches that use Criterion without kernelgate, with the cost of their processes.
    pub criterion_benches: Vec<CriterionOnlyBench>,
    /// To what extent base (first) and head (second) verified each case that both have.
    pub verification: BTreeMap<String, [OutputVerificationExtent; 2]>,
    /// Number of cases that all shards of the comparison have together.
    pub cases_of_all_shards: usize,
    /// Digests of the plans (lists of cases) of both builds' benches, if this comparison is one
    /// shard of several.
    pub plan_digests: Vec<String>,
    /// Anchors (rates of fixed work on this device), if this comparison is one shard of several.
    pub anchors: Option<ShardAnchorRecord>,
    /// Name of the bench that owns each case, including cases that are not compared.
    pub bench_of_case: BTreeMap<String, String>,
}

impl Default for PreparedSides {
    fn default() -> Self {
        Self {
            matched_cases: CasesMatchedBetweenSides::default(),
            benches: Vec::new(),
            optimised_build: true,
            environment: None,
            head_provenance: CommitAndChanges::default(),
            verification: BTreeMap::new(),
            verification_launch_ns: BTreeMap::new(),
            criterion_benches: Vec::new(),
            cases_of_all_shards: 0,
            plan_digests: Vec::new(),
            anchors: None,
            bench_of_case: BTreeMap::new(),
        }
    }
}

/// Identity of one shard of a comparison before its cases are timed: its plan, case count,
/// environment and anchors.
pub struct ComparisonShardPlan {
    pub shard: ShardOfWork,
    /// Hash of the list of all cases of both builds; it is equal in all shards of the comparison.
    pub plan_hash: String,
    /// Number of cases that all shards of the comparison have together.
    pub cases_of_all_shards: usize,
    /// Device and build with which the record was measured.
    pub environment: RunEnvironment,
    /// Anchors: rates of fixed work, measured on the device that runs this shard.
    pub anchors: Option<ShardAnchorRecord>,
}

impl PreparedSides {
    /// Describes this comparison as one shard of several; `None` if no bench process ran to its
    /// end.
    pub fn describe_as_shard(&self, shard: ShardOfWork) -> Option<ComparisonShardPlan> {
        Some(ComparisonShardPlan {
            shard,
            plan_hash: file::hash_of_texts_hex(self.plan_digests.iter().map(String::as_str)),
            cases_of_all_shards: self.cases_of_all_shards,
            environment: self.environment.clone()?,
            anchors: self.anchors.clone(),
        })
    }

    /// Returns the ids of the cases that will be compared between base and head.
    pub const fn case_ids_to_compare(&self) -> &BTreeSet<String> {
        &self.matched_cases.judged_cases
    }

    /// Returns the cases that failed, were skipped or cannot be measured, each with the reason.
    pub fn reasons_of_unusable_cases(&self) -> impl Iterator<Item = (&String, String)> {
        let CasesMatchedBetweenSides {
            failed_in_head: failed,
            skipped_in_head: skipped,
            unmeasured_cases: unmeasured,
            ..
        } = &self.matched_cases;
        let failed = failed.iter().map(|(id, why)| (id, why.failure_sentence.clone()));
        let others = failed.chain(skipped.iter().map(|(id, why)| (id, why.clone())));
        others.chain(unmeasured.iter().map(|(id, why)| (id, join_reason_texts(why))))
    }

    /// Removes all cases of these benches from the comparison, and returns their ids.
    pub fn remove_cases_of_benches(&mut self, benches: &BTreeSet<String>) -> Vec<String> {
        let is_selected = |bench: &&ComparedBench| benches.contains(&bench.bench_name);
        let removed: BTreeSet<String> = self
            .benches
            .iter()
            .filter(is_selected)
            .flat_map(|bench| bench.compared_cases.clone())
            .collect();
        self.retain_cases(&self.case_ids_to_compare().difference(&removed).cloned().collect());
        removed.into_iter().collect()
    }

    /// Describes how many cases `--affected` cannot judge, because their bench lists no kernels or
    /// a kernel cannot be compared.
    pub fn unknown_machine_code_note(
        &self,
        code: &BTreeMap<String, CaseKernelComparison>,
    ) -> String {
        let is_known = |case: &&String| {
            code.get(*case).is_some_and(CaseKernelComparison::are_all_kernels_comparable)
        };
        let (all, known) = (
            self.case_ids_to_compare().len(),
            self.case_ids_to_compare().iter().filter(is_known).count(),
        );
        match all - known {
            0 => format!("--affected: the machine code of all {all} cases is known"),
            unknown => format!(
                "--affected: the machine code of {unknown} of {all} cases is unknown, and they are \
                 timed: benches of Criterion alone and rows on the CPU list no kernels"
            ),
        }
    }

    /// Removes the cases whose machine code and launches are identical in both builds from the
    /// comparison, and returns their ids.
    pub fn remove_cases_with_identical_code(
        &mut self,
        code: &BTreeMap<String, CaseKernelComparison>,
    ) -> Vec<String> {
        let same = |case: &&String| {
            code.get(*case).is_some_and(CaseKernelComparison::is_code_known_to_be_identical)
        };
        let (unaffected, rest): (Vec<&String>, Vec<&String>) =
            self.case_ids_to_compare().iter().partition(|case| same(case));
        let unaffected = unaffected.into_iter().cloned().collect();
        let rest = rest.into_iter().cloned().collect();
        self.retain_cases(&rest);
        unaffected
    }

    /// Orders the benches and cases so that those whose machine code or launches changed are timed
    /// first; Criterion benches keep their own order of cases. All cases of a bench are timed in
    /// the same processes, also unchanged ones, because every case needs a verdict.
    pub fn time_changed_cases_first(&mut self, code: &BTreeMap<String, CaseKernelComparison>) {
        let changed = |case: &&String| {
            code.get(*case).is_some_and(CaseKernelComparison::has_code_or_launches_changed)
        };
        self.benches.sort_by_key(|bench| !bench.compared_cases.iter().any(|case| changed(&case)));
        for bench in &mut self.benches {
            if bench.control_method != BenchControlMethod::CriterionFlags {
                bench.cases_timed_first =
                    bench.compared_cases.iter().filter(changed).cloned().collect();
            }
        }
    }

    /// Keeps only the given cases in the comparison and removes all others.
    pub fn retain_cases(&mut self, cases: &BTreeSet<String>) {
        self.matched_cases.judged_cases.retain(|id| cases.contains(id));
        for bench in &mut self.benches {
            bench.compared_cases.retain(|id| cases.contains(id));
        }
        self.benches.retain(|bench| !bench.compared_cases.is_empty());
        for bench in &mut self.criterion_benches {
            bench.compared_cases.retain(|id| cases.contains(id));
        }
        self.criterion_benches.retain(|bench| !bench.compared_cases.is_empty());
    }
}

/// The progress display of a command, and the handles of the child processes that Ctrl-C kills.
#[derive(Clone)]
pub struct ProgressAndChildProcesses {
    progress: ComparisonProgressDisplay,
    running_child: SharedChildProcess,
    co_running_child: SharedChildProcess,
}

impl ProgressAndChildProcesses {
    /// Creates the tools and installs a Ctrl-C handler that kills their child processes and then
    /// ends the program. A program calls `with_interrupt_handler` only once.
    pub fn with_interrupt_handler() -> Result<ProgressAndChildProcesses, CompareError> {
        let tools = Self {
            progress: ComparisonProgressDisplay::default(),
            running_child: SharedChildProcess::with_own_process_groups(),
            co_running_child: SharedChildProcess::with_own_process_groups(),
        };
        exit_on_interrupt([&tools.running_child, &tools.co_running_child], &tools.progress)?;
        Ok(tools)
    }

    /// Returns tools for one part of a larger task: their progress appears only in the line that is
    /// updated in place, after the label.
    pub fn with_progress_label(&self, label: &str) -> Self {
        Self { progress: self.progress.for_part_of_task(label), ..self.clone() }
    }

    /// Prints a line above the progress line; the printed line stays.
    pub fn print_line(&self, text: &str) {
        self.progress.print_line(text);
    }

    /// Clears the progress line at the end of the command.
    pub fn clear_progress_line(&self) {
        self.progress.clear_progress_line();
    }
}

/// Base and head with their executables, ready to run, in a locked comparison folder.
pub struct ComparisonSession {
    pub folder: LockedComparisonFolder,
    /// Folder for the request, the run record and the messages of one bench process at a time.
    pub trial_files_folder: PathBuf,
    /// The base (first) and the head (second) of the comparison, with their executables.
    pub sides: [ComparisonSideWithExecutables; 2],
    /// Handle of the bench process that is being measured.
    pub running_child: SharedChildProcess,
    /// Handle of the process that runs as artificial load while the head's processes are timed, if
    /// a calibration requests it.
    pub co_running_child: SharedChildProcess,
    /// Display of the comparison's progress on standard error.
    pub progress: ComparisonProgressDisplay,
    /// Environment that is recorded for benches that write no environment of their own (Criterion
    /// alone).
    pub environment_of_criterion_runs: RunEnvironment,
}

impl ComparisonSession {
    /// Prepares base and head of a comparison; with `twins`, the head gets copies of the base's
    /// executables, whatever head the request names.
    pub fn prepare_sides_in_locked_folder(
        request: &BuildComparisonRequest,
        twins: bool,
        tools: ProgressAndChildProcesses,
    ) -> Result<ComparisonSession, CompareError> {
        let folder = LockedComparisonFolder::open_and_lock_folder(&request.comparison_folder)?;
        let ProgressAndChildProcesses { progress, running_child: running, co_running_child } =
            tools;
        let builder =
            SideBuilder { request, folder: &folder, progress: &progress, running_child: &running };
        let sides = if twins {
            builder.prepare_identical_sides()?
        } else {
            builder.build_base_and_head()?
        };
        let work = folder.path_of_file("work");
        leftover_files::clean_folder_except_subfolders(&work, &["outputs"])
            .map_err(CompareError::file_error("empty", &work))?;
        // Prebuilt executables and those built with a custom Cargo profile count as optimised.
        let optimised = !["dev", "test"].contains(&request.build_profile.as_str());
        let environment = RunEnvironment {
            built_with_optimisation: optimised,
            ..RunEnvironment::environment_of_process_on_cpu()
        };
        Ok(Self {
            folder,
            trial_files_folder: work,
            sides,
            running_child: running,
            co_running_child,
            progress,
            environment_of_criterion_runs: environment,
        })
    }

    /// Returns the names of the benches whose executables are byte-identical in base and head.
    pub fn benches_with_identical_executables(&self) -> BTreeSet<String> {
        let [base, head] = [0, 1].map(|side| &self.sides[side].executables.runnable_benches);
        let same = |name: &String| {
            let hash = |side: &BTreeMap<String, CopiedBenchExecutable>| {
                side.get(name).map(|executable| executable.executable_hash.clone())
            };
            hash(base).is_some() && hash(base) == hash(head)
        };
        base.keys().filter(|name| same(name)).cloned().collect()
    }

    /// Checks that a bench executable was not changed since it was copied for the comparison. The
    /// executable's content is hashed again only if its size or times changed.
    ///
    /// # Errors
    /// Fails with [`CompareError::ExecutableChanged`] if the executable was replaced or
    /// overwritten.
    pub fn check_executable_unchanged(
        &self,
        arm: ComparedArm,
        bench: &str,
    ) -> Result<(), CompareError> {
        let side = &self.sides[usize::from(arm == ComparedArm::HeadBuild)];
        let Some(executable) = side.executables.runnable_benches.get(bench) else { return Ok(()) };
        executable.check_unchanged_by_size_and_times(&self.folder.side_folder_path(arm))
    }

    /// Hashes every compared executable again, to find changes.
    ///
    /// # Errors
    /// Fails with [`CompareError::ExecutableChanged`] if an executable's content differs from when
    /// it was copied; the saved trials are then removed, because they timed unknown code.
    pub fn check_all_executables_unchanged(&self) -> Result<(), CompareError> {
        for (arm, side) in
            [ComparedArm::BaseBuild, ComparedArm::HeadBuild].into_iter().zip(&self.sides)
        {
            for executable in side.executables.runnable_benches.values() {
                executable
                    .check_unchanged_by_hash(&self.folder.side_folder_path(arm))
                    .inspect_err(|_| {
                        let _ = leftover_files::remove_file_or_folder_if_present(
                            &self.folder.path_of_file(SAVED_TRIALS_FILE),
                        );
                    })?;
            }
        }
        Ok(())
    }

    /// Returns the limits and accepted changes of the head's package; acceptances that the base
    /// already has are excluded, and expired ones are returned as sentences.
    pub fn rules_of_head_package(
        &self,
        request: &BuildComparisonRequest,
    ) -> Result<(PackageGateRules, Vec<String>), CompareError> {
        let rules_of = |arm: ComparedArm| -> Result<PackageGateRules, CompareError> {
            // The base's and the head's rules are read one after the other through the path `slot`,
            // which is a link to one side at a time.
            self.folder.link_slot_to_side(arm)?;
            let shown = format!("{RULES_FILE_NAME} of the {arm}");
            let side = &self.sides[usize::from(arm == ComparedArm::HeadBuild)];
            Ok(rules_file::read_rules_file(&side.package_folder.join(RULES_FILE_NAME), &shown)?)
        };
        let head = rules_of(ComparedArm::HeadBuild)?;
        match request.base {
            // Prebuilt executables come without sources, so the base has no rules file.
            ComparedSideSource::PrebuiltFolder(_) if head.accepted.is_empty() => {
                Ok((head, Vec::new()))
            }
            ComparedSideSource::PrebuiltFolder(_) => {
                let note = "the base is a folder of executables, which does not record what it \
                            accepts: `[[accept]]` holds and does not expire";
                Ok((head, vec![note.to_owned()]))
            }
            // If the base's rules cannot be read, no accepted change counts as new.
            _ => Ok(head.without_acceptances_of_base(
                &rules_of(ComparedArm::BaseBuild).unwrap_or_default(),
            )),
        }
    }

    /// Returns the facts (settings, thresholds, executables' hashes) that must be equal for saved
    /// trials or shards to be combined.
    pub fn facts_that_identify_comparison(
        &self,
        request: &BuildComparisonRequest,
    ) -> Result<BTreeMap<String, String>, CompareError> {
        let mut identity: BTreeMap<String, String> = request.bench_variables.clone();
        let delays =
            injected_delays_text(&request.injection.injected_delays_ns).unwrap_or_default();
        identity.insert("delays".to_owned(), delays);
        identity.insert("filter".to_owned(), request.criterion_filter.clone().unwrap_or_default());
        identity.insert("thresholds".to_owned(), request.plan.test_plan_identity()?);
        if let Some(sampling) = request.sampling {
            identity.insert(
                "time a case".to_owned(),
                recorded_identity_text("TrialSampling", RECORDED_SAMPLING_NAMES, &sampling),
            );
        }
        for (side, name) in self.sides.iter().zip(["base", "head"]) {
            let executables = side.executables.runnable_benches.values();
            identity.extend(executables.map(|executable| {
                (format!("{name} {}", executable.bench_name), executable.executable_hash.clone())
            }));
        }
        Ok(identity)
    }
}

impl Drop for ComparisonSession {
    fn drop(&mut self) {
        // When the comparison ends, the input files are deleted: they are large, and a later
        // comparison generates its own inputs.
        for arm in [ComparedArm::BaseBuild, ComparedArm::HeadBuild] {
            let _ = leftover_files::remove_file_or_folder_if_present(
                &self.folder.side_folder_path(arm).join("inputs"),
            );
        }
    }
}

/// Formats the injected delays as `case=nanoseconds` pairs on one line; `None` without delays.
pub fn injected_delays_text(delays_ns: &BTreeMap<String, f64>) -> Option<String> {
    let each: Vec<String> =
        delays_ns.iter().map(|(id, delay_ns)| format!("{id}={delay_ns}")).collect();
    (!each.is_empty()).then(|| each.join(","))
}

/// Reads the saved trials of an interrupted comparison of these sides, or creates an empty trials
/// file.
pub fn resume_or_create_trials(
    request: &BuildComparisonRequest,
    session: &ComparisonSession,
    identity: BTreeMap<String, String>,
) -> Result<ComparisonTrialsFile, CompareError> {
    let (path, progress) = (session.folder.path_of_file(SAVED_TRIALS_FILE), &session.progress);
    let fresh = ComparisonTrialsFile { executables_and_settings: identity, trials: Vec::new() };
    let earlier = if request.resume_interrupted_comparison {
        file::read_record::<ComparisonTrialsFile>(&path)
    } else {
        Ok(fresh.clone())
    };
    let mut trials = match earlier {
        Ok(earlier) if earlier.executables_and_settings == fresh.executables_and_settings => {
            earlier
        }
        Ok(earlier) => {
            let differs = first_differing_name(
                &earlier.executables_and_settings,
                &fresh.executables_and_settings,
            )
            .unwrap_or_default();
            let (what, differs) = ("comparison", identity_fact_description(&differs));
            return Err(CompareError::SavedStateOfOtherRequest { what, differing_fact: differs });
        }
        Err(error) if error.is_because_file_is_missing() => {
            progress.print_line("--resume: no comparison was interrupted here: starting anew");
            fresh
        }
        Err(error) => return Err(error.into()),
    };
    rounds::remove_trials_of_unfinished_blocks(&mut trials.trials);
    trials.trials.retain(|trial| trial.reason_of_early_end.is_none());
    if !trials.trials.is_empty() {
        progress.print_line(&format!("resuming with {} processes", trials.trials.len()));
    }
    file::write_record_atomically(&path, &trials)?;
    Ok(trials)
}

/// Returns the flag or words that name a differing identity fact (filter, thresholds, executable)
/// in an error message.
fn identity_fact_description(name: &str) -> String {
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

/// Installs a Ctrl-C handler that kills the running bench processes and ends this program. Trials
/// are saved after each block, so Ctrl-C loses at most the current block of one bench.
fn exit_on_interrupt(
    running: [&SharedChildProcess; 2],
    progress: &ComparisonProgressDisplay,
) -> Result<(), CompareError> {
    let (running, progress) = (running.map(SharedChildProcess::clone), progress.clone());
    let handler = move || {
        running.iter().for_each(SharedChildProcess::kill_child_and_block_new_ones);
        progress.clear_progress_line();
        eprintln!("\ninterrupted: the same command with --resume goes on from here");
        std::process::exit(ProcessExitReason::INTERRUPTED_EXIT_CODE);
    };
    ctrlc::set_handler(handler).map_err(CompareError::InterruptHandler)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::measure::power::PowerStateOfSamples;
    use kernelgate::record::BenchProcessRun;

    #[test]
    fn changed_cases_are_timed_first_and_only_cases_known_to_be_identical_are_skipped() {
        let ids = ["changed", "same", "unknown", "unlisted"].map(str::to_owned);
        let mut prepared = PreparedSides::default();
        prepared.matched_cases.judged_cases = ids.into();
        let code = [
            (
                "changed",
                CaseKernelComparison {
                    code_difference_lines: vec!["k".to_owned()],
                    ..CaseKernelComparison::default()
                },
            ),
            (
                "same",
                CaseKernelComparison { identical_kernels: 2, ..CaseKernelComparison::default() },
            ),
            (
                "unknown",
                CaseKernelComparison {
                    identical_kernels: 2,
                    kernels_with_unknown_code: 1,
                    ..CaseKernelComparison::default()
                },
            ),
        ];
        let code = code.map(|(case, code)| (case.to_owned(), code)).into();
        let empty = BenchProcessRun::empty_run_starting_now(
            "b",
            "verify",
            RunEnvironment::environment_of_process_on_cpu(),
            CommitAndChanges::default(),
        );
        let bench = |name: &str, cases: &[&str], driver: BenchControlMethod| ComparedBench {
            bench_name: name.to_owned(),
            verified: [PathBuf::new(), PathBuf::new()],
            expected: [&empty, &empty].map(|run| {
                FactsOfVerifiedRun::from_verified_run(
                    run,
                    &BTreeSet::new(),
                    Some(PowerStateOfSamples::SteadyUnderLoad),
                )
            }),
            compared_cases: cases.iter().map(|&case| case.to_owned()).collect(),
            cases_timed_first: BTreeSet::new(),
            process_timeout: Duration::ZERO,
            sampling: TrialSamplingPlan::SAMPLING_ON_HOST,
            control_method: driver,
        };
        let newest = BenchControlMethod::ProtocolVersion(1);
        prepared.benches = vec![
            bench("a", &["same"], newest),
            bench("b", &["unknown"], newest),
            bench(
                "c",
                &["changed", "same", "unknown"],
                BenchControlMethod::common_to_both_sides(newest, newest),
            ),
            bench("d", &["changed", "same"], BenchControlMethod::CriterionFlags),
        ];
        prepared.time_changed_cases_first(&code);
        let order: Vec<&str> = prepared.benches.iter().map(|bench| &*bench.bench_name).collect();
        assert_eq!(order, ["c", "d", "a", "b"]);
        let first =
            |bench: &ComparedBench| bench.cases_timed_first.iter().cloned().collect::<Vec<_>>();
        assert_eq!(first(&prepared.benches[0]), ["changed"]);
        // The test expects no reordering for a Criterion bench, because Criterion runs the cases in
        // its own order.
        assert!(prepared.benches[1..].iter().all(|bench| bench.cases_timed_first.is_empty()));
        assert_eq!(prepared.remove_cases_with_identical_code(&code), ["same"]);
        assert_eq!(
            prepared.case_ids_to_compare().iter().collect::<Vec<_>>(),
            ["changed", "unknown", "unlisted"]
        );
    }
}
