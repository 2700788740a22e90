//! A baseline: the runs that later ones are compared with. Each device and baseline name has one
//! file, which is meant to be committed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::case_run::{CasePower, CaseRun};
use super::files::file::{self, RecordFileError, RecordType};
use super::numerics::Numerics;
use super::origin::RunOrigin;
use super::origin::environment::EnvironmentMismatch;
use super::run::{CaseRecord, ProcessRun};
use super::text;
use crate::measure::plausibility::{self, PLAUSIBLE_LAUNCH_NS};

mod entries;

pub use entries::{BaselineCase, BaselineRun, EarlierRuns};

/// A baseline: cases with the process runs that measured them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// Name of the baseline; the file is `baselines/<device>/<name>.json`.
    pub name: String,
    /// The process runs that the cases refer to, by `<session>/<bench>`.
    pub runs: BTreeMap<String, BaselineRun>,
    /// Cases by id.
    pub cases: BTreeMap<String, BaselineCase>,
}

/// Runs of a baseline that a merge replaces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplacedRuns {
    /// Code that the baseline and the new runs measured: "1a2b3c4d", "another executable of
    /// 1a2b3c4d".
    pub of: String,
    /// Cases concerned.
    pub cases: usize,
    /// Largest number of replaced runs that any of these cases had.
    pub runs: usize,
}

impl std::fmt::Display for ReplacedRuns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        write!(f, "{} run{} of {}", self.runs, plural(self.runs), self.of)?;
        write!(f, " in {} case{}", self.cases, plural(self.cases))
    }
}

/// Whether two cases of a GPU were measured in comparable power states. A case without a recorded
/// power state is comparable with no other.
fn have_comparable_power(one: Option<CasePower>, other: Option<CasePower>) -> bool {
    one.zip(other).is_some_and(|(one, other)| one.comparable(other))
}

/// Describes a power state beside the other one, for the message of a refusal.
fn power_text(power: Option<CasePower>, other: Option<CasePower>) -> String {
    const HOW_TO_MEASURE_AGAIN: &str = "`cargo bench -- --save-baseline NAME` measures it anew";
    let Some(power) = power else { return format!("not recorded: {HOW_TO_MEASURE_AGAIN}") };
    let loaded = |power: CasePower| power.busy.is_some();
    if !loaded(power) && other.is_some_and(loaded) && power.at_cap {
        return format!(
            "{power}, by a version that let the card idle between samples: {HOW_TO_MEASURE_AGAIN}"
        );
    }
    power.to_string()
}

