//! A response.

use std::collections::{BTreeMap, BTreeSet};

use kernelgate_cuda::observe::telemetry::GpuCardReading;
use serde::{Deserialize, Serialize};

use super::recording::CuptiCaseRecording;
use crate::measure::accuracy::{
    EventAndCuptiTimeRow, HotAndColdReadTimesRow, SpinTimedByEventsRow,
};
use crate::measure::limits::{LaunchAndTimingOverhead, MeasuredDeviceLimits};
use crate::measure::plausibility;
use crate::record::RunEnvironment;
use crate::record::file::RecordFileType;
use crate::record::resources::ResourcesOfAllKernels;
use crate::record::text::check_case_id_text;
use crate::trace::{HostTimeOfPhase, RecordedKernelsSummary};
use crate::verify::ErrorsRelativeToReference;

/// Response of a bench executable to a request of the program `kernelgate`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchResponseFile {
    /// Name of the Cargo bench target that responds.
    #[serde(rename = "bench")]
    pub bench_name: String,
    /// Results of the requested action.
    pub answer: ResponseToBenchAction,
}

/// The result of an action that `kernelgate` requested from a bench executable.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ResponseToBenchAction {
    /// Response: the bench has none of the requested cases.
    #[serde(rename = "no_match")]
    NoMatchingCase {
        /// Reason why no case matches, as a sentence.
        #[serde(rename = "reason")]
        no_match_reason: String,
        /// Existing case ids, or parts of them, that resemble the requested ones; the best match is
        /// first.
        #[serde(rename = "close")]
        similar_case_ids: Vec<String>,
    },
    /// Response: the action is impossible here; the text names what is missing.
    #[serde(rename = "refused")]
    ActionImpossible(String),
    /// The cases.
    List(BenchListResponse),
    /// Response: for each case, the comparison of its outputs with the reference.
    Verify(Vec<CaseVerificationResponse>),
    /// Response: for each case, the kernels of one launch as CUPTI recorded them.
    Profile(Vec<CaseProfileResponse>),
    /// Response: registers, spills and shared memory of the kernels for an architecture.
    Resources(KernelResourcesReport),
    /// Response: the accuracy of timing by CUDA events on this GPU.
    Timing(Box<TimingAccuracyReport>),
    /// Response: machine, devices and build with which the cases would run.
    Environment(Box<RunEnvironment>),
    /// Programs for peers.
    Peers(Vec<PythonPeerProgram>),
    /// Response: the trial has ended, and its run record is at the requested path.
    #[serde(rename = "trial")]
    TrialEnded,
}

/// Registers, spills and shared memory of a bench executable's kernels, as the compiler reports
/// them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelResourcesReport {
    /// Resources of the kernels that can run on the requested GPU architecture.
    pub resources: ResourcesOfAllKernels,
    /// Kernel builds that the requested GPU architecture cannot run, each with its requirement.
    #[serde(rename = "left_out")]
    pub builds_unfit_for_architecture: Vec<String>,
    /// Hash of each kernel's machine code, by kernel build and symbol name.
    #[serde(rename = "code")]
    pub machine_code_hashes: BTreeMap<String, String>,
    /// Hash of each kernel's source and compiler options, by kernel build.
    #[serde(rename = "sources")]
    pub source_hashes: BTreeMap<String, String>,
}

/// Workloads, implementations and selected cases of a bench executable, in response to a list
/// request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchListResponse {
    /// Backend (CPU or CUDA) on which the cases run on this machine.
    pub backend: String,
    /// Reason why cases do not run on the other backend, as a part of a sentence.
    #[serde(rename = "otherwise")]
    pub reason_against_other_backend: String,
    /// The workloads.
    pub workloads: Vec<ListedWorkload>,
    /// The selected cases, including those that are skipped on this machine.
    pub cases: Vec<ListedBenchCase>,
}

/// A workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ListedWorkload {
    /// Name of the workload: `family/operation`.
    #[serde(rename = "name")]
    pub workload_name: String,
    /// Description of the workload in one line.
    #[serde(rename = "about")]
    pub description: String,
    /// Axes of the workload, each with its name, its accepted values and its meaning.
    pub axes: Vec<[String; 3]>,
    /// Implementations of the workload.
    pub implementations: Vec<ListedImplementation>,
}

/// An implementation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ListedImplementation {
    /// `cpu`, `cuda/tiled`.
    #[serde(rename = "name")]
    pub implementation_name: String,
    /// Description of the implementation in one line.
    #[serde(rename = "about")]
    pub description: String,
}

