//! Defines baseline files: process runs with which later runs are compared. Each device and
//! baseline name has one file, which users commit to their repository.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::case_run::{CaseSummaryOfRun, PowerStateForComparison};
use super::files::file::{self, RecordFileError, RecordFileType};
use super::numerics::OutputErrorsOfExecutable;
use super::origin::CodeAndEnvironmentOfRun;
use super::origin::environment::IncomparableEnvironmentField;
use super::run::{BenchProcessRun, CaseRecordWithSamples};
use super::text;
use crate::measure::plausibility::{self, PLAUSIBLE_LAUNCH_NS};

mod entries;

pub use entries::{CaseInBaseline, EarlierRunsWithOtherCode, ProcessRunInBaseline};

/// A baseline file: benchmark cases, and the process runs that measured them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BaselineFile {
    /// Name of the baseline; its file is `baselines/<device>/<name>.json`.
    #[serde(rename = "name")]
    pub baseline_name: String,
    /// Process runs that measured the baseline's cases, by the key `<session>/<bench>`.
    pub runs: BTreeMap<String, ProcessRunInBaseline>,
    /// Cases by id.
    pub cases: BTreeMap<String, CaseInBaseline>,
}

/// Runs of a baseline that merging new runs would replace, grouped by the code that they measured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplacedBaselineRuns {
    /// Description of the code that the replaced runs measured: "1a2b3c4d", "another executable of
    /// 1a2b3c4d".
    pub code_description: String,
    /// Number of cases that lose runs of this code.
    pub affected_cases: usize,
    /// Number of replaced runs in the case that loses most runs.
    pub max_replaced_runs_per_case: usize,
}

impl std::fmt::Display for ReplacedBaselineRuns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        write!(
            f,
            "{} run{} of {}",
            self.max_replaced_runs_per_case,
            plural(self.max_replaced_runs_per_case),
            self.code_description
        )?;
        write!(f, " in {} case{}", self.affected_cases, plural(self.affected_cases))
    }
}

/// Returns whether a case's two measurements on a GPU were taken in comparable power states. A
/// measurement without a recorded power state is not comparable with any other.
fn are_power_states_comparable(
    one: Option<PowerStateForComparison>,
    other: Option<PowerStateForComparison>,
) -> bool {
    one.zip(other).is_some_and(|(one, other)| one.are_times_comparable_with(other))
}

/// Describes one measurement's power state, for the message that refuses a comparison with the
/// other measurement.
fn power_state_for_refusal(
    power: Option<PowerStateForComparison>,
    other: Option<PowerStateForComparison>,
) -> String {
    const HOW_TO_MEASURE_BASELINE_AGAIN: &str =
        "`cargo bench -- --save-baseline NAME` measures it anew";
    let Some(power) = power else {
        return format!("not recorded: {HOW_TO_MEASURE_BASELINE_AGAIN}");
    };
    let loaded = |power: PowerStateForComparison| power.gpu_busy_share.is_some();
    if !loaded(power) && other.is_some_and(loaded) && power.at_power_cap {
        return format!(
            "{power}, by a version that let the card idle between samples: {HOW_TO_MEASURE_BASELINE_AGAIN}"
        );
    }
    power.to_string()
}

impl BaselineFile {
    /// An empty baseline.
    pub fn empty_baseline_with_name(name: &str) -> Self {
        Self { baseline_name: name.to_owned(), runs: BTreeMap::new(), cases: BTreeMap::new() }
    }

    /// Reads a baseline file, or returns an empty baseline if the file does not exist.
    ///
    /// # Errors
    /// Fails if the file exists and cannot be used.
    pub fn read_or_create_empty(path: &Path, name: &str) -> Result<BaselineFile, RecordFileError> {
        match file::read_record(path) {
            Err(error) if error.is_because_file_is_missing() => {
                Ok(Self::empty_baseline_with_name(name))
            }
            // The file's name replaces the baseline name stored in the file, because the file may
            // be a copy of another baseline.
            read => read.map(|baseline: Self| Self { baseline_name: name.to_owned(), ..baseline }),
        }
    }

    /// Replaces, in this baseline, the cases that a run measured; all other cases stay.
    ///
    /// Runs of one session, or of one executable built from a clean commit, are added to each
    /// other. All other runs of a measured case are replaced, so that a case never mixes commits;
    /// if several are replaced, their medians stay as [`CaseInBaseline::earlier`].
    pub fn merge_run_replacing_other_code(&mut self, run: &BenchProcessRun) {
        self.insert_run_keeping(run, |baseline, key| baseline.is_same_session_or_code(key, run));
    }

