//! A measurement: the process runs that are judged together.
//!
//! The runs may be several processes of one bench, shards of it, or different benches, of one
//! session or of several. [`Measurement::from_runs`] is the only place that decides whether they
//! belong together. Deliberately absent: statistics, and the choice of the runs that a baseline
//! keeps ([`Baseline`](crate::record::Baseline)).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::shard::Shard;
use crate::measure::anchors::AnchorRecord;
use crate::record::origin::environment::{Environment, Mismatch};
use crate::record::run::{CaseRecord, ProcessRun};

/// Process runs that belong together.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measurement {
    runs: Vec<ProcessRun>,
}

/// One process run of a case.
#[derive(Debug, Clone, Copy)]
pub struct CaseOfRun<'a> {
    /// The process run.
    pub run: &'a ProcessRun,
    /// The case as that process measured it.
    pub case: &'a CaseRecord,
}

/// A fact in which two runs of a bench differ, so that they are not one measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DifferingFact {
    /// Name of the fact: "commit", "effort", "gpu.driver", "revision".
    pub field: &'static str,
    /// The case, if the fact is about its definition.
    pub case: Option<String>,
    /// Value in the first run.
    pub left: String,
    /// Value in the second run.
    pub right: String,
    /// Keys of both runs, `<session>/<process>`.
    pub runs: [String; 2],
    /// Whether the runs are shards.
    pub sharded: bool,
}

impl std::error::Error for DifferingFact {}

impl fmt::Display for DifferingFact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, case, left, right, runs: [first, second], sharded } = self;
        let of_case = case.as_ref().map(|id| format!(" of {id}")).unwrap_or_default();
        let no = match sharded {
            true => "shards of one measurement",
            false => "process runs of the same code",
        };
        write!(
            f,
            "{field}{of_case} is `{left}` in the run {first} and `{right}` in the run {second}: \
             these are no {no}"
        )
    }
}

impl Measurement {
    /// The measurement that these runs are.
    ///
    /// # Errors
    /// The first fact in which a run differs from an earlier run of its bench.
    pub fn from_runs(runs: Vec<ProcessRun>) -> Result<Self, Box<DifferingFact>> {
        Self::check(&runs)?;
        Ok(Self { runs })
    }