/// A case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ListedBenchCase {
    /// Id of the case.
    #[serde(rename = "case")]
    pub case_id: String,
    /// Whether the case can run on this machine, is skipped, or failed to prepare. Status of the
    /// listed case.
    pub status: BenchCaseStatus,
    /// Reason why the case cannot run on this machine, as a part of a sentence.
    #[serde(rename = "reason")]
    pub reason_not_runnable: Option<String>,
    /// Whether the case can run on no machine, because its implementation does not compute this
    /// problem.
    #[serde(default)]
    #[serde(rename = "unsupported")]
    pub runs_on_no_machine: bool,
    /// Declared matmul operations of one launch; 0 if the case is skipped.
    #[serde(rename = "matmul_flops")]
    pub matmul_flops_per_launch: u64,
    /// Declared minimum of bytes that one launch moves; 0 if the case is skipped.
    #[serde(rename = "bytes")]
    pub min_bytes_per_launch: u64,
    /// Peak host memory of the case, bytes; 0 if the case is skipped.
    #[serde(rename = "host_bytes")]
    pub peak_host_memory_bytes: u64,
    /// Device memory that the implementation declares for the case, bytes; absent if it declares
    /// none.
    #[serde(rename = "device_bytes")]
    pub declared_device_memory_bytes: Option<u64>,
}

/// Status of a listed, verified or profiled case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BenchCaseStatus {
    /// The case can run, or has run with correct outputs.
    Ok,
    /// The case has wrong outputs, or failed with an error.
    Failed,
    /// The case cannot run on this machine.
    Skipped,
}

impl BenchCaseStatus {
    /// Name in tables.
    pub const fn name_in_responses(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

/// Comparison of one case's outputs with the reference, in a response to a verify request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseVerificationResponse {
    /// Id of the case.
    #[serde(rename = "case")]
    pub case_id: String,
    /// Status of the recorded or profiled case.
    pub status: BenchCaseStatus,
    /// Number of output elements that were compared with the reference; 0 if the case did not pass.
    #[serde(rename = "checked")]
    pub compared_elements: u64,
    /// Total number of output elements; 0 if the case did not pass.
    #[serde(rename = "total")]
    pub output_elements: u64,
    /// Largest absolute error of the outputs, |out - ref|, divided by the largest |ref|.
    #[serde(rename = "max_error")]
    pub max_error_over_max_reference: f64,
    /// Relative L2 error of the outputs, ‖out - ref‖₂ / ‖ref‖₂.
    #[serde(rename = "relative_l2")]
    pub relative_l2_error: f64,
    /// Relative L2 error that only rounding the reference to the outputs' dtypes causes.
    #[serde(rename = "rounding")]
    pub rounding_relative_l2_error: f64,
    /// Errors by output name, if several outputs were compared with the reference within error
    /// bounds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[serde(rename = "by_output")]
    pub errors_by_output: BTreeMap<String, ErrorsRelativeToReference>,
    /// Hash that identifies the inputs, which differs between seeds, as in
    /// [`OutputVerificationRecord`]. This hash is present even if the case failed.
    ///
    /// [`OutputVerificationRecord`]: crate::record::run::OutputVerificationRecord::verified_data_set
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "data_set")]
    pub input_data_set_hash: Option<String>,
    /// Hash of the inputs of a case whose expected outputs are known for only one seed, if
    /// `input_data_set_hash` is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "inputs")]
    pub single_seed_inputs_hash: Option<String>,
    /// Whether a second launch returned the same output bits; this does not influence whether the
    /// case passes. Absent if the case did not pass verification.
    #[serde(rename = "repeatable")]
    pub repeated_launch_is_bit_equal: Option<bool>,
    /// Reason why the case failed or was skipped.
    #[serde(rename = "reason")]
    pub failure_or_skip_reason: Option<String>,
    /// Kernels that the case launched on the GPU, each by source file, macros and symbol name as in
    /// records of resources. `attention/forward_flash DTYPE=Bf16 HEAD_DIM=64 CAUSAL=0`. Only
    /// kernels that kernelgate compiled are named; kernels of libraries and of other code are
    /// missing.
    #[serde(rename = "kernels")]
    pub launched_kernels: Vec<String>,
}

/// A case's kernels.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseProfileResponse {
    /// Id of the case.
    #[serde(rename = "case")]
    pub case_id: String,
    /// Outcome of the verification: passed, failed or skipped.
    pub status: BenchCaseStatus,
    /// Sums over the recorded launches of the case; absent if the case failed, was skipped, or
    /// launched no kernels.
    pub summary: Option<RecordedKernelsSummary>,
    /// Times of the case's phases by the host clock, for a case without recorded kernels.
    #[serde(default)]
    pub phases: Vec<HostTimeOfPhase>,
    /// Number of data items that one launch computes, for a throughput; absent if the workload
    /// states none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[serde(rename = "samples")]
    pub items_per_launch: Option<u64>,
    /// Reason why the case failed or was skipped, or why its phases are incomplete.
    #[serde(rename = "reason")]
    pub reason_without_full_profile: Option<String>,
    /// Everything that CUPTI recorded of the case; absent if CUPTI recorded no kernels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recording: Option<Box<CuptiCaseRecording>>,
}

