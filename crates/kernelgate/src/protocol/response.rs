//! A response.

use std::collections::{BTreeMap, BTreeSet};

use kernelgate_cuda::observe::telemetry::CardReading;
use serde::{Deserialize, Serialize};

use super::recording::CaseRecording;
use crate::measure::accuracy::{EventAndCuptiTimeRow, HotAndColdReadRow, TimedSpinRow};
use crate::measure::limits::{DeviceLimits, LaunchOverhead};
use crate::measure::plausibility;
use crate::record::Environment;
use crate::record::file::RecordType;
use crate::record::resources::RunResources;
use crate::record::text::check_case_id;
use crate::trace::{HostPhaseTime, RecordedIntervalSummary};
use crate::verify::OutputErrors;

/// Response to a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchResponse {
    /// Name of the bench target.
    pub bench: String,
    /// Results of the action.
    pub answer: BenchResponseBody,
}

/// The answer of a bench binary to a requested action.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BenchResponseBody {
    /// Answer: the bench has none of the requested cases.
    NoMatch {
        /// Reason, as a sentence.
        reason: String,
        /// Ids, or parts of ids, that are close to the requested ones; best first.
        close: Vec<String>,
    },
    /// Answer: the action is not possible here, with a fragment that names the missing part.
    Refused(String),
    /// The cases.
    List(BenchListing),
    /// Answer: the comparison of each implementation's outputs with the reference.
    Verify(Vec<VerifiedCase>),
    /// Answer: the kernels of each case as the hardware recorded them, one case for each
    /// implementation.
    Profile(Vec<ProfiledCase>),
    /// Answer: registers, spills and shared memory of the kernels.
    Resources(ResourcesReport),
    /// How good timing is.
    Timing(Box<TimingMethodReport>),
    /// Environment of the cases.
    Environment(Box<Environment>),
    /// Programs for peers.
    Peers(Vec<PeerProgram>),
    /// The trial ended, and its run record is at the requested path.
    Trial,
}

/// Resources of the kernels of a bench binary, as the compiler reports them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ResourcesReport {
    /// Resources of the kernels that run on the architecture.
    pub resources: RunResources,
    /// Builds that the architecture cannot run, each with its requirement.
    pub left_out: Vec<String>,
    /// Hash of each kernel's machine code, by build and symbol.
    pub code: BTreeMap<String, String>,
    /// Hash of the source and the compiler of each kernel.
    pub sources: BTreeMap<String, String>,
}

/// Workloads, implementations and selected cases of a bench binary.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchListing {
    /// The backend on which cases run on this machine.
    pub backend: String,
    /// Reason why cases do not run on the other backend, as a fragment of a sentence.
    pub otherwise: String,
    /// The workloads.
    pub workloads: Vec<ListedProblem>,
    /// The selected cases, including skipped ones.
    pub cases: Vec<ListedCase>,
}

/// A workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ListedProblem {
    /// `family/operation`.
    pub name: String,
    /// One line.
    pub about: String,
    /// Axes of the workload: name, accepted values, meaning.
    pub axes: Vec<[String; 3]>,
    /// Implementations of the problem.
    pub implementations: Vec<ListedRow>,
}

/// An implementation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ListedRow {
    /// `cpu`, `cuda/tiled`.
    pub name: String,
    /// One line.
    pub about: String,
}

/// A case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ListedCase {
    /// Id of the case.
    pub case: String,
    /// Whether the case can run on this machine, was skipped or failed. Status of the case.
    pub status: CaseStatus,
    /// Why not, a fragment.
    pub reason: Option<String>,
    /// Whether no machine can run the case, because its implementation does not compute the
    /// problem.
    #[serde(default)]
    pub unsupported: bool,
    /// Declared operations of GEMMs; 0 if the case is skipped.
    pub matmul_flops: u64,
    /// Fewest bytes that the case moves, as declared; 0 if it is skipped.
    pub bytes: u64,
    /// Host memory at the peak, bytes; 0 if the case is skipped.
    pub host_bytes: u64,
    /// Device memory that the implementation declares, bytes; absent if it declares none.
    pub device_bytes: Option<u64>,
}

/// Status of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CaseStatus {
    /// The case ran with correct outputs, or can run.
    Ok,
    /// The case has wrong outputs, or failed with an error.
    Failed,
    /// The case cannot run on this machine.
    Skipped,
}

