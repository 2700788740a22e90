//! Describes the diagnosis rules for the generated reference page.

use super::super::finding::FindingSeverity;
use super::super::vendor_names::{GpuVendor, TraceVendorAndRecorder};
use crate::model::TraceRecorder;

/// Kind of records that a trace must contain for a diagnosis rule to answer its question.
#[derive(Debug, Clone, Copy)]
pub(super) enum RecordsNeededByRule {
    /// Any trace.
    Anything,
    /// GPU operations, and the host calls that launched them.
    Launches,
    /// Launch shapes of kernels, and the description of the GPU.
    Shapes,
    /// GPU operations, and page faults of managed memory.
    Migrations,
    /// Counters over time.
    Samples,
    /// Hardware counters of single kernel launches, recorded with these options of `ncu`.
    Metrics(&'static str),
    /// Ranges with declared work.
    DeclaredWork,
}

impl RecordsNeededByRule {
    /// Returns advice on which command records this data on NVIDIA GPUs.
    pub(super) fn advice_to_record_on_nvidia(self) -> String {
        let nsys = TraceVendorAndRecorder {
            vendor: GpuVendor::Nvidia,
            recorder: TraceRecorder::NsightSystems,
        };
        match self {
            Self::Anything => String::new(),
            Self::Launches => nsys.advice_to_record_launch_calls().to_owned(),
            Self::Shapes => nsys.advice_to_record_launch_shapes().to_owned(),
            Self::Migrations => nsys.advice_to_record_page_migrations().to_owned(),
            Self::Samples => nsys.advice_to_sample_hardware_counters().to_owned(),
            Self::Metrics(options) => format!("measure with ncu {options}, or --set full"),
            Self::DeclaredWork => "record with kernelgate profile CASE".to_owned(),
        }
    }
}

/// Entry about one diagnosis rule for the generated reference page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleReferenceEntry {
    /// Id of the rule and of its findings.
    pub id: &'static str,
    /// The question that the rule answers.
    pub question: &'static str,
    /// The condition, with its thresholds, under which the rule has a finding.
    pub condition_text: String,
    /// Highest severity that findings of the rule can have.
    pub highest_severity: FindingSeverity,
    /// Advice on how to record the data that the rule needs, on NVIDIA GPUs.
    pub record: String,
}