    /// Returns, for these case ids, the baseline's runs that
    /// [`Self::merge_run_replacing_other_code`] would replace, grouped by the code that they
    /// measured.
    pub fn runs_that_merge_would_replace<'a>(
        &self,
        run: &BenchProcessRun,
        cases: impl IntoIterator<Item = &'a str>,
    ) -> Vec<ReplacedBaselineRuns> {
        let mut replaced: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        for case in cases.into_iter().filter_map(|id| self.cases.get(id)) {
            let mut of_case: BTreeMap<String, usize> = BTreeMap::new();
            for key in case.runs.keys().filter(|key| !self.is_same_session_or_code(key, run)) {
                *of_case.entry(self.first_difference_of_code(key, run)).or_default() += 1;
            }
            for (of, runs) in of_case {
                let (cases, most) = replaced.entry(of).or_default();
                *cases += 1;
                *most = runs.max(*most);
            }
        }
        let each = |(of, (cases, runs))| ReplacedBaselineRuns {
            code_description: of,
            affected_cases: cases,
            max_replaced_runs_per_case: runs,
        };
        replaced.into_iter().map(each).collect()
    }

    /// Returns whether a run of the baseline belongs to the same session as the given run, or
    /// measured the same code.
    fn is_same_session_or_code(&self, key: &str, run: &BenchProcessRun) -> bool {
        let (there, here) = (self.runs[key].origin_of_run(), run.code_and_environment());
        let same_session = key.split('/').next() == Some(&run.session_name);
        (same_session && there.provenance == here.provenance)
            || (there.is_same_executable_of_clean_commit(here)
                && there.has_same_seed_and_comparable_environment(here))
    }

    /// Describes the first difference between a run of the baseline and the given run, which does
    /// not belong to the same code.
    fn first_difference_of_code(&self, key: &str, run: &BenchProcessRun) -> String {
        let there = &self.runs[key];
        let commit = there.provenance.short_commit_with_changes_mark();
        if there.provenance != run.provenance || there.provenance.commit.is_none() {
            commit
        } else if there.provenance.dirty {
            format!("{commit}, whatever the changes were")
        } else if there.executable_hash != run.executable_hash {
            format!("another executable of {commit}")
        } else {
            format!("{commit} in another environment or with another seed")
        }
    }

    /// Adds a run to the cases of the baseline that it measured, next to their earlier runs.
    ///
    /// # Errors
    /// Fails if the run's cases differ from the baseline's, with every field that differs; the
    /// baseline is then unchanged.
    pub fn add_comparable_run(
        &mut self,
        run: &BenchProcessRun,
    ) -> Result<(), Vec<IncomparableEnvironmentField>> {
        let both = run.cases.iter().filter_map(|(id, case)| Some((self.cases.get(id)?, case)));
        let mut differing: Vec<IncomparableEnvironmentField> =
            refuse_baseline_from_delayed_run(run).into_iter().collect();
        differing.extend(both.flat_map(|(base, case)| {
            let mut found = self.mismatches_of_case(base, run, case);
            let others = base.runs.keys().map(|key| self.runs[key].origin_of_run());
            found.extend(
                others.filter_map(|other| {
                    other.fact_showing_different_code(run.code_and_environment())
                }),
            );
            found
        }));
        differing.dedup();
        if !differing.is_empty() {
            return Err(differing);
        }
        self.insert_run_keeping(run, |_, _| true);
        Ok(())
    }

    /// Adds the output errors that `kernelgate verify` recorded for an executable to those cases of
    /// the baseline that this executable's runs measured; returns their number.
    pub fn add_output_errors_by_seed(&mut self, numerics: &OutputErrorsOfExecutable) -> usize {
        let is_same_build = |run: &ProcessRunInBaseline| {
            run.executable_hash.as_ref() == Some(&numerics.executable_hash)
                && run.provenance == numerics.provenance
                && numerics.environment.incomparable_facts_with_base(&run.environment).is_empty()
        };
        let mut count = 0;
        for (id, case) in &mut self.cases {
            let Some(found) = numerics.output_errors_of_case(id) else { continue };
            if !case.runs.keys().any(|key| is_same_build(&self.runs[key])) {
                continue;
            }
            let recorded = case.numerics.get_or_insert_default();
            recorded.add_errors_of_all_seeds(found);
            count += 1;
        }
        count
    }

    /// Returns all facts (revision, work, seed, environment, power state) in which a run's case
    /// differs from the same case of this baseline.
    pub fn mismatches_of_case(
        &self,
        base: &CaseInBaseline,
        run: &BenchProcessRun,
        case: &CaseRecordWithSamples,
    ) -> Vec<IncomparableEnvironmentField> {
        let mut found = Vec::new();
        let mut check = |field, base: String, head: String| {
            if base != head {
                found.push(IncomparableEnvironmentField {
                    field_name: field,
                    base_value: base,
                    head_value: head,
                });
            }
        };
        check("revision", base.workload_revision.to_string(), case.workload_revision.to_string());
        check("work", base.work.to_string(), case.work.to_string());
        check("delays", "none".to_owned(), run.injected_delays_as_text());
        for of_case in base.runs.keys().map(|key| &self.runs[key]) {
            check("seed", of_case.input_seed.to_string(), run.seed.to_string());
        }
        found.extend(base.runs.keys().flat_map(|key| {
            run.environment.incomparable_facts_with_base(&self.runs[key].environment)
        }));
        if !run.environment.is_cpu_run() {
            let head = case.samples.power.as_ref().map(PowerStateForComparison::from);
            let other = base
                .runs
                .values()
                .find(|of_base| !are_power_states_comparable(of_base.power, head));
            found.extend(other.map(|of_base| IncomparableEnvironmentField {
                field_name: "power_state",
                base_value: power_state_for_refusal(of_base.power, head),
                head_value: power_state_for_refusal(head, of_base.power),
            }));
        }
        found
    }

    /// Adds a run to the baseline; of the earlier runs of the measured cases, only those accepted
    /// by `keep` remain.
    fn insert_run_keeping(&mut self, run: &BenchProcessRun, keep: impl Fn(&Self, &str) -> bool) {
        let run_key = self.unused_key_for_run(run);
        for (id, case) in &run.cases {
            let mut entry = CaseInBaseline::from(case);
            let before = self.cases.get(id).filter(|before| {
                before.workload_revision == entry.workload_revision && before.work == entry.work
            });
            if let Some(before) = before {
                let power = case.samples.power.as_ref().map(PowerStateForComparison::from);
                // Times from an incomparable power state are replaced, because a case's times must
                // all be comparable.
                let kept = before.runs.iter().filter(|(key, of)| {
                    keep(self, key)
                        && (run.environment.is_cpu_run()
                            || are_power_states_comparable(of.power, power))
                });
                entry.runs = kept.map(|(key, of)| (key.clone(), of.clone())).collect();
                entry.earlier = self.summary_of_replaced_runs(before, &entry, run);
                // Recorded output errors and verification are kept if earlier runs are kept,
                // because all these belong to the same code.
                if !entry.runs.is_empty() {
                    entry.numerics = before.numerics.clone();
                    entry.verification = entry.verification.weaker_of_both(before.verification);
                }
            }
            entry.runs.insert(
                run_key.clone(),
                CaseSummaryOfRun::summarize_case_record(case).round_to_significant_digits(),
            );
            if case.verification.verification_extent().is_compared_with_reference() {
                let numerics = entry.numerics.get_or_insert_default();
                numerics.add_errors_of_verified_case(run.seed, &case.verification);
            }
            self.cases.insert(id.clone(), entry);
        }
        let source = ProcessRunInBaseline {
            start_time: run.start_time.clone(),
            environment: run.environment.clone(),
            package: run.package.clone(),
            provenance: run.provenance.clone(),
            user_stated_commit: run.commit_is_from_variable,
            input_seed: run.seed,
            executable_hash: run.executable_hash.clone(),
            limits: run.limits.clone(),
            wall_s_by_problem: run.wall_s_by_problem.clone(),
        };
        self.runs.insert(run_key, source);
        let used: BTreeSet<&String> =
            self.cases.values().flat_map(|case| case.runs.keys()).collect();
        self.runs.retain(|key, _| used.contains(key));
    }

    /// Returns the run's baseline key, with a number added if another run has this key, because
    /// sessions in several checkouts may have one name.
    fn unused_key_for_run(&self, run: &BenchProcessRun) -> String {
        let process = run.bench_name_with_shard();
        let numbered = (2..).map(|number| format!("{}-{number}/{process}", run.session_name));
        let mut keys = std::iter::once(run.key_in_baseline()).chain(numbered);
        let free = |key: &String| self.runs.get(key).is_none_or(|there| there.is_entry_of_run(run));
        keys.find(free).unwrap_or_else(|| run.key_in_baseline())
    }

    /// Returns whether the baseline already contains this run.
    pub fn contains_run(&self, run: &BenchProcessRun) -> bool {
        self.runs.get(&run.key_in_baseline()).is_some_and(|there| there.is_entry_of_run(run))
    }

    /// Returns the summary of a case's replaced runs to keep: of the runs that are replaced now, or
    /// the summary kept so far, whichever has more runs. Replaced runs from an environment that
    /// cannot be compared with the new run's are not summarised.
    fn summary_of_replaced_runs(
        &self,
        before: &CaseInBaseline,
        after: &CaseInBaseline,
        run: &BenchProcessRun,
    ) -> Option<EarlierRunsWithOtherCode> {
        let replaced: Vec<(&String, &CaseSummaryOfRun)> = before
            .runs
            .iter()
            .filter(|(key, _)| !after.runs.contains_key(*key))
            .filter(|(key, _)| {
                run.environment
                    .incomparable_facts_with_base(&self.runs[*key].environment)
                    .is_empty()
            })
            .collect();
        let kept = before.earlier.clone();
        let longer =
            kept.as_ref().is_some_and(|kept| kept.median_launch_ns_of_runs.len() > replaced.len());
        if replaced.len() < 2 || longer {
            return kept;
        }
        let commit = replaced
            .first()
            .map(|(key, _)| self.runs[*key].provenance.short_commit_with_changes_mark());
        Some(EarlierRunsWithOtherCode {
            commit: commit.unwrap_or_default(),
            median_launch_ns_of_runs: replaced.iter().map(|(_, of)| of.median_launch_ns).collect(),
        })
    }
}

