//! Joins run records and baselines into the data that report pages show.

mod ids;

use std::collections::{BTreeMap, BTreeSet};

use kernelgate::display::{self, natural_sort_key};
use kernelgate::measure::limits::{MeasuredDeviceLimits, ShortestLaunchTime};
use kernelgate::measure::power::PowerStateOfSamples;
use kernelgate::record::DeclaredWorkRecord;
use kernelgate::record::{
    BaselineFile, BenchProcessRun, CaseSummaryOfRun, CommitAndChanges, GpuInEnvironment,
    MeasurementOfRuns, PowerStateForComparison, RunEnvironment,
};
use kernelgate::stats;
use kernelgate::verify::ErrorsRelativeToReference;
use kernelgate::workload::ThroughputItemUnit;

pub use ids::ProblemAxisValues;

use crate::report::utilization::MatrixThroughputShare;
use kernelgate_cuda::CaseFailureReason;

/// The measured data of one device that a report page shows: cases, ceilings, peers and failures.
#[derive(Debug, Clone, Default)]
pub struct MeasurementsOfOneDevice {
    /// Name of the device.
    pub device: String,
    /// Names of the comparable environments of all records, from
    /// [`RunEnvironment::name_of_comparable_environments`].
    pub environment_fingerprints: BTreeSet<String>,
    /// Facts about device, code and time of the measurements, each as name and text.
    pub facts: Vec<(&'static str, String)>,
    /// The device's measured ceilings (bandwidth and operation rates), joined from all runs.
    pub limits: MeasuredDeviceLimits,
    /// The cases in the order of the tables: problems by size, and within a problem the fastest
    /// case first.
    pub cases: Vec<CaseWithItsRuns>,
    /// Colour number of each implementation, by workload and implementation.
    pub colour_by_implementation: BTreeMap<(String, String), usize>,
    /// Times of peers (other people's kernels) for the same problems; empty if they were not
    /// measured.
    pub peers: Vec<PeerTimeForProblem>,
    /// Skipped cases by reason.
    pub skipped_cases_by_reason: BTreeMap<String, BTreeSet<String>>,
    /// Cases that failed because of wrong outputs or another error, each with the error.
    pub failed_cases: BTreeMap<String, CaseFailureReason>,
}

/// A measured case with the data of all its process runs.
#[derive(Debug, Clone)]
pub struct CaseWithItsRuns {
    pub case_id: String,
    /// The workload, `family/operation`.
    pub workload: String,
    /// The part of the case id that names the problem.
    pub problem_id: String,
    pub axes: ProblemAxisValues,
    pub implementation: String,
    /// State of the caches when a launch begins: "hot" (inputs in the caches) or "cold" (L2 cache
    /// flushed).
    pub cache_state: String,
    /// Declared operations and bytes of one launch of the case.
    pub work: DeclaredWorkRecord,
    /// Number of samples (such as images or tokens) that one launch computes; `None` if the
    /// workload has none.
    pub samples_per_launch: Option<u64>,
    /// Unit of the samples in which the throughput is stated.
    pub sample_unit: ThroughputItemUnit,
    /// Least time per launch that the measured ceilings allow for the declared work; `None` if
    /// unknown.
    pub limit: Option<ShortestLaunchTime>,
    /// Median time of each process run of the case, nanoseconds per launch; at least one.
    pub run_medians_ns: Vec<f64>,
    /// Half the interquartile range of the samples divided by their median, for the process run
    /// with the middle median.
    pub relative_half_interquartile_range: f64,
    /// Power state of each process run; `None` for a run that recorded no state.
    pub power_states: Vec<Option<PowerStateForComparison>>,
    /// Median SM clock of the process run with the middle median, MHz; `None` if no run recorded a
    /// clock.
    pub median_sm_clock_mhz: Option<f64>,
    /// Time difference between the slowest and the fastest GPU in the process run with the middle
    /// median, nanoseconds per launch; `None` for one GPU.
    pub skew_between_gpus_ns: Option<f64>,
    /// Energy of a launch in the process run with the middle median, joules; `None` without
    /// `--energy`.
    pub launch_energy_j: Option<f64>,
    /// Errors of the case's outputs against the reference; `None` if the outputs were not verified.
    pub errors: Option<ErrorsRelativeToReference>,
    /// Whether the case is the fastest among all implementations of its problem with the same cache
    /// state.
    pub is_fastest_of_problem: bool,
}

/// The time of a peer (other people's kernel), and the time of the project's fastest implementation
/// for the same problem.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerTimeForProblem {
    /// Workload and problem, as in the case id.
    pub workload_and_problem: String,
    pub peer_name: String,
    /// Time of the peer, nanoseconds per launch.
    pub peer_launch_ns: f64,
    /// Power state in which the peer was timed; `None` if the peer program does not report it.
    pub peer_power_state: Option<PowerStateOfSamples>,
    /// SM clock while the peer was timed, MHz; `None` if the peer program could not read it.
    pub peer_sm_clock_mhz: Option<f64>,
    /// The project's fastest implementation of the problem.
    pub fastest_own_implementation: String,
    /// Time of the project's fastest implementation of the problem, nanoseconds per launch.
    pub own_fastest_launch_ns: f64,
}