impl Baseline {
    /// An empty baseline.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), runs: BTreeMap::new(), cases: BTreeMap::new() }
    }

    /// Reads the baseline in a file, or returns an empty one if the file does not exist.
    ///
    /// # Errors
    /// Fails if the file exists and cannot be used.
    pub fn open_or_empty(path: &Path, name: &str) -> Result<Baseline, RecordFileError> {
        match file::read(path) {
            Err(error) if error.is_not_found() => Ok(Self::new(name)),
            // The name of the file replaces the name inside, because the file may have been copied.
            read => read.map(|baseline: Self| Self { name: name.to_owned(), ..baseline }),
        }
    }

    /// Replaces the cases that a run measured; other cases stay.
    ///
    /// Runs of one session, or of one executable built from one clean commit, are added to each
    /// other. All other runs of a case are replaced, so that a case never mixes commits; if several
    /// runs are replaced, their medians stay as [`BaselineCase::earlier`].
    pub fn merge_run(&mut self, run: &ProcessRun) {
        self.insert(run, |baseline, key| baseline.belongs_to_same_code(key, run));
    }

    /// Returns the earlier runs of these cases that [`Self::merge_run`] would replace, grouped by
    /// their code.
    pub fn runs_replaced_by<'a>(
        &self,
        run: &ProcessRun,
        cases: impl IntoIterator<Item = &'a str>,
    ) -> Vec<ReplacedRuns> {
        let mut replaced: BTreeMap<String, (usize, usize)> = BTreeMap::new();
        for case in cases.into_iter().filter_map(|id| self.cases.get(id)) {
            let mut of_case: BTreeMap<String, usize> = BTreeMap::new();
            for key in case.runs.keys().filter(|key| !self.belongs_to_same_code(key, run)) {
                *of_case.entry(self.first_difference(key, run)).or_default() += 1;
            }
            for (of, runs) in of_case {
                let (cases, most) = replaced.entry(of).or_default();
                *cases += 1;
                *most = runs.max(*most);
            }
        }
        let each = |(of, (cases, runs))| ReplacedRuns { of, cases, runs };
        replaced.into_iter().map(each).collect()
    }

    /// Returns whether a run of the baseline belongs to the same session or the same code as
    /// another run.
    fn belongs_to_same_code(&self, key: &str, run: &ProcessRun) -> bool {
        let (there, here) = (self.runs[key].origin(), run.origin());
        let same_session = key.split('/').next() == Some(&run.session);
        (same_session && there.provenance == here.provenance)
            || (there.is_same_build(here) && there.has_same_inputs_and_environment(here))
    }

    /// Returns the first fact in which a run of the baseline differs from a run that does not match
    /// it.
    fn first_difference(&self, key: &str, run: &ProcessRun) -> String {
        let there = &self.runs[key];
        let commit = there.provenance.short_commit();
        if there.provenance != run.provenance || there.provenance.commit.is_none() {
            commit
        } else if there.provenance.dirty {
            format!("{commit}, whatever the changes were")
        } else if there.executable != run.executable {
            format!("another executable of {commit}")
        } else {
            format!("{commit} in another environment or with another seed")
        }
    }

    /// Adds the cases of a run to the baseline's cases, so that a case has several process runs.
    ///
    /// # Errors
    /// Fails if the run's cases differ from the baseline's, with every field that differs; the
    /// baseline is then unchanged.
    pub fn add(&mut self, run: &ProcessRun) -> Result<(), Vec<EnvironmentMismatch>> {
        let both = run.cases.iter().filter_map(|(id, case)| Some((self.cases.get(id)?, case)));
        let mut differing: Vec<EnvironmentMismatch> = refuse_delayed_run(run).into_iter().collect();
        differing.extend(both.flat_map(|(base, case)| {
            let mut found = self.case_mismatches(base, run, case);
            let others = base.runs.keys().map(|key| self.runs[key].origin());
            found.extend(others.filter_map(|other| other.differing_code(run.origin())));
            found
        }));
        differing.dedup();
        if !differing.is_empty() {
            return Err(differing);
        }
        self.insert(run, |_, _| true);
        Ok(())
    }

    /// Adds the recorded errors of an executable to the cases of this baseline that its runs
    /// measured; returns the number of these cases.
    pub fn add_seed_errors(&mut self, numerics: &Numerics) -> usize {
        let is_same_build = |run: &BaselineRun| {
            run.executable.as_ref() == Some(&numerics.executable)
                && run.provenance == numerics.provenance
                && numerics.environment.mismatches(&run.environment).is_empty()
        };
        let mut count = 0;
        for (id, case) in &mut self.cases {
            let Some(found) = numerics.errors_of_case(id) else { continue };
            if !case.runs.keys().any(|key| is_same_build(&self.runs[key])) {
                continue;
            }
            let recorded = case.numerics.get_or_insert_default();
            recorded.insert_all_seeds(found);
            count += 1;
        }
        count
    }

    /// Returns all facts in which a case of a run differs from the same case of this baseline.
    pub fn case_mismatches(
        &self,
        base: &BaselineCase,
        run: &ProcessRun,
        case: &CaseRecord,
    ) -> Vec<EnvironmentMismatch> {
        let mut found = Vec::new();
        let mut check = |field, base: String, head: String| {
            if base != head {
                found.push(EnvironmentMismatch { field, base, head });
            }
        };
        check("revision", base.revision.to_string(), case.revision.to_string());
        check("work", base.work.to_string(), case.work.to_string());
        check("delays", "none".to_owned(), run.delays_text());
        for of_case in base.runs.keys().map(|key| &self.runs[key]) {
            check("seed", of_case.seed.to_string(), run.seed.to_string());
        }
        found.extend(
            base.runs
                .keys()
                .flat_map(|key| run.environment.mismatches(&self.runs[key].environment)),
        );
        if !run.environment.is_on_host() {
            let head = case.samples.power.as_ref().map(CasePower::from);
            let other =
                base.runs.values().find(|of_base| !have_comparable_power(of_base.power, head));
            found.extend(other.map(|of_base| EnvironmentMismatch {
                field: "power_state",
                base: power_text(of_base.power, head),
                head: power_text(head, of_base.power),
            }));
        }
        found
    }

    /// Adds a run to the baseline; of earlier runs of its cases, only those that `keep` accepts
    /// remain.
    fn insert(&mut self, run: &ProcessRun, keep: impl Fn(&Self, &str) -> bool) {
        let run_key = self.unused_run_key(run);
        for (id, case) in &run.cases {
            let mut entry = BaselineCase::from(case);
            let before = self
                .cases
                .get(id)
                .filter(|before| before.revision == entry.revision && before.work == entry.work);
            if let Some(before) = before {
                let power = case.samples.power.as_ref().map(CasePower::from);
                // Times in another power state are replaced, because times in two states are never
                // judged together.
                let kept = before.runs.iter().filter(|(key, of)| {
                    keep(self, key)
                        && (run.environment.is_on_host() || have_comparable_power(of.power, power))
                });
                entry.runs = kept.map(|(key, of)| (key.clone(), of.clone())).collect();
                entry.earlier = self.earlier_runs_to_keep(before, &entry, run);
                // Errors and verification are of the code that the kept runs are of.
                if !entry.runs.is_empty() {
                    entry.numerics = before.numerics.clone();
                    entry.verification =
                        entry.verification.weaker_verification(before.verification);
                }
            }
            entry
                .runs
                .insert(run_key.clone(), CaseRun::from_record(case).round_to_significant_digits());
            if case.verification.value().is_verified() {
                let numerics = entry.numerics.get_or_insert_default();
                numerics.insert_verified_case(run.seed, &case.verification);
            }
            self.cases.insert(id.clone(), entry);
        }
        let source = BaselineRun {
            started: run.started.clone(),
            environment: run.environment.clone(),
            package: run.package.clone(),
            provenance: run.provenance.clone(),
            stated_commit: run.stated_commit,
            seed: run.seed,
            executable: run.executable.clone(),
            limits: run.limits.clone(),
            problems_s: run.problems_s.clone(),
        };
        self.runs.insert(run_key, source);
        let used: BTreeSet<&String> =
            self.cases.values().flat_map(|case| case.runs.keys()).collect();
        self.runs.retain(|key, _| used.contains(key));
    }

    /// Returns the run's own key, with a number added if another run has it: several checkouts may
    /// have sessions of one name.
    fn unused_run_key(&self, run: &ProcessRun) -> String {
        let process = run.process_name_of_run();
        let numbered = (2..).map(|number| format!("{}-{number}/{process}", run.session));
        let mut keys = std::iter::once(run.baseline_key()).chain(numbered);
        let free = |key: &String| self.runs.get(key).is_none_or(|there| there.is(run));
        keys.find(free).unwrap_or_else(|| run.baseline_key())
    }

    /// Returns whether the baseline has this run already.
    pub fn has(&self, run: &ProcessRun) -> bool {
        self.runs.get(&run.baseline_key()).is_some_and(|there| there.is(run))
    }

    /// Returns the summary of a case's earlier runs to keep: that of the runs replaced now, or of
    /// runs replaced before, whichever has more runs. Runs of an environment that cannot be
    /// compared are ignored.
    fn earlier_runs_to_keep(
        &self,
        before: &BaselineCase,
        after: &BaselineCase,
        run: &ProcessRun,
    ) -> Option<EarlierRuns> {
        let replaced: Vec<(&String, &CaseRun)> = before
            .runs
            .iter()
            .filter(|(key, _)| !after.runs.contains_key(*key))
            .filter(|(key, _)| run.environment.mismatches(&self.runs[*key].environment).is_empty())
            .collect();
        let kept = before.earlier.clone();
        let longer = kept.as_ref().is_some_and(|kept| kept.medians_ns.len() > replaced.len());
        if replaced.len() < 2 || longer {
            return kept;
        }
        let commit = replaced.first().map(|(key, _)| self.runs[*key].provenance.short_commit());
        Some(EarlierRuns {
            commit: commit.unwrap_or_default(),
            medians_ns: replaced.iter().map(|(_, of)| of.median_ns).collect(),
        })
    }
}

