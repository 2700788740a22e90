//! A measurement: the process runs that are judged together.
//!
//! The runs may be several processes of one bench, shards of it, or different benches, of one
//! session or of several. [`Measurement::from_runs`] is the only place that decides
//! whether runs belong together. Deliberately absent: statistics, and the choice of the runs that a
//! baseline keeps ([`Baseline`](crate::record::Baseline)).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::shard::Shard;
use crate::measure::anchors::AnchorRecord;
use crate::record::origin::environment::{Environment, EnvironmentMismatch};
use crate::record::run::{CaseRecord, ProcessRun};

/// A measurement: process runs that may be judged together.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measurement {
    runs: Vec<ProcessRun>,
}

/// A case as one process run of the measurement has it.
#[derive(Debug, Clone, Copy)]
pub struct CaseInRun<'a> {
    /// The process run.
    pub run: &'a ProcessRun,
    /// The case as this process run measured it.
    pub case: &'a CaseRecord,
}

/// A fact in which two runs of a bench differ, so that they cannot be judged together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DifferingRunFact {
    /// Name of the differing fact: "commit", "effort", "gpu.driver", "revision".
    pub field: &'static str,
    /// Id of the case, if the differing fact is about a case's definition.
    pub case: Option<String>,
    /// Value of the fact in the first run.
    pub left: String,
    /// Value of the fact in the second run.
    pub right: String,
    /// Keys of both process runs, `<session>/<process>`.
    pub runs: [String; 2],
    /// Whether both runs are shards of a divided selection.
    pub sharded: bool,
}

impl std::error::Error for DifferingRunFact {}

impl fmt::Display for DifferingRunFact {
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
    /// Makes one measurement of process runs that belong together.
    ///
    /// # Errors
    /// The error is the first fact in which a run differs from an earlier run of its bench.
    pub fn from_runs(runs: Vec<ProcessRun>) -> Result<Measurement, Box<DifferingRunFact>> {
        Self::check_runs_match(&runs)?;
        Ok(Self { runs })
    }