impl CaseWithItsRuns {
    /// Returns workload and problem of the case, as in its id.
    fn workload_and_problem(&self) -> String {
        format!("{}/{}", self.workload, self.problem_id)
    }
}

impl MeasurementsOfOneDevice {
    /// Returns the times of the peers for a case's problem, each peer once, the fastest first.
    /// Peers' times are compared only with cases whose caches are hot.
    pub fn peer_times_for_case(&self, case: &CaseWithItsRuns) -> Vec<&PeerTimeForProblem> {
        if case.cache_state != "hot" {
            return Vec::new();
        }
        let problem = case.workload_and_problem();
        let of_problem = self.peers.iter().filter(|time| time.workload_and_problem == problem);
        let by_name: BTreeMap<&str, &PeerTimeForProblem> =
            of_problem.map(|time| (&*time.peer_name, time)).collect();
        let mut times = Vec::from_iter(by_name.into_values());
        times.sort_by(|a, b| a.peer_launch_ns.total_cmp(&b.peer_launch_ns));
        times
    }

    /// Removes the cases for whose id `shows` returns false, including failed and skipped ones.
    pub fn retain_cases_by_id(&mut self, shows: impl Fn(&str) -> bool) {
        self.cases.retain(|case| shows(&case.case_id));
        self.failed_cases.retain(|id, _| shows(id));
        self.skipped_cases_by_reason.values_mut().for_each(|ids| ids.retain(|id| shows(id)));
        self.skipped_cases_by_reason.retain(|_, ids| !ids.is_empty());
    }

    /// Returns the problems for which peers have times but no case was measured.
    pub fn peer_problems_without_case(&self) -> Vec<&str> {
        let problems: BTreeSet<String> =
            self.cases.iter().map(CaseWithItsRuns::workload_and_problem).collect();
        let of_none =
            self.peers.iter().filter(|time| !problems.contains(&time.workload_and_problem));
        of_none.map(|time| &*time.workload_and_problem).collect()
    }

    /// Returns the model FLOP utilization of a network's launch that takes this time; `None` for a
    /// case that is not a network.
    pub fn model_flop_utilization(
        &self,
        case: &CaseWithItsRuns,
        launch_ns: f64,
    ) -> Option<MatrixThroughputShare> {
        let rate = |unit: &str| self.limits.flops_per_s.get(unit).copied();
        let network =
            case.samples_per_launch.is_some() && case.work.matmul_flops_of_all_dtypes() > 0;
        network.then(|| {
            MatrixThroughputShare::utilization_of_launch(&case.work, &self.device, rate, launch_ns)
        })
    }

