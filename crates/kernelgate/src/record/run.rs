//! Defines the run record: everything that one bench process measured, with its environment.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Deserializer, Serialize};

use super::files::file::RecordFileType;
use super::files::text::{self, check_case_id_text};
use super::groups::shard::ShardOfWork;
use super::groups::shard_partition::DivisionAmongShardsSummary;
use super::origin::CodeAndEnvironmentOfRun;
use super::origin::environment::RunEnvironment;
use super::origin::package::CargoPackageId;
use super::origin::provenance::CommitAndChanges;
use super::work::DeclaredWorkRecord;
use crate::measure::CaseSampleConditions;
use crate::measure::anchors::ShardAnchorRecord;
use crate::measure::energy::LaunchEnergyOrReason;
use crate::measure::limits::{MeasuredDeviceLimits, ShortestLaunchTime};
use crate::measure::plausibility;
use crate::measure::power::CasePowerRecord;
use crate::workload::ThroughputItemUnit;
use kernelgate_cuda::CaseFailureReason;
use kernelgate_cuda::driver::launch::used_kernels::KernelsLoadedForCase;
use kernelgate_cuda::observe::telemetry::GpuCardReading;

pub use super::verification::{
    AllowedOutputErrors, InputChangeAfterTiming, OutputVerificationRecord, VerificationAfterTiming,
};

/// Beginning of the reason why a case was not started, for example because no time was left or the
/// device was lost.
pub const NOT_RUN_REASON_PREFIX: &str = "not run: ";

/// Results of one bench process, including the cases that it did not measure, with the reasons.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchProcessRun {
    /// Name of the bench executable.
    pub bench: String,
    /// Session name of the run; all runs of one `cargo bench` have the same session.
    #[serde(rename = "session")]
    pub session_name: String,
    /// Cargo package of the bench; absent if the process found no manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<CargoPackageId>,
    /// Id of the cargo process that started this process, made from its start time and process id;
    /// independent of the session name; absent in trials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "invocation")]
    pub cargo_invocation_id: Option<String>,
    /// Time at which the bench process started, RFC 3339, UTC.
    #[serde(rename = "started")]
    pub start_time: String,
    /// Whether the process ended normally; an interrupted run contains the cases that were
    /// finished.
    #[serde(rename = "complete")]
    pub ended_normally: bool,
    /// Effort of the run: "quick", "default" or "thorough".
    pub effort: String,
    /// Seed of the inputs.
    pub seed: u64,
    /// Shard of the selected problems that this process measured; absent if it measured all of
    /// them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<ShardOfWork>,
    /// Division of the bench's problems among all shards, of which `shard` is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<DivisionAmongShardsSummary>,
    /// Environment of the process.
    pub environment: RunEnvironment,
    /// Hash of the machine's hardware facts ([`MachineHardware`](super::MachineHardware)), as
    /// `kernelgate doctor --save` records it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "machine")]
    pub hardware_facts_hash: Option<String>,
    /// Commit of the measured code, and whether files differed from it.
    pub provenance: CommitAndChanges,
    /// Whether the variable `KERNELGATE_COMMIT` stated the commit, so that kernelgate could not
    /// check that the executable was built from it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[serde(rename = "stated_commit")]
    pub commit_is_from_variable: bool,
    /// Anchor rates of the device, by which shards from several cards are compared; only in shards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anchors: Option<ShardAnchorRecord>,
    /// Performance ceilings of the device, as this process measured them.
    pub limits: MeasuredDeviceLimits,
    /// Delays that were added to launches on purpose to test the gate, nanoseconds by case id.
    /// Times of delayed launches do not describe the code.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "delays")]
    pub injected_delays_ns: BTreeMap<String, u64>,
    /// Hash of the executable's content; absent if its file could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "executable")]
    pub executable_hash: Option<String>,
    /// Wall time of the process by activity, seconds. The times of the entries `whole` and `checks
    /// after timing` include those of other entries.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "spent_s")]
    pub wall_s_by_activity: BTreeMap<String, f64>,
    /// Wall time of each problem with all its cases, seconds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "problems_s")]
    pub wall_s_by_problem: BTreeMap<String, f64>,
    /// NVML's readings of the GPU before the first and after the last case; empty on the CPU
    /// backend.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub telemetry: Vec<GpuCardReading>,
    /// Measured cases by id.
    pub cases: BTreeMap<String, CaseRecordWithSamples>,
    /// Case ids that cannot run on this machine, each with the reason.
    pub skipped: BTreeMap<String, String>,
    /// Ids of skipped cases that no machine can run, because their implementation does not compute
    /// the problem.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    #[serde(rename = "unsupported")]
    pub unsupported_case_ids: BTreeSet<String>,
    /// Ids of cases with wrong outputs or an error, each with the message; these cases have no
    /// time.
    pub failed: BTreeMap<String, CaseFailureReason>,
}

