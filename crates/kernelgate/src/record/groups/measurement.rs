//! Defines a measurement: the process runs whose samples are judged together.
//!
//! The runs may be processes of one bench, shards of a bench, or different benches, from one
//! session or several. Only [`MeasurementOfRuns::from_matching_runs`] decides whether they belong
//! together. This module neither computes statistics nor chooses the runs that a baseline keeps
//! ([`BaselineFile`](crate::record::BaselineFile)).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::shard::ShardOfWork;
use crate::measure::anchors::ShardAnchorRecord;
use crate::record::origin::environment::{IncomparableEnvironmentField, RunEnvironment};
use crate::record::run::{BenchProcessRun, CaseRecordWithSamples};

/// Process runs of benches that may be judged together, because they agree in code, environment and
/// settings.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MeasurementOfRuns {
    runs: Vec<BenchProcessRun>,
}

/// A case in the record of one process run of a measurement.
#[derive(Debug, Clone, Copy)]
pub struct CaseInProcessRun<'a> {
    /// The process run.
    pub run: &'a BenchProcessRun,
    /// The record of the case in the process run.
    pub case: &'a CaseRecordWithSamples,
}

/// A fact in which two process runs of a bench differ, so that they cannot be judged together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DifferingFactOfRuns {
    /// Name of the fact in which the runs differ, such as "commit", "effort", "gpu.driver" or
    /// "revision".
    #[serde(rename = "field")]
    pub fact_name: &'static str,
    /// Case id, if the differing fact belongs to the definition of a case.
    #[serde(rename = "case")]
    pub case_id: Option<String>,
    /// Value of the differing fact in the first run.
    #[serde(rename = "left")]
    pub first_run_value: String,
    /// Value of the differing fact in the second run.
    #[serde(rename = "right")]
    pub second_run_value: String,
    /// Keys of the two process runs, `<session>/<process>`.
    pub runs: [String; 2],
    /// Whether one of the two runs is a shard of a bench.
    #[serde(rename = "sharded")]
    pub one_run_is_shard: bool,
}

impl std::error::Error for DifferingFactOfRuns {}

impl fmt::Display for DifferingFactOfRuns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            fact_name: field,
            case_id: case,
            first_run_value: left,
            second_run_value: right,
            runs: [first, second],
            one_run_is_shard: sharded,
        } = self;
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

impl MeasurementOfRuns {
    /// Makes one measurement of these process runs, if they belong together.
    ///
    /// # Errors
    /// The error is the first fact in which a run differs from an earlier run of its bench.
    pub fn from_matching_runs(
        runs: Vec<BenchProcessRun>,
    ) -> Result<MeasurementOfRuns, Box<DifferingFactOfRuns>> {
        Self::check_runs_form_one_measurement(&runs)?;
        Ok(Self { runs })
    }