impl BaselineRun {
    /// Checks the time, the place and the ceilings of a baseline's run.
    fn validate(&self) -> Result<(), String> {
        text::check_rfc3339_time(&self.started).map_err(|problem| format!("started: {problem}"))?;
        self.environment.validate()?;
        for (problem, seconds) in &self.problems_s {
            plausibility::check_seconds(&format!("problems_s: {problem}"), *seconds)?;
        }
        self.limits.validate()
    }

    /// Returns whether a baseline's entry describes this run, which has the same key.
    fn is(&self, run: &ProcessRun) -> bool {
        self.started == run.started && self.provenance == run.provenance
    }

    fn origin(&self) -> RunOrigin<'_> {
        RunOrigin {
            provenance: &self.provenance,
            executable: self.executable.as_deref(),
            seed: self.seed,
            environment: &self.environment,
        }
    }
}

/// A run whose launches were delayed on purpose belongs in no baseline.
fn refuse_delayed_run(run: &ProcessRun) -> Option<EnvironmentMismatch> {
    (!run.delays.is_empty()).then(|| EnvironmentMismatch {
        field: "delays",
        base: "none".to_owned(),
        head: run.delays_text(),
    })
}

impl From<&CaseRecord> for BaselineCase {
    fn from(case: &CaseRecord) -> Self {
        Self {
            workload: case.workload.clone(),
            revision: case.revision,
            work: case.work.clone(),
            computed_samples: case.computed_samples,
            sample_unit: case.sample_unit,
            runs: BTreeMap::new(),
            verification: case.verification.value(),
            numerics: None,
            earlier: None,
        }
    }
}