/// Record of one case that was verified and timed, with its samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseRecordWithSamples {
    /// Name of the workload: `family/operation`.
    pub workload: String,
    /// Revision of the workload's definition, by which changed workloads are not compared.
    #[serde(rename = "revision")]
    pub workload_revision: u32,
    /// The problem's axes.
    #[serde(rename = "problem")]
    pub axis_values: BTreeMap<String, String>,
    /// Name of the implementation.
    pub implementation: String,
    /// State of the caches when a launch of the case begins: "hot" or "cold".
    #[serde(rename = "cache")]
    pub cache_state: String,
    /// Declared bytes and operations of one launch of the case.
    pub work: DeclaredWorkRecord,
    /// Number of data items, such as tokens or images, that one launch computes, for a throughput;
    /// absent if the workload states none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "computed_samples")]
    pub data_items_per_launch: Option<u64>,
    /// Unit of the data items in which the throughput is stated.
    #[serde(default, skip_serializing_if = "ThroughputItemUnit::is_default_unit")]
    #[serde(rename = "sample_unit")]
    pub data_item_unit: ThroughputItemUnit,
    /// Shortest time of a launch by the measured ceilings, for the declared work; absent if not
    /// measured.
    pub limit: Option<ShortestLaunchTime>,
    /// Result of comparing the case's outputs with the reference.
    pub verification: OutputVerificationRecord,
    /// Kernels that the implementation loaded, by kernel build and symbol; recorded only in trials,
    /// and without kernels of libraries.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub kernels: KernelsLoadedForCase,
    /// Raw timings.
    pub samples: SamplesOfCase,
}

/// Costs of a launch besides its time on the device: memory, commands, host time, energy. A cost is
/// absent if it is unknown or does not apply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LaunchCostsBesidesDeviceTime {
    /// Device memory that the implementation declares for inputs, outputs and scratch, bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "device_bytes")]
    pub declared_device_bytes: Option<u64>,
    /// Device memory that was measured while the implementation was prepared and launched, bytes;
    /// equal for every cache state. Absent on the host, in trials that measure times, and if
    /// another process may have used the GPU's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_device_bytes: Option<u64>,
    /// Number of commands that one launch enqueues on the GPU, such as the nodes of its graph;
    /// absent if it cannot be counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "commands")]
    pub gpu_commands: Option<u64>,
    /// Host time of one launch call on an idle device, nanoseconds: the shortest of several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_launch_ns: Option<f64>,
    /// Energy of one launch, joules; absent in the samples of a run record, which have
    /// [`SamplesOfCase::energy`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "launch_j")]
    pub launch_energy_j: Option<f64>,
}

