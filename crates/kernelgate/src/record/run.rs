//! A process run: everything one bench process measured, with its environment.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Deserializer, Serialize};

use super::files::file::RecordType;
use super::files::text::{self, check_case_id};
use super::groups::shard::Shard;
use super::groups::shard_partition::BenchShardPlan;
use super::origin::RunOrigin;
use super::origin::environment::Environment;
use super::origin::package::CargoPackage;
use super::origin::provenance::Provenance;
use super::work::WorkRecord;
use crate::measure::SampleConditions;
use crate::measure::anchors::AnchorRecord;
use crate::measure::energy::LaunchEnergy;
use crate::measure::limits::{DeviceLimits, TimeLimit};
use crate::measure::plausibility;
use crate::measure::power::PowerRecord;
use crate::workload::SampleUnit;
use kernelgate_cuda::CaseFailure;
use kernelgate_cuda::driver::launch::used_kernels::UsedKernels;
use kernelgate_cuda::observe::telemetry::CardReading;

pub use super::verification::{AfterTiming, AllowedErrors, InputChange, VerificationRecord};

/// Start of the reason why a case did not begin: no time was left, or no device.
pub const NOT_RUN_PREFIX: &str = "not run: ";

/// Results of one bench process, including unmeasured cases with their reasons.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessRun {
    /// The bench binary.
    pub bench: String,
    /// Session of the run: all runs of one `cargo bench` have the same session.
    pub session: String,
    /// Package of the bench; absent if the process found no manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub package: Option<CargoPackage>,
    /// Id of the cargo process that started this process, from its start time and process id; it
    /// does not depend on the session's name; absent in trials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invocation: Option<String>,
    /// When the process started, RFC 3339, UTC.
    pub started: String,
    /// Whether the process got to its end; an interrupted run holds the cases it had finished.
    pub complete: bool,
    /// "quick", "default" or "thorough".
    pub effort: String,
    /// Seed of the inputs.
    pub seed: u64,
    /// Part of the selection that this process measured; absent if it measured the whole selection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<Shard>,
    /// Division of the problems among all shards; `shard` is one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<BenchShardPlan>,
    /// Environment of the process.
    pub environment: Environment,
    /// Digest of the machine ([`MachineFacts`](super::MachineFacts)), as `kernelgate doctor --save`
    /// records it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// Revision of the code.
    pub provenance: Provenance,
    /// Whether `KERNELGATE_COMMIT` stated the commit: then nobody checked that the executable was
    /// built from it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stated_commit: bool,
    /// Rates of fixed work, by which shards of several cards are compared; only in shards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anchors: Option<AnchorRecord>,
    /// The device's ceilings, as measured by this process.
    pub limits: DeviceLimits,
    /// Delays added to launches on purpose to test the gate: nanoseconds by case id. Delays that
    /// were added to launches, by case; times with a delay do not describe the code.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub delays: BTreeMap<String, u64>,
    /// Content hash of the executable; absent where its file could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub executable: Option<String>,
    /// Wall time of the process in seconds, by activity. The entries `whole` and `checks after
    /// timing` include activities nested inside them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub spent_s: BTreeMap<String, f64>,
    /// Wall time of each problem with all of its cases, seconds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub problems_s: BTreeMap<String, f64>,
    /// Readings of the GPU before the first case and after the last case; empty on the CPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub telemetry: Vec<CardReading>,
    /// Measured cases by id.
    pub cases: BTreeMap<String, CaseRecord>,
    /// Cases that cannot run here, with the reason.
    pub skipped: BTreeMap<String, String>,
    /// Skipped cases that no machine can run, because their implementation does not compute the
    /// problem.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub unsupported: BTreeSet<String>,
    /// Cases with wrong outputs or an error, with the message; they have no time.
    pub failed: BTreeMap<String, CaseFailure>,
}

/// A case that was verified and timed, with its samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseRecord {
    /// `family/operation`.
    pub workload: String,
    /// Revision of the workload's definition.
    pub revision: u32,
    /// The problem's axes.
    pub problem: BTreeMap<String, String>,
    /// The implementation.
    pub implementation: String,
    /// State of the caches when a launch begins: "hot" or "cold".
    pub cache: String,
    /// Declared work of one launch of the case.
    pub work: WorkRecord,
    /// Number of samples, such as tokens or images, that a launch computes, for a throughput;
    /// absent if the workload names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub computed_samples: Option<u64>,
    /// Unit of the samples in which throughput is stated.
    #[serde(default, skip_serializing_if = "SampleUnit::is_default_unit")]
    pub sample_unit: SampleUnit,
    /// Time that the measured ceilings allow for the declared work, if they were measured.
    pub limit: Option<TimeLimit>,
    /// Comparison of the outputs with the reference.
    pub verification: VerificationRecord,
    /// Kernels that the implementation loaded, by build and symbol; only in trials, and without
    /// kernels of libraries.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub kernels: UsedKernels,
    /// Raw timings.
    pub samples: CaseSamples,
}