    /// Returns the colour number of an implementation in the charts of its workload.
    pub fn colour_of_implementation(&self, workload: &str, implementation: &str) -> usize {
        let key = (workload.to_owned(), implementation.to_owned());
        self.colour_by_implementation.get(&key).copied().unwrap_or(0)
    }
}

impl CaseWithItsRuns {
    /// Returns the median over the process runs of their median times, nanoseconds per launch.
    pub fn median_launch_ns(&self) -> f64 {
        stats::median(&self.run_medians_ns)
    }

    /// Returns the smallest and the largest of the process runs' median times, nanoseconds per
    /// launch.
    pub fn range_of_run_medians_ns(&self) -> (f64, f64) {
        let ends =
            |fold: fn(f64, f64) -> f64, from| self.run_medians_ns.iter().copied().fold(from, fold);
        (ends(f64::min, f64::INFINITY), ends(f64::max, 0.0))
    }

    /// Returns the declared amount of work whose rate is shown, with its unit (GEMM operations,
    /// else bytes); `None` if the case declares no work.
    pub fn declared_amount_and_unit(&self) -> Option<(f64, &'static str)> {
        match (self.work.matmul_flops_of_all_dtypes(), self.work.bytes_read_and_written()) {
            (0, _) if self.work.min_received_bytes > 0 => {
                Some((self.work.min_received_bytes as f64, "B"))
            }
            (0, 0) => None,
            (0, bytes) => Some((bytes as f64, "B")),
            (flops, _) => Some((flops as f64, "FLOP")),
        }
    }

    /// Returns the sum of the declared floating-point operations of all units and types.
    pub fn total_declared_flops(&self) -> f64 {
        self.work.flops_by_unit_and_dtype.values().sum::<u64>() as f64
    }

    /// Lists the distinct power states of the process runs as text; empty if none was recorded.
    pub fn distinct_power_states(&self) -> String {
        distinct_values_as_text(
            self.power_states.iter().flatten().map(PowerStateForComparison::to_string),
        )
    }

    /// Returns the limit divided by the measured time (1 means that the case reaches the limit);
    /// `None` without a limit.
    pub fn fraction_of_limit(&self) -> Option<f64> {
        self.limit.as_ref().map(|limit| limit.share_of_limit_reached(self.median_launch_ns()))
    }
}

/// Error: the records are from several devices, so they cannot be shown on one page.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the records are of different devices ({}): give those of one", .0.join(", "))]
pub struct SeveralDevicesError(pub Vec<String>);

/// The process runs of one case while run records are collected.
#[derive(Default)]
struct CollectedCaseRuns {
    case_without_times: Option<CaseWithItsRuns>,
    runs: Vec<CaseSummaryOfRun>,
}

/// Collects the cases and limits of run records and baselines for a report.
#[derive(Default)]
struct ReportRecordCollector {
    sources: Vec<EnvironmentAndCommitOfRun>,
    limits: Vec<MeasuredDeviceLimits>,
    cases: BTreeMap<String, CollectedCaseRuns>,
    skip_reason_by_case: BTreeMap<String, String>,
    failed_cases: BTreeMap<String, CaseFailureReason>,
}

struct EnvironmentAndCommitOfRun {
    environment: RunEnvironment,
    provenance: CommitAndChanges,
    process_start_time: String,
    /// Name of the bench process if it ended before it had measured all its cases; `None`
    /// otherwise.
    interrupted_bench: Option<String>,
}

impl MeasurementsOfOneDevice {
    /// Joins measurements and baselines; for a run that a baseline also contains, only facts that
    /// the baseline lacks are added, because its times would count twice.
    pub fn join_runs_and_baselines(
        measurements: &[MeasurementOfRuns],
        baselines: &[BaselineFile],
    ) -> Result<Self, SeveralDevicesError> {
        let mut all = ReportRecordCollector::default();
        baselines.iter().for_each(|baseline| all.add_runs_of_baseline(baseline));
        for run in measurements.iter().flat_map(MeasurementOfRuns::process_runs_of_measurement) {
            all.add_process_run(run, baselines.iter().any(|baseline| baseline.contains_run(run)));
        }
        let devices: BTreeSet<&str> =
            all.sources.iter().map(|source| &*source.environment.device_name).collect();
        if devices.len() > 1 {
            return Err(SeveralDevicesError(devices.into_iter().map(str::to_owned).collect()));
        }
        Ok(all.into_measurements())
    }
}