impl CaseStatus {
    /// Name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

/// Comparison of a case's outputs with the reference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VerifiedCase {
    /// Id of the case.
    pub case: String,
    /// Status of the case.
    pub status: CaseStatus,
    /// Number of elements that were compared; 0 if the case did not pass.
    pub checked: u64,
    /// Elements of the outputs; 0 if the case did not pass.
    pub total: u64,
    /// Largest |out - ref| over the largest |ref| of the outputs.
    pub max_error: f64,
    /// Relative L2 error of the outputs, ‖out - ref‖₂ / ‖ref‖₂.
    pub relative_l2: f64,
    /// Relative error that rounding the outputs to their dtypes causes.
    pub rounding: f64,
    /// Errors of each output, by name, if several outputs are compared within bounds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub by_output: BTreeMap<String, OutputErrors>,
    /// Identity of the inputs, which differs between seeds, as in [`VerificationRecord`]. The data
    /// set is present even if the case failed.
    ///
    /// [`VerificationRecord`]: crate::record::run::VerificationRecord::data_set
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_set: Option<String>,
    /// Hash of the inputs of a case whose outputs are known for only one seed, if `data_set` holds
    /// no hash; absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inputs: Option<String>,
    /// Whether a second launch gave the same bits: a fact, not a verdict. The field `repeatable` is
    /// absent if the case did not pass.
    pub repeatable: Option<bool>,
    /// Reason why the case failed or was skipped.
    pub reason: Option<String>,
    /// The kernels of the row that were launched on the GPU, each by file, macros and symbol as in
    /// records of resources: `attention/forward_flash DTYPE=Bf16 HEAD_DIM=64 CAUSAL=0`. Names of
    /// the kernels that ran; kernels of libraries and of other code are unknown.
    pub kernels: Vec<String>,
}

/// A case's kernels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProfiledCase {
    /// Id of the case.
    pub case: String,
    /// Status of the case.
    pub status: CaseStatus,
    /// Sums over the recorded launches; absent if the case failed, was skipped, or has no kernels.
    pub summary: Option<RecordedIntervalSummary>,
    /// Phases of the case by the host's clock, where no kernels were recorded.
    #[serde(default)]
    pub phases: Vec<HostPhaseTime>,
    /// Samples that a launch computes, for a rate; absent where its workload names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<u64>,
    /// Why it failed or was skipped, or what its phases do not show.
    pub reason: Option<String>,
    /// Everything that CUPTI recorded of the case, if it recorded kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recording: Option<Box<CaseRecording>>,
}

/// Measurements of the timing method itself; parts that were not requested, or cannot be measured,
/// are absent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TimingMethodReport {
    /// Environment of the measurements.
    pub environment: Environment,
    /// Readings of the card before and after the recording.
    pub telemetry: Vec<CardReading>,
    /// Measured cost of launching and timing.
    pub overhead: LaunchOverhead,
    /// Ceilings.
    pub limits: Option<DeviceLimits>,
    /// Comparison of CUDA events with spin kernels of known length.
    pub spins: Option<Vec<TimedSpinRow>>,
    /// Cold against hot.
    pub cold: Option<Vec<HotAndColdReadRow>>,
    /// Against CUPTI.
    pub cupti: Option<Vec<EventAndCuptiTimeRow>>,
    /// Measurements that were not possible, with the reasons, in sentences.
    pub notes: Vec<String>,
}

/// A Python program that times other people's kernels for the problems of a family.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerProgram {
    /// Family of the workloads: the first part of their names.
    pub family: String,
    /// Name of the file that is run.
    pub main: String,
    /// Files of the peer program by name.
    pub files: BTreeMap<String, String>,
}

impl RecordType for BenchResponse {
    const SCHEMA: &'static str = "kernelgate-response";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "response";
    const FREE_TEXT_FIELDS: &'static [&'static str] =
        &["reason", "close", "refused", "otherwise", "notes", "files", "names"];
    const ONE_LINE_FIELDS: &'static [&'static str] = CaseRecording::ONE_LINE_FIELDS;

    fn validate(&self) -> Result<(), String> {
        match &self.answer {
            BenchResponseBody::List(BenchListing { cases, .. }) => {
                check_case_ids(cases.iter().map(|case| &case.case))?;
                cases.iter().try_for_each(ListedCase::validate)
            }
            BenchResponseBody::Verify(cases) => {
                check_case_ids(cases.iter().map(|case| &case.case))?;
                cases.iter().try_for_each(VerifiedCase::validate)
            }
            BenchResponseBody::Profile(cases) => {
                check_case_ids(cases.iter().map(|case| &case.case))?;
                cases.iter().try_for_each(ProfiledCase::validate)
            }
            BenchResponseBody::Resources(report) => report.resources.validate(),
            BenchResponseBody::Timing(report) => report.validate(),
            BenchResponseBody::Environment(environment) => environment.validate(),
            BenchResponseBody::NoMatch { .. }
            | BenchResponseBody::Refused(_)
            | BenchResponseBody::Peers(_)
            | BenchResponseBody::Trial => Ok(()),
        }
    }
}

