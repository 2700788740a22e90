//! A baseline: the runs that later ones are held against, one file a device and name, meant to be committed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::environment::{Environment, Provenance};
use super::file::Record;
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

    /// Takes over what a run measured. A case of an earlier session is replaced, whole; runs of the same session add up; cases
    /// that the run did not measure stay.
    pub fn merge(&mut self, run: &Run) {
        let key = format!("{}/{}", run.session, run.bench);
        for (id, case) in &run.cases {
            let fresh = BaselineCase::from(case);
            let entry = self.cases.entry(id.clone()).or_insert_with(|| fresh.clone());
            if entry.revision != fresh.revision || entry.work != fresh.work {
                *entry = fresh;
            }
            entry.samples.retain(|key, _| key.split('/').next() == Some(&run.session));
            entry.samples.insert(key.clone(), case.samples.clone());
        }
        if !run.cases.is_empty() {
            self.runs.insert(
                key,
                BaselineRun {
                    started: run.started.clone(),
                    environment: run.environment.clone(),
                    provenance: run.provenance.clone(),
                },
            );
        }
        let used: std::collections::BTreeSet<&String> = self.cases.values().flat_map(|case| case.samples.keys()).collect();
        self.runs.retain(|key, _| used.contains(key));
    }
}

impl From<&CaseRecord> for BaselineCase {
    fn from(case: &CaseRecord) -> Self {
        Self { workload: case.workload.clone(), revision: case.revision, work: case.work.clone(), samples: BTreeMap::new() }
    }
}

impl Record for Baseline {
    const SCHEMA: &'static str = "kernelgate.baseline";
    const VERSION: u64 = 1;
    const KIND: &'static str = "baseline";

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
