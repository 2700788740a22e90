//! Runs and baselines in the one shape that pages are made from.

mod ids;

use std::collections::{BTreeMap, BTreeSet};

use kernelgate::display::{self, natural_sort_key};
use kernelgate::measure::limits::{DeviceLimits, TimeLimit};
use kernelgate::measure::power::PowerState;
use kernelgate::record::WorkRecord;
use kernelgate::record::{
    Baseline, CasePower, CaseRun, Environment, Gpu, Measurement, ProcessRun, Provenance,
};
use kernelgate::stats;
use kernelgate::verify::OutputErrors;
use kernelgate::workload::SampleUnit;

pub use ids::ProblemAxes;

use crate::report::utilization::ModelUtilization;
use kernelgate_cuda::CaseFailure;

/// All data of one device that a report page shows.
#[derive(Debug, Clone, Default)]
pub struct ReportMeasurements {
    /// Name of the device.
    pub device: String,
    /// [`Environment::environment_fingerprint`] of all records.
    pub fingerprints: BTreeSet<String>,
    /// Device, code and time of the measurements: name and words.
    pub facts: Vec<(&'static str, String)>,
    /// The device's ceilings, from the run that measured most of them.
    pub limits: DeviceLimits,
    /// Cases in the order of tables: problems by size, the fastest case first.
    pub cases: Vec<MeasuredCase>,
    /// Number of the colour of each implementation of a workload.
    pub colours: BTreeMap<(String, String), usize>,
    /// Times of other people's kernels, if they were measured.
    pub peers: Vec<PeerTime>,
    /// Skipped cases by reason.
    pub skipped: BTreeMap<String, BTreeSet<String>>,
    /// Cases with wrong outputs or an error, with the message.
    pub failed: BTreeMap<String, CaseFailure>,
}

/// A case with all its process runs.
#[derive(Debug, Clone)]
pub struct MeasuredCase {
    pub id: String,
    /// The workload, `family/operation`.
    pub workload: String,
    /// The part of the case id that names the problem.
    pub problem: String,
    pub axes: ProblemAxes,
    pub implementation: String,
    /// State of the caches when a launch begins: "hot" or "cold".
    pub cache: String,
    /// Declared work of one launch of the case.
    pub work: WorkRecord,
    /// Samples that a launch computes, if its workload has samples.
    pub computed_samples: Option<u64>,
    /// Unit of the samples in which throughput is stated.
    pub sample_unit: SampleUnit,
    /// Time that the measured ceilings allow for a launch, if they are known.
    pub limit: Option<TimeLimit>,
    /// Median time of each process run, nanoseconds per launch; at least one.
    pub medians_ns: Vec<f64>,
    /// Half the interquartile range within a process over its median, for the middle process.
    pub spread: f64,
    /// Power state of each process run; the entry of a run that recorded no state is `None`.
    pub power: Vec<Option<CasePower>>,
    /// Median SM clock of the process run in the middle, MHz; absent if no run recorded a clock.
    pub clock_mhz: Option<f64>,
    /// Difference between the slowest and the fastest GPU in the middle process, nanoseconds a
    /// launch; absent for one GPU.
    pub skew_ns: Option<f64>,
    /// Energy of a launch in the middle process, joules; absent without `--energy`.
    pub launch_j: Option<f64>,
    /// Output errors against the reference; `None` for unverified cases.
    pub errors: Option<OutputErrors>,
    /// Whether the case is the fastest of its problem for its cache state.
    pub best: bool,
}

/// A time of a peer, and the time of our implementation for the same problem.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerTime {
    /// Id of the problem, including its workload.
    pub problem: String,
    pub peer: String,
    /// Time of the peer, nanoseconds a launch.
    pub peer_ns: f64,
    /// Whether the peer's time had settled under its load; absent if the peer program does not
    /// report it.
    pub power: Option<PowerState>,
    /// SM clock under the peer's load, MHz; absent if the peer program could not read it.
    pub clock_mhz: Option<f64>,
    /// Our implementation.
    pub implementation: String,
    /// Time of our implementation, nanoseconds a launch.
    pub ours_ns: f64,
}