impl ProcessRunInBaseline {
    /// Fails if the start time, environment, problem times or ceilings of this baseline run are
    /// implausible.
    fn check_baseline_run_plausible(&self) -> Result<(), String> {
        text::check_is_rfc3339_time(&self.start_time)
            .map_err(|problem| format!("started: {problem}"))?;
        self.environment.check_environment_plausible()?;
        for (problem, seconds) in &self.wall_s_by_problem {
            plausibility::check_wall_seconds_plausible(
                &format!("problems_s: {problem}"),
                *seconds,
            )?;
        }
        self.limits.check_limits_plausible()
    }

    /// Returns whether this entry of the baseline describes the given run, whose key is equal.
    fn is_entry_of_run(&self, run: &BenchProcessRun) -> bool {
        self.start_time == run.start_time && self.provenance == run.provenance
    }

    fn origin_of_run(&self) -> CodeAndEnvironmentOfRun<'_> {
        CodeAndEnvironmentOfRun {
            provenance: &self.provenance,
            executable_hash: self.executable_hash.as_deref(),
            seed: self.input_seed,
            environment: &self.environment,
        }
    }
}

/// Refuses, for a baseline, a run into whose launches delays were injected.
fn refuse_baseline_from_delayed_run(run: &BenchProcessRun) -> Option<IncomparableEnvironmentField> {
    (!run.injected_delays_ns.is_empty()).then(|| IncomparableEnvironmentField {
        field_name: "delays",
        base_value: "none".to_owned(),
        head_value: run.injected_delays_as_text(),
    })
}