/// Accuracy of the timing method on this GPU; parts that were not requested or cannot be measured
/// are absent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TimingAccuracyReport {
    /// Machine, devices and build with which the accuracy was measured.
    pub environment: RunEnvironment,
    /// NVML's readings of the card before and after the measurements.
    pub telemetry: Vec<GpuCardReading>,
    /// Measured overhead of launching and timing, nanoseconds.
    pub overhead: LaunchAndTimingOverhead,
    /// Ceilings.
    pub limits: Option<MeasuredDeviceLimits>,
    /// Comparison of event times with spin kernels of known length.
    pub spins: Option<Vec<SpinTimedByEventsRow>>,
    /// Cold against hot.
    pub cold: Option<Vec<HotAndColdReadTimesRow>>,
    /// Against CUPTI.
    pub cupti: Option<Vec<EventAndCuptiTimeRow>>,
    /// Sentences that state which measurements were impossible, and why.
    #[serde(rename = "notes")]
    pub unmeasured_part_notes: Vec<String>,
}

/// A Python program that times other libraries' kernels for the problems of a workload family.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PythonPeerProgram {
    /// Family of workloads that the program times: the first part of their names.
    #[serde(rename = "family")]
    pub workload_family: String,
    /// Name of the Python file to run.
    #[serde(rename = "main")]
    pub main_file_name: String,
    /// Contents of the program's files by file name.
    #[serde(rename = "files")]
    pub file_contents_by_name: BTreeMap<String, String>,
}

impl RecordFileType for BenchResponseFile {
    const SCHEMA: &'static str = "kernelgate-response";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "response";
    const FIELDS_WITH_ANY_CHARACTERS: &'static [&'static str] =
        &["reason", "close", "refused", "otherwise", "notes", "files", "names"];
    const FIELDS_WITH_ONE_LINE_PER_ENTRY: &'static [&'static str] =
        CuptiCaseRecording::FIELDS_WITH_ONE_LINE_PER_ENTRY;

    fn check_record_plausible(&self) -> Result<(), String> {
        match &self.answer {
            ResponseToBenchAction::List(BenchListResponse { cases, .. }) => {
                check_case_ids_are_unique(cases.iter().map(|case| &case.case_id))?;
                cases.iter().try_for_each(ListedBenchCase::check_listed_case_plausible)
            }
            ResponseToBenchAction::Verify(cases) => {
                check_case_ids_are_unique(cases.iter().map(|case| &case.case_id))?;
                cases.iter().try_for_each(CaseVerificationResponse::check_verified_case_plausible)
            }
            ResponseToBenchAction::Profile(cases) => {
                check_case_ids_are_unique(cases.iter().map(|case| &case.case_id))?;
                cases.iter().try_for_each(CaseProfileResponse::check_case_profile_plausible)
            }
            ResponseToBenchAction::Resources(report) => {
                report.resources.check_kernel_numbers_plausible()
            }
            ResponseToBenchAction::Timing(report) => report.check_timing_accuracy_plausible(),
            ResponseToBenchAction::Environment(environment) => {
                environment.check_environment_plausible()
            }
            ResponseToBenchAction::NoMatchingCase { .. }
            | ResponseToBenchAction::ActionImpossible(_)
            | ResponseToBenchAction::Peers(_)
            | ResponseToBenchAction::TrialEnded => Ok(()),
        }
    }
}

/// Checks that every case id is well-formed and that none occurs twice.
fn check_case_ids_are_unique<'a>(mut ids: impl Iterator<Item = &'a String>) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    ids.try_for_each(|id| {
        check_case_id_text(id)?;
        if seen.insert(id) { Ok(()) } else { Err(format!("case `{id}` stands there twice")) }
    })
}

impl ListedBenchCase {
    /// Fails if a size in bytes of this listed case is implausible.
    fn check_listed_case_plausible(&self) -> Result<(), String> {
        let Self {
            min_bytes_per_launch: bytes,
            peak_host_memory_bytes: host_bytes,
            declared_device_memory_bytes: device_bytes,
            ..
        } = *self;
        let sizes = [
            ("bytes", bytes),
            ("host_bytes", host_bytes),
            ("device_bytes", device_bytes.unwrap_or(0)),
        ];
        let mut sizes = sizes.into_iter();
        sizes
            .try_for_each(|(field, bytes)| plausibility::check_bytes_plausible(field, bytes))
            .map_err(|why| format!("case `{}`: {why}", self.case_id))
    }
}