impl MeasuredCase {
    /// Id of the problem, including its workload.
    fn problem_with_workload(&self) -> String {
        format!("{}/{}", self.workload, self.problem)
    }
}

impl ReportMeasurements {
    /// Times of the peers for a case's problem, each peer once, the fastest first. Peers' times are
    /// compared only with hot cases.
    pub fn peers_of(&self, case: &MeasuredCase) -> Vec<&PeerTime> {
        if case.cache != "hot" {
            return Vec::new();
        }
        let problem = case.problem_with_workload();
        let of_problem = self.peers.iter().filter(|time| time.problem == problem);
        let by_name: BTreeMap<&str, &PeerTime> =
            of_problem.map(|time| (&*time.peer, time)).collect();
        let mut times = Vec::from_iter(by_name.into_values());
        times.sort_by(|a, b| a.peer_ns.total_cmp(&b.peer_ns));
        times
    }

    /// Removes cases whose id is not to be shown, also those without a time.
    pub fn retain_cases(&mut self, shows: impl Fn(&str) -> bool) {
        self.cases.retain(|case| shows(&case.id));
        self.failed.retain(|id, _| shows(id));
        self.skipped.values_mut().for_each(|ids| ids.retain(|id| shows(id)));
        self.skipped.retain(|_, ids| !ids.is_empty());
    }

    /// Problems for which peers have times and no case exists.
    pub fn peers_without_case(&self) -> Vec<&str> {
        let problems: BTreeSet<String> =
            self.cases.iter().map(MeasuredCase::problem_with_workload).collect();
        let of_none = self.peers.iter().filter(|time| !problems.contains(&time.problem));
        of_none.map(|time| &*time.problem).collect()
    }

    /// Model FLOP utilization of a launch of this time; only for networks, whose launches compute
    /// samples.
    pub fn utilization(&self, case: &MeasuredCase, launch_ns: f64) -> Option<ModelUtilization> {
        let rate = |unit: &str| self.limits.flops_per_s.get(unit).copied();
        let network = case.computed_samples.is_some() && case.work.matmul_flops() > 0;
        network.then(|| ModelUtilization::new(&case.work, &self.device, rate, launch_ns))
    }

    /// Number of the colour of an implementation.
    pub fn colour(&self, workload: &str, implementation: &str) -> usize {
        let key = (workload.to_owned(), implementation.to_owned());
        self.colours.get(&key).copied().unwrap_or(0)
    }
}

impl MeasuredCase {
    /// Median over the process runs, nanoseconds a launch.
    pub fn median_time_ns(&self) -> f64 {
        stats::median(&self.medians_ns)
    }

    /// Smallest and greatest median of the process runs.
    pub fn median_range_ns(&self) -> (f64, f64) {
        let ends =
            |fold: fn(f64, f64) -> f64, from| self.medians_ns.iter().copied().fold(from, fold);
        (ends(f64::min, f64::INFINITY), ends(f64::max, 0.0))
    }

    /// The amount whose rate is shown, and its unit: operations of GEMMs, else bytes.
    pub fn amount(&self) -> Option<(f64, &'static str)> {
        match (self.work.matmul_flops(), self.work.total_bytes()) {
            (0, _) if self.work.link_bytes > 0 => Some((self.work.link_bytes as f64, "B")),
            (0, 0) => None,
            (0, bytes) => Some((bytes as f64, "B")),
            (flops, _) => Some((flops as f64, "FLOP")),
        }
    }

    /// Sum of the operations of all units.
    pub fn flops(&self) -> f64 {
        self.work.flops.values().sum::<u64>() as f64
    }