/// Checks that no case id occurs twice.
fn check_case_ids<'a>(mut ids: impl Iterator<Item = &'a String>) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    ids.try_for_each(|id| {
        check_case_id(id)?;
        if seen.insert(id) { Ok(()) } else { Err(format!("case `{id}` stands there twice")) }
    })
}

impl ListedCase {
    /// Checks the declared work and memory of a case.
    fn validate(&self) -> Result<(), String> {
        let Self { bytes, host_bytes, device_bytes, .. } = *self;
        let sizes = [
            ("bytes", bytes),
            ("host_bytes", host_bytes),
            ("device_bytes", device_bytes.unwrap_or(0)),
        ];
        let mut sizes = sizes.into_iter();
        sizes
            .try_for_each(|(field, bytes)| plausibility::check_bytes(field, bytes))
            .map_err(|why| format!("case `{}`: {why}", self.case))
    }
}

impl ProfiledCase {
    /// Checks that the times of a case are plausible.
    fn validate(&self) -> Result<(), String> {
        let numbers = || {
            self.summary.as_ref().map_or(Ok(()), RecordedIntervalSummary::validate)?;
            self.phases.iter().try_for_each(HostPhaseTime::validate)?;
            self.samples.map_or(Ok(()), |count| plausibility::check_count("samples", count))?;
            self.recording.as_ref().map_or(Ok(()), |recording| recording.validate())
        };
        numbers().map_err(|why: String| format!("case `{}`: {why}", self.case))
    }
}

impl TimingMethodReport {
    /// Checks that the times and ceilings of a profiled case are plausible.
    fn validate(&self) -> Result<(), String> {
        self.environment.validate()?;
        self.overhead.validate()?;
        self.limits.as_ref().map_or(Ok(()), DeviceLimits::validate)?;
        self.spins.iter().flatten().try_for_each(TimedSpinRow::validate)?;
        self.cold.iter().flatten().try_for_each(HotAndColdReadRow::validate)?;
        self.cupti.iter().flatten().try_for_each(EventAndCuptiTimeRow::validate)
    }
}

impl VerifiedCase {
    /// Checks that the numbers of a case are plausible.
    ///
    /// # Errors
    /// The error is a fragment of a message that names the case and the field.
    fn validate(&self) -> Result<(), String> {
        if self.checked > self.total {
            let Self { case, checked, total, .. } = self;
            return Err(format!("case `{case}`: {checked} of {total} elements checked"));
        }
        if self.status != CaseStatus::Ok {
            return Ok(());
        }
        let Self { max_error, relative_l2, rounding, .. } = *self;
        let all = OutputErrors { max_error, relative_l2, rounding };
        let mut errors = self.by_output.values().chain([&all]);
        errors
            .try_for_each(OutputErrors::validate)
            .map_err(|why| format!("case `{}`: {why}", self.case))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verified_case_example() -> VerifiedCase {
        VerifiedCase {
            case: "a/b".to_owned(),
            status: CaseStatus::Ok,
            checked: 10,
            total: 10,
            max_error: 0.5,
            relative_l2: 0.1,
            rounding: 0.0,
            by_output: BTreeMap::new(),
            data_set: None,
            inputs: None,
            repeatable: None,
            reason: None,
            kernels: Vec::new(),
        }
    }

    #[test]
    fn a_case_id_that_occurs_twice_in_a_response_is_refused() {
        let response = |cases: &[&str]| {
            let case =
                |id: &&str| VerifiedCase { case: (*id).to_owned(), ..verified_case_example() };
            let answer = BenchResponseBody::Verify(cases.iter().map(case).collect());
            BenchResponse { bench: "b".to_owned(), answer }.validate()
        };
        assert_eq!(response(&["a", "b"]), Ok(()));
        assert_eq!(response(&["a", "a"]).unwrap_err(), "case `a` stands there twice");
        assert_eq!(response(&["a", ""]).unwrap_err(), "a case without an id");
    }

    #[test]
    fn impossible_numbers_of_a_verified_case_are_refused() {
        let case = verified_case_example();
        assert_eq!(case.validate(), Ok(()));
        let refused = |case: VerifiedCase| case.validate().unwrap_err();
        let more = refused(VerifiedCase { checked: 20, ..case.clone() });
        assert_eq!(more, "case `a/b`: 20 of 10 elements checked");
        let negative = refused(VerifiedCase { max_error: -1.0, ..case.clone() });
        assert_eq!(negative, "case `a/b`: an error of -1");
        let infinite = refused(VerifiedCase { relative_l2: f64::INFINITY, ..case });
        assert_eq!(infinite, "case `a/b`: an error of inf");
    }
}