impl ReportRecordCollector {
    fn add_process_run(&mut self, run: &BenchProcessRun, is_known: bool) {
        if !is_known {
            self.sources.push(EnvironmentAndCommitOfRun {
                environment: run.environment.clone(),
                provenance: run.provenance.clone(),
                process_start_time: run.start_time.clone(),
                interrupted_bench: (!run.ended_normally).then(|| run.bench_name_with_shard()),
            });
        }
        self.limits.push(run.limits.clone());
        for (id, case) in &run.cases {
            let gathered = self.cases.entry(id.clone()).or_default();
            if !is_known || gathered.runs.is_empty() {
                gathered.runs.push(CaseSummaryOfRun::summarize_case_record(case));
            }
            let mut axes = ProblemAxisValues::from_record_axes(&case.axis_values);
            let of_id = case_without_times(id, &case.workload, &case.work);
            if case.axis_values.is_empty() {
                axes.clone_from(&of_id.axes);
            }
            // If several run records describe a case, the later record takes precedence.
            gathered.case_without_times = Some(CaseWithItsRuns {
                axes,
                implementation: case.implementation.clone(),
                cache_state: case.cache_state.clone(),
                samples_per_launch: case.data_items_per_launch,
                sample_unit: case.data_item_unit,
                limit: case.limit.clone(),
                errors: case
                    .verification
                    .verification_extent()
                    .is_compared_with_reference()
                    .then(|| case.verification.errors_of_all_outputs()),
                ..of_id
            });
        }
        self.skip_reason_by_case.extend(run.skipped.clone());
        self.failed_cases.extend(run.failed.clone());
    }

    fn add_runs_of_baseline(&mut self, baseline: &BaselineFile) {
        self.sources.extend(baseline.runs.values().map(|run| EnvironmentAndCommitOfRun {
            environment: run.environment.clone(),
            provenance: run.provenance.clone(),
            process_start_time: run.start_time.clone(),
            interrupted_bench: None,
        }));
        self.limits.extend(baseline.runs.values().map(|run| run.limits.clone()));
        for (id, case) in &baseline.cases {
            let errors = case.numerics.as_ref().and_then(|numerics| {
                (!numerics.seeds.is_empty()).then(|| numerics.errors.errors_at(0))
            });
            let gathered = self.cases.entry(id.clone()).or_default();
            gathered.runs.extend(case.runs.values().cloned());
            // The keys of a baseline's runs are in the order of their sessions, so the limit of the
            // last session counts.
            let limit = case.runs.values().rev().find_map(|run| run.limit.clone());
            gathered.case_without_times = Some(CaseWithItsRuns {
                samples_per_launch: case.items_per_launch,
                sample_unit: case.sample_unit,
                limit,
                errors,
                ..case_without_times(id, &case.workload_name, &case.work)
            });
        }
    }