    /// Power states of the process runs, each once; empty if none was recorded.
    pub fn power_states(&self) -> String {
        joined_values(self.power.iter().flatten().map(CasePower::to_string))
    }

    /// The limit over its time, a fraction of the measured roofline.
    pub fn fraction_of_limit(&self) -> Option<f64> {
        self.limit.as_ref().map(|limit| limit.fraction(self.median_time_ns()))
    }
}

/// Reason why records cannot be shown on one page.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the records are of different devices ({}): give those of one", .0.join(", "))]
pub struct SeveralDevicesError(pub Vec<String>);

/// Runs of a case while they are collected.
#[derive(Default)]
struct CollectedCaseRuns {
    template: Option<MeasuredCase>,
    runs: Vec<CaseRun>,
}

/// Collects records.
#[derive(Default)]
struct RecordCollector {
    sources: Vec<MeasuredSource>,
    limits: Vec<DeviceLimits>,
    cases: BTreeMap<String, CollectedCaseRuns>,
    skipped: BTreeMap<String, String>,
    failed: BTreeMap<String, CaseFailure>,
}

struct MeasuredSource {
    environment: Environment,
    provenance: Provenance,
    started: String,
    /// Name of the process, if it ended before its cases did.
    interrupted: Option<String>,
}

impl ReportMeasurements {
    /// Joins measurements and baselines. A run that one of the baselines holds adds what a baseline
    /// does not keep, such as skips, but not its times, which would count twice.
    pub fn new(
        measurements: &[Measurement],
        baselines: &[Baseline],
    ) -> Result<Self, SeveralDevicesError> {
        let mut all = RecordCollector::default();
        baselines.iter().for_each(|baseline| all.add_baseline(baseline));
        for run in measurements.iter().flat_map(Measurement::process_runs) {
            all.add_run(run, baselines.iter().any(|baseline| baseline.has(run)));
        }
        let devices: BTreeSet<&str> =
            all.sources.iter().map(|source| &*source.environment.device_name).collect();
        if devices.len() > 1 {
            return Err(SeveralDevicesError(devices.into_iter().map(str::to_owned).collect()));
        }
        Ok(all.finish())
    }
}

impl RecordCollector {
    fn add_run(&mut self, run: &ProcessRun, is_known: bool) {
        if !is_known {
            self.sources.push(MeasuredSource {
                environment: run.environment.clone(),
                provenance: run.provenance.clone(),
                started: run.started.clone(),
                interrupted: (!run.complete).then(|| run.process_name_of_run()),
            });
        }
        self.limits.push(run.limits.clone());
        for (id, case) in &run.cases {
            let gathered = self.cases.entry(id.clone()).or_default();
            if !is_known || gathered.runs.is_empty() {
                gathered.runs.push(CaseRun::from_record(case));
            }
            let mut axes = ProblemAxes::from_record(&case.problem);
            let of_id = case_without_times(id, &case.workload, &case.work);
            if case.problem.is_empty() {
                axes.clone_from(&of_id.axes);
            }
            // The records of later runs take precedence.
            gathered.template = Some(MeasuredCase {
                axes,
                implementation: case.implementation.clone(),
                cache: case.cache.clone(),
                computed_samples: case.computed_samples,
                sample_unit: case.sample_unit,
                limit: case.limit.clone(),
                errors: case.verification.value().is_verified().then(|| case.verification.errors()),
                ..of_id
            });
        }
        self.skipped.extend(run.skipped.clone());
        self.failed.extend(run.failed.clone());
    }