impl LaunchCostsBesidesDeviceTime {
    /// Fails if a number of bytes, commands, nanoseconds or joules in these costs is implausible.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_launch_costs_plausible(&self) -> Result<(), String> {
        let bytes = [
            ("device_bytes", self.declared_device_bytes),
            ("measured_device_bytes", self.measured_device_bytes),
        ];
        for (field, bytes) in bytes {
            bytes.map_or(Ok(()), |bytes| plausibility::check_bytes_plausible(field, bytes))?;
        }
        self.gpu_commands
            .map_or(Ok(()), |count| plausibility::check_count_plausible("commands", count))?;
        self.host_launch_ns.map_or(Ok(()), plausibility::check_host_launch_ns_plausible)?;
        match self.launch_energy_j {
            Some(joules) if !(joules > 0.0 && joules < 1e6) => {
                Err(format!("an energy of {joules} J"))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether all costs of the launch are absent.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Samples of a case: lists with one entry for each sample.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SamplesOfCase {
    /// Number of launches in each sample.
    #[serde(deserialize_with = "deserialize_exact_capacity")]
    #[serde(rename = "launches")]
    pub launches_per_sample: Vec<u64>,
    /// Time of all launches of each sample together, nanoseconds.
    #[serde(deserialize_with = "deserialize_exact_capacity")]
    #[serde(rename = "elapsed_ns")]
    pub elapsed_per_sample_ns: Vec<f64>,
    /// SM clock during each sample, MHz; empty if the device does not report it.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "deserialize_exact_capacity"
    )]
    #[serde(rename = "clock_mhz")]
    pub sm_clock_per_sample_mhz: Vec<f64>,
    /// Time by which the slowest GPU exceeded the fastest GPU over all launches of each sample,
    /// nanoseconds; empty for one GPU.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "deserialize_exact_capacity"
    )]
    #[serde(rename = "skew_ns")]
    pub gpu_skew_per_sample_ns: Vec<f64>,
    /// Conditions under which the samples of the case were taken.
    #[serde(default, skip_serializing_if = "CaseSampleConditions::are_all_defaults")]
    pub conditions: CaseSampleConditions,
    /// Costs of a launch besides its time on the device.
    #[serde(default, skip_serializing_if = "LaunchCostsBesidesDeviceTime::is_empty")]
    pub costs: LaunchCostsBesidesDeviceTime,
    /// Reason why CUPTI did not check that launches work on the timed stream only; absent if it
    /// did, on the host, and if an earlier process checked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "unrecorded")]
    pub reason_cupti_did_not_check: Option<String>,
    /// Power state of the GPU during the samples; absent in a process that only verifies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<CasePowerRecord>,
    /// Measured energy of one launch, or the reason why it is unknown; absent unless requested by
    /// `--energy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<LaunchEnergyOrReason>,
    /// Size of the GPU delay kernel that delayed the launches on purpose: nanoseconds of spinning,
    /// or bytes that were read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "delay_size")]
    pub delay_ns_or_bytes: Option<u64>,
}

/// Deserialises a list without unused capacity, because a record may contain millions of items.
fn deserialize_exact_capacity<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    list: D,
) -> Result<Vec<T>, D::Error> {
    let mut items = Vec::deserialize(list)?;
    items.shrink_to_fit();
    Ok(items)
}

impl SamplesOfCase {
    /// Returns the launch costs, with the measured energy added.
    pub fn launch_costs_with_energy(&self) -> LaunchCostsBesidesDeviceTime {
        let launch_j = self
            .energy
            .as_ref()
            .and_then(LaunchEnergyOrReason::measured_launch_energy)
            .map(|it| it.energy_per_launch_j);
        LaunchCostsBesidesDeviceTime { launch_energy_j: launch_j, ..self.costs }
    }

    /// Returns the nanoseconds per launch of each sample.
    pub fn launch_times_by_sample_ns(&self) -> Vec<f64> {
        self.elapsed_per_sample_ns
            .iter()
            .zip(&self.launches_per_sample)
            .map(|(elapsed, &launches)| elapsed / launches as f64)
            .collect()
    }

    /// Returns the median over the samples of the time by which the slowest GPU exceeds the
    /// fastest, nanoseconds per launch; `None` for one GPU.
    pub fn median_gpu_skew_per_launch_ns(&self) -> Option<f64> {
        let launches = self.launches_per_sample.iter().map(|&launches| launches as f64);
        let skews: Vec<f64> = self
            .gpu_skew_per_sample_ns
            .iter()
            .zip(launches)
            .map(|(skew, launches)| skew / launches)
            .collect();
        (!skews.is_empty()).then(|| crate::stats::median(&skews))
    }

    /// Fails if these samples contradict each other or contain implausible numbers.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_samples_plausible(&self) -> Result<(), String> {
        let times = self.elapsed_per_sample_ns.len();
        if self.launches_per_sample.len() != times {
            return Err(format!(
                "{} launch counts against {times} times",
                self.launches_per_sample.len()
            ));
        }
        if !self.sm_clock_per_sample_mhz.is_empty() && self.sm_clock_per_sample_mhz.len() != times {
            return Err(format!(
                "{} clocks against {times} times",
                self.sm_clock_per_sample_mhz.len()
            ));
        }
        if !self.gpu_skew_per_sample_ns.is_empty() && self.gpu_skew_per_sample_ns.len() != times {
            return Err(format!(
                "{} skews against {times} times",
                self.gpu_skew_per_sample_ns.len()
            ));
        }
        if let Some(skew_ns) = self
            .gpu_skew_per_sample_ns
            .iter()
            .zip(&self.elapsed_per_sample_ns)
            .find(|(skew, elapsed)| !(0.0..=2.0 * **elapsed + 1e6).contains(*skew))
        {
            return Err(format!("a skew of {} ns", skew_ns.0));
        }
        if self.launches_per_sample.is_empty() {
            return Err("no samples".to_owned());
        }
        if self.launches_per_sample.contains(&0) {
            return Err("a sample of no launches".to_owned());
        }
        self.conditions.check_conditions_plausible()?;
        self.costs.check_launch_costs_plausible()?;
        plausibility::check_count_plausible("delay_size", self.delay_ns_or_bytes.unwrap_or(0))?;
        let Some(launches) = self.number_of_launches_in_all_samples() else {
            return Err("more launches than can be counted".to_owned());
        };
        self.sm_clock_per_sample_mhz
            .iter()
            .try_for_each(|mhz| plausibility::check_sm_clock_mhz_plausible(*mhz))?;
        self.power.as_ref().map_or(Ok(()), CasePowerRecord::check_power_record_plausible)?;
        self.energy.as_ref().map_or(Ok(()), LaunchEnergyOrReason::check_energy_plausible)?;
        let mut times = self.launch_times_by_sample_ns().into_iter();
        times.try_for_each(|each| plausibility::check_launch_ns_plausible("a sample", each))?;
        plausibility::check_count_plausible("launches", launches)
    }

    /// Returns the number of launches in all samples together; `None` if the sum overflows.
    pub fn number_of_launches_in_all_samples(&self) -> Option<u64> {
        self.launches_per_sample.iter().copied().try_fold(0, u64::checked_add)
    }
}