/// Costs of a launch other than device time. A cost that is absent is unknown or does not apply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LaunchCosts {
    /// Device memory that the implementation declares, bytes: inputs, outputs and scratch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_bytes: Option<u64>,
    /// Measured device memory for preparing and launching the implementation, bytes; the same
    /// number for every cache state. Absent on the host, if another process used or may have used
    /// the card, and in trials that measure times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_device_bytes: Option<u64>,
    /// Number of commands that a launch puts into the device's queue, such as the nodes of its
    /// graph; absent if they cannot be counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commands: Option<u64>,
    /// Time of the host to start a launch on an idle device, nanoseconds: the shortest of a few.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_launch_ns: Option<f64>,
    /// Energy of a launch, joules; absent in samples, which have [`CaseSamples::energy`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch_j: Option<f64>,
}

impl LaunchCosts {
    /// Checks the facts that deserialising does not enforce.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn validate(&self) -> Result<(), String> {
        let bytes = [
            ("device_bytes", self.device_bytes),
            ("measured_device_bytes", self.measured_device_bytes),
        ];
        for (field, bytes) in bytes {
            bytes.map_or(Ok(()), |bytes| plausibility::check_bytes(field, bytes))?;
        }
        self.commands.map_or(Ok(()), |count| plausibility::check_count("commands", count))?;
        self.host_launch_ns.map_or(Ok(()), plausibility::check_host_ns)?;
        match self.launch_j {
            Some(joules) if !(joules > 0.0 && joules < 1e6) => {
                Err(format!("an energy of {joules} J"))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether no cost of a launch is known.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Raw times of a case: two lists with one entry for each sample.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CaseSamples {
    /// Launches in the sample.
    #[serde(deserialize_with = "deserialize_exact_capacity")]
    pub launches: Vec<u64>,
    /// Time of all launches of the sample together, nanoseconds.
    #[serde(deserialize_with = "deserialize_exact_capacity")]
    pub elapsed_ns: Vec<f64>,
    /// SM clock during each sample, MHz; empty if the device does not report it.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "deserialize_exact_capacity"
    )]
    pub clock_mhz: Vec<f64>,
    /// By how much the slowest GPU took longer than the fastest in each sample, for all its
    /// launches together, nanoseconds; empty for one GPU.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "deserialize_exact_capacity"
    )]
    pub skew_ns: Vec<f64>,
    /// Conditions under which the samples were taken.
    #[serde(default, skip_serializing_if = "SampleConditions::is_empty")]
    pub conditions: SampleConditions,
    /// Costs of a launch other than device time.
    #[serde(default, skip_serializing_if = "LaunchCosts::is_empty")]
    pub costs: LaunchCosts,
    /// Reason why no recording shows whether a launch works on another stream; absent if a
    /// recording shows it, on the host, and if an earlier process checked it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unrecorded: Option<String>,
    /// Power state of the card while the samples were taken; absent in the verification pass of a
    /// comparison, which measures no time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<PowerRecord>,
    /// Energy of a launch, if a pass measured it (`--energy`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<LaunchEnergy>,
    /// Size of what launches were delayed by on purpose on a GPU: nanoseconds of a spin, or bytes
    /// that were read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delay_size: Option<u64>,
}

/// Deserialises a list into exactly the memory of its items: a record may hold millions.
fn deserialize_exact_capacity<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    list: D,
) -> Result<Vec<T>, D::Error> {
    let mut items = Vec::deserialize(list)?;
    items.shrink_to_fit();
    Ok(items)
}

impl CaseSamples {
    /// Costs of a launch, with its energy.
    pub fn costs_with_energy(&self) -> LaunchCosts {
        let launch_j =
            self.energy.as_ref().and_then(LaunchEnergy::measured_energy).map(|it| it.launch_j);
        LaunchCosts { launch_j, ..self.costs }
    }

    /// Returns the nanoseconds of a launch in each sample.
    pub fn per_launch_ns(&self) -> Vec<f64> {
        self.elapsed_ns
            .iter()
            .zip(&self.launches)
            .map(|(elapsed, &launches)| elapsed / launches as f64)
            .collect()
    }