    fn add_baseline(&mut self, baseline: &Baseline) {
        self.sources.extend(baseline.runs.values().map(|run| MeasuredSource {
            environment: run.environment.clone(),
            provenance: run.provenance.clone(),
            started: run.started.clone(),
            interrupted: None,
        }));
        self.limits.extend(baseline.runs.values().map(|run| run.limits.clone()));
        for (id, case) in &baseline.cases {
            let errors = case
                .numerics
                .as_ref()
                .and_then(|numerics| (!numerics.seeds.is_empty()).then(|| numerics.errors.at(0)));
            let gathered = self.cases.entry(id.clone()).or_default();
            gathered.runs.extend(case.runs.values().cloned());
            // Keys of runs are in the order of their sessions: the ceilings of the last session
            // count.
            let limit = case.runs.values().rev().find_map(|run| run.limit.clone());
            gathered.template = Some(MeasuredCase {
                computed_samples: case.computed_samples,
                sample_unit: case.sample_unit,
                limit,
                errors,
                ..case_without_times(id, &case.workload, &case.work)
            });
        }
    }

    fn finish(self) -> ReportMeasurements {
        let facts = source_facts(&self.sources);
        let device = self.sources.first().map(|source| source.environment.device_name.clone());
        let mut cases: Vec<MeasuredCase> =
            self.cases.into_values().filter_map(CollectedCaseRuns::finish).collect();
        cases.sort_by(|a, b| {
            (&a.workload, natural_sort_key(&a.problem), b.cache == "hot")
                .cmp(&(&b.workload, natural_sort_key(&b.problem), a.cache == "hot"))
                .then(a.median_time_ns().total_cmp(&b.median_time_ns()))
        });
        let mut last: Option<(String, String, String)> = None;
        for case in &mut cases {
            let key = (case.workload.clone(), case.problem.clone(), case.cache.clone());
            case.best = last.as_ref() != Some(&key);
            last = Some(key);
        }
        let mut skipped: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let timed: BTreeSet<&str> = cases.iter().map(|case| &*case.id).collect();
        for (id, reason) in self.skipped {
            if !timed.contains(&*id) {
                skipped.entry(reason).or_default().insert(id);
            }
        }
        let limits = self.limits.into_iter().reduce(merged_ceilings).unwrap_or_default();
        let device = device.unwrap_or_default();
        let fingerprints = self
            .sources
            .iter()
            .map(|source| source.environment.environment_fingerprint())
            .collect();
        let colours = colours_of_rows(&cases);
        ReportMeasurements {
            device,
            fingerprints,
            facts,
            limits,
            cases,
            colours,
            peers: Vec::new(),
            skipped,
            failed: self.failed,
        }
    }
}

// Colours follow the order of the names, so that a chart does not depend on other measured rows.
fn colours_of_rows(cases: &[MeasuredCase]) -> BTreeMap<(String, String), usize> {
    let names: BTreeSet<(&String, &String)> =
        cases.iter().map(|case| (&case.workload, &case.implementation)).collect();
    let names: Vec<(&String, &String)> = names.into_iter().collect();
    let of_workload = names.chunk_by(|a, b| a.0 == b.0).flat_map(|names| names.iter().enumerate());
    of_workload.map(|(i, (workload, name))| (((*workload).clone(), (*name).clone()), i)).collect()
}

impl CollectedCaseRuns {
    fn finish(self) -> Option<MeasuredCase> {
        let middle = |number: fn(&CaseRun) -> Option<f64>| {
            let numbers: Vec<f64> = self.runs.iter().filter_map(number).collect();
            (!numbers.is_empty()).then(|| stats::median(&numbers))
        };
        Some(MeasuredCase {
            medians_ns: self.runs.iter().map(|run| run.median_ns).collect(),
            spread: middle(|run| Some(run.spread)).unwrap_or_default(),
            power: self.runs.iter().map(|run| run.power).collect(),
            clock_mhz: middle(|run| run.median_clock_mhz),
            skew_ns: middle(|run| run.skew_ns),
            launch_j: middle(|run| run.costs.launch_j),
            ..self.template?
        })
    }
}