impl BenchProcessRun {
    /// Makes the record of a run that starts now and has no cases yet, with default effort and seed
    /// 1.
    pub fn empty_run_starting_now(
        bench: &str,
        session: &str,
        environment: RunEnvironment,
        provenance: CommitAndChanges,
    ) -> BenchProcessRun {
        Self {
            bench: bench.to_owned(),
            session_name: session.to_owned(),
            package: None,
            cargo_invocation_id: None,
            start_time: super::current_time_with_milliseconds(),
            ended_normally: false,
            effort: "default".to_owned(),
            seed: 1,
            shard: None,
            plan: None,
            environment,
            hardware_facts_hash: None,
            provenance,
            commit_is_from_variable: false,
            anchors: None,
            limits: MeasuredDeviceLimits::default(),
            injected_delays_ns: BTreeMap::new(),
            executable_hash: None,
            wall_s_by_activity: BTreeMap::new(),
            wall_s_by_problem: BTreeMap::new(),
            telemetry: Vec::new(),
            cases: BTreeMap::new(),
            skipped: BTreeMap::new(),
            unsupported_case_ids: BTreeSet::new(),
            failed: BTreeMap::new(),
        }
    }

    /// Returns code, executable, seed and environment of the run.
    pub fn code_and_environment(&self) -> CodeAndEnvironmentOfRun<'_> {
        CodeAndEnvironmentOfRun {
            provenance: &self.provenance,
            executable_hash: self.executable_hash.as_deref(),
            seed: self.seed,
            environment: &self.environment,
        }
    }

    /// Returns whether the run may belong to a package; a run without recorded package may belong
    /// to any.
    pub fn may_belong_to_package(&self, package: &CargoPackageId) -> bool {
        self.package.as_ref().is_none_or(|own| own == package)
    }

    /// Returns the key of the run in a baseline, `<session>/<process>`.
    pub fn key_in_baseline(&self) -> String {
        format!("{}/{}", self.session_name, self.bench_name_with_shard())
    }

    /// Returns the message which states that the bench process was interrupted.
    pub fn message_of_interrupted_run(&self) -> String {
        format!("interrupted: bench `{}` did not get to its end", self.bench_name_with_shard())
    }

    /// Returns the name of the bench, followed by its shard if it has one: "attention",
    /// "attention-2-of-4".
    pub fn bench_name_with_shard(&self) -> String {
        bench_process_name_with_shard(&self.bench, self.shard)
    }

    /// Returns the injected delays as text, "CASE=NS CASE=NS", or "none".
    pub fn injected_delays_as_text(&self) -> String {
        let each: Vec<String> = self
            .injected_delays_ns
            .iter()
            .map(|(case, delay_ns)| format!("{case}={delay_ns}"))
            .collect();
        if each.is_empty() { "none".to_owned() } else { each.join(" ") }
    }
}

/// Returns the name of a bench process within its session: the bench's name, followed by its shard
/// if it has one.
pub fn bench_process_name_with_shard(bench: &str, shard: Option<ShardOfWork>) -> String {
    shard.map_or_else(
        || bench.to_owned(),
        |shard| format!("{bench}-{}", shard.label_for_file_name()),
    )
}