    /// Checks that process runs belong to one measurement.
    ///
    /// # Errors
    /// The first fact in which a run differs from an earlier run of its bench.
    pub fn check_runs_match<'a>(
        runs: impl IntoIterator<Item = &'a ProcessRun>,
    ) -> Result<(), Box<DifferingRunFact>> {
        let mut together = JoinedRuns::default();
        runs.into_iter().try_for_each(|run| together.add(run))
    }

    /// Groups runs into as few measurements as possible: each run joins the first measurement that
    /// it fits.
    pub fn group_into_measurements(runs: impl IntoIterator<Item = ProcessRun>) -> Vec<Self> {
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

    /// Joins the runs of several measurements into one measurement.
    ///
    /// # Errors
    /// The error is the first fact in which the runs differ.
    pub fn join_measurements(measurements: Vec<Self>) -> Result<Self, Box<DifferingRunFact>> {
        Self::from_runs(measurements.into_iter().flat_map(|it| it.runs).collect())
    }

    /// Process runs of the measurement, in the order in which they were given.
    pub fn process_runs(&self) -> &[ProcessRun] {
        &self.runs
    }

    /// The cases of the measurement by id, each with the process runs that measured it.
    pub fn runs_by_case(&self) -> BTreeMap<&str, Vec<CaseInRun<'_>>> {
        let mut cases: BTreeMap<&str, Vec<CaseInRun<'_>>> = BTreeMap::new();
        for run in &self.runs {
            for (id, case) in &run.cases {
                cases.entry(id).or_default().push(CaseInRun { run, case });
            }
        }
        cases
    }

    /// Machine, device and build of the first run; absent in a measurement without runs.
    pub fn environment(&self) -> Option<&Environment> {
        self.runs.first().map(|run| &run.environment)
    }

    /// Name of the device's folder among the baselines.
    pub fn device_folder(&self) -> String {
        self.environment().map(Environment::baseline_folder_name).unwrap_or_default()
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

/// Runs of one measurement, by bench and by case.
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
    /// The error is the first fact that keeps the run out.
    fn add(&mut self, run: &'a ProcessRun) -> Result<(), Box<DifferingRunFact>> {
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

    fn differing(&self, run: &ProcessRun) -> Option<DifferingRunFact> {
        let named = self.benches.get(&*run.bench)?;
        let Some(first) = named.iter().find(|other| differing_package(other, run).is_none()) else {
            // One invocation may run benches of several packages in a workspace, and two of these
            // benches may have equal names.
            let together = named.iter().any(|other| other.session == run.session);
            return named
                .first()
                .filter(|_| !together)
                .and_then(|other| differing_fact_of_runs(other, run));
        };
        let of_workload = || {
            run.cases.iter().find_map(|(id, case)| {
                let &(other, known) = self.workloads.get(&[&*run.bench, &*case.workload])?;
                let same_package = differing_package(other, run).is_none();
                let [base, head] = [known, case].map(|case| case.revision.to_string());
                (same_package && base != head).then(|| {
                    let mismatch = EnvironmentMismatch { field: "revision", base, head };
                    DifferingRunFact {
                        case: Some(id.clone()),
                        ..differing_fact(other, run, mismatch)
                    }
                })
            })
        };
        differing_fact_of_runs(first, run).or_else(of_workload).or_else(|| {
            run.cases.iter().find_map(|(id, case)| {
                let of_bench = |other: &&&ProcessRun| {
                    other.bench == run.bench && differing_package(other, run).is_none()
                };
                let other = self.cases.get(&**id)?.iter().find(of_bench)?;
                let mismatch = differing_definition(&other.cases[id], case)?;
                Some(DifferingRunFact {
                    case: Some(id.clone()),
                    ..differing_fact(other, run, mismatch)
                })
            })
        })
    }
}

fn differing_fact(
    left: &ProcessRun,
    right: &ProcessRun,
    mismatch: EnvironmentMismatch,
) -> DifferingRunFact {
    DifferingRunFact {
        field: mismatch.field,
        case: None,
        left: mismatch.base,
        right: mismatch.head,
        runs: [left.baseline_key(), right.baseline_key()],
        sharded: left.shard.is_some() || right.shard.is_some(),
    }
}

/// The first fact in which two runs of a bench differ, besides their cases.
fn differing_fact_of_runs(left: &ProcessRun, right: &ProcessRun) -> Option<DifferingRunFact> {
    let shards = |run: &ProcessRun| run.shard.map_or(1, |shard| shard.count).to_string();
    let sharded = left.shard.is_some() || right.shard.is_some();
    // If a run has no recorded digest, the other facts decide.
    let plans = left.plan.as_ref().zip(right.plan.as_ref());
    let [base, head] = plans.map_or_else(Default::default, |(left, right)| {
        [left, right].map(|plan| plan.digest.clone())
    });
    let other_plan = (base != head).then_some(EnvironmentMismatch { field: "plan", base, head });
    let facts: [ComparedFact<ProcessRun>; 4] = [
        ("number of shards", shards),
        ("commit", |run| run.provenance.short_commit()),
        ("effort", |run| run.effort.clone()),
        ("seed", |run| run.seed.to_string()),
    ];
    let mismatch = differing_package(left, right)
        .or_else(|| first_mismatching_fact(&facts, left, right))
        .or(other_plan)
        .or_else(|| differing_power_state(left, right))
        .or_else(|| left.origin().differing_build(right.origin(), sharded))
        .or_else(|| right.environment.mismatches(&left.environment).into_iter().next());
    Some(differing_fact(left, right, mismatch?))
}

/// Power states of shards that do not compare: a card in the burst state is faster.
fn differing_power_state(left: &ProcessRun, right: &ProcessRun) -> Option<EnvironmentMismatch> {
    let [left, right] = [left, right].map(|run| match &run.anchors {
        Some(AnchorRecord::Measured(anchors)) => Some(anchors.power),
        _ => None,
    });
    let (base, head) = left.zip(right).filter(|(left, right)| left != right)?;
    let [base, head] = [base, head].map(|power| power.name().to_owned());
    Some(EnvironmentMismatch { field: "power state", base, head })
}

/// Compares the packages of two runs, if both runs record a package. Benches of two packages may
/// have equal names.
fn differing_package(left: &ProcessRun, right: &ProcessRun) -> Option<EnvironmentMismatch> {
    let (left, right) = left.package.as_ref().zip(right.package.as_ref())?;
    let mismatch = || {
        let [base, head] = [left, right].map(ToString::to_string);
        EnvironmentMismatch { field: "package", base, head }
    };
    (left != right).then(mismatch)
}

/// Returns the first fact in which two definitions of a case differ.
fn differing_definition(left: &CaseRecord, right: &CaseRecord) -> Option<EnvironmentMismatch> {
    let facts: [ComparedFact<CaseRecord>; 2] =
        [("revision", |case| case.revision.to_string()), ("work", |case| case.work.to_string())];
    first_mismatching_fact(&facts, left, right)
}

/// Name of a compared fact, and the function that returns its value as text.
type ComparedFact<T> = (&'static str, fn(&T) -> String);

fn first_mismatching_fact<T>(
    facts: &[ComparedFact<T>],
    left: &T,
    right: &T,
) -> Option<EnvironmentMismatch> {
    let values = facts.iter().map(|(field, value)| EnvironmentMismatch {
        field,
        base: value(left),
        head: value(right),
    });
    values.into_iter().find(|mismatch| mismatch.base != mismatch.head)
}

#[cfg(test)]
mod tests;