/// A case with the facts of its id, without any times.
fn case_without_times(id: &str, workload: &str, work: &WorkRecord) -> MeasuredCase {
    let parts = ids::CaseIdParts::parse(id, workload);
    MeasuredCase {
        id: id.to_owned(),
        workload: workload.to_owned(),
        axes: ProblemAxes::from_problem_name(parts.problem),
        problem: parts.problem.to_owned(),
        implementation: parts.implementation.to_owned(),
        cache: parts.cache.to_owned(),
        work: work.clone(),
        computed_samples: None,
        sample_unit: SampleUnit::default(),
        limit: None,
        medians_ns: Vec::new(),
        spread: 0.0,
        power: Vec::new(),
        clock_mhz: None,
        skew_ns: None,
        launch_j: None,
        errors: None,
        best: false,
    }
}

/// The ceilings of both runs; the later one counts if both have a ceiling.
fn merged_ceilings(mut before: DeviceLimits, after: DeviceLimits) -> DeviceLimits {
    before.flops_per_s.extend(after.flops_per_s);
    before.memory.retain(|limit| after.memory.iter().all(|later| later.traffic != limit.traffic));
    before.memory.extend(after.memory);
    before.overhead = after.overhead.or(before.overhead);
    before
}

/// Joins values, each once.
fn joined_values(values: impl Iterator<Item = String>) -> String {
    let values: BTreeSet<String> = values.filter(|value| !value.is_empty()).collect();
    values.into_iter().collect::<Vec<_>>().join(", ")
}

