//! A request.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::record::TrialRequest;
use crate::record::file::RecordType;

/// The action that a bench executable carries out for the program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchRequest {
    /// Path of the response.
    pub response: PathBuf,
    /// Action to carry out.
    pub action: RequestedAction,
}

/// Action of a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestedAction {
    /// Request to list the cases and which of them can run on this machine.
    List,
    /// Request to compare the outputs of every case with its reference.
    Verify {
        /// Folder into which the inputs, outputs and reference of each case are written.
        dump: Option<PathBuf>,
    },
    /// Sum up the kernels of one launch of each case.
    Profile,
    /// Record the activity of the process and the GPU during launches of each case.
    Record(RecordedLaunches),
    /// Compile every kernel for an architecture and read its registers, spills and occupancy.
    Resources {
        /// "sm_90a".
        arch: String,
        /// Regular expression: only builds with a kernel whose name matches are compiled.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        filter: Option<String>,
    },
    /// Request to measure how exact event timing is on the GPU.
    Timing {
        /// Part of the report to measure; all parts if absent.
        part: Option<TimingReportPart>,
    },
    /// Request to report the device on which cases would run.
    Environment,
    /// Request for the programs that time other people's kernels for the same problems.
    Peers,
    /// Verify and time the cases of one trial of a comparison.
    Trial(Box<TrialRequest>),
}

impl RequestedAction {
    /// Repetitions of a recording, if full records are requested and not only a launch's sums.
    pub fn recorded(&self) -> Option<RecordedLaunches> {
        match self {
            Self::Record(repetitions) => Some(*repetitions),
            _ => None,
        }
    }
}

/// Number of launches of a case that are recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RecordedLaunches {
    /// Number of launches before the recorded ones; the bench chooses it if absent.
    pub warm_up: Option<u32>,
    /// Number of launches to record; the bench chooses the number if absent.
    pub steps: Option<u32>,
}

/// A part of [`RequestedAction::Timing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimingReportPart {
    /// Spins of known length.
    Spins,
    /// Copies, against CUPTI's record of the same launches.
    Cupti,
    /// Compares event times of the selected cases with CUPTI's record of the same launches.
    Cases,
    /// Reads with the caches hot and cold.
    Cold,
    /// Bandwidths and GEMMs.
    Limits,
}

impl RecordType for BenchRequest {
    const SCHEMA: &'static str = "kernelgate-request";
    const SCHEMA_VERSION: u64 = 1;
    const FILE_KIND: &'static str = "request";
    const FREE_TEXT_FIELDS: &'static [&'static str] =
        &["response", "dump", "record", "verified", "inputs", "keep_outputs", "base_outputs"];

    fn validate(&self) -> Result<(), String> {
        match &self.action {
            RequestedAction::Trial(request) => request.sampling.validate(),
            _ => Ok(()),
        }
    }
}