    /// Checks that runs are one measurement.
    ///
    /// # Errors
    /// The first fact in which a run differs from an earlier run of its bench.
    pub fn check<'a>(
        runs: impl IntoIterator<Item = &'a ProcessRun>,
    ) -> Result<(), Box<DifferingFact>> {
        let mut together = JoinedRuns::default();
        runs.into_iter().try_for_each(|run| together.add(run))
    }

    /// Groups runs into as few measurements as possible: each run joins the first one that it
    /// belongs to.
    pub fn split(runs: impl IntoIterator<Item = ProcessRun>) -> Vec<Self> {
        let runs: Vec<ProcessRun> = runs.into_iter().collect();
        let mut groups: Vec<JoinedRuns<'_>> = Vec::new();
        let mut places = Vec::new();
        for run in &runs {
            let place = groups.iter_mut().position(|group| group.add(run).is_ok());
            places.push(place.unwrap_or_else(|| {
                let mut group = JoinedRuns::default();
                group.insert(run);
                groups.push(group);
                groups.len() - 1
            }));
        }
        let mut measurements: Vec<Self> = groups.iter().map(|_| Self::default()).collect();
        for (run, place) in runs.into_iter().zip(places) {
            measurements[place].runs.push(run);
        }
        measurements
    }

    /// All runs of several measurements as one.
    ///
    /// # Errors
    /// The first fact in which the runs differ.
    pub fn joined(measurements: Vec<Self>) -> Result<Self, Box<DifferingFact>> {
        Self::from_runs(measurements.into_iter().flat_map(|it| it.runs).collect())
    }

    /// Process runs of the measurement, in the order in which they were given.
    pub fn runs(&self) -> &[ProcessRun] {
        &self.runs
    }

    /// Cases of the measurement by id, each with the process runs that measured it.
    pub fn cases(&self) -> BTreeMap<&str, Vec<CaseOfRun<'_>>> {
        let mut cases: BTreeMap<&str, Vec<CaseOfRun<'_>>> = BTreeMap::new();
        for run in &self.runs {
            for (id, case) in &run.cases {
                cases.entry(id).or_default().push(CaseOfRun { run, case });
            }
        }
        cases
    }

    /// Machine, device and build of the first run; absent in a measurement without runs.
    pub fn environment(&self) -> Option<&Environment> {
        self.runs.first().map(|run| &run.environment)
    }

    /// Folder of the device among baselines.
    pub fn device_folder(&self) -> String {
        self.environment().map(Environment::slug).unwrap_or_default()
    }

    /// Shards that are missing among several others: "attention, shard 3/4". A single shard is
    /// complete, because a machine may judge its own shard alone.
    pub fn missing_shards(&self) -> Vec<String> {
        let mut present: BTreeMap<&str, BTreeSet<Shard>> = BTreeMap::new();
        for run in &self.runs {
            present.entry(&run.bench).or_default().extend(run.shard);
        }
        let mut missing = Vec::new();
        for (bench, shards) in present.iter().filter(|(_, shards)| shards.len() > 1) {
            let count = shards.first().map_or(0, |shard| shard.count);
            let all = (1..=count).map(|index| Shard { index, count });
            let lacking = all.filter(|shard| !shards.contains(shard));
            missing.extend(lacking.map(|shard| format!("{bench}, shard {shard}")));
        }
        missing
    }
}

/// Runs that belong together, by bench and by case.
#[derive(Default)]
struct JoinedRuns<'a> {
    benches: BTreeMap<&'a str, Vec<&'a ProcessRun>>,
    cases: BTreeMap<&'a str, Vec<&'a ProcessRun>>,
    /// First run with a case of each workload, by bench: shards have no case in common.
    workloads: BTreeMap<[&'a str; 2], (&'a ProcessRun, &'a CaseRecord)>,
}

impl<'a> JoinedRuns<'a> {
    /// Adds a run.
    ///
    /// # Errors
    /// The first fact that keeps it out.
    fn add(&mut self, run: &'a ProcessRun) -> Result<(), Box<DifferingFact>> {
        match self.differing(run) {
            Some(differing) => Err(Box::new(differing)),
            None => {
                self.insert(run);
                Ok(())
            }
        }
    }

    fn insert(&mut self, run: &'a ProcessRun) {
        self.benches.entry(&run.bench).or_default().push(run);
        for (id, case) in &run.cases {
            self.cases.entry(id).or_default().push(run);
            self.workloads.entry([&run.bench, &case.workload]).or_insert((run, case));
        }
    }

    fn differing(&self, run: &ProcessRun) -> Option<DifferingFact> {
        let named = self.benches.get(&*run.bench)?;
        let Some(first) = named.iter().find(|other| other_package(other, run).is_none()) else {
            // One invocation in a workspace runs benches of several packages, which may have one
            // name.
            let together = named.iter().any(|other| other.session == run.session);
            return named.first().filter(|_| !together).and_then(|other| other_run(other, run));
        };
        let of_workload = || {
            run.cases.iter().find_map(|(id, case)| {
                let &(other, known) = self.workloads.get(&[&*run.bench, &*case.workload])?;
                let same_package = other_package(other, run).is_none();
                let [base, head] = [known, case].map(|case| case.revision.to_string());
                (same_package && base != head).then(|| {
                    let mismatch = Mismatch { field: "revision", base, head };
                    DifferingFact { case: Some(id.clone()), ..between(other, run, mismatch) }
                })
            })
        };
        other_run(first, run).or_else(of_workload).or_else(|| {
            run.cases.iter().find_map(|(id, case)| {
                let of_bench = |other: &&&ProcessRun| {
                    other.bench == run.bench && other_package(other, run).is_none()
                };
                let other = self.cases.get(&**id)?.iter().find(of_bench)?;
                let mismatch = other_definition(&other.cases[id], case)?;
                Some(DifferingFact { case: Some(id.clone()), ..between(other, run, mismatch) })
            })
        })
    }
}