impl From<&CaseRecordWithSamples> for CaseInBaseline {
    fn from(case: &CaseRecordWithSamples) -> Self {
        Self {
            workload_name: case.workload.clone(),
            workload_revision: case.workload_revision,
            work: case.work.clone(),
            items_per_launch: case.data_items_per_launch,
            sample_unit: case.data_item_unit,
            runs: BTreeMap::new(),
            verification: case.verification.verification_extent(),
            numerics: None,
            earlier: None,
        }
    }
}

impl RecordFileType for BaselineFile {
    const SCHEMA: &'static str = "kernelgate-baseline";
    const SCHEMA_VERSION: u64 = 3;
    const OLDEST_READABLE_VERSION: u64 = 3;
    const FILE_KIND: &'static str = "baseline";
    const CONTAINS_CHECKSUM: bool = true;
    const FIELDS_WITH_ONE_LINE_PER_ENTRY: &'static [&'static str] = &["runs", "numerics"];

    fn check_record_plausible(&self) -> Result<(), String> {
        text::check_is_plain_name(&self.baseline_name)
            .map_err(|problem| format!("name {problem}"))?;
        for (key, run) in &self.runs {
            run.check_baseline_run_plausible()
                .map_err(|problem| format!("run {key}: {problem}"))?;
        }
        for (id, case) in &self.cases {
            text::check_case_id_text(id)?;
            if case.runs.is_empty() {
                return Err(format!("case {id}: no runs"));
            }
            if let Some(earlier) = &case.earlier
                && (earlier.median_launch_ns_of_runs.len() < 2
                    || !earlier
                        .median_launch_ns_of_runs
                        .iter()
                        .all(|ns| PLAUSIBLE_LAUNCH_NS.contains(ns)))
            {
                return Err(format!("case {id}: earlier runs that cannot be"));
            }
            case.work
                .check_declared_work_plausible()
                .map_err(|problem| format!("case {id}: {problem}"))?;
            case.verification
                .check_element_counts()
                .map_err(|problem| format!("case {id}: {problem}"))?;
            if let Some(numerics) = &case.numerics {
                numerics
                    .check_output_errors_plausible()
                    .map_err(|problem| format!("case {id}: {problem}"))?;
            }
            for (run, measured) in &case.runs {
                measured
                    .check_summary_plausible()
                    .map_err(|problem| format!("case {id}, run {run}: {problem}"))?;
                if !self.runs.contains_key(run) {
                    return Err(format!("case {id}: run {run} is not listed"));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::limits::{MeasuredDeviceLimits, ShortestLaunchTime};
    use crate::record::{CommitAndChanges, RunEnvironment};

    fn run_of_session_and_commit(
        session: &str,
        commit: &str,
        executable: Option<&str>,
    ) -> BenchProcessRun {
        let (commit, dirty) = match commit.strip_suffix("+changes") {
            Some(commit) => (commit, true),
            None => (commit, false),
        };
        BenchProcessRun {
            provenance: CommitAndChanges { commit: Some(commit.to_owned()), dirty },
            executable_hash: executable.map(str::to_owned),
            start_time: format!("2026-01-0{session}T00:00:00Z"),
            cases: ["a", "b"]
                .map(|id| {
                    (id.to_owned(), CaseRecordWithSamples::example_with_sample_times(vec![100.0]))
                })
                .into(),
            ..BenchProcessRun::empty_run_starting_now(
                "bench",
                session,
                RunEnvironment::environment_of_process_on_cpu(),
                CommitAndChanges::default(),
            )
        }
    }

    fn keys_of_case_runs(baseline: &BaselineFile) -> Vec<&String> {
        baseline.cases["a"].runs.keys().collect()
    }

    #[test]
    fn runs_of_one_clean_build_add_up_and_others_are_replaced() {
        let first = run_of_session_and_commit("1", "aaaa", Some("x"));
        let with = |second: &BenchProcessRun| {
            let mut baseline = BaselineFile::empty_baseline_with_name("main");
            baseline.merge_run_replacing_other_code(&first);
            let messages: Vec<String> = baseline
                .runs_that_merge_would_replace(second, ["a", "b", "c"])
                .iter()
                .map(ToString::to_string)
                .collect();
            baseline.merge_run_replacing_other_code(second);
            (keys_of_case_runs(&baseline).len(), messages)
        };
        assert_eq!(with(&run_of_session_and_commit("2", "aaaa", Some("x"))), (2, vec![]));
        let replaced = |second: &BenchProcessRun, of: &str| {
            assert_eq!(with(second), (1, vec![format!("1 run of {of} in 2 cases")]));
        };
        replaced(&run_of_session_and_commit("2", "bbbb", Some("x")), "aaaa");
        replaced(&run_of_session_and_commit("2", "aaaa+changes", Some("x")), "aaaa");
        replaced(&run_of_session_and_commit("2", "aaaa", Some("y")), "another executable of aaaa");
        replaced(&run_of_session_and_commit("2", "aaaa", None), "another executable of aaaa");
        let reseeded =
            BenchProcessRun { seed: 2, ..run_of_session_and_commit("2", "aaaa", Some("x")) };
        replaced(&reseeded, "aaaa in another environment or with another seed");
        // The new session has the same name as an earlier session that measured other code.
        replaced(&run_of_session_and_commit("1", "bbbb", Some("x")), "aaaa");
    }

    #[test]
    fn an_equal_session_name_in_another_checkout_is_another_run() {
        let mut baseline = BaselineFile::empty_baseline_with_name("main");
        baseline.merge_run_replacing_other_code(&run_of_session_and_commit("1", "aaaa", Some("x")));
        let mut second = run_of_session_and_commit("1", "bbbb", Some("y"));
        second.cases.remove("b");
        baseline.merge_run_replacing_other_code(&second);
        assert_eq!(keys_of_case_runs(&baseline), ["1-2/bench"]);
        let commit = |key: &str| baseline.runs[key].provenance.short_commit_with_changes_mark();
        assert_eq!((commit("1/bench"), commit("1-2/bench")), ("aaaa".into(), "bbbb".into()));
        assert!(
            baseline.contains_run(&run_of_session_and_commit("1", "aaaa", Some("x")))
                && !baseline.contains_run(&second)
        );
    }

    #[test]
    fn a_baseline_keeps_ceilings_of_runs_and_may_lack_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("main.json");
        let limit =
            ShortestLaunchTime { shortest_launch_ns: 50.0, deciding_ceiling: "memory".to_owned() };
        let limits = MeasuredDeviceLimits {
            flops_per_s: [("matmul f32".to_owned(), 1e12)].into(),
            ..MeasuredDeviceLimits::default()
        };
        let mut measured = BenchProcessRun {
            limits: limits.clone(),
            ..run_of_session_and_commit("1", "aaaa", Some("x"))
        };
        measured.cases.get_mut("a").unwrap().limit = Some(limit.clone());
        let mut baseline = BaselineFile::empty_baseline_with_name("main");
        baseline.merge_run_replacing_other_code(&measured);
        file::write_record_atomically(&path, &baseline).unwrap();
        let read: BaselineFile = file::read_record(&path).unwrap();
        assert_eq!(read.runs["1/bench"].limits, limits);
        let limit_of = |read: &BaselineFile, id: &str| read.cases[id].runs["1/bench"].limit.clone();
        assert_eq!((limit_of(&read, "a"), limit_of(&read, "b")), (Some(limit), None));
        let written = |change: fn(&mut BaselineFile)| {
            let mut changed = read.clone();
            change(&mut changed);
            file::write_record_atomically(&path, &changed)
                .map(|()| std::fs::read_to_string(&path).unwrap())
        };
        let older = written(|baseline| {
            baseline.runs.values_mut().for_each(|run| run.limits = MeasuredDeviceLimits::default());
            let runs = baseline.cases.values_mut().flat_map(|case| case.runs.values_mut());
            runs.for_each(|run| run.limit = None);
        });
        assert!(!older.unwrap().contains("limit"));
        assert_eq!(limit_of(&file::read_record(&path).unwrap(), "a"), None);
        let wrong = written(|baseline| {
            let run = baseline.cases.get_mut("a").unwrap().runs.get_mut("1/bench").unwrap();
            run.limit = Some(ShortestLaunchTime {
                shortest_launch_ns: 0.0,
                deciding_ceiling: "memory".to_owned(),
            });
        });
        let refused = wrong.unwrap_err().to_string();
        let reason = "invalid baseline: case a, run 1/bench: a limit of 0 ns a launch";
        assert_eq!(refused, format!("failed to write {}: {reason}", path.display()));
        // The failed write leaves the older file unchanged.
        assert_eq!(limit_of(&file::read_record(&path).unwrap(), "b"), None);
        let by_hand =
            file::json_text_of_record(&read).replace("\"limit.time_ns\":50", "\"limit.time_ns\":0");
        std::fs::write(&path, by_hand).unwrap();
        let refused =
            file::read_record_ignoring_checksum::<BaselineFile>(&path).unwrap_err().to_string();
        assert_eq!(refused, format!("failed to read {}: {reason}", path.display()));
    }

    #[test]
    fn a_run_of_other_code_cannot_be_added_to_a_baseline() {
        let mut baseline = BaselineFile::empty_baseline_with_name("main");
        baseline
            .add_comparable_run(&run_of_session_and_commit("1", "aaaa+changes", Some("x")))
            .unwrap();
        let mut field = |run: BenchProcessRun| {
            baseline.add_comparable_run(&run).map_err(|differing| differing[0].field_name)
        };
        assert_eq!(field(run_of_session_and_commit("2", "aaaa+changes", Some("x"))), Ok(()));
        assert_eq!(
            field(run_of_session_and_commit("3", "aaaa+changes", Some("y"))),
            Err("executable")
        );
        assert_eq!(field(run_of_session_and_commit("3", "aaaa", Some("x"))), Err("commit"));
        assert_eq!(keys_of_case_runs(&baseline).len(), 2);
    }
}
