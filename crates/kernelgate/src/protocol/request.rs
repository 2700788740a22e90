//! A request.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::record::TrialRequestToBench;
use crate::record::file::RecordFileType;

/// Request of the program `kernelgate` to a bench executable: the action, and the file for the
/// response.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchRequestFile {
    /// Path of the file to which the bench executable writes its response.
    #[serde(rename = "response")]
    pub response_path: PathBuf,
    /// Action that the bench executable shall carry out.
    pub action: RequestedBenchAction,
}

/// Action of a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestedBenchAction {
    /// Request: list the cases, and state which of them can run on this machine.
    #[serde(rename = "list")]
    ListCases,
    /// Request: compare the outputs of every case with the reference.
    #[serde(rename = "verify")]
    VerifyCases {
        /// Folder into which the inputs, outputs and reference of each verified case are written.
        #[serde(rename = "dump")]
        dump_folder: Option<PathBuf>,
    },
    /// Request: sum up the GPU time of the kernels in one launch of each case.
    #[serde(rename = "profile")]
    ProfileCases,
    /// Request: record, by CUPTI, the activity of process and GPU during launches of each case.
    #[serde(rename = "record")]
    RecordCuptiActivity(LaunchesToRecord),
    /// Request: compile every kernel for a GPU architecture, and report its registers, spills and
    /// occupancy.
    #[serde(rename = "resources")]
    ReportKernelResources {
        /// "sm_90a".
        #[serde(rename = "arch")]
        gpu_architecture: String,
        /// Regular expression for kernel names: only kernel builds with a matching kernel are
        /// compiled.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[serde(rename = "filter")]
        kernel_name_regex: Option<String>,
    },
    /// Request: measure how accurate timing by CUDA events is on this GPU.
    #[serde(rename = "timing")]
    MeasureTimingAccuracy {
        /// Part of the timing-accuracy report to measure; all parts if absent.
        part: Option<TimingAccuracyReportPart>,
    },
    /// Request: report the device and environment in which the cases would run.
    #[serde(rename = "environment")]
    ReportEnvironment,
    /// Request: return the Python programs that time other libraries' kernels for the same
    /// problems.
    #[serde(rename = "peers")]
    ReturnPeerPrograms,
    /// Request: verify and time the cases of one trial of a comparison.
    #[serde(rename = "trial")]
    RunTrial(Box<TrialRequestToBench>),
}

impl RequestedBenchAction {
    /// Returns the numbers of launches to record if the action is a full recording of launches.
    pub fn launches_to_record(&self) -> Option<LaunchesToRecord> {
        match self {
            Self::RecordCuptiActivity(repetitions) => Some(*repetitions),
            _ => None,
        }
    }
}

/// Numbers of unrecorded warm-up launches and of recorded launches of each case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LaunchesToRecord {
    /// Number of warm-up launches before the recorded ones; the bench chooses it if absent.
    #[serde(rename = "warm_up")]
    pub warm_up_launches: Option<u32>,
    /// Number of launches to record; the bench chooses it if absent.
    #[serde(rename = "steps")]
    pub recorded_launches: Option<u32>,
}

/// Part of the report on the accuracy of timing by CUDA events, as requested by
/// [`RequestedBenchAction::MeasureTimingAccuracy`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimingAccuracyReportPart {
    /// Compares event times of spin kernels with their known lengths.
    #[serde(rename = "spins")]
    SpinKernels,
    /// Compares event times of memory copies with CUPTI's record of the same copies.
    #[serde(rename = "cupti")]
    CopiesAgainstCupti,
    /// Compares event times of the selected cases with CUPTI's record of the same launches.
    #[serde(rename = "cases")]
    CasesAgainstCupti,
    /// Times memory reads with hot and with cold caches.
    #[serde(rename = "cold")]
    HotAndColdReads,
    /// Bandwidths and GEMMs.
    #[serde(rename = "limits")]
    DeviceLimits,
}

impl RecordFileType for BenchRequestFile {
    const SCHEMA: &'static str = "kernelgate-request";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "request";
    const FIELDS_WITH_ANY_CHARACTERS: &'static [&'static str] =
        &["response", "dump", "record", "verified", "inputs", "keep_outputs", "base_outputs"];

    fn check_record_plausible(&self) -> Result<(), String> {
        match &self.action {
            RequestedBenchAction::RunTrial(request) => {
                request.sampling.check_sampling_plan_plausible()
            }
            _ => Ok(()),
        }
    }
}