    /// Fails if these process runs do not all belong to one measurement.
    ///
    /// # Errors
    /// The first fact in which a run differs from an earlier run of its bench.
    pub fn check_runs_form_one_measurement<'a>(
        runs: impl IntoIterator<Item = &'a BenchProcessRun>,
    ) -> Result<(), Box<DifferingFactOfRuns>> {
        let mut together = RunsAcceptedIntoMeasurement::default();
        runs.into_iter().try_for_each(|run| together.add_run_if_consistent(run))
    }

    /// Groups process runs into measurements: each run joins the first measurement whose runs it
    /// matches, or begins a new one.
    pub fn group_matching_runs_into_measurements(
        runs: impl IntoIterator<Item = BenchProcessRun>,
    ) -> Vec<Self> {
        let runs: Vec<BenchProcessRun> = runs.into_iter().collect();
        let mut groups: Vec<RunsAcceptedIntoMeasurement<'_>> = Vec::new();
        let mut places = Vec::new();
        for run in &runs {
            let place =
                groups.iter_mut().position(|group| group.add_run_if_consistent(run).is_ok());
            places.push(place.unwrap_or_else(|| {
                let mut group = RunsAcceptedIntoMeasurement::default();
                group.insert_accepted_run(run);
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

    /// Combines the process runs of several measurements into one measurement.
    ///
    /// # Errors
    /// The error is the first fact in which the runs differ.
    pub fn join_runs_of_measurements(
        measurements: Vec<Self>,
    ) -> Result<Self, Box<DifferingFactOfRuns>> {
        Self::from_matching_runs(measurements.into_iter().flat_map(|it| it.runs).collect())
    }

    /// Returns the process runs of the measurement, in the order in which they were given.
    pub fn process_runs_of_measurement(&self) -> &[BenchProcessRun] {
        &self.runs
    }

    /// Returns the cases of the measurement by case id, each with the process runs that measured
    /// it.
    pub fn process_runs_by_case_id(&self) -> BTreeMap<&str, Vec<CaseInProcessRun<'_>>> {
        let mut cases: BTreeMap<&str, Vec<CaseInProcessRun<'_>>> = BTreeMap::new();
        for run in &self.runs {
            for (id, case) in &run.cases {
                cases.entry(id).or_default().push(CaseInProcessRun { run, case });
            }
        }
        cases
    }

    /// Returns machine, device and build of the measurement's first run; `None` if it has no runs.
    pub fn environment_of_first_run(&self) -> Option<&RunEnvironment> {
        self.runs.first().map(|run| &run.environment)
    }

    /// Returns the name of the device's folder among the baselines, from the first run's
    /// environment.
    pub fn baseline_folder_of_device(&self) -> String {
        self.environment_of_first_run()
            .map(RunEnvironment::baseline_folder_of_device_and_count)
            .unwrap_or_default()
    }

    /// Returns the shards without a run, of benches of which several shards have one, as texts such
    /// as "attention, shard 3/4". If only one shard of a bench has a run, none is reported as
    /// missing, because a machine may judge its own shard alone.
    pub fn shards_without_run(&self) -> Vec<String> {
        let mut present: BTreeMap<&str, BTreeSet<ShardOfWork>> = BTreeMap::new();
        for run in &self.runs {
            present.entry(&run.bench).or_default().extend(run.shard);
        }
        let mut missing = Vec::new();
        for (bench, shards) in present.iter().filter(|(_, shards)| shards.len() > 1) {
            let count = shards.first().map_or(0, |shard| shard.shard_count);
            let all =
                (1..=count).map(|index| ShardOfWork { index_from_one: index, shard_count: count });
            let lacking = all.filter(|shard| !shards.contains(shard));
            missing.extend(lacking.map(|shard| format!("{bench}, shard {shard}")));
        }
        missing
    }
}

/// Process runs that were accepted into one measurement, by bench, by case and by workload.
#[derive(Default)]
struct RunsAcceptedIntoMeasurement<'a> {
    benches: BTreeMap<&'a str, Vec<&'a BenchProcessRun>>,
    cases: BTreeMap<&'a str, Vec<&'a BenchProcessRun>>,
    /// First accepted run that measured a case of a workload, with that case, by bench and
    /// workload, because shards have no case in common.
    workloads: BTreeMap<[&'a str; 2], (&'a BenchProcessRun, &'a CaseRecordWithSamples)>,
}

impl<'a> RunsAcceptedIntoMeasurement<'a> {
    /// Adds a run if it matches all accepted runs of its bench.
    ///
    /// # Errors
    /// The error is the first fact in which the run differs from the runs that were accepted
    /// before.
    fn add_run_if_consistent(
        &mut self,
        run: &'a BenchProcessRun,
    ) -> Result<(), Box<DifferingFactOfRuns>> {
        match self.first_difference_from_accepted_runs(run) {
            Some(differing) => Err(Box::new(differing)),
            None => {
                self.insert_accepted_run(run);
                Ok(())
            }
        }
    }

    fn insert_accepted_run(&mut self, run: &'a BenchProcessRun) {
        self.benches.entry(&run.bench).or_default().push(run);
        for (id, case) in &run.cases {
            self.cases.entry(id).or_default().push(run);
            self.workloads.entry([&run.bench, &case.workload]).or_insert((run, case));
        }
    }

    fn first_difference_from_accepted_runs(
        &self,
        run: &BenchProcessRun,
    ) -> Option<DifferingFactOfRuns> {
        let named = self.benches.get(&*run.bench)?;
        let Some(first) = named.iter().find(|other| difference_of_packages(other, run).is_none())
        else {
            // One cargo invocation may run benches of several packages, and benches of two packages
            // may have equal names.
            let together = named.iter().any(|other| other.session_name == run.session_name);
            return named
                .first()
                .filter(|_| !together)
                .and_then(|other| first_difference_of_runs(other, run));
        };
        let of_workload = || {
            run.cases.iter().find_map(|(id, case)| {
                let &(other, known) = self.workloads.get(&[&*run.bench, &*case.workload])?;
                let same_package = difference_of_packages(other, run).is_none();
                let [base, head] = [known, case].map(|case| case.workload_revision.to_string());
                (same_package && base != head).then(|| {
                    let mismatch = IncomparableEnvironmentField {
                        field_name: "revision",
                        base_value: base,
                        head_value: head,
                    };
                    DifferingFactOfRuns {
                        case_id: Some(id.clone()),
                        ..differing_fact_with_run_keys(other, run, mismatch)
                    }
                })
            })
        };
        first_difference_of_runs(first, run).or_else(of_workload).or_else(|| {
            run.cases.iter().find_map(|(id, case)| {
                let of_bench = |other: &&&BenchProcessRun| {
                    other.bench == run.bench && difference_of_packages(other, run).is_none()
                };
                let other = self.cases.get(&**id)?.iter().find(of_bench)?;
                let mismatch = difference_of_case_definitions(&other.cases[id], case)?;
                Some(DifferingFactOfRuns {
                    case_id: Some(id.clone()),
                    ..differing_fact_with_run_keys(other, run, mismatch)
                })
            })
        })
    }
}

fn differing_fact_with_run_keys(
    left: &BenchProcessRun,
    right: &BenchProcessRun,
    mismatch: IncomparableEnvironmentField,
) -> DifferingFactOfRuns {
    DifferingFactOfRuns {
        fact_name: mismatch.field_name,
        case_id: None,
        first_run_value: mismatch.base_value,
        second_run_value: mismatch.head_value,
        runs: [left.key_in_baseline(), right.key_in_baseline()],
        one_run_is_shard: left.shard.is_some() || right.shard.is_some(),
    }
}

/// Returns the first fact, besides the definitions of their cases, in which two runs of a bench
/// differ.
fn first_difference_of_runs(
    left: &BenchProcessRun,
    right: &BenchProcessRun,
) -> Option<DifferingFactOfRuns> {
    let shards = |run: &BenchProcessRun| run.shard.map_or(1, |shard| shard.shard_count).to_string();
    let sharded = left.shard.is_some() || right.shard.is_some();
    // If a run records no digest of its shard plan, only the other facts are compared.
    let plans = left.plan.as_ref().zip(right.plan.as_ref());
    let [base, head] = plans.map_or_else(Default::default, |(left, right)| {
        [left, right].map(|plan| plan.hash_of_cases_and_shards.clone())
    });
    let other_plan = (base != head).then_some(IncomparableEnvironmentField {
        field_name: "plan",
        base_value: base,
        head_value: head,
    });
    let facts: [FactNameAndText<BenchProcessRun>; 4] = [
        ("number of shards", shards),
        ("commit", |run| run.provenance.short_commit_with_changes_mark()),
        ("effort", |run| run.effort.clone()),
        ("seed", |run| run.seed.to_string()),
    ];
    let mismatch = difference_of_packages(left, right)
        .or_else(|| first_difference_of_facts(&facts, left, right))
        .or(other_plan)
        .or_else(|| difference_of_anchor_power_modes(left, right))
        .or_else(|| {
            left.code_and_environment()
                .executables_that_should_be_equal(right.code_and_environment(), sharded)
        })
        .or_else(|| {
            right.environment.incomparable_facts_with_base(&left.environment).into_iter().next()
        });
    Some(differing_fact_with_run_keys(left, right, mismatch?))
}

/// Returns a difference if two shards measured their anchors in different power modes, because a
/// GPU in burst mode is faster.
fn difference_of_anchor_power_modes(
    left: &BenchProcessRun,
    right: &BenchProcessRun,
) -> Option<IncomparableEnvironmentField> {
    let [left, right] = [left, right].map(|run| match &run.anchors {
        Some(ShardAnchorRecord::Measured(anchors)) => Some(anchors.power),
        _ => None,
    });
    let (base, head) = left.zip(right).filter(|(left, right)| left != right)?;
    let [base, head] = [base, head].map(|power| power.name_in_files().to_owned());
    Some(IncomparableEnvironmentField {
        field_name: "power state",
        base_value: base,
        head_value: head,
    })
}

/// Returns a difference if the Cargo packages of two runs differ, and both runs record their
/// package. Benches of two packages may have equal names, so bench names do not suffice.
fn difference_of_packages(
    left: &BenchProcessRun,
    right: &BenchProcessRun,
) -> Option<IncomparableEnvironmentField> {
    let (left, right) = left.package.as_ref().zip(right.package.as_ref())?;
    let mismatch = || {
        let [base, head] = [left, right].map(ToString::to_string);
        IncomparableEnvironmentField { field_name: "package", base_value: base, head_value: head }
    };
    (left != right).then(mismatch)
}

/// Returns the first fact (revision or work) in which the definitions of a case in two runs differ.
fn difference_of_case_definitions(
    left: &CaseRecordWithSamples,
    right: &CaseRecordWithSamples,
) -> Option<IncomparableEnvironmentField> {
    let facts: [FactNameAndText<CaseRecordWithSamples>; 2] = [
        ("revision", |case| case.workload_revision.to_string()),
        ("work", |case| case.work.to_string()),
    ];
    first_difference_of_facts(&facts, left, right)
}

/// Name of a fact that is compared, and a function that returns its value as text.
type FactNameAndText<T> = (&'static str, fn(&T) -> String);

fn first_difference_of_facts<T>(
    facts: &[FactNameAndText<T>],
    left: &T,
    right: &T,
) -> Option<IncomparableEnvironmentField> {
    let values = facts.iter().map(|(field, value)| IncomparableEnvironmentField {
        field_name: field,
        base_value: value(left),
        head_value: value(right),
    });
    values.into_iter().find(|mismatch| mismatch.base_value != mismatch.head_value)
}

#[cfg(test)]
mod tests;