    /// Median difference between the slowest and the fastest GPU, nanoseconds a launch; `None` for
    /// one GPU.
    pub fn typical_skew_ns(&self) -> Option<f64> {
        let launches = self.launches.iter().map(|&launches| launches as f64);
        let skews: Vec<f64> =
            self.skew_ns.iter().zip(launches).map(|(skew, launches)| skew / launches).collect();
        (!skews.is_empty()).then(|| crate::stats::median(&skews))
    }

    /// Checks the facts that deserialising does not enforce.
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn validate(&self) -> Result<(), String> {
        let times = self.elapsed_ns.len();
        if self.launches.len() != times {
            return Err(format!("{} launch counts against {times} times", self.launches.len()));
        }
        if !self.clock_mhz.is_empty() && self.clock_mhz.len() != times {
            return Err(format!("{} clocks against {times} times", self.clock_mhz.len()));
        }
        if !self.skew_ns.is_empty() && self.skew_ns.len() != times {
            return Err(format!("{} skews against {times} times", self.skew_ns.len()));
        }
        if let Some(skew_ns) = self
            .skew_ns
            .iter()
            .zip(&self.elapsed_ns)
            .find(|(skew, elapsed)| !(0.0..=2.0 * **elapsed + 1e6).contains(*skew))
        {
            return Err(format!("a skew of {} ns", skew_ns.0));
        }
        if self.launches.is_empty() {
            return Err("no samples".to_owned());
        }
        if self.launches.contains(&0) {
            return Err("a sample of no launches".to_owned());
        }
        self.conditions.validate()?;
        self.costs.validate()?;
        plausibility::check_count("delay_size", self.delay_size.unwrap_or(0))?;
        let Some(launches) = self.total_launches() else {
            return Err("more launches than can be counted".to_owned());
        };
        self.clock_mhz.iter().try_for_each(|mhz| plausibility::check_clock_mhz(*mhz))?;
        self.power.as_ref().map_or(Ok(()), PowerRecord::validate)?;
        self.energy.as_ref().map_or(Ok(()), LaunchEnergy::validate)?;
        let mut times = self.per_launch_ns().into_iter();
        times.try_for_each(|each| plausibility::check_launch_ns("a sample", each))?;
        plausibility::check_count("launches", launches)
    }

    /// Launches of all samples together; `None` if the sum overflows.
    pub fn total_launches(&self) -> Option<u64> {
        self.launches.iter().copied().try_fold(0, u64::checked_add)
    }
}

impl ProcessRun {
    /// A run that starts now and has measured nothing yet, of effort default and seed 1.
    pub fn start_now(
        bench: &str,
        session: &str,
        environment: Environment,
        provenance: Provenance,
    ) -> ProcessRun {
        Self {
            bench: bench.to_owned(),
            session: session.to_owned(),
            package: None,
            invocation: None,
            started: super::millisecond_timestamp(),
            complete: false,
            effort: "default".to_owned(),
            seed: 1,
            shard: None,
            plan: None,
            environment,
            machine: None,
            provenance,
            stated_commit: false,
            anchors: None,
            limits: DeviceLimits::default(),
            delays: BTreeMap::new(),
            executable: None,
            spent_s: BTreeMap::new(),
            problems_s: BTreeMap::new(),
            telemetry: Vec::new(),
            cases: BTreeMap::new(),
            skipped: BTreeMap::new(),
            unsupported: BTreeSet::new(),
            failed: BTreeMap::new(),
        }
    }

    /// Returns the code, build, inputs and device of the run.
    pub fn origin(&self) -> RunOrigin<'_> {
        RunOrigin {
            provenance: &self.provenance,
            executable: self.executable.as_deref(),
            seed: self.seed,
            environment: &self.environment,
        }
    }

    /// Returns whether the run may belong to a package: a run that records no package may belong to
    /// any.
    pub fn may_be_of_package(&self, package: &CargoPackage) -> bool {
        self.package.as_ref().is_none_or(|own| own == package)
    }

    /// Key of the process run in a baseline, `<session>/<process>`.
    pub fn baseline_key(&self) -> String {
        format!("{}/{}", self.session, self.process_name_of_run())
    }

    /// Returns the message about a run that was interrupted.
    pub fn interrupted_message(&self) -> String {
        format!("interrupted: bench `{}` did not get to its end", self.process_name_of_run())
    }

    /// Name of the bench binary, followed by its shard if it has one: "attention",
    /// "attention-2-of-4".
    pub fn process_name_of_run(&self) -> String {
        process_name(&self.bench, self.shard)
    }

    /// "CASE=NS CASE=NS", or "none".
    pub fn delays_text(&self) -> String {
        let each: Vec<String> =
            self.delays.iter().map(|(case, delay_ns)| format!("{case}={delay_ns}")).collect();
        if each.is_empty() { "none".to_owned() } else { each.join(" ") }
    }
}