impl CaseProfileResponse {
    /// Fails if a time in the profile of a case is implausible.
    fn check_case_profile_plausible(&self) -> Result<(), String> {
        let numbers = || {
            self.summary
                .as_ref()
                .map_or(Ok(()), RecordedKernelsSummary::check_kernels_summary_plausible)?;
            self.phases.iter().try_for_each(HostTimeOfPhase::check_host_phase_plausible)?;
            self.items_per_launch
                .map_or(Ok(()), |count| plausibility::check_count_plausible("samples", count))?;
            self.recording.as_ref().map_or(Ok(()), |recording| recording.check_record_plausible())
        };
        numbers().map_err(|why: String| format!("case `{}`: {why}", self.case_id))
    }
}

impl TimingAccuracyReport {
    /// Fails if an environment, overhead, ceiling or time in this timing-accuracy report is
    /// implausible.
    fn check_timing_accuracy_plausible(&self) -> Result<(), String> {
        self.environment.check_environment_plausible()?;
        self.overhead.check_overheads_plausible()?;
        self.limits.as_ref().map_or(Ok(()), MeasuredDeviceLimits::check_limits_plausible)?;
        self.spins
            .iter()
            .flatten()
            .try_for_each(SpinTimedByEventsRow::check_spin_times_plausible)?;
        self.cold
            .iter()
            .flatten()
            .try_for_each(HotAndColdReadTimesRow::check_read_times_plausible)?;
        self.cupti
            .iter()
            .flatten()
            .try_for_each(EventAndCuptiTimeRow::check_event_and_cupti_times_plausible)
    }
}

impl CaseVerificationResponse {
    /// Fails if a number or an error in the verification of this case is implausible.
    ///
    /// # Errors
    /// The error is a fragment of a message that names the case and the field.
    fn check_verified_case_plausible(&self) -> Result<(), String> {
        if self.compared_elements > self.output_elements {
            let Self { case_id: case, compared_elements: checked, output_elements: total, .. } =
                self;
            return Err(format!("case `{case}`: {checked} of {total} elements checked"));
        }
        if self.status != BenchCaseStatus::Ok {
            return Ok(());
        }
        let Self {
            max_error_over_max_reference: max_error,
            relative_l2_error: relative_l2,
            rounding_relative_l2_error: rounding,
            ..
        } = *self;
        let all = ErrorsRelativeToReference { max_error, relative_l2, rounding_error: rounding };
        let mut errors = self.errors_by_output.values().chain([&all]);
        errors
            .try_for_each(ErrorsRelativeToReference::check_errors_plausible)
            .map_err(|why| format!("case `{}`: {why}", self.case_id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example_verified_case() -> CaseVerificationResponse {
        CaseVerificationResponse {
            case_id: "a/b".to_owned(),
            status: BenchCaseStatus::Ok,
            compared_elements: 10,
            output_elements: 10,
            max_error_over_max_reference: 0.5,
            relative_l2_error: 0.1,
            rounding_relative_l2_error: 0.0,
            errors_by_output: BTreeMap::new(),
            input_data_set_hash: None,
            single_seed_inputs_hash: None,
            repeated_launch_is_bit_equal: None,
            failure_or_skip_reason: None,
            launched_kernels: Vec::new(),
        }
    }

    #[test]
    fn a_case_id_that_occurs_twice_in_a_response_is_refused() {
        let response = |cases: &[&str]| {
            let case = |id: &&str| CaseVerificationResponse {
                case_id: (*id).to_owned(),
                ..example_verified_case()
            };
            let answer = ResponseToBenchAction::Verify(cases.iter().map(case).collect());
            BenchResponseFile { bench_name: "b".to_owned(), answer }.check_record_plausible()
        };
        assert_eq!(response(&["a", "b"]), Ok(()));
        assert_eq!(response(&["a", "a"]).unwrap_err(), "case `a` stands there twice");
        assert_eq!(response(&["a", ""]).unwrap_err(), "a case without an id");
    }

    #[test]
    fn implausible_numbers_of_a_verified_case_are_refused() {
        let case = example_verified_case();
        assert_eq!(case.check_verified_case_plausible(), Ok(()));
        let refused =
            |case: CaseVerificationResponse| case.check_verified_case_plausible().unwrap_err();
        let more = refused(CaseVerificationResponse { compared_elements: 20, ..case.clone() });
        assert_eq!(more, "case `a/b`: 20 of 10 elements checked");
        let negative = refused(CaseVerificationResponse {
            max_error_over_max_reference: -1.0,
            ..case.clone()
        });
        assert_eq!(negative, "case `a/b`: an error of -1");
        let infinite =
            refused(CaseVerificationResponse { relative_l2_error: f64::INFINITY, ..case });
        assert_eq!(infinite, "case `a/b`: an error of inf");
    }
}