    fn into_measurements(self) -> MeasurementsOfOneDevice {
        let facts = facts_about_sources(&self.sources);
        let device = self.sources.first().map(|source| source.environment.device_name.clone());
        let mut cases: Vec<CaseWithItsRuns> =
            self.cases.into_values().filter_map(CollectedCaseRuns::into_case_with_runs).collect();
        cases.sort_by(|a, b| {
            (&a.workload, natural_sort_key(&a.problem_id), b.cache_state == "hot")
                .cmp(&(&b.workload, natural_sort_key(&b.problem_id), a.cache_state == "hot"))
                .then(a.median_launch_ns().total_cmp(&b.median_launch_ns()))
        });
        let mut last: Option<(String, String, String)> = None;
        for case in &mut cases {
            let key = (case.workload.clone(), case.problem_id.clone(), case.cache_state.clone());
            case.is_fastest_of_problem = last.as_ref() != Some(&key);
            last = Some(key);
        }
        let mut skipped: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let timed: BTreeSet<&str> = cases.iter().map(|case| &*case.case_id).collect();
        for (id, reason) in self.skip_reason_by_case {
            if !timed.contains(&*id) {
                skipped.entry(reason).or_default().insert(id);
            }
        }
        let limits = self.limits.into_iter().reduce(join_ceilings_of_runs).unwrap_or_default();
        let device = device.unwrap_or_default();
        let fingerprints = self
            .sources
            .iter()
            .map(|source| source.environment.name_of_comparable_environments())
            .collect();
        let colours = assign_implementation_colours(&cases);
        MeasurementsOfOneDevice {
            device,
            environment_fingerprints: fingerprints,
            facts,
            limits,
            cases,
            colour_by_implementation: colours,
            peers: Vec::new(),
            skipped_cases_by_reason: skipped,
            failed_cases: self.failed_cases,
        }
    }
}

// Colours are assigned in the order of the implementations' names, so that a chart's colours do not
// depend on measured times.
fn assign_implementation_colours(cases: &[CaseWithItsRuns]) -> BTreeMap<(String, String), usize> {
    let names: BTreeSet<(&String, &String)> =
        cases.iter().map(|case| (&case.workload, &case.implementation)).collect();
    let names: Vec<(&String, &String)> = names.into_iter().collect();
    let of_workload = names.chunk_by(|a, b| a.0 == b.0).flat_map(|names| names.iter().enumerate());
    of_workload.map(|(i, (workload, name))| (((*workload).clone(), (*name).clone()), i)).collect()
}

impl CollectedCaseRuns {
    fn into_case_with_runs(self) -> Option<CaseWithItsRuns> {
        let middle = |number: fn(&CaseSummaryOfRun) -> Option<f64>| {
            let numbers: Vec<f64> = self.runs.iter().filter_map(number).collect();
            (!numbers.is_empty()).then(|| stats::median(&numbers))
        };
        Some(CaseWithItsRuns {
            run_medians_ns: self.runs.iter().map(|run| run.median_launch_ns).collect(),
            relative_half_interquartile_range: middle(|run| {
                Some(run.relative_half_interquartile_range)
            })
            .unwrap_or_default(),
            power_states: self.runs.iter().map(|run| run.power).collect(),
            median_sm_clock_mhz: middle(|run| run.median_sm_clock_mhz),
            skew_between_gpus_ns: middle(|run| run.skew_between_gpus_ns),
            launch_energy_j: middle(|run| run.costs.launch_energy_j),
            ..self.case_without_times?
        })
    }
}

/// Makes a case without times from the facts that its id contains.
fn case_without_times(id: &str, workload: &str, work: &DeclaredWorkRecord) -> CaseWithItsRuns {
    let parts = ids::CaseIdParts::split_case_id(id, workload);
    CaseWithItsRuns {
        case_id: id.to_owned(),
        workload: workload.to_owned(),
        axes: ProblemAxisValues::from_problem_in_case_id(parts.problem_id),
        problem_id: parts.problem_id.to_owned(),
        implementation: parts.implementation.to_owned(),
        cache_state: parts.cache_state.to_owned(),
        work: work.clone(),
        samples_per_launch: None,
        sample_unit: ThroughputItemUnit::default(),
        limit: None,
        run_medians_ns: Vec::new(),
        relative_half_interquartile_range: 0.0,
        power_states: Vec::new(),
        median_sm_clock_mhz: None,
        skew_between_gpus_ns: None,
        launch_energy_j: None,
        errors: None,
        is_fastest_of_problem: false,
    }
}

/// Joins the device ceilings of two runs; where both have one, the later run's counts.
fn join_ceilings_of_runs(
    mut before: MeasuredDeviceLimits,
    after: MeasuredDeviceLimits,
) -> MeasuredDeviceLimits {
    before.flops_per_s.extend(after.flops_per_s);
    before.memory.retain(|limit| after.memory.iter().all(|later| later.traffic != limit.traffic));
    before.memory.extend(after.memory);
    before.overhead = after.overhead.or(before.overhead);
    before
}