fn between(left: &ProcessRun, right: &ProcessRun, mismatch: Mismatch) -> DifferingFact {
    DifferingFact {
        field: mismatch.field,
        case: None,
        left: mismatch.base,
        right: mismatch.head,
        runs: [left.key(), right.key()],
        sharded: left.shard.is_some() || right.shard.is_some(),
    }
}

/// The first fact in which two runs of a bench differ, besides their cases.
fn other_run(left: &ProcessRun, right: &ProcessRun) -> Option<DifferingFact> {
    let shards = |run: &ProcessRun| run.shard.map_or(1, |shard| shard.count).to_string();
    let sharded = left.shard.is_some() || right.shard.is_some();
    // Without a recorded digest the other facts decide.
    let plans = left.plan.as_ref().zip(right.plan.as_ref());
    let [base, head] = plans.map_or_else(Default::default, |(left, right)| {
        [left, right].map(|plan| plan.digest.clone())
    });
    let other_plan = (base != head).then_some(Mismatch { field: "plan", base, head });
    let facts: [Fact<ProcessRun>; 4] = [
        ("number of shards", shards),
        ("commit", |run| run.provenance.short()),
        ("effort", |run| run.effort.clone()),
        ("seed", |run| run.seed.to_string()),
    ];
    let mismatch = other_package(left, right)
        .or_else(|| first_mismatch(&facts, left, right))
        .or(other_plan)
        .or_else(|| other_power(left, right))
        .or_else(|| left.origin().other_build(right.origin(), sharded))
        .or_else(|| right.environment.mismatches(&left.environment).into_iter().next());
    Some(between(left, right, mismatch?))
}

/// Power states of shards that do not compare: a card in the burst state is faster.
fn other_power(left: &ProcessRun, right: &ProcessRun) -> Option<Mismatch> {
    let [left, right] = [left, right].map(|run| match &run.anchors {
        Some(AnchorRecord::Measured(anchors)) => Some(anchors.power),
        _ => None,
    });
    let (base, head) = left.zip(right).filter(|(left, right)| left != right)?;
    let [base, head] = [base, head].map(|power| power.name().to_owned());
    Some(Mismatch { field: "power state", base, head })
}

/// The packages, where both runs record one. Benches of two packages may have one name.
fn other_package(left: &ProcessRun, right: &ProcessRun) -> Option<Mismatch> {
    let (left, right) = left.package.as_ref().zip(right.package.as_ref())?;
    let mismatch = || {
        let [base, head] = [left, right].map(ToString::to_string);
        Mismatch { field: "package", base, head }
    };
    (left != right).then(mismatch)
}

/// The first fact of a case's definition that differs.
fn other_definition(left: &CaseRecord, right: &CaseRecord) -> Option<Mismatch> {
    let facts: [Fact<CaseRecord>; 2] =
        [("revision", |case| case.revision.to_string()), ("work", |case| case.work.to_string())];
    first_mismatch(&facts, left, right)
}

/// A fact's name, and its value as text.
type Fact<T> = (&'static str, fn(&T) -> String);

fn first_mismatch<T>(facts: &[Fact<T>], left: &T, right: &T) -> Option<Mismatch> {
    let values = facts.iter().map(|(field, value)| Mismatch {
        field,
        base: value(left),
        head: value(right),
    });
    values.into_iter().find(|mismatch| mismatch.base != mismatch.head)
}

#[cfg(test)]
mod tests;