impl RecordType for Baseline {
    const SCHEMA: &'static str = "kernelgate-baseline";
    const SCHEMA_VERSION: u64 = 3;
    const OLDEST_VERSION: u64 = 3;
    const FILE_KIND: &'static str = "baseline";
    const HAS_CHECKSUM: bool = true;
    const ONE_LINE_FIELDS: &'static [&'static str] = &["runs", "numerics"];

    fn validate(&self) -> Result<(), String> {
        text::check_plain_name(&self.name).map_err(|problem| format!("name {problem}"))?;
        for (key, run) in &self.runs {
            run.validate().map_err(|problem| format!("run {key}: {problem}"))?;
        }
        for (id, case) in &self.cases {
            text::check_case_id(id)?;
            if case.runs.is_empty() {
                return Err(format!("case {id}: no runs"));
            }
            if let Some(earlier) = &case.earlier
                && (earlier.medians_ns.len() < 2
                    || !earlier.medians_ns.iter().all(|ns| PLAUSIBLE_LAUNCH_NS.contains(ns)))
            {
                return Err(format!("case {id}: earlier runs that cannot be"));
            }
            case.work.validate().map_err(|problem| format!("case {id}: {problem}"))?;
            case.verification.validate().map_err(|problem| format!("case {id}: {problem}"))?;
            if let Some(numerics) = &case.numerics {
                numerics.validate().map_err(|problem| format!("case {id}: {problem}"))?;
            }
            for (run, measured) in &case.runs {
                measured
                    .validate()
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
    use crate::measure::limits::{DeviceLimits, TimeLimit};
    use crate::record::{Environment, Provenance};

    fn run(session: &str, commit: &str, executable: Option<&str>) -> ProcessRun {
        let (commit, dirty) = match commit.strip_suffix("+changes") {
            Some(commit) => (commit, true),
            None => (commit, false),
        };
        ProcessRun {
            provenance: Provenance { commit: Some(commit.to_owned()), dirty },
            executable: executable.map(str::to_owned),
            started: format!("2026-01-0{session}T00:00:00Z"),
            cases: ["a", "b"]
                .map(|id| (id.to_owned(), CaseRecord::untimed_samples(vec![100.0])))
                .into(),
            ..ProcessRun::start_now("bench", session, Environment::cpu(), Provenance::default())
        }
    }

    fn run_keys(baseline: &Baseline) -> Vec<&String> {
        baseline.cases["a"].runs.keys().collect()
    }

    #[test]
    fn runs_of_one_clean_build_add_up_and_other_runs_are_replaced() {
        let first = run("1", "aaaa", Some("x"));
        let with = |second: &ProcessRun| {
            let mut baseline = Baseline::new("main");
            baseline.merge_run(&first);
            let messages: Vec<String> = baseline
                .runs_replaced_by(second, ["a", "b", "c"])
                .iter()
                .map(ToString::to_string)
                .collect();
            baseline.merge_run(second);
            (run_keys(&baseline).len(), messages)
        };
        assert_eq!(with(&run("2", "aaaa", Some("x"))), (2, vec![]));
        let replaced = |second: &ProcessRun, of: &str| {
            assert_eq!(with(second), (1, vec![format!("1 run of {of} in 2 cases")]));
        };
        replaced(&run("2", "bbbb", Some("x")), "aaaa");
        replaced(&run("2", "aaaa+changes", Some("x")), "aaaa");
        replaced(&run("2", "aaaa", Some("y")), "another executable of aaaa");
        replaced(&run("2", "aaaa", None), "another executable of aaaa");
        let reseeded = ProcessRun { seed: 2, ..run("2", "aaaa", Some("x")) };
        replaced(&reseeded, "aaaa in another environment or with another seed");
        // The new session has a name that another session, of other code, also had.
        replaced(&run("1", "bbbb", Some("x")), "aaaa");
    }

    #[test]
    fn a_session_with_an_equal_name_in_another_checkout_is_another_run() {
        let mut baseline = Baseline::new("main");
        baseline.merge_run(&run("1", "aaaa", Some("x")));
        let mut second = run("1", "bbbb", Some("y"));
        second.cases.remove("b");
        baseline.merge_run(&second);
        assert_eq!(run_keys(&baseline), ["1-2/bench"]);
        let commit = |key: &str| baseline.runs[key].provenance.short_commit();
        assert_eq!((commit("1/bench"), commit("1-2/bench")), ("aaaa".into(), "bbbb".into()));
        assert!(baseline.has(&run("1", "aaaa", Some("x"))) && !baseline.has(&second));
    }

    #[test]
    fn a_baseline_keeps_limits_and_may_lack_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("main.json");
        let limit = TimeLimit { time_ns: 50.0, by: "memory".to_owned() };
        let limits = DeviceLimits {
            flops_per_s: [("matmul f32".to_owned(), 1e12)].into(),
            ..DeviceLimits::default()
        };
        let mut measured = ProcessRun { limits: limits.clone(), ..run("1", "aaaa", Some("x")) };
        measured.cases.get_mut("a").unwrap().limit = Some(limit.clone());
        let mut baseline = Baseline::new("main");
        baseline.merge_run(&measured);
        file::write(&path, &baseline).unwrap();
        let read: Baseline = file::read(&path).unwrap();
        assert_eq!(read.runs["1/bench"].limits, limits);
        let limit_of = |read: &Baseline, id: &str| read.cases[id].runs["1/bench"].limit.clone();
        assert_eq!((limit_of(&read, "a"), limit_of(&read, "b")), (Some(limit), None));
        let written = |change: fn(&mut Baseline)| {
            let mut changed = read.clone();
            change(&mut changed);
            file::write(&path, &changed).map(|()| std::fs::read_to_string(&path).unwrap())
        };
        let older = written(|baseline| {
            baseline.runs.values_mut().for_each(|run| run.limits = DeviceLimits::default());
            let runs = baseline.cases.values_mut().flat_map(|case| case.runs.values_mut());
            runs.for_each(|run| run.limit = None);
        });
        assert!(!older.unwrap().contains("limit"));
        assert_eq!(limit_of(&file::read(&path).unwrap(), "a"), None);
        let wrong = written(|baseline| {
            let run = baseline.cases.get_mut("a").unwrap().runs.get_mut("1/bench").unwrap();
            run.limit = Some(TimeLimit { time_ns: 0.0, by: "memory".to_owned() });
        });
        let refused = wrong.unwrap_err().to_string();
        let reason = "invalid baseline: case a, run 1/bench: a limit of 0 ns a launch";
        assert_eq!(refused, format!("failed to write {}: {reason}", path.display()));
        // The older file stays.
        assert_eq!(limit_of(&file::read(&path).unwrap(), "b"), None);
        let by_hand =
            file::record_text(&read).replace("\"limit.time_ns\":50", "\"limit.time_ns\":0");
        std::fs::write(&path, by_hand).unwrap();
        let refused = file::read_without_checksum::<Baseline>(&path).unwrap_err().to_string();
        assert_eq!(refused, format!("failed to read {}: {reason}", path.display()));
    }

    #[test]
    fn a_run_of_other_code_is_not_merged_into_a_baseline() {
        let mut baseline = Baseline::new("main");
        baseline.add(&run("1", "aaaa+changes", Some("x"))).unwrap();
        let mut field =
            |run: ProcessRun| baseline.add(&run).map_err(|differing| differing[0].field);
        assert_eq!(field(run("2", "aaaa+changes", Some("x"))), Ok(()));
        assert_eq!(field(run("3", "aaaa+changes", Some("y"))), Err("executable"));
        assert_eq!(field(run("3", "aaaa", Some("x"))), Err("commit"));
        assert_eq!(run_keys(&baseline).len(), 2);
    }
}