/// Name of a bench process among the processes of its session.
pub fn process_name(bench: &str, shard: Option<Shard>) -> String {
    shard.map_or_else(|| bench.to_owned(), |shard| format!("{bench}-{}", shard.shard_file_label()))
}

impl CaseRecord {
    /// Checks the facts that deserialising does not enforce, including everything that a baseline
    /// demands of the case ([`CaseRun::validate`](super::CaseRun::validate)).
    ///
    /// # Errors
    /// The error is a fragment of a sentence that names the problem.
    pub fn validate(&self) -> Result<(), String> {
        if !["hot", "cold"].contains(&&*self.cache) {
            return Err(format!(
                "the cache is {}, not hot or cold",
                text::start_of_quotation(&self.cache)
            ));
        }
        self.samples.validate()?;
        self.work.validate()?;
        self.verification.validate()?;
        self.limit.as_ref().map_or(Ok(()), TimeLimit::validate)
    }

    /// Makes a case with these samples of one launch each, for tests of code that reads records.
    pub fn untimed_samples(elapsed_ns: Vec<f64>) -> CaseRecord {
        Self {
            workload: "w/f".to_owned(),
            revision: 1,
            problem: BTreeMap::new(),
            implementation: "cpu".to_owned(),
            cache: "hot".to_owned(),
            work: WorkRecord { read_bytes: 8, write_bytes: 8, ..WorkRecord::default() },
            computed_samples: None,
            sample_unit: SampleUnit::default(),
            limit: None,
            verification: VerificationRecord {
                checked: 1,
                total: 1,
                ..VerificationRecord::default()
            },
            kernels: UsedKernels::new(),
            samples: CaseSamples {
                launches: vec![1; elapsed_ns.len()],
                elapsed_ns,
                ..CaseSamples::default()
            },
        }
    }
}

impl RecordType for ProcessRun {
    const SCHEMA: &'static str = "kernelgate-run";
    const SCHEMA_VERSION: u64 = 3;
    const OLDEST_VERSION: u64 = 3;
    const FILE_KIND: &'static str = "run";
    const FREE_TEXT_FIELDS: &'static [&'static str] = &["failed", "skipped"];

    fn validate(&self) -> Result<(), String> {
        // The bench's name becomes a part of file names.
        text::check_plain_name(&self.bench).map_err(|problem| format!("bench {problem}"))?;
        if !text::is_plain_file_name(&self.session) {
            return Err(format!(
                "session `{}` is no plain name",
                text::start_of_quotation(&self.session)
            ));
        }
        text::check_rfc3339_time(&self.started).map_err(|problem| format!("started: {problem}"))?;
        self.shard.map_or(Ok(()), Shard::validate)?;
        self.environment.validate()?;
        self.limits.validate()?;
        self.anchors.as_ref().map_or(Ok(()), AnchorRecord::validate)?;
        for (case, delay_ns) in &self.delays {
            plausibility::check_count(&format!("the delay of {case}"), *delay_ns)?;
        }
        for (field, times) in [("spent_s", &self.spent_s), ("problems_s", &self.problems_s)] {
            for (name, seconds) in times {
                plausibility::check_seconds(&format!("{field}: {name}"), *seconds)?;
            }
        }
        self.check_one_outcome_per_case()?;
        self.cases
            .iter()
            .try_for_each(|(id, case)| case.validate().map_err(|why| format!("case {id}: {why}")))
    }
}

impl ProcessRun {
    /// Accepts ids, each with one outcome: timed, skipped or failed.
    fn check_one_outcome_per_case(&self) -> Result<(), String> {
        let Self { cases, skipped, failed, .. } = self;
        cases
            .keys()
            .chain(skipped.keys())
            .chain(failed.keys())
            .try_for_each(|id| check_case_id(id))?;
        let twice = |(id, other): (&String, &str)| Err(format!("case {id}: {other}"));
        let timed = |id: &&String| cases.contains_key(*id);
        let skipped_too = skipped.keys().find(timed).map(|id| (id, "timed and skipped"));
        let failed_too = failed.keys().find(timed).map(|id| (id, "timed and failed"));
        skipped_too.or(failed_too).map_or(Ok(()), twice)
    }
}

#[cfg(test)]
mod tests;
