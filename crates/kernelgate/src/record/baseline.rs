//! A baseline: the runs that later ones are compared with, one file a device and name, meant to be
//! committed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::environment::{Environment, Mismatch, Provenance};
use super::file::{self, FileError, Record};
use super::run::{CaseRecord, Run, Samples, WorkRecord};

/// Cases with the process runs that measured them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// Its name; the file is `baselines/<device>/<name>.json`.
    pub name: String,
    /// The process runs that the cases refer to, by `<session>/<bench>`.
    pub runs: BTreeMap<String, BaselineRun>,
    /// Cases by id.
    pub cases: BTreeMap<String, BaselineCase>,
}

/// Where and of what a process run was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BaselineRun {
    /// When it started, RFC 3339, UTC.
    pub started: String,
    /// Where.
    pub environment: Environment,
    /// Of which code.
    pub provenance: Provenance,
    /// Seed of the inputs.
    #[serde(default = "first_seed")]
    pub seed: u64,
}

/// What runs without the field were drawn from.
const fn first_seed() -> u64 {
    1
}

/// One case of a baseline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BaselineCase {
    /// `family/operation`.
    pub workload: String,
    /// Revision of the workload's definition.
    pub revision: u32,
    /// Declared work of one launch.
    pub work: WorkRecord,
    /// Raw timings by run, at least one.
    pub samples: BTreeMap<String, Samples>,
}

impl Baseline {
    /// An empty baseline.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), runs: BTreeMap::new(), cases: BTreeMap::new() }
    }

    /// The baseline in a file, or an empty one where there is none.
    ///
    /// # Errors
    /// When the file is there and cannot be used.
    pub fn open(path: &Path, name: &str) -> Result<Self, FileError> {
        match file::read(path) {
            Err(error) if error.is_not_found() => Ok(Self::new(name)),
            // The file may have been copied under another name.
            read => read.map(|baseline: Self| Self { name: name.to_owned(), ..baseline }),
        }
    }

    /// Takes over what a run measured. A case of an earlier session is replaced, whole; runs of the
    /// same session add up; cases that the run did not measure stay.
    pub fn merge(&mut self, run: &Run) {
        self.insert(run, |session| session == run.session);
    }

    /// Adds what a run measured to what is there, so that a case has several process runs.
    ///
    /// # Errors
    /// When the run's cases differ from the baseline's, with every field that differs; nothing is
    /// then taken over.
    pub fn add(&mut self, run: &Run) -> Result<(), Vec<Mismatch>> {
        let both = run.cases.iter().filter_map(|(id, case)| Some((self.cases.get(id)?, case)));
        let mut differing: Vec<Mismatch> = delayed(run).into_iter().collect();
        differing.extend(both.flat_map(|(base, case)| self.mismatches(base, run, case)));
        differing.dedup();
        if !differing.is_empty() {
            return Err(differing);
        }
        self.insert(run, |_| true);
        Ok(())
    }

    /// Everything that makes a case of a run another one than this baseline's.
    pub fn mismatches(&self, base: &BaselineCase, run: &Run, case: &CaseRecord) -> Vec<Mismatch> {
        let mut found = Vec::new();
        let mut check = |field, base: String, head: String| {
            if base != head {
                found.push(Mismatch { field, base, head });
            }
        };
        check("revision", base.revision.to_string(), case.revision.to_string());
        check("work", base.work.to_string(), case.work.to_string());
        check("delays", "none".to_owned(), run.delays_text());
        for of_case in base.samples.keys().map(|key| &self.runs[key]) {
            check("seed", of_case.seed.to_string(), run.seed.to_string());
        }
        found.extend(
            base.samples
                .keys()
                .flat_map(|key| run.environment.mismatches(&self.runs[key].environment)),
        );
        found
    }

    /// Takes over a run; of the runs that a case has, those of the sessions to keep stay.
    fn insert(&mut self, run: &Run, keep: impl Fn(&str) -> bool) {
        for (id, case) in &run.cases {
            let fresh = BaselineCase::from(case);
            let entry = self.cases.entry(id.clone()).or_insert_with(|| fresh.clone());
            if entry.revision != fresh.revision || entry.work != fresh.work {
                *entry = fresh;
            }
            entry.samples.retain(|key, _| keep(key.split('/').next().unwrap_or_default()));
            entry.samples.insert(run.key(), case.samples.clone());
        }
        let source = BaselineRun {
            started: run.started.clone(),
            environment: run.environment.clone(),
            provenance: run.provenance.clone(),
            seed: run.seed,
        };
        self.runs.insert(run.key(), source);
        let used: BTreeSet<&String> =
            self.cases.values().flat_map(|case| case.samples.keys()).collect();
        self.runs.retain(|key, _| used.contains(key));
    }
}

/// A run whose launches were delayed on purpose belongs in no baseline.
fn delayed(run: &Run) -> Option<Mismatch> {
    (!run.delays.is_empty()).then(|| Mismatch {
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
            samples: BTreeMap::new(),
        }
    }
}

impl Record for Baseline {
    const SCHEMA: &'static str = "kernelgate.baseline";
    const VERSION: u64 = 1;
    const KIND: &'static str = "baseline";
    const SEALED: bool = true;

    fn validate(&self) -> Result<(), String> {
        for (id, case) in &self.cases {
            if case.samples.is_empty() {
                return Err(format!("case {id}: no runs"));
            }
            for (run, samples) in &case.samples {
                samples.validate().map_err(|problem| format!("case {id}, run {run}: {problem}"))?;
                if !self.runs.contains_key(run) {
                    return Err(format!("case {id}: run {run} is not listed"));
                }
            }
        }
        Ok(())
    }
}