/// Joins the distinct values, each once, with commas.
fn distinct_values_as_text(values: impl Iterator<Item = String>) -> String {
    let values: BTreeSet<String> = values.filter(|value| !value.is_empty()).collect();
    values.into_iter().collect::<Vec<_>>().join(", ")
}

/// Returns facts about device, build and time of the measured records, each with all its distinct
/// values.
fn facts_about_sources(sources: &[EnvironmentAndCommitOfRun]) -> Vec<(&'static str, String)> {
    let all = |value: &dyn Fn(&EnvironmentAndCommitOfRun) -> Option<String>| {
        distinct_values_as_text(sources.iter().filter_map(value))
    };
    let gpus = sources.iter().flat_map(|it| it.environment.gpus.gpus_by_uuid());
    let environment =
        |value: fn(&RunEnvironment) -> String| all(&|it| Some(value(&it.environment)));
    let gpu =
        |value: fn(&GpuInEnvironment) -> String| distinct_values_as_text(gpus.clone().map(value));
    let mut facts = vec![
        ("device", environment(|it| it.device_name.clone())),
        ("card", gpu(|it| it.uuid.clone())),
        ("architecture", gpu(|it| it.arch.clone())),
        ("driver", gpu(|it| format!("{} (CUDA {})", it.driver_version, it.latest_cuda_of_driver))),
        ("NVRTC", gpu(|it| it.nvrtc_version.clone())),
        (
            "libraries",
            distinct_values_as_text(gpus.clone().flat_map(|gpu| {
                gpu.library_versions.iter().map(|(name, version)| format!("{name} {version}"))
            })),
        ),
        ("device memory", gpu(|it| display::decimal_byte_size_text(it.memory_bytes))),
        ("L2 cache", gpu(|it| display::decimal_byte_size_text(it.l2_bytes))),
        (
            "host",
            environment(|it| format!("{}, {} cores, {}", it.arch, it.usable_logical_cores, it.os)),
        ),
        ("SIMD", environment(|it| it.simd.join(" "))),
        ("kernelgate", environment(|it| it.kernelgate_version.clone())),
        ("commit", all(&|it| Some(it.provenance.short_commit_with_changes_mark()))),
        ("process runs", sources.len().to_string()),
    ];
    let mut started: Vec<&str> = sources.iter().map(|source| &*source.process_start_time).collect();
    started.sort_unstable();
    if let (Some(first), Some(last)) = (started.first(), started.last()) {
        facts.push((
            "measured",
            if first == last { (*first).to_owned() } else { format!("{first} to {last}") },
        ));
    }
    facts.push(("interrupted", all(&|it| it.interrupted_bench.clone())));
    if sources.iter().any(|source| !source.environment.built_with_optimisation) {
        facts.push(("warning", "built without optimisation: the times mean nothing".to_owned()));
    }
    facts.retain(|(_, words)| !words.is_empty());
    facts
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernelgate::record::CaseRecordWithSamples;

    fn make_test_bench_run(session: &str, time_ns: f64) -> BenchProcessRun {
        let case = |(id, cache, time_ns): (&str, &str, f64)| {
            let mut case = CaseRecordWithSamples::example_with_sample_times(vec![time_ns]);
            case.cache_state = cache.to_owned();
            case.limit = Some(ShortestLaunchTime {
                shortest_launch_ns: 50.0,
                deciding_ceiling: "memory".to_owned(),
            });
            (id.to_owned(), case)
        };
        let cases = [
            ("w/f/n1024/cpu/hot", "hot", 3.0 * time_ns),
            ("w/f/n512/slow/hot", "hot", 2.0 * time_ns),
            ("w/f/n512/cpu/hot", "hot", time_ns),
            ("w/f/n512/cpu/cold", "cold", 4.0 * time_ns),
        ];
        BenchProcessRun {
            cases: cases.into_iter().map(case).collect(),
            ..BenchProcessRun::empty_run_starting_now(
                "b",
                session,
                RunEnvironment::environment_of_process_on_cpu(),
                CommitAndChanges::default(),
            )
        }
    }

    #[test]
    fn cases_are_ordered_by_size_and_the_fastest_of_a_problem_is_marked() {
        let measured = MeasurementsOfOneDevice::join_runs_and_baselines(
            &MeasurementOfRuns::group_matching_runs_into_measurements([
                make_test_bench_run("1", 100.0),
                make_test_bench_run("2", 120.0),
            ]),
            &[],
        )
        .unwrap();
        let ids: Vec<(&str, bool)> = measured
            .cases
            .iter()
            .map(|case| (&*case.case_id, case.is_fastest_of_problem))
            .collect();
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
        assert_eq!(
            (first.median_launch_ns(), first.range_of_run_medians_ns()),
            (110.0, (100.0, 120.0))
        );
        assert_eq!(first.axes.numeric_axes["n"], 512);
    }

    #[test]
    fn a_run_that_a_baseline_contains_adds_no_times() {
        let (held, other) = (make_test_bench_run("1", 100.0), make_test_bench_run("2", 300.0));
        let mut baseline = BaselineFile::empty_baseline_with_name("main");
        baseline.merge_run_replacing_other_code(&held);
        let medians_and_fraction = |runs: &[BenchProcessRun]| {
            let measurements =
                MeasurementOfRuns::group_matching_runs_into_measurements(runs.iter().cloned());
            let measured = MeasurementsOfOneDevice::join_runs_and_baselines(
                &measurements,
                std::slice::from_ref(&baseline),
            )
            .unwrap();
            (measured.cases[0].run_medians_ns.clone(), measured.cases[0].fraction_of_limit())
        };
        assert_eq!(medians_and_fraction(&[]), (vec![100.0], Some(0.5)));
        assert_eq!(medians_and_fraction(std::slice::from_ref(&held)), (vec![100.0], Some(0.5)));
        assert_eq!(medians_and_fraction(&[held.clone(), other]), (vec![100.0, 300.0], Some(0.25)));
    }

    #[test]
    fn networks_show_their_utilization_of_both_peaks() {
        let mut network = make_test_bench_run("1", 1e6);
        network.environment.device_name = "NVIDIA H100 80GB HBM3".to_owned();
        network.limits.flops_per_s.insert("matmul bf16".to_owned(), 800e12);
        let case = network.cases.get_mut("w/f/n512/cpu/hot").unwrap();
        case.work.flops_by_unit_and_dtype.insert("matmul bf16".to_owned(), 400_000_000_000);
        case.data_items_per_launch = Some(64);
        let measured = MeasurementsOfOneDevice::join_runs_and_baselines(
            &MeasurementOfRuns::group_matching_runs_into_measurements([network]),
            &[],
        )
        .unwrap();
        let of_case =
            |case: &CaseWithItsRuns| measured.model_flop_utilization(case, case.median_launch_ns());
        let network = of_case(&measured.cases[0]).unwrap();
        assert_eq!(network.share_of_measured_peak, Some(0.5));
        assert!(
            network
                .share_of_published_peak
                .is_some_and(|share| (share - 400.0 / 989.4).abs() < 1e-9)
        );
        assert_eq!(of_case(&measured.cases[1]), None);
    }

    #[test]
    fn records_of_two_devices_are_not_shown_on_one_page() {
        let mut other = make_test_bench_run("2", 1.0);
        other.environment.device_name = "another".to_owned();
        let refused = MeasurementsOfOneDevice::join_runs_and_baselines(
            &MeasurementOfRuns::group_matching_runs_into_measurements([
                make_test_bench_run("1", 1.0),
                other,
            ]),
            &[],
        )
        .unwrap_err();
        assert!(refused.0.contains(&"another".to_owned()) && refused.0.len() == 2);
    }
}