impl CaseRecordWithSamples {
    /// Fails if a fact or number in this case record is implausible, by the same checks as for a
    /// baseline ([`CaseSummaryOfRun::check_summary_plausible`](super::CaseSummaryOfRun)).
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn check_case_record_plausible(&self) -> Result<(), String> {
        if !["hot", "cold"].contains(&&*self.cache_state) {
            return Err(format!(
                "the cache is {}, not hot or cold",
                text::shortened_quotation(&self.cache_state)
            ));
        }
        self.samples.check_samples_plausible()?;
        self.work.check_declared_work_plausible()?;
        self.verification.check_verification_plausible()?;
        self.limit.as_ref().map_or(Ok(()), ShortestLaunchTime::check_limit_time_plausible)
    }

    /// Makes, for tests, a case record with these sample times, each of one launch.
    pub fn example_with_sample_times(elapsed_ns: Vec<f64>) -> CaseRecordWithSamples {
        Self {
            workload: "w/f".to_owned(),
            workload_revision: 1,
            axis_values: BTreeMap::new(),
            implementation: "cpu".to_owned(),
            cache_state: "hot".to_owned(),
            work: DeclaredWorkRecord {
                min_read_bytes: 8,
                min_write_bytes: 8,
                ..DeclaredWorkRecord::default()
            },
            data_items_per_launch: None,
            data_item_unit: ThroughputItemUnit::default(),
            limit: None,
            verification: OutputVerificationRecord {
                compared_elements: 1,
                total_elements: 1,
                ..OutputVerificationRecord::default()
            },
            kernels: KernelsLoadedForCase::new(),
            samples: SamplesOfCase {
                launches_per_sample: vec![1; elapsed_ns.len()],
                elapsed_per_sample_ns: elapsed_ns,
                ..SamplesOfCase::default()
            },
        }
    }
}

impl RecordFileType for BenchProcessRun {
    const SCHEMA: &'static str = "kernelgate-run";
    const SCHEMA_VERSION: u64 = 3;
    const OLDEST_READABLE_VERSION: u64 = 3;
    const FILE_KIND: &'static str = "run";
    const FIELDS_WITH_ANY_CHARACTERS: &'static [&'static str] = &["failed", "skipped"];

    fn check_record_plausible(&self) -> Result<(), String> {
        // The bench's name is checked, because it becomes a part of file names.
        text::check_is_plain_name(&self.bench).map_err(|problem| format!("bench {problem}"))?;
        if !text::is_portable_file_name(&self.session_name) {
            return Err(format!(
                "session `{}` is no plain name",
                text::shortened_quotation(&self.session_name)
            ));
        }
        text::check_is_rfc3339_time(&self.start_time)
            .map_err(|problem| format!("started: {problem}"))?;
        self.shard.map_or(Ok(()), ShardOfWork::check_shard_index_and_count)?;
        self.environment.check_environment_plausible()?;
        self.limits.check_limits_plausible()?;
        self.anchors.as_ref().map_or(Ok(()), ShardAnchorRecord::check_anchor_rates_plausible)?;
        for (case, delay_ns) in &self.injected_delays_ns {
            plausibility::check_count_plausible(&format!("the delay of {case}"), *delay_ns)?;
        }
        for (field, times) in
            [("spent_s", &self.wall_s_by_activity), ("problems_s", &self.wall_s_by_problem)]
        {
            for (name, seconds) in times {
                plausibility::check_wall_seconds_plausible(&format!("{field}: {name}"), *seconds)?;
            }
        }
        self.check_each_case_has_one_outcome()?;
        self.cases.iter().try_for_each(|(id, case)| {
            case.check_case_record_plausible().map_err(|why| format!("case {id}: {why}"))
        })
    }
}

impl BenchProcessRun {
    /// Fails if a case id is malformed, or if a case is recorded as timed and also as skipped or
    /// failed.
    fn check_each_case_has_one_outcome(&self) -> Result<(), String> {
        let Self { cases, skipped, failed, .. } = self;
        cases
            .keys()
            .chain(skipped.keys())
            .chain(failed.keys())
            .try_for_each(|id| check_case_id_text(id))?;
        let twice = |(id, other): (&String, &str)| Err(format!("case {id}: {other}"));
        let timed = |id: &&String| cases.contains_key(*id);
        let skipped_too = skipped.keys().find(timed).map(|id| (id, "timed and skipped"));
        let failed_too = failed.keys().find(timed).map(|id| (id, "timed and failed"));
        skipped_too.or(failed_too).map_or(Ok(()), twice)
    }
}

#[cfg(test)]
mod tests;