/// Facts of the records about device and time, each fact with all its values.
fn source_facts(sources: &[MeasuredSource]) -> Vec<(&'static str, String)> {
    let all = |value: &dyn Fn(&MeasuredSource) -> Option<String>| {
        joined_values(sources.iter().filter_map(value))
    };
    let gpus = sources.iter().flat_map(|it| it.environment.gpus.iter());
    let environment = |value: fn(&Environment) -> String| all(&|it| Some(value(&it.environment)));
    let gpu = |value: fn(&Gpu) -> String| joined_values(gpus.clone().map(value));
    let mut facts = vec![
        ("device", environment(|it| it.device_name.clone())),
        ("card", gpu(|it| it.uuid.clone())),
        ("architecture", gpu(|it| it.arch.clone())),
        ("driver", gpu(|it| format!("{} (CUDA {})", it.driver, it.driver_cuda))),
        ("NVRTC", gpu(|it| it.nvrtc.clone())),
        (
            "libraries",
            joined_values(gpus.clone().flat_map(|gpu| {
                gpu.libraries.iter().map(|(name, version)| format!("{name} {version}"))
            })),
        ),
        ("device memory", gpu(|it| display::byte_text(it.memory_bytes))),
        ("L2 cache", gpu(|it| display::byte_text(it.l2_bytes))),
        ("host", environment(|it| format!("{}, {} cores, {}", it.arch, it.cores, it.os))),
        ("SIMD", environment(|it| it.simd.join(" "))),
        ("kernelgate", environment(|it| it.kernelgate.clone())),
        ("commit", all(&|it| Some(it.provenance.short_commit()))),
        ("process runs", sources.len().to_string()),
    ];
    let mut started: Vec<&str> = sources.iter().map(|source| &*source.started).collect();
    started.sort_unstable();
    if let (Some(first), Some(last)) = (started.first(), started.last()) {
        facts.push((
            "measured",
            if first == last { (*first).to_owned() } else { format!("{first} to {last}") },
        ));
    }
    facts.push(("interrupted", all(&|it| it.interrupted.clone())));
    if sources.iter().any(|source| !source.environment.optimised) {
        facts.push(("warning", "built without optimisation: the times mean nothing".to_owned()));
    }
    facts.retain(|(_, words)| !words.is_empty());
    facts
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::record::CaseRecord;

    fn run(session: &str, time_ns: f64) -> ProcessRun {
        let case = |(id, cache, time_ns): (&str, &str, f64)| {
            let mut case = CaseRecord::untimed_samples(vec![time_ns]);
            case.cache = cache.to_owned();
            case.limit = Some(TimeLimit { time_ns: 50.0, by: "memory".to_owned() });
            (id.to_owned(), case)
        };
        let cases = [
            ("w/f/n1024/cpu/hot", "hot", 3.0 * time_ns),
            ("w/f/n512/slow/hot", "hot", 2.0 * time_ns),
            ("w/f/n512/cpu/hot", "hot", time_ns),
            ("w/f/n512/cpu/cold", "cold", 4.0 * time_ns),
        ];
        ProcessRun {
            cases: cases.into_iter().map(case).collect(),
            ..ProcessRun::start_now("b", session, Environment::cpu(), Provenance::default())
        }
    }

    #[test]
    fn cases_are_ordered_by_size_and_the_fastest_of_a_problem_is_marked() {
        let measured = ReportMeasurements::new(
            &Measurement::group_into_measurements([run("1", 100.0), run("2", 120.0)]),
            &[],
        )
        .unwrap();
        let ids: Vec<(&str, bool)> =
            measured.cases.iter().map(|case| (&*case.id, case.best)).collect();
        assert_eq!(
            ids,
            [
                ("w/f/n512/cpu/hot", true),
                ("w/f/n512/slow/hot", false),
                ("w/f/n512/cpu/cold", true),
                ("w/f/n1024/cpu/hot", true),
            ]
        );
        let first = &measured.cases[0];
        assert_eq!((first.median_time_ns(), first.median_range_ns()), (110.0, (100.0, 120.0)));
        assert_eq!(first.axes.numbers["n"], 512);
    }

    #[test]
    fn a_run_that_a_baseline_contains_adds_no_times() {
        let (held, other) = (run("1", 100.0), run("2", 300.0));
        let mut baseline = Baseline::new("main");
        baseline.merge_run(&held);
        let medians_and_fraction = |runs: &[ProcessRun]| {
            let measurements = Measurement::group_into_measurements(runs.iter().cloned());
            let measured =
                ReportMeasurements::new(&measurements, std::slice::from_ref(&baseline)).unwrap();
            (measured.cases[0].medians_ns.clone(), measured.cases[0].fraction_of_limit())
        };
        assert_eq!(medians_and_fraction(&[]), (vec![100.0], Some(0.5)));
        assert_eq!(medians_and_fraction(std::slice::from_ref(&held)), (vec![100.0], Some(0.5)));
        assert_eq!(medians_and_fraction(&[held.clone(), other]), (vec![100.0, 300.0], Some(0.25)));
    }

    #[test]
    fn networks_show_their_utilization_of_both_peaks() {
        let mut network = run("1", 1e6);
        network.environment.device_name = "NVIDIA H100 80GB HBM3".to_owned();
        network.limits.flops_per_s.insert("matmul bf16".to_owned(), 800e12);
        let case = network.cases.get_mut("w/f/n512/cpu/hot").unwrap();
        case.work.flops.insert("matmul bf16".to_owned(), 400_000_000_000);
        case.computed_samples = Some(64);
        let measured =
            ReportMeasurements::new(&Measurement::group_into_measurements([network]), &[]).unwrap();
        let of_case = |case: &MeasuredCase| measured.utilization(case, case.median_time_ns());
        let network = of_case(&measured.cases[0]).unwrap();
        assert_eq!(network.of_measured, Some(0.5));
        assert!(network.of_published.is_some_and(|share| (share - 400.0 / 989.4).abs() < 1e-9));
        assert_eq!(of_case(&measured.cases[1]), None);
    }

    #[test]
    fn records_of_two_devices_are_not_shown_on_one_page() {
        let mut other = run("2", 1.0);
        other.environment.device_name = "another".to_owned();
        let refused = ReportMeasurements::new(
            &Measurement::group_into_measurements([run("1", 1.0), other]),
            &[],
        )
        .unwrap_err();
        assert!(refused.0.contains(&"another".to_owned()) && refused.0.len() == 2);
    }
}
